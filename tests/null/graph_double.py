"""Graphs that can be bound, without a GPU: a manager on the CPU whose captures become graphs of the driver's double.

Kernels of tests act on real tensors by address. While a function is captured its kernels and copies become nodes and
nothing runs, so what a replay computes shows which addresses the executable really holds.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from null.driver_double import Captured, DriverDouble, Kernel, Memory, int32, pointer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bucketgraph import binding, executables, manager
from bucketgraph.binding.graph import MovableGraph
from bucketgraph.buckets import Bucket
from bucketgraph.cuda.driver import KernelAttributes
from bucketgraph.executables.cudagraph import CudaGraph
from bucketgraph.slots import Arena, Slot


class HostMemory(Memory):
    """The process's own."""

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))


class Replayable(Captured):
    def __init__(self, device: Device, graph: int) -> None:
        super().__init__(device.driver, graph)
        self._device = device

    def replay(self) -> None:
        if self._device.lock is not None:
            assert self._device.lock._is_owned(), "launched without the lock"
        self._driver.launch(self.raw_cuda_graph_exec(), 0)


class _Copies(TorchDispatchMode):
    """Copies as nodes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, source = args[:2]
            size = into.numel() * into.element_size()
            graph = self._device.recording
            self._device.driver.memcpy(graph, source.data_ptr(), into.data_ptr(), size)
            return into
        return func(*args, **(kwargs or {}))


class Device:
    """What functions of tests call: `launch` a kernel, and `empty` memory of the pool."""

    def __init__(self) -> None:
        self.driver = DriverDouble()
        self.driver.memory = HostMemory()
        self.recording = 0
        self.captures = 0
        self.attributes = KernelAttributes()
        self.lock: Any = None
        self._pool: list[Tensor] = []
        self._next = 0
        self.add = self.driver.load(Kernel("_add", (8, 8, 8, 4), self._add))
        self.peek = self.driver.load(Kernel("_peek", (8, 8, 8, 4), self._peek))

    def launch(self, kernel: int, x: Tensor, y: Tensor, out: Tensor) -> None:
        values = [*(pointer(t.data_ptr()) for t in (x, y, out)), int32(out.numel())]
        if self.recording:
            self.driver.kernel(self.recording, kernel, values, attributes=self.attributes)
        else:
            self.driver.kernels[kernel].run(self.driver.memory, values)

    def empty(self, *shape: int) -> Tensor:
        """Where the pool has room; in each capture from its start, since earlier results were dropped."""
        if not self.recording:
            return torch.zeros(shape)
        if self._next == len(self._pool):
            self._pool.append(torch.zeros(4096))
        self._next += 1
        size = torch.Size(shape).numel()
        return self._pool[self._next - 1][:size].view(shape)

    @contextmanager
    def record(self) -> Iterator[int]:
        self.recording, self._next, self.captures = self.driver.graph(), 0, self.captures + 1
        try:
            with _Copies(self):
                yield self.recording
        finally:
            self.recording = 0

    @staticmethod
    def _add(memory: Memory, values: Sequence[bytes]) -> None:
        x, y, out = (struct.unpack("<Q", value)[0] for value in values[:3])
        form = f"<{struct.unpack('<i', values[3])[0]}f"
        size = struct.calcsize(form)
        pairs = zip(struct.unpack(form, memory.read(x, size)), struct.unpack(form, memory.read(y, size)), strict=True)
        memory.write(out, struct.pack(form, *(a + b for a, b in pairs)))

    @staticmethod
    def _peek(memory: Memory, values: Sequence[bytes]) -> None:
        """out = x + *y[0]: `y` is a table of addresses in device memory."""
        table = struct.unpack("<Q", values[1])[0]
        Device._add(memory, [values[0], memory.read(table, 8), *values[2:]])


class StagedArena(Arena):
    """With staging buffers, as on a GPU, whose copies are over at once."""

    def __init__(
        self, slots: Sequence[Slot], buckets: Sequence[Bucket], device: torch.device, copies: int = 2, byte: int = 0
    ) -> None:
        super().__init__(slots, buckets, device)
        self.staging = tuple(torch.full_like(self.device_bytes, byte) for _ in range(copies))
        self.filled = [None] * copies
        self.events = Recorded(), Recorded()
        self._copied = self.events  # type: ignore[assignment]
        self._stream = lambda: (0, None)  # type: ignore[assignment, return-value]


class Recorded:
    """An event that only notes what happens to it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def synchronize(self) -> None:
        self.seen.append("wait")

    def record(self, stream: object) -> None:
        self.seen.append("record")


def graphs_on(device: Device, monkeypatch: pytest.MonkeyPatch, staged: bool = False) -> None:
    """Managers on the CPU capture on `device` from now on."""

    class Double(MovableGraph):
        def _record(self, at: Mapping[str, Tensor]) -> tuple[Any, Any]:
            with device.record() as graph:
                raw = self._run(at)
            return Replayable(device, graph), raw

        def _synchronize(self) -> None:
            pass

    def warm(self: CudaGraph) -> None:
        self._fn(**self._inputs)

    def capture(self: CudaGraph) -> None:
        with device.record() as graph:
            self._outputs = self._fn(**self._inputs)
        self._graph = Replayable(device, graph)  # type: ignore[assignment]
        self._graph.instantiate()

    monkeypatch.setattr(executables, "resolve", lambda kind, where: "cudagraph")
    monkeypatch.setattr(CudaGraph, "warm", warm)
    monkeypatch.setattr(CudaGraph, "capture", capture)
    for module in (binding, binding.state):
        monkeypatch.setattr(module, "MovableGraph", Double)
    load: Callable[[], Any] = lambda: device.driver  # noqa: E731
    monkeypatch.setattr(binding.graph, "load_driver", load)
    if staged:
        monkeypatch.setattr(manager, "Arena", StagedArena)
