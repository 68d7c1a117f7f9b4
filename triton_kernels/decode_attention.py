"""Split-KV paged decode attention that rotates q and k itself and writes the new k and v on its way.

Grid: rows, KV heads and splits, fixed by the bucket; lengths are read on the device. Every program rotates the queries
of its KV head. The one whose split holds the last position rotates the new k, writes k and v at the row's slot and
starts its running softmax from them, in registers; the others, and its own loop, read only positions before it, so
nothing depends on the order of programs. A slot of -1 writes nothing, and the new token is attended all the same; a row
of length 0 reads and writes nothing and becomes zeros. The program of a row and KV head that finishes last, by a
counter, merges the splits; in their order, so that no bit depends on which it is.

In a chain (`pdl.py`) lengths, positions, tables and past K and V are read before the wait: a step's own kernels write
none of them, but for the new token's slot, which is read from registers.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from . import pdl as chain
from .paging import FLOOR, tile_pages, tile_pointers

# Programs to aim for: one for each SM of an H200. With two, merging more splits costs more than it hides: 51.0 us a
# layer of Llama-3.2-1B at 8 rows against 49.0, at 6,000 positions 101.8 against 100.1.
TARGET_PROGRAMS = 132
FEW = 64  # rows and KV heads, up to which a chain is bound by its launches
MAX_SPLITS = 128


@triton.jit
def _rotated(source, norm, cos, sin, mask, eps, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr):
    """Rows of one head dimension at pointers `source [M, 1]`, normed if asked and rotated; in the dtype they have."""
    d = tl.arange(0, D_PAD)
    # The half that rotation mixes in comes from a second load of the same lines: no data moves between threads.
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    x = tl.load(source + d[None, :], mask=mask, other=0.0)
    z = tl.load(source + other[None, :], mask=mask, other=0.0)
    if NORM:
        a = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        w = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        w_other = tl.load(norm + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x = ((a * inverse).to(x.dtype).to(tl.float32) * w).to(x.dtype)
        z = ((z.to(tl.float32) * inverse).to(x.dtype).to(tl.float32) * w_other).to(x.dtype)
    return (x.to(tl.float32) * cos[None, :] + z.to(tl.float32) * sin[None, :]).to(x.dtype)


@triton.jit
def _attend_tile(queries, k, v, live, m, total, acc, scale):
    """One step of the running softmax over a tile of K and V."""
    s = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(live[None, :], s, FLOOR)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, total * alpha + tl.sum(p, 1), acc


@triton.jit(
    do_not_specialize=["table_width", "split_size", "splits"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "block_tables", "kv_lens"],
)
def _decode(
    qkv,  # [B, (HQ + 2 HK) * D]
    positions,
    cos_sin,
    k_cache,
    v_cache,
    slot_mapping,
    block_tables,
    kv_lens,
    q_norm,
    k_norm,
    out,  # [B, HQ, D]
    part_out,  # [B, HQ, splits, D] float32, and what follows [B, HQ, splits]; with SPLIT
    part_max,
    part_sum,
    counters,  # [B * head blocks] zeros; with SPLIT
    scale,
    eps,
    table_width,
    split_size,
    splits,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    MEMBERS: tl.constexpr,  # heads of a block, padded to a power of two
    MERGED: tl.constexpr,  # splits merged at once
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    GROUP: tl.constexpr = HQ // HK
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_group = member < GROUP
    d = tl.arange(0, D_PAD)
    in_dim = d < D
    in_tile = in_group[:, None] & in_dim[None, :]
    head = row * HQ + kv_head * GROUP + member

    length = tl.load(kv_lens + row)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    # Where a split begins does not depend on the length, so that its page is asked for at once. Splits take turns tile
    # by tile, or hold `split_size` positions in a row.
    dealt = split_size == 0
    turn = tl.where(dealt, BLOCK_N, split_size)
    step = tl.where(dealt, splits * BLOCK_N, BLOCK_N)
    begin = split * turn
    end = tl.where(dealt, length, tl.minimum(begin + split_size, length))
    stop = tl.minimum(end, length - 1)  # of what is read from the cache
    table = block_tables + row * table_width
    pages = tile_pages(table, begin, table_width, PAGE, BLOCK_N)
    angle = cos_sin + position * D + tl.where(d < D // 2, d, d - D // 2)
    cos = tl.load(angle, mask=in_dim, other=0.0)
    sin = tl.load(angle + D // 2, mask=in_dim, other=0.0) * tl.where(d < D // 2, -1.0, 1.0)
    # Masked at the load, since stale entries may be NaN and 0 * NaN is NaN.
    live = begin + tl.arange(0, BLOCK_N) < stop
    mask = live[:, None] & in_dim[None, :]
    k = tl.load(tile_pointers(k_cache, pages, begin, kv_head, HK, PAGE, D, D_PAD, BLOCK_N), mask=mask, other=0.0)
    v = tl.load(tile_pointers(v_cache, pages, begin, kv_head, HK, PAGE, D, D_PAD, BLOCK_N), mask=mask, other=0.0)
    pages = tile_pages(table, begin + step, table_width, PAGE, BLOCK_N)
    chain.wait(PDL)
    if begin >= end:
        if split == 0:
            tl.store(out + head[:, None] * D + d[None, :], tl.zeros([BLOCK_M, D_PAD], out.dtype.element_ty), in_tile)
        return

    heads = qkv + row * ((HQ + 2 * HK) * D)
    queries = _rotated(
        heads + ((kv_head * GROUP + member) * D)[:, None], q_norm, cos, sin, in_tile, eps, D, D_PAD, NORM
    )

    # The new token as a tile of equal rows: the softmax starts from it without a change of layout.
    owner = (length - 1) // turn % splits == split
    fresh = (member >= tl.where(owner, 0, 1 << 30))[:, None] & in_dim[None, :]
    same = tl.zeros([BLOCK_M, 1], tl.int32)
    k_new = _rotated(heads + (HQ + kv_head) * D + same, k_norm, cos, sin, fresh, eps, D, D_PAD, NORM)
    v_new = tl.load(heads + (HQ + HK + kv_head) * D + same + d[None, :], mask=fresh, other=0.0)
    cell = ((slot // PAGE * HK + kv_head) * PAGE + slot % PAGE) * D
    # Once: by the block that holds the first head of the group.
    write = (member == tl.where(owner & (slot >= 0), 0, -1))[:, None] & in_dim[None, :]
    tl.store(k_cache + cell + same + d[None, :], k_new, mask=write)
    tl.store(v_cache + cell + same + d[None, :], v_new, mask=write)
    score = tl.sum(queries.to(tl.float32) * k_new.to(tl.float32), 1) * scale
    m = tl.where(owner, score, FLOOR)
    total = tl.zeros([BLOCK_M], tl.float32) + tl.where(owner, 1.0, 0.0)
    acc = v_new.to(tl.float32)

    if begin < stop:
        m, total, acc = _attend_tile(queries, k, v, live, m, total, acc, scale)
    for start in tl.range(begin + step, stop, step, num_stages=STAGES):
        live = start + tl.arange(0, BLOCK_N) < stop
        mask = live[:, None] & in_dim[None, :]
        k = tl.load(tile_pointers(k_cache, pages, start, kv_head, HK, PAGE, D, D_PAD, BLOCK_N), mask=mask, other=0.0)
        v = tl.load(tile_pointers(v_cache, pages, start, kv_head, HK, PAGE, D, D_PAD, BLOCK_N), mask=mask, other=0.0)
        pages = tile_pages(table, start + step, table_width, PAGE, BLOCK_N)
        m, total, acc = _attend_tile(queries, k, v, live, m, total, acc, scale)

    used = tl.minimum(tl.cdiv(length, turn), splits)
    if (not SPLIT) or used == 1:
        tl.store(out + head[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=in_tile)
    else:
        part = head * splits + split
        tl.store(part_out + part[:, None] * D + d[None, :], acc, mask=in_tile)
        tl.store(part_max + part, m, mask=in_group)
        tl.store(part_sum + part, total, mask=in_group)
        counter = counters + row * (HK * BLOCKS) + tl.program_id(1)
        tl.debug_barrier()  # all threads' parts, before one thread says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            first = row * HQ + kv_head * GROUP + block * BLOCK_M
            _merge(
                part_out,
                part_max,
                part_sum,
                out,
                first,
                GROUP - block * BLOCK_M,
                splits,
                used,
                D,
                D_PAD,
                MEMBERS,
                MERGED,
            )
            tl.store(counter, 0)


@triton.jit
def _merge(
    part_out,
    part_max,
    part_sum,
    out,
    first,
    heads,
    splits,
    used,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MEMBERS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """`used` of the `splits` of up to MEMBERS heads from `first`, into `out`."""
    member = tl.arange(0, MEMBERS)
    d = tl.arange(0, D_PAD)
    head = first + member
    present = member < heads
    m = tl.full([MEMBERS], FLOOR, tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, D_PAD], tl.float32)
    for low in tl.range(0, used, MERGED):
        split = low + tl.arange(0, MERGED)
        inside = (split < used)[:, None] & present[None, :]
        part = head[None, :] * splits + split[:, None]
        maxima = tl.load(part_max + part, mask=inside, other=FLOOR)
        sums = tl.load(part_sum + part, mask=inside, other=0.0)
        mask = inside[:, :, None] & (d < D)[None, None, :]
        o = tl.load(part_out + part[:, :, None] * D + d[None, None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(maxima, 0))
        weight = tl.exp2(maxima - m_new[None, :])
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha[:, None] + tl.sum(o * weight[:, :, None], 0)
        total = total * alpha + tl.sum(sums * weight, 0)
        m = m_new
    acc = acc / tl.where(present, total, 1.0)[:, None]
    mask = present[:, None] & (d < D)[None, :]
    tl.store(out + head[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


def decode_tile(
    programs: int, dtype: torch.dtype, padded_dim: int, even: bool, device: torch.device
) -> tuple[int, int, int]:
    """(positions of a tile, warps, stages: how many tiles of K and V are in flight or in use).

    `programs`: rows times blocks of heads. `even`: tiles that are a function of dtype and head dimension alone, so that
    bits do not move with the bucket; stages and warps do not change them.

    Few rows have many splits of few tiles: there a small footprint in shared memory wins, since programs start earlier
    beside those of the matmul before them. Many rows run through their tiles one after the other and want depth, but
    several programs on an SM, too. us a layer on an H200, 64 rows of 512 and of 2,048 positions, in tiles of 128 with
    three stages and of 64 with two: Llama-3.1-8B 204.5 and 281.7, 171.0 and 261.5; Qwen3-0.6B 89.1 and 179.4, 69.0 and
    158.3. Llama-3.2-1B in tiles of 128 with three stages and with two: 80.6 and 135.9, 73.6 and 118.8. At 8 rows depth
    is worth more: 1B at 4,096 positions 63.0 with three stages, 72.2 with two. Tiles of 32 or 64 at one row lose 1 to 8
    us at 4,096 positions.
    """
    if dtype == torch.float32:
        return 32, 8, 2  # in 4 warps it spills at head dimension 128
    if padded_dim > 128:
        return 16, 4, 3
    if 2 * programs <= FEW:
        return 128, 4, 1
    if padded_dim <= 64:
        return 128, 4, 3 if programs <= FEW else 2
    if programs > FEW and not even:
        return 64, 4, 2
    return 128, 4, 2 if _roomy(device) else 1


@functools.cache
def _roomy(device: torch.device) -> bool:
    """Whether three tiles of 128 fit; they do not on GPUs with 99 KiB of shared memory."""
    if device.type != "cuda":
        return True
    room: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return room > 150_000


def decode_splits(rows: int, head_blocks: int, capacity: int, block_n: int) -> int:
    """The power of two of splits that about fills the GPU, and no more than the table's capacity has tiles."""
    fill = max(TARGET_PROGRAMS // (rows * head_blocks), 1)
    tiles = triton.next_power_of_2(triton.cdiv(capacity, block_n))
    return min(1 << (fill.bit_length() - 1), tiles, MAX_SPLITS)


def decode_attention(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    num_heads: int,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    num_splits: int | None = None,
    split_size: int = 0,
    counters: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """`rope_and_write`, then attention over the cache: `qkv [B, (Hq + 2 Hk) * D]` to `[B, Hq * D]`, any B.

    Row r's token is the last of its `kv_lens[r]`; `slot_mapping[r]` is where its table puts it, or negative. The other
    arguments are as in `rope_and_write` and `prefill_attention`. `num_splits` None fills the GPU; `split_size` above 0
    gives every split so many positions, so that bits depend on a row's length alone. `counters`: int32 zeros,
    `[B * Hk]` or more (times the group's blocks of 64 heads), which are zeros again afterwards and belong to one call
    at a time; None makes new ones. `pdl`: as part of a chain (`pdl.py`). Raises ValueError for what does not fit.
    """
    rows, width = qkv.shape
    _, kv_heads, page_size, dim = k_cache.shape
    checks.floats(qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    checks.caches(k_cache, v_cache, dim)
    padded = checks.head_dim(dim)
    checks.vector("positions", positions, rows, torch.int32)
    checks.vector("slot_mapping", slot_mapping, rows, torch.int64)
    checks.table("block_tables", block_tables, rows)
    checks.vector("kv_lens", kv_lens, rows, torch.int32)
    checks.contiguous(cos_sin=cos_sin)
    checks.require(
        width == (num_heads + 2 * kv_heads) * dim and cos_sin.shape[1] == dim and cos_sin.dtype == torch.float32,
        f"decode_attention: given qkv {tuple(qkv.shape)}, cos_sin {tuple(cos_sin.shape)} {cos_sin.dtype}, "
        f"expected rows of ({num_heads} + 2 * {kv_heads}) * {dim} and float32 rows of {dim}",
    )
    checks.require((q_norm is None) == (k_norm is None), "decode_attention: q_norm and k_norm come together")
    if q_norm is not None and k_norm is not None:
        checks.vector("q_norm", q_norm, dim, qkv.dtype)
        checks.vector("k_norm", k_norm, dim, qkv.dtype)
    checks.require(split_size % 64 == 0 and split_size >= 0, f"split_size {split_size}: expected a multiple of 64")
    group = checks.group(num_heads, kv_heads)
    block_m = min(max(triton.next_power_of_2(group), 16), 64)
    head_blocks = kv_heads * triton.cdiv(group, block_m)
    block_n, warps, stages = decode_tile(rows * head_blocks, qkv.dtype, padded, split_size > 0, qkv.device)
    capacity = block_tables.shape[1] * page_size
    splits = num_splits or decode_splits(rows, head_blocks, capacity, block_n)
    if split_size > 0:
        splits = triton.cdiv(capacity, split_size)
    out = torch.empty((rows, num_heads * dim), dtype=qkv.dtype, device=qkv.device)
    part_out, part_max, part_sum = out, out, out
    if splits > 1:
        part_out = torch.empty((rows, num_heads, splits, dim), dtype=torch.float32, device=qkv.device)
        part_max = torch.empty((rows, num_heads, splits), dtype=torch.float32, device=qkv.device)
        part_sum = torch.empty_like(part_max)
        if counters is None:
            counters = torch.zeros(rows * head_blocks, dtype=torch.int32, device=qkv.device)
        checks.require(
            counters.dtype == torch.int32 and counters.numel() >= rows * head_blocks,
            f"counters {tuple(counters.shape)} {counters.dtype}: expected {rows * head_blocks} of int32",
        )
    members = min(triton.next_power_of_2(group), block_m)
    chain.launch(
        _decode,
        (rows, head_blocks, splits),
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        block_tables,
        kv_lens,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        out,
        part_out,
        part_max,
        part_sum,
        out if counters is None else counters,
        scale * 1.4426950408889634,
        eps,
        block_tables.shape[1],
        split_size,
        splits,
        HQ=num_heads,
        HK=kv_heads,
        D=dim,
        D_PAD=padded,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        SPLIT=splits > 1,
        MEMBERS=members,
        MERGED=min(max((8192 if members <= 4 else 4096) // (members * padded), 1), 16),
        NORM=q_norm is not None,
        pdl=pdl,
        lean=rows * head_blocks <= FEW,
        num_warps=warps,
    )
    return out
