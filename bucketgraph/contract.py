"""What a captured executable reads by address, compared with what is there now, before every launch.

A graph reads weights and buffers where they were when it was recorded. In-place updates are seen; a tensor that was
rebound, resized, moved or freed is not, and the graph would go on with the old memory. So every place that holds such a
tensor is remembered with its object, address and shape, and all of them are compared on each call: a few list
comparisons in C. Places are found in modules (parameters, buffers, submodules), in the attributes of the object that a
method is bound to, in a function's closure and globals, and in a mapping that the caller names.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bucketgraph.errors import StaleError

_address = torch.Tensor.data_ptr
_shape = operator.attrgetter("shape")
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
        self._tensors = [tensor for _, tensor in held]
        self._addresses = list(map(_address, self._tensors))
        self._shapes = list(map(_shape, self._tensors))
        self._kinds = [(tensor.dtype, tensor.device) for tensor in self._tensors]

    def __len__(self) -> int:
        return len(self._tensors)

    def check(self) -> None:
        """Compare. Raises StaleError naming the first tensor that is not where it was; nothing was launched."""
        try:
            now = [container[key] for container, key in self._slots]
        except (KeyError, ValueError, IndexError):  # deleted; ValueError is an emptied closure cell
            raise self._stale() from None
        if not all(map(operator.is_, now, self._objects)) or list(map(_address, self._tensors)) != self._addresses:
            raise self._stale()
        if list(map(_shape, self._tensors)) != self._shapes:
            raise self._stale()

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
        rows = zip(self.tensors.items(), self._addresses, self._shapes, self._kinds, strict=True)
        for (name, tensor), address, shape, (dtype, device) in rows:
            if (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device) != (address, shape, dtype, device):
                return StaleError(
                    f"{name} was moved, resized or freed after it was captured",
                    given=f"{_describe(tensor)} at {tensor.data_ptr():#x}",
                    expected=f"{list(shape)} {dtype} on {device} at {address:#x}",
                    hint=hint,
                )
        return StaleError("a captured tensor changed while it was being compared", hint="do not rebind during a call")


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
