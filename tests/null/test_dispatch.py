"""Dispatch by cost against brute force, and through a manager: right results whichever way a call goes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketgraph import BucketManager, executables
from bucketgraph.buckets import Bucket, Lattice
from bucketgraph.config import parse
from bucketgraph.dispatch import Cheapest, Prices
from bucketgraph.errors import ConfigError, InputError


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    for first in range(1, total + 1):
        for rest in compositions(total - first) if first < total else ((),):
            yield (first, *rest)


def drawn(seed: int) -> tuple[Lattice, Prices]:
    generator = random.Random(seed)
    batch = sorted(generator.sample(range(1, 9), generator.randint(1, 4)))
    axes = {"batch": batch}
    if seed % 2:
        axes["tokens"] = sorted(generator.sample(range(1, 9), 2))
    lattice = Lattice(axes, request_axis="batch" if seed % 5 else None)
    priced = [bucket for bucket in lattice.buckets if generator.random() < 0.9]
    replay = {bucket: generator.choice((1.0, 1.5, 2.0, 4.0, math.prod(bucket.sizes) / 3)) for bucket in priced}
    eager = {bucket: generator.choice((0.7, 3.0, 9.0)) for bucket in priced if generator.random() < 0.7}
    return lattice, Prices(replay, eager, generator.choice((0.0, 0.1, 0.5)))


def least(lattice: Lattice, prices: Prices, wanted: tuple[int, ...]) -> float:
    """Every bucket, every composition along the request axis, and eager."""

    @cache
    def single(sizes: tuple[int, ...]) -> float:
        covering = [b for b in lattice.buckets if all(x >= w for x, w in zip(b.sizes, sizes, strict=True))]
        return min([math.inf, *(p[b] for p in (prices.replay, prices.eager) for b in covering if b in p)])

    best = single(wanted)
    if lattice.request_axis is not None:
        for parts in compositions(wanted[0]):
            if len(parts) > 1:
                best = min(best, sum(single((part, *wanted[1:])) + prices.part for part in parts))
    return best


def test_plans_cost_what_brute_force_finds() -> None:
    seen: set[str] = set()
    for seed in range(300):
        lattice, prices = drawn(seed)
        made = Cheapest(lattice, prices)
        for wanted in itertools.product(*(range(1, axis.largest + 1) for axis in lattice.axes)):
            plan = made.plan(wanted)
            want = least(lattice, prices, wanted)
            assert made.cost(plan) == pytest.approx(want), (seed, wanted, plan)
            assert plan.kind != "split" or sum(plan.parts) == wanted[0]
            assert plan.bucket is None or all(b >= w for b, w in zip(plan.bucket.sizes, wanted, strict=True))
            seen.add(plan.kind)
    assert seen == {"replay", "split", "eager"}


def test_what_no_bucket_covers_goes_the_lattices_way_out() -> None:
    lattice = Lattice({"batch": [4]}, overflow="split", request_axis="batch")
    made = Cheapest(lattice, Prices(dict.fromkeys(lattice.buckets, 1.0)))
    assert made.plan((9,)) == lattice.plan((9,)) and made.plan((9,)).code == "over_largest"
    with pytest.raises(InputError, match="batch is empty"):
        made.plan((0,))


def test_384_goes_as_256_and_128_where_512_costs_more() -> None:
    lattice = Lattice({"batch": [128, 256, 512]}, request_axis="batch")
    prices = Prices({bucket: bucket.sizes[0] / 100 for bucket in lattice.buckets}, part=0.01)
    plan = Cheapest(lattice, prices).plan((384,))
    assert (plan.kind, plan.code, sorted(plan.parts)) == ("split", "cheaper", [128, 256])
    assert "costs less than bucket batch=512's 5.12" in str(plan.reason)
    assert Cheapest(lattice, Prices(prices.replay, part=2.0)).plan((384,)).bucket == lattice.buckets[2]


def test_a_bucket_without_a_price_is_passed_over() -> None:
    lattice = Lattice({"batch": [1, 2, 4]})
    prices = Prices({bucket: 1.0 for bucket in lattice.buckets if bucket.sizes != (2,)})
    assert Cheapest(lattice, prices).plan((2,)).bucket == lattice.buckets[2]


SET: dict[str, Any] = {
    "version": 1,
    "name": "rows",
    "dispatch": "cheapest",
    "axes": {"batch": [2, 4, 8]},
    "inputs": {"x": {"shape": ["batch", 3], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["batch", 3]}},
}


def plus(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("replay", "eager", "kinds"),
    [
        ({2: 1.0, 4: 1.0, 8: 1.0}, 9.0, {"replay"}),
        ({2: 1.0, 4: 2.1, 8: 9.0}, 99.0, {"replay", "split"}),
        ({2: 5.0, 4: 5.0, 8: 5.0}, 1.0, {"eager"}),
    ],
)
def test_a_manager_goes_by_what_warm_up_measured_and_results_are_the_same(
    replay: dict[int, float], eager: float, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: dict[int, int] = {}

    def measured(executable: Any, device: torch.device) -> float:
        rows = len(executable._inputs["x"])
        turns[rows] = turns.get(rows, 0) + 1
        return replay[rows] if turns[rows] == 1 else eager

    monkeypatch.setattr(executables, "milliseconds", measured)
    manager = BucketManager(plus, parse(SET), device="cpu")
    report = manager.warmup()
    assert report.ok and {(row.bucket, row.replay_ms, row.eager_ms) for row in report.buckets} == {
        (f"batch={n}", ms, eager) for n, ms in replay.items()
    }
    for n in range(1, 9):
        x = torch.randn(n, 3)
        assert torch.equal(manager(x=x)["y"], x + 1)
        assert manager.plan(batch=n).kind in kinds
    assert {manager.plan(batch=n).kind for n in range(1, 9)} == kinds
    stats = manager.stats()
    assert stats.calls == sum(stats.outcomes.values()) == 8


def test_prices_are_measured_on_this_machine() -> None:
    report = BucketManager(plus, parse(SET), device="cpu").warmup()
    assert all(row.replay_ms and row.eager_ms and 0 < row.replay_ms < 1000 for row in report.buckets)
    nearest = BucketManager(plus, parse({**SET, "dispatch": "nearest"}), device="cpu").warmup()
    assert all(row.replay_ms and row.eager_ms is None for row in nearest.buckets), "its function alone decides nothing"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_padding": 2.0}, "max_padding must be null"),
        ({"warmup": {"lazy": True}}, "warmup.lazy must be false"),
        ({"dispatch": "fastest"}, "nearest"),
    ],
)
def test_what_costs_cannot_decide_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse({**SET, **changed})


def test_the_table_of_splits_is_bounded() -> None:
    lattice = Lattice({"batch": [1, 1 << 20]}, request_axis="batch")
    made = Cheapest(lattice, Prices({bucket: float(bucket.sizes[0]) for bucket in lattice.buckets}))
    assert made.plan((2,)).bucket == Bucket(("batch",), (1 << 20,)), "too long an axis to split"
