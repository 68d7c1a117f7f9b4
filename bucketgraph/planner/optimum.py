"""The best buckets of one axis, exactly.

A plan's cost is the sum over its buckets of cost x launches + price. With sizes L_1 < ... < L_n, costs C that never
fall, W_i launches up to L_i and a price X_i for having L_i as a bucket:

    D[k][i] = X_i + min over j < i of D[k-1][j] + C_i * (W_i - W_j)

where k buckets cover sizes 1 to i and the last is L_i.
C_i * (W_i - W_j) satisfies the quadrangle inequality since C rises and W rises, so the best j rises with i, and each
layer takes O(n log n) by divide and conquer on i (see Galil and Park, "Dynamic programming with convexity, concavity
and sparsity", Theoretical Computer Science 92, 1992). `unbounded` drops k: each j is a line in C_i, and the lower
hull of lines is walked once, in O(n).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bucketgraph.planner.costs import Floats
from bucketgraph.planner.readers import Integers

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Optimum:
    """The best plans of 1, 2, ... buckets."""

    totals: Floats  # [most] cost and prices of the best plan with exactly k + 1 buckets
    _from: tuple[Indices, ...]  # [most][n + 1] the best j of D[k][i]

    def ends(self, count: int) -> list[int]:
        """Positions of the buckets in the best plan of `count`, ascending; the last is n - 1."""
        assert 1 <= count <= len(self.totals), f"there are plans of 1 to {len(self.totals)} buckets"
        at = len(self._from[0]) - 1
        chosen = []
        for layer in reversed(self._from[:count]):
            chosen.append(at - 1)
            at = int(layer[at])
        return chosen[::-1]


def best(costs: Floats, weights: Integers | Floats, most: int, prices: Floats | None = None) -> Optimum:
    """The best plan of each count of buckets up to `most`.

    Args:
        costs: `[n]` cost of one launch in each size, never falling.
        weights: `[n]` launches whose smallest permitted size this is; 0 for a size nobody asked for.
        prices: `[n]` what having this bucket costs by itself; None is 0.
    """
    n = len(costs)
    most = min(most, n)
    assert most >= 1, "a plan has at least one bucket"
    assert bool((np.diff(costs) >= -1e-9 * costs[-1]).all()), "costs must not fall"
    cost = np.concatenate([[0.0], np.maximum.accumulate(costs)])  # nor by a rounding
    price = np.zeros(n + 1) if prices is None else np.concatenate([[0.0], prices])
    until = np.concatenate([[0], np.cumsum(weights)]).astype(np.float64)
    layer = np.full(n + 1, np.inf)
    layer[0] = 0.0
    totals, sources = [], []
    for count in range(1, most + 1):
        layer, source = _layer(layer, cost, until, count)
        layer += price
        totals.append(layer[n])
        sources.append(source)
    return Optimum(np.array(totals), tuple(sources))


def _layer(before: Floats, cost: Floats, until: Floats, count: int) -> tuple[Floats, Indices]:
    """D[count] without prices, and the best j of each i, from D[count - 1].

    All i of one depth of the recursion are done at once: each scans the j between those of its neighbours above it.
    """
    n = len(before) - 1
    values = np.full(n + 1, np.inf)
    source = np.full(n + 1, count - 1, dtype=np.int64)
    step = 1 << (n - count + 1).bit_length() - 1
    while step:
        at = np.arange(count + step - 1, n + 1, 2 * step)
        low = np.where(at - step >= count, source[np.maximum(at - step, 0)], count - 1)
        above = at + step
        high = np.where(above <= n, source[np.minimum(above, n)], n)
        high = np.minimum(high, at - 1)
        values[at], source[at] = _scan(before, cost[at], until, low, high)
        values[at] += cost[at] * until[at]
        step >>= 1
    return values, source


def _scan(before: Floats, cost: Floats, until: Floats, low: Indices, high: Indices) -> tuple[Floats, Indices]:
    """For each row the least of before[j] - cost * until[j] over j from low to high, and the first j that has it."""
    lengths = high - low + 1
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    j = np.arange(int(lengths.sum())) + np.repeat(low - starts, lengths)
    found = before[j] - np.repeat(cost, lengths) * until[j]
    least = np.minimum.reduceat(found, starts)
    hits = np.flatnonzero(found == np.repeat(least, lengths))
    return least, j[hits[np.searchsorted(hits, starts)]]


def unbounded(costs: Floats, weights: Integers | Floats, prices: Floats) -> tuple[float, list[int]]:
    """The best plan of any count: its total and the positions of its buckets. Arguments as for `best`."""
    cost, price = costs.tolist(), prices.tolist()
    until = np.concatenate([[0], np.cumsum(weights)]).tolist()
    total, source = [0.0], [0]
    hull = [0]  # the j that are best for some cost from here on, by rising cost
    front = 0
    for i in range(1, len(cost) + 1):
        c = cost[i - 1]
        while front + 1 < len(hull) and _line(total, until, hull[front + 1], c) <= _line(total, until, hull[front], c):
            front += 1
        j = hull[front]
        total.append(price[i - 1] + total[j] + c * (until[i] - until[j]))
        source.append(j)
        if until[i] == until[hull[-1]]:  # parallel lines: the lower one stays
            if total[i] >= total[hull[-1]]:
                continue
            hull.pop()
        while len(hull) >= front + 2 and _useless(total, until, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
        front = min(front, len(hull) - 1)
    at, chosen = len(cost), []
    while at:
        chosen.append(at - 1)
        at = source[at]
    return total[-1], chosen[::-1]


def _line(total: list[float], until: list[int], j: int, cost: float) -> float:
    return total[j] - cost * until[j]


def _useless(total: list[float], until: list[int], a: int, b: int, c: int) -> bool:
    """Whether line b lies nowhere below both a and c; their slopes fall from a to c."""
    return (total[c] - total[a]) * (until[b] - until[a]) <= (total[b] - total[a]) * (until[c] - until[a])
