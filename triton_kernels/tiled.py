"""Gate and up projection of up to 256 rows with silu and product, through tensor descriptors, in a chain of launches.

A program owns a tile of x's rows times the same columns of both matrices, so that neither is stored. It asks for its
first weights in L2 before it waits for its predecessor, which the library's matmuls cannot. A row's bits do not depend
on the others beside it, but do on the tile, which follows the number of rows. On an H200 norm, gate-up and SwiGLU of
Llama-3.1-8B at 64, 128 and 256 rows take 64.7, 69.4 and 100.0 us so, and 68.6, 75.7 and 102.3 with the
library's matmul. QKV, O and down took 13 to 36 % longer this way than by the library, with K whole or shared out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import checks
from . import pdl as chain
from .swiglu import silu_times

MAX_ROWS = 256
LINES = 4  # of each weight row that are asked into L2 early

Tile = tuple[int, int, int, int, int]  # BM, BN, BK, warps, stages


@triton.jit(do_not_specialize=["rows"])
def _tiled(
    x_rows,  # descriptor of x [rows, K]
    w_rows,  # descriptor of the weight
    weight,  # [2 N, K]
    y,  # [rows, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    row_blocks = tl.cdiv(rows, BM)  # those of the same weights run together
    first_row, first_col = tl.program_id(0) % row_blocks * BM, tl.program_id(0) // row_blocks * BN
    col = first_col + tl.arange(0, BN)
    if PDL:
        PER_LINE: tl.constexpr = 1024 // dtype.primitive_bitwidth
        line = tl.minimum(tl.arange(0, LINES) * PER_LINE, K - 1)
        near = weight + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K + line[None, :]
        chain.prefetch(near)
        chain.prefetch(near + N * K)
    chain.wait(PDL)

    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        v = x_rows.load([first_row, k])  # zeros where there is nothing
        gate = tl.dot(v, tl.trans(w_rows.load([first_col, k])), gate)
        up = tl.dot(v, tl.trans(w_rows.load([N + first_col, k])), up)
    row = first_row + tl.arange(0, BM)
    inside = (row < rows)[:, None] & (col < N)[None, :]
    tl.store(y + row[:, None] * N + col[None, :], silu_times(gate, up, dtype).to(dtype), mask=inside)


def supported(device: torch.device | str) -> bool:
    """Whether `device` has tensor descriptors: those came with dependent launches."""
    return chain.pdl_supported(device)


def gate_up_tile(rows: int) -> Tile:
    """(BM, BN, BK, warps, stages), from measurement on an H200, weights cold."""
    return (64, 64, 64, 4, 4) if rows <= 64 else (128, 128, 64, 8, 4)


def gate_up(x: Tensor, weight: Tensor, y: Tensor, pdl: bool, tile: Tile | None = None) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` into `y [rows, N]`, on arguments that `skinny.py` has checked.

    Raises ValueError for rows that a tensor descriptor cannot take.
    """
    (rows, width), columns = x.shape, y.shape[1]
    half = x.dtype != torch.float32 and width % 8 == 0
    checks.require(half, f"tiled: given rows of {width} {x.dtype}, expected half floats, a multiple of 8 of them")
    block_m, block_n, block_k, warps, stages = tile or gate_up_tile(rows)
    chain.launch(
        _tiled,
        (triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),),
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        weight,
        y,
        rows,
        N=columns,
        K=width,
        BM=block_m,
        BN=block_n,
        BK=block_k,
        LINES=LINES,
        STAGES=stages,
        pdl=pdl,
        lean=False,
        num_warps=warps,
    )
    return y
