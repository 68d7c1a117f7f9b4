"""The cos/sin table holds what the models were trained with; transformers' rotary embedding is the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bucketgraph.errors import ConfigError
from bucketgraph.llm.model_config import RopeConfig, RopeScaling
from bucketgraph.llm.presets import preset
from bucketgraph.llm.rope import cos_sin_table, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: list[tuple[dict[str, Any], RopeScaling | None]] = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
    (LLAMA3, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
]


@pytest.mark.parametrize(("parameters", "scaling"), CASES, ids=["default", "linear", "llama3"])
def test_the_table_equals_transformers_rotary_embedding(
    parameters: dict[str, Any], scaling: RopeScaling | None
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={**parameters, "rope_theta": 500000.0},
    )
    positions = torch.cat((torch.arange(64), torch.arange(8150, 8250), torch.tensor([20000])))
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])  # [1, positions, D], both halves alike
    config = dataclasses.replace(preset("llama-3.1-8b"), rope=RopeConfig(500000.0, scaling))
    table = cos_sin_table(config, 20001, "cpu")[positions]
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], rtol=0, atol=1e-6)


def test_a_gguf_files_divisors_give_the_frequencies_of_llama3_scaling() -> None:
    config = preset("llama-3.1-8b")
    plain = inverse_frequencies(dataclasses.replace(config, rope=RopeConfig(500000.0)))
    divisors = tuple((plain / inverse_frequencies(config)).tolist())
    assert divisors[0] == 1.0 and divisors[-1] == 8.0
    stored = dataclasses.replace(config, rope=RopeConfig(500000.0, RopeScaling("factors", factors=divisors)))
    torch.testing.assert_close(inverse_frequencies(stored), inverse_frequencies(config), rtol=1e-6, atol=0)


def test_shape_dtype_and_the_row_of_position_zero() -> None:
    table = cos_sin_table(preset("smollm2-135m"), 5, "cpu")
    assert table.shape == (5, 64) and table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32


def test_no_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_positions"):
        cos_sin_table(preset("smollm2-135m"), 0, "cpu")
