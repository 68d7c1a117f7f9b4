"""The CUDA driver behind the seam, through the package cuda-bindings.

Rules: one method, one or two driver calls; a failed call is a DriverError that names it; records of the driver's own
types never leave this file. The driver copies arguments during the call, so buffers need to live no longer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from bucketgraph.cuda.driver import (
    DriverError,
    Edge,
    KernelAttributes,
    KernelParams,
    MemcpyParams,
    MemoryType,
    MemsetParams,
    NodeKind,
)
from bucketgraph.cuda.nvrtc import compiled
from bucketgraph.errors import ConfigError

_OLDEST = 13000  # CUDA 13.0: edges and captures have other signatures before
_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_COOPERATIVE, _CLUSTER, _DEVICE_UPDATABLE = 2, 4, 13  # CUkernelNodeAttrID
_MEMORY_TYPES: dict[int, MemoryType] = {1: "host", 2: "device", 3: "array", 4: "unified"}
_KINDS: tuple[NodeKind, ...] = get_args(NodeKind)
_ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT: each launch starts from the default
_END_OF_PARAMETERS = 1  # CUDA_ERROR_INVALID_VALUE


class Bindings:
    """`Driver` over the module `cuda.bindings.driver`.

    Args:
        module: `cuda.bindings.driver`, or what stands in for it.

    Raises:
        ConfigError: there is no CUDA driver, or it is older than CUDA 13.0.
    """

    def __init__(self, module: Any) -> None:
        self._cuda = module
        self._context: Any = None
        try:
            version = int(self._call("cuDriverGetVersion"))
        except RuntimeError as error:  # cuda-bindings finds the driver's library when it is first called
            raise ConfigError("no CUDA driver was found", given=" ".join(str(error).split())) from error
        if version < _OLDEST:
            raise ConfigError("the CUDA driver is too old", given=version, expected=f"at least {_OLDEST}")

    def nodes(self, graph: int) -> Sequence[int]:
        _, count = self._call("cuGraphGetNodes", graph, 0)
        if not count:
            return []
        nodes, count = self._call("cuGraphGetNodes", graph, count)
        return [int(node) for node in nodes[:count]]

    def edges(self, graph: int) -> Sequence[Edge]:
        *_, count = self._call("cuGraphGetEdges", graph, 0)
        if not count:
            return []
        sources, targets, data, count = self._call("cuGraphGetEdges", graph, count)
        ends = zip(sources[:count], targets[:count], data[:count], strict=True)
        return [Edge(int(source), int(target), int(how.type) == _PROGRAMMATIC) for source, target, how in ends]

    def node_kind(self, node: int) -> NodeKind:
        number = int(self._call("cuGraphNodeGetType", self._node(node)))
        return _KINDS[number] if number < len(_KINDS) else "unknown"

    def kernel_params(self, node: int) -> KernelParams:
        got = self._call("cuGraphKernelNodeGetParams", self._node(node))
        return KernelParams(
            int(got.func),
            int(got.kern),
            int(got.ctx),
            (got.gridDimX, got.gridDimY, got.gridDimZ),
            (got.blockDimX, got.blockDimY, got.blockDimZ),
            got.sharedMemBytes,
            int(got.kernelParams or 0),
            int(got.extra or 0),
        )

    def kernel_attributes(self, node: int) -> KernelAttributes:
        # A value of the bindings has to outlive the structs that are read out of it.
        clusters, cooperative = self._attribute(node, _CLUSTER), self._attribute(node, _COOPERATIVE)
        dims = clusters.clusterDim
        cluster = (max(dims.x, 1), max(dims.y, 1), max(dims.z, 1))
        try:
            updatable = self._attribute(node, _DEVICE_UPDATABLE)
        except DriverError:  # asked of a node that never had it, some drivers call the question invalid
            return KernelAttributes(bool(cooperative.cooperative), cluster)
        from_device = updatable.deviceUpdatableKernelNode
        return KernelAttributes(bool(cooperative.cooperative), cluster, bool(from_device.deviceUpdatable))

    def _attribute(self, node: int, number: int) -> Any:
        return self._call("cuGraphKernelNodeGetAttribute", self._node(node), self._cuda.CUkernelNodeAttrID(number))

    def parameter_layout(self, params: KernelParams) -> Sequence[tuple[int, int]]:
        call = "cuFuncGetParamInfo" if params.function else "cuKernelGetParamInfo"
        layout: list[tuple[int, int]] = []
        while True:  # their number can only be asked for from CUDA 13.2 on: ask until there are no more
            try:
                offset, size = self._call(call, self._entry(params), len(layout))
            except DriverError as error:
                if error.code != _END_OF_PARAMETERS:
                    raise
                return layout
            layout.append((int(offset), int(size)))

    def kernel_name(self, params: KernelParams) -> str:
        name = self._call("cuFuncGetName" if params.function else "cuKernelGetName", self._entry(params))
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def memcpy_params(self, node: int) -> MemcpyParams:
        got = self._call("cuGraphMemcpyNodeGetParams", self._node(node))
        source, destination = _MEMORY_TYPES[int(got.srcMemoryType)], _MEMORY_TYPES[int(got.dstMemoryType)]
        starts = (got.srcXInBytes, got.srcY, got.srcZ, got.srcLOD, got.dstXInBytes, got.dstY, got.dstZ, got.dstLOD)
        return MemcpyParams(
            _address(source, got.srcHost, got.srcDevice),
            _address(destination, got.dstHost, got.dstDevice),
            source,
            destination,
            int(got.WidthInBytes),
            int(got.Height),
            int(got.Depth),
            any(map(int, starts)),
        )

    def memset_params(self, node: int) -> MemsetParams:
        got = self._call("cuGraphMemsetNodeGetParams", self._node(node))
        return MemsetParams(
            int(got.dst), int(got.value), int(got.elementSize), int(got.width), int(got.height), int(got.pitch)
        )

    def kernel_setter(self, executable: int, node: int, params: KernelParams) -> Callable[[], None]:
        made = self._kernel_node(params)
        return partial(
            self._call, "cuGraphExecKernelNodeSetParams", self._executable(executable), self._node(node), made
        )

    def _kernel_node(self, params: KernelParams) -> Any:
        made = self._cuda.CUDA_KERNEL_NODE_PARAMS()
        made.func = self._cuda.CUfunction(params.function)
        made.kern = self._cuda.CUkernel(params.kernel)
        made.ctx = self._cuda.CUcontext(params.context)
        made.gridDimX, made.gridDimY, made.gridDimZ = params.grid
        made.blockDimX, made.blockDimY, made.blockDimZ = params.block
        made.sharedMemBytes = params.shared_bytes
        made.kernelParams = params.arguments
        return made

    def set_memcpy_params(self, executable: int, node: int, params: MemcpyParams) -> None:
        made = self._call("cuGraphMemcpyNodeGetParams", self._node(node))  # a copy, with the rest as it was captured
        _set_address(made, "src", params.source_type, params.source)
        _set_address(made, "dst", params.destination_type, params.destination)
        self._set("cuGraphExecMemcpyNodeSetParams", executable, node, made)

    def set_memset_params(self, executable: int, node: int, params: MemsetParams) -> None:
        made = self._cuda.CUDA_MEMSET_NODE_PARAMS()
        made.dst = self._cuda.CUdeviceptr(params.destination)
        made.value, made.elementSize, made.pitch = params.value, params.element_bytes, params.pitch
        made.width, made.height = params.width, params.height
        self._set("cuGraphExecMemsetNodeSetParams", executable, node, made)

    def _set(self, call: str, executable: int, node: int, made: Any) -> None:
        """Update a node that names no context of its own: a thread that never used the device has none, either."""
        context = self._call("cuCtxGetCurrent")
        self._context = context if int(context) else self._context or context
        self._call(call, self._executable(executable), self._node(node), made, self._context)

    def launch(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", self._executable(executable), self._cuda.CUstream(stream))

    def create_graph(self) -> int:
        return int(self._call("cuGraphCreate", 0))

    def clone_graph(self, graph: int) -> int:
        return int(self._call("cuGraphClone", self._graph(graph)))

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", self._graph(graph))

    def add_while(self, graph: int) -> tuple[int, int]:
        context, outer = self._call("cuCtxGetCurrent"), self._graph(graph)
        condition = self._call("cuGraphConditionalHandleCreate", outer, context, 1, _ASSIGN_DEFAULT)
        params = self._cuda.CUgraphNodeParams()
        params.type = self._cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle, params.conditional.ctx, params.conditional.size = condition, context, 1
        params.conditional.type = self._cuda.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        self._call("cuGraphAddNode", outer, None, None, 0, params)
        return int(condition), int(params.conditional.phGraph_out[0])

    def add_child(self, graph: int, child: int) -> int:
        return int(self._call("cuGraphAddChildGraphNode", self._graph(graph), None, 0, self._graph(child)))

    def add_kernel(self, graph: int, params: KernelParams, after: Sequence[int] = ()) -> int:
        nodes = [self._node(each) for each in after]
        made = self._kernel_node(params)
        return int(self._call("cuGraphAddKernelNode", self._graph(graph), nodes, len(nodes), made))

    def require_ends(self, graph: int, edges: Sequence[Edge]) -> None:
        wanted = {(edge.source, edge.target) for edge in edges if edge.programmatic}
        if not wanted:
            return
        *_, count = self._call("cuGraphGetEdges", graph, 0)
        found = zip(*(part[:count] for part in self._call("cuGraphGetEdges", graph, count)[:3]), strict=True)
        # An edge is removed by the data that it has.
        chosen = [edge for edge in found if (int(edge[0]), int(edge[1])) in wanted]
        sources, targets, data = ([edge[part] for edge in chosen] for part in range(3))
        self._call("cuGraphRemoveDependencies", self._graph(graph), sources, targets, data, len(chosen))
        self._call("cuGraphAddDependencies", self._graph(graph), sources, targets, None, len(chosen))

    def instantiate(self, graph: int) -> int:
        return int(self._call("cuGraphInstantiate", self._graph(graph), 0))

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", self._executable(executable))

    def load_module(self, source: str, architecture: str) -> int:
        return int(self._call("cuModuleLoadData", compiled(source, architecture)))

    def function(self, module: int, name: str) -> int:
        return int(self._call("cuModuleGetFunction", self._cuda.CUmodule(module), name.encode()))

    def device_address(self, host: int) -> int:
        wanted = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        return int(self._call("cuPointerGetAttribute", wanted, host))

    def _graph(self, handle: int) -> Any:
        return self._cuda.CUgraph(handle)

    def _entry(self, params: KernelParams) -> Any:
        return self._cuda.CUfunction(params.function) if params.function else self._cuda.CUkernel(params.kernel)

    def _node(self, handle: int) -> Any:
        return self._cuda.CUgraphNode(handle)

    def _executable(self, handle: int) -> Any:
        return self._cuda.CUgraphExec(handle)

    def _call(self, name: str, *args: Any) -> Any:
        """What a driver call returned: nothing, one value, or several."""
        error, *out = getattr(self._cuda, name)(*args)
        if int(error) != 0:
            raise DriverError(name, int(error), getattr(error, "name", "CUDA error"))
        return out[0] if len(out) == 1 else tuple(out)

    def set_enabled(self, executable: int, node: int, enabled: bool) -> None:
        self._call("cuGraphNodeSetEnabled", self._executable(executable), self._node(node), int(enabled))


def _address(memory: MemoryType, host: Any, device: Any) -> int:
    return 0 if memory == "array" else int(host or 0) if memory == "host" else int(device)


def _set_address(params: Any, end: str, memory: MemoryType, address: int) -> None:
    setattr(params, end + ("Host" if memory == "host" else "Device"), address)
