"""What a captured executable reads by address, compared with what is there now, before every launch.

A graph reads weights and buffers where they were when it was recorded. In-place updates are seen; a tensor that was
rebound, resized, moved or freed is not, and the graph would go on with the old memory. So every place that holds such a
tensor is remembered with its object, address and shape, and all of them are compared on each call: a few list
comparisons in C. Places are found in modules (parameters, buffers, submodules), in the attributes of the object that a
method is bound to, in a function's closure and globals, and in a mapping that the caller names.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from bucketgraph.errors import StaleError
from bucketgraph.layouts import guards

_address = torch.Tensor.data_ptr
_SMALL = 16  # items; of no more, comparing two dicts is as fast as comparing lists of what they hold
_MISSING = object()
Place = tuple[str, Any, Any]  # name, container, key


class Contract:
    """The tensors of one function, and where they are kept.

    Args:
        fn: the function or module that is captured.
        state: more tensors that it reads, by name; the mapping itself is watched, so rebinding a key is seen.
    """

    def __init__(self, fn: Callable[..., Any], state: Mapping[str, Tensor] | None = None) -> None:
        places = list(_places(fn, "", set()))
        places += [(name, state, name) for name in state or {}]
        self._names = [name for name, _, _ in places]
        self._slots = [(container, key) for _, container, key in places]
        self._objects = [_get(container, key) for container, key in self._slots]
        held = [(name, item) for name, item in zip(self._names, self._objects, strict=True) if isinstance(item, Tensor)]
        self.tensors: dict[str, Tensor] = dict(held)
        # Once each, whatever names it has: torch's guards refuse a tensor that they are given twice.
        self._tensors = list({id(tensor): tensor for tensor in self.tensors.values()}.values())
        self._tell_apart()
        self._record()

    def __len__(self) -> int:
        return len(self.tensors)

    def _tell_apart(self) -> None:
        """Which containers are compared whole, and which places one by one.

        Comparing two dicts looks at identity first, all in C, and asks a tensor's `==` only where the objects differ;
        that cannot be trusted for tensors of one element, whose `==` can be true of another tensor.
        """
        self._dicts: list[dict[Any, Any]] = []
        self._copies: list[dict[Any, Any]] = []
        self._large: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []  # and keys and values: lists compare faster
        self._singles: list[tuple[Any, Any]] = []
        self._single_objects: list[object] = []
        whole: set[int] = set()
        for (container, key), item in zip(self._slots, self._objects, strict=True):
            if type(container) is dict and all(
                isinstance(v, (Tensor, torch.nn.Module, types.NoneType)) for v in container.values()
            ):
                if id(container) not in whole:
                    whole.add(id(container))
                    if len(container) > _SMALL:
                        self._large.append((container, list(container), list(container.values())))
                    else:
                        self._dicts.append(container)
                        self._copies.append(dict(container))
                if not isinstance(item, Tensor) or item.numel() != 1:
                    continue
            if type(container) is not tuple:  # a tuple cannot be rebound inside; whoever holds it is watched
                self._singles.append((container, key))
                self._single_objects.append(item)

    def _record(self) -> None:
        """Addresses, and torch's own guards of dtype, device, sizes and strides: each compared in one call."""
        tensors = self._tensors
        self._addresses: list[int] = list(map(_address, tensors))
        self._layouts = list(map(_layout, tensors))
        self._guards = guards(tensors)

    def check(self) -> None:
        """Compare. Raises StaleError naming the first tensor that is not where it was; nothing was launched."""
        if not self._is_kept():
            raise self._stale()
        if list(map(_address, self._tensors)) != self._addresses:
            raise self._stale()
        if not self._guards.check(*self._tensors):
            if list(map(_layout, self._tensors)) != self._layouts:
                raise self._stale()
            self._record()  # the guards also look at requires_grad, which a graph does not care about

    def accept(self, tensors: Iterable[Tensor]) -> None:
        """These lie elsewhere from now on, in the layout that they had: what was captured has been told so."""
        moved = {id(tensor) for tensor in tensors}
        for place, tensor in enumerate(self._tensors):
            if id(tensor) in moved:
                self._addresses[place] = tensor.data_ptr()

    def _is_kept(self) -> bool:
        """Whether every place holds the object that it held."""
        try:
            if self._dicts != self._copies or not all(itertools.starmap(_holds, self._large)):
                return False
            now = [container[key] for container, key in self._singles]
        except (KeyError, ValueError, IndexError, RuntimeError):  # deleted, an emptied cell, or tensors that differ
            return False
        return all(map(operator.is_, now, self._single_objects))

    def _stale(self) -> StaleError:
        """Which one, and how: the slow path."""
        hint = "copy into it in place (tensor.copy_), or warm up again"
        for name, (container, key), was in zip(self._names, self._slots, self._objects, strict=True):
            now = _get(container, key)
            if now is not was:
                kind = "was deleted" if now is _MISSING else "was rebound to another object"
                return StaleError(
                    f"{name} {kind} after it was captured", given=_describe(now), expected=_describe(was), hint=hint
                )
        place = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        for name, tensor in self.tensors.items():
            address, layout = self._addresses[place[id(tensor)]], self._layouts[place[id(tensor)]]
            if (tensor.data_ptr(), _layout(tensor)) != (address, layout):
                shape, stride, dtype, device = layout
                return StaleError(
                    f"{name} was moved, resized or freed after it was captured",
                    given=f"{_describe(tensor)} strides {tensor.stride()} at {tensor.data_ptr():#x}",
                    expected=f"{list(shape)} {dtype} on {device} strides {stride} at {address:#x}",
                    hint=hint,
                )
        return StaleError("a captured tensor changed while it was being compared", hint="do not rebind during a call")


