"""Warm-up of movable tensors: the third run on poison, and whether copying or binding is the faster.

A proof from bytes does not see an address that lies in device memory. So the tensor is put at a third place, what it
held before is overwritten (NaN, or zeros where there is none), and a replay must give the same bits; what it wrote must
have gone to the third place, and nothing to the others. An input must not be written at all: it is the caller's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bucketgraph import selfcheck
from bucketgraph.binding.graph import MovableGraph
from bucketgraph.binding.recipe import STAGING
from bucketgraph.cuda.verify import Check
from bucketgraph.errors import BucketGraphError
from bucketgraph.executables.family import synchronize
from bucketgraph.selfcheck import same_bits

if TYPE_CHECKING:
    from bucketgraph.manager import BucketManager, Captured

_ROUNDS = 21  # of each way, in turns


class _Unfit(BucketGraphError):
    """What was found before anything was moved."""


def try_out(manager: BucketManager, captured: Captured) -> None:
    """Verify all that a bucket's calls may bind; measure what is `auto`. The family's turn must be held."""
    binding = captured.binding
    if binding is None:
        return
    graph = binding.graph

    def fill() -> None:
        sizes = captured.bucket.as_dict()
        captured.inputs.fill(manager.example(sizes, selfcheck.generator(captured.bucket)))

    if graph.can_move(STAGING) and (reason := _copies_in(manager, captured, fill)) is not None:
        graph.refuse(STAGING, reason)
    for name in [name for name in binding.how() if binding.bound(name)]:
        read_only = name in graph.recipe.inputs
        reason = third_run(graph, name, torch.empty_like(graph.home(name)), fill, manager.outputs_of, read_only)
        if reason is not None:
            graph.refuse(name, reason)
            binding.copy(name, reason)
        elif read_only and manager.spec.inputs[name].bind == "auto":
            _measure(manager, captured, name)


def third_run(
    graph: MovableGraph,
    name: str,
    third: Tensor,
    fill: Callable[[], None],
    select: Callable[[Any], dict[str, Tensor]],
    read_only: bool,
) -> str | None:
    """Replay with a tensor at a third place and its old one poisoned. Returns why it may not be moved, if so.

    Args:
        third: of the tensor's shape; what it holds is lost. The tensor's own content is as it was, afterwards.
        fill: writes legal values into the slots.
    """
    home, device = graph.home(name), graph.home(name).device
    fill()
    before = home.clone()

    def results(raw: object, place: Tensor) -> list[Tensor]:
        synchronize(device)
        return [tensor.clone() for tensor in (*select(raw).values(), place)]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(same_bits(a, b) for a, b in zip(one, other, strict=True))

    def expected() -> list[Tensor]:
        found = []
        for _ in range(2):
            fill()
            home.copy_(before)
            found.append(results(graph.replay(), home))
        if read_only and not same_bits(home, before):
            raise _Unfit("the function writes into it, and the caller's tensor is not its to change")
        if not same(*found):
            raise _Unfit("two replays of the same memory differ, so that none can be compared with another place's")
        third.copy_(before)
        return found[0]

    def poison() -> None:
        fill()
        ruin(home)

    try:
        return graph.verify(
            name,
            third,
            Check(
                expected,
                poison,
                lambda: results(graph.launch(), third),
                same,
                lambda: same_bits(home, ruin(torch.empty_like(home))),
                lambda: (home.copy_(before), None)[1],
            ),
        )
    except _Unfit as error:
        return str(error)


def ruin(tensor: Tensor) -> Tensor:
    """Values that change any result that they go into, and that are no illegal index."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0)


def _copies_in(manager: BucketManager, captured: Captured, fill: Callable[[], None]) -> str | None:
    """Each staging buffer in turn, with the others and the slots zeroed, against slots that were filled before."""
    binding = captured.binding
    assert binding is not None, "asked by `try_out`"
    graph, inputs = binding.graph, captured.inputs
    graph.trust(STAGING)
    packed, staging = graph.recipe.packed, graph.recipe.staging
    assert packed is not None, "the graph copies them in"

    def run(places: dict[str, int]) -> list[Tensor]:
        raw = graph.replay(places)
        synchronize(manager.device)
        return [tensor.clone() for tensor in manager.outputs_of(raw).values()]

    fill()
    filled = packed.to(staging[0].device, copy=True)
    want = run({})
    for buffer in staging:
        for written in (*staging, packed):
            written.zero_()
        buffer.copy_(filled)
        if not all(map(same_bits, run({STAGING: buffer.data_ptr()}), want)):
            inputs.forget()
            return "replays that copied their inputs themselves gave other results"
    inputs.forget()
    return None


def _measure(manager: BucketManager, captured: Captured, name: str) -> None:
    """Time of a launch, from the call to its end: the input copied to its slot, and bound to two places in turn."""
    binding = captured.binding
    assert binding is not None, "asked by `try_out`"
    graph, home = binding.graph, binding.graph.home(name)
    places = [home.clone(), home.clone()]

    def copied(turn: int) -> None:
        home.copy_(places[turn % 2])
        graph.replay()

    def patched(turn: int) -> None:
        graph.replay({name: places[turn % 2].data_ptr()})

    times: dict[str, list[float]] = {"copy": [], "patch": []}
    for turn in range(_ROUNDS):
        for way, run in (("copy", copied), ("patch", patched)):
            synchronize(manager.device)
            began = time.perf_counter()
            run(turn)
            synchronize(manager.device)
            times[way].append(1e6 * (time.perf_counter() - began))
    graph.replay()  # back home, before the places go
    found = {way: statistics.median(each) for way, each in times.items()}
    binding.measured[name] = found
    if found["copy"] <= found["patch"]:
        binding.copy(name, "it was the faster when both were measured")
