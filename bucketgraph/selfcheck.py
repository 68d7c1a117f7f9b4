"""What warm-up holds every bucket to: padded replay gives what the unpadded function gives, whatever was there before.

Two halves of the padding contract. `fill` must reset every byte: all static memory is poisoned first (0xFF: NaN, -1,
huge ids), and each slot is then compared byte for byte with what its rule says. The function must not read its padding:
slots declared `inert` get other legal values there, and the result must not change by a bit. Bytes between slots are
canaries.

Rounding is no fault, but behind an unlucky input a last bit can turn a whole row. So where rows differ too much, other
inputs of the same sizes are drawn, up to twice, and what counts is the middle one of a row's differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bucketgraph.buckets import Bucket
from bucketgraph.errors import CaptureError
from bucketgraph.slots import Slot, unpad

if TYPE_CHECKING:
    from bucketgraph.executables import Executable
    from bucketgraph.manager import BucketManager, Captured

# Relative to the largest magnitude of the reference: a sum over a padded row may be grouped differently.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_COARSE = 0.3  # eight-bit floats
_POISON = 0xFF  # NaN in every float dtype, -1 in signed integers
_DRAWS = 3


def check(manager: BucketManager, captured: Captured) -> float:
    """Largest relative error against the unpadded function.

    Raises:
        CaptureError: the bucket breaks the contract; the text says which half, and where.
    """
    level = "full" if manager.policy.self_check == "full" else "quick"
    return max(_check_sizes(manager, captured, sizes, level) for sizes in _sizes(manager, captured.bucket, level))


def inner_sizes(manager: BucketManager, bucket: Bucket) -> dict[str, int]:
    """Sizes halfway down to the next smaller size of each axis, so that every axis with room has a padded tail."""
    inner = {}
    for axis, size in zip(manager.lattice.axes, bucket.sizes, strict=True):
        position = axis.sizes.index(size)
        below = axis.sizes[position - 1] if position else 0
        inner[axis.name] = size - (size - below) // 2 if size - below > 1 else size
    return inner


def generator(bucket: Bucket, salt: int = 0) -> torch.Generator:
    """Random numbers that belong to a bucket: the same in every run."""
    seed = salt
    for size in bucket.sizes:
        seed = (seed * 1_000_003 + size) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def _sizes(manager: BucketManager, bucket: Bucket, level: str) -> Iterator[dict[str, int]]:
    inner = inner_sizes(manager, bucket)
    yield inner
    if level == "quick":
        return
    smallest = {}
    for axis, size in zip(manager.lattice.axes, bucket.sizes, strict=True):
        position = axis.sizes.index(size)
        smallest[axis.name] = axis.sizes[position - 1] + 1 if position else 1
    tried = [inner]
    for sizes in (bucket.as_dict(), smallest):
        if sizes not in tried:
            tried.append(sizes)
            yield sizes


def require_agreement(manager: BucketManager, captured: Captured, executable: Executable) -> None:
    """What an executable computes of the filled inputs is what the manager's function does. Raises CaptureError."""
    sizes = inner_sizes(manager, captured.bucket)

    def compared(salt: int) -> dict[str, _Found]:
        if salt:
            captured.inputs.fill(manager.example(sizes, generator(captured.bucket, salt)))
        got = _real(manager, manager.outputs_of(executable.replay()), sizes)
        want = _real(manager, manager.outputs_of(manager.fn(**captured.inputs.views)), sizes)
        return _differences(manager, got, want)

    _judged(compared)


def _check_sizes(manager: BucketManager, captured: Captured, sizes: Mapping[str, int], level: str) -> float:
    return _judged(lambda salt: _check_once(manager, captured, sizes, level, salt))


def _judged(compared: Callable[[int], dict[str, _Found]]) -> float:
    """The largest difference, of other inputs too where the first ones give too much. Raises CaptureError."""
    rounds = [compared(0)]
    while len(rounds) < _DRAWS and not all(found.agrees for found in rounds[-1].values()):
        rounds.append(compared(len(rounds)))
    return _worst(rounds)


def _check_once(
    manager: BucketManager, captured: Captured, sizes: Mapping[str, int], level: str, salt: int
) -> dict[str, _Found]:
    """How much each row of each output differs; everything else that the module promises is required at once."""
    inputs = manager.example(sizes, generator(captured.bucket, salt))
    want = {name: tensor.clone() for name, tensor in manager.run_unpadded(inputs).items()}
    captured.inputs.poison(_POISON)
    captured.inputs.fill(inputs)
    _require_filled(captured, inputs)
    got = manager.check_outputs(captured)
    real = {name: unpad(got[name], spec.shape, sizes) for name, spec in manager.spec.outputs.items()}
    found = _differences(manager, real, want)
    if bool((captured.inputs.gaps() != _POISON).any()):
        raise CaptureError(
            "the function wrote outside its inputs", hint="an index is out of range, or a mask is missing"
        )
    _require_inert(manager, captured, inputs, sizes, _real(manager, got, sizes), rounds=3 if level == "full" else 1)
    return found


