"""What a graph would gain, before there is one.

    graph time = max(GPU time of the call, never waiting for the host, less what a node costs less than a launch,
                     CPU time of launching the graph)
    less is what plain launches wait for; one that overlaps the kernel ahead (a programmatic dependent) saves nothing
    gain       = eager time / graph time
    break-even = (a run + capture) / time saved in a call

Rules: pure; all times of a workload were taken without the profiler, but where the call synchronises: then the profiled
kernels' durations stand in. What is not measured on this device is typical of an H200, and `measured` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

WORTH = 1.1  # a smaller gain is not worth a graph's memory


@dataclass(frozen=True)
class Saving:
    """What a graph's node costs less on the GPU than a launch that waits in the stream, for kernels of one length."""

    kernel_us: float  # of one kernel in the stream, with its launch
    saved_us: float


@dataclass(frozen=True)
class DeviceCosts:
    """What launches and graphs cost on this device, from a tiny graph at the start."""

    node_us: float = 1.0  # one more tiny kernel in a graph, on the GPU
    launch_us: float = 10.4  # one small eager operation, on the host
    replay_us: float = 3.1  # launching a graph, on the host
    replay_node_us: float = 0.006  # and for each node in it
    capture_ms: float = 0.3  # recording and instantiating an empty graph
    capture_node_us: float = 11.0  # and for each node, beyond the time that issuing it eagerly takes
    tiny_us: float = 1.0  # the tiny kernel's duration as the profiler has it
    savings: tuple[Saving, ...] = ()  # for a short and a longer kernel, the short one first
    measured: bool = False

    def saved_us(self, kernel_us: float) -> float:
        """What each launch of a call saves whose kernels take this long: between the measured ones, in proportion."""
        if not self.savings:
            return 0.0
        first, last = self.savings[0], self.savings[-1]
        if last.kernel_us <= first.kernel_us:
            return last.saved_us
        part = min(1.0, max(0.0, (kernel_us - first.kernel_us) / (last.kernel_us - first.kernel_us)))
        return first.saved_us + part * (last.saved_us - first.saved_us)


@dataclass(frozen=True)
class Times:
    """Of one call, without the profiler, the median of several rounds."""

    eager_ms: float  # many calls in a row, the device waited for once
    host_ms: float  # until the call returns, on an idle GPU
    gpu_ms: float | None = None  # the call's work queued behind a busy GPU; None if the call waits for the GPU
    spread: float = 0.0  # of eager_ms over the rounds: largest less smallest, over the median


@dataclass(frozen=True)
class Prediction:
    """Of a graph of the whole call."""

    nodes: int
    eager_ms: float
    graph_ms: float
    method: Literal["queued", "profiled"]
    capture_ms: float
    warm_ms: float
    break_even: int | None  # calls after which the capture is paid for; None if never

    @property
    def gain(self) -> float:
        """Eager time over graph time."""
        return self.eager_ms / self.graph_ms

    @property
    def saved_ms(self) -> float:
        """In each call."""
        return self.eager_ms - self.graph_ms

    @property
    def is_worth_it(self) -> bool:
        return self.gain >= WORTH


def predict(
    times: Times, nodes: int, busy_ms: float | None, costs: DeviceCosts, overlapping: float = 0.0
) -> Prediction | None:
    """The gain of a graph; None if neither a queued run nor a profile says how long the GPU works.

    Args:
        nodes: kernels, copies and fills of a call.
        busy_ms: their durations as profiled, what overlaps counted once.
        overlapping: share of them that starts before the one ahead has ended, when all are queued.
    """
    if nodes == 0 or (times.gpu_ms is None and busy_ms is None):
        return None
    method: Literal["queued", "profiled"]
    if times.gpu_ms is not None:
        method = "queued"
        # Where the host is ahead, calls in a row are the GPU's own time, at the clock that it keeps under load.
        base = times.eager_ms if times.host_ms < times.gpu_ms / 2 else times.gpu_ms
        on_gpu = base - (1.0 - overlapping) * nodes * costs.saved_us(1e3 * base / nodes) / 1e3
    else:
        assert busy_ms is not None, "one of the two is there"
        method = "profiled"
        # Between nodes: what a tiny kernel takes in a graph beyond its duration, less than nothing where it overlaps.
        on_gpu = busy_ms + nodes * (costs.node_us - costs.tiny_us) / 1e3
    on_gpu = max(on_gpu, nodes * costs.node_us / 2e3)  # whatever was measured, nodes are not free
    graph_ms = max(on_gpu, (costs.replay_us + nodes * costs.replay_node_us) / 1e3)
    capture_ms = times.host_ms + costs.capture_ms + nodes * costs.capture_node_us / 1e3
    saved = times.eager_ms - graph_ms
    calls = ceil((capture_ms + times.eager_ms) / saved) if saved > 0 else None
    return Prediction(nodes, times.eager_ms, graph_ms, method, capture_ms, times.eager_ms, calls)
