"""What one launch of a size costs: tokens, or milliseconds from a model or a measurement, with its MiB and seconds.

Rules: a curve never falls as a size grows, so the smallest bucket that covers a request is also its cheapest; the
optimum relies on that. A measured curve is made so by isotonic regression, and says how much that moved it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketgraph.errors import ConfigError
from bucketgraph.planner.readers import Integers

Floats = NDArray[np.float64]
Function = Callable[[Integers], Floats]  # sizes [n, axes] -> values [n]
KEYS = ("ms", "mib", "seconds")


@dataclass(frozen=True)
class CostCurve:
    """Costs of buckets by their sizes `[n, axes]`. None where nothing is known."""

    name: str  # for people, such as "tokens" or "measured on NVIDIA H200"
    unit: str  # of `cost`: tokens or ms
    cost: Function  # of one launch
    mib: Function | None = None  # device memory that a bucket's capture takes
    seconds: Function | None = None  # start-up time that a bucket's warm-up and capture take
    notes: tuple[str, ...] = ()
    measured_to: tuple[int, ...] | None = None  # the largest sizes that were measured

    def reaching(self, largest: Sequence[int]) -> CostCurve:
        """The curve, with a note where a plan up to `largest` leaves what was measured.

        Raises:
            ConfigError: two axes leave it: a grid says too little about what lies beyond its corner.
        """
        if self.measured_to is None or all(size <= end for size, end in zip(largest, self.measured_to, strict=True)):
            return self
        ends, sizes = ",".join(map(str, self.measured_to)), ",".join(map(str, largest))
        if len(largest) > 1:
            raise ConfigError(
                f"{self.name}: costs end at {ends}", given=f"sizes up to {sizes}", hint="measure larger ones"
            )
        note = f"costs are measured up to {ends}; up to {sizes} they go on as between the last two sizes"
        return replace(self, notes=(*self.notes, note))


def linear() -> CostCurve:
    """Padded tokens: the product of a bucket's sizes."""
    return CostCurve("tokens", "tokens", lambda sizes: sizes.prod(axis=1).astype(np.float64))


def with_flat(curve: CostCurve, mib: float | None, seconds: float | None) -> CostCurve:
    """The curve with the same MiB or seconds for every bucket, where given. Raises ConfigError for a bad number."""
    for name, value in (("bucket-mib", mib), ("bucket-seconds", seconds)):
        if value is not None and not (isfinite(value) and value >= 0):
            raise ConfigError(f"{name} is out of range", given=value, expected="0 or more")

    def flat(value: float) -> Function:
        return lambda sizes: np.full(len(sizes), value)

    made = curve if mib is None else replace(curve, mib=flat(mib))
    return made if seconds is None else replace(made, seconds=flat(seconds))


