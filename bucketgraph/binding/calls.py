"""Which tensors of a call a bucket's graph uses where the caller has them, which are copied, and why.

Rules: a tensor that cannot be bound at this call is copied for this call, and the reason is counted; a graph never
reads memory that its own launch overwrites; nothing is bound that the third run on poison did not confirm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from bucketgraph.binding.graph import MovableGraph
from bucketgraph.binding.recipe import STAGING, output
from bucketgraph.cuda.memory import Region
from bucketgraph.cuda.rebind import RebindError
from bucketgraph.executables.family import Family
from bucketgraph.layouts import Layout
from bucketgraph.slots import StaticInputs


@dataclass
class _Bindable:
    """One movable tensor, as calls are held to it."""

    place: Tensor  # at home
    alignments: tuple[tuple[int, int], ...]
    counts: Counter[str] = field(default_factory=Counter)  # calls that bound it, and copies by their reason

    def unfit(self, tensor: Tensor, own: OwnMemory) -> str | None:
        """Why this one must be copied; None if the graph can use it as it is."""
        place = self.place
        if tensor.device != place.device:
            return f"it is on {tensor.device}"
        if tensor.shape != place.shape:
            return "it needs padding"
        if tensor.dtype != place.dtype:
            return f"it is {tensor.dtype}"
        if tensor.stride() != place.stride():
            return f"it is laid out otherwise, with strides {tensor.stride()}"
        address = tensor.data_ptr()
        for size, inside in self.alignments:
            if (address + inside) % size:
                return f"its address is not a multiple of {size} bytes" + (f", less {inside}" if inside else "")
        if own.holds(tensor):
            return "it lies in memory of the graphs or of the function, which a launch may overwrite"
        return None


class OwnMemory:
    """What launches of a family may write: private pools, slots, what the functions read. Looked up after changes."""

    def __init__(self, family: Family) -> None:
        self._family = ref(family)
        self._arenas: set[Region] = set()
        self._ends: list[int] = []
        self._starts: list[int] = []
        self._seen: int | None = None

    @classmethod
    def of(cls, family: Family, arena: Tensor) -> OwnMemory:
        """The family's, which knows of this arena, too."""
        found = _OWN.setdefault(family, cls(family))
        found._arenas.add(Region.of("arena", arena))
        found._seen = None
        return found

    def holds(self, tensor: Tensor) -> bool:
        family = self._family()
        if family is not None and self._seen != family.changes:
            self._look(family)
        found = Region.of("", tensor)
        after = bisect_right(self._starts, found.end - 1)
        return after > 0 and self._ends[after - 1] > found.address

    def _look(self, family: Family) -> None:
        """Segments of any private pool, not of the family's alone: whose results they hold is not known."""
        segments = torch.cuda.memory_snapshot() if family.device.type == "cuda" else []
        pools = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
        spans = [(s["address"], s["address"] + s["total_size"]) for s in pools]
        read = {Region.of(name, tensor) for each in family.contracts for name, tensor in each.tensors.items()}
        spans += [(region.address, region.end) for region in self._arenas | read if region.size]
        self._starts, self._ends = [], []
        for start, end in sorted(spans):  # joined where they meet: views lie in each other
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._seen = family.changes


_OWN: WeakKeyDictionary[Family, OwnMemory] = WeakKeyDictionary()


