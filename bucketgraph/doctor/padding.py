"""What padding changes: a call run on exactly its inputs and padded to a bucket must agree in the real part.

One axis at a time, the others full. Where the results differ, both runs are compared operation by operation: whatever
differs in its real part, and by far more than its inputs did, mixes real rows with padding, and its line is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketgraph import selfcheck
from bucketgraph.buckets import Bucket, Lattice
from bucketgraph.config import PhaseSpec
from bucketgraph.doctor import places
from bucketgraph.doctor.compare import difference, real_difference, tolerance
from bucketgraph.doctor.record import Finding
from bucketgraph.doctor.workload import told
from bucketgraph.errors import ConfigError
from bucketgraph.slots import Arena, Outputs, Slot, StaticInputs, unpad

_MOST = 5  # operations named for one axis
_ROUNDING = 0.3  # of the largest value: what rounding in a deep model may add up to
_SAME = ("aten::detach", "aten::alias", "aten::lift_fresh")  # torch's own, which come and go
_JUMP = 10.0  # less is what an operation makes of its inputs' rounding
# Of torch's own modules, those whose training mode differs.
_MODAL = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)
# How users call what torch dispatches.
_NAMES = {
    "native_group_norm": "group norm",
    "native_layer_norm": "layer norm",
    "_softmax": "softmax",
    "_log_softmax": "log softmax",
    "bernoulli_": "dropout",
    "native_dropout": "dropout",
}


@dataclass(frozen=True)
class _Case:
    """An axis padded from `real` to `padded`, in a bucket whose other axes are full."""

    axis: str
    real: int
    padded: int
    bucket: Bucket

    @property
    def sizes(self) -> dict[str, int]:
        return {**self.bucket.as_dict(), self.axis: self.real}

    def __str__(self) -> str:
        return f"{self.axis} padded from {self.real} to {self.padded}"


def check(
    fn: Callable[..., Any],
    spec: PhaseSpec,
    device: torch.device,
    examples: Mapping[str, Tensor] | None = None,
    module: torch.nn.Module | None = None,
) -> tuple[list[Finding], list[str]]:
    """What mixes real rows with padding, and notes on what could not be checked.

    Args:
        examples: real inputs of the size that `spec` leaves room for; None draws them.
        module: what `fn` runs, if it is a function around one.

    Raises:
        ConfigError: the function returns other outputs than the set declares.
    """
    module = fn if isinstance(fn, torch.nn.Module) else module
    findings = [] if module is None else _training(module)
    notes = []
    for axis in spec.lattice().names:
        case = _case(spec.lattice(), axis)
        if case is None:
            notes.append(f"padding along {axis} was not checked: it has one size, 1")
            continue
        try:
            made = _Axis(fn, spec, case, device, module).check(examples)
        except ConfigError:
            raise
        except Exception as error:
            place = places.of_error(error)
            where = f" at {place}" if place else ""
            notes.append(f"padding along {axis} was not checked: with {case} the call fails: {told(error)}{where}")
            continue
        findings += made
        if not made:
            notes.append(f"padding along {axis} changes nothing: {case} gave the unpadded results")
    return findings, notes


def _training(module: torch.nn.Module) -> list[Finding]:
    modules = [
        (path or "the module", type(part).__name__)
        for path, part in module.named_modules()
        if part.training and (isinstance(part, _MODAL) or not type(part).__module__.startswith("torch.nn."))
    ]
    if not modules:
        return []
    names = ", ".join(f"{path} ({kind})" for path, kind in modules[:_MOST]) + (", ..." if len(modules) > _MOST else "")
    return [Finding("training", "suspect", "training mode", None, 1, names)]


def _case(lattice: Lattice, axis: str) -> _Case | None:
    """The smallest bucket with room along the axis for two real rows and one of padding; else one real row."""
    sizes = next(each.sizes for each in lattice.axes if each.name == axis)
    for least in (2, 1):
        for bucket in sorted(lattice.buckets, key=lambda bucket: prod(bucket.sizes)):
            padded = bucket.as_dict()[axis]
            below = max((size for size in sizes if size < padded), default=0)
            real = max(least, padded - (padded - below) // 2)
            if real < padded:
                return _Case(axis, real, padded, bucket)
    return None


@dataclass(frozen=True)
class _Axis:
    """The check of one axis."""

    fn: Callable[..., Any]
    spec: PhaseSpec
    case: _Case
    device: torch.device
    module: torch.nn.Module | None

    def check(self, examples: Mapping[str, Tensor] | None) -> list[Finding]:
        case, spec = self.case, self.spec
        slots = tuple(Slot.from_spec(name, item) for name, item in spec.inputs.items())
        random = selfcheck.generator(case.bucket)
        inputs = examples or {slot.name: slot.example(case.sizes, random) for slot in slots}
        static = StaticInputs(slots, case.bucket, Arena(slots, [case.bucket], self.device))
        static.fill(inputs)
        exact = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        want, got = self._run(exact), self._run(static.views)
        Outputs(spec.outputs, "cloned").check(got, case.bucket)
        wrong, worst = [], 0.0
        for name, item in spec.outputs.items():
            error = difference(unpad(got[name], item.shape, case.sizes), want[name])
            if item.check and not error <= tolerance(want[name]):
                amount = "entirely" if error == float("inf") else f"by {error:.1e} of its largest value"
                wrong.append(f"output {name} changes {amount}")
                worst = max(worst, error)
        if not wrong:
            return []
        recorded = _Recorded()
        with recorded:
            self._run(exact)
        compared = _Compared(case, recorded.outputs)
        with compared:
            self._run(static.views)
        return compared.findings(f"with {case}, {' and '.join(wrong)}", worst)

    def _run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The declared outputs, with the same random numbers and the same buffers in every run."""
        buffers = [] if self.module is None else list(self.module.buffers())
        held = [buffer.clone() for buffer in buffers]
        gpus = [] if self.device.type == "cpu" else [self.device]
        with torch.no_grad(), torch.random.fork_rng(gpus):
            torch.manual_seed(0)
            try:
                return Outputs(self.spec.outputs, "cloned").select(self.fn(**given))
            finally:
                for buffer, before in zip(buffers, held, strict=True):
                    buffer.copy_(before)


