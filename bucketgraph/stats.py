"""What happened to calls, counted: every call has exactly one outcome, so the outcomes add up to the calls.

Rules: a call's sizes are counted as they were asked for, whatever became of it; memory is bounded (`MAX_SIZES`).
Files of statistics are `saved.py`'s.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from bucketgraph.buckets import MAX_SIZE, Bucket, Plan
from bucketgraph.config import PhaseSpec
from bucketgraph.errors import ConfigError

if TYPE_CHECKING:
    from bucketgraph.manager import Captured

log = logging.getLogger("bucketgraph")

MAX_SIZES = 1 << 16  # distinct sizes that a manager counts one by one: some 10 MiB; later ones are counted as `other`

Count = Annotated[int, Field(ge=0, strict=True)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class BucketStats:
    """One bucket's share. `real` and `padded` are products of the set's work axes, summed over hits."""

    bucket: str
    executable: str  # what its calls run on; none if it was not captured yet
    hits: Count
    real: Count
    padded: Count
    sizes: dict[str, Size] = field(default_factory=dict)  # by axis
    seconds: Amount = 0.0  # of its warm-up, capture and check
    mib: Amount = 0.0  # device memory that its capture took; 0 without a GPU
    variant: str | None = None  # which of the functions that may serve it does
    variants: dict[str, Amount | str] = field(default_factory=dict)  # ms of a replay of each, or how it failed
    error: str | None = None  # why it is not used
    replay_ms: Amount | None = None  # of one replay, as warm-up measured it; None if it failed or was not captured

    @property
    def padding(self) -> float:
        """Padded work over real work, 1.0 for none."""
        return self.padded / self.real if self.real else 1.0


@dataclass(frozen=True)
class Stats:
    """A snapshot of a manager's counters."""

    name: str
    calls: Count
    outcomes: dict[str, Count]  # replayed, split, eager, refused, raised, looped: they add up to calls
    fallbacks: dict[str, Count]  # outcome:code, such as eager:over_largest; parts of split calls count, too
    buckets: tuple[BucketStats, ...] = field(default=())
    after_warmup: dict[str, int] = field(default_factory=dict)  # of the whole process: compiles, memory segments
    reasons: dict[str, str] = field(default_factory=dict)  # of each fallback, as first seen
    axes: tuple[str, ...] = ()
    work: tuple[str, ...] = ()  # axes whose product is work
    overflow: str = "eager"
    request_axis: str | None = None  # along which a call can be split
    sizes: dict[tuple[Size, ...], Count] = field(default_factory=dict)  # of the work axes, as asked for: calls of each
    other_sizes: Count = 0  # calls of sizes that came after the first `MAX_SIZES` distinct ones

    @property
    def padding(self) -> float:
        """Padded over real work of all replays."""
        real = sum(bucket.real for bucket in self.buckets)
        return sum(bucket.padded for bucket in self.buckets) / real if real else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `sizes` is as `bucketgraph plan` reads it: `{"batch,tokens": {"4,128": 17}}`."""
        rows = {",".join(map(str, sizes)): count for sizes, count in sorted(self.sizes.items())}
        sizes = {",".join(self.work): rows} if self.work else {}
        return {**asdict(replace(self, sizes={})), "sizes": sizes, "padding": self.padding}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, without the set they belong to. Raises OSError."""
        from bucketgraph.saved import Saved

        Saved(self.name, {"": self}).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Stats:
        """Read what `save`, or a manager's `save_stats`, wrote.

        Raises:
            ConfigError: the file is something else, or an LLM's, which has two phases.
        """
        from bucketgraph.saved import Saved

        phases = Saved.load(path).phases
        if "" not in phases:
            given = ", ".join(phases)
            raise ConfigError(f"{os.path.basename(path)}: has several phases", given=given, hint="use Saved.load")
        return phases[""]


class Recorder:
    """Counts outcomes. Not locked: the manager records under its family's lock."""

    def __init__(self, name: str, spec: PhaseSpec) -> None:
        self.name = name
        self._spec = spec
        self._outcomes: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        # By the bucket's sizes, which are hashed faster than buckets: hits, real and padded work.
        self._hits: defaultdict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
        self._sizes: dict[tuple[int, ...], int] = {}
        self._other = 0

    def asked(self, sizes: tuple[int, ...], calls: int = 1) -> None:
        """A call came with these sizes: once for each call that `call` is told the end of."""
        try:
            self._sizes[sizes] += calls
        except KeyError:
            if len(self._sizes) < MAX_SIZES:
                self._sizes[sizes] = calls
            else:
                self._other += calls

    def looped(self, bucket: Bucket, steps: Mapping[int, int]) -> None:
        """A run of a device loop: steps by how many rows they had, each of which would have been a call."""
        for rows, count in steps.items():
            self.asked((rows,), count)
            self._outcomes["looped"] += count
            row = self._hits[bucket.sizes]
            row[0] += count
            row[1] += count * rows
            row[2] += count * prod(bucket.sizes)

    def call(self, outcome: str, code: str | None = None, reason: str | None = None) -> None:
        """One call ended as `outcome`; a way out is logged the first time its code is seen."""
        self._outcomes[outcome] += 1
        if code is not None:
            self.fallback(outcome, code, reason)

    def fallback(self, outcome: str, code: str, reason: str | None) -> None:
        """A call, or a part of a split one, that no bucket served."""
        key = f"{outcome}:{code}"
        if not self._fallbacks[key]:
            self._reasons[key] = reason or code
            log.warning("%s: %s call: %s (logged once, counted in stats)", self.name, outcome, reason)
        self._fallbacks[key] += 1

    def hit(self, plan: Plan) -> None:
        assert plan.bucket is not None, "only a plan with a bucket is a hit"
        row = self._hits[plan.bucket.sizes]
        row[0] += 1
        row[1] += plan.real
        row[2] += plan.padded

    def snapshot(self, after_warmup: dict[str, int], buckets: Iterable[tuple[Bucket, Captured | None]]) -> Stats:
        """The counters so far, with what warm-up found out about each bucket of the set."""
        axes, work = tuple(self._spec.axes), self._spec.work or tuple(self._spec.axes)
        at = [axes.index(axis) for axis in axes if axis in work]
        sizes = self._sizes.copy()
        if len(at) < len(axes):
            sizes = Counter()
            for asked, count in self._sizes.items():
                sizes[tuple(asked[i] for i in at)] += count
        return Stats(
            self.name,
            sum(self._outcomes.values()),
            dict(self._outcomes),
            dict(self._fallbacks),
            tuple(self._row(bucket, captured) for bucket, captured in buckets),
            after_warmup,
            dict(self._reasons),
            axes,
            tuple(axes[i] for i in at),
            self._spec.overflow,
            self._spec.request_axis,
            dict(sizes),
            self._other,
        )

    def _row(self, bucket: Bucket, captured: Captured | None) -> BucketStats:
        hits, real, padded = self._hits[bucket.sizes]
        if captured is None:
            return BucketStats(str(bucket), "none", hits, real, padded, bucket.as_dict())
        return BucketStats(
            str(bucket),
            captured.serves,
            hits,
            real,
            padded,
            bucket.as_dict(),
            captured.seconds,
            captured.mib,
            captured.variant,
            dict(captured.tried),
            captured.error,
            captured.replay_ms,
        )
