"""The report in a terminal: one table of buckets for each phase, ways out, and lines for drift and proposal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bucketgraph.reporting.drift import Drift
from bucketgraph.reporting.phase import PhaseReport, state
from bucketgraph.reporting.proposal import percent, words

if TYPE_CHECKING:
    from bucketgraph.reporting.build import Report

COLUMNS = (
    *("bucket", "runs on", "state", "hits", "share", "waste", "MiB", "ms a replay", "start-up s"),
    *("variant", "error"),
)
NUMBERS = range(3, 9)  # the columns that are numbers


def plain(report: Report, width: int) -> str:
    """The report as text, at most `width` columns wide."""
    out = io.StringIO()
    show(report, Console(file=out, width=width, color_system=None))
    return out.getvalue().rstrip() + "\n"


def show(report: Report, console: Console) -> None:
    """Print the report."""
    for phase in report.phases:
        console.print(_buckets(phase, report))
        if phase.stats.fallbacks:
            console.print(_fallbacks(phase))
        for line in lines(phase):
            console.print(Text(shown(line)))
        console.print()


def lines(phase: PhaseReport) -> Iterator[str]:
    """Dead buckets, drift, proposal and notes in words."""
    if dead := phase.dead:
        mib = sum(row.mib for row in dead)
        held = f", holding {mib:,.1f} MiB" if mib else ""
        yield f"dead: {len(dead)} of {len(phase.stats.buckets)} buckets were never hit{held}"
    if phase.drift is not None:
        yield f"drift: {moved(phase.drift)}"
    if phase.proposal is not None:
        yield from (f"proposed: {line}" for line in words(phase.proposal))
    yield from (f"note: {line}" for line in phase.notes)


def rows(phase: PhaseReport) -> Iterator[tuple[str, ...]]:
    """The cells of each bucket, by `COLUMNS`."""
    for row in phase.stats.buckets:
        share = percent(row.hits / phase.hits) if row.hits else "-"
        waste = percent(row.padding - 1) if row.hits else "-"
        costs = number(row.mib), number(row.replay_ms, 3), number(row.seconds, 2)
        yield (
            *(row.bucket, row.executable, state(row), f"{row.hits:,}", share, waste, *costs),
            *(row.variant or "", row.error or ""),
        )


def moved(drift: Drift) -> str:
    """The distances and what they did to the waste."""
    parts = [f"total variation {drift.total_variation:.3f} over the buckets (by chance about {drift.by_chance:.3f})"]
    if drift.kolmogorov_smirnov is not None:
        parts.append(f"Kolmogorov-Smirnov {drift.kolmogorov_smirnov:.3f} over the sizes")
    waste = f"waste {percent(drift.planned_waste)} -> {percent(drift.served_waste)}"
    return f"{', '.join(parts)}, {waste}, against {drift.requests:,} of {drift.trace}"


def shown(text: str) -> str:
    """Text that may come from a file, without what a terminal or a page would take for more than text."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def number(value: float | None, digits: int = 1) -> str:
    """A number for people; "-" where nothing is known, and for the 0 of what was not measured."""
    return f"{value:,.{digits}f}" if value else "-"


def _buckets(phase: PhaseReport, report: Report) -> Table:
    stats = phase.stats
    outcomes = ", ".join(f"{count:,} {name}" for name, count in stats.outcomes.items()) or "none"
    title = f"{report.name}: {phase.title}, {stats.calls:,} calls ({outcomes}), waste {percent(phase.waste)}"
    table = Table(title=Text(shown(title)), title_justify="left", header_style="bold", pad_edge=False)
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place in NUMBERS else "left")
    for cells in rows(phase):
        table.add_row(*(Text(shown(cell)) for cell in cells))
    return table


def _fallbacks(phase: PhaseReport) -> Table:
    table = Table(
        title="Calls and parts that no bucket served", title_justify="left", header_style="bold", pad_edge=False
    )
    table.add_column("way out")
    table.add_column("count", justify="right")
    table.add_column("reason, as first seen")
    for key, count in phase.stats.fallbacks.items():
        reason = phase.stats.reasons.get(key, "")
        table.add_row(Text(shown(key)), f"{count:,}", Text(shown(reason)))
    return table
