"""The forward pass of both phases, over static shapes: what a bucket captures.

Rules: nothing here depends on a value, only on shapes; lengths, page tables and slots are device tensors. A padded
token has slot -1 (nothing is written), a padded row has length 0 (zeros are attended). Matmuls are the library's; the
rest is `kernels.ops`: Triton on a GPU, plain torch elsewhere. The declared inputs stand beside the function they feed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from bucketgraph import kernels
from bucketgraph.config import InputSpec, OutputSpec
from bucketgraph.llm.kv_cache import PagedKVCache
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.rope import cos_sin_table
from bucketgraph.llm.weights import LayerWeights, ModelWeights

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _sampling_inputs(rows: str) -> dict[str, InputSpec]:
    return {
        "temperature": InputSpec(shape=(rows,), dtype="float32", pad=0),  # a padded row is greedy
        "top_k": InputSpec(shape=(rows,), dtype="int32", pad=0),
        "top_p": InputSpec(shape=(rows,), dtype="float32", pad=1),
        "seeds": InputSpec(shape=(rows,), dtype="int64", pad=0),
    }


def prefill_inputs(table_width: int) -> dict[str, InputSpec]:
    """Packed prompts: `tokens` rows of `requests` requests, each a prompt or a chunk of one."""
    return {
        "input_ids": InputSpec(shape=("tokens",), dtype="int64", pad=0),
        "positions": InputSpec(shape=("tokens",), dtype="int32", pad=0),
        "slot_mapping": InputSpec(shape=("tokens",), dtype="int64", pad="skip"),
        "query_ends": InputSpec(shape=("requests",), dtype="int32", pad="repeat_last"),
        "kv_lens": InputSpec(shape=("requests",), dtype="int32", pad=0),
        "block_tables": InputSpec(shape=("requests", table_width), dtype="int32", pad=0),
        **_sampling_inputs("requests"),
    }


def decode_inputs(table_width: int) -> dict[str, InputSpec]:
    """One token for each of `batch` requests. `kv_lens` counts the token itself."""
    return {
        "input_ids": InputSpec(shape=("batch",), dtype="int64", pad=0),
        "positions": InputSpec(shape=("batch",), dtype="int32", pad=0),
        "slot_mapping": InputSpec(shape=("batch",), dtype="int64", pad="skip"),
        "kv_lens": InputSpec(shape=("batch",), dtype="int32", pad=0),
        "block_tables": InputSpec(shape=("batch", table_width), dtype="int32", pad=0),
        **_sampling_inputs("batch"),
    }


def outputs(rows: str) -> dict[str, OutputSpec]:
    # A token is a choice between logits that may be rounded differently: the self-check compares the logits.
    return {"tokens": OutputSpec(shape=(rows,), check=False), "logits": OutputSpec(shape=(rows, "any"))}


class LanguageModel:
    """Weights, KV cache and RoPE table of a Llama- or Qwen-family model, and its two phases."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, cache: PagedKVCache, max_model_len: int) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        device = weights.embed.device
        self._ops = kernels.ops(device)
        self._cos_sin = cos_sin_table(config, max_model_len, device)
        self._scale = config.head_dim**-0.5

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

        hidden = self._layers(input_ids, positions, slot_mapping, attend)
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
            attended: Tensor = self._ops.decode_attention(q, k_cache, v_cache, block_tables, kv_lens, self._scale)
            return attended

        return self._next(self._layers(input_ids, positions, slot_mapping, attend), kv_lens, sampling)

    def _layers(self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, attend: Attend) -> Tensor:
        eps = self.config.rms_norm_eps
        residual = F.embedding(input_ids, self.weights.embed)  # [rows, H]
        update: Tensor | None = None  # what the last sublayer adds to the residual
        for index, layer in enumerate(self.weights.layers):
            hidden, residual = self._norm(update, residual, layer.input_norm)
            qkv = F.linear(hidden, layer.qkv, layer.qkv_bias)
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
            update = F.linear(attended.flatten(1), layer.o)
            hidden, residual = self._norm(update, residual, layer.post_norm)
            update = self._mlp(hidden, layer)
        return self._norm(update, residual, self.weights.final_norm)[0]

    def _norm(self, update: Tensor | None, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum and the sum itself."""
        eps = self.config.rms_norm_eps
        if update is None:
            return self._ops.rms_norm(residual, weight, eps), residual
        normed, total = self._ops.rms_norm(update, weight, eps, residual)
        return normed, total

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        return F.linear(self._ops.swiglu(F.linear(hidden, layer.gate_up)), layer.down)

    def _next(self, hidden: Tensor, kv_lens: Tensor, sampling: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, self.weights.lm_head)  # [rows, vocab]
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
