"""A function's own tensors moved under its graphs: weights, buffers, a KV cache.

Rules: the tensor object stays and gets other memory, so the function itself, its graphs and the contract see the same
place. Nothing has moved when an error is raised. A graph is captured once more when a tensor moves for the first time,
to find where it holds the address; a graph in which that cannot be proved is captured anew each time, which is counted
in what `explain` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bucketgraph import selfcheck
from bucketgraph.binding.graph import MovableGraph
from bucketgraph.binding.recipe import state
from bucketgraph.binding.trial import third_run
from bucketgraph.contract import Contract
from bucketgraph.cuda.memory import Region
from bucketgraph.cuda.rebind import RebindError
from bucketgraph.errors import InputError
from bucketgraph.executables.cudagraph import CudaGraph

if TYPE_CHECKING:
    from bucketgraph.buckets import Bucket
    from bucketgraph.manager import BucketManager, Captured

    _Readers = list[tuple[BucketManager, Contract, list[str]]]

_SPARE = 0.5  # of the free memory: more is not set aside to verify a move


def rebind(managers: Sequence[BucketManager], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors other memory, all or none; calls that come after this use it.

    Args:
        managers: all that read them; of one family.
        tensors: by the name that the contract has for it, such as `layers.0.weight`: another of the same shape,
            strides and dtype, on the same device. What it holds from now on is what the function reads.

    Returns:
        the memory that was there before, by name.

    Raises:
        InputError: no function reads a tensor of this name, or the new one does not fit.
        NotWarmError, StaleError: as for a call.
    """
    from bucketgraph.warmup import warm_up

    with managers[0].family.turn():
        readers, held = _prepared(managers, tensors)
        before = {name: tensor.data for name, tensor in held.items()}
        for name, tensor in held.items():
            tensor.data = tensors[name].data
        again: list[tuple[BucketManager, list[Bucket]]] = []
        for manager, contract, own in readers:
            contract.accept(held[name] for name in own)
            manager.family.changes += 1
            stuck = [c.bucket for c in _graphs(manager) if not _follows(manager, c, own)]
            if stuck:
                again.append((manager, stuck))
        for manager, buckets in again:
            warm_up([manager], None, buckets)
        return before


def prepare(managers: Sequence[BucketManager], tensors: Mapping[str, Tensor]) -> None:
    """What `rebind` does before anything moves: check, and capture and verify graphs that never moved these.

    The function runs for that, as in warm-up, on the memory that is in place. Raises as `rebind` does.
    """
    with managers[0].family.turn():
        _prepared(managers, tensors)


def _prepared(managers: Sequence[BucketManager], tensors: Mapping[str, Tensor]) -> tuple[_Readers, dict[str, Tensor]]:
    """Who reads what, and the function's own tensors by name."""
    readers = _readers(managers, tensors)
    held = {name: _held(name, new, [contract for _, contract, _ in readers]) for name, new in tensors.items()}
    _require_apart(held, tensors)
    _require_alone(held, [contract for _, contract, _ in readers])
    work = [(m, c, own) for m, _, own in readers for c in _graphs(m) if not _is_known(m, c, own)]
    # Memory of its own where there is some: it is as aligned as any, and holds nothing to be put back.
    seconds = {name: _scratch(tensor) for name, tensor in held.items()} if work else {}
    for manager, captured, own in work:
        places = {}
        for name in own:
            found = seconds[name]
            places[name] = held[name], tensors[name] if found is None else found
        _prepare(manager, captured, places)
    return readers, held


def _readers(managers: Sequence[BucketManager], tensors: Mapping[str, Tensor]) -> _Readers:
    """The managers whose functions read any of these, and which. Raises InputError if one is read by none."""
    found = [(manager, manager.fresh_contract()) for manager in managers]
    for name in tensors:
        if not any(name in contract.tensors for _, contract in found):
            known = ", ".join(list(dict.fromkeys(key for _, contract in found for key in contract.tensors))[:20])
            raise InputError("the function reads no such tensor", given=name, expected=known or "one that it reads")
    readers = [(manager, contract, [n for n in tensors if n in contract.tensors]) for manager, contract in found]
    return [reader for reader in readers if reader[2]]


def _scratch(tensor: Tensor) -> Tensor | None:
    try:
        return torch.empty_like(tensor)
    except torch.OutOfMemoryError:
        return None


def _graphs(manager: BucketManager) -> list[Captured]:
    return [c for c in manager.captured.values() if c.error is None and isinstance(c.executable, CudaGraph)]


