"""`silu(gate) * up` over a row that holds both halves; silu is float32 inside and rounded before the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from . import pdl as chain


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """Of sums in float32, rounded to `dtype` as if a matmul had stored them."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def _swiglu(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    dtype = out.dtype.element_ty
    chain.wait(PDL)
    gate = tl.load(gate_up + row * 2 * F + col, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * F + F + col, mask=inside, other=0.0)
    tl.store(out + row * F + col, silu_times(gate, up, dtype).to(dtype), mask=inside)


def swiglu(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """`[T, 2F] -> [T, F]`: silu of the first half of each row times the second. `pdl`: as part of a chain (`pdl.py`).

    Raises ValueError for an odd width and for tensors that are not contiguous.
    """
    checks.floats(gate_up=gate_up)
    rows, both = gate_up.shape
    checks.require(both % 2 == 0, f"swiglu: given rows of {both}, expected an even width (gate, then up)")
    width = both // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(width), 1024)
    grid = rows, triton.cdiv(width, block)
    chain.launch(_swiglu, grid, gate_up, out, F=width, BLOCK=block, pdl=pdl, lean=False, num_warps=4)
    return out
