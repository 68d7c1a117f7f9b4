"""What must stay quiet after warm-up is counted, and can warn or raise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketgraph import BucketManager, monitor
from bucketgraph.config import parse
from bucketgraph.errors import NotQuietError
from bucketgraph.monitor import Disturbances


def served(quiet: str) -> BucketManager:
    made: dict[str, Any] = {
        "version": 1,
        "name": "m",
        "quiet": quiet,
        "axes": {"batch": [2]},
        "inputs": {"x": {"shape": ["batch"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch"]}},
    }
    manager = BucketManager(double, parse(made), device="cpu")
    manager.warmup()
    return manager


def double(x: Tensor) -> Tensor:
    return x * 2


@contextmanager
def loud(device: torch.device) -> Iterator[Disturbances]:
    seen = Disturbances()
    yield seen
    seen.compiles = 1


def test_triton_compiles_are_counted_and_an_earlier_hook_is_still_called(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    called: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *args, **kwargs: called.append(kwargs))
    monkeypatch.setattr(monitor, "_hooked", False)
    before = monitor.compiles()
    knobs.runtime.jit_post_compile_hook(key="k")
    assert monitor.compiles() == before + 1 and called == [{"key": "k"}]


def test_torch_compile_is_counted() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def fn(x: Tensor) -> Tensor:
        return x + 1

    fn(torch.zeros(2))
    before = monitor.compiles()
    fn(torch.zeros(2))
    assert monitor.compiles() == before
    fn(torch.zeros(3))
    assert monitor.compiles() == before + 1


def test_nobody_is_watched_where_calls_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "watch", lambda device: pytest.fail("watching takes time, and is the whole process's"))
    manager = served("count")
    manager(x=torch.ones(3))
    with manager.watched():  # as a device loop's launch is
        pass


def test_a_quiet_call_passes_every_mode() -> None:
    for mode in ("count", "warn", "raise"):
        assert served(mode)(x=torch.ones(2))["y"].tolist() == [2, 2]


def test_a_loud_call_raises_or_warns_as_the_set_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raising, warning = served("raise"), served("warn")
    monkeypatch.setattr(monitor, "watch", loud)
    with pytest.raises(NotQuietError, match="m was not quiet after warm-up: given 1 compiles, 0 new memory segments"):
        raising(x=torch.ones(2))
    with caplog.at_level(logging.WARNING, "bucketgraph"):
        warning(x=torch.ones(2))
    assert "was not quiet" in caplog.text


def test_stats_say_what_happened_since_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = served("count")
    assert manager.stats().after_warmup == {"compiles": 0, "segments": 0}
    before = monitor.compiles()
    monkeypatch.setattr(monitor, "compiles", lambda: before + 2)
    assert manager.stats().after_warmup == {"compiles": 2, "segments": 0}
