"""cuda-bindings behind the seam: each call with its arguments in order, each failure by its name."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bucketgraph.cuda import DriverError, load_driver
from bucketgraph.cuda.bindings import Bindings
from bucketgraph.cuda.driver import KernelAttributes, KernelParams, MemsetParams
from bucketgraph.errors import ConfigError


class Handle(int):
    """As the bindings' handles: made of an integer, and an integer again."""


def bindings(**calls: Callable[..., Any]) -> Any:
    types = {
        name: type(name, (Handle,), {})
        for name in ("CUgraphNode", "CUgraphExec", "CUfunction", "CUkernel", "CUcontext", "CUstream", "CUdeviceptr")
    }
    structs = dict.fromkeys(("CUDA_KERNEL_NODE_PARAMS", "CUDA_MEMSET_NODE_PARAMS"), SimpleNamespace)
    base = {"cuDriverGetVersion": lambda: (0, 13000), "CUkernelNodeAttrID": int, **types, **structs}
    return Bindings(SimpleNamespace(**{**base, **calls}))


def test_nodes_and_edges_are_asked_for_twice() -> None:
    def nodes(graph: int, size: int = 0) -> tuple[Any, ...]:
        return (0, [Handle(5), Handle(6)][:size], 2)

    def edges(graph: int, size: int = 0) -> tuple[Any, ...]:
        return (0, [Handle(5)][:size], [Handle(6)][:size], [SimpleNamespace(type=1)][:size], 1)

    driver = bindings(cuGraphGetNodes=nodes, cuGraphGetEdges=edges)
    assert driver.nodes(1) == [5, 6]
    (edge,) = driver.edges(1)
    assert (edge.source, edge.target, edge.programmatic) == (5, 6, True)
    empty = bindings(cuGraphGetNodes=lambda g, n: (0, [], 0), cuGraphGetEdges=lambda g, n: (0, [], [], [], 0))
    assert empty.nodes(1) == [] and empty.edges(1) == []


@pytest.mark.parametrize(("number", "kind"), [(0, "kernel"), (4, "graph"), (13, "conditional"), (15, "unknown")])
def test_kinds_of_nodes_by_their_number(number: int, kind: str) -> None:
    assert bindings(cuGraphNodeGetType=lambda node: (0, number)).node_kind(1) == kind


def test_parameters_are_asked_for_until_there_are_no_more() -> None:
    asked: list[object] = []

    def info(entry: object, index: int) -> tuple[int, ...]:
        asked.append(entry)
        return (0, 8 * index, 8) if index < 2 else (1,)

    params = KernelParams(7, 0, 0, (1, 1, 1), (1, 1, 1), 0, 0)
    assert bindings(cuFuncGetParamInfo=info).parameter_layout(params) == [(0, 8), (8, 8)]
    other = KernelParams(0, 9, 0, (1, 1, 1), (1, 1, 1), 0, 0)
    assert bindings(cuKernelGetParamInfo=info).parameter_layout(other) == [(0, 8), (8, 8)]
    assert asked == [7, 7, 7, 9, 9, 9]
    with pytest.raises(DriverError, match=r"cuFuncGetParamInfo failed: given CUDA error \(4\)"):
        bindings(cuFuncGetParamInfo=lambda entry, index: (4,)).parameter_layout(params)


class Value:
    """A union of the bindings: structs read out of it are gone when it is."""

    cooperative = 1

    @property
    def clusterDim(self) -> Any:
        return Part(self)

    @property
    def deviceUpdatableKernelNode(self) -> Any:
        return Part(self)


class Part:
    def __init__(self, owner: Value) -> None:
        self._owner = weakref.ref(owner)

    def __getattr__(self, name: str) -> int:
        assert self._owner() is not None, "read after its value was freed"
        return {"x": 2, "y": 1, "z": 0, "deviceUpdatable": 1}[name]


def test_attributes_are_read_while_their_value_lives() -> None:
    driver = bindings(cuGraphKernelNodeGetAttribute=lambda node, number: (0, Value()))
    assert driver.kernel_attributes(1) == KernelAttributes(True, (2, 1, 1), True)


