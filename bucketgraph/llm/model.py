"""The forward pass of both phases, over static shapes: what a bucket captures.

Rules: nothing here depends on a value, only on shapes; lengths, page tables and slots are device tensors. A padded
token has slot -1 (nothing is written), a padded row has length 0 (zeros are attended). Kernels are `kernels.ops`:
Triton on a GPU, plain torch elsewhere. Matmuls are the library's in `fast` numerics and our own in `invariant`, where
the KV split has a fixed size, too: then a row's bits depend on its request alone. Inputs stand beside what they feed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bucketgraph import kernels
from bucketgraph.config import InputSpec, OutputSpec
from bucketgraph.llm.kv_cache import PagedKVCache
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.projections import (
    Fused,
    Invariant,
    Library,
    Projections,
    Tiled,
    Ways,
    mixes,
)
from bucketgraph.llm.rope import cos_sin_table
from bucketgraph.llm.weights import ModelWeights

COUNTED_ROWS = 1024  # up to as many rows decode attention has counters from the start; more take new ones each time

Attend = Callable[[Tensor, int], Tensor]  # of qkv and the layer's place


@dataclass(frozen=True)
class Limits:
    """What bounds legal inputs; made-up ones and the self-check's paddings stay inside."""

    vocab: int
    context: int  # tokens of a request
    pages: int  # of the KV cache
    table_width: int  # columns of a block table


def _token_inputs(rows: str, limits: Limits) -> dict[str, InputSpec]:
    """What each token has. Only the slot says whether it is real; the rest of its padding may hold anything legal."""
    return {
        "input_ids": InputSpec(shape=(rows,), dtype="int64", pad=0, range=(0, limits.vocab), inert=True),
        "positions": InputSpec(shape=(rows,), dtype="int32", pad=0, range=(0, limits.context), inert=True),
        "slot_mapping": InputSpec(shape=(rows,), dtype="int64", pad="skip"),
    }


def _row_inputs(rows: str, limits: Limits) -> dict[str, InputSpec]:
    """What each request has. A length of 0 says that it is padding; `kv_lens` counts the tokens of this run, too."""
    pages = (0, limits.pages)
    return {
        "kv_lens": InputSpec(shape=(rows,), dtype="int32", pad=0),
        "block_tables": InputSpec(shape=(rows, limits.table_width), dtype="int32", pad=0, range=pages, inert=True),
        "temperature": InputSpec(shape=(rows,), dtype="float32", pad=0, inert=True),  # 0 is greedy: the cheapest row
        "top_k": InputSpec(shape=(rows,), dtype="int32", pad=0, inert=True),
        "top_p": InputSpec(shape=(rows,), dtype="float32", pad=1, inert=True),
        "seeds": InputSpec(shape=(rows,), dtype="int64", pad=0, inert=True),
    }


def prefill_inputs(limits: Limits) -> dict[str, InputSpec]:
    """Packed prompts: `tokens` rows of `requests` requests, each a prompt or a chunk of one."""
    ends = InputSpec(shape=("requests",), dtype="int32", pad="repeat_last")
    return {**_token_inputs("tokens", limits), "query_ends": ends, **_row_inputs("requests", limits)}


def decode_inputs(limits: Limits) -> dict[str, InputSpec]:
    """One token for each of `batch` requests."""
    return {**_token_inputs("batch", limits), **_row_inputs("batch", limits)}


def outputs(rows: str) -> dict[str, OutputSpec]:
    # A token is a choice between logits that may be rounded differently: the self-check compares the logits.
    return {"tokens": OutputSpec(shape=(rows,), check=False), "logits": OutputSpec(shape=(rows, "any"))}


