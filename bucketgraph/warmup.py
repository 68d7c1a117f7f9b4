"""Warm-up: every bucket is run, captured and checked before the first request, or its failure is named.

Order: all buckets are warmed, largest first, before any is captured, so that no workspace grows and nothing compiles
afterwards; then all are captured, largest first, so that smaller ones reuse the pool; then each is replayed, padded,
against the unpadded function; then each is timed. A failure costs its bucket, which runs eagerly; a broken device ends
warm-up.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bucketgraph import binding, executables, selfcheck
from bucketgraph.buckets import Bucket
from bucketgraph.errors import CaptureError
from bucketgraph.executables import Executable
from bucketgraph.executables.eager import Eager
from bucketgraph.executables.family import synchronize

if TYPE_CHECKING:
    from bucketgraph.manager import BucketManager, Captured

_STAGES = ("warm", "capture", "check", "price")


@dataclass(frozen=True)
class Progress:
    """One step of warm-up, as passed to `on_progress`."""

    name: str  # the manager's
    bucket: str
    stage: str  # warm, capture, check or price
    done: int
    total: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class BucketReport:
    """How one bucket's warm-up went."""

    name: str
    bucket: str
    executable: str
    seconds: float
    mib: float
    check: float | None  # largest relative error against unpadded eager
    error: str | None
    variant: str | None = None  # which of the functions that may serve the bucket does
    variants: dict[str, float | str] = field(default_factory=dict)  # ms of a replay of each, or how it failed
    replay_ms: float | None = None  # of one replay; None where the bucket failed
    eager_ms: float | None = None  # of the function at the bucket's size, where dispatch goes by cost
    bound: dict[str, str] = field(default_factory=dict)  # what the set wants bound: `patch`, or what is done and why


@dataclass(frozen=True)
class WarmupReport:
    """All buckets, in the order they were captured."""

    seconds: float
    device: str
    buckets: tuple[BucketReport, ...] = field(default=())

    @property
    def failed(self) -> tuple[BucketReport, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.error is not None)

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def mib(self) -> float:
        return sum(bucket.mib for bucket in self.buckets)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")


def warm_up(
    managers: Sequence[BucketManager],
    on_progress: Callable[[Progress], None] | None = None,
    only: Iterable[Bucket] | None = None,
) -> WarmupReport:
    """Warm up all buckets of managers that share a family (or just `only`, of a single manager).

    Raises:
        DeviceError: the device is unusable after a failure, so that no bucket could be trusted.
    """
    started = time.perf_counter()
    if managers[0].device.type == "cuda":
        gc.collect()  # garbage found during a capture would end it
    work = [
        (manager, manager.build(bucket))
        for manager in managers
        for bucket in (manager.lattice.buckets if only is None else only)
        if only is not None or not manager.policy.lazy
    ]
    work.sort(key=lambda item: -prod(item[1].bucket.sizes))
    done, contracts = 0, []
    for stage in _STAGES:
        if stage == "capture":
            contracts = [manager.bind() for manager in managers]
        if stage == "capture" and managers[0].device.type == "cuda":
            torch.cuda.empty_cache()  # what warming used lies in the common pool, where no graph can have it
        for manager, captured in work:
            done += 1
            if captured.error is None and (stage != "check" or manager.policy.self_check):
                _step(stage, manager, captured)
            if on_progress is not None:
                label = (manager.name, str(captured.bucket), stage)
                total = len(_STAGES) * len(work)
                on_progress(Progress(*label, done, total, captured.seconds, captured.error))
    # Not before: calls that are served by earlier captures meanwhile are held to the earlier contract.
    for manager, contract in zip(managers, contracts, strict=True):
        manager.adopt([captured for owner, captured in work if owner is manager], contract)
        if only is None:
            manager.ready()
    rows = tuple(
        BucketReport(
            *(m.name, str(c.bucket), c.executable.kind, c.seconds, c.mib, c.check, c.error, c.variant),
            *(dict(c.tried), c.replay_ms, c.eager_ms, binding.how(m, c)),
        )
        for m, c in work
    )
    return WarmupReport(time.perf_counter() - started, str(managers[0].device), rows)


def _step(stage: str, manager: BucketManager, captured: Captured) -> None:
    """One stage of one bucket. What goes wrong is the bucket's error, unless the device itself is broken."""
    started = time.perf_counter()
    try:
        with manager.family.turn(), manager.around_step():
            {"warm": _warm, "capture": _capture, "check": _check, "price": _price}[stage](manager, captured)
    except Exception as error:
        captured.error = f"{stage}: {_told(error)}"
        manager.family.examine(error)
    if captured.error is not None:  # after the handler, since a traceback holds on to the function's tensors
        captured.executable.release()
        for _, executable in captured.variants.values():
            executable.release()
        captured.variants.clear()
        manager.family.mib -= captured.mib
        captured.mib = 0.0
    captured.seconds += time.perf_counter() - started


