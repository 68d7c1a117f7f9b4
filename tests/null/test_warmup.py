"""Warm-up: the order that keeps captures safe, the report, and what a failure costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketgraph import executables, selfcheck, warmup
from bucketgraph.buckets import Bucket
from bucketgraph.config import BucketSet, parse
from bucketgraph.errors import CaptureError, DeviceError, NotWarmError, StaleError
from bucketgraph.executables import Family, family
from bucketgraph.executables.pool import Pool
from bucketgraph.manager import BucketManager
from bucketgraph.warmup import Progress, WarmupReport, warm_up


def bucket_set(**changed: Any) -> BucketSet:
    base: dict[str, Any] = {
        "version": 1,
        "name": "one",
        "axes": {"batch": [1, 2, 4], "tokens": [4, 8]},
        "inputs": {"x": {"shape": ["batch", "tokens"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", "tokens"]}},
    }
    return parse({**base, **changed})


def double(x: Tensor) -> Tensor:
    return x * 2


class Spy:
    """An executable that writes down what happens to it, and uses memory when captured."""

    kind = "spy"
    log: list[tuple[str, tuple[int, ...]]]

    def __init__(self, fn: Any, inputs: Mapping[str, Tensor], log: list[tuple[str, tuple[int, ...]]]) -> None:
        self.fn, self.inputs, self.log, self.shape = fn, inputs, log, tuple(inputs["x"].shape)

    def warm(self) -> None:
        self.log.append(("warm", self.shape))

    def capture(self) -> None:
        self.log.append(("capture", self.shape))

    def replay(self) -> Any:
        self.log.append(("replay", self.shape))
        return self.fn(**self.inputs)

    def release(self) -> None:
        self.log.append(("release", self.shape))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    made: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(executables, "make", lambda kind, fn, inputs, family: Spy(fn, inputs, made))
    return made


def test_all_are_warmed_before_the_first_capture_and_all_captured_before_the_first_check(
    log: list[tuple[str, tuple[int, ...]]],
) -> None:
    steps: list[Progress] = []
    report = BucketManager(double, bucket_set()).warmup(steps.append)
    assert report.ok
    assert [step.stage for step in steps] == ["warm"] * 6 + ["capture"] * 6 + ["check"] * 6 + ["price"] * 6
    assert [(step.done, step.total) for step in steps] == [(n, 24) for n in range(1, 25)]
    sizes = [prod(shape) for verb, shape in log if verb == "warm"]
    assert sizes == sorted(sizes, reverse=True) == [32, 16, 16, 8, 8, 4]
    verbs = [verb for verb, _ in log]
    assert verbs.index("capture") == 6, "every shape is warm before the first capture"
    captured = [shape for verb, shape in log if verb == "capture"]
    assert [prod(shape) for shape in captured] == sizes, "largest first, so that smaller ones reuse its memory"
    assert (report.buckets[0].bucket, report.buckets[0].executable) == ("batch=4 tokens=8", "spy")


def test_managers_of_one_family_warm_together_before_either_captures(log: list[tuple[str, tuple[int, ...]]]) -> None:
    family = Family(torch.device("cpu"))
    managers = [BucketManager(double, bucket_set(), family=family, name=name) for name in ("prefill", "decode")]
    steps: list[Progress] = []
    report = warm_up(managers, steps.append)
    assert [step.stage for step in steps] == ["warm"] * 12 + ["capture"] * 12 + ["check"] * 12 + ["price"] * 12
    assert {row.name for row in report.buckets} == {"prefill", "decode"}
    assert all(manager(x=torch.ones(3, 3))["y"].sum() == 18 for manager in managers)


def test_the_report_survives_json(tmp_path: Path) -> None:
    manager = BucketManager(lambda x: x - x.mean(0), bucket_set())
    report = manager.warmup()
    assert not report.ok and len(report.failed) == 2, "rows are padded in two buckets"
    file = tmp_path / "report.json"
    report.save(file)
    back = json.loads(file.read_text())
    assert back["ok"] is False and back["device"] == "cpu" and len(back["buckets"]) == 6
    assert back == json.loads(json.dumps(report.as_dict()))
    errors = [row["error"] for row in back["buckets"] if row["error"]]
    assert errors == [row.error for row in report.failed] and all("differs" in error for error in errors)
    assert report.mib == 0.0 and report.seconds > 0
    with pytest.raises(FrozenInstanceError):
        report.device = "cuda"  # type: ignore[misc]


def test_progress_tells_of_a_failure_at_the_stage_where_it_happened() -> None:
    def touchy(x: Tensor) -> Tensor:
        if len(x) == 2:
            raise RuntimeError("two is too many\nby far")
        return x * 2

    steps: list[Progress] = []
    BucketManager(touchy, bucket_set()).warmup(steps.append)
    wrong = [step for step in steps if step.error]
    assert {step.bucket for step in wrong} == {"batch=2 tokens=4", "batch=2 tokens=8"}
    assert all("RuntimeError: two is too many by far" in str(step.error) for step in wrong)
    assert len(steps) == 24, "a failed bucket keeps its place in the count"


def test_a_failed_bucket_is_released_and_its_memory_is_no_longer_counted(
    log: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(1000, 0, -1))  # each look finds one MiB less
    monkeypatch.setattr(warmup, "_free_bytes", lambda device: next(free) << 20)
    manager = BucketManager(lambda x: x - x.mean(0), bucket_set())
    report = manager.warmup()
    bad = {row.bucket for row in report.failed}
    assert [verb for verb, _ in log].count("release") == len(bad)
    assert manager.family.mib == report.mib == 6 - len(bad)
    assert all(row.mib == (0 if row.bucket in bad else 1) for row in report.buckets)
    manager.release()
    assert manager.family.mib == 0


@pytest.mark.parametrize(("budget", "kept"), [("10MiB", 5), ("4MiB", 2), ("3MiB", 1), ("1MiB", 0), ("1GiB", 6)])
def test_a_memory_budget_is_not_exceeded(
    budget: str, kept: int, log: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(1000, 0, -2))  # each graph takes two MiB
    monkeypatch.setattr(warmup, "_free_bytes", lambda device: next(free) << 20)
    manager = BucketManager(double, bucket_set(memory={"budget": budget}))
    report = manager.warmup()
    assert sum(row.error is None for row in report.buckets) == kept
    assert manager.family.mib == 2 * kept and all("memory budget" in str(row.error) for row in report.failed)
    assert manager(x=torch.ones(4, 8))["y"].sum() == 64
    manager.release()
    assert manager.family.mib == 0


def test_a_broken_device_ends_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand so on")

    for module in (family, warmup):
        monkeypatch.setattr(module, "synchronize", broken)
    manager = BucketManager(double, bucket_set())
    with pytest.raises(DeviceError, match=r"context is broken.*illegal.*restart"):
        manager.warmup()
    with pytest.raises(NotWarmError):
        manager(x=torch.ones(1, 1))


def test_an_example_of_the_callers_is_used_for_made_up_inputs() -> None:
    asked: list[dict[str, int]] = []

    def example(sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        asked.append(dict(sizes))
        return {"x": torch.full((sizes["batch"], sizes["tokens"]), 3.0)}

    def threes(x: Tensor) -> Tensor:
        assert set(x.unique().tolist()) <= {0.0, 3.0}
        return x * 2

    assert BucketManager(threes, bucket_set(), example=example).warmup().ok
    assert {(sizes["batch"], sizes["tokens"]) for sizes in asked} == {(b, t) for b in (1, 2, 3) for t in (2, 6)}


def test_made_up_integers_keep_to_their_range_and_are_the_same_each_time() -> None:
    seen: list[Tensor] = []

    def look(i: Tensor) -> Tensor:
        seen.append(i.clone())
        return i

    made = bucket_set(
        axes={"n": [64]},
        inputs={"i": {"shape": ["n"], "dtype": "int64", "range": [5, 9], "pad": 5}},
        outputs={"y": {"shape": ["n"]}},
    )
    for _ in range(2):
        assert BucketManager(look, made).warmup().ok
    assert all(t.min() >= 5 and t.max() <= 8 for t in seen) and torch.equal(seen[0], seen[len(seen) // 2])


@pytest.mark.parametrize(
    ("sizes", "inner"), [((1, 4), (1, 2)), ((2, 8), (2, 6)), ((4, 8), (3, 6))], ids=["1x4", "2x8", "4x8"]
)
def test_the_self_check_pads_every_axis_that_has_room(sizes: tuple[int, int], inner: tuple[int, int]) -> None:
    manager = BucketManager(double, bucket_set())
    found = selfcheck.inner_sizes(manager, Bucket(("batch", "tokens"), sizes))
    assert tuple(found.values()) == inner
    plan = manager.lattice.plan(inner)
    assert plan.bucket is not None and plan.bucket.sizes == sizes


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0),
        (torch.tensor([1.0, 2.0001]), torch.tensor([1.0, 2.0]), 5e-5),
        (torch.tensor([-torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0]), 0.0),
        (torch.tensor([3, 4]), torch.tensor([3, 4]), 0.0),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.0]).to(torch.float8_e4m3fn), 0.0),
    ],
)
def test_differences_within_tolerance(got: Tensor, want: Tensor, error: float) -> None:
    found = selfcheck._compare("y", got, want, None)
    assert selfcheck._worst([{"y": found}]) == pytest.approx(error, rel=0.01) and found.agrees


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), "differs from unpadded eager: given 5.00e-02"),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), "differs"),
        (torch.tensor([torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0]), "differs"),
        (torch.tensor([1.0, 1.0]), torch.tensor([torch.inf, 1.0]), "differs"),
        (torch.tensor([1.0]), torch.tensor([torch.nan]), "itself holds NaN"),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), "1 of 2 values"),
        (torch.ones(2), torch.ones(3), "another shape than unpadded"),
    ],
)
def test_differences_that_fail(got: Tensor, want: Tensor, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        selfcheck._worst([{"y": selfcheck._compare("y", got, want, None)}])


@pytest.mark.parametrize(
    ("rounds", "worst"),
    [
        ([[0.9, 0.1], [0.2, 0.3]], 0.2),  # the second one agreed: there is no third
        ([[0.9, 0.1], [0.2, 0.9], [0.3, 0.4]], 0.4),
        ([[0.9, 0.1], [0.2, 0.9], [0.9, 0.4]], None),  # the first row differs in two of three
    ],
)
def test_a_row_fails_by_its_middle_difference(rounds: list[list[float]], worst: float | None) -> None:
    found = [{"y": selfcheck._Found(torch.tensor(rows).double(), limit=0.5)} for rows in rounds]
    again = iter(found)
    if worst is None:
        with pytest.raises(CaptureError, match=r"given 9\.00e-01, expected 0\.5"):
            selfcheck._judged(lambda salt: next(again))
    else:
        assert selfcheck._judged(lambda salt: next(again)) == pytest.approx(worst)
    assert not list(again), "as many rounds as it takes"


def test_an_empty_lazy_report_is_ok() -> None:
    report = BucketManager(double, bucket_set(warmup={"lazy": True})).warmup()
    assert isinstance(report, WarmupReport) and report.ok and report.mib == 0


def test_earlier_captures_stay_under_their_contract_until_later_ones_replace_them(
    log: list[tuple[str, tuple[int, ...]]],
) -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    model = Scale().eval()
    manager = BucketManager(model, bucket_set())
    manager.kind = "cudagraph"  # as if captured: what is served reads the weight where it was
    manager.warmup()
    model.weight = torch.nn.Parameter(torch.full((), 2.0))
    with pytest.raises(StaleError, match="weight was rebound"):
        manager(x=torch.ones(4, 8))
    stages: list[str] = []

    def serve_meanwhile(step: Progress) -> None:
        with pytest.raises(StaleError, match="weight was rebound"):
            manager(x=torch.ones(4, 8))
        stages.append(step.stage)

    manager.warmup(serve_meanwhile)
    assert set(stages) == {"warm", "capture", "check", "price"}
    assert manager(x=torch.ones(4, 8))["y"].sum() == 64


# -- the pool's books, with torch's part played as torch 2.11 does -----------------------------------------------------


class Allocator:
    """Pools of torch's allocator: how many count as users of each, and where a capture is believed to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users: dict[tuple[int, int], int] = {}
        self.recording: set[tuple[int, int]] = set()
        self.made = 0
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.handle)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def handle(self) -> tuple[int, int]:
        self.made += 1
        return (0, self.made)

    def begin(self, pool: tuple[int, int]) -> None:
        if pool in self.recording:
            raise RuntimeError("already recording to mempool_id")
        if self.users.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.users[pool] = self.users.get(pool, 0) + 1
        self.recording.add(pool)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert self.users[pool] > 0, "counted off twice"
        self.users[pool] -= 1

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"segment_pool_id": pool, "active_size": 0} for pool, users in self.users.items() if users]


