"""Rebinding: an update is whole or does not happen, launches read what is bound, and poison finds what bytes hide."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from null.driver_double import (
    BASE,
    OUT,
    SIZE,
    A,
    B,
    C,
    Captured,
    Kernel,
    Memory,
    W,
    World,
    int32,
    made_world,
    moved,
    pointer,
    right,
)

from bucketgraph.cuda import Check, Graph, Moved, Rebinder, RebindError
from bucketgraph.errors import CaptureError, InputError


@pytest.fixture
def world() -> World:
    return made_world()


# -- rebinding -------------------------------------------------------------------------------------------------------


def rebinder(world: World, **options: Any) -> Rebinder:
    return Rebinder(world.capture(A), world.capture(B), moved(), **options)


def test_a_launch_reads_the_tensor_where_it_is_bound(world: World) -> None:
    made = rebinder(world)
    for place in (A, C, B, A):
        made.launch({"x": place}, stream=7)
        assert world.get(OUT) == right(world, place)
        assert made.address("x") == place
    assert [stream for _, stream in world.driver.launches] == [7] * 4


def test_only_nodes_that_change_are_set(world: World) -> None:
    graphs = world.capture(A), world.capture(A, w=C)
    made = Rebinder(*graphs, moved("w", W, C))
    world.driver.sets.clear()
    made.rebind("w", W)
    assert world.driver.sets == []
    made.rebind("w", C)
    assert [node for _, node in world.driver.sets] == [graphs[0].nodes[0].handle]


def test_the_drivers_own_arguments_are_never_written(world: World) -> None:
    first = world.capture(A)
    made = Rebinder(first, world.capture(B), moved())
    made.rebind("x", C)
    assert world.driver.untouched(first.handle)
    assert Graph(first.handle, world.driver).nodes == first.nodes


def test_tensors_that_share_a_node_keep_each_others_addresses(world: World) -> None:
    made = rebinder(world)
    made.add(world.capture(A, w=B), moved("w", W, B))
    made.rebind("w", C)
    made.launch({"x": B}, 0)
    assert world.get(OUT) == right(world, B, C)
    made.launch({"x": A, "w": W}, 0)
    assert world.get(OUT) == right(world, A, W)


def test_an_output_is_rebound_too(world: World) -> None:
    made = Rebinder(world.capture(A), world.capture(A, out=C), moved("out", OUT, C))
    made.launch({"out": B}, 0)
    assert world.get(B) == right(world, A) and world.get(OUT) == (0.0,) * 16


def test_a_tensor_is_taken_by_its_address(world: World) -> None:
    tensors = [torch.zeros(16) for _ in range(3)]
    places = [tensor.data_ptr() for tensor in tensors]
    graphs = world.capture(places[0]), world.capture(places[1])
    made = Rebinder(*graphs, Moved.of("x", tensors[0], tensors[1]))
    made.rebind("x", tensors[2])
    assert made.address("x") == places[2]
    with pytest.raises(InputError, match="x has another size: given 32 bytes, expected 64 bytes"):
        made.rebind("x", torch.zeros(8))


def test_refused_an_address_that_breaks_the_alignment(world: World) -> None:
    made = rebinder(world)
    with pytest.raises(RebindError, match=r"x is not aligned for node 0 \(_add\): .* expected a multiple of 16 bytes"):
        made.rebind("x", C + 8)
    with pytest.raises(RebindError):
        made.rebind("x", 0)
    assert made.address("x") == A and world.driver.sets[2:] == []


def test_a_view_is_aligned_where_its_sites_are(world: World) -> None:
    """The tensor may start anywhere, as long as what kernels get is as divisible as it was."""
    graphs = []
    for place in (A + 8, B + 8):
        graph = world.driver.graph()
        world.driver.kernel(graph, world.add, [pointer(place + 8), pointer(W), pointer(OUT), int32(8)])
        graphs.append(world.kept(graph))
    made = Rebinder(graphs[0], graphs[1], moved(first=A + 8, second=B + 8))
    made.rebind("x", C + 8)
    with pytest.raises(RebindError, match="a multiple of 16 bytes, less 8"):
        made.rebind("x", C)


def test_a_refused_tensor_says_why_each_time(world: World) -> None:
    made = Rebinder(world.capture(A), world.capture(B, grid=(9, 1, 1)), moved())
    assert made.refusal("x") is not None
    with pytest.raises(RebindError, match=r"x cannot be rebound: given node 0.*its grid changed"):
        made.rebind("x", C)


def test_proofs_of_several_pairs_stand_alone(world: World) -> None:
    made = rebinder(world)
    made.add(world.capture(A, out=C, grid=(9, 1, 1)), moved("out", OUT, C))
    assert made.refusal("x") is None and made.refusal("out") is not None
    made.add(world.capture(A, w=C), moved("part of x", A + 16, C, 16))
    assert made.refusal("part of x") is not None
    with pytest.raises(InputError, match="already proved: given x"):
        made.add(world.capture(B), moved())
    with pytest.raises(InputError, match="no such tensor"):
        made.rebind("y", C)


def test_overlapping_tensors_of_two_pairs_are_refused(world: World) -> None:
    made = rebinder(world)
    made.add(world.capture(B), moved("again"))
    assert made.refusal("again") == "it overlaps x, so an address may be of either"


def test_what_the_driver_refuses_is_known_before_the_first_call(world: World) -> None:
    first = world.capture(A)
    world.driver.refuse = lambda executable, node: 1 if node == first.nodes[1].handle else 0
    made = Rebinder(first, world.capture(B), moved())
    reason = made.refusal("x")
    assert reason is not None and "node 1 (memcpy unified to unified): cuGraphExecMemcpyNodeSetParams failed" in reason


def test_an_update_that_fails_halfway_is_taken_back(world: World) -> None:
    first = world.capture(A)
    made = Rebinder(first, world.capture(B), moved())
    made.rebind("x", B)
    failures = iter([0, 1])
    world.driver.refuse = lambda executable, node: next(failures, 0)
    with pytest.raises(RebindError, match="cannot rebind x: given cuGraphExecMemcpyNodeSetParams failed"):
        made.rebind("x", C)
    assert made.address("x") == B
    made.launch({}, 0)
    assert world.get(OUT) == right(world, B)


def test_several_tensors_are_rebound_together_or_not_at_all(world: World) -> None:
    made = rebinder(world)
    made.add(world.capture(A, w=B), moved("w", W, B))
    with pytest.raises(RebindError):
        made.rebind("w", C + 4)
    with pytest.raises(RebindError):
        made.launch({"x": B, "w": C + 4}, 0)
    assert made.address("x") == A and world.driver.launches == []
    made.launch({}, 0)
    assert world.get(OUT) == right(world, A)


def test_an_update_that_cannot_be_taken_back_ends_all_launches(world: World) -> None:
    made = rebinder(world)
    failures = iter([0, 1])
    world.driver.refuse = lambda executable, node: next(failures, 1)
    with pytest.raises(RebindError, match="cannot rebind"):
        made.rebind("x", C)
    world.driver.refuse = lambda executable, node: 0
    with pytest.raises(RebindError, match="unknown state"):
        made.launch({}, 0)
    assert world.driver.launches == []


def test_a_new_executable_gets_what_was_bound(world: World) -> None:
    captured = Captured(world.driver, world.capture(A).handle)
    captured.instantiate()
    made = Rebinder(Graph.of(captured, world.driver), world.capture(B), moved())  # type: ignore[arg-type]
    made.rebind("x", C)
    captured.instantiate()
    made.renew()
    made.launch({}, 0)
    assert world.get(OUT) == right(world, C) and made.address("x") == C


def doubtful(world: World) -> Rebinder:
    """Of a kernel whose struct has padding that differs between the captures."""
    kernel = world.driver.load(Kernel("_functor", (24,)))
    graphs = []
    for place, padding in ((A, 5), (B, 77)):
        graph = world.driver.graph()
        world.driver.kernel(graph, kernel, [struct.pack("<QQQ", place, 1, padding)])
        graphs.append(world.kept(graph))
    return Rebinder(graphs[0], graphs[1], moved())


def test_a_doubtful_tensor_moves_only_after_it_was_verified(world: World) -> None:
    made = doubtful(world)
    assert made.refusal("x") is None and "other bytes changed, at 16" in str(made.doubt("x"))
    assert any("to be verified before it moves" in line for line in made.explain())
    with pytest.raises(RebindError, match="x cannot be rebound before it is verified: given node 0"):
        made.rebind("x", C)
    made.renew()

    def check(right: bool) -> Check[int]:
        return Check(lambda: 0, lambda: None, lambda: 0, lambda one, other: right)

    assert made.verify("x", C, check(True)) is None and made.doubt("x") is None
    made.rebind("x", C)
    made.rebind("x", A)
    assert "other results" in str(made.verify("x", C, check(False)))
    with pytest.raises(RebindError, match="other results"):
        made.rebind("x", C)


def test_a_check_that_raises_leaves_the_doubt(world: World) -> None:
    made = doubtful(world)
    with pytest.raises(ZeroDivisionError):
        made.verify("x", C, Check(lambda: 1 // 0, lambda: None, lambda: 0, lambda one, other: True))
    assert made.doubt("x") is not None
    made.trust("x")
    made.rebind("x", C)


def test_a_graph_without_an_executable_cannot_be_rebound(world: World) -> None:
    graph = world.capture(A)
    bare = Graph.of(Captured(world.driver, graph.handle), world.driver)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="instantiate"):
        Rebinder(bare, world.capture(B), moved())


def test_updates_and_launches_share_the_lock(world: World) -> None:
    made = rebinder(world, lock=(lock := threading.RLock()))
    done = threading.Event()

    def other() -> None:
        made.rebind("x", B)
        done.set()

    def replay() -> bool:
        thread.start()
        return done.wait(0.1)

    thread = threading.Thread(target=other)
    with lock:
        assert made.run({"x": C}, replay) is False
        assert made.address("x") == C
    thread.join(5)
    assert made.address("x") == B


def test_many_random_rebinds(world: World) -> None:
    made = rebinder(world)
    made.add(world.capture(A, w=B), moved("w", W, B))
    chosen = random.Random(0)
    places = [BASE + 0x8000 + 0x40 * n for n in range(64)]
    for place in places:
        world.put(place, [chosen.randrange(-99, 99) for _ in range(16)])
    for _ in range(200):
        new = {name: chosen.choice(places) for name in chosen.sample(["x", "w"], chosen.randint(0, 2))}
        made.launch(new, 0)
        assert world.get(OUT) == right(world, made.address("x"), made.address("w"))


def test_explain_lists_sites_and_reasons(world: World) -> None:
    made = rebinder(world)
    made.add(world.capture(A, out=C, grid=(9, 1, 1)), moved("out", OUT, C))
    assert made.explain() == [
        f"x: 2 sites, at 0x{A:x}, not verified",
        "  node 0 (_add), parameter 0, byte 0 of its block: x + 32, divisible by 16",
        "  node 1 (memcpy unified to unified), parameter 0, byte 0 of its block: x + 0, divisible by 16",
        "out: refused: node 0 (_add): its grid changed from (4, 1, 1) to (9, 1, 1)",
    ]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (torch.zeros(4), torch.zeros(5), "differs in more than its place"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), "differs in more than its place"),
        (torch.zeros(4, 4), torch.zeros(4, 4).t(), "differs in more than its place"),
        (torch.zeros(0), torch.zeros(0), "two places"),
    ],
)
def test_moved_tensors_are_alike_and_apart(first: torch.Tensor, second: torch.Tensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Moved.of("x", first, second)
    storage = torch.zeros(8)
    with pytest.raises(InputError, match="two places"):
        Moved.of("x", storage[:4], storage[2:6])


# -- the third run ---------------------------------------------------------------------------------------------------


def check(world: World, made: Rebinder, **changed: Any) -> Check[tuple[float, ...]]:
    saved = world.driver.memory.read(A, SIZE), world.driver.memory.read(B, SIZE)

    def poison() -> None:
        for place in (A, B):
            world.put(place, [float("nan")] * 16)

    def replay() -> tuple[float, ...]:
        made.launch({}, 0)
        return world.get(OUT)

    def restore() -> None:
        for place, data in zip((A, B), saved, strict=True):
            world.driver.memory.write(place, data)

    steps: dict[str, Any] = {
        "expected": lambda: right(world, C),
        "poison": poison,
        "replay": replay,
        "same": lambda a, b: a == b,
        "restore": restore,
    }
    return Check(**{**steps, **changed})


def test_a_right_replay_on_poison_is_verified_and_bound_back(world: World) -> None:
    made = rebinder(world)
    assert made.verify("x", C, check(world, made)) is None
    assert made.address("x") == A and "verified on poisoned memory" in made.explain()[0]
    made.launch({}, 0)
    assert world.get(OUT) == right(world, A)


def test_an_address_that_no_site_shows_is_caught_on_poison(world: World) -> None:
    """A kernel that finds the tensor through device memory reads the old place whatever its parameters say."""

    def through_memory(memory: Memory, values: Sequence[bytes]) -> None:
        memory.write(OUT + 32, memory.read(A, 32))

    hidden = world.driver.load(Kernel("_hidden", (8,), through_memory))
    graphs = []
    for place in (A, B):
        graph = world.driver.graph()
        world.driver.kernel(graph, world.add, [pointer(place + 32), pointer(W), pointer(OUT), int32(8)])
        world.driver.kernel(graph, hidden, [pointer(OUT)])
        graphs.append(world.kept(graph))
    made = Rebinder(graphs[0], graphs[1], moved())
    assert made.refusal("x") is None
    reason = made.verify("x", C, check(world, made))
    assert reason is not None and "the old memory is still used" in reason
    assert made.refusal("x") == reason and "refused" in made.explain()[0]
    with pytest.raises(RebindError, match="old memory"):
        made.rebind("x", C)


def test_a_write_into_the_old_memory_is_caught(world: World) -> None:
    made = rebinder(world)
    reason = made.verify("x", C, check(world, made, intact=lambda: False))
    assert reason is not None and "wrote into the old" in reason


def test_a_step_that_raises_leaves_everything_as_it_was(world: World) -> None:
    made = rebinder(world)

    def fails() -> tuple[float, ...]:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        made.verify("x", C, check(world, made, replay=fails))
    assert made.address("x") == A and made.refusal("x") is None
    assert world.get(A)[0] == 0.0
