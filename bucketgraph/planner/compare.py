"""A plan against a ladder on one's own trace, at the ladder's size and range, and at the ladder's waste.

Rules: both cover the same requests, those up to the ladder's largest size. The plan may use multiples of the ladder's
own step where that is finer than `align`, and the ladder's own sizes, so it is never worse for a grid that was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from bucketgraph.planner import optimum
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.demand import Candidates, Demand, candidates
from bucketgraph.planner.figures import Figures, measure
from bucketgraph.planner.ladders import PeerLadder


@dataclass(frozen=True)
class Comparison:
    """One ladder, and planned buckets for the same requests."""

    ladder: PeerLadder
    figures: Figures  # of the ladder, on the whole demand
    planned: Figures | None  # as many buckets over the same range; None where the ladder covers nothing
    as_good: int | None  # the fewest planned buckets that waste no more than the ladder


def against(ladders: Sequence[PeerLadder], demand: Demand, curve: CostCurve, align: int) -> list[Comparison]:
    """Each ladder on a demand of one axis, and what planning makes of the same number of buckets."""
    return [_one(each, demand, curve, align) for each in ladders]


def _one(peer: PeerLadder, demand: Demand, curve: CostCurve, align: int) -> Comparison:
    figures = measure([[size] for size in peer.sizes], demand, curve)
    part = demand.up_to(peer.sizes[-1])
    if not part.launches:
        return Comparison(peer, figures, None, None)
    step = gcd(*(size for size in peer.sizes if size >= 8)) or align  # the few sizes below 8 have no step in common
    points = _within(candidates(part, min(align, step), peer.sizes), peer.sizes[-1])
    count = min(len(peer.sizes), len(points))
    best = optimum.best(curve.cost(points.sizes[:, None]), points.weights, count)
    planned = measure([[int(points.sizes[end])] for end in best.ends(count)], part, curve)
    spent = figures.cost * part.launches
    enough = np.flatnonzero(best.totals <= spent * (1 + 1e-9))
    return Comparison(peer, figures, planned, int(enough[0]) + 1 if len(enough) else None)


def _within(points: Candidates, largest: int) -> Candidates:
    """No size over the ladder's largest, which covers whatever rounds up to more."""
    capped = np.minimum(points.sizes, largest)
    sizes, inverse = np.unique(capped, return_inverse=True)
    return Candidates(sizes, np.bincount(inverse, weights=points.weights, minlength=len(sizes)).astype(np.int64))
