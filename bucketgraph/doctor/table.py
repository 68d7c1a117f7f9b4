"""The diagnosis in a terminal: the verdict first, then what it rests on, findings, and what to change."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bucketgraph.doctor.launches import Launches
from bucketgraph.reporting.table import shown

if TYPE_CHECKING:
    from bucketgraph.doctor.record import Diagnosis

Rows = list[tuple[str, ...]]
API = ("CUDA call", "a call", "us each", "us in all")
KERNELS = ("kernel", "a call", "us in all")


def plain(made: Diagnosis, width: int) -> str:
    """The diagnosis as text, at most `width` columns wide."""
    out = io.StringIO()
    show(made, Console(file=out, width=width, color_system=None))
    return out.getvalue().rstrip() + "\n"


def show(made: Diagnosis, console: Console) -> None:
    """Print the diagnosis."""
    console.print(Text(shown(f"{made.name} on {made.device}: {made.verdict}"), style="bold"))
    console.print(Text(shown(made.summary)))
    console.print()
    console.print(_table(("", ""), list(facts(made))))
    if made.launches is not None:
        for columns, lines in ((API, api_rows(made.launches)), (KERNELS, kernel_rows(made.launches))):
            console.print()
            console.print(_table(columns, lines))
    for title, said in (("What to change", made.advice), ("Notes", made.notes)):
        if said:
            console.print()
            console.print(Text(title, style="bold"))
            for line in said:
                console.print(Text(shown(f"- {line}")))


def facts(made: Diagnosis) -> Iterator[tuple[str, str]]:
    """Names and values: times, prediction, capture, launches."""
    if (times := made.times) is not None:
        wall = "eager, a call in a row" if made.launches is not None or times.gpu_ms is not None else "CPU wall time"
        yield wall, f"{times.eager_ms:.3f} ms"
        if times.gpu_ms is not None:
            yield "GPU time without launches", f"{times.gpu_ms:.3f} ms"
        if made.costs is not None:
            count = made.launches.launches if made.launches is not None else 0
            each = f", {1e3 * times.host_ms / count:.1f} us a launch" if count else ""
            yield "CPU time to issue a call", f"{times.host_ms:.3f} ms{each}"
    if made.ops:
        yield "torch operations", f"{made.ops:,}"
    yield from _launch_facts(made.launches) if made.launches is not None else ()
    if (found := made.prediction) is not None:
        yield "predicted graph", f"{found.graph_ms:.3f} ms ({found.nodes:,} nodes)"
        yield "predicted gain", f"{found.gain:.2f} times, {found.saved_ms:.3f} ms a call"
        cost = found.capture_ms + found.warm_ms
        after = "never pays" if found.break_even is None else f"pays after {found.break_even:,} calls"
        yield "predicted capture", f"{cost:.1f} ms, {after}"
    if (result := made.capture) is not None and result.error is not None:
        yield "capture", f"failed: {result.error}"
    elif result is not None and result.graph_ms is not None and made.measured_gain is not None:
        yield "measured graph", f"{result.graph_ms:.3f} ms"
        yield "measured gain", f"{made.measured_gain:.2f} times"
        yield (
            "measured capture",
            f"{(result.capture_ms or 0) + (result.warm_ms or 0):.1f} ms, {result.mib or 0:.1f} MiB",
        )


def _launch_facts(seen: Launches) -> Iterator[tuple[str, str]]:
    yield "launches", f"{seen.launches:,}, {seen.launch_us:.1f} us of CPU each (profiled)"
    kinds = f" on {seen.streams} streams" if seen.streams > 1 else ""
    share = "" if seen.busy_share is None else f", {100 * seen.busy_share:.0f} % of the eager time"
    yield "GPU busy", f"{seen.busy_ms:.3f} ms{kinds}{share}"
    if seen.gaps is not None:
        gaps = seen.gaps
        spread = f"p50 {gaps.p50:.1f} us, p99 {gaps.p99:.1f} us, largest {gaps.largest:.1f} us"
        yield "gaps and their jitter (profiled)", f"{spread}, {gaps.total / 1e3:.3f} ms in all"
    for copied in seen.copies:
        yield "copies", f"{copied.count} x {copied.name}, {copied.bytes:,} bytes"
    for sync in seen.syncs:
        yield "waits", f"{sync.count} x {sync.name}, {sync.total_us:.1f} us"
    for layer in seen.layers:
        yield (
            "repeats",
            f"{layer.times} times the same {layer.launches} launches, {layer.us:.1f} us: {_names(layer.kernels)}",
        )


def api_rows(seen: Launches) -> Rows:
    return [(cost.name, f"{cost.count:,}", f"{cost.us:.2f}", f"{cost.total_us:,.1f}") for cost in seen.api]


def kernel_rows(seen: Launches) -> Rows:
    return [(cost.name, f"{cost.count:,}", f"{cost.total_us:,.1f}") for cost in seen.kernels]


def _names(kernels: Sequence[str]) -> str:
    most = 4
    return ", ".join(kernels[:most]) + (", ..." if len(kernels) > most else "")


def _table(columns: Sequence[str], rows: Rows) -> Table:
    """All columns but the first are numbers; columns without names have no head."""
    headed = any(columns)
    made = Table(header_style="bold", pad_edge=False, show_header=headed, box=None)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if headed and place else "left")
    for row in rows:
        made.add_row(*(Text(shown(cell)) for cell in row))
    return made
