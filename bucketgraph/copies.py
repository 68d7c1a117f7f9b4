"""Copies into slots that are one call, and on a GPU one launch, instead of a few for each slot.

Rules: padding is a source like any other, a constant that was made beforehand; a joint copy moves the very bits, and
every slot is written whole. `torch._foreach_copy_` is one kernel where all tensors have one dtype and each pair the
same dense layout. What does not go together is copied by itself, in the order that the result needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from bucketgraph.buckets import MAX_PLANS

if TYPE_CHECKING:
    from bucketgraph.slots import Slot

SMALL = 1 << 16  # bytes; one block of the joint kernel copies that much by itself, so larger tensors go alone
MAX_PREPARED = 1 << 10  # of one bucket: some 10 KiB each
# The joint kernel computes with these as floats and truth values; as integers their bits stay as they are.
_WORDS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.bool: torch.uint8}
_Shape = tuple[int, ...]
_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


def split(view: Any, shape: Sequence[int]) -> tuple[Any, list[Any]]:
    """The real corner of these sizes in a tensor or an array, and what is left of it around that."""
    corner, tails = view, []
    for dim, size in enumerate(shape):
        if size != view.shape[dim]:
            before = (slice(None),) * dim
            tails.append(corner[(*before, slice(size, None))])
            corner = corner[(*before, slice(size))]
    return corner, tails


def repeat_last(view: Any, real: Sequence[int]) -> None:  # a tensor or an array
    """Innermost dimension first, so that an outer one repeats rows that are already whole."""
    for dim in reversed(range(len(real))):
        size = real[dim]
        if size < view.shape[dim]:
            rows = tuple(slice(outer) for outer in real[:dim])
            view[(*rows, slice(size, None))] = view[(*rows, slice(size - 1, size))]


class Prepared(Generic[_Key, _Made]):
    """Made when it is asked for the second time: shapes that never return are not worth it."""

    def __init__(self) -> None:
        self._seen: set[_Key] = set()
        self._made: dict[_Key, _Made] = {}

    def get(self, key: _Key, make: Callable[[_Key], _Made]) -> _Made | None:
        made = self._made.get(key)
        if made is None:
            if key not in self._seen:
                if len(self._seen) < MAX_PLANS:
                    self._seen.add(key)
            elif len(self._made) < MAX_PREPARED:
                made = self._made[key] = make(key)
        return made


class Padding:
    """Constants to copy padding from, `SMALL` bytes at most: made before any call, since calls allocate nothing."""

    def __init__(self, slots: Iterable[Slot], largest: int, device: torch.device) -> None:
        self._held: dict[tuple[torch.dtype, str], Tensor] = {}
        for slot in slots:
            key = slot.dtype, repr(slot.pad)  # 0.0 equals -0.0
            if slot.pad is not None and key not in self._held:
                size = min(SMALL, largest) // slot.dtype.itemsize
                self._held[key] = torch.full((size,), slot.pad, dtype=slot.dtype, device=device)

    def of(self, slot: Slot, shape: Sequence[int]) -> Tensor:
        """Contiguous, of this shape."""
        flat = self._held[slot.dtype, repr(slot.pad)]
        return flat[: torch.Size(shape).numel()].view(*shape)


def load_kernels(slots: Iterable[Slot], device: torch.device) -> None:
    """So that no call is the first one to need them."""
    for dtype in {_WORDS.get(slot.dtype, slot.dtype) for slot in slots}:
        torch._foreach_copy_([torch.empty(1, dtype=dtype, device=device)], [torch.zeros(1, dtype=dtype, device=device)])


@dataclass(slots=True)
class _Joint:
    """Copies of one dtype."""

    word: torch.dtype | None  # what sources are taken as
    corners: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the corners' sources in the call
    tails: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)

    def seen(self, tensor: Tensor) -> Tensor:
        return tensor if self.word is None else tensor.resolve_neg().view(self.word)

    def add(self, corner: Tensor, place: int) -> None:
        self.corners.append(self.seen(corner))
        self.places.append(place)

    def pad(self, tail: Tensor, constant: Tensor) -> None:
        self.tails.append(self.seen(tail.as_strided(constant.shape, constant.stride())))
        self.constants.append(self.seen(constant))


class DeviceCopies:
    """From the device into slots of some shapes and strides.

    Args:
        views: the slots' memory, contiguous.
        shapes, strides: of each source.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        views: Sequence[Tensor],
        shapes: Sequence[_Shape],
        strides: Sequence[_Shape],
        padding: Padding,
    ) -> None:
        self._alone: list[tuple[Tensor, int]] = []  # corners that no joint copy can take, with the place of the source
        self._fills: list[tuple[Tensor, int | float]] = []  # padding too large for the constants
        self._repeats: list[tuple[Tensor, _Shape]] = []
        joints: dict[torch.dtype, _Joint] = {}
        for place, (slot, view, shape, stride) in enumerate(zip(slots, views, shapes, strides, strict=True)):
            joint = joints.setdefault(slot.dtype, _Joint(_WORDS.get(slot.dtype)))
            corner, tails = split(view, shape)
            if _goes_along(corner) and _is_contiguous(shape, stride):
                joint.add(corner.as_strided(shape, stride), place)
            else:
                self._alone.append((corner, place))
                if slot.pad is not None and tails and _goes_along(view):  # padded whole, before the corner comes
                    tails = [view]
            if slot.pad is None:
                if tails:
                    self._repeats.append((view, shape))
                continue
            for tail in tails:
                if _goes_along(tail):
                    joint.pad(tail, padding.of(slot, tail.shape))
                else:
                    self._fills.append((tail, slot.pad))
        used = [joint for joint in joints.values() if joint.corners or joint.tails]
        self._joints = [(joint, [*joint.corners, *joint.tails]) for joint in used]

    def run(self, sources: Sequence[Tensor]) -> None:
        """Write every byte of the slots. The sources lie outside of them."""
        for joint, destinations in self._joints:
            given = [sources[place] for place in joint.places]
            if joint.word is not None:
                given = [joint.seen(source) for source in given]
            given += joint.constants
            torch._foreach_copy_(destinations, given)
        for tail, pad in self._fills:
            tail.fill_(pad)
        for corner, place in self._alone:
            corner.copy_(sources[place])
        for view, shape in self._repeats:
            repeat_last(view, shape)


