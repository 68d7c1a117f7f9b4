"""What warm-up holds every bucket to: padded replay gives what the unpadded function gives, whatever was there before.

Two halves of the padding contract. `fill` must reset every byte: all static memory is poisoned first (0xFF: NaN, -1,
huge ids), and each slot is then compared byte for byte with what its rule says. The function must not read its padding:
slots declared `inert` get other legal values there, and the result must not change by a bit. Bytes between slots are
canaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    got = _real(manager, manager.outputs_of(executable.replay()), sizes)
    want = _real(manager, manager.outputs_of(manager.fn(**captured.inputs.views)), sizes)
    for name, spec in manager.spec.outputs.items():
        if spec.check:
            _difference(name, got[name], want[name], manager.policy.tolerance)


def _check_sizes(manager: BucketManager, captured: Captured, sizes: Mapping[str, int], level: str) -> float:
    inputs = manager.example(sizes, generator(captured.bucket))
    want = {name: tensor.clone() for name, tensor in manager.run_unpadded(inputs).items()}
    captured.inputs.poison(_POISON)
    captured.inputs.fill(inputs)
    _require_filled(captured, inputs)
    got = manager.check_outputs(captured)
    error = 0.0
    for name, spec in manager.spec.outputs.items():
        if spec.check:
            real = unpad(got[name], spec.shape, sizes)
            error = max(error, _difference(name, real, want[name], manager.policy.tolerance))
    if bool((captured.inputs.gaps() != _POISON).any()):
        raise CaptureError(
            "the function wrote outside its inputs", hint="an index is out of range, or a mask is missing"
        )
    _require_inert(manager, captured, inputs, sizes, _real(manager, got, sizes), rounds=3 if level == "full" else 1)
    return error


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


def _difference(name: str, got: Tensor, want: Tensor, tolerance: float | None) -> float:
    """Largest difference over largest magnitude. Raises CaptureError above the tolerance, or for NaN."""
    if got.shape != want.shape:
        raise CaptureError(f"output {name} has another shape than unpadded", given=list(got.shape), expected=want.shape)
    if not want.dtype.is_floating_point:
        wrong = int((got != want).sum())
        if wrong:
            raise CaptureError(f"output {name} differs from unpadded eager", given=f"{wrong} of {want.numel()} values")
        return 0.0
    limit = tolerance if tolerance is not None else TOLERANCE.get(want.dtype, _COARSE)
    got, want = got.double(), want.double()
    if bool(want.isnan().any()):
        raise CaptureError(f"output {name} of the function itself holds NaN")
    differing = got != want  # equal infinities, such as masked logits, are equal
    if not bool(differing.any()):
        return 0.0
    scale = float(want.masked_fill(want.isinf(), 0.0).abs().max().clamp_min(1e-30))
    error = float((got - want)[differing].abs().max()) / scale
    if not error <= limit:
        raise CaptureError(f"output {name} differs from unpadded eager", given=f"{error:.2e}", expected=f"{limit:g}")
    return error
