"""The sizes of calls as the planner takes them: what a set's buckets can serve, in the planner's own terms.

Rules: the planned axes are the work axes, and the axis that calls are split along comes last, since the planner cuts
the last one; what is over the largest bucket runs otherwise today, and stays out (or in pieces, where calls are split).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from math import gcd

import numpy as np

from bucketgraph.planner import demand as demands
from bucketgraph.planner import traces
from bucketgraph.planner.command import _ROWS
from bucketgraph.planner.demand import Demand
from bucketgraph.planner.traces import Trace
from bucketgraph.stats import Stats

_ALIGN = 16  # sizes of tokens are multiples of this, or of what all present ones are multiples of


@dataclass(frozen=True)
class Ladder:
    """The work axes of a set's buckets."""

    axes: tuple[str, ...]  # the axis that calls are split along is the last one
    buckets: tuple[tuple[int, ...], ...]  # [k][axes], each once, ascending
    over: demands.Over  # what calls over the largest bucket do
    align: tuple[int, ...]  # of each axis: what proposed sizes are multiples of

    @property
    def largest(self) -> tuple[int, ...]:
        return tuple(max(sizes) for sizes in zip(*self.buckets, strict=True))

    @property
    def whole(self) -> bool:
        """Whether one bucket covers what any other does."""
        return self.largest in self.buckets


def ladder(phase: str, stats: Stats) -> Ladder:
    """The ladder of the buckets in `stats`. `phase` is prefill or decode, "" for a set without phases."""
    cut = stats.request_axis if stats.overflow == "split" else None
    axes = tuple(sorted(stats.work, key=lambda axis: (axis == cut, stats.work.index(axis))))
    buckets = tuple(sorted({tuple(row.sizes[axis] for axis in axes) for row in stats.buckets}))
    # An LLM cuts prompts before they are calls: a trace of prompts is cut, though no set splits calls along tokens.
    pieces = cut == axes[-1] or phase == "prefill"
    align = tuple(_align(axis, [sizes[place] for sizes in buckets]) for place, axis in enumerate(axes))
    return Ladder(axes, buckets, "pieces" if pieces else "eager", align)


def counted(stats: Stats, place: Ladder) -> Trace | None:
    """The calls that came, as a trace whose columns are the ladder's axes; None if there were none."""
    if not any(stats.sizes.values()):
        return None
    order = [stats.work.index(axis) for axis in place.axes]
    sizes = np.array(list(stats.sizes), dtype=np.int64)[:, order]
    return traces.made(sizes, np.array(list(stats.sizes.values()), dtype=np.int64), place.axes, (stats.name,))


def launches(trace: Trace, place: Ladder) -> Demand:
    """All that a trace launches, whether a bucket covers it or not."""
    return demands.limited(trace, place.largest[-1], "pieces") if place.over == "pieces" else demands.of(trace)


def covered(trace: Trace, place: Ladder) -> Demand | None:
    """What of a trace the largest bucket covers, with that bucket's sizes among it; None if it covers nothing."""
    fits = (trace.sizes[:, :-1] <= np.array(place.largest[:-1], dtype=np.int64)).all(axis=1)
    if place.over == "eager":
        fits &= trace.sizes[:, -1] <= place.largest[-1]
    if not fits.any():
        return None
    counts = None if trace.counts is None else trace.counts[fits]
    demand = demands.limited(replace(trace, sizes=trace.sizes[fits], counts=counts), place.largest[-1], place.over)
    left = int((~fits).sum() if trace.counts is None else trace.counts[~fits].sum())
    if tuple(demand.sizes[-1].tolist()) == place.largest:
        return replace(demand, left_out=left)
    sizes = np.concatenate([demand.sizes, np.array([place.largest], dtype=np.int64)])
    return replace(demand, sizes=sizes, counts=np.append(demand.counts, 0), left_out=left)


def _align(axis: str, sizes: list[int]) -> int:
    return 1 if axis in _ROWS else reduce(gcd, sizes, _ALIGN)
