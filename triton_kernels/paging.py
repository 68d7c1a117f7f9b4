"""Device helpers that read K and V through a block table, for the attention kernels.

A tile of BLOCK_N positions lies in one page when PAGE >= BLOCK_N (tiles start at multiples of BLOCK_N): its page is a
scalar. Otherwise each position has its own. Callers load the pages of the next tile one iteration ahead and carry them
in a loop variable: a table load in the chain of the K load would halve the depth of the software pipeline.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Finite stand-in for minus infinity: (-inf) - (-inf) is NaN in a tile, or a split, in which nothing is visible.
FLOOR = tl.constexpr(-1.0e30)


@triton.jit
def tile_pages(table, start, width, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page (or pages) of positions `start ..`; page 0, which exists always, beyond the table's width."""
    if PAGE >= BLOCK_N:
        entry = start // PAGE
        pages = tl.load(table + entry, mask=entry < width, other=0)
    else:
        entry = (start + tl.arange(0, BLOCK_N)) // PAGE
        pages = tl.load(table + entry, mask=entry < width, other=0)
    return pages


@triton.jit
def tile_pointers(
    cache,
    pages,
    start,
    kv_head,
    HK: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pointers `[BLOCK_N, D_PAD]` of one tile of one KV head; int64 wherever a page id is multiplied."""
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    if PAGE >= BLOCK_N:
        base = cache + ((pages.to(tl.int64) * HK + kv_head) * PAGE + start % PAGE) * D
        pointers = base + (n[:, None] * D + d[None, :])
    else:
        row = (pages.to(tl.int64) * HK + kv_head) * PAGE + (start + n) % PAGE
        pointers = cache + row[:, None] * D + d[None, :]
    return pointers
