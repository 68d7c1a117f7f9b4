"""Functions that compete for a bucket: the fastest stays, one that fails costs itself, and the report says both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bucketgraph import BucketManager, executables
from bucketgraph.config import parse
from bucketgraph.executables.eager import Eager

ROWS = parse(
    {
        "version": 1,
        "name": "rows",
        "axes": {"batch": [4, 16]},
        "inputs": {"x": {"shape": ["batch", 8], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", 8]}},
    }
)


class Recorded(Eager):
    """An executable that takes part in the choice, and says when it was given back."""

    kind = "cudagraph"
    alive: ClassVar[list[Recorded]] = []

    def warm(self) -> None:
        self._fn(**self._inputs)

    def capture(self) -> None:
        self.alive.append(self)

    def release(self) -> None:
        if self in self.alive:
            self.alive.remove(self)


def plain(x: Tensor) -> Tensor:
    return x + 1


def fast(x: Tensor) -> Tensor:
    return 1 + x


def slow(x: Tensor) -> Tensor:
    return x - -1


def broken(x: Tensor) -> Tensor:
    raise RuntimeError("this kernel does not fit")


def wrong(x: Tensor) -> Tensor:
    return x + 2


MS = {wrong: 0.5, fast: 1.0, plain: 2.0, slow: 3.0}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    monkeypatch.setattr(Recorded, "alive", [])
    monkeypatch.setattr(executables, "resolve", lambda kind, device: "cudagraph" if kind == "auto" else kind)
    monkeypatch.setattr(executables, "make", lambda kind, fn, inputs, family: Recorded(fn, inputs))
    monkeypatch.setattr(executables, "milliseconds", lambda executable, device: MS[executable._fn])
    return Recorded.alive


def manager(**variants: Callable[..., Any]) -> BucketManager:
    return BucketManager(plain, ROWS, variants=lambda bucket: variants, device="cpu")


def test_the_fastest_serves_and_the_others_are_given_back(graphs: list[Recorded]) -> None:
    made = manager(slow=slow, fast=fast, plain=plain)
    report = made.warmup()
    assert report.ok, report
    assert [row.variant for row in report.buckets] == ["fast", "fast"]
    assert report.buckets[0].variants == {"slow": 3.0, "plain": 2.0, "fast": 1.0}
    assert {captured.fn for captured in made.captured.values()} == {fast}
    assert [graph._fn for graph in graphs] == [fast, fast]
    assert torch.equal(made(x=torch.ones(3, 8))["y"], torch.full((3, 8), 2.0))


def test_each_bucket_has_its_own_variants(graphs: list[Recorded]) -> None:
    choose = {4: {"fast": fast, "slow": slow}, 16: {}}
    made = BucketManager(plain, ROWS, variants=lambda bucket: choose[bucket.sizes[0]], device="cpu")
    report = made.warmup()
    assert [(row.variant, row.variants) for row in report.buckets] == [(None, {}), ("fast", {"slow": 3.0, "fast": 1.0})]
    assert {bucket.sizes: captured.fn for bucket, captured in made.captured.items()} == {(4,): fast, (16,): plain}


def test_a_variant_that_fails_costs_itself(graphs: list[Recorded]) -> None:
    made = manager(broken=broken, slow=slow)
    report = made.warmup()
    assert report.ok, report
    assert report.buckets[0].variant == "slow"
    assert "this kernel does not fit" in str(report.buckets[0].variants["broken"])


def test_a_variant_that_computes_something_else_is_not_used_however_fast_it_is(graphs: list[Recorded]) -> None:
    made = manager(wrong=wrong, slow=slow, fast=fast)
    report = made.warmup()
    assert report.ok and report.buckets[0].variant == "fast"
    assert "output y differs" in str(report.buckets[0].variants["wrong"])
    assert {graph._fn for graph in graphs} == {fast}


def test_a_bucket_whose_variants_all_fail_runs_eagerly_and_says_why(graphs: list[Recorded]) -> None:
    made = manager(broken=broken, worse=broken)
    report = made.warmup()
    assert not report.ok and not graphs
    assert "warm: RuntimeError: this kernel does not fit" in str(report.buckets[0].error)
    assert torch.equal(made(x=torch.ones(3, 8))["y"], torch.full((3, 8), 2.0))


def test_without_graphs_the_first_one_runs_unmeasured() -> None:
    made = BucketManager(plain, ROWS, variants=lambda bucket: {"slow": slow, "fast": fast}, device="cpu")
    report = made.warmup()
    assert report.ok and [(row.variant, row.variants) for row in report.buckets] == [("slow", {})] * 2
