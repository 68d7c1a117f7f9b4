"""What happened to calls, counted: every call has exactly one outcome, so the outcomes add up to the calls."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from bucketgraph.buckets import Bucket, Plan

log = logging.getLogger("bucketgraph")


@dataclass(frozen=True)
class BucketStats:
    """One bucket's share. `real` and `padded` are products of the set's work axes, summed over hits."""

    bucket: str
    executable: str
    hits: int
    real: int
    padded: int

    @property
    def padding(self) -> float:
        """Padded work over real work, 1.0 for none."""
        return self.padded / self.real if self.real else 1.0


@dataclass(frozen=True)
class Stats:
    """A snapshot of a manager's counters."""

    name: str
    calls: int
    outcomes: dict[str, int]  # replayed, split, eager, refused, raised: they add up to calls
    fallbacks: dict[str, int]  # outcome:code, such as eager:over_largest; parts of split calls count, too
    buckets: tuple[BucketStats, ...] = field(default=())
    after_warmup: dict[str, int] = field(default_factory=dict)  # of the whole process: compiles, memory segments

    @property
    def padding(self) -> float:
        """Padded over real work of all replays."""
        real = sum(bucket.real for bucket in self.buckets)
        return sum(bucket.padded for bucket in self.buckets) / real if real else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "padding": self.padding}


class Recorder:
    """Counts outcomes. Not locked: the manager records under its family's lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._outcomes: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._hits: Counter[Bucket] = Counter()
        self._real: Counter[Bucket] = Counter()
        self._padded: Counter[Bucket] = Counter()

    def call(self, outcome: str, code: str | None = None, reason: str | None = None) -> None:
        """One call ended as `outcome`; a way out is logged the first time its code is seen."""
        self._outcomes[outcome] += 1
        if code is not None:
            self.fallback(outcome, code, reason)

    def fallback(self, outcome: str, code: str, reason: str | None) -> None:
        """A call, or a part of a split one, that no bucket served."""
        key = f"{outcome}:{code}"
        if not self._fallbacks[key]:
            log.warning("%s: %s call: %s (logged once, counted in stats)", self.name, outcome, reason)
        self._fallbacks[key] += 1

    def hit(self, plan: Plan) -> None:
        assert plan.bucket is not None, "only a plan with a bucket is a hit"
        self._hits[plan.bucket] += 1
        self._real[plan.bucket] += plan.real
        self._padded[plan.bucket] += plan.padded

    def snapshot(self, after_warmup: dict[str, int], buckets: Iterable[tuple[Bucket, str]]) -> Stats:
        rows = tuple(
            BucketStats(str(bucket), executable, self._hits[bucket], self._real[bucket], self._padded[bucket])
            for bucket, executable in buckets
        )
        calls = sum(self._outcomes.values())
        return Stats(self.name, calls, dict(self._outcomes), dict(self._fallbacks), rows, after_warmup)
