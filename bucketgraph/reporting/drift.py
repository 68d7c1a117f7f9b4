"""How far the traffic has moved from the trace that the buckets were planned for.

Two distances from 0 (the same) to 1 (nothing in common):

- The total variation over the set's buckets, 1/2 * sum over b of |p_b - q_b|, where p_b and q_b are the shares of the
  trace's and of the served launches whose bucket is b, or that no bucket covers. It is what the set feels, for any
  number of axes. (Levin, Peres and Wilmer, "Markov Chains and Mixing Times", proposition 4.2.)
- The Kolmogorov-Smirnov statistic, max over x of |P(x) - Q(x)|, where P and Q are the shares of launches of a size up
  to x. It sees what moves inside a bucket, too, and is for one axis only. (Smirnov, "Table for estimating the goodness
  of fit of empirical distributions", Annals of Mathematical Statistics 19, 1948.)

Samples of one distribution differ, too. `by_chance` is about what the total variation would be then: with r_b the share
of both together and n, m launches, 1/2 * sum over b of sqrt(2/pi * r_b * (1 - r_b) * (1/n + 1/m)), by the normal
approximation of each share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import numpy as np

from bucketgraph.planner.costs import Floats, linear
from bucketgraph.planner.demand import Demand
from bucketgraph.planner.figures import _assigned, measure
from bucketgraph.reporting.traffic import Ladder


@dataclass(frozen=True)
class Drift:
    """The served launches against those of a trace. Shares are of 1."""

    trace: str  # its files and columns
    requests: int  # in the trace
    total_variation: float  # over the set's buckets
    by_chance: float  # about what it would be if both were samples of the same
    kolmogorov_smirnov: float | None  # of the sizes themselves; None for two axes
    planned_waste: float  # of the set on the trace: padded over real work, less 1
    served_waste: float  # of the set on what was served, likewise


def drift(planned: Demand, served: Demand, place: Ladder, trace: str, requests: int) -> Drift:
    """How far `served` is from `planned`, for the ladder's buckets."""
    before, after = _shares(planned, place), _shares(served, place)
    both = (before * planned.launches + after * served.launches) / (planned.launches + served.launches)
    noise = np.sqrt(2 / pi * both * (1 - both) * (1 / planned.launches + 1 / served.launches))
    return Drift(
        trace,
        requests,
        float(np.abs(before - after).sum() / 2),
        min(1.0, float(noise.sum() / 2)),
        _furthest(planned, served) if planned.axes == 1 else None,
        measure(place.buckets, planned, linear()).padding,
        measure(place.buckets, served, linear()).padding,
    )


def _shares(demand: Demand, place: Ladder) -> Floats:
    """The share of launches in each bucket, and at the end of those that none covers."""
    at = _assigned(np.array(place.buckets, dtype=np.int64), demand)
    weights = np.bincount(np.where(at < 0, len(place.buckets), at), demand.counts, len(place.buckets) + 1)
    return np.asarray(weights / demand.launches)


def _furthest(one: Demand, two: Demand) -> float:
    every = np.union1d(one.lengths, two.lengths)

    def up_to(demand: Demand) -> Floats:
        until = np.concatenate([[0], np.cumsum(demand.counts)])
        return np.asarray(until[np.searchsorted(demand.lengths, every, side="right")] / demand.launches)

    return float(np.abs(up_to(one) - up_to(two)).max())
