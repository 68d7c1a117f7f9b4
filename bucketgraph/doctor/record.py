"""What a diagnosis says: frozen records, from single findings to the verdict. Times are in ms or us as named."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from bucketgraph.doctor.launches import Launches
from bucketgraph.doctor.places import Place
from bucketgraph.doctor.predict import DeviceCosts, Prediction, Times

if TYPE_CHECKING:
    from bucketgraph.doctor.trace import Call

Verdict = Literal["launch-bound", "compute-bound", "sync-bound", "cannot be captured", "not timed"]


@dataclass(frozen=True)
class Finding:
    """One thing that blocks a capture, makes its results doubtful, or makes padding change results."""

    kind: str  # a key of `advise.ADVICE`
    severity: Literal["blocks", "suspect", "padding"]
    op: str  # the operation, as its user would call it
    place: Place | None = None
    count: int = 1  # times in one call
    detail: str = ""

    def __str__(self) -> str:
        times = f", {self.count} times a call" if self.count > 1 else ""
        detail = f", {self.detail}" if self.detail else ""
        return self.op + (f" at {self.place}" if self.place else "") + times + detail


@dataclass(frozen=True)
class CaptureResult:
    """What a real capture gave."""

    graph_ms: float | None = None  # a replay, many in a row
    capture_ms: float | None = None  # recording and instantiating
    warm_ms: float | None = None  # the run before it
    mib: float | None = None
    error: str | None = None
    place: Place | None = None  # the user's line that the error came from


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found about one workload. None where there was nothing to measure it with."""

    name: str
    device: str  # the GPU's name, or cpu
    versions: dict[str, str]
    verdict: Verdict
    summary: str  # the verdict in a sentence
    advice: tuple[str, ...]  # what to change, one sentence or two for each finding
    findings: tuple[Finding, ...] = ()
    ops: int = 0  # torch operations that one call dispatched
    times: Times | None = None
    costs: DeviceCosts | None = None
    launches: Launches | None = None
    prediction: Prediction | None = None
    capture: CaptureResult | None = None
    notes: tuple[str, ...] = ()
    timeline: Call | None = field(default=None, repr=False, compare=False)  # one call as the profiler saw it

    @property
    def measured_gain(self) -> float | None:
        """Eager time over graph time."""
        if self.times is None or self.capture is None or not self.capture.graph_ms:
            return None
        return self.times.eager_ms / self.capture.graph_ms

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Times are in ms or us as their names say, gains are eager time over graph time."""
        found = asdict(replace(self, timeline=None))
        del found["timeline"]
        if self.prediction is not None:
            found["prediction"] |= {"gain": self.prediction.gain, "saved_ms": self.prediction.saved_ms}
        return {"format": "bucketgraph doctor", "version": 1, **found, "measured_gain": self.measured_gain}

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def table(self, width: int = 200) -> str:
        """For a terminal of `width` columns, as plain text."""
        from bucketgraph.doctor import table

        return table.plain(self, width)

    def html(self) -> str:
        """One page that needs nothing else: no script, no request; readable on light and on dark."""
        from bucketgraph.doctor import page

        return page.page(self)
