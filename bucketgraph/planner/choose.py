"""Which of the best plans: by a count, by budgets of memory and start-up time, or by their prices.

Rules: the unit of everything is the curve's (tokens or ms) per 1,000 launches, so a price means the same whatever the
length of the trace. A count or prices give the exact optimum. Budgets on top make it a knapsack: a Lagrange multiplier
is searched, the best plan that fits is improved by single moves, and the dual value says how far it can be from best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from bucketgraph.errors import ConfigError
from bucketgraph.planner import optimum
from bucketgraph.planner.costs import CostCurve, Floats
from bucketgraph.planner.demand import Candidates

DEFAULT_BUCKETS = 16  # where nothing is asked for
MOST_BUCKETS = 128  # where budgets or prices decide
_HALVINGS = 28


@dataclass(frozen=True)
class Limits:
    """What a plan may take, and what it pays."""

    buckets: int | None = None
    mib: float | None = None
    seconds: float | None = None
    price_mib: float = 0.0  # of one MiB, in the curve's unit per 1,000 launches
    price_second: float = 0.0  # of one second of start-up, likewise

    def __post_init__(self) -> None:
        if self.buckets is not None and not 1 <= self.buckets <= 4096:
            raise ConfigError("buckets is out of range", given=self.buckets, expected="1 to 4096")
        for name, value in (("memory", self.mib), ("startup-seconds", self.seconds)):
            if value is not None and not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} is out of range", given=value, expected="above 0")
        for name, value in (("price-memory", self.price_mib), ("price-startup", self.price_second)):
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is out of range", given=value, expected="0 or more")

    @property
    def priced(self) -> bool:
        return self.price_mib > 0 or self.price_second > 0

    @property
    def budgeted(self) -> bool:
        return self.mib is not None or self.seconds is not None

    @property
    def most(self) -> int:
        if self.buckets is not None:
            return self.buckets
        return MOST_BUCKETS if self.priced or self.budgeted else DEFAULT_BUCKETS


@dataclass(frozen=True)
class Bill:
    """What each candidate costs and takes."""

    costs: Floats  # [m] one launch
    weights: Floats  # [m] launches per 1,000
    mib: Floats  # [m]; zeros where unknown
    seconds: Floats  # [m]; zeros where unknown
    prices: Floats  # [m] what memory and start-up time cost

    @classmethod
    def of(cls, points: Candidates, curve: CostCurve, limits: Limits) -> Bill:
        """Raises ConfigError if a limit or a price needs MiB or seconds that the curve does not have."""
        need(curve, limits)
        sizes = points.sizes.reshape(len(points), -1)
        mib = curve.mib(sizes) if curve.mib else np.zeros(len(points))
        seconds = curve.seconds(sizes) if curve.seconds else np.zeros(len(points))
        prices = limits.price_mib * mib + limits.price_second * seconds
        costs = np.maximum.accumulate(curve.cost(sizes))  # a curve may fall by a rounding where it is flat
        return cls(costs, points.weights * (1000.0 / points.weights.sum()), mib, seconds, prices)

    def total(self, ends: Sequence[int]) -> float:
        """Cost and prices of a plan of these candidates."""
        at = np.asarray(ends)
        served = np.diff(np.cumsum(self.weights)[at], prepend=0.0)
        return float(self.costs[at] @ served + self.prices[at].sum())


@dataclass(frozen=True)
class Choice:
    """The plan, and the best plans of each count beside it."""

    ends: tuple[int, ...]  # positions of its buckets among the candidates
    total: float  # cost and prices per 1,000 launches
    bound: float  # no plan within the limits has less; equal to total if it is proven best
    counts: optimum.Optimum = field(repr=False)  # the best plans by count, limits aside

    @property
    def gap(self) -> float:
        """How far above the best possible the plan can be, as a share."""
        return max(0.0, self.total / self.bound - 1.0) if self.bound > 0 else 0.0


def need(curve: CostCurve, limits: Limits) -> None:
    """Raises ConfigError if a limit or a price needs MiB or seconds that the curve does not have."""
    for known, wanted, flags, what, flat in (
        (curve.mib, limits.mib or limits.price_mib, "memory and price-memory", "MiB", "--bucket-mib"),
        (
            curve.seconds,
            limits.seconds or limits.price_second,
            "startup-seconds and price-startup",
            "seconds",
            "--bucket-seconds",
        ),
    ):
        if wanted and known is None:
            raise ConfigError(f"{flags} need the {what} of a bucket", hint=f"give them in --costs, or {flat}")


def choose(points: Candidates, curve: CostCurve, limits: Limits, show: int = 64) -> Choice:
    """The best plan within `limits`.

    Args:
        show: how many counts to work out at least, for the trade-off.

    Raises:
        ConfigError: not even the one bucket that covers everything fits the budgets, or they need what is not known.
    """
    bill = Bill.of(points, curve, limits)
    counts = optimum.best(bill.costs, bill.weights, max(show, limits.most), bill.prices)
    most = min(limits.most, len(counts.totals))
    if not limits.budgeted:
        count = int(np.argmin(counts.totals[:most])) + 1 if limits.priced else most
        ends = tuple(counts.ends(count))
        return Choice(ends, bill.total(ends), bill.total(ends), counts)
    budget = _Budget(bill, limits, most)
    alone = [len(points) - 1]
    if not budget.fits(alone):
        raise ConfigError(
            f"the bucket of {points.sizes[-1]} that covers everything is over the budget by itself",
            given=budget.text(alone),
            hint="raise the budget, or lower the largest size with --largest",
        )
    plans = [counts.ends(count) for count in range(1, most + 1)]
    tried, bound = _priced_by_budget(bill, budget)
    bound = max(bound, float(counts.totals[:most].min()))  # the best plan if there were no budgets
    found = [_improved(plan, bill, budget) for plan in _fewest([*plans, *tried], bill, budget)]
    total, ends = min((bill.total(plan), tuple(plan)) for plan in found)
    return Choice(ends, total, min(bound, total), counts)


class _Budget:
    """Shares of what may be taken: a plan fits if no column of its sum is over 1."""

    def __init__(self, bill: Bill, limits: Limits, most: int) -> None:
        self._limits, self._bill = limits, bill
        shares = [np.full(len(bill.costs), 1.0 / most)] if most < len(bill.costs) else []
        if limits.mib is not None:
            shares.append(bill.mib / limits.mib)
        if limits.seconds is not None:
            shares.append(bill.seconds / limits.seconds)
        self.shares = np.stack(shares, axis=1)  # [m, budgets]

    def fits(self, ends: Sequence[int]) -> bool:
        return bool((self.shares[list(ends)].sum(axis=0) <= 1.0 + 1e-9).all())

    def text(self, ends: Sequence[int]) -> str:
        parts = []
        if self._limits.mib is not None:
            parts.append(f"{self._bill.mib[list(ends)].sum():g} MiB of {self._limits.mib:g}")
        if self._limits.seconds is not None:
            parts.append(f"{self._bill.seconds[list(ends)].sum():g} s of {self._limits.seconds:g}")
        return ", ".join(parts)


def _priced_by_budget(bill: Bill, budget: _Budget) -> tuple[list[list[int]], float]:
    """Plans that are best when the budgets have a price, over prices that go to where plans begin to fit, and the
    best lower bound that these prices prove. Each budget is priced alone, and all of them together.

    Source of the method: Lagrangian relaxation; Everett, "Generalized Lagrange multiplier method for solving problems
    of optimum allocation of resources", Operations Research 11, 1963.
    """
    plans, bound = [], 0.0
    alone = bill.total([len(bill.costs) - 1])
    single = list(np.eye(budget.shares.shape[1]))
    for weights in single if len(single) == 1 else [*single, np.ones(len(single))]:
        share, allowed = budget.shares @ weights, float(weights.sum())
        low, high = 0.0, alone / max(float(share[share > 0].min(initial=1.0)), 1e-9)
        for _ in range(_HALVINGS):
            price = (low * high) ** 0.5 if low else high / 2
            relaxed, ends = optimum.unbounded(bill.costs, bill.weights, bill.prices + price * share)
            bound = max(bound, relaxed - price * allowed)
            plans.append(ends)
            low, high = (low, price) if float(share[ends].sum()) <= allowed else (price, high)
    return plans, bound


def _fewest(plans: Sequence[list[int]], bill: Bill, budget: _Budget) -> list[list[int]]:
    """The three best different plans that fit: starting points enough for single moves."""
    different = {tuple(plan): plan for plan in plans if budget.fits(plan)}
    different.setdefault((len(bill.costs) - 1,), [len(bill.costs) - 1])
    return sorted(different.values(), key=bill.total)[:3]


def _improved(ends: list[int], bill: Bill, budget: _Budget) -> list[int]:
    """The plan after single moves (one more bucket, or one bucket moved), the best first, until none helps and fits."""
    while True:
        moves = [move for move in _moves(ends, bill, budget) if move[0] < -1e-9 * bill.total(ends)]
        if not moves:
            return ends
        ends = min(moves, key=lambda move: move[0])[1]


def _moves(ends: list[int], bill: Bill, budget: _Budget) -> Iterator[tuple[float, list[int]]]:
    """For each gap between buckets the best size to add there, and for each bucket the best one to have instead."""
    before = bill.total(ends)
    until = np.concatenate([[0.0], np.cumsum(bill.weights)])
    for place in range(len(ends)):
        for kept in (ends, ends[:place] + ends[place + 1 :]):
            if place == len(ends) - 1 and kept is not ends:
                continue  # the largest covers everything and stays
            start = ends[place - 1] + 1 if place else 0
            stop = ends[place] if kept is ends else ends[place + 1]
            nearest = ends[place] if kept is ends else ends[place + 1]
            new = np.arange(start, stop)
            used = budget.shares[kept].sum(axis=0)
            new = new[((budget.shares[new] + used) <= 1.0 + 1e-9).all(axis=1)]
            if not len(new):
                continue
            saved = (until[new + 1] - until[start]) * (bill.costs[nearest] - bill.costs[new]) - bill.prices[new]
            at = int(new[np.argmax(saved)])
            made = sorted([*kept, at])
            if made != ends:
                yield bill.total(made) - before, made
