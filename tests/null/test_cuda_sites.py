"""Sites of a tensor's address are proved by two captures, or refused with a reason that names the node."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from null.driver_double import (
    OUT,
    A,
    B,
    C,
    Kernel,
    NodeData,
    W,
    World,
    add_floats,
    int32,
    made_world,
    moved,
    pointer,
)

from bucketgraph.cuda import Graph, Moved, prove
from bucketgraph.cuda.driver import KernelAttributes


@pytest.fixture
def world() -> World:
    return made_world()


def one(graphs: tuple[Graph, Graph], *each: Moved) -> str:
    """The reason why the only, or every, tensor of a pair is refused."""
    reasons = {proof.refusal for proof in prove(*graphs, *(each or (moved(),)))}
    (reason,) = reasons
    assert reason is not None
    return reason


# -- what is proved --------------------------------------------------------------------------------------------------


def test_sites_are_words_that_moved_with_the_tensor(world: World) -> None:
    (proof,) = prove(world.capture(A), world.capture(B), moved())
    assert proof.refusal is None
    assert [(s.node, s.offset, s.parameter, s.inside, s.alignment) for s in proof.sites] == [
        (0, 0, 0, 32, 16),
        (1, 0, 0, 0, 16),
    ]


def test_tensors_that_move_together_are_told_apart(world: World) -> None:
    graphs = world.capture(A), world.capture(B, out=C)
    x, out = prove(*graphs, moved(), moved("out", OUT, C))
    assert [site.parameter for site in x.sites] == [0, 0]
    assert [(site.node, site.parameter, site.inside) for site in out.sites] == [(0, 2, 0), (1, 1, 32)]


def test_a_memset_has_a_site(world: World) -> None:
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.memset(graph, place + 16, 8)
        graphs.append(world.kept(graph))
    (proof,) = prove(graphs[0], graphs[1], moved())
    assert [(site.node, site.inside) for site in proof.sites] == [(0, 16)]


def test_a_pointer_inside_a_struct_is_a_site(world: World) -> None:
    kernel = world.driver.load(Kernel("_struct", (4, 40)))
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.kernel(graph, kernel, [int32(3), struct.pack("<qqQqq", 1, 2, place + 8, 3, 4)])
        graphs.append(world.kept(graph))
    (proof,) = prove(graphs[0], graphs[1], moved())
    assert [(site.offset, site.parameter, site.inside, site.alignment) for site in proof.sites] == [(24, 1, 8, 8)]


def test_the_proof_covers_no_coarser_alignment_than_both_places_had(world: World) -> None:
    (proof,) = prove(world.capture(A), world.capture(B + 8), moved(second=B + 8))
    assert [site.alignment for site in proof.sites] == [8, 8]


def test_library_kernels_are_held_to_the_alignment_that_chose_them(world: World) -> None:
    kernel = world.driver.load(Kernel("nvjet_sm90_hss_128x64", (8,)))
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.kernel(graph, kernel, [pointer(place)])
        graphs.append(world.kept(graph))
    (proof,) = prove(graphs[0], graphs[1], moved())
    assert [site.alignment for site in proof.sites] == [256]


# -- what is refused, and why ----------------------------------------------------------------------------------------


def test_refused_another_number_of_nodes(world: World) -> None:
    second = world.driver.graph()
    assert "the topology changed: 2 nodes, then 0" in one((world.capture(A), world.kept(second)))


def test_refused_another_kind_of_node(world: World) -> None:
    second = world.driver.graph()
    world.driver.memset(second, B, 4)
    world.driver.memset(second, B, 4)
    assert "the topology changed: node 0 (_add) was kernel, then memset" in one((world.capture(A), world.kept(second)))


def test_refused_other_dependencies(world: World) -> None:
    second = world.driver.graph()
    world.driver.kernel(second, world.add, [pointer(B + 32), pointer(W), pointer(OUT), int32(8)])
    world.driver.memcpy(second, B, OUT + 32, 32)
    world.driver.edge_list[second].clear()
    assert "waits for others" in one((world.capture(A), world.kept(second)))


def test_refused_another_kernel(world: World) -> None:
    first = world.capture(A)
    world.add = world.driver.load(Kernel("_add_unaligned", (8, 8, 8, 4), add_floats))
    assert "its kernel changed from _add to _add_unaligned" in one((first, world.capture(B)))


def test_refused_another_specialisation_of_one_name(world: World) -> None:
    first = world.capture(A)
    world.add = world.driver.load(Kernel("_add", (8, 8, 8, 4), add_floats))
    assert "its function changed" in one((first, world.capture(B)))


def test_refused_another_grid(world: World) -> None:
    assert "its grid changed from (4, 1, 1) to (5, 1, 1)" in one((world.capture(A), world.capture(B, grid=(5, 1, 1))))


def test_refused_another_size_of_a_copy(world: World) -> None:
    graphs = []
    for place, size in ((A, 32), (B, 16)):
        graph = world.driver.graph()
        world.driver.memcpy(graph, place, OUT, size)
        graphs.append(world.kept(graph))
    assert "its size changed from (32, 1, 1, False) to (16, 1, 1, False)" in one((graphs[0], graphs[1]))


def test_refused_other_bytes(world: World) -> None:
    reason = one((world.capture(A), world.capture(B, w=W + 64)))
    assert reason.startswith("node 0 (_add), parameter 1: other bytes changed, at 8 from 0x00007f0000004000 to 0x")


def test_refused_an_address_that_moved_by_another_distance(world: World) -> None:
    assert "other bytes changed" in one((world.capture(A), world.capture(B + 8)))


def test_refused_an_address_behind_the_tensor(world: World) -> None:
    assert "other bytes changed" in one((world.capture(A), world.capture(B)), moved(size=32))


def test_refused_a_changed_tail_of_a_block(world: World) -> None:
    graphs = []
    for place, tail in ((A, 1), (B, 2)):
        graph = world.driver.graph()
        kernel = world.driver.kernels
        function = next((h for h, k in kernel.items() if k.symbol == "_tail"), None)
        function = function or world.driver.load(Kernel("_tail", (8, 4)))
        world.driver.kernel(graph, function, [pointer(place), int32(tail)])
        graphs.append(world.kept(graph))
    assert "parameter 1: other bytes changed, at 8 from 0x00000001 to 0x00000002" in one((graphs[0], graphs[1]))


@pytest.mark.parametrize("encoded", [lambda a: pointer(a) + bytes(120), lambda a: bytes(16) + pointer(a >> 4) * 14])
def test_refused_a_tma_descriptor(world: World, encoded: Any) -> None:
    kernel = world.driver.load(Kernel("_tma", (8, 128)))
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.kernel(graph, kernel, [pointer(W), encoded(place)])
        graphs.append(world.kept(graph))
    assert "node 0 (_tma), parameter 1: a TMA descriptor changed" in one((graphs[0], graphs[1]))


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (KernelAttributes(cooperative=True), "cooperative launch"),
        (KernelAttributes(cluster=(2, 1, 1)), "launches clusters of (2, 1, 1)"),
        (KernelAttributes(device_updatable=True), "updated from the device"),
    ],
)
def test_refused_a_node_with_attributes_that_updates_lose(
    world: World, attributes: KernelAttributes, text: str
) -> None:
    graphs = world.capture(A, attributes=attributes), world.capture(B, attributes=attributes)
    assert text in one(graphs)


def test_refused_another_attribute(world: World) -> None:
    clustered = world.capture(B, attributes=KernelAttributes(cluster=(2, 1, 1)))
    assert "its attributes changed" in one((world.capture(A), clustered))


def test_refused_a_parameter_block_that_has_crashed_drivers(world: World) -> None:
    kernel = world.driver.load(Kernel("_large", (8, 4096)))
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.kernel(graph, kernel, [pointer(place), bytes(4096)])
        graphs.append(world.kept(graph))
    assert "its parameters take 4104 bytes" in one((graphs[0], graphs[1]))


def test_refused_a_copy_of_rows(world: World) -> None:
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.memcpy(graph, place, OUT, 8, height=2)
        graphs.append(world.kept(graph))
    assert "copies rows with a pitch" in one((graphs[0], graphs[1]))


def test_refused_nodes_that_cannot_be_looked_into(world: World) -> None:
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.kernel(graph, world.add, [pointer(place), pointer(W), pointer(OUT), int32(8)])
        world.driver.add(graph, NodeData("host"))
        graphs.append(world.kept(graph))
    assert one((graphs[0], graphs[1])) == "node 1 (host) cannot be looked into"


def test_empty_and_event_nodes_hold_no_address(world: World) -> None:
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.add(graph, NodeData("empty"))
        world.driver.kernel(graph, world.add, [pointer(place), pointer(W), pointer(OUT), int32(8)])
        world.driver.add(graph, NodeData("event_record"))
        graphs.append(world.kept(graph))
    (proof,) = prove(graphs[0], graphs[1], moved())
    assert proof.refusal is None and len(proof.sites) == 1


def test_refused_a_tensor_that_no_node_points_into(world: World) -> None:
    assert "no node holds its address" in one((world.capture(A), world.capture(A)), moved(first=C))


@pytest.fixture
def functor(world: World) -> Callable[..., Graph]:
    """Captures a kernel whose one struct is an address and other bytes."""
    kernel = world.driver.load(Kernel("_functor", (24,)))

    def capture(place: int, other: bytes) -> Graph:
        graph = world.driver.graph()
        world.driver.kernel(graph, kernel, [struct.pack("<Q16s", place, other)])
        return world.kept(graph)

    return capture


def test_bytes_of_a_struct_that_nobody_wrote_are_a_doubt(functor: Callable[..., Graph]) -> None:
    (proof,) = prove(functor(A, b"\1\x61\xb7\xbc\1"), functor(B, b"\1\0\0\0\1"), moved())
    assert proof.refusal is None and [site.offset for site in proof.sites] == [0]
    assert proof.doubt == (
        "node 0 (_functor), parameter 0: other bytes changed, at 8 from 0x00000001bcb76101 to 0x0000000100000001, "
        "and no moved tensor explains them"
    )
    (proof,) = prove(functor(A, b"same"), functor(B, b"same"), moved())
    assert proof.doubt is None


@pytest.mark.parametrize(
    "encoded",
    [
        lambda place: b"abc" + struct.pack("<Q", place),
        lambda place: struct.pack("<Q", place >> 4),
        lambda place: b"abcd" + struct.pack("<I", place >> 8 & 0xFFFFFFFF),
    ],
    ids=["unaligned", "in units of 16", "lower half, in units of 256"],
)
def test_refused_an_address_in_another_form(encoded: Callable[[int], bytes], functor: Callable[..., Graph]) -> None:
    reason = one((functor(A, encoded(A + 8)), functor(B, encoded(B + 8))))
    assert "changed as the address of x did, in another form" in reason


def test_refused_a_pointer_that_stayed_behind(world: World) -> None:
    reason = one((world.capture(A, w=A), world.capture(B, w=A)))
    assert reason == "node 0 (_add), parameter 1 points into its memory and stayed when it moved"


def test_refused_tensors_that_overlap(world: World) -> None:
    both = moved(), moved("view", A + 16, B + 16, 16)
    assert "x and view overlap" in one((world.capture(A), world.capture(B)), *both)
