"""Which decode batches a device loop serves, and why it leaves the others to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from bucketgraph.buckets import Bucket
from bucketgraph.errors import BucketGraphError
from bucketgraph.llm.device_loop.build import LoopReport, build
from bucketgraph.llm.device_loop.loop import STOPS, Loop
from bucketgraph.llm.device_loop.run import Run
from bucketgraph.llm.request import Request
from bucketgraph.manager import BucketManager, Captured

if TYPE_CHECKING:
    from bucketgraph.llm.runner import Runner


class DeviceLoops:
    """The loops of all decode buckets, built when first needed. The engine's lock is held by all callers."""

    def __init__(self, runner: Runner, eos_token_ids: Sequence[int]) -> None:
        self._runner, self._manager = runner, runner.decode_manager
        self._eos = tuple(eos_token_ids)
        self._loops: dict[Bucket, tuple[Captured, Loop | None, LoopReport]] = {}

    @property
    def reports(self) -> tuple[LoopReport, ...]:
        return tuple(report for _, _, report in self._loops.values())

    @cached_property
    def unsupported(self) -> str | None:
        """Why this machine, or this set, has no device loop."""
        return unsupported(self._manager)

    def start(self, requests: Sequence[Request]) -> Run | None:
        """Launch a run of these, or count why the host has to run them. Raises what a call of the manager would."""
        manager = self._manager
        with manager.family.turn():
            manager.require_warm()
            try:
                manager.require_fresh()
                found = self._find(requests)
                if isinstance(found, Loop):
                    stops, floor = [self._stops(request) for request in requests], self._floor(requests)
                    with manager.watched():
                        return found.start(requests, stops, floor)
            except Exception as error:
                self.failed(error, len(requests))
                raise
            manager.recorder.fallback("host loop", *found)
            return None

    def ended(self, run: Run) -> None:
        """A run is over: its steps are counted as calls."""
        with self._manager.family.lock:
            self._manager.recorder.looped(run.bucket, run.counts())

    def failed(self, error: Exception, rows: int) -> None:
        """A run raised: it counts as one call. Raises DeviceError if the device went with it."""
        with self._manager.family.lock:
            self._manager.recorder.asked((rows,))
            self._manager.recorder.call("raised")
            self._manager.family.examine(error)

    def build(self) -> tuple[LoopReport, ...]:
        """The loops of all captured buckets now, largest first, so that no call waits for one."""
        if self.unsupported is None:
            for captured in sorted(self._manager.captured.values(), key=lambda item: -item.bucket["batch"]):
                if captured.error is None:
                    with self._manager.family.turn():
                        self._loop(captured)
        return self.reports

    def release(self) -> None:
        """Give all loops back; no run is in flight."""
        for bucket in list(self._loops):
            self._drop(bucket)

    def _find(self, requests: Sequence[Request]) -> Loop | tuple[str, str]:
        """What can run these, or a code and a reason why nothing can."""
        if self.unsupported is not None:
            return "unsupported", self.unsupported
        if any(request.loop != "device" for request in requests):
            return "mixed", "a request of the batch asks for the host loop"
        if any(request.params.logprobs is not None for request in requests):
            return "logprobs", "log probabilities are read by the host after each step"
        if (most := max(len(self._stops(request)) for request in requests)) > STOPS:
            return "stop_tokens", f"a request has {most} stop tokens, the loop takes {STOPS}"
        plan = self._manager.plan(batch=len(requests))
        if plan.bucket is None:
            return plan.code or plan.kind, plan.reason or f"{len(requests)} rows have no bucket of their own"
        captured = self._manager.serving(plan.bucket)
        if captured.error is not None:
            return "bucket_failed", captured.error
        return self._loop(captured)

    def _stops(self, request: Request) -> list[int]:
        own = request.params.stop_token_ids or ()
        return list(dict.fromkeys((*own, *(() if request.params.ignore_eos else self._eos))))

    def _floor(self, requests: Sequence[Request]) -> int:
        """The most rows, fewer than these, that the host loop would not run in the same bucket."""
        here = self._manager.plan(batch=len(requests)).bucket
        fewer = range(len(requests) - 1, 0, -1)
        return next((rows for rows in fewer if self._manager.plan(batch=rows).bucket != here), 0)

    def _loop(self, captured: Captured) -> Loop | tuple[str, str]:
        """The bucket's loop, built at first and after each new capture; or why there is none."""
        held = self._loops.get(captured.bucket)
        if held is None or held[0] is not captured:
            if self._runner.cache.free_pages == 0:
                return "no_page", "the loop is not built yet, and no page of the KV cache is free to check it on"
            self._drop(captured.bucket)
            held = self._loops[captured.bucket] = captured, *build(self._runner, captured)
        _, loop, report = held
        return loop or ("loop_failed", str(report.error))

    def _drop(self, bucket: Bucket) -> None:
        _, loop, report = self._loops.pop(bucket, (None, None, None))
        if loop is not None and report is not None:
            loop.launcher.release()
            self._manager.family.mib -= report.mib


def unsupported(manager: BucketManager) -> str | None:
    """Why a manager's machine, or its set, has no device loop."""
    if manager.device.type != "cuda":
        return f"the device loop needs a CUDA GPU, and decode runs on {manager.device}"
    if manager.kind != "cudagraph":
        return f"the device loop needs decode as a CUDA graph, and its executable is {manager.kind}"
    from bucketgraph.cuda.driver import load_driver

    try:
        load_driver()
    except BucketGraphError as error:
        return str(error)
    return None
