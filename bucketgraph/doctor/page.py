"""The diagnosis as one HTML page, on the report's page: no script, no request, plots as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bucketgraph.doctor import table
from bucketgraph.doctor.launches import Launches
from bucketgraph.doctor.timeline import timeline
from bucketgraph.reporting import page as pages
from bucketgraph.reporting import svg
from bucketgraph.reporting.svg import Bar, text

if TYPE_CHECKING:
    from bucketgraph.doctor.record import Diagnosis
    from bucketgraph.doctor.trace import Call

_START = 24  # launches shown from near, where nothing repeats


def page(made: Diagnosis) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items() if name != "bucketgraph")
    return pages.document(f"{made.name}: {made.verdict}", f"On {made.device} with {versions}", "".join(_body(made)))


def _body(made: Diagnosis) -> Iterator[str]:
    yield f"<section><h2>Verdict: {text(made.verdict)}</h2><p>{text(made.summary)}</p>"
    yield pages.table(("of a call", ""), list(table.facts(made)), set(), {1})
    yield from _listed("What to change", made.advice)
    if made.launches is not None:
        yield from _launches(made.launches, made.timeline)
    yield from _listed("Notes", made.notes)
    yield "</section>\n"


def _launches(seen: Launches, call: Call | None) -> Iterator[str]:
    if call is not None:
        legend = "Grey: calls of CUDA's API. Blue: kernels. Orange: copies and fills. The profiler widens the gaps."
        yield pages.figure("Timeline of a call", timeline("Timeline of a call", call), legend)
        yield pages.figure("Its start", timeline("The start of the call", call, _near(seen, call)), "")
    costs = [Bar(cost.name, cost.total_us, f"{cost.total_us:,.1f} us") for cost in seen.kernels]
    yield pages.figure("GPU time by kernel", svg.bars("GPU time by kernel", costs), "Profiled, in one call.")
    yield "<h3>Calls of CUDA's API</h3>" + pages.table(table.API, table.api_rows(seen), {1, 2, 3}, set())
    yield "<h3>Kernels</h3>" + pages.table(table.KERNELS, table.kernel_rows(seen), {1, 2}, set())


def _near(seen: Launches, call: Call) -> float:
    """Microseconds of the call that hold two repeats, or its first launches."""
    layer = max(seen.layers, key=lambda layer: layer.launches * layer.times, default=None)
    count = layer.first + 2 * layer.launches if layer is not None else _START
    last = call.work[min(count, len(call.work)) - 1]
    return last.end - min(call.start, call.work[0].start)


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    if lines:
        yield f"<h3>{text(title)}</h3>" + "".join(f"<p>{text(line[0].upper() + line[1:])}</p>" for line in lines)