def _warm(manager: BucketManager, captured: Captured) -> None:
    _fill(manager, captured)
    if not captured.variants:
        captured.executable.warm()
    for name in list(captured.variants):
        with _attempt(manager, captured, name) as executable:
            executable.warm()
            synchronize(manager.device)
    synchronize(manager.device)


def _capture(manager: BucketManager, captured: Captured) -> None:
    budget = manager.memory.budget
    if budget is not None and manager.family.mib * 2**20 >= budget:
        raise CaptureError("the memory budget is spent", given=f"{manager.family.mib:.0f} MiB in earlier graphs")
    before = _free_bytes(manager.device)
    # The arena holds another bucket's inputs by now; capture and its first replay must see legal ones.
    _fill(manager, captured)
    if captured.variants:
        _choose(manager, captured)
    else:
        captured.executable.capture()
    first_run_is_its_check = captured.executable.kind == "eager" and manager.policy.self_check
    if not first_run_is_its_check:
        manager.check_outputs(captured)
    synchronize(manager.device)
    captured.mib = max(0, before - _free_bytes(manager.device)) / 2**20
    manager.family.mib += captured.mib
    if budget is not None and manager.family.mib * 2**20 > budget:
        raise CaptureError("over the memory budget", given=f"{captured.mib:.0f} MiB more", expected=f"{budget} bytes")


def _choose(manager: BucketManager, captured: Captured) -> None:
    """Capture each variant; of those that compute what the function does, keep the one whose replay is the shortest."""
    times: dict[str, float] = {}
    for name in list(captured.variants):
        with _attempt(manager, captured, name) as executable:
            executable.capture()
            selfcheck.require_agreement(manager, captured, executable)
            times[name] = executables.milliseconds(executable, manager.device)
        for slower in sorted(times, key=times.__getitem__)[1:]:
            captured.tried[slower] = round(times.pop(slower), 6)
            captured.variants.pop(slower)[1].release()
    ((captured.variant, (captured.fn, captured.executable)),) = captured.variants.items()
    captured.tried[captured.variant] = round(times[captured.variant], 6)
    captured.variants = {}


@contextmanager
def _attempt(manager: BucketManager, captured: Captured, name: str) -> Iterator[Executable]:
    """A variant that fails costs itself, unless it is the last one."""
    executable = captured.variants[name][1]
    try:
        yield executable
    except Exception as error:
        if len(captured.variants) == 1:
            raise
        manager.family.examine(error)
        del captured.variants[name]
        captured.tried[name] = _told(error)
    if name not in captured.variants:  # after the handler, since a traceback holds on to the function's tensors
        executable.release()


def _fill(manager: BucketManager, captured: Captured) -> None:
    """Made-up inputs with padding, as calls will be: a function may take another path when nothing is padded."""
    sizes = selfcheck.inner_sizes(manager, captured.bucket)
    captured.inputs.fill(manager.example(sizes, selfcheck.generator(captured.bucket)))


def _check(manager: BucketManager, captured: Captured) -> None:
    captured.check = selfcheck.check(manager, captured)


def _price(manager: BucketManager, captured: Captured) -> None:
    """What a replay costs, unless that is known, and where costs decide, the function itself at the bucket's size."""
    manager.settle(captured)
    device, tried = manager.device, captured.tried.get(captured.variant or "")
    if isinstance(tried, float):  # by the choice among variants
        captured.replay_ms = tried
    by_cost = manager.spec.dispatch == "cheapest"
    if not by_cost and captured.replay_ms is not None:
        return
    _fill(manager, captured)
    captured.replay_ms = round(executables.milliseconds(captured.executable, device), 6)
    if by_cost:
        captured.eager_ms = round(executables.milliseconds(Eager(captured.fn, captured.inputs.views), device), 6)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{_where(error)}"


def _where(error: BaseException) -> str:
    """The innermost place in the function's own code: the operation that failed is on that line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f" (in {last.name}, {Path(last.filename).name}:{last.lineno}: {last.line})"


def _is_library(filename: str) -> bool:
    path, own = Path(filename), Path(__file__).parent
    plumbing = path.parent == own / "executables" or path.parent == own  # the function's own code is elsewhere
    return plumbing or "site-packages" in filename or filename.startswith("<")


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
