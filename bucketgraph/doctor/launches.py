"""One call's launches in numbers, from the profiler's records: what the host pays, how busy the GPU is, what repeats.

Rules: pure; the call shown is the one whose GPU time is the median. The profiler slows the host down, so gaps and times
of API calls are upper limits, and say so where they are shown; what is predicted rests on times taken without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from bucketgraph.cuda.names import demangle, short
from bucketgraph.doctor.repeats import repeats
from bucketgraph.doctor.trace import Api, Call, Work

_MOST_NAMES = 12  # of kernels in a repeat, or in the list of kernels


@dataclass(frozen=True)
class ApiCost:
    """One function of CUDA's, in one call of the workload."""

    name: str
    count: int
    us: float  # each, on average
    total_us: float


@dataclass(frozen=True)
class KernelCost:
    """One kernel in one call of the workload."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True)
class Copied:
    """Copies of one direction in one call, as `Memcpy HtoD (Pageable -> Device)`."""

    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Layer:
    """The same launches several times in a row."""

    launches: int
    times: int
    first: int  # place of the first launch
    kernels: tuple[str, ...]
    us: float  # GPU time of one, on average


@dataclass(frozen=True)
class Gaps:
    """Time between the end of everything before and the start of the next activity, within a call, in us."""

    count: int
    p50: float
    p99: float
    largest: float
    total: float


@dataclass(frozen=True)
class Launches:
    """One call of the workload as the profiler saw it."""

    launches: int  # calls of the CUDA API that launch a kernel
    nodes: int  # kernels, copies and fills on the GPU: what a graph of it would hold
    streams: int
    launch_us: float  # CPU time of a launch, on average
    busy_ms: float  # GPU time in which at least one activity ran
    busy_share: float | None  # of the call's wall time without the profiler
    gaps: Gaps | None
    api: tuple[ApiCost, ...]  # the dearest first
    kernels: tuple[KernelCost, ...]  # likewise
    copies: tuple[Copied, ...]
    syncs: tuple[ApiCost, ...]
    layers: tuple[Layer, ...]
    calls: int  # that were profiled


def typical(calls: Sequence[Call]) -> Call | None:
    """The call of median GPU time; None where none launched anything."""
    alive = sorted((call for call in calls if call.work), key=lambda call: busy(call.work))
    return alive[len(alive) // 2] if alive else None


def analyse(calls: Sequence[Call], eager_ms: float | None = None) -> Launches | None:
    """The typical call in numbers; None if the profiler saw no GPU work. `eager_ms` is a call without the profiler."""
    call = typical(calls)
    if call is None:
        return None
    launched = [item for item in call.api if item.is_launch]
    busy_ms = busy(call.work) / 1e3
    return Launches(
        launches=len(launched),
        nodes=len(call.work),
        streams=len({item.stream for item in call.work}),
        launch_us=_mean([item.end - item.start for item in launched]),
        busy_ms=busy_ms,
        busy_share=min(1.0, busy_ms / eager_ms) if eager_ms else None,
        gaps=gaps(call.work),
        api=_api(call.api),
        kernels=_kernels(call.work),
        copies=_copies(call.work),
        syncs=_api(item for item in call.api if item.is_sync),
        layers=layers(call.work),
        calls=len(calls),
    )


def busy(work: Iterable[Work]) -> float:
    """Microseconds in which something ran; what ran at the same time counts once."""
    total, until = 0.0, float("-inf")
    for item in sorted(work, key=lambda item: item.start):
        total += max(0.0, item.end - max(item.start, until))
        until = max(until, item.end)
    return total


def gaps(work: Sequence[Work]) -> Gaps | None:
    """None for fewer than two activities."""
    found, until = [], None
    for item in sorted(work, key=lambda item: item.start):
        if until is not None:
            found.append(max(0.0, item.start - until))
        until = item.end if until is None else max(until, item.end)
    if not found:
        return None
    ordered = sorted(found)
    return Gaps(len(ordered), quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1], sum(ordered))


def overlapping(call: Call) -> float:
    """Share of activities that start before the one ahead of them in their stream has ended.

    Between plain launches that is none of them: kernels that overlap were launched as programmatic dependents.
    """
    early, until = 0, dict[int, float]()
    for item in call.work:
        early += item.start < until.get(item.stream, float("-inf"))
        until[item.stream] = item.end
    return early / max(1, len(call.work))


def layers(work: Sequence[Work]) -> tuple[Layer, ...]:
    """Launches that repeat: the same kernel on the same grid, or a copy of the same size, in the same order."""
    made = []
    for found in repeats([(item.name, item.grid, item.size) for item in work]):
        part = work[found.start : found.end]
        names = tuple(kernel_name(item.name) for item in part[: min(found.period, _MOST_NAMES)])
        made.append(Layer(found.period, found.count, found.start, names, sum(w.duration for w in part) / found.count))
    return tuple(made)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the ascending values do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def kernel_name(name: str) -> str:
    """For people: without template arguments. Copies and fills keep theirs, which say the direction."""
    return name if name.startswith("Mem") else short(demangle(name))


def _api(items: Iterable[Api]) -> tuple[ApiCost, ...]:
    held: dict[str, list[float]] = {}
    for item in items:
        held.setdefault(item.name, []).append(item.end - item.start)
    made = [ApiCost(name, len(each), _mean(each), sum(each)) for name, each in held.items()]
    return tuple(sorted(made, key=lambda cost: -cost.total_us))


def _kernels(work: Iterable[Work]) -> tuple[KernelCost, ...]:
    held: dict[str, list[float]] = {}
    for item in work:
        held.setdefault(kernel_name(item.name), []).append(item.duration)
    made = [KernelCost(name, len(each), sum(each)) for name, each in held.items()]
    return tuple(sorted(made, key=lambda cost: -cost.total_us)[:_MOST_NAMES])


def _copies(work: Iterable[Work]) -> tuple[Copied, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for item in work:
        if item.kind == "copy":
            counts[item.name] += 1
            sizes[item.name] += item.size
    return tuple(Copied(name, count, sizes[name]) for name, count in counts.most_common())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
