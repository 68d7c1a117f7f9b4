"""Sizes, buckets and the choice between them: pure integers, no tensors.

A `Lattice` is total: every request gets a `Plan`, which is a bucket or a stated way out with its reason. The exact fit
is never over-padded, the cheapest covering bucket wins, and the lookup is a table, not a search.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from bucketgraph.errors import ConfigError, InputError

MAX_BUCKETS = 4096  # a table this large has long stopped being a bucket set
MAX_GRID = 1 << 16  # combinations of sizes behind an explicit list of buckets
MAX_SIZE = (1 << 31) - 1
MAX_PLANS = 1 << 14  # remembered; further sizes are planned anew each time
DENSE_LIMIT = 1 << 20  # axes up to this size are looked up by index, longer ones by bisection

PlanKind = Literal["replay", "eager", "split", "refuse"]
Overflow = Literal["eager", "split", "error"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A named dimension and the sizes it is padded to, ascending."""

    name: str
    sizes: tuple[int, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One size for each axis: a point of the lattice."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __getitem__(self, axis: str) -> int:
        return self.sizes[self.axes.index(axis)]

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    def as_dict(self) -> dict[str, int]:
        return dict(zip(self.axes, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision for one call, made from sizes alone."""

    kind: PlanKind
    sizes: tuple[int, ...]  # the request, in the order of the lattice's axes
    bucket: Bucket | None = None  # set when kind is replay
    real: int = 0  # product of the work axes as requested
    padded: int = 0  # the same product in the bucket
    code: str | None = None  # short stable name of a way out: over_largest, no_cover, over_padding
    reason: str | None = None  # the same for people, with the numbers
    parts: tuple[int, ...] = ()  # kind split: the sizes along the request axis


def ladder(start: int, to: int, growth: float = 2.0, multiple_of: int = 1) -> tuple[int, ...]:
    """Sizes from `start` to exactly `to`, each `growth` times the last, rounded up to `multiple_of`.

    The last size is always `to`, so the configured maximum is a bucket. Integers throughout: no float logarithms.

    Raises:
        ConfigError: start or to below 1, start above to, growth not above 1, or an end that is no multiple.
    """
    if multiple_of < 1:
        raise ConfigError("multiple_of is too small", given=multiple_of, expected="at least 1")
    if start < 1 or to < start:
        raise ConfigError("a ladder needs 1 <= from <= to", given=f"from {start}, to {to}")
    if to > MAX_SIZE:
        raise ConfigError("`to` is absurdly large", given=to, expected=f"at most {MAX_SIZE}")
    if not 1.0 < growth <= 1e6:
        raise ConfigError("growth is out of range", given=growth, expected="above 1")
    for key, value in (("from", start), ("to", to)):
        if value % multiple_of:
            below, above = value // multiple_of * multiple_of, -(-value // multiple_of) * multiple_of
            near = f"{below} or {above}" if below else str(above)
            raise ConfigError(f"`{key}` is not a multiple of {multiple_of}", given=value, hint=f"use {near}")
    sizes = [start]
    while sizes[-1] < to:
        if len(sizes) > MAX_BUCKETS:
            raise ConfigError("the ladder has too many sizes", expected=f"at most {MAX_BUCKETS}", hint="raise growth")
        grown = max(sizes[-1] + 1, int(sizes[-1] * growth))
        sizes.append(min(to, -(-grown // multiple_of) * multiple_of))
    return tuple(sizes)


def check_sizes(name: str, sizes: Sequence[object]) -> tuple[int, ...]:
    """`sizes` as an axis: whole numbers, positive, ascending, each once. Raises ConfigError otherwise."""
    if not sizes:
        raise ConfigError(f"axis {name}: no sizes", hint="list at least one")
    good: list[int] = []
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigError(f"axis {name}: a size must be a whole number", given=f"{size!r}")
        if size < 1:
            raise ConfigError(f"axis {name}: a size must be positive", given=size)
        if size > MAX_SIZE:
            raise ConfigError(f"axis {name}: a size is absurdly large", given=size, expected=f"at most {MAX_SIZE}")
        if good and size == good[-1]:
            raise ConfigError(f"axis {name}: {size} is listed twice")
        if good and size < good[-1]:
            raise ConfigError(f"axis {name}: sizes must ascend", given=f"{size} after {good[-1]}")
        good.append(size)
    return tuple(good)


class Lattice:
    """All buckets of a set and the total map from request sizes to a `Plan`.

    Args:
        axes: each axis and its sizes.
        points: the buckets, one size per axis; None means every combination of the axes' sizes.
        work: axes whose product measures work and padding; None means all.
        overflow: what happens to a request that no bucket covers.
        request_axis: the axis along which a call can be split; None if there is none.
        max_padding: above this ratio of padded to real work a request runs eagerly.
        cost: what makes a covering bucket the cheapest; None means its work, then its volume.

    Raises:
        ConfigError: unknown axes, too many buckets, or buckets that no request can reach.
    """

    def __init__(
        self,
        axes: Mapping[str, Sequence[int]],
        *,
        points: Iterable[Sequence[int]] | None = None,
        work: Sequence[str] | None = None,
        overflow: Overflow = "eager",
        request_axis: str | None = None,
        max_padding: float | None = None,
        cost: Callable[[Bucket], float] | None = None,
    ) -> None:
        if not axes:
            raise ConfigError("a bucket set needs at least one axis")
        self.axes = tuple(Axis(name, check_sizes(name, sizes)) for name, sizes in axes.items())
        self.names = tuple(axis.name for axis in self.axes)
        for key, used in (("work", work), ("request_axis", None if request_axis is None else [request_axis])):
            if used is not None and (not used or len(set(used)) < len(used) or not set(used) <= set(self.names)):
                names = ", ".join(self.names)
                raise ConfigError(f"{key} names declared axes, each once", given=list(used), expected=f"of {names}")
        self.overflow = overflow
        self.request_axis = request_axis
        self.max_padding = max_padding
        self._work = tuple(i for i, name in enumerate(self.names) if work is None or name in work)
        self.buckets = self._points(points)
        cheapest: Callable[[Bucket], tuple[float, ...]] = (
            (lambda b: (cost(b), prod(b.sizes))) if cost else (lambda b: (self.work_of(b.sizes), prod(b.sizes)))
        )
        self._cover = _cheapest_covers(self.axes, self.buckets, cheapest)
        self._steps = [_dense(axis) for axis in self.axes]
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._refuse_unreachable()

    def plan(self, sizes: Sequence[int]) -> Plan:
        """What to do with a request of these sizes, in the order of `names`. Raises InputError for sizes below 1."""
        wanted = tuple(sizes)
        known = self._plans.get(wanted)
        if known is None:
            known = self._plan(wanted)
            if len(self._plans) < MAX_PLANS:
                self._plans[wanted] = known
        return known

    def _plan(self, wanted: tuple[int, ...]) -> Plan:
        if len(wanted) != len(self.axes):
            raise InputError("a plan needs one size for each axis", given=wanted, expected=", ".join(self.names))
        for name, size in zip(self.names, wanted, strict=True):
            if size < 1:
                raise InputError(f"{name} is empty", given=size, expected="at least 1")
        real = self.work_of(wanted)
        bucket = self._covering(wanted)
        if bucket is None:
            return self._way_out(wanted, real)
        padded = self.work_of(bucket.sizes)
        if self.max_padding is not None and padded > self.max_padding * real:
            reason = f"bucket {bucket} pads {padded / real:.2f} times, over max_padding {self.max_padding:g}"
            return Plan("eager", wanted, None, real, real, "over_padding", reason)
        return Plan("replay", wanted, bucket, real, padded)

    def _covering(self, wanted: Sequence[int]) -> Bucket | None:
        """The cheapest bucket that holds these sizes."""
        point = []
        for steps, axis, size in zip(self._steps, self.axes, wanted, strict=True):
            if size > axis.largest:
                return None
            point.append(_index(steps, axis, size))
        return self._cover[tuple(point)]

    def _way_out(self, wanted: tuple[int, ...], real: int) -> Plan:
        over = [(axis, size) for axis, size in zip(self.axes, wanted, strict=True) if size > axis.largest]
        if over:  # name last the axis that a split could mend
            axis, size = min(over, key=lambda item: item[0].name == self.request_axis)
            code, reason = "over_largest", f"{axis.name} {size} is over the largest bucket's {axis.largest}"
        else:
            code, reason = "no_cover", f"no bucket covers {self._text(wanted)}"
        parts = self._split(wanted) if self.overflow == "split" else ()
        # What cannot be split is refused, not quietly run another way: the set asked for split, not for eager.
        kind: PlanKind = "split" if parts else "eager" if self.overflow == "eager" else "refuse"
        return Plan(kind, wanted, None, real, real, code, reason, parts)

    def _split(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes along the request axis, as large as buckets for the other axes allow; empty if there are none."""
        if self.request_axis is None:
            return ()
        at = self.names.index(self.request_axis)
        for size in reversed(self.axes[at].sizes):
            if size < wanted[at] and self._covering((*wanted[:at], size, *wanted[at + 1 :])) is not None:
                whole, rest = divmod(wanted[at], size)
                return (size,) * whole + ((rest,) if rest else ())
        return ()

    def _points(self, points: Iterable[Sequence[int]] | None) -> tuple[Bucket, ...]:
        grid = prod(len(axis.sizes) for axis in self.axes)
        if grid > (MAX_BUCKETS if points is None else MAX_GRID):
            raise ConfigError("too many buckets", given=grid, expected=f"at most {MAX_BUCKETS}", hint="shorten an axis")
        if points is None:
            return tuple(Bucket(self.names, p) for p in itertools.product(*(axis.sizes for axis in self.axes)))
        chosen: dict[tuple[int, ...], Bucket] = {}
        for raw in points:
            point = tuple(raw)
            if len(point) != len(self.axes):
                raise ConfigError("buckets: one size for each axis", given=list(point), expected=", ".join(self.names))
            for axis, size in zip(self.axes, point, strict=True):
                if size not in axis.sizes:
                    raise ConfigError(
                        f"bucket {list(point)}: {size} is not a size of axis {axis.name}", expected=list(axis.sizes)
                    )
            if point in chosen:
                raise ConfigError(f"bucket {list(point)} is listed twice")
            chosen[point] = Bucket(self.names, point)
            if len(chosen) > MAX_BUCKETS:
                raise ConfigError("too many buckets", expected=f"at most {MAX_BUCKETS}", hint="shorten the list")
        if not chosen:
            raise ConfigError("buckets: the list is empty")
        for position, axis in enumerate(self.axes):
            unused = sorted(set(axis.sizes) - {point[position] for point in chosen})
            if unused:
                raise ConfigError(f"axis {axis.name}: no bucket uses size {unused[0]}", hint="drop it or add a bucket")
        return tuple(chosen.values())

    def _refuse_unreachable(self) -> None:
        """Each bucket must be what its own exact size gets; anything else would be captured and never replayed."""
        for bucket in self.buckets:
            plan = self.plan(bucket.sizes)
            if plan.bucket != bucket:
                why = plan.reason or f"{plan.bucket} covers the same requests at no more cost"
                raise ConfigError(f"bucket {bucket} can be reached by no request: {why}")

    def work_of(self, sizes: Sequence[int]) -> int:
        """The product of the work axes."""
        return prod(sizes[i] for i in self._work)

    def _text(self, sizes: Sequence[int]) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(self.names, sizes, strict=True))


def _cheapest_covers(
    axes: Sequence[Axis], buckets: Iterable[Bucket], cost: Callable[[Bucket], tuple[float, ...]]
) -> dict[tuple[int, ...], Bucket | None]:
    """For each grid point the cheapest bucket at or above it, from the far corner inwards.

    What covers a point is the bucket on it, or covers a neighbour one step up: one comparison per axis and point.
    """
    at = {tuple(axis.sizes.index(s) for axis, s in zip(axes, b.sizes, strict=True)): b for b in buckets}
    cover: dict[tuple[int, ...], Bucket | None] = {}
    for point in itertools.product(*(range(len(axis.sizes) - 1, -1, -1) for axis in axes)):
        candidates = [at[point]] if point in at else []
        for i in range(len(axes)):
            above = cover.get((*point[:i], point[i] + 1, *point[i + 1 :]))
            if above is not None:
                candidates.append(above)
        cover[point] = min(candidates, key=cost, default=None)  # the point's own bucket wins a tie
    return cover


def _dense(axis: Axis) -> list[int] | None:
    if axis.largest > DENSE_LIMIT:
        return None
    table: list[int] = [0]
    for index, size in enumerate(axis.sizes):
        table.extend([index] * (size + 1 - len(table)))
    return table


def _index(steps: list[int] | None, axis: Axis, size: int) -> int:
    return steps[size] if steps is not None else bisect_left(axis.sizes, size)