def _require_filled(captured: Captured, inputs: Mapping[str, Tensor]) -> None:
    """Every byte of every slot is what its rule says, though all of them were poison before."""
    for slot in captured.inputs.slots:
        expected = _expected(slot, inputs[slot.name].cpu(), captured.bucket)
        held = captured.inputs.views[slot.name].cpu()
        if not same_bits(held, expected):
            raise CaptureError(f"input {slot.name} still holds what was there before it was filled")


def _expected(slot: Slot, source: Tensor, bucket: Bucket) -> Tensor:
    """What the slot's rule says, in other words than `fill`: a check that shared its code would share its faults."""
    shape = slot.shape(bucket.as_dict())
    if slot.pad is None:  # each index beyond the last real one reads that one
        for dim, size in enumerate(shape):
            source = source.index_select(dim, torch.arange(size).clamp(max=source.shape[dim] - 1))
        return source
    made = torch.full(shape, slot.pad, dtype=slot.dtype)
    made[tuple(slice(size) for size in source.shape)] = source
    return made


def _require_inert(
    manager: BucketManager,
    captured: Captured,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    real: Mapping[str, Tensor],
    rounds: int,
) -> None:
    """Other legal padding in slots that are declared inert changes no bit of the real result."""
    inert = [slot for slot in captured.inputs.slots if slot.inert]
    if not inert or dict(sizes) == captured.bucket.as_dict():
        return
    for salt in range(1, rounds + 1):
        random = generator(captured.bucket, salt)
        for slot in inert:
            view = captured.inputs.views[slot.name]
            other = slot.example(captured.bucket.as_dict(), random)
            corner = other
            for dim, size in enumerate(inputs[slot.name].shape):
                corner = corner.narrow(dim, 0, size)
            corner.copy_(inputs[slot.name])
            view.copy_(other)
        for name, tensor in _real(manager, manager.check_outputs(captured), sizes).items():
            if not same_bits(tensor, real[name]):
                names = ", ".join(slot.name for slot in inert)
                raise CaptureError(
                    f"output {name} depends on the padding of {names}", hint="mask the padding, or do not call it inert"
                )


def _real(manager: BucketManager, outputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    return {name: unpad(outputs[name], spec.shape, sizes).clone() for name, spec in manager.spec.outputs.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compared as integers, so that NaN equals the same NaN."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


@dataclass(frozen=True)
class _Found:
    """How much an output differs."""

    rows: Tensor  # [first axis] float64: the largest difference of each row over the largest magnitude of all
    limit: float  # what is allowed

    @property
    def agrees(self) -> bool:
        return bool((self.rows <= self.limit).all())


def _differences(manager: BucketManager, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, _Found]:
    checked = (name for name, spec in manager.spec.outputs.items() if spec.check)
    return {name: _compare(name, got[name], want[name], manager.policy.tolerance) for name in checked}


def _compare(name: str, got: Tensor, want: Tensor, tolerance: float | None) -> _Found:
    """Raises CaptureError for what no rounding explains: another shape, other integers, NaN, other infinities."""
    if got.shape != want.shape:
        raise CaptureError(f"output {name} has another shape than unpadded", given=list(got.shape), expected=want.shape)
    if not want.dtype.is_floating_point:
        wrong = int((got != want).sum())
        if wrong:
            raise CaptureError(f"output {name} differs from unpadded eager", given=f"{wrong} of {want.numel()} values")
        return _Found(torch.zeros(0, dtype=torch.float64), 0.0)
    limit = tolerance if tolerance is not None else TOLERANCE.get(want.dtype, _COARSE)
    if not want.numel():
        return _Found(torch.zeros(0, dtype=torch.float64), limit)
    got, want = got.double(), want.double()
    if bool(want.isnan().any()):
        raise CaptureError(f"output {name} of the function itself holds NaN")
    # Equal infinities, such as masked logits, are equal.
    apart = torch.where(got == want, 0.0, (got - want).abs()).reshape(want.shape[0] if want.dim() else 1, -1)
    if not bool(apart.isfinite().all()):
        raise CaptureError(f"output {name} differs from unpadded eager", given="NaN or another infinity")
    scale = want.masked_fill(want.isinf(), 0.0).abs().max().clamp_min(1e-30)
    return _Found((apart.amax(dim=1) / scale).cpu(), limit)


def _worst(rounds: Sequence[Mapping[str, _Found]]) -> float:
    """The largest difference of a row, in the middle one of its rounds. Raises CaptureError if that is too much."""
    worst = 0.0
    for name, found in rounds[0].items():
        # Of two rounds the smaller one: the second was the last because it agreed.
        rows = torch.stack([each[name].rows for each in rounds]).sort(dim=0).values[(len(rounds) - 1) // 2]
        error = float(rows.max()) if len(rows) else 0.0
        if not error <= found.limit:
            what = f"output {name} differs from unpadded eager"
            raise CaptureError(what, given=f"{error:.2e}", expected=f"{found.limit:g}")
        worst = max(worst, error)
    return worst
