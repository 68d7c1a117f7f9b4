"""Whether the real part of a padded tensor is what the unpadded run gave.

The real part of an intermediate is found by its sizes: a dimension k times the unpadded size, and k times the padded
one, is taken as `[k1, axis, k2]` flattened, for the k1 that makes the difference smallest.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from bucketgraph import selfcheck

_COARSE = 0.3  # of dtypes that the self-check does not list


def real_difference(got: Tensor, want: Tensor, real: int, padded: int) -> float | None:
    """Of the real part, by the reading of its sizes that differs least; None where no reading fits."""
    if got.dim() != want.dim():
        return None
    choices: list[list[Tensor | None]] = []
    for held, size in zip(got.shape, want.shape, strict=True):
        if held == size:
            choices.append([None])
            continue
        times, rest = divmod(size, real)
        if rest or held != times * padded or times == 0:
            return None
        choices.append([_kept(outer, times // outer, real, padded) for outer in _divisors(times)])
    errors = []
    for picks in product(*choices):
        part = got
        for dim, pick in enumerate(picks):
            if pick is not None:
                part = part.index_select(dim, pick.to(part.device))
        errors.append(difference(part, want))
        if errors[-1] <= tolerance(want):
            break
    return min(errors)


def _kept(outer: int, inner: int, real: int, padded: int) -> Tensor:
    """Places of the real part in a dimension that is `[outer, axis, inner]`, flattened."""
    return torch.arange(outer * padded * inner).view(outer, padded, inner)[:, :real].reshape(-1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def difference(got: Tensor, want: Tensor) -> float:
    """Largest difference over largest magnitude; infinite for other shapes, new NaN, or whole numbers that differ."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0 or selfcheck.same_bits(got, want):
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(got, want) else float("inf")
    wide = torch.complex128 if want.is_complex() else torch.float64
    got, want = got.to(wide), want.to(wide)
    same = (got == want) | (got.isnan() & want.isnan())
    if bool(same.all()):
        return 0.0
    scale = float(want.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-30))
    error = float((got - want)[~same].abs().max()) / scale
    return error if error == error else float("inf")


def tolerance(tensor: Tensor) -> float:
    """What rounding may make of a result, as in the self-check of buckets."""
    return selfcheck.TOLERANCE.get(tensor.dtype, _COARSE) if tensor.is_floating_point() else 1e-4
