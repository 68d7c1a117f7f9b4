"""What a set of buckets does to a demand: padding, cost, MiB and seconds, and what it leaves uncovered.

Rules: a request goes to the bucket that `Lattice` gives it (the least work that covers it), so these are the figures
of the set as it will run, not of the optimum's own bookkeeping; what no bucket covers runs eagerly, unpadded, and is
counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bucketgraph.buckets import Lattice
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.demand import Demand, tokens
from bucketgraph.planner.readers import Integers


@dataclass(frozen=True)
class Figures:
    """Sums over the launches that a bucket covers, where nothing else is said."""

    buckets: int
    covered: float  # share of launches that have a bucket
    covered_work: float  # share of real tokens that have one
    padding: float  # padded tokens over real ones, less 1
    waste: float  # cost in buckets over cost at exact sizes, less 1; equal to padding where cost is linear
    cost: float  # per launch, in the curve's unit
    mib: float | None  # of all buckets; None where unknown
    seconds: float | None


def measure(buckets: Sequence[Sequence[int]], demand: Demand, curve: CostCurve) -> Figures:
    """The figures of buckets `[k][axes]`, in any order."""
    points = np.array(sorted(tuple(bucket) for bucket in buckets), dtype=np.int64)
    at = _assigned(points, demand)
    found = at >= 0
    sizes, counts, given = demand.sizes[found], demand.counts[found], points[at[found]]
    launches, work = int(counts.sum()), tokens(sizes, counts)
    costs = curve.cost(points)
    spent = float(costs[at[found]] @ counts) if launches else 0.0
    exact = float(curve.cost(sizes) @ counts) if launches else 0.0
    return Figures(
        buckets=len(points),
        covered=launches / (demand.launches + demand.left_out),
        covered_work=work / (demand.work + demand.left_out_work),
        padding=tokens(given, counts) / work - 1.0 if work else 0.0,
        waste=spent / exact - 1.0 if exact else 0.0,
        cost=spent / launches if launches else 0.0,
        mib=float(curve.mib(points).sum()) if curve.mib else None,
        seconds=float(curve.seconds(points).sum()) if curve.seconds else None,
    )


def _assigned(points: Integers, demand: Demand) -> Integers:
    """For each size of the demand the row of its bucket in `points`, -1 where none covers it."""
    if demand.axes == 1:
        at = np.searchsorted(points[:, 0], demand.lengths)
        return np.where(at < len(points), at, -1)
    names = tuple(f"axis{number}" for number in range(demand.axes))
    axes = [np.unique(column) for column in points.T]
    lattice = Lattice({name: sizes.tolist() for name, sizes in zip(names, axes, strict=True)}, points=points.tolist())
    rows = {tuple(point): row for row, point in enumerate(points.tolist())}
    # Sizes that round up to the same sizes of the axes have the same bucket: one row for each such cell, and for what
    # no size of an axis covers.
    table = np.full([len(sizes) + 1 for sizes in axes], -1, np.int64)
    for cell in np.ndindex(*(len(sizes) for sizes in axes)):
        bucket = lattice.plan([int(sizes[i]) for sizes, i in zip(axes, cell, strict=True)]).bucket
        table[cell] = -1 if bucket is None else rows[bucket.sizes]
    up = [np.searchsorted(sizes, column) for sizes, column in zip(axes, demand.sizes.T, strict=True)]
    found: Integers = table[tuple(up)]
    return found