def _holds(container: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    """Whether a dict is what it was, in whatever order."""
    with suppress(RuntimeError):  # another tensor has another place in the list
        if list(container.values()) == values and list(container) == keys:
            return True
    return container == dict(zip(keys, values, strict=True))


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _get(container: Any, key: Any) -> object:
    try:
        found: object = container[key]
    except (KeyError, ValueError, IndexError):
        return _MISSING
    return found


def _describe(item: object) -> str:
    if item is _MISSING:
        return "nothing"
    if isinstance(item, Tensor):
        return f"{list(item.shape)} {item.dtype} on {item.device}"
    return type(item).__name__


class _Attribute:
    """What a closure cell or a slotted object holds, as a container of one item."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read

    def __getitem__(self, key: object) -> object:
        return self._read()


def _places(item: object, name: str, seen: set[int], depth: int = 0) -> Iterator[Place]:
    """Every tensor that `item` reaches, and every link on the way: replacing a link leaves the tensors in place."""
    if id(item) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(item))
    for key, container, index in _links(item, name):
        found = _get(container, index)
        if isinstance(found, Tensor):
            yield key, container, index
        elif _is_walked(found):
            below = list(_places(found, key, seen, depth + 1))
            if below or isinstance(found, torch.nn.Module):
                yield key, container, index
                yield from below


def _links(item: object, name: str) -> Iterator[Place]:
    """(name, container, key) of what `item` directly holds, by what it is."""
    prefix = f"{name}." if name else ""
    if isinstance(item, torch.nn.Module):
        for held in (item._parameters, item._buffers, item._modules):
            yield from ((f"{prefix}{key}", held, key) for key in held)
    if isinstance(item, types.MethodType):
        yield from _links(item.__self__, name)
    elif isinstance(item, functools.partial):
        yield from _links((item.func, *item.args), name)
        yield from ((f"{prefix}{key}", item.keywords, key) for key in item.keywords)
    elif isinstance(item, types.FunctionType):
        for key, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            yield f"{prefix}{key}", _Attribute(functools.partial(getattr, cell, "cell_contents")), None
        names = (key for key in item.__code__.co_names if key in item.__globals__)
        yield from ((f"{prefix}{key}", item.__globals__, key) for key in names)
    elif isinstance(item, (list, tuple)):
        yield from ((f"{name}[{index}]", item, index) for index in range(len(item)))
    elif isinstance(item, dict):
        yield from ((f"{name}[{key!r}]", item, key) for key in item)
    elif hasattr(item, "__dict__"):
        yield from ((f"{prefix}{key}", vars(item), key) for key in vars(item) if key not in _MODULE_OWN)


_MAX_DEPTH = 12
_MODULE_OWN = frozenset(vars(torch.nn.Module()))  # a module's bookkeeping; its parameters were listed by themselves
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


def _is_walked(item: object) -> bool:
    """Whether an object may hold tensors of the function's own: not a class, a library's module or a plain value."""
    if item is None or isinstance(item, _LEAVES):
        return False
    if isinstance(item, (list, tuple, dict, torch.nn.Module, types.MethodType, functools.partial)):
        return True
    if isinstance(item, types.FunctionType):
        return not item.__module__.startswith(("torch", "triton"))
    return hasattr(item, "__dict__") and not type(item).__module__.startswith(("torch", "triton", "numpy", "threading"))
