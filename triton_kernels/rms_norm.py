"""RMS norm, one row per program.

Rounds where transformers' LlamaRMSNorm rounds: the normalised row, and the product with the weight. Statistics are
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from . import pdl as chain


@triton.jit
def _rms_norm(x, weight, y, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * H
    col = tl.arange(0, BLOCK)
    inside = col < H
    dtype = y.dtype.element_ty
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    chain.wait(PDL)
    v = tl.load(x + row + col, mask=inside, other=0.0).to(tl.float32)
    normed = (v * tl.rsqrt(tl.sum(v * v, 0) / H + eps)).to(dtype).to(tl.float32)
    tl.store(y + row + col, (normed * w).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False, lean: bool = True) -> Tensor:
    """RMS norm of `x [T, H]` times `weight [H]`. `pdl`, `lean`: as part of a chain (`pdl.py`).

    Raises ValueError for differing dtypes or shapes and for tensors that are not contiguous.
    """
    rows, width = x.shape
    checks.floats(x=x, weight=weight)
    checks.require(
        tuple(weight.shape) == (width,) and width <= 32768,
        f"rms_norm: given x {tuple(x.shape)}, weight {tuple(weight.shape)}, expected [T, H], [H] with H up to 32768",
    )
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    constants = {"H": width, "BLOCK": block, "num_warps": warps}
    chain.launch(_rms_norm, (rows,), x, weight, y, eps, **constants, pdl=pdl, lean=lean)
    return y
