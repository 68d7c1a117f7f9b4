"""Findings in plain sentences with what to change, and the verdict over all of them.

The verdict, in this order: blocked by what is no wait: cannot be captured. Only by waits, and a graph would gain:
sync-bound. A gain of at least `WORTH`: launch-bound. Otherwise compute-bound: graphs will not help.
"""

from __future__ import annotations

from collections.abc import Sequence

from bucketgraph.doctor.blockers import is_sync
from bucketgraph.doctor.predict import WORTH, Prediction
from bucketgraph.doctor.record import CaptureResult, Finding, Verdict

_MOST = 6  # findings of a kind in one sentence
# What each kind of finding means, and what to change.
ADVICE: dict[str, str] = {
    "read": "the host waits for a value of the GPU. Keep it in a tensor and compute with that, or read it after the"
    " call; a capture cannot go on",
    "branch": "Python takes its way by a value on the GPU, and a graph holds only one way. Compute both and choose with"
    " torch.where, or make the choice outside the call",
    "shape": "the size of the result depends on the data, so the host waits for it and no bucket fits it. Keep the"
    " full size with a mask: torch.where instead of indexing, a fixed output_size, topk instead of nonzero",
    "fetch": "a tensor is brought to the host, which waits for the GPU. Return it, and fetch it after the call",
    "sync": "the host waits for the GPU inside the call. Find what asks for it and move it behind the call",
    "host_data": "host data becomes a GPU tensor in every call, by a copy from unpinned memory that a capture refuses."
    " Make it once before (register_buffer in a module), or pass it as an input",
    "host_tensor": "a tensor is made in host memory during the call. Give it device=x.device, or make it once before",
    "upload": "a capture refuses a copy from unpinned host memory. Make the tensor on the device, or pass it as an"
    " input: a bucket's inputs go through pinned staging",
    "upload_pinned": "the graph copies from the same pinned address in every replay. Write new values there before each"
    " replay, or pass the tensor as an input",
    "compile": "this was compiled by the first call, which takes long and would end a capture. Run every shape once"
    " before: warm-up does",
    "recompile": "something is still compiled in a warm call. Keep shapes and constexpr arguments fixed, or mark what"
    " changes do_not_specialize",
    "capture": "the capture itself ended here, which nothing had shown before. Move this operation out of the call",
    "training": "modules are in training mode: dropout makes them random, batch norm mixes requests. Call .eval()",
    "mixes": "real rows depend on the padding. Mask the padding in this operation, reduce over real rows only, or keep"
    " this axis out of the buckets; batch norm needs .eval() and running statistics",
    "unfound": "results differ by more than one rounding, and step by step none does. Rounding adds up in a deep model,"
    " or a kernel that torch does not dispatch mixes rows: compare in float32",
    "path": "the code takes another path when the inputs are padded. Decide by real sizes, given as a tensor",
}


def sentences(findings: Sequence[Finding]) -> tuple[str, ...]:
    """One for each kind of finding: what it is called and where, what it means, what to change."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    return tuple(map(_sentence, kinds.values()))


def _sentence(alike: Sequence[Finding]) -> str:
    more = f"; and {len(alike) - _MOST} more" if len(alike) > _MOST else ""
    meaning = ADVICE[alike[0].kind]
    return f"{'; '.join(map(str, alike[:_MOST]))}{more}: {meaning}."


def verdict(
    findings: Sequence[Finding], prediction: Prediction | None, capture: CaptureResult | None, measured: float | None
) -> tuple[Verdict, str]:
    """The verdict and one sentence about it. `measured` is the gain of a real capture."""
    blocking = [finding for finding in findings if finding.severity == "blocks"]
    failed = capture is not None and capture.error is not None
    padding = " Padding changes its results, so it must not run from buckets as it is." if _mixes(findings) else ""
    if failed or (blocking and measured is None):
        name, text = _blocked(blocking, prediction, capture)
    elif prediction is None and measured is None:
        name, text = "not timed", "Nothing was seen to block a capture; whether graphs gain is a question for a GPU."
    else:
        name, text = _by_gain(prediction, measured)
    return name, text + padding


def _blocked(
    blocking: Sequence[Finding], prediction: Prediction | None, capture: CaptureResult | None
) -> tuple[Verdict, str]:
    first = blocking[0] if blocking else None
    why = str(first) if first is not None else (capture.error or "" if capture is not None else "")
    more = f" and {len(blocking) - 1} more" if len(blocking) > 1 else ""
    if prediction is None:
        after = ""
    elif prediction.is_worth_it:
        after = f" Without it a graph would be about {prediction.gain:.1f} times as fast."
    else:
        after = f" Nor would a graph gain much: about {prediction.gain:.2f} times as fast."
    if blocking and all(map(is_sync, blocking)) and prediction is not None and prediction.is_worth_it:
        return "sync-bound", f"The host waits for the GPU inside the call, so no graph can hold it: {why}{more}.{after}"
    return "cannot be captured", f"No graph can hold this call: {why}{more}.{after}"


def _by_gain(prediction: Prediction | None, measured: float | None) -> tuple[Verdict, str]:
    parts = []
    if measured is not None:
        parts.append(f"{measured:.2f} times as fast as eager, measured")
    if prediction is not None:
        parts.append(f"{prediction.gain:.2f} predicted")
    gain = measured if measured is not None else prediction.gain if prediction is not None else 1.0
    said = "; ".join(parts)
    if gain >= WORTH:
        calls = None if prediction is None else prediction.break_even
        again = "" if calls is None else f", and pays for its capture after {calls:,} calls"
        return "launch-bound", f"Graphs will help: the GPU waits for launches. A graph is {said}{again}."
    return "compute-bound", f"Graphs will not help: the GPU is busy with kernels as it is. A graph is {said}."


def _mixes(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "padding" for finding in findings)
