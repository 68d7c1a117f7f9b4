"""One phase of a report: its counters, its drift and its proposal, and what could not be told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bucketgraph.planner import traces
from bucketgraph.planner.demand import Demand
from bucketgraph.reporting import drift as drifts
from bucketgraph.reporting import proposal as proposals
from bucketgraph.reporting.drift import Drift
from bucketgraph.reporting.proposal import Proposal
from bucketgraph.reporting.traffic import Ladder, counted, covered, ladder, launches
from bucketgraph.stats import MAX_SIZES, BucketStats, Stats


@dataclass(frozen=True)
class PhaseReport:
    """What became of one phase's calls."""

    phase: str  # prefill or decode; "" for a set without phases
    stats: Stats
    ladder: Ladder
    drift: Drift | None  # None without a trace for this phase
    proposal: Proposal | None
    notes: tuple[str, ...]  # what is not known, and why

    @property
    def title(self) -> str:
        return self.phase or self.stats.name

    @property
    def waste(self) -> float:
        """Padded work over real work of all replays, less 1."""
        return self.stats.padding - 1.0

    @property
    def hits(self) -> int:
        return sum(row.hits for row in self.stats.buckets)

    @property
    def dead(self) -> tuple[BucketStats, ...]:
        """Buckets that were never hit, though they could have been."""
        return tuple(row for row in self.stats.buckets if state(row) == "never hit")

    def as_dict(self) -> dict[str, Any]:
        """For JSON: shares of 1, MiB, ms and seconds; null where something is not known."""
        stats = self.stats
        made = self.proposal
        return {
            "phase": self.phase,
            "name": stats.name,
            "calls": stats.calls,
            "outcomes": stats.outcomes,
            "hits": self.hits,
            "waste": self.waste,
            "fallbacks": [
                {"way": key, "count": count, "reason": stats.reasons.get(key)} for key, count in stats.fallbacks.items()
            ],
            "dead": [row.bucket for row in self.dead],
            "dead_mib": sum(row.mib for row in self.dead),
            "mib": sum(row.mib for row in stats.buckets),
            "seconds": sum(row.seconds for row in stats.buckets),
            "after_warmup": stats.after_warmup,
            "buckets": [self._row(row) for row in stats.buckets],
            "sizes": stats.as_dict()["sizes"],
            "other_sizes": stats.other_sizes,
            "drift": None if self.drift is None else asdict(self.drift),
            "proposal": None if made is None else _proposal(made),
            "notes": list(self.notes),
        }

    def _row(self, row: BucketStats) -> dict[str, Any]:
        return {
            "bucket": row.bucket,
            "sizes": row.sizes,
            "state": state(row),
            "executable": row.executable,
            "hits": row.hits,
            "share": row.hits / self.hits if self.hits else 0.0,
            "real": row.real,
            "padded": row.padded,
            "waste": row.padding - 1.0,
            "mib": row.mib,
            "replay_ms": row.replay_ms,
            "seconds": row.seconds,
            "variant": row.variant,
            "error": row.error,
        }


def state(row: BucketStats) -> str:
    """What a bucket is good for: in use, never hit, failed, or not captured yet (of a lazy set)."""
    if row.error is not None:
        return "failed"
    if row.hits:
        return "in use"
    return "not captured" if row.executable == "none" and row.seconds == 0.0 else "never hit"


def phase_report(phase: str, stats: Stats, trace: traces.Trace | None) -> PhaseReport:
    """Everything about one phase; a trace has the ladder's axes as its columns."""
    place = ladder(phase, stats)
    notes = _unknown(stats)
    if len(place.axes) > 2:
        notes.append(
            f"no drift and no proposal: the planner takes one or two axes, and this work has {len(place.axes)}"
        )
        return PhaseReport(phase, stats, place, None, None, tuple(notes))
    calls = counted(stats, place)
    if calls is None:
        notes.append("no drift and no proposal: no calls were counted")
        return PhaseReport(phase, stats, place, None, None, tuple(notes))
    drift = None
    if trace is not None:
        named = f"{', '.join(trace.sources)} ({' x '.join(trace.columns)})"
        drift = drifts.drift(launches(trace, place), launches(calls, place), place, named, trace.requests)
    proposal = _proposed(stats, place, covered(calls, place), notes)
    return PhaseReport(phase, stats, place, drift, proposal, tuple(notes))


def _proposed(stats: Stats, place: Ladder, asked: Demand | None, notes: list[str]) -> Proposal | None:
    if asked is None:
        notes.append("no proposal: no call's sizes fit the largest bucket")
    elif not place.whole:
        notes.append("no proposal: no bucket of the set covers all that the others do")
    else:
        if asked.left_out:
            notes.append(
                f"{asked.left_out:,} calls are over the largest bucket, which the proposal keeps: they stay as they are"
            )
        made = proposals.propose(stats, asked, place)
        if made.saved >= 0.0:
            return made
        notes.append("no proposal: the planner found no better sizes")
    return None


def _unknown(stats: Stats) -> list[str]:
    notes = []
    if stats.other_sizes:
        notes.append(
            f"{stats.other_sizes:,} calls had sizes beyond the first {MAX_SIZES:,} distinct ones: they are counted, and"
            " not part of the sizes, the drift and the proposal"
        )
    if not any(row.mib for row in stats.buckets):
        notes.append("no MiB: device memory is measured on a GPU, for buckets that are captured")
    timed = sum(row.replay_ms is not None for row in stats.buckets)
    if timed < len(stats.buckets):
        what = f"{timed} of {len(stats.buckets)} buckets have a time" if timed else "no ms"
        notes.append(f"{what}: replays are timed in warm-up, of buckets that are captured and not failed")
    if any(key.endswith((":over_padding", ":cheaper")) for key in stats.fallbacks):
        notes.append(
            "drift and proposal take the nearest bucket for every call, without max_padding and dispatch by cost"
        )
    return notes


def _proposal(made: Proposal) -> dict[str, Any]:
    return {
        "axes": list(made.axes),
        "buckets": [list(bucket) for bucket in made.buckets],
        "align": list(made.align),
        "cost": made.cost,
        "unit": made.unit,
        "now": asdict(made.now),
        "then": asdict(made.then),
        "saved": made.saved,
        "worth": made.worth,
        "exact": made.exact,
    }