class Graph:
    """A graph whose capture CUDA ends by itself when `broken`; a `tidy` torch counts it off, an older one does not."""

    def __init__(self, allocator: Allocator, pool: Pool, broken: bool = False, tidy: bool = False) -> None:
        self.allocator, self.handle, self.broken, self.tidy = allocator, pool.handle, broken, tidy
        self.holds = False
        allocator.begin(pool.handle)

    def capture_end(self) -> None:
        if self.broken and self.tidy:
            self.allocator.end(0, self.handle)
            self.holds = True
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocator.end(0, self.handle)
        self.holds = True

    def reset(self) -> None:
        if self.holds:
            self.allocator.release(0, self.handle)
        self.holds = False


@pytest.mark.parametrize("tidy", [False, True], ids=["torch 2.11", "later torch"])
def test_a_broken_capture_leaves_its_pool_to_those_in_it_and_is_counted_off_at_the_end(
    tidy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(monkeypatch)
    pool = Pool(torch.device("cuda", 0))
    first: Any = Graph(allocator, pool)
    first.capture_end()
    pool.add(first)
    assert pool.usable
    pool.abandon(Graph(allocator, pool, broken=True, tidy=tidy))  # type: ignore[arg-type]
    assert not pool.usable and not allocator.recording
    pool.reclaim()
    assert allocator.users[pool.handle] >= 1, "never below those who are in it"
    pool.remove(first)
    pool.reclaim()
    assert allocator.users[pool.handle] == 0
    pool.reclaim()


def test_a_capture_that_only_raised_costs_the_pool_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    pool = Pool(torch.device("cuda", 0))
    first: Any = Graph(allocator, pool)
    first.capture_end()
    pool.add(first)
    pool.abandon(Graph(allocator, pool))  # type: ignore[arg-type]
    assert pool.usable and allocator.users[pool.handle] == 1
    Graph(allocator, pool).capture_end()


def test_an_emptied_pool_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    pool = Pool(torch.device("cuda", 0))
    pool.abandon(Graph(allocator, pool))  # type: ignore[arg-type]
    assert allocator.users[pool.handle] == 0 and not pool.usable
    with pytest.raises(RuntimeError, match="use_count"):
        Graph(allocator, pool)  # what would happen