class Binding:
    """One bucket's calls."""

    def __init__(self, inputs: StaticInputs, graph: MovableGraph, own: OwnMemory) -> None:
        self.inputs, self.graph, self._own = inputs, graph, own
        self.copied: dict[str, str] = {}  # inputs and outputs that no call binds, with the reason
        self.measured: dict[str, dict[str, float]] = {}  # us of a call with an `auto` input copied, and patched
        self.direct = Counter[str]()  # calls whose host inputs the graph copied itself, and why others did not
        packed = graph.recipe.packed
        start = packed.data_ptr() - inputs.arena_bytes.data_ptr() if packed is not None else 0
        self._not_copied_in = {name for name, (at, _) in inputs.spans.items() if at < start}
        self._names = (*graph.recipe.inputs, *map(output, graph.recipe.outputs))
        self._bound: dict[str, _Bindable] = {}
        self.settle()

    def settle(self) -> None:
        """Take over what the graph can move by now."""
        for name in self._names:
            if not self.graph.can_move(name):
                self.copied.setdefault(name, self.graph.refusals.get(name, "it was not captured"))
            elif name not in self.copied and name not in self._bound:
                self._bound[name] = _Bindable(self.graph.home(name), self.graph.alignments(name))

    def copy(self, name: str, reason: str) -> None:
        """Bind this one in no call from now on."""
        self.copied[name] = reason
        self._bound.pop(name, None)

    def bound(self, name: str) -> bool:
        return name in self._bound

    def run(
        self, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor], layout: Layout | None = None
    ) -> tuple[Any, Collection[str]]:
        """Fill what is copied, point the graph at the rest, and launch. The family's turn must be held.

        Args:
            layout: as `StaticInputs.fill` has it.

        Returns:
            what the function returned, in the pool, and which outputs were written to `out` already.
        """
        places = {name: inputs[name].data_ptr() for name in self._fitting(inputs)}
        targets = {output(name): tensor for name, tensor in out.items()}
        written = self._fitting(targets)  # the graph does that last: even over an input, which was read by then
        places |= {name: targets[name].data_ptr() for name in written}
        self._fill(inputs, places, layout)
        try:
            raw = self.graph.replay(places)
        except RebindError as error:  # nothing ran: copy it all, now and later
            for name in places:
                if name != STAGING:
                    self.copy(name, str(error))
            self.inputs.fill(inputs, layout=layout)
            return self.graph.replay(), ()
        return raw, [name.removeprefix("output ") for name in written]

    def _fitting(self, tensors: Mapping[str, Tensor]) -> list[str]:
        fitting = []
        for name, bound in self._bound.items():
            if name in tensors:
                reason = bound.unfit(tensors[name], self._own)
                bound.counts[reason or ""] += 1
                if reason is None:
                    fitting.append(name)
        return fitting

    def _fill(self, inputs: Mapping[str, Tensor], places: dict[str, int], layout: Layout | None) -> None:
        """Adds the staging buffer that the graph copies from, if it does."""
        if not self.graph.can_move(STAGING):
            self.inputs.fill(inputs, places, layout)
            return
        for name, tensor in inputs.items():
            if name not in places and (name in self._not_copied_in or not tensor.is_cpu):
                where = "is bound, but not in this call" if tensor.is_cpu else f"is on {tensor.device}"
                self.direct[f"{name} {where}"] += 1
                self.inputs.fill(inputs, places, layout)
                return
        self.direct[""] += 1
        places[STAGING] = self.graph.recipe.staging[self.inputs.stage(inputs, layout)].data_ptr()

    def how(self) -> dict[str, str]:
        """`patch`, or `copy: why`, by input and output; and `in_graph`, or why not, of the host inputs' copies."""
        found = {name: "patch" if name in self._bound else f"copy: {self.copied[name]}" for name in self._names}
        if self.graph.can_move(STAGING):
            found["io"] = "in_graph"
        elif STAGING in self.graph.refusals:
            found["io"] = f"staged: {self.graph.refusals[STAGING]}"
        return found

    def explain(self, ways: Mapping[str, str]) -> list[str]:
        """Lines for people: what is bound, what is not and why, where the graph holds addresses, and what calls did."""
        lines = []
        for name, how in ways.items():
            times = self.measured.get(name)
            lines.append(f"{name}: {how}" + (f" ({_times(times)})" if times else ""))
            counts = self.direct if name == "io" else self._bound[name].counts if name in self._bound else Counter()
            bound = "copied by the graph" if name == "io" else "bound"
            lines += [f"  {count} calls: {reason or bound}" for reason, count in counts.most_common()]
        return lines + [f"  {line}" for line in self.graph.explain()]


def _times(times: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {value:.1f} us" for way, value in times.items())
