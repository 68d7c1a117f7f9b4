"""Milliseconds of a launch from a model's shape and a device's speeds, where nothing was measured.

    time = weight bytes / bandwidth + operations / compute

The sum, not the larger of the two: it assumes no overlap, so it lies above the roofline of Williams, Waterman and
Patterson ("Roofline", CACM 52(4), 2009) by at most a factor of two, and it rises everywhere.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal

import numpy as np

from bucketgraph.errors import ConfigError
from bucketgraph.llm.model_config import ModelConfig, load_config
from bucketgraph.llm.presets import PRESETS, preset
from bucketgraph.planner.costs import CostCurve, Floats
from bucketgraph.planner.readers import Integers

# One NVIDIA H200, dense bf16: https://www.nvidia.com/en-us/data-center/h200/ (the page's 1,979 TFLOPS are for sparse).
BANDWIDTH_GB_S = 4800.0
COMPUTE_TFLOP_S = 989.0
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Shape = Literal["padded", "packed", "decode"]


def model_shape(name: str) -> ModelConfig:
    """A preset by name (`llama-3.1-8b`, `random:llama-3.1-8b`), or a model's folder or file. Raises as they do."""
    short = name.removeprefix("random:")
    return preset(short) if short in PRESETS or name != short else load_config(name)


def roofline(config: ModelConfig, bandwidth_gb_s: float, compute_tflop_s: float, shape: Shape) -> CostCurve:
    """A curve for one of a model's launches.

    Args:
        shape: what the sizes mean. `padded`: tokens of one prompt, or batch and tokens, with attention over the padded
            length; `packed`: tokens of several prompts whose attention follows their own lengths, so padding does not
            cost any; `decode`: sequences, one token each.

    Raises:
        ConfigError: a speed that is not above 0.
    """
    for name, speed in (("bandwidth", bandwidth_gb_s), ("compute", compute_tflop_s)):
        if not (isfinite(speed) and speed > 0):
            raise ConfigError(f"{name} is out of range", given=speed, expected="above 0")
    width = config.num_heads * config.head_dim
    layer = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    body = config.num_layers * layer
    read_ms = (body + head) * _BYTES.get(config.torch_dtype or "", 2) / (bandwidth_gb_s * 1e6)

    def cost(sizes: Integers) -> Floats:
        real = sizes.astype(np.float64)
        rows = real[:, 0] if real.shape[1] == 2 or shape == "decode" else np.ones(len(real))
        operations = 2.0 * body * real.prod(axis=1) + 2.0 * head * rows
        if shape == "padded":  # causal: half of the 4 * width * length**2 of both products
            operations += 2.0 * config.num_layers * width * rows * real[:, -1] ** 2
        return np.asarray(read_ms + operations / (compute_tflop_s * 1e9))

    model = f"{config.num_layers} layers, {body + head:,} weights"
    name = f"roofline of {model}, {bandwidth_gb_s:g} GB/s, {compute_tflop_s:g} TFLOP/s"
    return CostCurve(name, "ms", cost)
