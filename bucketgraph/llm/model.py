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
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from bucketgraph import kernels
from bucketgraph.config import InputSpec, OutputSpec
from bucketgraph.llm.kv_cache import PagedKVCache
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.rope import cos_sin_table
from bucketgraph.llm.weights import ModelWeights

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Linear = Callable[..., Tensor]


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
        self._linear: dict[str, Linear] = {"prefill": F.linear, "decode": F.linear}
        self._split_size = 0
        if numerics == "invariant":
            self._linear = {phase: partial(self._ops.linear, phase=phase) for phase in self._linear}
            # A size of the model's, not of a batch: at most 64 splits of the longest context, in whole tiles.
            self._split_size = max(256, -(-max_model_len // 64 // 64) * 64)

    def prefill(
        self,
        input_ids: Tensor,  # [tokens]
        positions: Tensor,  # [tokens]
        slot_mapping: Tensor,  # [tokens]
        query_ends: Tensor,  # [requests]
        kv_lens: Tensor,  # [requests]
        block_tables: Tensor,  # [requests, width]
        **sampling: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The next token of each request `[requests]` and its logits `[requests, vocab]`, from its last row."""

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            attended: Tensor = self._ops.prefill_attention(
                q, k_cache, v_cache, block_tables, query_ends, kv_lens, self._scale
            )
            return attended

        hidden = self._layers(input_ids, positions, slot_mapping, attend, self._linear["prefill"])
        last = (query_ends - 1).clamp_min(0)  # an empty or padded request reads a row that is there, and is ignored
        return self._next(hidden.index_select(0, last), kv_lens, sampling)

    def decode(
        self,
        input_ids: Tensor,  # [batch]
        positions: Tensor,  # [batch]
        slot_mapping: Tensor,  # [batch]
        kv_lens: Tensor,  # [batch]
        block_tables: Tensor,  # [batch, width]
        **sampling: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The next token of each row `[batch]` and its logits `[batch, vocab]`."""

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            attended: Tensor = self._ops.decode_attention(
                q, k_cache, v_cache, block_tables, kv_lens, self._scale, split_size=self._split_size
            )
            return attended

        hidden = self._layers(input_ids, positions, slot_mapping, attend, self._linear["decode"])
        return self._next(hidden, kv_lens, sampling)

    def _layers(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, attend: Attend, linear: Linear
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        residual = F.embedding(input_ids, self.weights.embed)  # [rows, H]
        update: Tensor | None = None  # what the last sublayer adds to the residual
        for index, layer in enumerate(self.weights.layers):
            hidden, residual = self._norm(update, residual, layer.input_norm)
            qkv = linear(hidden, layer.qkv, layer.qkv_bias)
            k_cache, v_cache = self.cache.layer(index)
            q = self._ops.rope_and_write(
                qkv,
                positions,
                self._cos_sin,
                k_cache,
                v_cache,
                slot_mapping,
                self.config.num_heads,
                layer.q_norm,
                layer.k_norm,
                eps,
            )
            attended = attend(q, k_cache, v_cache)  # [rows, heads, D]
            update = linear(attended.flatten(1), layer.o)
            hidden, residual = self._norm(update, residual, layer.post_norm)
            update = linear(self._ops.swiglu(linear(hidden, layer.gate_up)), layer.down)
        return self._norm(update, residual, self.weights.final_norm)[0]

    def _norm(self, update: Tensor | None, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum and the sum itself."""
        eps = self.config.rms_norm_eps
        if update is None:
            return self._ops.rms_norm(residual, weight, eps), residual
        normed, total = self._ops.rms_norm(update, weight, eps, residual)
        return normed, total

    def _next(self, hidden: Tensor, kv_lens: Tensor, sampling: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self._linear["decode"](hidden, self.weights.lm_head)  # [rows, vocab]; few rows in either phase
        # The position being sampled is the number of tokens before it: the same in both phases and any bucket.
        tokens: Tensor = self._ops.sample(
            logits,
            sampling["temperature"],
            sampling["top_k"],
            sampling["top_p"],
            sampling["seeds"],
            kv_lens,
        )
        return tokens, logits
