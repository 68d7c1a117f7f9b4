"""Static buffers and their padding: `fill` before a replay, `read` after it.

Rules: all slots of a bucket lie in one arena, so that host inputs travel in one copy; fill writes every byte of every
slot on every call, the real part and the tail; read never returns memory that the next replay overwrites, unless the
set says `borrowed`. A pinned staging buffer is not refilled before its copy is done: there are several, in two halves,
and a half that comes up again waits for the event behind all calls of its last time, so that most calls need none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bucketgraph.buckets import MAX_PLANS, Bucket
from bucketgraph.config import InputSpec, OutputSpec, Ring
from bucketgraph.copies import DeviceCopies, HostCopies, Padding, Prepared, load_kernels, repeat_last, split
from bucketgraph.errors import ConfigError, InputError
from bucketgraph.executables.family import CurrentStream, event, synchronize
from bucketgraph.layouts import Layout, Layouts

_STAGED = 4  # staging buffers of a half
_MANY = 16 << 20  # bytes of a buffer; of larger ones there are two
_ALIGN = 256  # bytes; keeps every slot as aligned as a fresh allocation, which compiled kernels rely on
_NUMPY = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.float32, torch.float64}
)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SKIP = -1  # what an index slot with `pad: skip` holds in its padding; kernels test for it


@dataclass(frozen=True, slots=True)
class Slot:
    """A static input: its shape in axes, dtype and pad rule."""

    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype
    pad: int | float | None  # the value of the padding; None repeats the last real element
    range: tuple[int, int] | None = None  # legal integers [low, high) for made-up inputs
    inert: bool = False  # whether any legal value may stand in the padding

    @classmethod
    def from_spec(cls, name: str, spec: InputSpec) -> Slot:
        pad = {"zero": 0, "skip": SKIP, "repeat_last": None}.get(str(spec.pad), spec.pad)
        assert not isinstance(pad, str), f"pad rule {spec.pad!r} was validated at load"
        dtype: torch.dtype = getattr(torch, spec.dtype)
        # As torch takes them: a whole number may be too long to fill a float slot, a float too coarse for an int64.
        exact = None if pad is None else float(pad) if dtype.is_floating_point else int(pad)
        return cls(name, spec.shape, dtype, exact, spec.range, spec.inert)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims)

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Random legal values: integers from `range` (0 and 1 without one), floats from a normal distribution."""
        shape = self.shape(sizes)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.dtype)
        low, high = self.range or (0, 2)
        return torch.randint(low, high, shape, generator=generator).to(self.dtype)


_address = torch.Tensor.data_ptr


