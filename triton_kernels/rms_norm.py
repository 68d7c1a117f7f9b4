"""RMS norm with an optional residual addition, one row per program.

Rounds where transformers' LlamaRMSNorm rounds: the sum with the residual, the normalised row, and the product with
the weight. Statistics are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks


@triton.jit
def _rms_norm(x, residual, weight, y, new_residual, eps, H: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    col = tl.arange(0, BLOCK)
    inside = col < H
    dtype = y.dtype.element_ty
    v = tl.load(x + row + col, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        v += tl.load(residual + row + col, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(dtype)
        tl.store(new_residual + row + col, rounded, mask=inside)
        v = rounded.to(tl.float32)
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    normed = (v * tl.rsqrt(tl.sum(v * v, 0) / H + eps)).to(dtype).to(tl.float32)
    tl.store(y + row + col, (normed * w).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of `x [T, H]` times `weight [H]`; with `residual [T, H]`, of their sum: `(y, new_residual)`.

    Raises ValueError for differing dtypes or shapes and for tensors that are not contiguous.
    """
    rows, width = x.shape
    other = x if residual is None else residual
    checks.floats(x=x, weight=weight, residual=other)
    checks.require(
        other.shape == x.shape and tuple(weight.shape) == (width,) and width <= 32768,
        f"rms_norm: given x {tuple(x.shape)}, residual {tuple(other.shape)}, weight {tuple(weight.shape)}, "
        f"expected [T, H], the same, [H] with H of at most 32768",
    )
    y = torch.empty_like(x)
    new_residual = y if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x,
        other,
        weight,
        y,
        new_residual,
        eps,
        H=width,
        BLOCK=block,
        RESIDUAL=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
    return y if residual is None else (y, new_residual)
