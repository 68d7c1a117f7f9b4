"""How tensors lie, recognised by one comparison in C: of a call's inputs, and of what a graph reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from bucketgraph.buckets import MAX_PLANS

MAX_GUARDED = 1 << 10  # layouts of one place that guards are made for: some KiB each
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Layout:
    """How the tensors of a call lie: one object for all calls that are alike, so that what they need is found by it."""

    shapes: tuple[_Shape, ...]
    strides: tuple[_Shape, ...]
    on_device: tuple[bool, ...]
    plain: bool  # none is of a subclass
    sizes: dict[str, int] | None = None  # of each axis, where they are known to be legal
    looked_up: int = 0  # how often
    guards: TensorGuards | None = None


class Layouts:
    """The layouts of calls. A guess is confirmed by one comparison in C; only without a right one is a key made.

    Guesses are the last call's layout, and what was last found for these shapes of the first and the last tensor.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Layout] = {}
        self._last: Layout | None = None
        self._likely: dict[tuple[_Shape, _Shape], Layout] = {}
        self._guarded = 0

    def of(self, tensors: Sequence[Tensor]) -> Layout:
        """Raises AttributeError, TypeError or RuntimeError if one is no tensor with strides."""
        last = self._last
        if last is None or last.guards is None or not last.guards.check(*tensors):
            last = self._last = self._find(tensors)
        return last

    def _find(self, tensors: Sequence[Tensor]) -> Layout:
        ends = tensors[0].shape, tensors[-1].shape
        likely = self._likely.get(ends)
        if likely is not None and likely.guards is not None and likely.guards.check(*tensors):
            return likely
        key = tuple([(t.shape, t.stride(), t.dtype, t.device, type(t)) for t in tensors])
        found = self._known.get(key)
        if found is not None:
            self._guard(found, tensors)
            if found.guards is not None:
                self._likely[ends] = found
            return found
        shapes, strides = tuple([t.shape for t in tensors]), tuple([t.stride() for t in tensors])
        on_device, plain = tuple([t.is_cuda for t in tensors]), _PLAIN.issuperset(map(type, tensors))
        found = Layout(shapes, strides, on_device, plain)
        if len(self._known) < MAX_PLANS:
            self._known[key] = found
        return found

    def _guard(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Guards hold in the modes that they were made in (gradients, inference, autocast): now and then, new ones."""
        layout.looked_up += 1
        if layout.looked_up & (layout.looked_up - 1) or (layout.guards is None and self._guarded >= MAX_GUARDED):
            return
        self._guarded += layout.guards is None
        layout.guards = guards(tensors)


def guards(tensors: Sequence[Tensor]) -> TensorGuards:
    """Torch's comparison of types, dtypes, devices, sizes, strides and `requires_grad` with those of now, all in C."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
