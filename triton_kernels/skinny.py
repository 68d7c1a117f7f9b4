"""Matmuls of 1 to 64 rows, with the norm before them or the addition after them: how a decode layer reads its weights.

One row: a program owns BN whole weight rows, all of their loads in flight before it waits for its predecessor, and
norms x itself. More rows: x is normed once by a kernel of its own, then `tl.dot` over K with the rows padded to 16, 32
or 64, weights asked into L2 before the wait and read once for all rows; a row's bits do not depend on the others there.
Rounds where the chain of separate kernels rounds (normed row, matmul, silu, sum): only the order of float32 sums
differs. `pdl.py` has the rules of `pdl=True`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks, streamed, tiled
from . import pdl as chain
from .rms_norm import rms_norm
from .swiglu import silu_times

Form = Literal["auto", "streamed"]
MAX_ROWS = 64
MAX_WIDTH = 32768
WHOLE_WIDTH = 16384  # up to this K a program holds its weights in registers, for one row
RESIDENT = 396  # programs of the dot form on those SMs at once
PREFETCH = 24 * 2**20  # bytes of weights asked into L2 early: half of it

Tile = tuple[int, int, int, int]  # BN, BK, warps, stages; 0 stages: whole weight rows in registers; -1: streamed.py


@triton.jit
def _skinny_whole(
    x,  # [K]
    norm,  # [K]
    weight,  # [N, K], GATED: [2 N, K]
    bias,  # [N]
    residual,  # [N], may be y
    y,  # [N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_cols, in_k = col < N, k < K
    tile = weight + col[:, None].to(tl.int64) * K + k[None, :]
    mask = in_cols[:, None] & in_k[None, :]
    w = tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        w_up = tl.load(tile + N * K, mask=mask, other=0.0, eviction_policy="evict_first")
    if NORM:
        gain = tl.load(norm + k, mask=in_k, other=0.0).to(tl.float32)
    if BIAS:
        offset = tl.load(bias + col, mask=in_cols, other=0.0).to(tl.float32)
    chain.wait(PDL)
    v = tl.load(x + k, mask=in_k, other=0.0).to(tl.float32)
    if NORM:
        v = (v * tl.rsqrt(tl.sum(v * v, 0) / K + eps)).to(dtype).to(tl.float32) * gain
        v = v.to(dtype).to(tl.float32)
    acc = tl.sum(w.to(tl.float32) * v[None, :], 1)
    if GATED:
        acc = silu_times(acc, tl.sum(w_up.to(tl.float32) * v[None, :], 1), dtype)
    if BIAS:
        acc += offset
    if RESIDUAL:
        acc = acc.to(dtype).to(tl.float32) + tl.load(residual + col, mask=in_cols, other=0.0).to(tl.float32)
    tl.store(y + col, acc.to(dtype), mask=in_cols)


@triton.jit(do_not_specialize=["rows"])
def _skinny_dot(
    x,  # [rows, K]
    weight,  # [N, K], GATED: [2 N, K]
    bias,  # [N]
    residual,  # [rows, N], may be y
    y,  # [rows, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,  # `rows` padded to 16, 32 or 64
    LINES: tl.constexpr,  # 128-byte lines of each weight row that are asked into L2 early
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.arange(0, ROWS)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    in_rows, in_cols = row < rows, col < N
    first = tl.minimum(col, N - 1).to(tl.int64) * K  # a column that is not there reads the last one's weights
    if PDL:
        PER_LINE: tl.constexpr = 1024 // dtype.primitive_bitwidth
        line = tl.minimum(tl.arange(0, LINES) * PER_LINE, K - 1)
        near = weight + first[:, None] + line[None, :]
        chain.prefetch(near)
        if GATED:
            chain.prefetch(near + N * K)
    chain.wait(PDL)

    # Weights times x and not the other way: then a tile of weights is the operand with 64 rows that Hopper's matrix
    # instruction reads from shared memory.
    k = tl.arange(0, BK)
    x_tile = x + row[:, None] * K + k[None, :]
    w_tile = weight + first[:, None] + k[None, :]
    acc = tl.zeros([BN, ROWS], tl.float32)
    acc_up = tl.zeros([BN, ROWS], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            v = tl.load(x_tile + start, mask=in_rows[:, None], other=0.0)
            w = tl.load(w_tile + start)
        else:
            inside = k < K - start
            v = tl.load(x_tile + start, mask=in_rows[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_tile + start, mask=inside[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
        if GATED:
            if K % BK == 0:
                w_up = tl.load(w_tile + N * K + start)
            else:
                w_up = tl.load(w_tile + N * K + start, mask=inside[None, :], other=0.0)
            acc_up = tl.dot(w_up, tl.trans(v), acc_up, input_precision="ieee")
    if GATED:
        acc = silu_times(acc, acc_up, dtype)
    if BIAS:
        acc += tl.load(bias + col, mask=in_cols, other=0.0).to(tl.float32)[:, None]
    target = row[None, :] * N + col[:, None]
    inside_y = in_rows[None, :] & in_cols[:, None]
    if RESIDUAL:
        added = tl.load(residual + target, mask=inside_y, other=0.0).to(tl.float32)
        acc = acc.to(dtype).to(tl.float32) + added
    tl.store(y + target, acc.to(dtype), mask=inside_y)


def _floor(n: int) -> int:
    """The largest power of two that is at most `n`, and 1 for less."""
    return 1 << (max(n, 1).bit_length() - 1)


def skinny_tile(rows: int, columns: int, width: int, dtype: torch.dtype, fused: bool) -> Tile:
    """(BN, BK, warps, stages) for `[rows, width] @ [columns, width].T`; `fused`: two such matrices in one tile.

    Fitted to decode steps of Llama-3.2-1B, Llama-3.1-8B, Qwen3-0.6B and SmolLM2-135M on an H200. Whole rows: about
    16,384 weights a program, 128 a thread, but three programs for every SM first (one of a narrow matrix, whose
    programs have more warps; a program of gate and up has one where there are many). With `dot`: wide tiles where the
    columns allow, since each program reads all of x.
    """
    both, single = 1 + fused, dtype == torch.float32
    if rows == 1 and width <= WHOLE_WIDTH:
        block_k = max(triton.next_power_of_2(width), 128)
        programs = 384 if columns >= 2048 else 132
        block_n = min(_floor(columns // programs), _floor(16384 // (block_k * both)), 8 // both)
        a_thread = 64 if block_k >= 8192 or (block_k <= 2048 and columns <= min(width, 2047)) else 128
        if single:
            a_thread = 32
        elif fused and block_k <= 1024 and columns // block_n > 4 * 132:
            a_thread = 256
        return block_n, block_k, min(max(block_n * block_k * both // a_thread // 32, 1), 16), 0
    if single:
        return 16, 64, 4, 3
    if columns * both >= 16384:
        return (64, 128, 4, 4) if columns // 64 < 200 or (fused and rows <= 16) else (64, 64, 4, 6)
    if rows > 16:
        return 64, 128, 4, 4
    return (32, 256, 4, 4) if width >= 8192 else (16, 256, 2, 4)


def _skinny(
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    eps: float,
    gated: bool,
    pdl: bool,
    form: Form,
    tile: Tile | None,
) -> Tensor:
    (rows, width), columns = x.shape, y.shape[1]
    if tile is None and form == "streamed":
        tile = *streamed.streamed_tile(rows, weight.shape[0], width), -1
    block_n, block_k, warps, stages = tile or skinny_tile(rows, columns, width, x.dtype, gated)
    if stages < 0:
        checks.require(
            x.dtype == torch.bfloat16 and rows <= streamed.MAX_ROWS and streamed.compiles(),
            f"streamed: given {rows} rows of {x.dtype}, expected up to {streamed.MAX_ROWS} of bfloat16, and Gluon",
        )
        return streamed.launch(x, norm, weight, bias, residual, y, eps, gated, pdl, (block_n, block_k, warps))
    checks.require(stages > 0 or rows == 1, f"tile {tile}: given {rows} rows, expected one where stages are 0")
    grid = (triton.cdiv(columns, block_n),)
    flags: dict[str, Any] = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "GATED": gated}
    shape: dict[str, Any] = {"N": columns, "K": width, "BN": block_n, "BK": block_k}
    tensors = weight, weight if bias is None else bias, y if residual is None else residual, y
    if stages == 0:
        chain.launch(
            _skinny_whole,
            grid,
            x,
            weight if norm is None else norm,
            *tensors,
            eps,
            **shape,
            NORM=norm is not None,
            **flags,
            pdl=pdl,
            num_warps=warps,
        )
        return y
    if norm is not None:  # once, and not by every program
        x = rms_norm(x, norm, eps, pdl=pdl)
    # Bounded over the programs that run at once: lines that L2 drops before their use would be read twice.
    share = PREFETCH // min(grid[0], RESIDENT) // (block_n * (1 + gated) * 128)
    lines = min(triton.next_power_of_2(triton.cdiv(width * x.element_size(), 128)), _floor(share))
    chain.launch(
        _skinny_dot,
        grid,
        x,
        *tensors,
        rows,
        **shape,
        ROWS=max(16, triton.next_power_of_2(rows)),
        LINES=lines,
        STAGES=stages,
        **flags,
        pdl=pdl,
        lean=False,
        num_warps=warps,
    )
    return y


def _check(name: str, x: Tensor, expected: str, holds: bool, most: int = MAX_ROWS, **others: Tensor | None) -> None:
    given = {k: t for k, t in others.items() if t is not None}
    checks.floats(x=x, **given)
    shapes = ", ".join(f"{k} {tuple(t.shape)}" for k, t in given.items())
    checks.require(
        holds and 1 <= x.shape[0] <= most and x.shape[1] <= MAX_WIDTH,
        f"{name}: given x {tuple(x.shape)}, {shapes}, expected {expected}, "
        f"with 1 to {most} rows B (use a library matmul for more) of at most {MAX_WIDTH}",
    )


def norm_linear(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
    form: Form = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """`rms_norm(residual [B, H]) @ weight [N, H].T + bias [N]` as `[B, N]`, for B of 1 to 64.

    `pdl`: as part of a chain (`pdl.py`). `form`: `streamed` is `streamed.py`. `tile` overrides both. Raises ValueError
    for what does not fit.
    """
    rows, width = residual.shape
    columns = weight.shape[0]
    holds = (
        tuple(norm_weight.shape) == (width,)
        and weight.shape[1:] == (width,)
        and (bias is None or tuple(bias.shape) == (columns,))
    )
    expected = "[B, H], [H], [N, H], [N]"
    _check("norm_linear", residual, expected, holds, norm_weight=norm_weight, weight=weight, bias=bias)
    y = torch.empty((rows, columns), dtype=residual.dtype, device=residual.device)
    return _skinny(residual, norm_weight, weight, bias, None, y, eps, False, pdl, form, tile)


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    out: Tensor | None = None,
    *,
    pdl: bool = False,
    form: Form = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """`residual [B, N] + x [B, K] @ weight [N, K].T` as `[B, N]`, B to 64; into `out`, maybe `residual` itself.

    `pdl`: as part of a chain (`pdl.py`). `form`: `streamed` is `streamed.py`. `tile` overrides both. Raises ValueError
    for what does not fit.
    """
    rows, width = x.shape
    columns = weight.shape[0]
    y = torch.empty_like(residual) if out is None else out
    holds = weight.shape[1:] == (width,) and tuple(residual.shape) == (rows, columns) and y.shape == residual.shape
    expected = "[B, K], [N, K], [B, N], [B, N]"
    _check("linear_add", x, expected, holds, weight=weight, residual=residual, out=y)
    return _skinny(x, None, weight, None, residual, y, 0.0, False, pdl, form, tile)


def norm_gate_up(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up: Tensor,
    *,
    pdl: bool = False,
    form: Form | Literal["tiled"] = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """`silu(n @ gate.T) * (n @ up.T)` as `[B, F]` of `n = rms_norm(residual [B, H])` and `gate_up [2 F, H]`; B to 64.

    `pdl`: as part of a chain (`pdl.py`). `form`: `streamed` is `streamed.py`, `tiled` is `tiled.py` with B to 256.
    `tile` overrides the others. Raises ValueError for what does not fit.
    """
    rows, width = residual.shape
    holds = tuple(norm_weight.shape) == (width,) and gate_up.shape[1:] == (width,) and gate_up.shape[0] % 2 == 0
    most = tiled.MAX_ROWS if form == "tiled" else MAX_ROWS
    _check("norm_gate_up", residual, "[B, H], [H], [2 F, H]", holds, most, norm_weight=norm_weight, gate_up=gate_up)
    y = torch.empty((rows, gate_up.shape[0] // 2), dtype=residual.dtype, device=residual.device)
    if form == "tiled":
        return tiled.gate_up(rms_norm(residual, norm_weight, eps, pdl=pdl, lean=False), gate_up, y, pdl)
    return _skinny(residual, norm_weight, gate_up, None, None, y, eps, True, pdl, form, tile)
