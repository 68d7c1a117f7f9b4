"""Packed causal prefill attention over the paged cache, chunked prefill included; lengths are device data.

One program owns BLOCK_Q query tokens of one request and one KV head: the tile's rows are tokens times the group's
query heads. The grid is the upper bound `T // BLOCK_Q + R + 1` of such blocks, so it needs no length on the host; which
request owns a block is searched on the device. Rows past the last end form one more, virtual request: zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import checks
from . import pdl as chain
from .paging import FLOOR, tile_pages, tile_pointers

SEARCH = 128  # request slots per step of the owner search


@triton.jit
def _owner(query_ends, requests, block, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr):
    """The request of a block (`requests` for pad rows); those of r begin at `query_ends[r-1] // BLOCK_Q + r`."""
    owner = tl.full((), 0, tl.int32)
    for first in tl.range(0, requests, SEARCH):
        r = first + tl.arange(0, SEARCH)
        end = tl.load(query_ends + r, mask=r < requests, other=0)
        owner += tl.sum(((end // BLOCK_Q + r + 1 <= block) & (r < requests)).to(tl.int32), 0)
    return owner


@triton.jit
def _walk(
    acc,
    m,
    total,
    queries,
    position,  # of each row's query
    k_cache,
    v_cache,
    k_rows,  # descriptors of the caches as `[pages * HK * PAGE, D]`, with TMA
    v_rows,
    table,
    width,
    kv_head,
    scale,
    begin,
    end,
    HK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TMA: tl.constexpr,
):
    """Online softmax over the KV positions `begin .. end`; only on the DIAGONAL are some hidden from some rows."""
    in_dim = tl.arange(0, D_PAD) < D
    pages = tile_pages(table, begin, width, PAGE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_N)
        k_tile = tile_pointers(k_cache, pages, start, kv_head, HK, PAGE, D, D_PAD, BLOCK_N)
        v_tile = tile_pointers(v_cache, pages, start, kv_head, HK, PAGE, D, D_PAD, BLOCK_N)
        if DIAGONAL:
            # Masked at the load, since stale entries may be NaN and 0 * NaN is NaN.
            k = tl.load(k_tile, mask=(column < end)[:, None] & in_dim[None, :], other=0.0)
            v = tl.load(v_tile, mask=(column < end)[:, None] & in_dim[None, :], other=0.0)
        elif TMA:
            row = (pages * HK + kv_head) * PAGE + start % PAGE
            k = k_rows.load([row, 0])
            v = v_rows.load([row, 0])
        elif D == D_PAD:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        else:
            k = tl.load(k_tile, mask=in_dim[None, :], other=0.0)
            v = tl.load(v_tile, mask=in_dim[None, :], other=0.0)
        pages = tile_pages(table, start + BLOCK_N, width, PAGE, BLOCK_N)
        s = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if DIAGONAL:
            s = tl.where(column[None, :] <= position[:, None], s, FLOOR)
        # The same operations on and off the diagonal, so that a row's bits do not depend on where its block begins.
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit(
    do_not_specialize=["tokens", "requests", "table_width"],
    do_not_specialize_on_alignment=["block_tables", "query_ends", "kv_lens"],
)
def _prefill(
    q,
    k_cache,
    v_cache,
    k_rows,
    v_rows,
    block_tables,
    query_ends,
    kv_lens,
    out,
    scale,
    tokens,
    requests,
    table_width,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SEARCH: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    GROUP: tl.constexpr = HQ // HK
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Last blocks first: the late blocks of a request read most of the KV, and a heavy tail would leave SMs idle.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // HK
    kv_head = tl.program_id(0) % HK
    owner = _owner(query_ends, requests, block, BLOCK_Q, SEARCH)
    start = tl.load(query_ends + owner - 1, mask=owner > 0, other=0)
    end = tl.load(query_ends + owner, mask=owner < requests, other=tokens)
    kv_len = tl.load(kv_lens + owner, mask=owner < requests, other=0)
    first = start + (block - start // BLOCK_Q - owner) * BLOCK_Q
    chain.wait(PDL)
    if first >= end:
        return

    member = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    token = first + member // GROUP
    head = kv_head * GROUP + member % GROUP
    owned = (member < BLOCK_Q * GROUP) & (token < end)
    cell = (token.to(tl.int64) * HQ + head)[:, None] * D + d[None, :]
    in_tile = owned[:, None] & (d < D)[None, :]
    if kv_len <= 0:
        tl.store(out + cell, tl.zeros([BLOCK_M, D_PAD], out.dtype.element_ty), mask=in_tile)
        return

    queries = tl.load(q + cell, mask=in_tile, other=0.0)
    position = kv_len - end + token
    seen = kv_len - end + tl.minimum(first + BLOCK_Q, end)  # positions that the block's last query attends to
    whole = (
        tl.maximum(kv_len - end + first + 1, 0) // BLOCK_N * BLOCK_N
    )  # positions of tiles that all of its queries see
    table = block_tables + owner.to(tl.int64) * table_width
    m = tl.full([BLOCK_M], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    acc, m, total = _walk(
        acc, m, total, queries, position, k_cache, v_cache, k_rows, v_rows, table, table_width, kv_head, scale,
        0, whole, HK, D, D_PAD, PAGE, BLOCK_N, STAGES, False, TMA,
    )  # fmt: skip
    acc, m, total = _walk(
        acc, m, total, queries, position, k_cache, v_cache, k_rows, v_rows, table, table_width, kv_head, scale,
        whole, seen, HK, D, D_PAD, PAGE, BLOCK_N, STAGES, True, False,
    )  # fmt: skip
    tl.store(out + cell, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_tile)


def prefill_tile(dtype: torch.dtype, padded_dim: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages): of dtype and head dimension alone, so that no bit moves with the bucket."""
    if dtype == torch.float32:
        # Exact float32 products use no tensor cores; the operands live in registers, so more warps avoid spills.
        return 32, 32, 16 if padded_dim > 64 else 8, 2
    # 64 rows: four warps hold a 128 x 128 accumulator only with spills, and eight are slower.
    return (64, 32, 8, 2) if padded_dim > 128 else (64, 64, 4, 3)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_ends: Tensor,
    kv_lens: Tensor,
    scale: float,
    *,
    tma: bool | None = None,
    tile: tuple[int, int, int, int] | None = None,
    pdl: bool = False,
) -> Tensor:
    """Causal attention of packed rows `q [T, Hq, D]` over their requests' pages; `[T, Hq, D]`, zeros in pad rows.

    Request r owns rows `query_ends[r-1] .. query_ends[r]`, the last of its `kv_lens[r]` tokens. `query_ends [R]` and
    `kv_lens [R]` are int32; padded request slots repeat the last end and have length 0. Caches are
    `[pages, Hk, page_size, D]`, `block_tables [R, W]` int32. `tma`: whole tiles of K and V through tensor descriptors,
    which needs pages of whole tiles; None where the device has them. `tile` overrides `prefill_tile`. `pdl`: as part
    of a chain (`pdl.py`). Raises ValueError for shapes, dtypes or strides that do not fit. Method: FlashAttention-2
    (Dao, 2023) with grouped heads in the tile.
    """
    tokens, heads, dim = q.shape
    requests = query_ends.shape[0]
    checks.floats(q=q, k_cache=k_cache, v_cache=v_cache)
    checks.caches(k_cache, v_cache, dim)
    padded = checks.head_dim(dim)
    checks.table("block_tables", block_tables, requests)
    checks.vector("query_ends", query_ends, requests, torch.int32)
    checks.vector("kv_lens", kv_lens, requests, torch.int32)
    checks.require(scale > 0, f"scale {scale}: expected a positive number")
    kv_heads, page_size = k_cache.shape[1:3]
    group = checks.group(heads, kv_heads)
    block_m, block_n, warps, stages = tile or prefill_tile(q.dtype, padded)
    block_m = max(block_m, triton.next_power_of_2(group))
    checks.require(group <= 128, f"{heads} query heads on {kv_heads} KV heads: expected at most 128 to one")
    fits = page_size % block_n == 0 and dim == padded and q.dtype != torch.float32 and k_cache.numel() // dim < 2**31
    if tma is None:
        tma = fits and chain.pdl_supported(q.device)  # the same devices have both
    checks.require(
        fits or not tma, f"tma: pages of {page_size} are not whole tiles of {block_n} x {padded} half floats"
    )
    k_rows = TensorDescriptor.from_tensor(k_cache.view(-1, dim), [block_n, dim]) if tma else k_cache
    v_rows = TensorDescriptor.from_tensor(v_cache.view(-1, dim), [block_n, dim]) if tma else v_cache
    out = torch.empty_like(q)
    blocks = tokens // (block_m // group) + requests + 1
    chain.launch(
        _prefill,
        (blocks * kv_heads,),
        q,
        k_cache,
        v_cache,
        k_rows,
        v_rows,
        block_tables,
        query_ends,
        kv_lens,
        out,
        scale * 1.4426950408889634,
        tokens,
        requests,
        block_tables.shape[1],
        HQ=heads,
        HK=kv_heads,
        D=dim,
        D_PAD=padded,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        SEARCH=SEARCH,
        TMA=tma,
        pdl=pdl,
        lean=False,
        num_warps=warps,
    )
    return out
