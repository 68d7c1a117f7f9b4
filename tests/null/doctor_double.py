"""A profiler's events as they could be, and a GPU on which the doctor finds them: times, capture and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bucketgraph.doctor import blockers, capture, clock, examine, profile
from bucketgraph.doctor.predict import DeviceCosts, Saving, Times
from bucketgraph.doctor.record import CaptureResult, Diagnosis
from bucketgraph.doctor.trace import MARK, Call, parse
from bucketgraph.doctor.workload import Workload

Event = dict[str, Any]
LAYER = ["norm", "qkv", "rope", "attend", "o", "norm", "gate_up", "down"]
COSTS = DeviceCosts(
    node_us=0.9, replay_us=3.0, replay_node_us=0.005, capture_ms=0.5, capture_node_us=10.0, tiny_us=1.1,
    savings=(Saving(2.0, 1.1), Saving(10.0, 0.3)), measured=True,
)  # fmt: skip


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def launch(at: float, number: int, kernel: str, runs: float, us: float, stream: int = 7, api: str = "") -> list[Event]:
    """A launch on the host at `at`, and its kernel from `runs` on."""
    return [
        event("cuda_runtime", api or "cudaLaunchKernel", at, 5.0, correlation=number),
        event("kernel", kernel, runs, us, correlation=number, stream=stream, grid=[1, 1, 1]),
    ]


def call_of(
    kernels: list[str], start: float = 1000.0, us: float = 2.0, first: int = 1, every: float = 10.0
) -> list[Event]:
    """A call whose kernels are launched every 10 us and run for `us` each, 4 us later."""
    made = [event("user_annotation", MARK, start, every * len(kernels))]
    for place, kernel in enumerate(kernels):
        at = start + every * place
        made += launch(at, first + place, kernel, at + 4, us)
    return made


def step(name: str = "head", every: float = 10.0) -> list[Event]:
    """A model's step: an embedding, thirty layers, a copy to the host that is waited for, and a last kernel."""
    made = call_of(["embed", *LAYER * 30, name], every=every)
    end = made[0]["ts"] + made[0]["dur"]
    made[0]["dur"] += 40.0
    made.append(event("cuda_runtime", "cudaMemcpyAsync", end, 4.0, correlation=9001))
    made.append(event("cuda_runtime", "cudaStreamSynchronize", end + 5, 20.0, correlation=9002))
    copy = "Memcpy DtoH (Device -> Pageable)"
    made.append(event("gpu_memcpy", copy, end + 8, 1.5, correlation=9001, stream=7, bytes=4096))
    return made


@dataclass
class Gpu:
    """What it measures, where a test does not say otherwise: a step that is bound by its launches."""

    times: Times = field(default_factory=lambda: Times(3.0, 3.0, 0.6))
    capture: CaptureResult = field(default_factory=lambda: CaptureResult(0.35, 6.0, 3.5, 2.0))
    every: float = 10.0  # us from launch to launch, where all are queued
    watched: blockers.Watched = field(default_factory=lambda: blockers.Watched(250, {"cuda"}))
    name: str = "head"  # of the last kernel
    asked: list[str] = field(default_factory=list)

    def diagnose(self, monkeypatch: pytest.MonkeyPatch, name: str = "step", **options: Any) -> Diagnosis:
        """A diagnosis of a call that does nothing, as this GPU has it."""

        def put(place: Any, name: str, value: object) -> None:
            def noted(*_: object, **__: object) -> object:
                self.asked.append(name)
                return value

            monkeypatch.setattr(place, name, noted)

        for place, what, value in (
            (blockers, "watch", self.watched),
            (clock, "times", self.times),
            (clock, "calibrate", COSTS),
            (clock, "tiny", (None, lambda: None)),
            (capture, "run", self.capture),
            (examine, "_device_name", "a GPU"),
        ):
            put(place, what, value)
        monkeypatch.setattr(profile, "record", self._record)
        return examine.diagnose(Workload(name, lambda: None, torch.device("cuda", 0)), **options)

    def _record(
        self, call: Callable[[], object], device: torch.device, calls: int = 5, wait_ms: float = 0.0
    ) -> tuple[Call, ...]:
        self.asked.append("queued" if wait_ms else "record")
        return parse(step(self.name, self.every if wait_ms else 10.0))
