"""What is asked for: distinct sizes and how often each comes, and the sizes that could be its buckets.

Rules: a best bucket is always the smallest permitted size of some request, since any larger one pads for nothing; so
only those are candidates, and an optimum over them is an optimum over all permitted sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bucketgraph.errors import ConfigError
from bucketgraph.planner.readers import Integers
from bucketgraph.planner.traces import Trace

MAX_CANDIDATES = 1 << 13  # distinct sizes that one optimum looks at: 131,072 tokens in steps of 16
Over = Literal["pieces", "eager", "truncate"]


@dataclass(frozen=True)
class Demand:
    """Distinct sizes of launches, ascending, and how often each was asked for."""

    sizes: Integers  # [n, axes], in lexicographic order
    counts: Integers  # [n]; 0 for a size that must have a bucket though no request has it
    left_out: int = 0  # requests over `largest` that run eagerly and are not planned for
    left_out_work: int = 0  # the product of their sizes, summed

    @property
    def axes(self) -> int:
        return int(self.sizes.shape[1])

    @property
    def lengths(self) -> Integers:
        """The sizes `[n]` of a demand of one axis."""
        assert self.axes == 1, "a demand of several axes has no plain lengths"
        return self.sizes[:, 0]

    @property
    def launches(self) -> int:
        return int(self.counts.sum())

    @property
    def work(self) -> int:
        """Real tokens: the product of the sizes, summed over launches."""
        return tokens(self.sizes, self.counts)

    def up_to(self, largest: int) -> Demand:
        """The part with lengths up to `largest`."""
        keep = self.lengths <= largest
        return Demand(self.sizes[keep], self.counts[keep])


def of(trace: Trace) -> Demand:
    """The demand of a trace that launches one request at a time."""
    return _counted(trace.sizes, trace.counts)


def limited(trace: Trace, largest: int | None, over: Over) -> Demand:
    """The demand when no length over `largest` has a bucket, and `largest` has one, whoever asks for it.

    Args:
        over: longer requests run in `pieces` of `largest` and a rest, as `LLM` prefills them; run `eager`, unpadded and
            not planned for; or are cut off (`truncate`), as a model with a maximum length does.

    Raises:
        ConfigError: largest is below 1, or no request is left.
    """
    demand = of(trace)
    if largest is None:
        return demand
    if largest < 1:
        raise ConfigError("largest is out of range", given=largest, expected="at least 1")
    lengths, counts = demand.sizes[:, -1], demand.counts
    long = lengths > largest
    left, left_work = 0, 0
    if over == "truncate":
        demand = _counted(np.column_stack([demand.sizes[:, :-1], np.minimum(lengths, largest)]), counts)
    elif over == "pieces":
        whole, rest = lengths // largest, lengths % largest
        parts = [
            (np.full_like(lengths, largest), counts * whole * long),
            (rest, counts * long),
            (lengths, counts * ~long),
        ]
        stacked = [np.column_stack([demand.sizes[:, :-1], part]) for part, _ in parts]
        demand = _counted(np.concatenate(stacked), np.concatenate([weights for _, weights in parts]))
    else:
        left, left_work = int(counts[long].sum()), tokens(demand.sizes[long], counts[long])
        demand = Demand(demand.sizes[~long], counts[~long])
        if not len(demand.sizes):
            raise ConfigError("no request is left to plan for", given=f"all {left} are over {largest}")
    top = demand.sizes.max(axis=0)
    if top[-1] < largest:  # the configured maximum is always a bucket
        top[-1] = largest
        demand = Demand(np.concatenate([demand.sizes, top[None]]), np.append(demand.counts, 0))
    return replace(demand, left_out=left, left_out_work=left_work)


@dataclass(frozen=True)
class Candidates:
    """Sizes that could be buckets, and how many launches each is the smallest permitted size for."""

    sizes: Integers  # [m] ascending; the last covers every launch
    weights: Integers  # [m] launches

    def __len__(self) -> int:
        return len(self.sizes)


def candidates(demand: Demand, align: int, also: Sequence[int] = ()) -> Candidates:
    """What may be a bucket of one axis: the multiples of `align`, and the sizes in `also`.

    Raises:
        ConfigError: align is below 1.
    """
    permitted = aligned(demand.lengths, align)
    if len(also):
        others = np.sort(np.asarray(also, dtype=np.int64))
        at = np.searchsorted(others, demand.lengths)
        above = np.append(others, np.iinfo(np.int64).max)[at]
        permitted = np.minimum(permitted, above)
    sizes, inverse = np.unique(permitted, return_inverse=True)
    return Candidates(sizes, np.bincount(inverse, weights=demand.counts, minlength=len(sizes)).astype(np.int64))


def coarse_enough(sizes: Integers, align: int) -> int:
    """`align`, doubled as often as needed to leave at most `MAX_CANDIDATES` of `sizes [n]`."""
    while len(np.unique(aligned(sizes, align))) > MAX_CANDIDATES:
        align *= 2
    return align


def tokens(sizes: Integers, counts: Integers) -> int:
    """The product of `sizes [n, axes]`, summed over `counts [n]`; in float64, since such sums can leave int64."""
    return int(sizes.prod(axis=1).astype(np.float64) @ counts.astype(np.float64))


def aligned(sizes: Integers, align: int) -> Integers:
    """`sizes`, each rounded up to a multiple of `align`. Raises ConfigError for an align below 1."""
    if align < 1:
        raise ConfigError("align is out of range", given=align, expected="at least 1")
    rounded: Integers = -(-sizes // align) * align
    return rounded


def _counted(sizes: Integers, counts: Integers | None) -> Demand:
    """Distinct rows of `sizes [rows, axes]` with their counts; rows of size 0 or count 0 are left out."""
    weights = np.ones(len(sizes), np.int64) if counts is None else counts
    real = (sizes > 0).all(axis=1) & (weights > 0)
    sizes, weights = sizes[real], weights[real]
    width = int(sizes[:, -1].max()) + 1
    key = sizes[:, -1] if sizes.shape[1] == 1 else sizes[:, 0] * width + sizes[:, 1]  # at most 10^7 squared
    values, inverse = np.unique(key, return_inverse=True)
    total: NDArray[np.int64] = np.zeros(len(values), np.int64)
    np.add.at(total, inverse, weights)
    rows = values[:, None] if sizes.shape[1] == 1 else np.column_stack([values // width, values % width])
    return Demand(rows, total)
