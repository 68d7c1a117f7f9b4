"""Rotary position tables: cos and sin for every position, as the kernels read them.

Rules: one row per position, first half cos, second half sin (rotate-half convention: dimension i pairs with i + D/2);
float32 throughout and made on the CPU, so the table's bits do not depend on the device that uses it.
"""

from __future__ import annotations

import math

import torch

from bucketgraph.errors import ConfigError
from bucketgraph.llm.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, scaling applied: [D/2] float32 on the CPU."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope.theta**exponents)
    scaling = config.rope.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(plain, scaling)


def cos_sin_table(config: ModelConfig, max_positions: int, device: torch.device | str) -> torch.Tensor:
    """[max_positions, D] float32 on `device`: columns 0..D/2-1 hold cos, D/2..D-1 hold sin. Raises ConfigError."""
    if max_positions <= 0:
        raise ConfigError("max_positions", given=max_positions, expected="a positive number of positions")
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(config)[None, :]  # [positions, D/2]
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3: short wavelengths stay, long ones are divided by `factor`, those between are blended linearly."""
    trained = scaling.original_max_position_embeddings
    turns = trained / (2 * math.pi / plain)  # full turns that a pair makes within the trained context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain
