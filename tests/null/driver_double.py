"""A CUDA driver without a GPU: graphs, nodes, parameter bytes in real host memory, executables, and memory they act on.

It copies arguments during an update, by the kernel's own layout, as a driver does; refuses nodes of other
graphs, another context and whatever `refuse` says; and a launch runs the kernels, so that results show which bytes an
executable really holds. `Graph` objects of `Captured` stand for torch's.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from bucketgraph.cuda import Graph, Moved
from bucketgraph.cuda.driver import (
    Dim3,
    DriverError,
    Edge,
    KernelAttributes,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
)
from bucketgraph.cuda.memory import Region

INVALID_VALUE, INVALID_HANDLE, NOT_SUPPORTED = 1, 400, 801
CONTEXT = 0xC0
BASE = 0x7F00_0000_0000


class Memory:
    """Device memory: bytes from BASE on."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.bytes = bytearray(size)

    def read(self, address: int, size: int) -> bytes:
        start = address - BASE
        assert 0 <= start <= len(self.bytes) - size, f"illegal address 0x{address:x}"
        return bytes(self.bytes[start : start + size])

    def write(self, address: int, data: bytes) -> None:
        self.read(address, len(data))
        self.bytes[address - BASE : address - BASE + len(data)] = data


@dataclass
class Kernel:
    """A loaded kernel. `run` gets the memory and the parameters' bytes."""

    symbol: str
    sizes: tuple[int, ...]
    run: Callable[[Memory, Sequence[bytes]], None] = lambda memory, values: None
    aligned: int = 8  # of its parameters

    @property
    def layout(self) -> list[tuple[int, int]]:
        made, offset = [], 0
        for size in self.sizes:
            unit = min(size, self.aligned) if size < 64 else 64 if size == 128 else 8
            offset = -(-offset // unit) * unit
            made.append((offset, size))
            offset += size
        return made


@dataclass
class NodeData:
    kind: NodeKind
    params: Any = None
    values: list[bytes] = field(default_factory=list)
    attributes: KernelAttributes = KernelAttributes()  # noqa: RUF009 (frozen)
    kept: Any = None  # the host memory that `params.arguments` points into
    enabled: bool = True


class DriverDouble:
    """`Driver`. Handles are small numbers, each used once."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.kernels: dict[int, Kernel] = {}
        self.graphs: dict[int, list[int]] = {}
        self.node_data: dict[int, NodeData] = {}
        self.edge_list: dict[int, list[Edge]] = {}
        self.executables: dict[int, dict[int, NodeData]] = {}  # its own copy of each node
        self.sets: list[tuple[int, int]] = []  # executable and node of each update, in order
        self.launches: list[tuple[int, int]] = []
        self.refuse: Callable[[int, int], int] = lambda executable, node: 0  # an error code for an update
        self.early_bodies = True  # whether bodies of loops may have programmatic edges
        self.conditions: dict[int, bool] = {}  # set by kernels while a loop runs
        self.modules: list[tuple[str, str]] = []  # source and architecture of each
        self._handles = count(0x1000, 8)

    # -- what a test builds ------------------------------------------------------------------------------------------

    def load(self, kernel: Kernel) -> int:
        handle = next(self._handles)
        self.kernels[handle] = kernel
        return handle

    def graph(self) -> int:
        handle = next(self._handles)
        self.graphs[handle], self.edge_list[handle] = [], []
        return handle

    def add(self, graph: int, data: NodeData, after: Sequence[int] | None = None, programmatic: bool = False) -> int:
        """Add a node behind `after`, or behind the last one."""
        handle = next(self._handles)
        before = self.graphs[graph][-1:] if after is None else after
        self.edge_list[graph] += [Edge(each, handle, programmatic) for each in before]
        self.graphs[graph].append(handle)
        self.node_data[handle] = data
        return handle

    def kernel(
        self,
        graph: int,
        function: int,
        values: Sequence[bytes],
        *,
        grid: Dim3 = (4, 1, 1),
        attributes: KernelAttributes | None = None,
        as_kernel: bool = False,
        **placed: Any,
    ) -> int:
        """A launch; its arguments lie in host memory that belongs to the node."""
        assert [len(value) for value in values] == list(self.kernels[function].sizes), "arguments fit the kernel"
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, buffers))
        handles = (0, function) if as_kernel else (function, 0)
        params = KernelParams(*handles, CONTEXT, grid, (128, 1, 1), 0, ctypes.addressof(pointers))
        data = NodeData("kernel", params, list(values), attributes or KernelAttributes(), (buffers, pointers))
        return self.add(graph, data, **placed)

    def memcpy(self, graph: int, source: int, destination: int, size: int, **changed: Any) -> int:
        params = MemcpyParams(source, destination, "unified", "unified", size, 1, 1)
        return self.add(graph, NodeData("memcpy", replace(params, **changed)))

    def memset(self, graph: int, destination: int, size: int, value: int = 0) -> int:
        return self.add(graph, NodeData("memset", MemsetParams(destination, value, 1, size, 1, 0)))

    def instantiate(self, graph: int) -> int:
        handle = next(self._handles)
        self.executables[handle] = self._copies(graph)
        return handle

    def _copies(self, graph: int) -> dict[int, NodeData]:
        held = {node: replace(self.node_data[node]) for node in self._found("cuGraphInstantiate", self.graphs, graph)}
        for data in held.values():
            if data.kind in ("graph", "conditional"):
                data.kept = self._copies(data.params)
        return held

    def untouched(self, graph: int) -> bool:
        """Whether no one wrote into the arguments that the graph's own nodes keep."""
        kernels = [self.node_data[node] for node in self.graphs[graph] if self.node_data[node].kind == "kernel"]
        return all([buffer.raw for buffer in data.kept[0]] == data.values for data in kernels)

    # -- Driver ------------------------------------------------------------------------------------------------------

    def nodes(self, graph: int) -> Sequence[int]:
        return list(self._found("cuGraphGetNodes", self.graphs, graph))

    def edges(self, graph: int) -> Sequence[Edge]:
        return list(self._found("cuGraphGetEdges", self.edge_list, graph))

    def node_kind(self, node: int) -> NodeKind:
        return self._found("cuGraphNodeGetType", self.node_data, node).kind

    def kernel_params(self, node: int) -> KernelParams:
        return self._of("cuGraphKernelNodeGetParams", node, "kernel").params

    def kernel_attributes(self, node: int) -> KernelAttributes:
        return self._of("cuGraphKernelNodeGetAttribute", node, "kernel").attributes

    def parameter_layout(self, params: KernelParams) -> Sequence[tuple[int, int]]:
        return self._kernel(params).layout

    def kernel_name(self, params: KernelParams) -> str:
        if not self._kernel(params).symbol:
            raise DriverError("cuFuncGetName", INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        return self._kernel(params).symbol

    def memcpy_params(self, node: int) -> MemcpyParams:
        return self._of("cuGraphMemcpyNodeGetParams", node, "memcpy").params

    def memset_params(self, node: int) -> MemsetParams:
        return self._of("cuGraphMemsetNodeGetParams", node, "memset").params

    def kernel_setter(self, executable: int, node: int, params: KernelParams) -> Callable[[], None]:
        return partial(self._set_kernel, executable, node, params)

    def _set_kernel(self, executable: int, node: int, params: KernelParams) -> None:
        data = self._update("cuGraphExecKernelNodeSetParams", executable, node, "kernel")
        if params.context != data.params.context or 0 in params.grid + params.block:
            raise DriverError("cuGraphExecKernelNodeSetParams", INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        data.values = self._read(params)
        data.params = params
        self.sets.append((executable, node))

    def set_memcpy_params(self, executable: int, node: int, params: MemcpyParams) -> None:
        data = self._update("cuGraphExecMemcpyNodeSetParams", executable, node, "memcpy")
        if params != replace(data.params, source=params.source, destination=params.destination) or params.height > 1:
            raise DriverError("cuGraphExecMemcpyNodeSetParams", INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        data.params = params
        self.sets.append((executable, node))

    def set_memset_params(self, executable: int, node: int, params: MemsetParams) -> None:
        data = self._update("cuGraphExecMemsetNodeSetParams", executable, node, "memset")
        data.params = params
        self.sets.append((executable, node))

    def launch(self, executable: int, stream: int) -> None:
        self._execute(self._found("cuGraphLaunch", self.executables, executable))
        self.launches.append((executable, stream))

    def _execute(self, held: dict[int, NodeData]) -> None:
        for data in held.values():
            if not data.enabled:
                continue
            if data.kind == "graph":
                self._execute(data.kept)
            elif data.kind == "conditional":
                condition = int.from_bytes(data.values[0], "little")
                self.conditions[condition] = True  # the default, at each launch
                while self.conditions[condition]:
                    self._execute(data.kept)
            elif data.kind == "kernel":
                self._kernel(data.params).run(self.memory, data.values)
            elif data.kind == "memcpy":
                self.memory.write(data.params.destination, self.memory.read(data.params.source, data.params.width))
            elif data.kind == "memset":
                self.memory.write(data.params.destination, bytes([data.params.value]) * data.params.width)

    # -- Driver: graphs made by hand ---------------------------------------------------------------------------------

    def create_graph(self) -> int:
        return self.graph()

    def clone_graph(self, graph: int) -> int:
        made = self.graph()
        named = {node: self.add(made, self.node_data[node], ()) for node in self.nodes(graph)}
        self.edge_list[made] = [Edge(named[e.source], named[e.target], e.programmatic) for e in self.edges(graph)]
        return made

    def destroy_graph(self, graph: int) -> None:
        for node in self._found("cuGraphDestroy", self.graphs, graph):
            if self.node_data[node].kind in ("graph", "conditional"):
                self.destroy_graph(self.node_data[node].params)
        del self.graphs[graph], self.edge_list[graph]

    def add_while(self, graph: int) -> tuple[int, int]:
        condition, body = next(self._handles), self.graph()
        self.add(graph, NodeData("conditional", body, [condition.to_bytes(8, "little")]), ())
        return condition, body

    def add_child(self, graph: int, child: int) -> int:
        if not self.early_bodies and any(edge.programmatic for edge in self.edges(child)):
            raise DriverError("cuGraphAddChildGraphNode", NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED")
        return self.add(graph, NodeData("graph", self.clone_graph(child)), ())

    def add_kernel(self, graph: int, params: KernelParams, after: Sequence[int] = ()) -> int:
        return self.add(graph, NodeData("kernel", params, self._read(params)), after)

    def require_ends(self, graph: int, edges: Sequence[Edge]) -> None:
        self.edge_list[graph] = [replace(e, programmatic=e.programmatic and e not in edges) for e in self.edges(graph)]

    def destroy_executable(self, executable: int) -> None:
        del self.executables[executable]

    def load_module(self, source: str, architecture: str) -> int:
        self.modules.append((source, architecture))
        return len(self.modules)

    def function(self, module: int, name: str) -> int:
        assert f" {name}(" in self.modules[module - 1][0], "the source has it"
        return self.load(Kernel(name, (8, 8, 8, 8)))

    def device_address(self, host: int) -> int:
        return host

    def set_enabled(self, executable: int, node: int, enabled: bool) -> None:
        kind = self.node_data[node].kind
        data = self._update("cuGraphNodeSetEnabled", executable, node, kind)
        if kind not in ("kernel", "memcpy", "memset"):
            raise DriverError("cuGraphNodeSetEnabled", INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        data.enabled = enabled

    def _read(self, params: KernelParams) -> list[bytes]:
        """A copy of the arguments, as a driver makes it during the call."""
        sizes = self._kernel(params).sizes
        pointers = (ctypes.c_void_p * len(sizes)).from_address(params.arguments)
        return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]

    def _kernel(self, params: KernelParams) -> Kernel:
        return self._found("cuFuncGetParamInfo", self.kernels, params.function or params.kernel)

    def _update(self, call: str, executable: int, node: int, kind: str) -> NodeData:
        held = self._found(call, self.executables, executable)
        if code := self.refuse(executable, node):
            raise DriverError(call, code, "CUDA_ERROR_OF_THE_TEST")
        data = self._found(call, held, node)
        if data.kind != kind:
            raise DriverError(call, INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        return data

    def _of(self, call: str, node: int, kind: str) -> NodeData:
        data = self._found(call, self.node_data, node)
        if data.kind != kind:
            raise DriverError(call, INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        return data

    @staticmethod
    def _found(call: str, held: dict[int, Any], handle: int) -> Any:
        if handle not in held:
            raise DriverError(call, INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE")
        return held[handle]


class Captured:
    """What torch's CUDAGraph says of a graph of the double."""

    def __init__(self, driver: DriverDouble, graph: int, kept: bool = True) -> None:
        self._driver, self._graph, self._kept = driver, graph, kept
        self._executable: int | None = None

    def instantiate(self) -> None:
        if self._executable is not None:
            del self._driver.executables[self._executable]
        self._executable = self._driver.instantiate(self._graph)

    def raw_cuda_graph(self) -> int:
        if not self._kept:
            raise RuntimeError("You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized so")
        return self._graph

    def raw_cuda_graph_exec(self) -> int:
        if self._executable is None:
            raise RuntimeError("You cannot access the raw cudaGraphExec_t instance until instantiate() has been called")
        return self._executable


def pointer(address: int) -> bytes:
    return struct.pack("<Q", address)


def int32(value: int) -> bytes:
    return struct.pack("<i", value)


def add_floats(memory: Memory, values: Sequence[bytes]) -> None:
    """`(float *x, float *y, float *out, int n)`: out = x + y."""
    x, y, out = (struct.unpack("<Q", value)[0] for value in values[:3])
    n = struct.unpack("<i", values[3])[0]
    form = f"<{n}f"
    pairs = zip(struct.unpack(form, memory.read(x, 4 * n)), struct.unpack(form, memory.read(y, 4 * n)), strict=True)
    memory.write(out, struct.pack(form, *(a + b for a, b in pairs)))


SIZE = 64  # bytes of each tensor: 16 floats
A, B, C, W, OUT = (BASE + 0x1000 * n for n in range(1, 6))


@dataclass
class World:
    """Two captures of `out[0:8] = x[8:16] + w[0:8]`, then `out[8:16] = x[0:8]` as a copy; x at A, then at B."""

    driver: DriverDouble
    add: int

    def capture(self, x: int, out: int = OUT, w: int = W, **changed: Any) -> Graph:
        graph = self.driver.graph()
        self.driver.kernel(graph, self.add, [pointer(x + 32), pointer(w), pointer(out), int32(8)], **changed)
        self.driver.memcpy(graph, x, out + 32, 32)
        return self.kept(graph)

    def kept(self, graph: int) -> Graph:
        captured = Captured(self.driver, graph)
        captured.instantiate()
        return Graph.of(captured, self.driver)  # type: ignore[arg-type]

    def put(self, address: int, values: Sequence[float]) -> None:
        self.driver.memory.write(address, struct.pack(f"<{len(values)}f", *values))

    def get(self, address: int, count: int = 16) -> tuple[float, ...]:
        return struct.unpack(f"<{count}f", self.driver.memory.read(address, 4 * count))


def made_world() -> World:
    driver = DriverDouble()
    made = World(driver, driver.load(Kernel("_add", (8, 8, 8, 4), add_floats)))
    for place, start in ((A, 0), (B, 100), (C, 200), (W, 1000)):
        made.put(place, [start + n for n in range(16)])
    return made


def moved(name: str = "x", first: int = A, second: int = B, size: int = SIZE) -> Moved:
    return Moved(name, Region(name, first, size), Region(name, second, size))


def right(world: World, x: int, w: int = W) -> tuple[float, ...]:
    values, weights = world.get(x), world.get(w)
    return (*(a + b for a, b in zip(values[8:], weights[:8], strict=True)), *values[:8])
