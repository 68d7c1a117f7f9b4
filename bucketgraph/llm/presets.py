"""Published model shapes by name, for running with random weights where no checkpoint is at hand.

Rules: the numbers are those of the released config.json files; `shrink` makes a smaller model of the same kind.
"""

from __future__ import annotations

import dataclasses

from bucketgraph.errors import ConfigError
from bucketgraph.llm.model_config import ModelConfig, RopeConfig, RopeScaling

PRESETS: dict[str, ModelConfig] = {
    "llama-3.2-1b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_position_embeddings=131072,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        torch_dtype="bfloat16",
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        max_position_embeddings=131072,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        torch_dtype="bfloat16",
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1000000.0),
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        max_position_embeddings=40960,
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
        torch_dtype="bfloat16",
    ),
    "qwen2.5-0.5b": ModelConfig(
        architecture="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1000000.0),
        tie_word_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
        max_position_embeddings=32768,
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
        torch_dtype="bfloat16",
    ),
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(100000.0),
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_position_embeddings=8192,
        eos_token_ids=(2,),
        bos_token_id=1,
        torch_dtype="bfloat16",
    ),
}


def preset(name: str) -> ModelConfig:
    """The shape of a released model by name. Raises ConfigError listing the names."""
    if name not in PRESETS:
        raise ConfigError("unknown model preset", given=repr(name), expected="one of " + ", ".join(PRESETS))
    return PRESETS[name]


def shrink(config: ModelConfig, *, num_layers: int | None = None, vocab_size: int | None = None) -> ModelConfig:
    """The same kind of model with fewer layers or tokens; token ids that no longer exist are dropped."""
    vocab = config.vocab_size if vocab_size is None else vocab_size
    bos = config.bos_token_id
    return dataclasses.replace(
        config,
        num_layers=config.num_layers if num_layers is None else num_layers,
        vocab_size=vocab,
        eos_token_ids=tuple(token for token in config.eos_token_ids if token < vocab),
        bos_token_id=bos if bos is not None and bos < vocab else None,
    )
