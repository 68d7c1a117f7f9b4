"""A captured step as the body of a WHILE node: how it is assembled, what a refusal leaves, how often it runs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from null.driver_double import BASE, DriverDouble, Kernel, Memory, NodeData, int32, pointer
from null.test_cuda_bindings import Handle, bindings

from bucketgraph.cuda import DriverError, conditional
from bucketgraph.cuda.conditional import PUBLISH, Assembled, assemble
from bucketgraph.cuda.driver import Edge, KernelParams
from bucketgraph.errors import ConfigError

STATE, PUBLISHED, STAMPS, TOTAL = (BASE + 0x100 * n for n in range(4))
LIMIT = 50


def step(memory: Memory, values: Sequence[bytes]) -> None:
    """`(int *state, long *total, int limit)`: one more step, which adds its number."""
    state, total = (struct.unpack("<Q", value)[0] for value in values[:2])
    steps = struct.unpack("<i", memory.read(state, 4))[0] + 1
    memory.write(state, struct.pack("<ii", steps, steps < struct.unpack("<i", values[2])[0]))
    memory.write(total, struct.pack("<q", struct.unpack("<q", memory.read(total, 8))[0] + steps))


class World:
    """A step of two kernels, the second of which may start early, and a `publish` as the CUDA source says it."""

    def __init__(self) -> None:
        self.driver = DriverDouble()
        self.body = self.driver.graph()
        add = self.driver.load(Kernel("_advance", (8, 8, 4), step))
        first = self.driver.kernel(self.body, self.driver.load(Kernel("_decode", ())), [])
        values = [pointer(STATE), pointer(TOTAL), int32(LIMIT)]
        self.driver.kernel(self.body, add, values, after=[first], programmatic=True)
        self.publish = self.driver.load(Kernel("publish", (8, 8, 8, 8), self._publish))

    def _publish(self, memory: Memory, values: Sequence[bytes]) -> None:
        condition, state, published, stamps = (struct.unpack("<Q", value)[0] for value in values)
        steps, again = struct.unpack("<ii", memory.read(state, 8))
        memory.write(stamps + 8 * ((steps - 1) % 16), struct.pack("<q", steps))
        memory.write(published, struct.pack("<q", 2 * steps + (not again)))
        self.driver.conditions[condition] = bool(again)

    def assembled(self, programmatic: bool = True) -> Assembled:
        return assemble(self.driver, self.body, self.publish, [STATE, PUBLISHED, STAMPS], programmatic)

    def run(self, executable: int) -> tuple[int, int]:
        """The sum over all steps, and the word that was published last."""
        self.driver.memory.write(STATE, bytes(16))
        self.driver.memory.write(TOTAL, bytes(8))
        self.driver.launch(executable, 7)
        words = [struct.unpack("<q", self.driver.memory.read(address, 8))[0] for address in (TOTAL, PUBLISHED)]
        return words[0], words[1]


def held(driver: DriverDouble, executable: int) -> dict[int, NodeData]:
    """The body's nodes in an executable."""
    (outer,) = driver.executables[executable].values()
    assert outer.kind == "conditional"
    return outer.kept


