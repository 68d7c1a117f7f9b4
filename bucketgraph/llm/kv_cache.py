"""The paged KV cache: one tensor for all layers, and the pages of it that requests hold.

Page 0 belongs to nobody and stays zeros: block tables are padded with it, so a read past a request's pages finds
numbers that nothing wrote. Pages are handed out once and come back when a request leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bucketgraph.errors import ConfigError, InputError
from bucketgraph.llm.model_config import ModelConfig


def pages_to_fill(tokens: int, longest: int, page_size: int) -> int:
    """Pages that `tokens` may take as one request, or as few requests of at most `longest` tokens."""
    requests = -(-tokens // longest)
    return requests * -(-min(tokens, longest) // page_size)


class PagedKVCache:
    """`data [layers, 2, pages, kv_heads, page_size, head_dim]`: K at index 0, V at 1."""

    def __init__(
        self, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if pages < 2:
            raise ConfigError("the KV cache holds no page", given=f"{pages - 1} pages of {page_size} tokens")
        self.page_size = page_size
        shape = (config.num_layers, 2, pages, config.num_kv_heads, page_size, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._free = list(range(pages - 1, 0, -1))  # popped from the end: low pages first
        self.pages = pages

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each `[pages, kv_heads, page_size, head_dim]`."""
        return self.data[index, 0], self.data[index, 1]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that all requests together can hold."""
        return (self.pages - 1) * self.page_size

    def allocate(self, count: int) -> list[int]:
        """Raises InputError when fewer are free; then nothing was taken."""
        if count > len(self._free):
            raise InputError(
                "the KV cache is full",
                given=f"{count} pages wanted, {len(self._free)} free",
                hint="release finished batches, or give kv_cache more memory",
            )
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Take pages back. Their content is stale, and every reader masks by length."""
        self._free.extend(reversed(pages))
        pages.clear()

    @property
    def is_idle(self) -> bool:
        """Whether no request holds a page."""
        return len(self._free) == self.pages - 1