class _Recorded(TorchDispatchMode):
    """Name and results of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name not in _SAME:
            self.outputs.append((func._schema.name, [tensor.clone() for tensor in _tensors(result)]))
        return result


class _Compared(TorchDispatchMode):
    """The padded run, each operation compared with the unpadded run's."""

    def __init__(self, case: _Case, recorded: Sequence[tuple[str, list[Tensor]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._case, self._recorded, self._next = case, recorded, 0
        self._parted = False  # the two runs do not take the same operations
        self._other_path: places.Place | None = None
        self._mixers: Counter[tuple[str, places.Place | None]] = Counter()
        self._errors: dict[int, float] = {}  # of the real part, by storage
        # Or an address could be used again. Not the tensors: torch detaches a result that someone else holds.
        self._alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _tensors((args, kwargs or {}))
        before = max((self._errors.get(_storage(tensor), 0.0) for tensor in inputs), default=0.0)
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not self._parted and name not in _SAME:
            self._compare(name, _tensors(result), before)
        return result

    def _compare(self, name: str, results: Sequence[Tensor], before: float) -> None:
        if self._next >= len(self._recorded) or self._recorded[self._next][0] != name:
            self._parted, self._other_path = True, places.here()
            return
        _, wanted = self._recorded[self._next]
        self._next += 1
        if "empty" in name:  # nobody has written there yet
            return
        worst = 0.0
        for got, want in zip(results, wanted, strict=False):
            self._alive.append(got.untyped_storage())
            error = real_difference(got, want, self._case.real, self._case.padded) or 0.0
            self._errors[_storage(got)] = max(self._errors.get(_storage(got), 0.0), error)
            if error > tolerance(want):
                worst = max(worst, error)
        if worst > _JUMP * before:
            short = name.removeprefix("aten::")
            called = "batch norm" if "batch_norm" in short else _NAMES.get(short, short)  # one of many, by library
            self._mixers[called, places.here()] += 1

    def findings(self, effect: str, worst: float) -> list[Finding]:
        """What was met, in that order; `worst` is the largest error of an output."""
        if self._mixers:
            met = list(self._mixers.items())[:_MOST]
            return [Finding("mixes", "padding", op, place, count, effect) for (op, place), count in met]
        if self._parted:
            return [Finding("path", "padding", "another path of the code", self._other_path, 1, effect)]
        severity: Literal["suspect", "padding"] = "suspect" if worst <= _ROUNDING else "padding"
        return [Finding("unfound", severity, "no operation that mixes rows was found", None, 1, effect)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
