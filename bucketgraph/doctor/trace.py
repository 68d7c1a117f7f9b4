"""A profiler's events as plain records: what the host called, and what ran on the GPU because of it, call by call.

Rules: reads the Chrome trace that torch.profiler exports, which is a stable format, so that recorded and made-up events
are read alike. Times are in microseconds on the profiler's clock. An activity belongs to the call that launched it, by
its correlation number, whenever it ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MARK = "bucketgraph.doctor"  # the annotation around each profiled call
_WORK: dict[str, Literal["kernel", "copy", "fill"]] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_API = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Api:
    """One call of the CUDA runtime or driver by the host."""

    name: str
    start: float
    end: float
    correlation: int

    @property
    def is_launch(self) -> bool:
        return "Launch" in self.name

    @property
    def is_sync(self) -> bool:
        """Whether it waits for the GPU. A copy that is not asynchronous by name does."""
        return "Synchronize" in self.name or self.name in ("cudaMemcpy", "cudaMemcpy2D")


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, copy or fill on the GPU."""

    name: str
    kind: Literal["kernel", "copy", "fill"]
    start: float
    end: float
    stream: int
    correlation: int
    size: int = 0  # bytes copied or filled
    grid: tuple[int, ...] = ()

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the workload: both sides of it in the order of their starts."""

    start: float  # on the host
    end: float
    api: tuple[Api, ...]
    work: tuple[Work, ...]


def parse(events: Iterable[Mapping[str, Any]], mark: str = MARK) -> tuple[Call, ...]:
    """The calls in the events of a Chrome trace, each an annotation named `mark`."""
    marks: list[tuple[float, float]] = []
    api: list[Api] = []
    work: list[Work] = []
    for event in events:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X":
            continue
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        args = event.get("args", {})
        if category == "user_annotation" and event["name"] == mark:
            marks.append((start, end))
        elif category in _API:
            api.append(Api(event["name"], start, end, int(args.get("correlation", 0))))
        elif category in _WORK:
            work.append(_work(event, _WORK[category], start, end, args))
    by_number: dict[int, list[Work]] = {}
    for item in work:
        by_number.setdefault(item.correlation, []).append(item)
    calls = []
    for start, end in sorted(marks):
        within = sorted((item for item in api if start <= item.start < end), key=lambda item: item.start)
        launched = [
            item for number in dict.fromkeys(one.correlation for one in within) for item in by_number.get(number, ())
        ]
        calls.append(Call(start, end, tuple(within), tuple(sorted(launched, key=lambda item: item.start))))
    return tuple(calls)


def _work(
    event: Mapping[str, Any], kind: Literal["kernel", "copy", "fill"], start: float, end: float, args: Mapping[str, Any]
) -> Work:
    grid = tuple(int(size) for size in args.get("grid", ()))
    number, stream = int(args.get("correlation", 0)), int(args.get("stream", 0))
    return Work(event["name"], kind, start, end, stream, number, int(args.get("bytes", 0)), grid)
