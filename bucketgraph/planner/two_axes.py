"""Buckets of two axes, such as batch and length: a good plan, not a proven one.

A bucket serves every request that is no larger in either axis; each goes to the cheapest bucket that covers it. Which
buckets are best is a k-median problem, for which no fast exact method is known, so: greedy addition of the bucket that
saves most, some buckets too many, then greedy removal of the one that is missed least; after each step interchange,
moving one bucket at a time for as long as that saves anything; and of each count the better plan.
Sources of the method: Nemhauser, Wolsey and Fisher, "An analysis of approximations for maximizing submodular set
functions", Mathematical Programming 14, 1978 (addition alone reaches 1 - 1/e of the best saving over one bucket); Teitz
and Bart, "Heuristic methods for estimating the generalized vertex median of a weighted graph", Operations Research 16,
1968 (interchange). How far it is from the best plan is tested on small cases (tests/null/test_planner_two_axes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bucketgraph.errors import ConfigError
from bucketgraph.planner import optimum
from bucketgraph.planner.choose import Limits, need
from bucketgraph.planner.costs import CostCurve, Floats
from bucketgraph.planner.demand import Demand, aligned, coarse_enough
from bucketgraph.planner.readers import Integers

PER_AXIS = 24  # sizes of each axis that buckets can be made of
_TOO_MANY = 4  # buckets that are added and removed again


@dataclass(frozen=True)
class Grid:
    """What buckets can be made of, and how many launches lie in each cell."""

    sizes: Integers  # [m, 2] every combination of the axes' sizes
    weights: Floats  # [m] launches per 1,000 whose smallest sizes these are
    coarse: bool  # whether an axis had more sizes than `PER_AXIS`, and the best of them were kept

    @property
    def top(self) -> int:
        """The bucket that covers every request."""
        return len(self.sizes) - 1


@dataclass(frozen=True)
class Step:
    """A plan on the way from one bucket to many."""

    buckets: tuple[tuple[int, int], ...]
    total: float  # cost and prices per 1,000 launches
    cost: float  # the cost alone, if each launch takes the cheapest bucket that covers it


def grid(demand: Demand, align: Sequence[int]) -> Grid:
    """The combinations of sizes that buckets can have: the axes' aligned sizes, thinned to `PER_AXIS` each.

    An axis is thinned to the best sizes for its own lengths alone, by the exact optimum. A best bucket is the largest
    of its requests in either axis, so before thinning no better combination is missed.
    """
    axes, coarse = [], False
    for axis in (0, 1):
        asked = demand.sizes[:, axis]
        rounded = aligned(asked, coarse_enough(asked, align[axis]))
        values, inverse = np.unique(rounded, return_inverse=True)
        if len(values) > PER_AXIS:
            coarse = True
            weights = np.bincount(inverse, weights=demand.counts)
            values = values[optimum.best(values.astype(np.float64), weights, PER_AXIS).ends(PER_AXIS)]
        axes.append(values)
    first, second = (np.searchsorted(axes[axis], demand.sizes[:, axis]) for axis in (0, 1))
    cell = first * len(axes[1]) + second
    weights = np.bincount(cell, weights=demand.counts, minlength=len(axes[0]) * len(axes[1]))
    sizes = np.stack(np.meshgrid(axes[0], axes[1], indexing="ij"), axis=-1).reshape(-1, 2)
    return Grid(sizes, weights * (1000.0 / weights.sum()), coarse)


def plans(cells: Grid, curve: CostCurve, limits: Limits, most: int) -> list[Step]:
    """The plan of each count from 1 on, until `most`, or until no bucket more fits the limits or pays for itself.

    Raises:
        ConfigError: not even the one bucket that covers everything fits the budgets, or they need what is not known.
    """
    search = _Search(cells, curve, limits)
    if not search.fits([cells.top]):
        where = ",".join(map(str, cells.sizes[cells.top]))
        raise ConfigError(
            f"the bucket of {where} that covers everything is over the budget by itself",
            hint="raise the budget, or lower the largest size with --largest",
        )
    found = [[cells.top]]
    while len(found) < most + _TOO_MANY and (added := search.add(found[-1])) is not None:
        found.append(search.interchange([*found[-1], added]))
    for count in range(len(found) - 1, 1, -1):
        fewer = search.interchange(search.drop(found[count]))
        if search.total(fewer) < search.total(found[count - 1]):
            found[count - 1] = fewer
    return [search.step(chosen) for chosen in found[:most]]


class _Search:
    def __init__(self, cells: Grid, curve: CostCurve, limits: Limits) -> None:
        need(curve, limits)
        sizes = cells.sizes
        self.cells = cells
        self.cost = curve.cost(sizes)
        asked = np.flatnonzero(cells.weights)
        fits = np.asarray((sizes[asked][None] <= sizes[:, None]).all(axis=2))
        self.weights = cells.weights[asked]
        self.served = np.where(fits, self.cost[:, None], np.inf)  # [m, asked] what a bucket costs a request
        self._served = self.served.astype(np.float32)  # exact enough to rank moves, and twice as fast
        self._saved = np.empty_like(self._served)
        mib = curve.mib(sizes) if curve.mib else np.zeros(len(sizes))
        seconds = curve.seconds(sizes) if curve.seconds else np.zeros(len(sizes))
        self.prices = limits.price_mib * mib + limits.price_second * seconds
        budgets = [taken / limit for taken, limit in ((mib, limits.mib), (seconds, limits.seconds)) if limit]
        self.shares = np.stack(budgets, axis=1) if budgets else np.zeros((len(sizes), 0))

    def fits(self, chosen: Sequence[int]) -> bool:
        return bool((self.shares[list(chosen)].sum(axis=0) <= 1.0 + 1e-9).all())

    def total(self, chosen: Sequence[int]) -> float:
        return float(self.served[list(chosen)].min(axis=0) @ self.weights + self.prices[list(chosen)].sum())

    def step(self, chosen: Sequence[int]) -> Step:
        buckets = sorted((int(a), int(b)) for a, b in self.cells.sizes[list(chosen)])
        total = self.total(chosen)
        return Step(tuple(buckets), total, total - float(self.prices[list(chosen)].sum()))

    def add(self, chosen: Sequence[int]) -> int | None:
        """The bucket that saves most beside these and still fits; None if none saves anything."""
        now = self.served[list(chosen)].min(axis=0)
        np.subtract(now.astype(np.float32), self._served, out=self._saved)
        np.maximum(self._saved, 0.0, out=self._saved)
        saved = self._saved @ self.weights.astype(np.float32) - self.prices
        saved[(self.shares + self.shares[list(chosen)].sum(axis=0) > 1.0 + 1e-9).any(axis=1)] = -np.inf
        at = int(np.argmax(saved))
        return at if saved[at] > 1e-9 * self.total(chosen) else None

    def drop(self, chosen: Sequence[int]) -> list[int]:
        """All of these but the one that is missed least."""
        plans = [[c for c in chosen if c != gone] for gone in chosen if gone != self.cells.top]
        return min(plans, key=self.total)

    def interchange(self, chosen: list[int]) -> list[int]:
        """Move one bucket after the other to where it saves most, until a whole round saves nothing."""
        total = self.total(chosen)
        while True:
            before = total
            for place in range(len(chosen)):
                if chosen[place] == self.cells.top:
                    continue
                rest = chosen[:place] + chosen[place + 1 :]
                moved = self.add(rest)
                tried = rest if moved is None else [*rest[:place], moved, *rest[place:]]
                if moved is not None and self.total(tried) < total * (1 - 1e-12):
                    chosen, total = tried, self.total(tried)
            if total >= before * (1 - 1e-9):
                return chosen