def load_costs(path: Path, axes: int) -> CostCurve:
    """A measured curve from JSON: `{"64": {"ms": 1.2, "mib": 3.1, "seconds": 0.2}, "128": 1.9, ...}`.

    A plain number is milliseconds. Two axes have keys such as `"4,128"` and a value for every combination of their
    sizes. `"device"` and other keys that start with a letter are remarks.

    Raises:
        ConfigError: the file is no such mapping, has other axes, or holds a value that is no number of 0 or more.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name}: not a cost curve", expected='a mapping such as {"64": 1.2, "128": 1.9}')
    points = {key: value for key, value in data.items() if not key[:1].isalpha()}
    rows = {_sizes(path.name, key, axes): _row(path.name, key, value) for key, value in points.items()}
    device = data.get("device")
    return measured(rows, f"measured on {device}" if isinstance(device, str) else f"measured ({path.name})")


def measured(points: Mapping[tuple[int, ...], Mapping[str, float]], name: str) -> CostCurve:
    """A curve through measured points: sizes to `ms`, and `mib` and `seconds` if every point has them.

    Between sizes it is linear, below the smallest flat, above the largest it goes on as between the last two.

    Raises:
        ConfigError: no points, or points of two axes that are not a full grid.
    """
    if not points:
        raise ConfigError(f"{name}: no points", expected="milliseconds of at least one size")
    axes = [sorted({point[axis] for point in points}) for axis in range(len(next(iter(points))))]
    if missing := [point for point in product(*axes) if point not in points]:
        given = ",".join(map(str, missing[0]))
        raise ConfigError(f"{name}: sizes {given} are missing", expected="every combination of the axes' sizes")
    functions: dict[str, Function] = {}
    notes = []
    for key in KEYS:
        values = [points[point].get(key) for point in product(*axes)]
        if any(value is None for value in values):
            if key == "ms" or any(value is not None for value in values):
                raise ConfigError(f"{name}: {key} is not given for every size")
            continue
        raw = np.array(values, dtype=np.float64).reshape([len(axis) for axis in axes])
        smooth = rising(raw)
        moved = float(np.max(np.abs(smooth - raw) / np.maximum(raw, 1e-12)))
        if moved > 0.02 and key == "ms":
            notes.append(f"the measured times fall in places; made to rise, which moves one by {100 * moved:.0f} %")
        functions[key] = _interpolated([np.array(axis, np.float64) for axis in axes], smooth)
    ends = tuple(axis[-1] for axis in axes)
    return CostCurve(name, "ms", functions["ms"], functions.get("mib"), functions.get("seconds"), tuple(notes), ends)


def rising(values: Floats) -> Floats:
    """Values that never fall along any axis: isotonic regression (pool adjacent violators) along one axis, and for two
    the running maximum of that along each.

    Source of the method: Barlow, Bartholomew, Bremner and Brunk, "Statistical Inference under Order Restrictions",
    Wiley 1972.
    """
    if values.ndim == 1:
        return _pooled(values)
    made = np.stack([_pooled(row) for row in values])
    return np.maximum.accumulate(np.maximum.accumulate(made, axis=0), axis=1)


def _pooled(values: Floats) -> Floats:
    blocks: list[tuple[float, int]] = []  # mean, count
    for value in values.tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean, count = (mean * count + before * many) / (count + many), count + many
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def _interpolated(axes: Sequence[Floats], values: Floats) -> Function:
    """Linear along each axis (bilinear on a grid)."""

    def along(knots: Floats, sizes: Integers) -> tuple[Integers, Integers, Floats]:
        """The knots around each size, and how far between them it lies; over 1 above the last."""
        if len(knots) == 1:
            zero = np.zeros(len(sizes), np.int64)
            return zero, zero, zero.astype(np.float64)
        low = np.clip(np.searchsorted(knots, sizes, side="right") - 1, 0, len(knots) - 2)
        part = (sizes - knots[low]) / (knots[low + 1] - knots[low])
        return low, low + 1, np.maximum(part, 0.0)

    def at(sizes: Integers) -> Floats:
        low, high, part = along(axes[0], sizes[:, 0])
        if len(axes) == 1:
            return np.asarray(values[low] + (values[high] - values[low]) * part)
        left, right, across = along(axes[1], sizes[:, 1])
        one = values[low, left] + (values[low, right] - values[low, left]) * across
        two = values[high, left] + (values[high, right] - values[high, left]) * across
        return np.asarray(one + (two - one) * part)

    return at


def _sizes(name: str, key: str, axes: int) -> tuple[int, ...]:
    parts = key.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name}: a size", given=repr(key), expected="a positive whole number, or two such as 4,128")
    if len(parts) != axes:
        raise ConfigError(f"{name}: costs of other axes than the plan's", given=repr(key), expected=f"{axes} sizes")
    return tuple(int(part) for part in parts)


def _row(name: str, key: str, value: Any) -> dict[str, float]:
    row = value if isinstance(value, dict) else {"ms": value}
    if unknown := sorted(set(row) - set(KEYS)):
        raise ConfigError(f"{name}: size {key}: unknown key {unknown[0]!r}", expected=", ".join(KEYS))
    if "ms" not in row:
        raise ConfigError(f"{name}: size {key}: ms is missing")
    for what, number in row.items():
        good = isinstance(number, (int, float)) and not isinstance(number, bool) and isfinite(number) and number >= 0
        if not good or (what == "ms" and number == 0):
            raise ConfigError(f"{name}: size {key}: {what}", given=repr(number)[:40], expected="a positive number")
    return {what: float(number) for what, number in row.items()}
