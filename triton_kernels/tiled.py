"""Matmuls of up to 256 rows through tensor descriptors, as links of a chain of dependent launches.

A program owns a tile of x's rows times weight rows, or a share of its K where there are few tiles; the last of a tile's
programs adds up their float32 sums, always in the same order. It asks for its first weights in L2 before it waits for
its predecessor, which is what the library's matmuls cannot: between them memory is idle. A row's bits do not depend on
the others beside it, but do on the tile, which follows the number of rows.
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
PROGRAMS = 264  # at most, where a tile's K is shared out: two for each SM of an H200
AHEAD = 4  # lines of each weight row that are asked into L2 early

Tile = tuple[int, int, int, int, int, int]  # BM, BN, BK, SPLIT, stages, warps


@triton.jit(do_not_specialize=["rows"])
def _tiled(
    x_rows,  # descriptor of x [rows, K]
    w_rows,  # and of the weight
    weight,  # [N, K], GATED: [2 N, K]
    bias,  # [N]
    residual,  # [rows, N], may be y
    y,  # [rows, N]
    parts,  # [SPLIT, rows, N] float32
    counters,  # [tiles] int32, zeros before and after
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,  # of K: a program's
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    tile, share = tl.program_id(0), tl.program_id(1)
    row_blocks = tl.cdiv(rows, BM)
    first_row, first_col = tile % row_blocks * BM, tile // row_blocks * BN
    first_k = share * SHARE
    col = first_col + tl.arange(0, BN)
    if PDL:
        PER_LINE: tl.constexpr = 1024 // dtype.primitive_bitwidth
        line = tl.minimum(first_k + tl.arange(0, LINES) * PER_LINE, K - 1)
        near = weight + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K + line[None, :]
        chain.prefetch(near)
        if GATED:
            chain.prefetch(near + N * K)
    chain.wait(PDL)

    acc = tl.zeros([BM, BN], tl.float32)
    acc_up = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(first_k, tl.minimum(first_k + SHARE, K), BK, num_stages=STAGES):
        v = x_rows.load([first_row, k])  # zeros where there is nothing
        acc = tl.dot(v, tl.trans(w_rows.load([first_col, k])), acc)
        if GATED:
            acc_up = tl.dot(v, tl.trans(w_rows.load([N + first_col, k])), acc_up)
    row = first_row + tl.arange(0, BM)
    target = row[:, None] * N + col[None, :]
    inside = (row < rows)[:, None] & (col < N)[None, :]
    if SPLIT > 1:
        tl.store(parts + share * rows * N + target, acc, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        acc = tl.zeros([BM, BN], tl.float32)
        for part in tl.static_range(SPLIT):
            acc += tl.load(parts + part * rows * N + target, mask=inside, other=0.0)
    if GATED:
        acc = silu_times(acc, acc_up, dtype)
    if BIAS:
        acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        added = tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        acc = acc.to(dtype).to(tl.float32) + added
    tl.store(y + target, acc.to(dtype), mask=inside)


def tiled_tile(rows: int, columns: int, width: int, gated: bool, split: bool) -> Tile:
    """(BM, BN, BK, SPLIT, stages, warps); `split`: whether K may be shared out, which gated columns' never is."""
    if gated:
        if rows <= 64:
            return 64, 128, 64, 1, 4, 4
        return (128, 64, 64, 1, 3, 4) if rows <= 128 else (128, 128, 64, 1, 4, 8)
    block_m, block_n = (64 if rows <= 64 else 128), 64 if columns >= 6144 else 128
    tiles, shares = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n), 1
    while split and 2 * shares * tiles <= PROGRAMS and width >= 2048 * shares:
        shares *= 2
    return block_m, block_n, 64, shares, 4, 8 if block_m * block_n > 8192 else 4


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    gated: bool,
    pdl: bool,
    counters: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """The kernel on checked arguments, as `skinny.py` has them; `y [rows, N]`, rows to 256, half floats.

    `counters`: int32 zeros, which they are again afterwards, for calls that follow one another; None shares out no K.
    """
    (rows, width), columns = x.shape, y.shape[1]
    room = 0 if counters is None else counters.numel()
    block_m, block_n, block_k, split, stages, warps = tile or tiled_tile(rows, columns, width, gated, room > 0)
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
    checks.require(
        split == 1 or (tiles <= room and not gated), f"tiled: {split} shares, {tiles} tiles, {room} counters"
    )
    checks.require(width % 8 == 0, f"tiled: rows of {width} elements, expected a multiple of 8")
    parts = torch.empty((split, rows, columns), dtype=torch.float32, device=x.device) if split > 1 else x
    chain.launch(
        _tiled,
        (tiles, split),
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        weight,
        weight if bias is None else bias,
        y if residual is None else residual,
        y,
        parts,
        x if counters is None else counters,
        rows,
        N=columns,
        K=width,
        SHARE=triton.cdiv(triton.cdiv(width, split), block_k) * block_k,
        BM=block_m,
        BN=block_n,
        BK=block_k,
        SPLIT=split,
        LINES=min(AHEAD, triton.next_power_of_2(triton.cdiv(width, 64))),
        STAGES=stages,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        pdl=pdl,
        lean=False,
        num_warps=warps,
    )
    return y
