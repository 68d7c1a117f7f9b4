"""Matmuls of 1 to 16 rows whose weights go from memory into the tensor cores' registers, with nothing in between.

A warp's fragment of `mma.m16n8k16` asks for pairs along K; here each thread takes 8 neighbours at once (16 bytes), of
the weights and of x alike, which is the same product in another order of K. So nothing is staged in shared memory, a
program's first weights are all in flight before it waits for its predecessor, and 8 rows cost what one does. Warps
split K and add up at the end. Of gate and up a program takes the same eight rows each, which meet in a thread's
registers. Written in Gluon, Triton's language of explicit layouts: it is marked experimental, so whoever calls asks
`available` first, and it has no interpreter. bfloat16 alone: the norm's gain is applied before the matmul and its scale
after it, which could overflow in float16. A row's bits do not depend on the others, nor on how many there are of up to
8, or of 9 to 16.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from . import pdl as chain

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
except ImportError:  # a Triton that has moved it
    gluon = None

MAX_ROWS = 16
COLUMNS = 16  # weight rows of a program: the instruction's m
AT_ONCE = 2**24  # bytes of weights in flight on the whole GPU, about

if gluon is not None:

    @gluon.jit
    def _griddep(WHAT: gl.constexpr, PDL: gl.constexpr):
        if PDL:
            gl.inline_asm_elementwise(
                "griddepcontrol." + WHAT + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )

    @gluon.jit
    def _stretch(tile, k, K: gl.constexpr, MASKED: gl.constexpr, KEEP: gl.constexpr):
        policy: gl.constexpr = "evict_last" if KEEP else "evict_first"
        if MASKED:
            return gl.load(tile, mask=k < K, other=0.0, eviction_policy=policy)
        else:
            return gl.load(tile, eviction_policy=policy)

    @gluon.jit
    def _silu_times(gate, up, dtype: gl.constexpr):
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        return (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up

    @gluon.jit(do_not_specialize=["rows"])
    def _streamed(
        x,  # [rows, K]
        norm,  # [K]
        weight,  # [N, K], GATED: [2 N, K]
        bias,  # [N]
        residual,  # [rows, N], may be y
        y,  # [rows, N]
        rows,
        eps,
        N: gl.constexpr,
        K: gl.constexpr,
        COLUMNS: gl.constexpr,  # weight rows of a program, a multiple of 16; GATED: half of them of each matrix
        SLICE: gl.constexpr,  # of K: a warp's in one stretch
        WARPS: gl.constexpr,
        STRETCHES: gl.constexpr,
        ROWS: gl.constexpr,  # `rows` padded to 8 or 16
        NORM: gl.constexpr,
        BIAS: gl.constexpr,
        RESIDUAL: gl.constexpr,
        GATED: gl.constexpr,
        PDL: gl.constexpr,
    ):
        _griddep("launch_dependents", PDL)
        dtype: gl.constexpr = y.dtype.element_ty
        STEP: gl.constexpr = WARPS * SLICE
        MASKED: gl.constexpr = STRETCHES * STEP != K
        # [warps, COLUMNS, ROWS]: each warp multiplies a slice of K of its own.
        mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
        of_w: gl.constexpr = gl.DotOperandLayout(0, mma, k_width=8)  # [warps, COLUMNS, SLICE]
        of_x: gl.constexpr = gl.DotOperandLayout(1, mma, k_width=8)  # [warps, SLICE, ROWS]
        of_norm: gl.constexpr = gl.SliceLayout(2, of_x)  # [warps, SLICE]

        warp_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_w)))
        col_w = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_w)))
        k_w = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_w)))
        k_w = gl.expand_dims(gl.expand_dims(warp_w, 1), 2) * SLICE + gl.expand_dims(gl.expand_dims(k_w, 0), 1)
        warp_x = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_x)))
        k_x = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_x)))
        k_x = gl.expand_dims(gl.expand_dims(warp_x, 1), 2) * SLICE + gl.expand_dims(gl.expand_dims(k_x, 0), 2)
        row_x = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_x)))
        row_x = gl.expand_dims(gl.expand_dims(row_x, 0), 1)
        warp_g = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_norm))
        k_g = gl.arange(0, SLICE, layout=gl.SliceLayout(0, of_norm))
        k_g = gl.expand_dims(warp_g, 1) * SLICE + gl.expand_dims(k_g, 0)

        OWN: gl.constexpr = COLUMNS // (1 + GATED)  # columns of y
        first = gl.program_id(0) * OWN
        col_w = gl.minimum(first + col_w % OWN, N - 1) + col_w // OWN * N
        column = gl.expand_dims(gl.expand_dims(col_w, 0), 2)
        w_tile = weight + column.to(gl.int64) * K + k_w
        x_tile = x + gl.minimum(row_x, rows - 1) * K + k_x  # a row that is not there is the last one, and not stored
        w = _stretch(w_tile, k_w, K, MASKED, False)
        if NORM:
            g = _stretch(norm + k_g, k_g, K, MASKED, True)
        _griddep("wait", PDL)

        acc = gl.zeros([WARPS, COLUMNS, ROWS], gl.float32, layout=mma)
        squares = gl.zeros([WARPS, ROWS], gl.float32, layout=gl.SliceLayout(1, of_x))
        for stretch in gl.static_range(STRETCHES):
            at = stretch * STEP
            ahead = at + STEP
            v = _stretch(x_tile + at, k_x + at, K, MASKED, True)
            if stretch + 1 < STRETCHES:  # in flight while these are multiplied
                w_next = _stretch(w_tile + ahead, k_w + ahead, K, MASKED, False)
                if NORM:
                    g_next = _stretch(norm + k_g + ahead, k_g + ahead, K, MASKED, True)
            if NORM:
                wide = v.to(gl.float32)
                squares += gl.sum(wide * wide, 1)
                v = (wide * gl.expand_dims(g.to(gl.float32), 2)).to(dtype)
            acc = mma_v2(w, v, acc)
            if stretch + 1 < STRETCHES:
                w = w_next
                if NORM:
                    g = g_next

        summed: gl.constexpr = gl.SliceLayout(0, mma)  # [COLUMNS, ROWS]
        out = gl.sum(acc, 0)
        if NORM:
            inverse = gl.rsqrt(gl.sum(squares, 0) / K + eps)
            inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(0, summed)), 0)
            out = out * inverse
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(out, [2, OWN, ROWS]), [1, 2, 0]))
            out = _silu_times(gate, up, dtype)
        result: gl.constexpr = out.type.layout  # [OWN, ROWS]
        col = first + gl.expand_dims(gl.arange(0, OWN, layout=gl.SliceLayout(1, result)), 1)
        row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, result)), 0)
        if BIAS:
            out = out + gl.load(bias + col, mask=col < N, other=0.0).to(gl.float32)
        target = row * N + col
        inside = (row < rows) & (col < N)
        if RESIDUAL:
            added = gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
            out = out.to(dtype).to(gl.float32) + added
        gl.store(y + target, out.to(dtype), mask=inside)


def compiles() -> bool:
    """Whether this Triton has what the kernel is written in."""
    return gluon is not None


@functools.cache
def available() -> bool:
    """Whether the current GPU can run the kernel, too."""
    return compiles() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def streamed_tile(rows: int, weight_rows: int, width: int) -> tuple[int, int, int]:
    """(COLUMNS, SLICE, warps): what a program has in flight, 32 to 128 KiB of weights by how many programs there are.

    Fitted to `scripts/tune_skinny.py` on an H200 at 8 rows, Llama-3.2-1B and Llama-3.1-8B. A warp's registers hold 16
    KiB, half as much with 8 rows more. More weight rows a program, which read x less often, lost.
    """
    slice_size = 512 // (1 + (rows > 8))
    a_warp = slice_size * COLUMNS * 2
    share = AT_ONCE // triton.cdiv(weight_rows, COLUMNS)
    warps = min(max(triton.next_power_of_2(share // a_warp + 1) // 2, 2**15 // a_warp), 8)
    while warps > 1 and slice_size * warps >= 2 * width:
        warps //= 2
    return COLUMNS, min(slice_size, max(triton.next_power_of_2(triton.cdiv(width, warps)), 32)), warps


def launch(
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    eps: float,
    gated: bool,
    pdl: bool,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """The kernel on checked arguments, as `skinny.py` has them; `y [rows, N]`, rows to 16, bfloat16."""
    (rows, width), columns = x.shape, y.shape[1]
    program, slice_size, warps = tile or streamed_tile(rows, weight.shape[0], width)
    chain.launch(
        _streamed,
        (triton.cdiv(weight.shape[0], program),),
        x,
        weight if norm is None else norm,
        weight,
        weight if bias is None else bias,
        y if residual is None else residual,
        y,
        rows,
        eps,
        N=columns,
        K=width,
        COLUMNS=program,
        SLICE=slice_size,
        WARPS=warps,
        STRETCHES=triton.cdiv(width, slice_size * warps),
        ROWS=8 if rows <= 8 else 16,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        pdl=pdl,
        num_warps=warps,
    )
    return y
