"""Paged split-KV decode attention: one query row per request, all query heads of a KV head in one tile.

The grid is (rows, KV heads, splits), fixed by the bucket; lengths are read on the device. An empty split leaves after
writing a sum of 0, and the reduction never reads the output that it did not write. A row of length 0 becomes zeros.
With `split_size` the split boundaries are multiples of it, so a row's bits do not depend on batch or table width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .paging import FLOOR, tile_pages, tile_pointers

# Programs to aim for: two for each of the 132 SMs of an H200, so that one's loads hide the other's softmax.
TARGET_PROGRAMS = 264
MAX_SPLITS = 128
REDUCE_BLOCK = 16


@triton.jit(
    do_not_specialize=["table_width", "split_size"],
    do_not_specialize_on_alignment=["block_tables", "kv_lens"],
)
def _decode_split(
    q,
    k_cache,
    v_cache,
    block_tables,
    kv_lens,
    out,  # [B, Hq, splits, D]: float32 partial sums, or with DIRECT the result
    part_max,  # [B, Hq, splits]
    part_sum,
    scale,
    table_width,
    split_size,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    DIRECT: tl.constexpr,
):
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    GROUP: tl.constexpr = HQ // HK
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // BLOCKS
    member = tl.program_id(1) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    in_group = member < GROUP
    d = tl.arange(0, D_PAD)
    in_tile = in_group[:, None] & (d < D)[None, :]
    head = row * HQ + kv_head * GROUP + member
    part = head * splits + split

    length = tl.load(kv_lens + row)
    per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    per_split = tl.where(split_size > 0, split_size, per_split)
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)
    if begin >= end:
        if DIRECT:
            tl.store(out + head[:, None] * D + d[None, :], tl.zeros([BLOCK_M, D_PAD], out.dtype.element_ty), in_tile)
        else:
            tl.store(part_max + part, tl.full([BLOCK_M], FLOOR, tl.float32), mask=in_group)
            tl.store(part_sum + part, tl.zeros([BLOCK_M], tl.float32), mask=in_group)
        return

    queries = tl.load(q + head[:, None] * D + d[None, :], mask=in_tile, other=0.0)
    m = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    table = block_tables + row * table_width
    pages = tile_pages(table, begin, table_width, PAGE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # Masked at the load, since stale entries may be NaN and 0 * NaN is NaN.
        live = start + tl.arange(0, BLOCK_N) < end
        mask = live[:, None] & (d < D)[None, :]
        k = tl.load(tile_pointers(k_cache, pages, start, kv_head, HK, PAGE, D, D_PAD, BLOCK_N), mask=mask, other=0.0)
        v = tl.load(tile_pointers(v_cache, pages, start, kv_head, HK, PAGE, D, D_PAD, BLOCK_N), mask=mask, other=0.0)
        pages = tile_pages(table, start + BLOCK_N, table_width, PAGE, BLOCK_N)
        s = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(live[None, :], s, FLOOR)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new

    if DIRECT:
        tl.store(out + head[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=in_tile)
    else:
        tl.store(out + part[:, None] * D + d[None, :], acc, mask=in_tile)
        tl.store(part_max + part, m, mask=in_group)
        tl.store(part_sum + part, total, mask=in_group)


@triton.jit(do_not_specialize=["splits"])
def _decode_reduce(
    part_out, part_max, part_sum, out, splits, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_S: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_PAD)
    m = tl.full((), FLOOR, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros([D_PAD], tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        inside = split < splits
        part = head * splits + split
        maxima = tl.load(part_max + part, mask=inside, other=FLOOR)
        sums = tl.load(part_sum + part, mask=inside, other=0.0)
        live = sums != 0.0  # true of NaN too: a NaN that the model made stays visible
        m_new = tl.maximum(m, tl.max(maxima, 0))
        weight = tl.where(live, tl.exp2(maxima - m_new), 0.0)
        alpha = tl.exp2(m - m_new)
        mask = live[:, None] & (d < D)[None, :]
        o = tl.load(part_out + part[:, None] * D + d[None, :], mask=mask, other=0.0)
        acc = acc * alpha + tl.sum(o * weight[:, None], 0)
        total = total * alpha + tl.sum(sums * weight, 0)
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def decode_tile(dtype: torch.dtype, padded_dim: int) -> tuple[int, int]:
    """(BLOCK_N, stages): a function of dtype and head dimension alone, so that bits do not move with the bucket."""
    if dtype == torch.float32:
        return 32, 2
    return (64, 3) if padded_dim <= 128 else (32, 3)


def decode_splits(rows: int, head_blocks: int, capacity: int, block_n: int) -> int:
    """The power of two of splits that about fills the GPU, and no more than the table's capacity has tiles."""
    fill = max(TARGET_PROGRAMS // (rows * head_blocks), 1)
    tiles = triton.next_power_of_2(triton.cdiv(capacity, block_n))
    return min(1 << (fill.bit_length() - 1), tiles, MAX_SPLITS)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    num_splits: int | None = None,
    split_size: int = 0,
) -> Tensor:
    """Attention of `q [B, Hq, D]` over each row's first `kv_lens [B]` int32 tokens; `[B, Hq, D]`, zeros for length 0.

    Caches `[pages, Hk, page_size, D]`, `block_tables [B, W]` int32. `num_splits` (default: from B, Hk and W) cuts each
    row's own length; `split_size > 0`, a multiple of 64, fixes the tokens of a split instead. Raises ValueError for
    shapes, dtypes or strides that do not fit. Method: flash decoding (Dao et al., 2023) over pages (Kwon et al., 2023).
    """
    rows, heads, dim = q.shape
    checks.floats(q=q, k_cache=k_cache, v_cache=v_cache)
    checks.caches(k_cache, v_cache, dim)
    padded = checks.head_dim(dim)
    checks.table("block_tables", block_tables, rows)
    checks.vector("kv_lens", kv_lens, rows, torch.int32)
    kv_heads, page_size = k_cache.shape[1:3]
    group = checks.group(heads, kv_heads)
    block_n, stages = decode_tile(q.dtype, padded)
    checks.require(split_size % 64 == 0 and split_size >= 0, f"split_size {split_size}: expected a multiple of 64")
    capacity = block_tables.shape[1] * page_size
    block_m = min(max(triton.next_power_of_2(group), 16), 64)
    head_blocks = kv_heads * triton.cdiv(group, block_m)
    splits = num_splits or decode_splits(rows, head_blocks, capacity, block_n)
    if split_size > 0:
        splits = triton.cdiv(capacity, split_size)
    direct = splits == 1
    out = torch.empty_like(q)
    part_out, part_max, part_sum = out, out, out
    if not direct:
        part_out = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        # Two allocations: the half of one would be aligned or not by the batch, and alignment is part of the JIT key.
        part_max = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
        part_sum = torch.empty_like(part_max)
    _decode_split[(rows, head_blocks, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        kv_lens,
        part_out,
        part_max,
        part_sum,
        scale * 1.4426950408889634,
        block_tables.shape[1],
        split_size,
        HQ=heads,
        HK=kv_heads,
        D=dim,
        D_PAD=padded,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        DIRECT=direct,
        num_warps=4,
    )
    if not direct:
        _decode_reduce[(rows * heads,)](
            part_out, part_max, part_sum, out, splits, D=dim, D_PAD=padded, BLOCK_S=REDUCE_BLOCK, num_warps=4
        )
    return out