class LanguageModel:
    """Weights, KV cache and RoPE table of a Llama- or Qwen-family model, and its two phases."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: PagedKVCache,
        max_model_len: int,
        numerics: Literal["fast", "invariant"] = "fast",
    ) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        device = weights.embed.device
        self._ops = kernels.ops(device)
        self._cos_sin = cos_sin_table(config, max_model_len, device)
        self._scale = config.head_dim**-0.5
        self._pdl = self._ops.pdl_supported(device)
        self._counters = torch.zeros(COUNTED_ROWS * config.num_heads, dtype=torch.int32, device=device)
        self._prefill = self._decode = Projections.all(Library(self._ops, self._pdl))
        self._split_size = 0
        self._ways: Ways | None = None  # of running matmuls, for warm-up to choose from
        if numerics == "invariant":
            self._prefill = Projections.all(Invariant(self._ops, "prefill"))
            self._decode = Projections.all(Invariant(self._ops, "decode"))
            # A size of the model's, not of a batch: at most 64 splits of the longest context, in whole tiles.
            self._split_size = max(256, -(-max_model_len // 64 // 64) * 64)
        elif device.type == "cuda":
            self._ways = self._make_ways(device, weights.embed.dtype)

    def prefill(
        self,
        input_ids: Tensor,  # [tokens]
        positions: Tensor,  # [tokens]
        slot_mapping: Tensor,  # [tokens]
        query_ends: Tensor,  # [requests]
        kv_lens: Tensor,  # [requests]
        block_tables: Tensor,  # [requests, width]
        projections: Projections | None = None,
        **sampling: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The next token of each request `[requests]` and its logits `[requests, vocab]`, from its last row."""

        def attend(qkv: Tensor, index: int) -> Tensor:
            k, v = self.cache.layer(index)
            args = (positions, self._cos_sin, k, v, slot_mapping, self.config.num_heads)
            q = self._ops.rope_and_write(qkv, *args, *self._head_norms(index), pdl=self._pdl)
            attended: Tensor = self._ops.prefill_attention(
                q, k, v, block_tables, query_ends, kv_lens, self._scale, pdl=self._pdl
            )
            return attended.flatten(1)

        hidden = self._layers(input_ids, attend, projections or self._prefill)
        last = (query_ends - 1).clamp_min(0)  # an empty or padded request reads a row that is there, and is ignored
        # Few rows in either phase, so the head is decode's.
        return self._next(hidden.index_select(0, last), projections or self._decode, kv_lens, sampling)

    def decode(
        self,
        input_ids: Tensor,  # [batch]
        positions: Tensor,  # [batch]
        slot_mapping: Tensor,  # [batch]
        kv_lens: Tensor,  # [batch]
        block_tables: Tensor,  # [batch, width]
        projections: Projections | None = None,
        **sampling: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The next token of each row `[batch]` and its logits `[batch, vocab]`."""
        projections = projections or self._decode
        counters = self._counters if len(input_ids) <= COUNTED_ROWS else None

        def attend(qkv: Tensor, index: int) -> Tensor:
            attended: Tensor = self._ops.decode_attention(
                qkv,
                positions,
                self._cos_sin,
                *self.cache.layer(index),
                slot_mapping,
                block_tables,
                kv_lens,
                self.config.num_heads,
                self._scale,
                *self._head_norms(index),
                split_size=self._split_size,
                counters=counters,
                pdl=self._pdl,
            )
            return attended

        return self._next(self._layers(input_ids, attend, projections), projections, kv_lens, sampling)

    def variants(self, phase: Callable[..., Any], rows: int, head_rows: int) -> dict[str, Callable[..., Any]]:
        """Functions equal to `prefill` or `decode` but for rounding, by name: what may serve a bucket of `rows`.

        `head_rows`: of them that have logits. `fast` numerics on a GPU; else none.
        """
        return {name: partial(phase, projections=mix) for name, mix in self.mixes(rows, head_rows).items()}

    def mixes(self, rows: int, head_rows: int) -> dict[str, Projections]:
        """Who may run the matmuls of so many rows, by name."""
        return {} if self._ways is None else mixes(self._ways, rows, head_rows)

    def _make_ways(self, device: torch.device, dtype: torch.dtype) -> Ways:
        ops, pdl = self._ops, self._pdl
        tiled = ops.tiled_supported(device) and dtype != torch.float32 and self.config.hidden_size % 8 == 0
        return Ways(
            Library(ops, pdl),
            Fused(ops, pdl),
            Fused(ops, pdl, "streamed") if dtype == torch.bfloat16 and ops.streamed_available() else None,
            Tiled(ops, pdl) if tiled else None,
        )

    def _layers(self, input_ids: Tensor, attend: Attend, by: Projections) -> Tensor:
        """All layers' sum `[rows, H]`, before the final norm."""
        eps = self.config.rms_norm_eps
        x = F.embedding(input_ids, self.weights.embed)
        for index, layer in enumerate(self.weights.layers):
            qkv = by.qkv.norm_linear(x, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
            x = by.o.linear_add(attend(qkv, index), layer.o, x)
            x = by.down.linear_add(by.gate_up.norm_gate_up(x, layer.post_norm, eps, layer.gate_up), layer.down, x)
        return x

    def _head_norms(self, index: int) -> tuple[Tensor | None, Tensor | None, float]:
        layer = self.weights.layers[index]
        return layer.q_norm, layer.k_norm, self.config.rms_norm_eps

    def _next(self, x: Tensor, by: Projections, kv_lens: Tensor, sampling: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights = self.weights
        logits = by.head.norm_linear(x, weights.final_norm, self.config.rms_norm_eps, weights.lm_head, None)
        # The position being sampled is the number of tokens before it: the same in both phases and any bucket.
        tokens: Tensor = self._ops.sample(
            logits,
            sampling["temperature"],
            sampling["top_k"],
            sampling["top_p"],
            sampling["seeds"],
            kv_lens,
            pdl=self._pdl,
        )
        return tokens, logits
