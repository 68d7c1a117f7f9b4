"""The planner's optimum: never worse than any other choice of sizes, by brute force, and honest about its budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bucketgraph.errors import ConfigError
from bucketgraph.planner.choose import Bill, Limits, choose
from bucketgraph.planner.costs import CostCurve, Floats, linear, with_flat
from bucketgraph.planner.demand import Candidates, Demand, candidates, coarse_enough
from bucketgraph.planner.optimum import best, unbounded
from bucketgraph.planner.readers import Integers

CASES = 10_000


def total(ends: Sequence[int], costs: Floats, weights: Integers, prices: Floats) -> float:
    """What a plan costs, said as plainly as possible."""
    spent, last = 0.0, -1
    for end in ends:
        spent += costs[end] * sum(weights[last + 1 : end + 1]) + prices[end]
        last = end
    return float(spent)


def every_plan(sizes: int, count: int) -> list[tuple[int, ...]]:
    """Every choice of `count` of the sizes that covers the largest."""
    return [(*some, sizes - 1) for some in itertools.combinations(range(sizes - 1), count - 1)]


class Brute:
    """Every plan over n sizes at once: which sizes are buckets, and which bucket each size falls into."""

    def __init__(self, n: int) -> None:
        plans = [plan for count in range(1, n + 1) for plan in every_plan(n, count)]
        self.chosen = np.array([[size in plan for size in range(n)] for plan in plans], dtype=float)
        self.bucket = np.array([[min(end for end in plan if end >= size) for size in range(n)] for plan in plans])
        self.starts = np.flatnonzero(np.diff([len(plan) for plan in plans], prepend=0))  # where each count begins

    def least(self, costs: Floats, weights: Integers, prices: Floats) -> Floats:
        """The least total of each count of buckets `[n]`."""
        return np.minimum.reduceat(costs[self.bucket] @ weights + self.chosen @ prices, self.starts)


BRUTE = {n: Brute(n) for n in range(1, 7)}


def random_case(random: np.random.Generator, number: int) -> tuple[Floats, Integers, Floats]:
    n = int(random.integers(1, 7))
    ties = np.sort(random.integers(0, 9, n)).astype(float)
    costs = ties if number % 2 else np.cumsum(random.random(n))  # equal costs, and nobody asking, are legal
    return costs, random.integers(0, 6, n), random.random(n) * (0.0, 1.0, 10.0)[number % 3]


def test_the_optimum_equals_brute_force_on_ten_thousand_random_cases() -> None:
    random = np.random.default_rng(20261201)
    for number in range(CASES):
        costs, weights, prices = random_case(random, number)
        n = len(costs)
        wanted = BRUTE[n].least(costs, weights, prices)
        found = best(costs, weights, n + 3, prices)
        assert np.allclose(found.totals, wanted, rtol=1e-12, atol=1e-9), (costs, weights, prices)
        count = int(random.integers(1, n + 1))
        ends = found.ends(count)
        assert len(set(ends)) == count and ends == sorted(ends) and ends[-1] == n - 1
        assert total(ends, costs, weights, prices) == pytest.approx(wanted[count - 1], abs=1e-9)
        least, free = unbounded(costs, weights, prices)
        assert least == pytest.approx(min(wanted), abs=1e-9) and free[-1] == n - 1
        assert total(free, costs, weights, prices) == pytest.approx(least, abs=1e-9)


def test_the_optimum_equals_the_plain_recurrence_where_brute_force_cannot_go() -> None:
    random = np.random.default_rng(3)
    costs, weights = np.cumsum(random.random(160)), random.integers(0, 50, 160)
    until = np.concatenate([[0], np.cumsum(weights)]).astype(float)
    layer = np.concatenate([[0.0], np.full(160, np.inf)])
    found = best(costs, weights, 12)
    for count in range(12):
        after = np.full(161, np.inf)
        for i in range(1, 161):
            after[i] = min(layer[j] + costs[i - 1] * (until[i] - until[j]) for j in range(i))
        layer = after
        assert found.totals[count] == pytest.approx(layer[160], rel=1e-12)


def test_more_buckets_never_waste_more_and_save_less_each_time() -> None:
    random = np.random.default_rng(4)
    found = best(np.arange(1.0, 300.0), random.integers(0, 9, 299), 40)
    saved = -np.diff(found.totals)
    assert (saved >= -1e-9).all() and (np.diff(saved) <= 1e-9).all()


# -- candidates --------------------------------------------------------------------------------------------------------


def demand(*lengths: int) -> Demand:
    values, counts = np.unique(np.array(lengths, dtype=np.int64), return_counts=True)
    return Demand(values[:, None], counts)


def test_candidates_are_the_smallest_permitted_sizes_of_the_requests() -> None:
    points = candidates(demand(1, 16, 17, 40, 100, 100), 16)
    assert points.sizes.tolist() == [16, 32, 48, 112] and points.weights.tolist() == [2, 1, 1, 2]
    points = candidates(demand(1, 16, 17, 40, 100, 100), 16, also=[20, 104, 4])
    assert points.sizes.tolist() == [4, 16, 20, 48, 104] and points.weights.tolist() == [1, 1, 1, 1, 2]


def test_too_many_sizes_are_thinned_by_a_coarser_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketgraph.planner.demand.MAX_CANDIDATES", 10)
    assert [coarse_enough(np.arange(1, stop), 16) for stop in (161, 162, 500)] == [16, 32, 64]


# -- limits ------------------------------------------------------------------------------------------------------------


def by_size(sizes: Sequence[int], values: Sequence[float]) -> Callable[[Integers], Floats]:
    table = dict(zip(sizes, values, strict=True))
    return lambda asked: np.array([table[int(size)] for size in asked[:, 0]])


def test_budgets_are_kept_and_the_proven_bound_is_below_the_best_plan() -> None:
    random = np.random.default_rng(5)
    off, best_found = [], 0
    for number in range(400):
        n = int(random.integers(2, 9))
        sizes = np.cumsum(random.integers(1, 20, n))
        weights = random.integers(0, 20, n)
        weights[-1] += 1
        mib, seconds = random.random(n) * 10 + 0.5, random.random(n) * 3 + 0.1
        curve = CostCurve("x", "ms", lambda s: s[:, 0] + 3.0, by_size(sizes, mib), by_size(sizes, seconds))
        limits = Limits(
            buckets=int(random.integers(1, 6)) if number % 3 == 0 else None,
            mib=float(mib[-1] + random.random() * mib.sum()),
            seconds=float(seconds[-1] + random.random() * seconds.sum()) if number % 5 else None,
            price_mib=float(random.random() * 20) if number % 7 == 0 else 0.0,
        )
        points = Candidates(sizes, weights)
        made = choose(points, curve, limits)
        bill, ends = Bill.of(points, curve, limits), list(made.ends)
        assert limits.mib is not None and mib[ends].sum() <= limits.mib + 1e-6
        assert limits.seconds is None or seconds[ends].sum() <= limits.seconds + 1e-6
        assert limits.buckets is None or len(ends) <= limits.buckets
        fitting = [
            bill.total(plan)
            for count in range(1, min(n, limits.buckets or n) + 1)
            for plan in every_plan(n, count)
            if mib[list(plan)].sum() <= limits.mib
            and (limits.seconds is None or seconds[list(plan)].sum() <= limits.seconds)
        ]
        assert made.bound <= min(fitting) * (1 + 1e-9) and made.total >= min(fitting) * (1 - 1e-9)
        off.append(made.total / min(fitting) - 1)
        best_found += off[-1] < 1e-9
    assert max(off) < 0.08 and best_found >= 390


def test_a_price_buys_a_bucket_only_while_it_saves_more() -> None:
    points = candidates(demand(*range(16, 161, 16)), 16)
    curve = with_flat(linear(), 2.0, 0.5)
    free = choose(points, curve, Limits(buckets=10))
    assert len(free.ends) == 10 and free.total == pytest.approx(1000 * 88)
    for price in (0.5, 100.0, 5000.0, 1e6):
        made = choose(points, curve, Limits(price_mib=price))
        totals = [choose(points, curve, Limits(buckets=k)).total + 2 * price * k for k in range(1, 11)]
        assert made.total == pytest.approx(min(totals)) and len(made.ends) == int(np.argmin(totals)) + 1
        assert made.gap == 0.0
    both = choose(points, curve, Limits(price_second=400.0))
    assert both.ends == choose(points, curve, Limits(price_mib=100.0)).ends


def test_equal_buckets_make_a_memory_budget_a_count() -> None:
    points = candidates(demand(*range(1, 400, 3)), 16)
    curve = with_flat(linear(), 2.0, 1.0)
    for limits in (Limits(mib=11.9), Limits(seconds=5.0), Limits(mib=11.9, seconds=5.9), Limits(buckets=9, mib=10)):
        made, counted = choose(points, curve, limits), choose(points, curve, Limits(buckets=5))
        assert made.ends == counted.ends and made.total == counted.total and made.bound <= made.total


def test_the_default_is_sixteen_buckets_and_no_more_than_there_are_sizes() -> None:
    assert len(choose(candidates(demand(*range(1, 999)), 16), linear(), Limits()).ends) == 16
    assert len(choose(candidates(demand(5, 50), 16), linear(), Limits()).ends) == 2


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(mib=3.0), "the bucket of 64 that covers everything is over the budget by itself: given 4 MiB of 3"),
        (Limits(mib=9.0, seconds=0.5), "given 4 MiB of 9, 2 s of 0.5; raise the budget, or lower the largest size"),
    ],
)
def test_a_budget_that_fits_no_bucket_is_an_error(limits: Limits, says: str) -> None:
    with pytest.raises(ConfigError, match="over the budget") as error:
        choose(candidates(demand(60, 16), 16), with_flat(linear(), 4.0, 2.0), limits)
    assert says in str(error.value)


@pytest.mark.parametrize("limits", [Limits(mib=9.0), Limits(seconds=1.0), Limits(price_mib=1), Limits(price_second=1)])
def test_a_limit_on_what_is_not_known_is_an_error(limits: Limits) -> None:
    with pytest.raises(ConfigError, match=r"need the (MiB|seconds) of a bucket; give them in --costs, or --bucket-"):
        choose(candidates(demand(60, 16), 16), linear(), limits)


@pytest.mark.parametrize(
    "bad",
    [
        {"buckets": 0},
        {"buckets": 5000},
        {"mib": 0.0},
        {"mib": float("nan")},
        {"seconds": -1.0},
        {"price_mib": -1.0},
        {"price_second": float("inf")},
    ],
)
def test_a_limit_out_of_range_is_an_error(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        Limits(**bad)  # type: ignore[arg-type]
