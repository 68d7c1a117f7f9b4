"""Graphs that use tensors where they lie: the caller's inputs and outputs, staging buffers, the function's own state.

`graph.py` captures a bucket so that it is known where its nodes hold addresses; `trial.py` verifies that in warm-up;
`calls.py` decides at each call what is bound and what is copied; `state.py` moves weights and caches. What the set asks
for and what cannot be had is copied, as ever, and `explain` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketgraph import executables
from bucketgraph.binding.calls import Binding, OwnMemory
from bucketgraph.binding.graph import MovableGraph
from bucketgraph.binding.recipe import Recipe, output
from bucketgraph.binding.state import prepare, rebind
from bucketgraph.binding.trial import try_out
from bucketgraph.config import PhaseSpec
from bucketgraph.executables import Executable
from bucketgraph.slots import StaticInputs

if TYPE_CHECKING:
    from bucketgraph.manager import BucketManager, Captured

__all__ = ["Binding", "MovableGraph", "explain", "how", "make", "prepare", "rebind", "settle"]


def asked(spec: PhaseSpec) -> tuple[str, ...]:
    """What a set wants bound: inputs, outputs, and `io` for the copies of host inputs."""
    inputs = [name for name, item in spec.inputs.items() if item.bind != "copy"]
    outputs = [output(name) for name, item in spec.outputs.items() if item.bind != "copy"]
    return (*inputs, *outputs, *(["io"] if spec.io == "in_graph" else []))


def make(manager: BucketManager, fn: Callable[..., Any], inputs: StaticInputs) -> Executable:
    """An executable of the manager's kind; a graph that can be bound where the set asks for that."""
    spec, wanted = manager.spec, asked(manager.spec)
    if manager.kind != "cudagraph" or not wanted:
        return executables.make(manager.kind, fn, inputs.views, manager.family)
    bound = tuple(name for name in spec.inputs if name in wanted)
    outputs = tuple(name for name in spec.outputs if output(name) in wanted)
    recipe = Recipe(bound, outputs, manager.outputs_of)
    # Not from a bound one on: its address would stay in that node when it moves, and prove nothing.
    first = next((slot.name for slot in inputs.slots if slot.name not in bound), None)
    if "io" in wanted and first is not None:
        packed, staging = inputs.packed(first)
        recipe = replace(recipe, packed=packed, staging=staging)
    return MovableGraph(fn, inputs.views, manager.family, recipe)


def settle(manager: BucketManager, captured: Captured) -> None:
    """After capture and check: what this bucket's calls will bind. The family's turn must be held."""
    if isinstance(captured.executable, MovableGraph) and asked(manager.spec):
        arena = captured.inputs.arena_bytes
        captured.binding = Binding(captured.inputs, captured.executable, OwnMemory.of(manager.family, arena))
        try_out(manager, captured)


def how(manager: BucketManager, captured: Captured) -> dict[str, str]:
    """`patch`, `in_graph`, or what happens instead and why, for each thing that the set wants bound."""
    if captured.binding is not None and captured.error is None:
        found = captured.binding.how()
        idle = {"io": "staged: all inputs are bound"} if "io" in asked(manager.spec) else {}
        return idle | found
    reason = captured.error or f"the executable is {captured.serves}, which has no graph to be patched"
    return {name: f"{'staged' if name == 'io' else 'copy'}: {reason}" for name in asked(manager.spec)}


def explain(manager: BucketManager) -> list[str]:
    """A line for each bucket, and under it what is bound, where, what is copied and why."""
    found = []
    for bucket, captured in manager.captured.items():
        lines = []
        if captured.binding is not None and captured.error is None:
            lines += [f"  {line}" for line in captured.binding.explain(how(manager, captured))]
        else:
            lines += [f"  {name}: {text}" for name, text in how(manager, captured).items()]
            if isinstance(captured.executable, MovableGraph):
                lines += [f"  {line}" for line in captured.executable.explain()]
        fixed = manager.fixed.get(bucket, {}).items()
        lines += [f"  state {name}: captured anew when it moves: {reason}" for name, reason in fixed]
        found += [f"{manager.name} {bucket}:", *lines] if lines else []
    return found
