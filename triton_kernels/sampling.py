"""Sampling without generator state: greedy, or Gumbel-max with Philox noise keyed by (seed, position, token id).

Scores compare as `logit + temperature * g`, so temperature 0 is exactly greedy. Floats are compared as integers of the
same order, so ties and searches are exact; -0 equals 0, NaN is largest. Masses are sums of integers: no order matters.
Three kernels. The best of each vocabulary tile; candidates, where top-k or top-p limit a row; the token of each row.
Top-k looks among the logits above a bound that the k-th cannot be below: the k-th largest of the maxima of groups.
Top-p asks the winner: a token that is refused refuses all of its logit or below, so the best score above is the next
to ask, and the first that is allowed is the token of a threshold, without a search for it. Three are asked in one pass.
Method: Gumbel (1954) through the argmax; Philox4x32-10, Salmon et al. (SC'11); the idea of asking winners in place of
sorting is that of FlashInfer's rejection sampling, Ye et al. (MLSys'25), which draws anew where this keeps its noise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from . import pdl as chain
from .sampling_math import (
    LOWEST,
    NONE,
    at_least,
    drawn,
    is_allowed,
    kth_key,
    limited_by_mass,
    limited_by_rank,
    masses,
    narrow,
    next_best,
    ordered,
    packed,
    quarters,
    rate_of,
    token_of,
)

TILE = 1024  # tokens per step of many programs
STEP = 4096  # tokens per step of the one program that has a row for itself
GROUPS = 16  # parts of a tile whose largest logits are kept
FEW, MANY = 512, 4096  # candidates of top-k that are compared in registers; with more the row is searched
PROGRAMS = 256  # that look for candidates: what runs at once on an H200
# The state of a limited row: candidates of top-k; the whole mass; the masses above the winner and two guesses of who is
# next; who is next after the winner and after the first guess; the guesses.
COUNT, WHOLE, ABOVE, NEXT, GUESS, STATE = (tl.constexpr(i) for i in (0, 1, 2, 5, 7, 16))


@triton.jit
def _top(maxima, GROUPS: tl.constexpr, ALL: tl.constexpr):
    """The largest key of a row."""
    group = tl.arange(0, ALL)
    return tl.max(tl.load(maxima + group, mask=group < GROUPS, other=LOWEST), 0)


@triton.jit
def _kth_of_row(row, k, top, V: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest key of a row, in some 16 passes over it."""
    low, high = tl.full((), LOWEST, tl.int64), top.to(tl.int64) + 1
    while high - low > 1:
        a, b, c = quarters(low, high)
        counts = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
            counts += at_least(tl.where(token < V, ordered(x), LOWEST), a, b, c)  # what is asked is above the lowest
        low, high = narrow(low, high, a, b, c, tl.sum(counts, 0), k)
    return low.to(tl.int32)