def test_attributes_of_a_node_that_has_none() -> None:
    def attribute(node: int, number: int) -> tuple[Any, ...]:
        if number == 13:
            return (1, None)
        return (0, SimpleNamespace(clusterDim=SimpleNamespace(x=0, y=0, z=0), cooperative=0))

    assert bindings(cuGraphKernelNodeGetAttribute=attribute).kernel_attributes(1) == KernelAttributes()


def test_a_copy_keeps_what_it_has_but_its_addresses() -> None:
    def params(node: int) -> tuple[int, Any]:
        zero = dict.fromkeys(("srcXInBytes", "srcY", "srcZ", "srcLOD", "dstXInBytes", "dstY", "dstZ", "dstLOD"), 0)
        ends = {"srcMemoryType": 1, "srcHost": 11, "srcDevice": 0, "dstMemoryType": 4, "dstHost": 0, "dstDevice": 12}
        return 0, SimpleNamespace(**zero, **ends, WidthInBytes=64, Height=1, Depth=1, srcPitch=77)

    sent: list[Any] = []
    driver = bindings(
        cuGraphMemcpyNodeGetParams=params,
        cuCtxGetCurrent=lambda: (0, 3),
        cuGraphExecMemcpyNodeSetParams=lambda *args: (sent.extend(args), (0,))[1],
    )
    copy = driver.memcpy_params(5)
    assert (copy.source, copy.source_type, copy.destination, copy.destination_type) == (11, "host", 12, "unified")
    driver.set_memcpy_params(4, 5, copy)
    assert sent[:2] == [4, 5] and sent[3] == 3
    assert (sent[2].srcHost, sent[2].dstDevice, sent[2].srcPitch) == (11, 12, 77)


@pytest.mark.parametrize(
    ("version", "text"),
    [(lambda: (0, 12090), "too old: given 12090"), (lambda: (_ for _ in ()).throw(RuntimeError("gone")), "no CUDA")],
)
def test_a_missing_or_old_driver_is_said_at_once(version: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        bindings(cuDriverGetVersion=version)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"pip install 'cuda-bindings>=13\.3,<14'"):
        load_driver()


def test_a_thread_without_a_context_updates_in_the_one_that_was_seen_last() -> None:
    current = iter([3, 0, 4, 0])
    sent: list[Any] = []
    driver = bindings(
        cuCtxGetCurrent=lambda: (0, next(current)),
        cuGraphExecMemsetNodeSetParams=lambda *args: (sent.append(args[3]), (0,))[1],
    )
    for _ in range(4):
        driver.set_memset_params(1, 2, MemsetParams(20, 21, 4, 22, 1, 0))
    assert sent == [3, 3, 4, 4]


def test_updates_send_every_field() -> None:
    sent: list[Any] = []
    driver = bindings(
        cuGraphExecKernelNodeSetParams=lambda *args: (sent.extend(args), (0,))[1],
        cuGraphExecMemsetNodeSetParams=lambda *args: (sent.extend(args), (0,))[1],
        cuCtxGetCurrent=lambda: (0, 3),
        cuGraphLaunch=lambda *args: (sent.extend(args), (0,))[1],
    )
    driver.kernel_setter(1, 2, KernelParams(3, 4, 5, (6, 7, 8), (9, 10, 11), 12, 13))()
    assert sent[:2] == [1, 2]
    made = sent[2]
    assert (made.func, made.kern, made.ctx, made.sharedMemBytes, made.kernelParams) == (3, 4, 5, 12, 13)
    assert (made.gridDimX, made.gridDimY, made.gridDimZ) == (6, 7, 8)
    assert (made.blockDimX, made.blockDimY, made.blockDimZ) == (9, 10, 11)
    sent.clear()
    driver.set_memset_params(1, 2, MemsetParams(20, 21, 4, 22, 23, 24))
    made = sent[2]
    assert sent[:2] == [1, 2] and sent[3] == 3
    assert (made.dst, made.value, made.elementSize, made.width, made.height, made.pitch) == (20, 21, 4, 22, 23, 24)
    sent.clear()
    driver.launch(1, 9)
    assert sent == [1, 9]
