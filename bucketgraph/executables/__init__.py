"""The one seam between buckets and devices: each kind of executable behind the same four verbs.

`warm` runs the function on the static inputs so that everything lazy has happened; `capture` makes the executable;
`replay` runs it and does nothing else; `release` gives its memory back. A manager warms all buckets before it captures
any. Executables of one `Family` share a pool and a stream, so their replays never overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from bucketgraph.config import ExecutableKind
from bucketgraph.errors import ConfigError
from bucketgraph.executables.compiled import Compiled
from bucketgraph.executables.cudagraph import CudaGraph
from bucketgraph.executables.eager import Eager
from bucketgraph.executables.family import Family

__all__ = ["Executable", "Family", "make", "milliseconds", "resolve"]

_ROUND_MS = 10.0


class Executable(Protocol):
    """A function bound to one bucket's static inputs."""

    kind: str

    def warm(self) -> None: ...

    def capture(self) -> None: ...

    def replay(self) -> Any: ...

    def release(self) -> None: ...


def resolve(kind: ExecutableKind, device: torch.device) -> str:
    """`auto` becomes the graph on a GPU and eager on a CPU. Raises ConfigError for a graph without a GPU."""
    if kind == "auto":
        return "cudagraph" if device.type == "cuda" else "eager"
    if kind == "cudagraph" and device.type != "cuda":
        raise ConfigError("executable cudagraph needs a CUDA device", given=device, hint="use auto, compiled or eager")
    return kind


def milliseconds(executable: Executable, device: torch.device, rounds: int = 3, replays: int = 8) -> float:
    """Time of one replay in ms, on a GPU its own: the shortest of `rounds` averages over `replays` in a row.

    A round takes about `_ROUND_MS`, or one replay; on a CPU it is one replay, and all rounds together take about that.
    """
    if device.type != "cuda":
        times: list[float] = []
        while len(times) < rounds and sum(times) < _ROUND_MS:
            began = time.perf_counter()
            executable.replay()
            times.append(1e3 * (time.perf_counter() - began))
        return min(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    with torch.cuda.device(device):
        executable.replay()
        events[0].record()
        executable.replay()
        events[1].record()
        events[1].synchronize()
        once = max(events[0].elapsed_time(events[1]), 1e-3)
        replays = max(1, min(replays, int(_ROUND_MS / once)))
        events[0].record()
        for event in events[1:]:
            for _ in range(replays):
                executable.replay()
            event.record()
        events[-1].synchronize()
    return float(min(start.elapsed_time(end) for start, end in pairwise(events)) / replays)


def make(kind: str, fn: Callable[..., Any], inputs: Mapping[str, Tensor], family: Family) -> Executable:
    """An executable of a resolved kind, not yet warm."""
    if kind == "cudagraph":
        return CudaGraph(fn, inputs, family)
    if kind == "compiled":
        return Compiled(fn, inputs, family)
    return Eager(fn, inputs)
