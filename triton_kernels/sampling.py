"""Sampling without generator state: greedy, or Gumbel-max with Philox noise keyed by (seed, position, token id).

Three kernels: the smallest logit that top-k and top-p leave (rows without either leave at once), the best token of each
vocabulary tile, the best of a row. Scores compare as `logit + temperature * g`, so temperature 0 is exactly greedy.
Floats are compared as integers of the same order, so ties and the search are exact; -0 equals 0, NaN is largest.
Method: Gumbel (1954) through the argmax; Philox4x32-10, Salmon et al. (SC'11).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from . import pdl as chain

TILE = 1024  # tokens per program of the argmax
SEARCH_TILE = 8192  # tokens per step of the threshold search
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(x):
    """int32 keys in the order of float32 `x`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _uniform(seed, token, position):
    """Top 23 bits of the first Philox word, at the cell centres: exact in float32, never 0 or 1."""
    zero = token * 0
    word, _, _, _ = tl.philox(seed, token, zero + position, zero, zero)
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _counts_from(row, a, b, c, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have a key of at least `a`, `b` and `c`, in one pass."""
    from_a = tl.zeros([BLOCK], tl.int32)
    from_b = tl.zeros([BLOCK], tl.int32)
    from_c = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
        key = tl.where(token < V, _ordered(x), LOWEST)  # the keys asked for are above the lowest
        from_a += (key >= a).to(tl.int32)
        from_b += (key >= b).to(tl.int32)
        from_c += (key >= c).to(tl.int32)
    return tl.sum(from_a, 0), tl.sum(from_b, 0), tl.sum(from_c, 0)


@triton.jit
def _masses_from(row, a, b, c, best, rate, V: tl.constexpr, BLOCK: tl.constexpr):
    """Unnormalised softmax mass of the logits with a key of at least `a`, `b` and `c`, in one pass."""
    from_a = tl.zeros([BLOCK], tl.float32)
    from_b = tl.zeros([BLOCK], tl.float32)
    from_c = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
        key = _ordered(x)
        mass = tl.exp2((x - best) * rate)
        from_a += tl.where(key >= a, mass, 0.0)
        from_b += tl.where(key >= b, mass, 0.0)
        from_c += tl.where(key >= c, mass, 0.0)
    return tl.sum(from_a, 0), tl.sum(from_b, 0), tl.sum(from_c, 0)


@triton.jit
def _quarters(low, high):
    """Three keys that cut `low .. high` (int64) in four; all lie strictly between, equal where room is short."""
    step = (high - low + 3) // 4
    b, c = tl.minimum(low + 2 * step, high - 1), tl.minimum(low + 3 * step, high - 1)
    return (low + step).to(tl.int32), b.to(tl.int32), c.to(tl.int32)


@triton.jit
def _narrow(low, high, a, b, c, like_low_a, like_low_b, like_low_c):
    """The quarter in which a monotone property changes from that of `low` to that of `high`."""
    a, b, c = a.to(tl.int64), b.to(tl.int64), c.to(tl.int64)
    new_low = tl.where(like_low_c, c, tl.where(like_low_b, b, tl.where(like_low_a, a, low)))
    new_high = tl.where(like_low_a, tl.where(like_low_b, tl.where(like_low_c, high, c), b), a)
    return new_low, new_high


@triton.jit
def _best_from(row, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit and its key."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32))
    value = tl.max(best, 0)
    return value, _ordered(value).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def _threshold(logits, temperature, top_k, top_p, thresholds, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.launch_dependents(PDL)
    index = tl.program_id(0).to(tl.int64)
    t, k, p = tl.load(temperature + index), tl.load(top_k + index), tl.load(top_p + index)
    chain.wait(PDL)
    by_rank = (k > 0) & (k < V)
    threshold = tl.full((), LOWEST, tl.int64)
    if (t > 0) & (by_rank | (p < 1.0)):
        row = logits + index * V
        best, top = _best_from(row, V, BLOCK)
        if by_rank:
            # The k-th largest key: counts from `low` reach k, counts from `high` do not.
            low, high = threshold, top + 1
            while high - low > 1:
                a, b, c = _quarters(low, high)
                from_a, from_b, from_c = _counts_from(row, a, b, c, V, BLOCK)
                low, high = _narrow(low, high, a, b, c, from_a >= k, from_b >= k, from_c >= k)
            threshold = low
        if p < 1.0:
            # The smallest key whose mass strictly above is below p of what top-k left: true of `high`, not of `low`.
            rate = tl.minimum(1.4426950408889634 / t, 1.0e30)
            least = threshold.to(tl.int32)
            whole, _, _ = _masses_from(row, least, least, least, best, rate, V, BLOCK)
            limit = whole * p
            low, high = threshold - 1, top
            while high - low > 1:
                a, b, c = _quarters(low, high)
                from_a, from_b, from_c = _masses_from(row, a + 1, b + 1, c + 1, best, rate, V, BLOCK)
                low, high = _narrow(low, high, a, b, c, from_a >= limit, from_b >= limit, from_c >= limit)
            threshold = high
    tl.store(thresholds + index, threshold.to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=["temperature", "seeds", "positions"])
def _tile_best(
    logits,
    temperature,
    thresholds,
    seeds,
    positions,
    partial,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    t, seed, position = tl.load(temperature + index), tl.load(seeds + index), tl.load(positions + index)
    chain.wait(PDL)
    x = tl.load(logits + index * V + token, mask=inside, other=0.0).to(tl.float32)
    score = x
    if t > 0:
        u = _uniform(seed, token, position)
        allowed = _ordered(x) >= tl.load(thresholds + index)
        score = tl.where(allowed, x - t * tl.log(-tl.log(u)), float("-inf"))
    # Score above, complement of the token id below: one maximum gives the best score and, of ties, the first token.
    packed = (_ordered(score).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))
    packed = tl.where(inside, packed, -(2**63))
    tl.store(partial + index * tl.num_programs(1) + tile, tl.max(packed, 0))


@triton.jit
def _row_best(partial, tokens, TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.launch_dependents(PDL)
    index = tl.program_id(0).to(tl.int64)
    chain.wait(PDL)
    tile = tl.arange(0, BLOCK)
    packed = tl.load(partial + index * TILES + tile, mask=tile < TILES, other=-(2**63))
    tl.store(tokens + index, 0xFFFFFFFF - (tl.max(packed, 0) & 0xFFFFFFFF))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """One token per row of `logits [B, V]` as int64, a function of nothing but the row's logits, seed and position.

    `temperature` float32, 0 = greedy (first of ties); `top_k` int32, 0 = off, ties of the k-th value stay; `top_p`
    float32, 1 = off, a token stays while the mass strictly above it is below `top_p`; `seeds` int64; `positions` int32.
    All `[B]`. `pdl`: as part of a chain (`pdl.py`). Raises ValueError for other shapes or dtypes.
    """
    rows, vocab = logits.shape
    checks.floats(logits=logits)
    checks.vector("temperature", temperature, rows, torch.float32)
    checks.vector("top_k", top_k, rows, torch.int32)
    checks.vector("top_p", top_p, rows, torch.float32)
    checks.vector("seeds", seeds, rows, torch.int64)
    checks.vector("positions", positions, rows, torch.int32)
    tiles = triton.cdiv(vocab, TILE)
    thresholds = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    partial = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
    tokens = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    # The vocabulary is a constant of the model, not a count of the request, so it may be compiled in.
    search = min(SEARCH_TILE, triton.next_power_of_2(vocab))
    params = temperature, top_k, top_p
    chain.launch(_threshold, (rows,), logits, *params, thresholds, V=vocab, BLOCK=search, pdl=pdl, num_warps=16)
    drawn = temperature, thresholds, seeds, positions
    chain.launch(_tile_best, (rows, tiles), logits, *drawn, partial, V=vocab, BLOCK=TILE, pdl=pdl, num_warps=4)
    block = triton.next_power_of_2(tiles)
    chain.launch(_row_best, (rows,), partial, tokens, TILES=tiles, BLOCK=block, pdl=pdl, num_warps=1)
    return tokens
