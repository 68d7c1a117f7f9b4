"""What keeps a call out of a graph, by operation and line: seen while the call runs eagerly under two torch modes.

Rules: on a GPU, what waits for it or copies between it and host memory is told by devices; on a CPU nothing does, so
what would is told by what was asked for, as if every tensor were on a GPU. Torch's sync debug mode then adds waits that
neither mode can see. What a Triton kernel does is not looked at: it cannot block a capture, but its compile does.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketgraph.doctor import places
from bucketgraph.doctor.places import Place
from bucketgraph.doctor.record import Finding

# Operations whose result has a size that only the data say: the host must read it.
_SHAPED = {
    "aten::nonzero": "torch.nonzero",
    "aten::masked_select": "torch.masked_select",
    "aten::_unique": "torch.unique",
    "aten::_unique2": "torch.unique",
    "aten::unique_dim": "torch.unique",
    "aten::unique_consecutive": "torch.unique_consecutive",
    "aten::unique_dim_consecutive": "torch.unique_consecutive",
    "aten::bincount": "torch.bincount",
}
# Those that read a value on the host.
_READ = {
    "aten::_local_scalar_dense": ".item()",
    "aten::equal": "torch.equal",
    "aten::_linalg_check_errors": "error check of torch.linalg",
}
_FETCH = ("cpu", "tolist", "numpy", "__array__")  # methods that bring a tensor to the host
_FROM_HOST = ("tensor", "as_tensor", "from_numpy", "asarray", "new_tensor")
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm")
_NEW = frozenset((*_FACTORIES, "zeros"))
_BRANCH = re.compile(r"(if|elif|while|assert)\b|.*\sif\s.*\selse\s")
_SYNCS = ("read", "branch", "shape", "fetch", "sync")  # kinds that wait for the GPU


@dataclass
class Watched:
    """What one call did."""

    ops: int = 0  # operations that torch dispatched
    devices: set[str] = field(default_factory=set)  # kinds of the tensors in them
    seen: Counter[tuple[str, str, str, Place | None, str]] = field(default_factory=Counter)
    twins: bool = False  # our kernels' plain-torch twins ran, which are left out

    def note(self, kind: str, severity: str, op: str, detail: str = "") -> None:
        place = places.here()
        if place is not None and place.is_twin:
            self.twins = True
            return
        if kind == "read" and place is not None and _BRANCH.match(place.code):
            kind = "branch"
        self.seen[kind, severity, op, place, detail] += 1

    def findings(self) -> tuple[Finding, ...]:
        """In the order they were met; of two that tell the same of one line, the one that says more."""
        made: dict[tuple[Place | None, str], Finding] = {}
        better = {"upload": "host_data", "sync": "", "host_tensor": "host_data"}
        kinds: dict[Place | None, set[str]] = {}
        for kind, _, _, place, _ in self.seen:
            kinds.setdefault(place, set()).add(kind)
        for (kind, severity, op, place, detail), count in self.seen.items():
            others = kinds[place] - {kind}
            if better.get(kind) in others or (kind == "sync" and others and place is not None):
                continue
            made[place, kind + op] = Finding(kind, severity, op, place, count, detail)  # type: ignore[arg-type]
        return tuple(made.values())


def is_sync(finding: Finding) -> bool:
    """Whether the host waits for the GPU there."""
    return finding.kind in _SYNCS


def watch(call: Callable[[], object], device: torch.device) -> Watched:
    """Run the call once, warm, and see what would not be captured."""
    watched = Watched()
    with ExitStack() as modes:
        if device.type == "cuda":
            modes.enter_context(_sync_debug(watched))
        modes.enter_context(_Functions(watched, device))
        modes.enter_context(_Dispatched(watched, device))
        call()
    return watched


class _Functions(TorchFunctionMode):
    """What the call asks torch for: on a CPU, copies between devices are seen only here."""

    def __init__(self, watched: Watched, device: torch.device) -> None:
        super().__init__()
        self._watched, self._device = watched, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _FROM_HOST:
            self._from_host(name, args, result)
        elif name in _NEW and args and isinstance(result, Tensor) and not _tensors(args, kwargs):
            self._made(name, kwargs, result)
        elif self._device.type == "cpu":
            to_host = name == "to" and ("cpu" in args[1:] or kwargs.get("device") == "cpu")
            if name in _FETCH or to_host:
                self._watched.note("fetch", "blocks", f'.{name}("cpu")' if to_host else f".{name}()")
        return result

    def _from_host(self, name: str, args: Any, result: Any) -> None:
        if not isinstance(result, Tensor) or (args and isinstance(args[0], Tensor) and name != "new_tensor"):
            return
        op = f".{name}" if name == "new_tensor" else f"torch.{name}"
        if self._device.type == "cpu" or result.is_cuda:
            self._watched.note("host_data", "blocks", op)
        else:
            self._watched.note("host_tensor", "suspect", op)

    def _made(self, name: str, kwargs: Any, result: Tensor) -> None:
        if result.is_cpu and (self._device.type == "cuda" or kwargs.get("device") is None):
            self._watched.note("host_tensor", "suspect", f"torch.{name}")


class _Dispatched(TorchDispatchMode):
    """Every operation, below autograd: reads of values, sizes that data say, copies between devices."""

    def __init__(self, watched: Watched, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched, self._device = watched, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _tensors(args, kwargs)
        result = func(*args, **kwargs)
        self._watched.ops += 1
        self._watched.devices.update(tensor.device.type for tensor in (*before, *_tensors(result)))
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            source = before[-1] if name == "aten::copy_" else before[0]
            self._copied(source, result, bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
        elif any(tensor.device.type == self._device.type for tensor in before):
            self._looked_at(name, args, kwargs)
        return result

    def _looked_at(self, name: str, args: Any, kwargs: Any) -> None:
        if name in _READ:
            self._watched.note("read", "blocks", _READ[name])
        elif name in _SHAPED:
            self._watched.note("shape", "blocks", _SHAPED[name])
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self._watched.note("shape", "blocks", "torch.repeat_interleave without output_size")
        elif name in ("aten::index", "aten::index_put_", "aten::index_put"):
            masks = [
                index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            ]
            # One value under one mask is a masked fill, which needs no sizes.
            filled = name != "aten::index" and len(args[1]) == 1 and args[2].numel() == 1
            if masks and not filled:
                self._watched.note("shape", "blocks", "indexing with a mask")

    def _copied(self, source: Tensor, result: Tensor, non_blocking: bool) -> None:
        if source.is_cuda and result.is_cpu:
            if not (non_blocking and result.is_pinned()):
                self._watched.note("fetch", "blocks", "copy from the GPU to the host")
        elif source.is_cpu and result.is_cuda:
            if not source.is_pinned():
                self._watched.note("upload", "blocks", "copy from unpinned host memory")
            else:
                self._watched.note("upload_pinned", "suspect", "copy from pinned host memory")


@contextmanager
def _sync_debug(watched: Watched) -> Iterator[None]:
    """Torch warns of each wait while the user's line is on the stack."""

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            watched.note("sync", "blocks", "wait for the GPU")
        else:
            earlier(message, category, filename, lineno, *rest)

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype.*")
        earlier, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def compiling(watched: Watched, kind: str, severity: str) -> Iterator[None]:
    """Note what Triton and torch.compile compile inside the block, with the line that asked for it.

    Not under `watch`: with modes on, torch.compile leaves its work, or does it again.
    """
    try:
        from triton import knobs
    except ImportError:  # no Triton here, so it compiles nothing
        knobs = None
    frames = _compiled_frames()
    earlier = knobs.runtime.jit_post_compile_hook if knobs is not None else None

    def hook(*args: Any, **kwargs: Any) -> Any:
        watched.note(kind, severity, f"compile of {getattr(kwargs.get('fn'), 'name', 'a Triton kernel')}")
        return earlier(*args, **kwargs) if earlier is not None else None

    if knobs is not None:
        knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        if knobs is not None:
            knobs.runtime.jit_post_compile_hook = earlier
        if more := _compiled_frames() - frames:
            watched.seen[kind, severity, f"torch.compile of {more} graphs", None, ""] += 1


def _compiled_frames() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]
