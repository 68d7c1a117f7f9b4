"""The paged KV cache: one tensor for all layers, and the pages of it that requests hold.

Page 0 belongs to nobody and stays zeros: block tables are padded with it, so a read past a request's pages finds
numbers that nothing wrote. Pages are handed out once and come back when a request leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

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
        self._free = list(range(pages - 1, 0, -1))  # free pages, popped from the end: low ones first
        self.pages = pages

    def like(self) -> PagedKVCache:
        """Another one of the same shape, empty. Raises torch.OutOfMemoryError."""
        made = copy(self)
        made.data, made._free = torch.zeros_like(self.data), list(range(self.pages - 1, 0, -1))
        return made

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each `[pages, kv_heads, page_size, head_dim]`."""
        return self.data[index, 0], self.data[index, 1]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def ledger(self) -> list[int]:
        """The free pages, as one object that goes with the memory."""
        return self._free

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
        kept = len(self._free) - count
        taken = self._free[kept:]
        del self._free[kept:]
        return taken[::-1]

    def release(self, pages: list[int]) -> None:
        """Take pages back. Their content is stale, and every reader masks by length."""
        give_back(self._free, pages)

    @property
    def is_idle(self) -> bool:
        """Whether no request holds a page."""
        return len(self._free) == self.pages - 1

    def exchange(self, other: PagedKVCache, move: Callable[[Tensor], Tensor]) -> None:
        """Swap memory and pages with another cache of the same shape; both objects stay what others hold.

        Args:
            move: gives `data` the memory of the tensor, and returns what it had.
        """
        self._free, other._free = other._free, self._free
        try:
            other.data.data = move(other.data)
        except BaseException:
            self._free, other._free = other._free, self._free
            raise


def give_back(ledger: list[int], pages: list[int]) -> None:
    """Pages to the free ones of the memory that they lie in, which may not be the cache's at the moment."""
    ledger.extend(reversed(pages))
    pages.clear()