class StaticInputs:
    """The slots of one bucket: device views that an executable reads, and pinned views that host inputs go through."""

    def __init__(self, slots: Sequence[Slot], bucket: Bucket, arena: Arena) -> None:
        self.slots = slots
        self.views: dict[str, Tensor] = {}  # [shape in the bucket], contiguous
        self.spans: dict[str, tuple[int, int]] = {}  # bytes in the arena
        self._arena = arena
        self._on_host = not arena.staging
        # What host inputs are written to: the arena itself on a CPU, else a staging buffer in its turn.
        host = arena.staging or (arena.device_bytes,)
        self._host: tuple[list[_HostSlot], ...] = tuple([] for _ in host)
        self._names = [slot.name for slot in slots]
        self._routes: dict[tuple[str, ...], _Route] = {}
        self._known: dict[Layout, _Route] = {}
        offset = 0
        for slot in slots:
            shape = slot.shape(bucket.as_dict())
            end = offset + prod(shape) * slot.dtype.itemsize
            self.spans[slot.name] = (offset, end)
            self.views[slot.name] = arena.device_bytes[offset:end].view(slot.dtype).view(shape)
            for turn, buffer in zip(self._host, host, strict=True):
                turn.append(_HostSlot(slot, buffer[offset:end].view(slot.dtype).view(shape)))
            offset = -(-end // _ALIGN) * _ALIGN

    def fill(self, inputs: Mapping[str, Tensor], elsewhere: Collection[str] = (), layout: Layout | None = None) -> None:
        """Copy `inputs` in and reset all padding. Host tensors travel in as few copies as lie side by side.

        Args:
            elsewhere: inputs that the graph reads where the caller has them; their slots stay as they are.
            layout: of the inputs in the slots' order, where it is known.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():  # or the slots would become results of the inputs
                return self.fill(inputs, elsewhere, layout)
        if self._on_host:
            for held in self._host[0]:
                if held.name not in elsewhere:
                    held.write(inputs[held.name])
            return
        tensors = [inputs[name] for name in self._names]
        if layout is None:
            layout = self._arena.layouts.of(tensors)
        route = self._known.get(layout) or self._know(layout)
        if route.host:
            self._arena.copy(route.moves[self._stage(tensors, layout, route)])
        if elsewhere:
            route = self._route(tuple([name for name in self._there(layout) if name not in elsewhere]))
        if route.device:
            route.fill(tensors, layout)

    def stage(self, inputs: Mapping[str, Tensor], layout: Layout | None = None) -> int:
        """Write what is on the host into a staging buffer, for a graph that copies it itself; the buffer's turn."""
        tensors = [inputs[name] for name in self._names]
        if layout is None:
            layout = self._arena.layouts.of(tensors)
        return self._stage(tensors, layout, self._known.get(layout) or self._know(layout))

    def forget(self) -> None:
        """Staging was written by others: nothing that it held counts any more."""
        self._arena.forget()

    @property
    def arena_bytes(self) -> Tensor:
        """The memory that all slots of all buckets lie in."""
        return self._arena.device_bytes

    def packed(self, first: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The slots from this one on as bytes, with the gaps between them; the same of each staging buffer."""
        part = slice(self.spans[first][0], max(end for _, end in self.spans.values()))
        return self._arena.device_bytes[part], tuple(buffer[part] for buffer in self._arena.staging)

    def _there(self, layout: Layout) -> tuple[str, ...]:
        """Which inputs lie on the device."""
        return tuple([name for name, there in zip(self._names, layout.on_device, strict=True) if there])

    def _know(self, layout: Layout) -> _Route:
        route = self._route(self._there(layout))
        if len(self._known) < MAX_PLANS:
            self._known[layout] = route
        return route

    def _route(self, there: tuple[str, ...]) -> _Route:
        route = self._routes.get(there)
        if route is None:
            route = _Route(self, there, self._arena, self._host, self._runs(there))
            if len(self._routes) < MAX_PLANS:
                self._routes[there] = route
        return route

    def _stage(self, tensors: Sequence[Tensor], layout: Layout, route: _Route) -> int:
        arena = self._arena
        turn = arena.next_staging()
        # The buffer's padding is as this bucket's last fill left it, if that had these shapes.
        now = route.mark, layout
        padded = arena.filled[turn] == now
        arena.filled[turn] = None
        route.stage(turn, tensors, layout, padded)
        arena.filled[turn] = now
        return turn

    def poison(self, byte: int) -> None:
        """Set every byte of the arena and of the staging, gaps too; for self-checks."""
        self._arena.poison(byte)

    def gaps(self) -> Tensor:
        """The bytes between and behind the slots, which nothing may write."""
        held = torch.zeros(self._arena.device_bytes.numel(), dtype=torch.bool)
        for start, end in self.spans.values():
            held[start:end] = True
        return self._arena.device_bytes[~held.to(self._arena.device_bytes.device)]

    def _runs(self, there: tuple[str, ...]) -> list[tuple[int, int]]:
        """Byte ranges that cover all slots but these, neighbours merged (the gap between them is alignment only)."""
        runs: list[tuple[int, int]] = []
        for slot in self.slots:
            start, end = self.spans[slot.name]
            if slot.name in there:
                continue
            if runs and start - runs[-1][1] < _ALIGN:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        return runs


class _Route:
    """How a bucket's inputs get into its slots where just these of them lie on the device.

    Attributes:
        host, device: the slots of each kind.
        moves: for each staging buffer, the stretches of device memory that host inputs lie in, and of the buffer.
    """

    def __init__(
        self,
        static: StaticInputs,
        there: tuple[str, ...],
        arena: Arena,
        written: Sequence[Sequence[_HostSlot]],
        runs: list[tuple[int, int]],
    ) -> None:
        self.host = [slot for slot in static.slots if slot.name not in there]
        self.device = [slot for slot in static.slots if slot.name in there]
        self._host_places = [place for place, slot in enumerate(static.slots) if slot.name not in there]
        self._device_places = [place for place, slot in enumerate(static.slots) if slot.name in there]
        buffers, whole = arena.staging, arena.device_bytes
        self.moves = [[(whole[start:end], buffer[start:end]) for start, end in runs] for buffer in buffers]
        self.mark = object()  # stands for it where holding it would be a circle
        self._arena = arena
        self._views = [static.views[slot.name] for slot in self.device]
        self._written = [[held for held in turn if held.name not in there] for turn in written]
        self._host_copies = Prepared[tuple[int, Layout], HostCopies]()
        self._device_copies = Prepared[Layout, DeviceCopies]()
        start = arena.device_bytes.data_ptr()
        self._arena_ends = start, start + arena.device_bytes.nbytes

    def stage(self, turn: int, tensors: Sequence[Tensor], layout: Layout, padded: bool) -> None:
        """Write what is on the host into a staging buffer."""
        sources = [tensors[place] for place in self._host_places] if self.device else tensors
        written, copies = self._written[turn], self._host_copies.get((turn, layout), self._host_copies_of)
        if copies is not None:
            copies.run(sources, padded)
        for place in range(len(sources)) if copies is None else copies.rest:
            written[place].write(sources[place], padded)

    def fill(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Write what is on the device into the slots."""
        sources = [tensors[place] for place in self._device_places] if self.host else tensors
        copies = None
        if layout.plain and self._is_apart(sources):
            copies = self._device_copies.get(layout, self._device_copies_of)
        if copies is not None:
            copies.run(sources)
            return
        for slot, view, source in zip(self.device, self._views, sources, strict=True):
            _write(view, source, slot.pad)

    def _is_apart(self, sources: Sequence[Tensor]) -> bool:
        """None of them lies in the slots: a joint copy has no order, and does not look for overlaps."""
        start, end = self._arena_ends
        addresses = list(map(_address, sources))
        return max(addresses) < start or min(addresses) >= end or not any(start <= at < end for at in addresses)

    def _host_copies_of(self, key: tuple[int, Layout]) -> HostCopies:
        turn, layout = key
        views, shapes = [held.tensor for held in self._written[turn]], [layout.shapes[i] for i in self._host_places]
        return HostCopies(self.host, views, shapes, self._arena.host_padding)

    def _device_copies_of(self, layout: Layout) -> DeviceCopies:
        shapes, strides = ([of[i] for i in self._device_places] for of in (layout.shapes, layout.strides))
        return DeviceCopies(self.device, self._views, shapes, strides, self._arena.padding)


class _HostSlot:
    """A slot in host memory, written through numpy: a few times cheaper than torch for a handful of numbers."""

    def __init__(self, slot: Slot, view: Tensor) -> None:
        self.name, self.tensor = slot.name, view
        # Types that numpy lacks go as integers of their width.
        self._as = None if slot.dtype in _NUMPY else _WORDS[slot.dtype.itemsize]
        self._view: np.ndarray = (view if self._as is None else view.view(self._as)).numpy()
        self._parts: dict[tuple[int, ...], tuple[np.ndarray, list[np.ndarray]]] = {}
        self._pad = slot.pad
        if slot.pad is not None and self._as is not None:
            self._pad = torch.tensor(slot.pad, dtype=slot.dtype).view(self._as).item()

    def write(self, source: Tensor, padded: bool = False) -> None:
        """Write the real corner from `source`, and the rest by the pad rule unless it holds its value already."""
        if source.requires_grad:
            source = source.detach()
        array = (source if self._as is None else source.view(self._as)).numpy()
        shape = array.shape
        if shape == self._view.shape:
            self._view[...] = array
            return
        corner, tails = self._parts.get(shape) or self._part(shape)
        corner[...] = array
        if self._pad is None:
            repeat_last(self._view, shape)
        elif not padded:
            for tail in tails:
                tail.fill(self._pad)

    def _part(self, shape: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        parts = split(self._view, shape)
        if len(self._parts) < MAX_PLANS:
            self._parts[shape] = parts
        return parts


class Arena:
    """The memory of all static inputs of a set; buckets overlap in it, since one replay runs at a time."""

    def __init__(self, slots: Sequence[Slot], buckets: Iterable[Bucket], device: torch.device) -> None:
        # One stretch more than the largest bucket fills: a write past the last slot is seen there and hits nothing.
        size = max(sum(_bytes(slot, bucket) for slot in slots) for bucket in buckets) + _ALIGN
        copies = (2 * _STAGED if size <= _MANY else 2) if device.type == "cuda" else 0
        with torch.inference_mode(False):  # or only calls in inference mode could write it
            self.device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
            self.staging = tuple(torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(copies))
            self.padding = Padding(slots, size, device)
            self.host_padding = Padding(slots, size, torch.device("cpu"))
        if copies:
            load_kernels(slots, device)
        self._copied = (event(), event()) if copies else ()  # of each half
        self._stream = CurrentStream(device)
        self._turn = 0
        self.layouts = Layouts()
        self.filled: list[object] = [None] * copies  # by whom and with which shapes each staging buffer was filled last

    def poison(self, byte: int) -> None:
        synchronize(self.device_bytes.device)
        for buffer in (self.device_bytes, *self.staging):
            buffer.fill_(byte)
        self.forget()

    def forget(self) -> None:
        """Staging was written by others than fills: what they remember of it no longer holds."""
        self.filled = [None] * len(self.staging)

    def next_staging(self) -> int:
        """Calls follow one another on the GPU, whatever streams they come on: what is recorded now is behind them."""
        self._turn = turn = (self._turn + 1) % len(self.staging)
        half, within = divmod(turn, len(self.staging) // 2)
        if within == 0:
            # Named, since the thread's current device may be another one.
            self._copied[1 - half].record(self._stream()[1])
            self._copied[half].synchronize()  # done long ago unless the host runs far ahead
        return turn

    def copy(self, moves: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Stretches of device memory, each from its place in a staging buffer."""
        for device, staged in moves:
            device.copy_(staged, True)


def _bytes(slot: Slot, bucket: Bucket) -> int:
    return -(-prod(slot.shape(bucket.as_dict())) * slot.dtype.itemsize // _ALIGN) * _ALIGN


def _write(view: Tensor, source: Tensor, pad: int | float | None) -> None:
    """As `_HostSlot.write`, on a device."""
    corner, tails = split(view, source.shape)
    if pad is not None:
        for tail in tails:
            tail.fill_(pad)
    corner.copy_(source)
    if pad is None:
        repeat_last(view, source.shape)


class InputCheck:
    """`check_inputs` that remembers the layouts it has passed."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._names = [slot.name for slot in slots]
        self._layouts = Layouts()

    def __call__(self, inputs: Mapping[str, Any]) -> tuple[dict[str, int], Layout | None]:
        """The sizes, and how the inputs lie in the slots' order if that can be remembered. Raises as that does."""
        try:
            layout = self._layouts.of([inputs[name] for name in self._names])
        except (KeyError, AttributeError, TypeError, RuntimeError):  # said in full
            return check_inputs(self._slots, inputs, self._device), None
        if layout.sizes is None or len(inputs) != len(self._names):
            layout.sizes = check_inputs(self._slots, inputs, self._device)
        return layout.sizes, layout


def check_inputs(slots: Sequence[Slot], inputs: Mapping[str, object], device: torch.device) -> dict[str, int]:
    """The size of each axis in a call's tensors.

    Raises:
        InputError: a tensor is missing, unknown, or of the wrong kind, dtype, device or rank; two tensors disagree
            about an axis; or an axis is empty.
    """
    if len(inputs) != len(slots) or any(slot.name not in inputs for slot in slots):
        names = ", ".join(slot.name for slot in slots)
        raise InputError("the call's tensors do not match the set", given=", ".join(inputs) or "none", expected=names)
    sizes: dict[str, int] = {}
    said_by: dict[str, str] = {}
    for slot in slots:
        tensor = inputs[slot.name]
        if not isinstance(tensor, Tensor):
            raise InputError(f"{slot.name} is not a tensor", given=type(tensor).__name__, hint="use torch.as_tensor")
        if tensor.dtype != slot.dtype:
            raise InputError(f"{slot.name} has the wrong dtype", given=tensor.dtype, expected=slot.dtype)
        if tensor.device != device and tensor.device.type != "cpu":
            raise InputError(f"{slot.name} is on another device", given=tensor.device, expected=f"{device} or cpu")
        if tensor.dim() != len(slot.dims):
            dims = ", ".join(str(dim) for dim in slot.dims)
            raise InputError(f"{slot.name} has the wrong rank", given=list(tensor.shape), expected=f"[{dims}]")
        for dim, size in zip(slot.dims, tensor.shape, strict=True):
            if isinstance(dim, int):
                if size != dim:
                    raise InputError(f"{slot.name} has the wrong shape", given=list(tensor.shape), expected=slot.dims)
            elif sizes.setdefault(dim, size) != size:
                both = f"{sizes[dim]} in {said_by[dim]}, {size} in {slot.name}"
                raise InputError(f"tensors disagree about {dim}", given=both)
            else:
                said_by.setdefault(dim, slot.name)
    for axis, size in sizes.items():
        if size == 0:
            raise InputError(f"{axis} is empty", given=f"{said_by[axis]} of size 0", expected="at least 1")
    return sizes


class Outputs:
    """How a function's result becomes named tensors, and how those are handed out."""

    def __init__(self, specs: Mapping[str, OutputSpec], ownership: Literal["cloned", "borrowed"] | Ring) -> None:
        self.specs = dict(specs)
        self._names = list(specs)
        self._ownership = ownership
        turns = ownership.ring if isinstance(ownership, Ring) else 0
        self._rings: list[dict[str, Tensor]] = [{} for _ in range(turns)]
        self._turn = 0

    def select(self, raw: object) -> dict[str, Tensor]:
        """The declared outputs in whatever the function returned: a tensor, a mapping, a sequence or an object."""
        names = self._names
        found: dict[str, Any]
        if isinstance(raw, Tensor):
            found = {names[0]: raw} if len(names) == 1 else {}
        elif isinstance(raw, (dict, Mapping)):
            found = {name: raw[name] for name in names if name in raw}
        elif isinstance(raw, (tuple, list, Sequence)):
            found = dict(zip(names, raw, strict=False))
        else:
            found = {name: getattr(raw, name) for name in names if hasattr(raw, name)}
        for name in names:
            if not isinstance(found.get(name), Tensor):
                raise ConfigError(f"the function returns no tensor for output {name}", given=type(raw).__name__)
        return found

    def check(self, outputs: Mapping[str, Tensor], bucket: Bucket) -> None:
        """Compare the shapes with the set's declaration. Raises ConfigError naming both."""
        for name, spec in self.specs.items():
            shape = outputs[name].shape
            wanted = tuple(d if isinstance(d, int) or d == "any" else bucket[d] for d in spec.shape)
            if len(shape) != len(wanted) or any(w not in ("any", s) for w, s in zip(wanted, shape, strict=True)):
                raise ConfigError(
                    f"output {name} has another shape than declared",
                    given=f"{list(shape)} in bucket {bucket}",
                    expected=list(spec.shape),
                )

    def check_out(self, out: object, sizes: Mapping[str, int], device: torch.device) -> None:
        """Raises InputError if a call's `out` cannot hold results of these sizes; the dtype is seen when they exist."""
        if not isinstance(out, Mapping):
            raise InputError("out is no mapping of outputs to tensors", given=type(out).__name__)
        for name, tensor in out.items():
            if name not in self.specs:
                raise InputError("out names no output", given=name, expected=", ".join(self.specs))
            if not isinstance(tensor, Tensor) or tensor.device != device:
                given = tensor.device if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputError(f"out[{name!r}] must be a tensor on {device}", given=given)
            shape = [sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in self.specs[name].shape]
            if len(shape) != tensor.dim() or any(d not in ("any", s) for d, s in zip(shape, tensor.shape, strict=True)):
                raise InputError(f"out[{name!r}] has the wrong shape", given=list(tensor.shape), expected=shape)

    def read(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        *,
        keep: bool = False,
        into: Mapping[str, Tensor] | None = None,
        written: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """The real part of static outputs, in memory that the set's `outputs_are` promises.

        `keep` clones them whatever the set says: one turn of a ring is one call, of however many replays. What is in
        `into` is copied there, unless it was `written` there already. Raises InputError if it does not fit.
        """
        clone = keep or self._ownership == "cloned"
        if self._rings and not clone:
            self._turn = (self._turn + 1) % len(self._rings)
        result = {}
        for name, spec in self.specs.items():
            real = unpad(outputs[name], spec.shape, sizes)
            if into is not None and name in into:
                real = into[name] if name in written else fit(name, into[name], real).copy_(real)
            elif clone:
                real = real.clone(memory_format=torch.contiguous_format)
            elif self._rings:
                real = self._ring(name, real).copy_(real)
            result[name] = real
        return result

    def _ring(self, name: str, like: Tensor) -> Tensor:
        """The buffer whose turn it is, shaped like `like`. One too small is replaced; whoever holds it keeps it."""
        buffers = self._rings[self._turn]
        flat = buffers.get(name)
        if flat is None or flat.numel() < like.numel() or flat.dtype != like.dtype or flat.device != like.device:
            flat = buffers[name] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return flat[: like.numel()].view(like.shape)


def into(out: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results copied to where a call wants them. Raises InputError if they do not fit."""
    return {name: fit(name, tensor, results[name]).copy_(results[name]) for name, tensor in out.items()}


def fit(name: str, out: Tensor, result: Tensor) -> Tensor:
    """`out`, if it can hold an output. Raises InputError."""
    given, expected = ((list(t.shape), t.dtype, t.device) for t in (out, result))
    if given != expected:
        sides = [f"{shape} {dtype} on {device}" for shape, dtype, device in (given, expected)]
        raise InputError(f"out[{name!r}] does not fit", given=sides[0], expected=sides[1])
    return out


def unpad(output: Tensor, dims: Sequence[str | int], sizes: Mapping[str, int]) -> Tensor:
    """A view of the real corner of `output`."""
    for position, dim in enumerate(dims):
        if isinstance(dim, str) and dim != "any" and output.shape[position] != sizes[dim]:
            output = output.narrow(position, 0, sizes[dim])
    return output


def longest(sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The largest size of each axis in any request."""
    return {axis: max(size[axis] for size in sizes) for axis in sizes[0]}


def pack(
    slots: Sequence[Slot], requests: Sequence[Mapping[str, Tensor]], sizes: Sequence[Mapping[str, int]]
) -> dict[str, Tensor]:
    """Ragged requests as one batch, each tensor padded by its slot's rule to the longest request's sizes."""
    largest = longest(sizes)
    batch = {}
    for slot in slots:
        first = requests[0][slot.name]
        made = torch.empty((len(requests), *slot.shape(largest)), dtype=slot.dtype, device=first.device)
        for row, request in enumerate(requests):
            _write(made[row], request[slot.name], slot.pad)
        batch[slot.name] = made
    return batch
