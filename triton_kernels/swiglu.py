"""`silu(gate) * up` over a row that holds both halves; silu is float32 inside and rounded before the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks


@triton.jit
def _swiglu(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * F + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + col, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * F + col, (silu * up).to(dtype), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """`[T, 2F] -> [T, F]`: the silu of the first half of each row times the second half.

    Raises ValueError for an odd width and for tensors that are not contiguous.
    """
    checks.floats(gate_up=gate_up)
    rows, both = gate_up.shape
    checks.require(both % 2 == 0, f"swiglu: given rows of {both}, expected an even width (gate, then up)")
    width = both // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(width), 1024)
    _swiglu[(rows, triton.cdiv(width, block))](gate_up, out, F=width, BLOCK=block, num_warps=4)
    return out
