"""Dispatch by cost: pad up, split down or run eagerly, whichever the measured costs say.

`nearest`, a lattice's own plan, takes the bucket of the least work. Measured costs can say otherwise: 384 rows as 256
and 128, or a larger bucket that another kernel serves faster. All is worked out once, when the buckets are priced.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bucketgraph.buckets import MAX_PLANS, Bucket, Lattice, Plan

MAX_STEPS = 1 << 20  # sizes x buckets of all tables of splits; beyond that nothing is split


@dataclass(frozen=True)
class Prices:
    """Measured costs of one launch, in any one unit, such as ms.

    A bucket without a `replay` price is not used. `eager` is the function itself at a bucket's size; what is smaller
    costs at most that. `part` is what each part of a split call costs beside its launch.
    """

    replay: Mapping[Bucket, float]
    eager: Mapping[Bucket, float] = field(default_factory=dict)
    part: float = 0.0


class Cheapest:
    """The plans of a lattice whose buckets have prices.

    What no bucket covers goes the lattice's way out. The lattice has no `max_padding`: prices say what padding costs.
    """

    def __init__(self, lattice: Lattice, prices: Prices) -> None:
        self._lattice, self._prices = lattice, prices
        axis = lattice.request_axis
        self._axis = lattice.names.index(axis) if axis is not None else None
        self._priced = [bucket for bucket in lattice.buckets if bucket in prices.replay]
        eager = prices.eager.items()
        self._eager = {
            small: min((price for large, price in eager if _holds(large, small.sizes)), default=math.inf)
            for small in lattice.buckets
        }
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._splits: dict[tuple[int, ...], list[tuple[float, int]]] = {}
        if self._axis is not None:
            others = [(0,) if i == self._axis else a.sizes for i, a in enumerate(lattice.axes)]
            along = lattice.axes[self._axis].sizes
            if along[-1] * len(along) * math.prod(map(len, others)) <= MAX_STEPS:
                for steps in itertools.product(*others):
                    self._splits[steps] = self._table(steps, along)

    def plan(self, sizes: Sequence[int]) -> Plan:
        """What to do with a request of these sizes. Raises InputError as `Lattice.plan` does."""
        wanted = tuple(sizes)
        known = self._plans.get(wanted)
        if known is None:
            known = self._plan(wanted)
            if len(self._plans) < MAX_PLANS:
                self._plans[wanted] = known
        return known

    def cost(self, plan: Plan) -> float:
        """What a plan costs; infinite where a price is missing."""
        if plan.kind == "split" and self._axis is not None:
            axis = self._axis
            pieces = (self.plan((*plan.sizes[:axis], part, *plan.sizes[axis + 1 :])) for part in plan.parts)
            return sum(self.cost(piece) + self._prices.part for piece in pieces)
        if plan.bucket is not None:
            return self._prices.replay.get(plan.bucket, math.inf)
        nearest = self._lattice.plan(plan.sizes).bucket
        return math.inf if nearest is None else self._eager[nearest]

    def _plan(self, wanted: tuple[int, ...]) -> Plan:
        nearest = self._lattice.plan(wanted)
        if nearest.kind != "replay":
            return nearest
        single = self._single(nearest)
        cost = self.cost(single)
        parts = self._parts(wanted, cost)
        if not parts:
            return single
        whole = f"bucket {single.bucket}" if single.bucket is not None else "eager"
        return replace(
            single,
            kind="split",
            bucket=None,
            padded=single.real,
            code="cheaper",
            reason=f"{'+'.join(map(str, parts))} costs less than {whole}'s {cost:.3g}",
            parts=parts,
        )

    def _single(self, nearest: Plan) -> Plan:
        """In one launch: the cheapest bucket that covers it, or eagerly if that is cheaper. Nearest wins a tie."""
        assert nearest.bucket is not None, "a covered plan has a bucket"
        prices = self._prices
        best, plan = prices.replay.get(nearest.bucket, math.inf), nearest
        for bucket in self._priced:
            if prices.replay[bucket] < best and _holds(bucket, nearest.sizes):
                padded = self._lattice.work_of(bucket.sizes)
                best, plan = prices.replay[bucket], replace(nearest, bucket=bucket, padded=padded)
        eager = self._eager[nearest.bucket]
        if eager < best:
            reason = f"eager costs {eager:.3g}, bucket {plan.bucket} {best:.3g}"
            return Plan("eager", nearest.sizes, None, nearest.real, nearest.real, "cheaper", reason)
        return plan

    def _parts(self, wanted: tuple[int, ...], cost: float) -> tuple[int, ...]:
        """Sizes along the request axis that cost less than `cost` together; none if there are none."""
        if not self._splits or self._axis is None:
            return ()
        steps = [a.sizes[bisect_left(a.sizes, w)] for a, w in zip(self._lattice.axes, wanted, strict=True)]
        steps[self._axis], left = 0, wanted[self._axis]
        table = self._splits[tuple(steps)]
        if not table[left][0] < cost:
            return ()
        parts = []
        while left:
            parts.append(table[left][1])
            left -= parts[-1]
        return tuple(parts) if len(parts) > 1 else ()

    def _table(self, steps: tuple[int, ...], along: Sequence[int]) -> list[tuple[float, int]]:
        """For each size along the request axis: the least cost in any number of parts, and the first part.

        One dynamic programme; a part is a size of the axis, or what is left. `steps` are the sizes of the other axes.
        """
        alone = [self._alone(steps, size) for size in along]  # of all sizes down to the one below it
        part, place = self._prices.part, 0
        table = [(0.0, 0)]
        for n in range(1, along[-1] + 1):
            place += n > along[place]
            best = alone[place] + part, n
            for size, price in zip(along[:place], alone, strict=False):
                best = min(best, (price + part + table[n - size][0], size))
            table.append(best)
        return table

    def _alone(self, steps: tuple[int, ...], size: int) -> float:
        nearest = self._lattice.plan(tuple(step or size for step in steps))
        return self.cost(self._single(nearest)) if nearest.kind == "replay" else math.inf


def _holds(bucket: Bucket, sizes: Sequence[int]) -> bool:
    return all(b >= size for b, size in zip(bucket.sizes, sizes, strict=True))
