"""The diagnosis, in order: run, watch, time, profile, predict, capture, pad, judge.

Times are taken before the profiler has been on, since it slows launches down, and the prediction stands before anything
of the workload is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import bucketgraph
from bucketgraph.config import BucketSet
from bucketgraph.doctor import advise, blockers, capture, clock, launches, padding, profile, rows, workload
from bucketgraph.doctor.predict import DeviceCosts, Prediction, Times, predict
from bucketgraph.doctor.record import CaptureResult, Diagnosis, Finding
from bucketgraph.doctor.trace import Call
from bucketgraph.doctor.workload import Workload
from bucketgraph.errors import BucketGraphError

_LOST = "the profiler saw no GPU work, so launches and gaps are not shown (are CUPTI and its permissions there?)"


def diagnose(
    target: Workload | Callable[..., Any],
    bucket_set: BucketSet | None = None,
    *,
    name: str | None = None,
    device: torch.device | str | None = None,
    with_capture: bool = True,
) -> Diagnosis:
    """Diagnose a workload: what it launches, what a graph would gain, what blocks one, what padding would change.

    Everything runs without gradients, as buckets do; the workload is called some dozens of times.

    Args:
        target: a callable without arguments that runs one call, or that returns (fn, inputs); with `bucket_set` a
            function of the set's inputs by keyword, which is run in the set's largest bucket. Or a `Workload`, such as
            `bucketgraph.doctor.models.of_model` makes of a language model.
        name: what it is called in the report; None takes the function's own.
        device: None takes the module's, else a GPU if there is one.
        with_capture: capture it on a GPU, to show what came beside the prediction.

    Raises:
        ConfigError: the target is no workload, or returns other outputs than the set declares.
        InputError: the workload itself fails.
        DeviceError: a failed capture broke the CUDA context.
    """
    if not isinstance(target, Workload):
        called = name or str(getattr(target, "__qualname__", type(target).__name__))
        if bucket_set is None:
            target = workload.of_function(called, target, device)
        else:
            target = workload.of_set(called, target, bucket_set, None, device)
    with torch.no_grad():
        return _Examination(target).run(with_capture)


class _Examination:
    """Fills in a diagnosis, one step after another."""

    def __init__(self, work: Workload) -> None:
        self._work, self._device = work, work.device
        self._findings: list[Finding] = []
        self._notes: list[str] = []
        self._ops = 0

    def run(self, with_capture: bool) -> Diagnosis:
        self._watch()
        times = self._times()
        costs: DeviceCosts | None = None
        calls: tuple[Call, ...] = ()
        prediction: Prediction | None = None
        if self._device.type == "cuda":
            costs = clock.calibrate(self._device)
            calls = profile.record(self._work.call, self._device)
            costs = self._with_profiled(costs, times)
            prediction = self._predict(times, calls, costs)
        captured = capture.run(self._work.call, self._device) if with_capture and self._device.type == "cuda" else None
        self._captured(captured)
        self._padding()
        made = Diagnosis(
            name=self._work.name,
            device=_device_name(self._device),
            versions={"torch": torch.__version__, "bucketgraph": bucketgraph.__version__},
            verdict="not timed",
            summary="",
            advice=advise.sentences(self._findings),
            findings=tuple(self._findings),
            ops=self._ops,
            times=times,
            costs=costs,
            launches=launches.analyse(calls, times.eager_ms),
            prediction=prediction,
            capture=captured,
            notes=tuple(self._notes),
            timeline=launches.typical(calls),
        )
        verdict, summary = advise.verdict(self._findings, prediction, captured, made.measured_gain)
        return replace(made, verdict=verdict, summary=summary)

    def _watch(self) -> None:
        """The first call, which compiles; two warm ones; and one under the modes that see what blocks."""
        call, name = self._work.call, self._work.name
        first = blockers.Watched()
        with blockers.compiling(first, "compile", "suspect"):
            workload.attempt(call, name)
        workload.attempt(call, name)
        with blockers.compiling(first, "recompile", "blocks"):
            workload.attempt(call, name)
        try:
            watched = blockers.watch(call, self._device)
        except Exception as error:
            self._notes.append(f"what blocks a capture could not be watched: {workload.told(error)}")
            return
        self._ops = watched.ops
        if self._device.type == "cuda" and watched.devices == {"cpu"}:
            self._device = torch.device("cpu")
            self._notes.append("nothing ran on the GPU: the workload's tensors are in host memory")
            watched = blockers.watch(call, self._device)
        if watched.twins:
            self._notes.append("our kernels' plain-torch twins ran, which read lengths on the host; a GPU runs kernels")
        self._findings += [*watched.findings(), *first.findings()]

    def _times(self) -> Times:
        work, device = self._work, self._device
        times = workload.attempt(lambda: clock.times(work.call, device), f"{work.name}, called again,")
        if self._device.type != "cuda":
            self._notes.append(
                "timing needs a GPU: launches, gaps and a graph's gain cannot be told here, and the time shown is this"
                " CPU's own. What blocks a capture is told by what the call asks for, as if its tensors were on a GPU"
            )
        elif times.gpu_ms is None:
            self._notes.append(
                "the call waits for the GPU, or is too long to queue: its profiled kernels are summed up"
            )
        elif times.spread > 0.2:
            self._notes.append(
                f"times of eager calls vary by {100 * times.spread:.0f} %: the machine is busy or slow to wake"
            )
        return times

    def _with_profiled(self, costs: DeviceCosts, times: Times) -> DeviceCosts:
        """What the profiler makes of a tiny kernel's duration, where durations are needed."""
        if times.gpu_ms is not None:
            return costs
        _, chain = clock.tiny(self._device)
        seen = launches.typical(profile.record(chain, self._device))
        return costs if seen is None else replace(costs, tiny_us=launches.busy(seen.work) / len(seen.work))

    def _predict(self, times: Times, calls: tuple[Call, ...], costs: DeviceCosts) -> Prediction | None:
        seen = launches.typical(calls)
        if seen is None:
            self._notes.append(_LOST)
            return None
        if len({item.stream for item in seen.work}) > 1 and times.gpu_ms is None:
            self._notes.append("several streams: what overlapped in the profile is taken to overlap in a graph")
        overlapping = 0.0
        if times.gpu_ms is not None:
            queued = profile.record(self._work.call, self._device, wait_ms=4.0 * times.host_ms + 4.0)
            overlapping = launches.overlapping(launches.typical(queued) or seen)
        return predict(times, len(seen.work), launches.busy(seen.work) / 1e3, costs, overlapping)

    def _captured(self, result: CaptureResult | None) -> None:
        """A failed capture that nothing foretold is a finding; one that succeeded makes doubts of what was foretold."""
        if result is None:
            return
        if result.error is None:
            doubted = [replace(f, severity="suspect") if f.severity == "blocks" else f for f in self._findings]
            if doubted != self._findings:
                self._notes.append("it was captured although that seemed impossible: hold its replays to eager results")
            self._findings = doubted
        elif not any(f.severity == "blocks" and f.place == result.place for f in self._findings):
            self._findings.insert(0, Finding("capture", "blocks", result.error, result.place))

    def _padding(self) -> None:
        work = self._work
        if work.bucket_set is not None and work.fn is not None:
            findings, notes = padding.check(work.fn, work.bucket_set, self._device)
        elif work.inputs is None:
            findings, notes = [], ["padding was not checked: that needs the function and its inputs, or a bucket set"]
        else:
            findings, notes = self._rows(work.inputs)
        self._findings += findings
        self._notes += notes

    def _rows(self, inputs: rows.Inputs) -> tuple[list[Finding], list[str]]:
        """The check of padding for rows of the inputs that the workload brings."""
        module = inputs.fn if isinstance(inputs.fn, torch.nn.Module) else None
        try:
            made = rows.bucket_set(inputs)
            findings, notes = padding.check(inputs.results, made, self._device, inputs.tensors, module)
        except BucketGraphError as error:
            return [], [
                f"padding was not checked: {' '.join(str(error).split())}; a bucket set (--set) says what is padded"
            ]
        return findings, [*notes, "the first dimension of the inputs was taken as the batch, padded with zeros"]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