def _held(name: str, new: object, contracts: Sequence[Contract]) -> Tensor:
    found, *others = (contract.tensors[name] for contract in contracts if name in contract.tensors)
    if any(other is not found for other in others):
        raise InputError("the name stands for several tensors", given=name, hint="move them one manager at a time")
    if not isinstance(new, Tensor):
        raise InputError(f"{name} is not a tensor", given=type(new).__name__)
    sides = [(list(t.shape), t.stride(), t.dtype, t.device) for t in (new, found)]
    if sides[0] != sides[1]:
        texts = [f"{shape} {dtype} on {device} strides {stride}" for shape, stride, dtype, device in sides]
        raise InputError(f"{name} cannot move there", given=texts[0], expected=texts[1])
    return found


def _require_apart(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    regions = [Region.of(name, tensor) for tensors in (held, tensors) for name, tensor in tensors.items()]
    for position, one in enumerate(regions):
        for other in regions[:position]:
            if one.overlaps(other):
                raise InputError(f"{one.name} lies in memory of {other.name}, now or then", hint="give it its own")


def _require_alone(held: Mapping[str, Tensor], contracts: Sequence[Contract]) -> None:
    """Views of what moves would stay behind."""
    regions = {name: Region.of(name, tensor) for name, tensor in held.items()}
    for contract in contracts:
        for other, tensor in contract.tensors.items():
            if any(tensor is moved for moved in held.values()):
                continue
            for name, region in regions.items():
                if region.overlaps(Region.of(other, tensor)):
                    raise InputError(f"{other} lies in memory of {name}, and would stay there", hint="give it its own")


def _prepare(manager: BucketManager, captured: Captured, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Capture a bucket's graph once more, so that it can move these, if it ever can."""
    graph = captured.executable
    assert isinstance(graph, CudaGraph), "a graph's bucket"
    movable = graph if isinstance(graph, MovableGraph) else MovableGraph.of(graph)
    made = movable.with_state(tensors)
    free = torch.cuda.mem_get_info(manager.device)[0] if manager.device.type == "cuda" else 0
    try:
        made.capture()
    except RuntimeError as error:  # the one that serves goes on, and is captured anew after the move
        manager.family.examine(error)
        manager.fixed.setdefault(captured.bucket, {}).update(dict.fromkeys(tensors, f"{error}"))
        return
    captured.executable = made
    manager.family.changes += 1
    graph.release()
    if manager.device.type == "cuda":
        taken = (free - torch.cuda.mem_get_info(manager.device)[0]) / 2**20
        captured.mib += taken
        manager.family.mib += taken
    with manager.around_step():
        manager.settle(captured)
        for name, (tensor, second) in tensors.items():
            if made.can_move(state(name)) and _can_set_aside(tensor):
                _verify(manager, captured, name, second)
            elif made.can_move(state(name)) and (doubt := made.doubt(state(name))) is not None:
                made.refuse(state(name), f"{doubt}; there is too little memory to show that nothing depends on them")


def _can_set_aside(tensor: Tensor) -> bool:
    size = tensor.untyped_storage().nbytes()
    return not tensor.is_cuda or 8 * size <= _SPARE * torch.cuda.mem_get_info(tensor.device)[0]


def _verify(manager: BucketManager, captured: Captured, name: str, third: Tensor) -> None:
    """The third run, in the memory that the tensor moves to; what that holds is put back."""
    graph = captured.executable
    assert isinstance(graph, MovableGraph), "prepared"
    kept = third.clone()

    def fill() -> None:
        captured.inputs.fill(manager.example(captured.bucket.as_dict(), selfcheck.generator(captured.bucket)))

    try:
        third_run(graph, state(name), third, fill, manager.outputs_of, read_only=False)
    finally:
        third.copy_(kept)


def _is_known(manager: BucketManager, captured: Captured, names: Sequence[str]) -> bool:
    """Whether it is known already that a bucket's graph can move these, or that it cannot."""
    graph, fixed = captured.executable, manager.fixed.get(captured.bucket, {})
    if any(name in fixed for name in names):
        return True
    # A refusal is known, too: looking once more would run the function when its memory may have moved in part.
    return isinstance(graph, MovableGraph) and all(
        graph.can_move(state(name)) or state(name) in graph.refusals for name in names
    )


def _follows(manager: BucketManager, captured: Captured, names: Sequence[str]) -> bool:
    """Point a graph at where these are now; False, counted with the reason, if it must be captured anew."""
    graph, fixed = captured.executable, dict(manager.fixed.get(captured.bucket, {}))
    if isinstance(graph, MovableGraph):
        fixed |= {n: graph.refusals.get(state(n), "it has no place") for n in names if not graph.can_move(state(n))}
    if fixed:
        manager.fixed[captured.bucket] = fixed
    reason = next((f"{name}: {fixed[name]}" for name in names if name in fixed), None)
    if reason is None and isinstance(graph, MovableGraph):
        try:
            graph.go_home()
            return True
        except RebindError as error:  # this place, not every place
            reason = str(error)
    manager.note_recapture(f"{captured.bucket}: {reason}")
    return False