def test_one_launch_runs_the_step_till_it_says_that_it_was_the_last_and_so_does_the_next() -> None:
    world = World()
    made = world.assembled()
    assert made.programmatic
    for _ in range(2):  # the condition starts anew with each launch
        assert world.run(made.executable) == (LIMIT * (LIMIT + 1) // 2, 2 * LIMIT + 1)
    assert world.driver.launches == [(made.executable, 7)] * 2


def test_the_body_is_the_step_and_then_publish_with_the_addresses() -> None:
    world = World()
    child, publish = held(world.driver, world.assembled().executable).values()
    assert child.kind == "graph" and [data.kind for data in child.kept.values()] == ["kernel", "kernel"]
    assert publish.params.function == world.publish and publish.params.grid == publish.params.block == (1, 1, 1)
    assert publish.values[1:] == [pointer(STATE), pointer(PUBLISHED), pointer(STAMPS)]


def test_graphs_are_given_back_and_the_executable_lives_on() -> None:
    world = World()
    before = set(world.driver.graphs)
    for programmatic in (True, False):
        made = world.assembled(programmatic)
        assert set(world.driver.graphs) == before
        assert world.run(made.executable)[1] == 2 * LIMIT + 1
        world.driver.destroy_executable(made.executable)
    assert not world.driver.executables


def test_publish_waits_for_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world, edges = World(), []
    add = world.driver.add_kernel

    def noted(graph: int, params: KernelParams, after: Sequence[int] = ()) -> int:
        made = add(graph, params, after)
        edges.extend(world.driver.edges(graph))
        assert list(world.driver.nodes(graph)) == [*after, made]
        return made

    monkeypatch.setattr(world.driver, "add_kernel", noted)
    world.assembled()
    assert len(edges) == 1 and not edges[0].programmatic


@pytest.mark.parametrize("refused", [False, True])
def test_programmatic_edges_become_ordinary_where_the_driver_or_the_caller_refuses_them(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, seen = World(), []
    world.driver.early_bodies = not refused
    add = world.driver.add_child
    monkeypatch.setattr(
        world.driver, "add_child", lambda graph, child: (seen.append(world.driver.edges(child)), add(graph, child))[1]
    )
    before = set(world.driver.graphs)
    made = world.assembled(programmatic=refused)
    assert not made.programmatic and not any(edge.programmatic for edge in seen[-1]) and len(seen[-1]) == 1
    assert any(edge.programmatic for edge in world.driver.edges(world.body)), "the step's own graph stays as it is"
    assert set(world.driver.graphs) == before
    assert world.run(made.executable)[1] == 2 * LIMIT + 1


def test_a_driver_without_loops_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    before = set(world.driver.graphs)

    def refuse(graph: int) -> tuple[int, int]:
        raise DriverError("cuGraphAddNode", 801, "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(world.driver, "add_while", refuse)
    with pytest.raises(DriverError, match=r"cuGraphAddNode failed: given CUDA_ERROR_NOT_SUPPORTED \(801\)"):
        world.assembled()
    assert set(world.driver.graphs) == before and not world.driver.executables


def test_publish_is_compiled_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = DriverDouble()
    monkeypatch.setattr(conditional, "_functions", {})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    zero, one = SimpleNamespace(index=0), SimpleNamespace(index=1)
    made = [conditional._publish(driver, device) for device in (zero, zero, one)]  # type: ignore[arg-type]
    assert made[0] == made[1] != made[2] and driver.modules == [(PUBLISH, "sm_90")] * 2


# -- cuda-bindings -----------------------------------------------------------------------------------------------------


def made_bindings(**calls: Any) -> Any:
    types = {name: type(name, (Handle,), {}) for name in ("CUgraph", "CUmodule")}
    kinds = {
        "CUgraphNodeType": SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL=13),
        "CUgraphConditionalNodeType": SimpleNamespace(CU_GRAPH_COND_TYPE_WHILE=1),
        "CUgraphNodeParams": lambda: SimpleNamespace(conditional=SimpleNamespace(phGraph_out=[Handle(77)])),
        "CUpointer_attribute": SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_POINTER=3),
        "cuCtxGetCurrent": lambda: (0, 3),
    }
    return bindings(**types, **kinds, **calls)


def test_a_while_node_starts_each_launch_from_true() -> None:
    sent: dict[str, Any] = {}
    driver = made_bindings(
        cuGraphConditionalHandleCreate=lambda *args: (sent.update(handle=args), (0, Handle(5)))[1],
        cuGraphAddNode=lambda *args: (sent.update(node=args), (0, Handle(6)))[1],
    )
    assert driver.add_while(4) == (5, 77)
    assert sent["handle"] == (4, 3, 1, 1), "default 1, assigned at each launch"
    *place, params = sent["node"]
    assert place == [4, None, None, 0] and params.type == 13
    loop = params.conditional
    assert (loop.handle, loop.ctx, loop.size, loop.type) == (5, 3, 1, 1)


def test_programmatic_edges_are_removed_by_their_data_and_added_without() -> None:
    data = [SimpleNamespace(type=1), SimpleNamespace(type=0), SimpleNamespace(type=1)]
    sent: list[Any] = []

    def edges(graph: int, size: int = 0) -> tuple[Any, ...]:
        return (0, [Handle(1), Handle(2), Handle(3)][:size], [Handle(2), Handle(3), Handle(4)][:size], data[:size], 3)

    driver = made_bindings(
        cuGraphGetEdges=edges,
        cuGraphRemoveDependencies=lambda *args: (sent.append(args), (0,))[1],
        cuGraphAddDependencies=lambda *args: (sent.append(args), (0,))[1],
    )
    driver.require_ends(9, [Edge(1, 2, True), Edge(2, 3), Edge(3, 4, True)])
    assert sent == [(9, [1, 3], [2, 4], [data[0], data[2]], 2), (9, [1, 3], [2, 4], None, 2)]
    driver.require_ends(9, [Edge(2, 3)])
    assert len(sent) == 2, "nothing to do"


def test_graphs_made_by_hand_and_modules_go_to_their_calls() -> None:
    sent: list[tuple[Any, ...]] = []

    def call(name: str, *out: int) -> Any:
        return lambda *args: (sent.append((name, *args)), (0, *map(Handle, out)))[1]

    names = {
        "cuGraphCreate": (11,),
        "cuGraphClone": (12,),
        "cuGraphDestroy": (),
        "cuGraphAddChildGraphNode": (13,),
        "cuGraphAddKernelNode": (14,),
        "cuGraphInstantiate": (15,),
        "cuGraphExecDestroy": (),
        "cuModuleGetFunction": (16,),
        "cuPointerGetAttribute": (17,),
    }
    driver = made_bindings(**{name: call(name, *out) for name, out in names.items()})
    params = KernelParams(3, 0, 0, (1, 1, 1), (1, 1, 1), 0, 99)
    got = [
        driver.create_graph(),
        driver.clone_graph(1),
        driver.add_child(1, 2),
        driver.add_kernel(1, params, [5]),
        driver.instantiate(1),
        driver.function(8, "publish"),
        driver.device_address(0x40),
    ]
    driver.destroy_graph(1)
    driver.destroy_executable(15)
    assert got == [11, 12, 13, 14, 15, 16, 17]
    assert ("cuGraphAddChildGraphNode", 1, None, 0, 2) in sent and ("cuModuleGetFunction", 8, b"publish") in sent
    assert ("cuPointerGetAttribute", 3, 0x40) in sent and ("cuGraphInstantiate", 1, 0) in sent
    (kernel,) = [args for name, *args in sent if name == "cuGraphAddKernelNode"]
    assert kernel[:3] == [1, [5], 1] and (kernel[3].func, kernel[3].kernelParams) == (3, 99)
    assert sent[-2:] == [("cuGraphDestroy", 1), ("cuGraphExecDestroy", 15)]


class Nvrtc:
    """`cuda.bindings.nvrtc` for a compiler that accepts what has a kernel in it."""

    def __init__(self) -> None:
        self.options: list[bytes] = []
        self.destroyed = 0
        self.source = b""

    def nvrtcVersion(self) -> tuple[int, ...]:
        return (0, 13, 0)

    def nvrtcCreateProgram(self, source: bytes, *_: Any) -> tuple[int, int]:
        self.source = source
        return 0, 1

    def nvrtcCompileProgram(self, program: int, count: int, options: list[bytes]) -> tuple[Any]:
        assert count == len(options)
        self.options = options
        failed = type("Result", (int,), {"name": "NVRTC_ERROR_COMPILATION"})(6)
        return (0 if b"__global__" in self.source else failed,)

    def nvrtcGetProgramLogSize(self, program: int) -> tuple[int, int]:
        return 0, 12

    def nvrtcGetProgramLog(self, program: int, text: bytes) -> tuple[int]:
        return (0,)

    def nvrtcGetCUBINSize(self, program: int) -> tuple[int, int]:
        return 0, 5

    def nvrtcGetCUBIN(self, program: int, image: bytes) -> tuple[int]:
        return (0,)

    def nvrtcDestroyProgram(self, program: int) -> None:
        self.destroyed += 1


def test_cuda_source_is_compiled_for_its_device_and_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvrtc()
    monkeypatch.setattr("bucketgraph.cuda.nvrtc.import_module", lambda name: library)
    loaded: list[bytes] = []
    driver = made_bindings(cuModuleLoadData=lambda image: (loaded.append(image), (0, Handle(21)))[1])
    assert driver.load_module(PUBLISH, "sm_90") == 21 and len(loaded[0]) == 5
    assert library.options == [b"--gpu-architecture=sm_90", b"-default-device"]
    with pytest.raises(ConfigError, match="nvrtcCompileProgram failed: given NVRTC_ERROR_COMPILATION"):
        driver.load_module("int nothing;", "sm_90")
    assert library.destroyed == 2


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("bucketgraph.cuda.nvrtc.import_module", missing)
    with pytest.raises(ConfigError, match=r"NVRTC is missing: .*pip install nvidia-cuda-nvrtc"):
        made_bindings().load_module(PUBLISH, "sm_90")
