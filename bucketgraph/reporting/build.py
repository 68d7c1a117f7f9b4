"""`report`: statistics, live or saved, to a `Report`, which shows itself as a table, as JSON and as one HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketgraph.errors import ConfigError
from bucketgraph.planner import document, traces
from bucketgraph.planner.readers import SizesTable, read_table
from bucketgraph.reporting import page, proposal, table
from bucketgraph.reporting.phase import PhaseReport, phase_report
from bucketgraph.reporting.traffic import Ladder, ladder
from bucketgraph.saved import Saved
from bucketgraph.stats import Stats

if TYPE_CHECKING:
    from bucketgraph.encoder import Encoder
    from bucketgraph.llm.api import LLM
    from bucketgraph.manager import BucketManager

    Source = BucketManager | LLM | Encoder | Saved | str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """Hits, waste, ways out, dead buckets, drift and proposed sizes of every phase."""

    name: str  # the set's
    source: str  # the file of statistics, or "a running service"
    phases: tuple[PhaseReport, ...]
    set_text: str | None  # the bucket set, as YAML

    def table(self, width: int = 200) -> str:
        """For a terminal of `width` columns, as plain text."""
        return table.plain(self, width)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: shares are of 1, memory in MiB, times in ms (replays) and seconds (warm-up)."""
        phases = [phase.as_dict() for phase in self.phases]
        return {
            "format": "bucketgraph report",
            "version": 1,
            "name": self.name,
            "source": self.source,
            "phases": phases,
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def html(self) -> str:
        """One page that needs nothing else: no script, no request; readable on light and on dark."""
        return page.page(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page. Raises ConfigError where nothing can be written."""
        document.write(Path(path), self.html())

    def proposed_set(self, name: str) -> str:
        """The set under this name with the proposed sizes, as YAML. Raises ConfigError where there is no proposal."""
        made = {phase.phase: phase.proposal for phase in self.phases if phase.proposal is not None}
        calls = " and ".join(f"{phase.stats.calls:,} of {phase.title}" for phase in self.phases)
        return proposal.proposed_set(self.set_text, made, name, f"the calls counted in {self.source}: {calls}")


def report(source: Source, trace: str | os.PathLike[str] | None = None, columns: Sequence[str] | None = None) -> Report:
    """Report on a manager, an LLM or an encoder that runs, or on what its `save_stats` wrote.

    Args:
        source: the object, or the file's path.
        trace: what the buckets were planned for, to compare with: a file as `bucketgraph plan` reads it, or earlier
            statistics. A CSV of lengths is taken for an LLM's prefill.
        columns: the trace's columns, one for each work axis of the set; None picks those named like the axes, else a
            known name of lengths.

    Raises:
        ConfigError: a file is missing, damaged or something else, or the trace has other columns than the set has axes.
    """
    saved, where = _saved(source)
    places = {phase: ladder(phase, stats) for phase, stats in saved.phases.items()}
    planned = {} if trace is None else _traces(Path(trace), places, columns)
    phases = tuple(phase_report(phase, stats, planned.get(phase)) for phase, stats in saved.phases.items())
    return Report(saved.title, where, phases, saved.set_text)


def _saved(source: Any) -> tuple[Saved, str]:
    if isinstance(source, (str, os.PathLike)):
        return Saved.load(source), Path(source).name
    if isinstance(source, Saved):
        return source, "saved statistics"
    owner = getattr(source, "manager", source)  # an encoder's
    spec = getattr(owner, "bucket_set", None) or getattr(owner, "spec", None)
    if spec is None or not callable(getattr(owner, "stats", None)):
        expected = "a BucketManager, an LLM, an Encoder, or the path of saved statistics"
        raise ConfigError("nothing to report on", given=type(source).__name__, expected=expected)
    stats: Stats | dict[str, Stats] = owner.stats()
    return Saved.of({"": stats} if isinstance(stats, Stats) else stats, spec), "a running service"


def _traces(path: Path, places: dict[str, Ladder], columns: Sequence[str] | None) -> dict[str, traces.Trace]:
    """The trace of each phase that the file has one for. Raises ConfigError if it has none."""
    found = read_table(path)
    if columns is None and isinstance(found, SizesTable):
        made = {phase: _saved_sizes(path, found, phase, place.axes) for phase, place in places.items()}
        if not any(made.values()):
            wanted = " or ".join(f"{phase}.{','.join(at.axes)}".lstrip(".") for phase, at in places.items())
            given = ", ".join(found.columns)
            raise ConfigError(f"{path.name}: no sizes of the set's axes", given=given, expected=wanted)
        return {phase: trace for phase, trace in made.items() if trace is not None}
    names = None if columns is None else tuple(columns)
    named = "" if names is None else names[0].partition(".")[0]
    phase = next(phase for phase in (named, "prefill", next(iter(places))) if phase in places)
    axes = places[phase].axes
    if names is None and set(axes) <= set(found.columns):
        names = axes
    if len(names or ("lengths",)) != len(axes):
        given = "one column of lengths" if names is None else ",".join(names)
        expected = f"{len(axes)} column{'s' * (len(axes) > 1)}, for {', '.join(axes)}"
        hint = "name them with --column"
        raise ConfigError(f"{path.name}: not the columns of the set's axes", given=given, expected=expected, hint=hint)
    return {phase: traces.read([path], names)}


def _saved_sizes(path: Path, found: SizesTable, phase: str, axes: tuple[str, ...]) -> traces.Trace | None:
    """Sizes of `axes` from saved statistics, where they may be in another order; None if there are none."""
    prefix = f"{phase}." if phase else ""
    for order in (axes, axes[::-1]):
        if prefix + ",".join(order) in found.columns:
            made = traces.read([path], (prefix + order[0], *order[1:]))
            turn = slice(None, None, 1 if order == axes else -1)
            return replace(made, columns=axes, sizes=made.sizes[:, turn])
    return None