@triton.jit
def _weighed(row, refused, top, rate, t, seed, position, V: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the keys above `refused` and their best packed score, in one pass over a row."""
    mass, best = tl.full((), 0, tl.int64), tl.full((), NONE, tl.int64)
    for start in tl.range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
        key = tl.where(token < V, ordered(x), LOWEST)
        if tl.max(key, 0) > refused:
            mass += tl.sum(tl.where(key > refused, masses(key, top, rate), 0), 0)
            score = drawn(x, t, seed, token, position)
            best = tl.maximum(best, tl.max(tl.where(key > refused, score, NONE), 0))
    return mass, best


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "seeds", "positions"])
def _tile_best(
    logits,
    temperature,
    top_k,
    top_p,
    seeds,
    positions,
    partial,  # [B, tiles] int64: packed; without noise where top-k is on
    maxima,  # [B, tiles, GROUPS] int32: keys, written in limited rows
    state,  # [B, STATE] int64: made ready in limited rows
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    t, k, p = tl.load(temperature + index), tl.load(top_k + index), tl.load(top_p + index)
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    chain.wait(PDL)
    x = tl.load(logits + index * V + token, mask=inside, other=0.0).to(tl.float32)
    score = packed(x, token)
    by_rank = limited_by_rank(t, k, V)
    if (t > 0) & (by_rank == 0):
        score = drawn(x, t, seed, token, position)
    score = tl.where(inside, score, NONE)
    place = index * tl.num_programs(1) + tile
    tl.store(partial + place, tl.max(score, 0))
    if by_rank | limited_by_mass(t, p):
        key = tl.where(inside, ordered(x), LOWEST)
        largest = tl.max(tl.reshape(key, [GROUPS, BLOCK // GROUPS]), 1)
        tl.store(maxima + place * GROUPS + tl.arange(0, GROUPS), largest)
        if tile == 0:
            slot = tl.arange(0, STATE)
            tl.store(state + index * STATE + slot, tl.where((slot >= NEXT) & (slot < GUESS), NONE, 0))


@triton.jit
def _collect(
    row,
    maxima,
    state,
    keys,
    scores,
    k,
    t,
    seed,
    position,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    MANY: tl.constexpr,
):
    """Keys and packed scores of the tokens that the k-th largest cannot be above, as far as there is room."""
    group = tl.arange(0, ALL * GROUPS)
    largest = tl.load(maxima + group, mask=group < TILES * GROUPS, other=LOWEST)
    # Half of the bits of the k-th largest maximum; the lowest where groups are fewer than k.
    bound = kth_key(largest >> 16, k, tl.full((), -(2**15), tl.int64), tl.full((), 2**15, tl.int64)) << 16
    for tile in tl.range(tl.program_id(1), TILES, tl.num_programs(1)):
        if tl.max(tl.load(maxima + tile * GROUPS + tl.arange(0, GROUPS)), 0) >= bound:
            token = tile * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
            key = ordered(x)
            stays = (token < V) & (key >= bound)
            last = tl.cumsum(stays.to(tl.int32), 0)
            count = tl.sum(stays.to(tl.int32), 0).to(tl.int64)
            slot = tl.atomic_add(state + COUNT, count, sem="relaxed") + last - 1
            stays = stays & (slot < MANY)
            tl.store(keys + slot, key, mask=stays)
            tl.store(scores + slot, drawn(x, t, seed, token, position), mask=stays)


@triton.jit
def _ask(
    row,
    partial,
    maxima,
    state,
    t,
    seed,
    position,
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
):
    """The masses above the winner and two guesses of who is next, and who is next after the winner and the first."""
    top, rate = _top(maxima, TILES * GROUPS, ALL * GROUPS), rate_of(t)
    of_tile = tl.arange(0, ALL)
    winners = tl.load(partial + of_tile, mask=of_tile < TILES, other=NONE)
    logit = tl.load(row + token_of(winners), mask=of_tile < TILES, other=0.0).to(tl.float32)
    keys = tl.where(of_tile < TILES, ordered(logit), LOWEST)
    _, key0 = next_best(winners, keys, LOWEST)
    guess1, key1 = next_best(winners, keys, key0)
    guess2, key2 = next_best(winners, keys, key1)
    if tl.program_id(1) == 0:
        tl.store(state + GUESS, guess1)
        tl.store(state + GUESS + 1, guess2)
    whole = tl.zeros([BLOCK], tl.int64)
    above0, above1, above2 = whole, whole, whole
    next0 = tl.full([BLOCK], NONE, tl.int64)
    next1 = next0
    for tile in tl.range(tl.program_id(1), TILES, tl.num_programs(1)):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
        key = tl.where(token < V, ordered(x), LOWEST)
        mass = masses(key, top, rate)
        whole += mass
        if tl.max(key, 0) > key0:
            above0 += tl.where(key > key0, mass, 0)
            above1 += tl.where(key > key1, mass, 0)
            above2 += tl.where(key > key2, mass, 0)
            score = drawn(x, t, seed, token, position)
            next0 = tl.maximum(next0, tl.where(key > key0, score, NONE))
            next1 = tl.maximum(next1, tl.where(key > key1, score, NONE))
    tl.atomic_add(state + WHOLE, tl.sum(whole, 0), sem="relaxed")
    best = tl.max(next0, 0)
    if best > NONE:
        tl.atomic_add(state + ABOVE, tl.sum(above0, 0), sem="relaxed")
        tl.atomic_add(state + ABOVE + 1, tl.sum(above1, 0), sem="relaxed")
        tl.atomic_add(state + ABOVE + 2, tl.sum(above2, 0), sem="relaxed")
        tl.atomic_max(state + NEXT, best, sem="relaxed")
        tl.atomic_max(state + NEXT + 1, tl.max(next1, 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "seeds", "positions"])
def _candidates(
    logits,
    temperature,
    top_k,
    top_p,
    seeds,
    positions,
    partial,
    maxima,
    state,
    keys,  # [B, MANY] int32: of the candidates of top-k, in any order
    scores,  # [B, MANY] int64: packed
    V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,  # tiles, to a power of two
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    index = tl.program_id(0).to(tl.int64)
    t, k, p = tl.load(temperature + index), tl.load(top_k + index), tl.load(top_p + index)
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    chain.wait(PDL)
    row, maxima, state = logits + index * V, maxima + index * TILES * GROUPS, state + index * STATE
    if limited_by_rank(t, k, V):
        keys, scores = keys + index * MANY, scores + index * MANY
        _collect(row, maxima, state, keys, scores, k, t, seed, position, V, TILES, BLOCK, GROUPS, ALL, MANY)
    elif limited_by_mass(t, p):
        _ask(row, partial + index * TILES, maxima, state, t, seed, position, V, TILES, BLOCK, GROUPS, ALL)


@triton.jit
def _among(keys, scores, count, k, p, top, rate, SIZE: tl.constexpr):
    """The packed score of the token of a row, by its candidates of top-k."""
    slot = tl.arange(0, SIZE)
    inside = slot < count
    key = tl.load(keys + slot, mask=inside, other=LOWEST)
    score = tl.load(scores + slot, mask=inside, other=NONE)
    least = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0)
    kth = kth_key(key, k, least.to(tl.int64), top.to(tl.int64) + 1)
    best, refused = next_best(score, key, kth - 1)
    if p < 1.0:
        mass = tl.where(key >= kth, masses(key, top, rate), 0)
        whole = tl.sum(mass, 0)
        while is_allowed(tl.sum(tl.where(key > refused, mass, 0), 0), whole, p) == 0:
            best, refused = next_best(score, key, refused)
    return best


@triton.jit
def _answer(state, best, p):
    """The whole mass, the packed score of the token by what `_ask` found, and whether it is known to be allowed."""
    whole = tl.load(state + WHOLE)
    next0, next1 = tl.load(state + NEXT), tl.load(state + NEXT + 1)
    known1 = token_of(next0) == token_of(tl.load(state + GUESS))
    known2 = known1 & (token_of(next1) == token_of(tl.load(state + GUESS + 1)))
    good0 = is_allowed(tl.load(state + ABOVE), whole, p)
    good1 = known1 & is_allowed(tl.load(state + ABOVE + 1), whole, p)
    good2 = known2 & is_allowed(tl.load(state + ABOVE + 2), whole, p)
    best = tl.where(good0, best, tl.where(known1 & (good1 == 0), next1, next0))
    return whole, best, good0 | good1 | good2


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "seeds", "positions"])
def _row_best(
    logits,
    temperature,
    top_k,
    top_p,
    seeds,
    positions,
    partial,
    maxima,
    state,
    keys,
    scores,
    tokens,  # [B] int64
    V: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    index = tl.program_id(0).to(tl.int64)
    t, k, p = tl.load(temperature + index), tl.load(top_k + index), tl.load(top_p + index)
    chain.wait(PDL)
    row, state = logits + index * V, state + index * STATE
    tile = tl.arange(0, ALL)
    best = tl.max(tl.load(partial + index * TILES + tile, mask=tile < TILES, other=NONE), 0)
    by_rank, by_mass = limited_by_rank(t, k, V), limited_by_mass(t, p)
    if by_rank | by_mass:
        seed, position = tl.load(seeds + index), tl.load(positions + index)
        top, rate = _top(maxima + index * TILES * GROUPS, TILES * GROUPS, ALL * GROUPS), rate_of(t)
        whole = tl.full((), 0, tl.int64)
        allowed = tl.full((), True, tl.int1)
        if by_rank:
            keys, scores = keys + index * MANY, scores + index * MANY
            count = tl.load(state + COUNT)
            if count <= FEW:
                best = _among(keys, scores, count, k, p, top, rate, FEW)
            elif count <= MANY:
                best = _among(keys, scores, count, k, p, top, rate, MANY)
            else:
                kth = _kth_of_row(row, k, top, V, STEP)
                whole, best = _weighed(row, kth - 1, top, rate, t, seed, position, V, STEP)
                allowed = by_mass == 0
        else:
            whole, best, allowed = _answer(state, best, p)
        while allowed == 0:
            refused = ordered(tl.load(row + token_of(best)).to(tl.float32))
            above, following = _weighed(row, refused, top, rate, t, seed, position, V, STEP)
            allowed = is_allowed(above, whole, p)
            best = tl.where(allowed, best, following)
    tl.store(tokens + index, token_of(best))


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

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    tiles = triton.cdiv(vocab, TILE)
    given = logits, temperature, top_k, top_p, seeds, positions
    of_tiles = scratch(torch.int64, tiles), scratch(torch.int32, tiles, GROUPS), scratch(torch.int64, STATE.value)
    found = scratch(torch.int32, MANY), scratch(torch.int64, MANY)
    tokens = scratch(torch.int64)
    # The vocabulary is a constant of the model, not a count of the request, so it may be compiled in.
    sizes: dict[str, Any] = {"V": vocab, "GROUPS": GROUPS, "pdl": pdl}
    chain.launch(_tile_best, (rows, tiles), *given, *of_tiles, **sizes, BLOCK=TILE, num_warps=4)
    sizes |= {"TILES": tiles, "ALL": triton.next_power_of_2(tiles), "MANY": MANY}
    programs = min(tiles, max(1, PROGRAMS // rows))
    chain.launch(_candidates, (rows, programs), *given, *of_tiles, *found, **sizes, BLOCK=TILE, num_warps=8)
    chain.launch(_row_best, (rows,), *given, *of_tiles, *found, tokens, **sizes, FEW=FEW, STEP=STEP, num_warps=8)
    return tokens
