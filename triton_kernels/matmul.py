"""`x @ weight.T` with a tile that never depends on the number of rows, so that a row's bits do not either.

Library matmuls pick tile, split and reduction order by shape: the same row comes out differently in another bucket.
Here every output element is one running sum over K in steps of BLOCK_K, whatever rows lie beside it. Decode and prefill
have a tile each, since 16 rows and 128 rows are different instructions; within a phase there is one.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks

Phase = Literal["prefill", "decode"]
GROUP = 8  # row blocks that walk the weights together, so that a weight tile is read from L2 after the first time


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_blocks, col_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * col_blocks
    group = tl.program_id(0) // in_group
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    within = tl.program_id(0) % in_group
    row = ((group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (within // height * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + row[:, None] * K + k[None, :]
    w_tile = weight + col[None, :] * K + k[:, None]
    in_rows, in_cols = (row < rows)[:, None], (col < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k < K - start
        a = tl.load(x_tile + start, mask=in_rows & inside[None, :], other=0.0)
        b = tl.load(w_tile + start, mask=in_cols & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    target = row[:, None] * N + col[None, :]
    if RESIDUAL:
        acc += tl.load(residual + target, mask=in_rows & in_cols, other=0.0).to(tl.float32)
    tl.store(y + target, acc.to(y.dtype.element_ty), mask=in_rows & in_cols)


def linear_tile(dtype: torch.dtype, phase: Phase) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages): of dtype and phase alone."""
    if dtype == torch.float32:
        return (16, 16, 64, 4, 3) if phase == "decode" else (64, 64, 32, 8, 3)
    return (16, 16, 256, 4, 4) if phase == "decode" else (128, 128, 64, 8, 3)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, phase: Phase
) -> Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N] + residual [T, N]` as `[T, N]`; sums in float32, rounded once.

    A row of the result depends on that row of `x` and `residual`, the weights and `phase` alone. Raises ValueError for
    dtypes, shapes or strides that do not fit.
    """
    rows, width = x.shape
    columns = weight.shape[0]
    checks.floats(
        x=x, weight=weight, bias=weight if bias is None else bias, residual=x if residual is None else residual
    )
    checks.require(
        weight.shape[1] == width
        and (bias is None or tuple(bias.shape) == (columns,))
        and (residual is None or tuple(residual.shape) == (rows, columns)),
        f"linear: given x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {_shape(bias)}, "
        f"residual {_shape(residual)}, expected [T, K], [N, K], [N], [T, N]",
    )
    block_m, block_n, block_k, warps, stages = linear_tile(x.dtype, phase)
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    _linear[(triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        y,
        rows,
        N=columns,
        K=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        STAGES=stages,
        num_warps=warps,
    )
    return y


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