class HostCopies:
    """From the host into slots in staging, of some shapes: any dtypes and layouts, since here a copy is a loop.

    What is large, or repeats its last element, is left to the caller; `rest` are the places of those sources.
    """

    def __init__(
        self, slots: Sequence[Slot], views: Sequence[Tensor], shapes: Sequence[_Shape], padding: Padding
    ) -> None:
        self.rest: list[int] = []
        self._places: list[int] = []
        self._corners: list[Tensor] = []
        tails: list[Tensor] = []
        self._constants: list[Tensor] = []
        for place, (slot, view, shape) in enumerate(zip(slots, views, shapes, strict=True)):
            corner, around = split(view, shape)
            if view.nbytes > SMALL or (slot.pad is None and around):
                self.rest.append(place)
                continue
            self._places.append(place)
            self._corners.append(corner)
            tails += around
            self._constants += [padding.of(slot, tail.shape) for tail in around]
        self._all = [*self._corners, *tails]

    def run(self, sources: Sequence[Tensor], padded: bool) -> None:
        """All but the rest; the padding too, unless it holds its value already."""
        given = [sources[place] for place in self._places] if self.rest else list(sources)
        destinations = self._corners
        if not padded:
            given, destinations = given + self._constants, self._all
        if given:
            torch._foreach_copy_(destinations, given)


def _goes_along(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes <= SMALL


def _is_contiguous(shape: _Shape, stride: _Shape) -> bool:
    """As `Tensor.is_contiguous`: the stride of a dimension of size 1 does not matter."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
