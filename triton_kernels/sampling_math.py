"""What sampling compares: keys of ordered floats, noise, packed scores, integer masses; and the k-th key of some."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # below every key
NONE = tl.constexpr(-(2**63))  # below every packed score
ONE = tl.constexpr(2**40)  # mass of the largest logit; a sum over 2**22 tokens fits


@triton.jit
def ordered(x):
    """int32 keys in the order of float32 `x`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def uniform(seed, token, position):
    """Top 23 bits of the first Philox word, at the cell centres: exact in float32, never 0 or 1."""
    zero = token * 0
    word, _, _, _ = tl.philox(seed, token, zero + position, zero, zero)
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def packed(score, token):
    """Score above, complement of the token id below: one maximum gives the best score and, of ties, the first token."""
    return (ordered(score).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def token_of(packed):
    return 0xFFFFFFFF - (packed & 0xFFFFFFFF)


@triton.jit
def drawn(x, t, seed, token, position):
    """Packed scores with their noise."""
    return packed(x - t * tl.log(-tl.log(uniform(seed, token, position))), token)


@triton.jit
def masses(key, top, rate):
    """Softmax masses relative to that of the largest key, `ONE`, rounded down; int64."""
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    best = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    part = tl.exp2((x - best) * rate) * ONE
    return tl.where(key == top, ONE, tl.where(part > 0, part, 0.0).to(tl.int64))  # NaN is 0


@triton.jit
def rate_of(t):
    return tl.minimum(1.4426950408889634 / t, 1.0e30)


@triton.jit
def limited_by_rank(t, k, V: tl.constexpr):
    return (t > 0) & (k > 0) & (k < V)


@triton.jit
def limited_by_mass(t, p):
    return (t > 0) & (p < 1.0)


@triton.jit
def is_allowed(above, whole, p):
    """Whether top-p leaves a token with mass `above` strictly above it; the largest always stays."""
    return (above == 0) | (above.to(tl.float64) < whole.to(tl.float64) * p.to(tl.float64))


@triton.jit
def next_best(scores, keys, refused):
    """The best packed score with a key above `refused`, `NONE` if there is none, and its key."""
    best = tl.max(tl.where(keys > refused, scores, NONE), 0)
    return best, tl.max(tl.where(scores == best, keys, LOWEST), 0)


@triton.jit
def quarters(low, high):
    """Three keys that cut `low .. high` (int64) in four; all lie strictly between, equal where room is short."""
    step = (high - low + 3) // 4
    b, c = tl.minimum(low + 2 * step, high - 1), tl.minimum(low + 3 * step, high - 1)
    return (low + step).to(tl.int32), b.to(tl.int32), c.to(tl.int32)


@triton.jit
def at_least(keys, a, b, c):
    """Whether keys are at least `a`, `b`, `c`, as ones in three fields of an int64 to sum."""
    return (keys >= a).to(tl.int64) | ((keys >= b).to(tl.int64) << 21) | ((keys >= c).to(tl.int64) << 42)


@triton.jit
def narrow(low, high, a, b, c, counts, k):
    """The quarter below whose end `k` keys are reached: `counts` are sums of `_at_least`."""
    in_a, in_b, in_c = (counts & 0x1FFFFF) >= k, ((counts >> 21) & 0x1FFFFF) >= k, (counts >> 42) >= k
    a, b, c = a.to(tl.int64), b.to(tl.int64), c.to(tl.int64)
    new_low = tl.where(in_c, c, tl.where(in_b, b, tl.where(in_a, a, low)))
    return new_low, tl.where(in_a, tl.where(in_b, tl.where(in_c, high, c), b), a)


@triton.jit
def kth_key(keys, k, low, high):
    """The k-th largest key, if it is in `low .. high - 1` (int64), else `low`."""
    while high - low > 1:
        a, b, c = quarters(low, high)
        low, high = narrow(low, high, a, b, c, tl.sum(at_least(keys, a, b, c), 0), k)
    return low.to(tl.int32)
