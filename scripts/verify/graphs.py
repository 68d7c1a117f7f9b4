"""Stand-in graphs for machines without a GPU, and the small functions that checks of the core run.

A stand-in does what makes graphs dangerous: it reads the tensors that were there when it was captured, writes its
results into memory of its own on every replay, and runs over static inputs that somebody else may be filling.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bucketgraph import BucketManager, executables
from bucketgraph.config import BucketSet, parse
from bucketgraph.executables import Family
from bucketgraph.executables.eager import Eager

from .core import Setting

capturing = False  # what torch.cuda.is_current_stream_capturing says on a GPU
WIDTH = 8


class StandIn(Eager):
    """Behaves like a graph as far as memory goes."""

    kind = "cudagraph"

    def warm(self) -> None:
        self._call()

    def capture(self) -> None:
        global capturing
        capturing = True
        try:
            if isinstance(self._fn, nn.Module):
                self._fn = _bound(self._fn)
            self._static = _tensors(self._call())
        finally:
            capturing = False

    def replay(self) -> Any:
        halfway()
        for static, new in zip(self._static, _tensors(self._call()), strict=True):
            static.copy_(new)
        return self._static

    def _call(self) -> Any:
        return self._fn(**self._inputs)


def _bound(module: nn.Module) -> nn.Module:
    """The module as it is now, over the same memory: what is rebound in the original later is not seen here."""
    memory: dict[int, Any] = {}
    for part in module.modules():
        for tensor in [*part.parameters(False), *part.buffers(False), *vars(part).values()]:
            if isinstance(tensor, nn.Parameter):
                memory[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
            elif isinstance(tensor, Tensor):
                memory[id(tensor)] = tensor.detach()
    return copy.deepcopy(module, memory)


def _nothing() -> None:
    """Replaced by checks that let another thread in between fill and replay."""


hook: list[Callable[[], None]] = [_nothing]


def halfway() -> None:
    hook[0]()


def _tensors(raw: Any) -> list[Tensor]:
    found = [raw] if isinstance(raw, Tensor) else list(raw.values()) if isinstance(raw, Mapping) else list(raw)
    return [tensor.clone() for tensor in found]


@contextlib.contextmanager
def graphs(setting: Setting) -> Iterator[None]:
    """Managers made inside capture: real graphs on a GPU, stand-ins elsewhere."""
    if setting.on_gpu:
        yield
        return

    def make(kind: str, fn: Callable[..., Any], inputs: Mapping[str, Tensor], family: Family) -> StandIn:
        return StandIn(fn, inputs)

    with (
        mock.patch.object(executables, "make", make),
        mock.patch.object(executables, "resolve", lambda kind, device: "cudagraph"),
    ):
        yield


class Rows(nn.Module):
    """Row-wise and exact: whole numbers, so that no grouping of a sum rounds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randint(-8, 9, shape, generator=generator).float()  # noqa: E731
        self.weight = nn.Parameter(draw(WIDTH), requires_grad=False)
        self.shift = nn.Parameter(draw(1), requires_grad=False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.inner[0].weight.data, self.inner[0].bias.data = draw(WIDTH, WIDTH), draw(WIDTH)
        self.register_buffer("scale", draw(WIDTH))
        self.table = draw(WIDTH)  # not registered, and read all the same
        self.requires_grad_(False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.weight + self.scale) + self.shift + self.table


def rows(setting: Setting) -> Rows:
    module = Rows().to(setting.device)
    module.table = module.table.to(setting.device)
    return module


def rows_set(**changed: Any) -> BucketSet:
    made: dict[str, Any] = {
        "version": 1,
        "name": "rows",
        "axes": {"batch": [1, 2, 4, 8, 16]},
        "inputs": {"x": {"shape": ["batch", WIDTH], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", WIDTH]}},
    }
    return parse({**made, **changed})


def served(setting: Setting, module: nn.Module | None = None, **changed: Any) -> BucketManager:
    """A warm manager on graphs."""
    with graphs(setting):
        manager = BucketManager(module or rows(setting), rows_set(**changed), device=setting.device)
        report = manager.warmup()
    assert report.ok, [bucket.error for bucket in report.failed]
    return manager


def whole_numbers(setting: Setting, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (count, WIDTH), generator=generator).float().to(setting.device)
