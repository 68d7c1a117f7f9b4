"""Batch x length: how far the heuristic is from the best plan, and that its figures are those of the set as it runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bucketgraph.buckets import Lattice
from bucketgraph.errors import ConfigError
from bucketgraph.planner import two_axes
from bucketgraph.planner.choose import Limits
from bucketgraph.planner.costs import CostCurve, Floats, linear, with_flat
from bucketgraph.planner.demand import Demand
from bucketgraph.planner.figures import measure
from bucketgraph.planner.readers import Integers

CASES = 300
MEAN, WORST = 0.001, 0.03  # stated in docs/planner.md: shares above the exhaustive optimum


def demand(random: np.random.Generator, rows: int, batches: int, lengths: int) -> Demand:
    batch = random.choice(np.sort(random.choice(32, batches, replace=False)) + 1, rows)
    length = random.choice(np.sort(random.choice(40, lengths, replace=False)) * 16 + 16, rows)
    cells, counts = np.unique(np.stack([batch, length], axis=1), axis=0, return_counts=True)
    return Demand(cells.astype(np.int64), counts * random.integers(1, 50, len(cells)))


def quadratic(sizes: Integers) -> Floats:
    return np.asarray(3.0 + sizes.prod(axis=1) / 500 + sizes[:, 0] * sizes[:, 1] ** 2 / 1e6)


def exhaustive(cells: two_axes.Grid, curve: CostCurve, count: int) -> float:
    """The least cost of any `count` buckets, the covering one among them."""
    costs = curve.cost(cells.sizes)
    asked = np.flatnonzero(cells.weights)
    fits = (cells.sizes[asked][None] <= cells.sizes[:, None]).all(axis=2)
    served = np.where(fits, costs[:, None], np.inf)
    plans = [[*some, cells.top] for some in itertools.combinations(range(cells.top), count - 1)]
    return float((served[np.array(plans)].min(axis=1) @ cells.weights[asked]).min())


def test_the_heuristic_stays_within_a_stated_distance_of_the_exhaustive_optimum() -> None:
    random = np.random.default_rng(7)
    off = []
    for number in range(CASES):
        curve = linear() if number % 2 else CostCurve("quadratic", "ms", quadratic)
        cells = two_axes.grid(demand(random, 12, 4, 4), (1, 16))
        count = int(random.integers(2, 6))
        steps = two_axes.plans(cells, curve, Limits(), count)
        off.append(steps[-1].total / exhaustive(cells, curve, min(count, cells.top + 1)) - 1)
    assert min(off) > -1e-9, "below the optimum: the two disagree about what a plan costs"
    assert np.mean(off) < MEAN and max(off) < WORST, (np.mean(off), max(off))


def test_more_buckets_never_cost_more() -> None:
    random = np.random.default_rng(8)
    cells = two_axes.grid(demand(random, 400, 12, 16), (1, 16))
    steps = two_axes.plans(cells, linear(), Limits(), 24)
    totals = [step.total for step in steps]
    assert totals == sorted(totals, reverse=True) and len(steps) == 24
    assert all(len(set(step.buckets)) == number for number, step in enumerate(steps, start=1))


def test_the_figures_are_those_of_the_lattice_that_will_run() -> None:
    random = np.random.default_rng(9)
    asked = demand(random, 300, 12, 16)
    steps = two_axes.plans(two_axes.grid(asked, (1, 16)), linear(), Limits(), 9)
    figures = measure(steps[-1].buckets, asked, linear())
    axes = {name: sorted({point[i] for point in steps[-1].buckets}) for i, name in enumerate(("batch", "tokens"))}
    lattice = Lattice(axes, points=steps[-1].buckets)
    padded = sum(
        lattice.plan(size).padded * count for size, count in zip(asked.sizes.tolist(), asked.counts, strict=True)
    )
    assert figures.covered == 1.0 and figures.padding == pytest.approx(padded / asked.work - 1)
    assert figures.cost == pytest.approx(steps[-1].total / 1000), "with cost in tokens, dispatch and plan agree"


def test_what_no_bucket_covers_is_counted_apart() -> None:
    asked = Demand(np.array([[1, 16], [2, 64], [4, 16]]), np.array([5, 3, 2]))
    figures = measure([(2, 32), (4, 16)], asked, linear())
    assert figures.covered == 0.7 and figures.covered_work == pytest.approx((5 * 16 + 2 * 64) / asked.work)
    assert figures.padding == pytest.approx((7 * 64) / (5 * 16 + 2 * 64) - 1)


def test_a_long_axis_is_thinned_and_still_covers_everything() -> None:
    random = np.random.default_rng(10)
    rows = np.unique(np.stack([random.integers(1, 200, 500), random.integers(1, 3000, 500)], axis=1), axis=0)
    asked = Demand(rows, np.ones(len(rows), np.int64))
    cells = two_axes.grid(asked, (1, 16))
    assert cells.coarse and len(cells.sizes) == two_axes.PER_AXIS**2 and cells.weights.sum() == pytest.approx(1000)
    assert measure(two_axes.plans(cells, linear(), Limits(), 5)[-1].buckets, asked, linear()).covered == 1.0


def test_budgets_and_prices_hold_on_two_axes_too() -> None:
    cells = two_axes.grid(demand(np.random.default_rng(11), 300, 10, 10), (1, 16))
    curve = with_flat(linear(), 2.0, 1.0)
    free = two_axes.plans(cells, curve, Limits(), 12)
    assert two_axes.plans(cells, curve, Limits(mib=11.0), 12)[-1] == free[4]
    assert two_axes.plans(cells, curve, Limits(seconds=3.0), 12)[-1] == free[2]
    price = (free[4].total - free[5].total) / 2 * 1.01  # a sixth bucket does not pay for its 2 MiB
    assert len(two_axes.plans(cells, curve, Limits(price_mib=price), 12)) <= 5
    with pytest.raises(ConfigError, match="covers everything is over the budget by itself"):
        two_axes.plans(cells, curve, Limits(mib=1.0), 12)
