"""A bucket's graph whose tensors may lie elsewhere at each launch: inputs, outputs, staging, state of the function.

Capturing: the function is recorded until the pool has grown and two captures agree byte by byte; once more for each
tensor, at another place; and last of all the graph that serves. Every one starts from the same free memory, since the
results of all but the last are dropped, so temporaries fall on the same addresses. What does not come out provable is
refused with its reason, and stays where it was captured; a bucket never fails for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bucketgraph.binding.recipe import STAGING, NoCopyIn, Recipe, moved, output, state
from bucketgraph.cuda.driver import Driver, DriverError, load_driver
from bucketgraph.cuda.graph import Graph
from bucketgraph.cuda.rebind import Rebinder
from bucketgraph.cuda.sites import Moved
from bucketgraph.cuda.verify import Check
from bucketgraph.errors import BucketGraphError, NotWarmError
from bucketgraph.executables.cudagraph import CudaGraph, recording
from bucketgraph.executables.family import Family

_GROWTHS = 4  # captures until two agree
_HOME: Mapping[str, int] = {}


class MovableGraph(CudaGraph):
    """`CudaGraph` that keeps its graph and sets addresses in its executable before a launch."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Mapping[str, Tensor],
        family: Family,
        recipe: Recipe,
        driver: Driver | None = None,
    ) -> None:
        super().__init__(fn, inputs, family)
        self.recipe = recipe
        self.refusals: dict[str, str] = {}  # by movable tensor: why it stays
        self.copies: dict[str, Tensor] = {}  # outputs that the graph copies out of the pool
        self._state: dict[str, Tensor] = {}  # the function's own tensors that are movable, too
        self._seconds: Mapping[str, Tensor] = {}  # while capturing: where they lie the second time
        self._homes: dict[str, Tensor] = {}
        self._rebinder: Rebinder | None = None
        self._driver = driver
        self._executable = 0
        self._copy_in: int | None = None  # the node that copies from staging
        self._copies_in = True

    # -- capture -----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture and prove. Raises as `CudaGraph.capture` does, where not even the plain graph can be captured."""
        try:
            self._driver = self._driver or load_driver()
            try:
                self._capture()
            except NoCopyIn as error:  # the rest may be movable still
                self.recipe, self._copy_in, self.refusals = replace(self.recipe, packed=None), None, {}
                self._capture()
                self.refusals[STAGING] = str(error)
        except Exception as error:  # no driver, one that refuses, or a function that is captured only once
            if self._family.broken is not None:
                raise
            reason = " ".join(str(error).split())[:300]
        else:
            return
        finally:
            self._seconds = {}
        self.refusals |= dict.fromkeys(self._wanted(), reason)
        self._rebinder, self._homes, self.copies, self._copy_in = None, {}, {}, None
        super().capture()

    def with_state(self, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> MovableGraph:
        """Another graph of the same, not captured yet, in which these tensors of the function are movable, too.

        Args:
            tensors: by name, each with a second place: memory that nothing is read from or written to meanwhile.
        """
        made = type(self)(self._fn, self._inputs, self._family, self.recipe, self._driver)
        made._state = self._state | {name: tensor for name, (tensor, _) in tensors.items()}
        made._seconds = {name: second for name, (_, second) in tensors.items()}
        return made

    @classmethod
    def of(cls, plain: CudaGraph) -> MovableGraph:
        """A cold one of what a plain graph was captured of."""
        return cls(plain._fn, plain._inputs, plain._family, Recipe())

    def _wanted(self) -> list[str]:
        staged = [STAGING] if self.recipe.packed is not None else []
        names = [*self.recipe.inputs, *map(output, self.recipe.outputs), *staged]
        return [*names, *(state(name) for name in self._state)]

    def _capture(self) -> None:
        self._synchronize()
        spare: list[Any] = []
        try:
            self._grow(spare)
            seconds = []
            for name, (first, second) in self._places().items():
                with moved(first if name.startswith("state ") else None, second):
                    spare.append(self._record({name: second})[0])
                seconds.append((name, first, second, Graph.of(spare[-1], self._driver)))
            graph, outputs = self._record({})
            try:
                graph.instantiate()
                self._prove(Graph.of(graph, self._driver), seconds)
            except BaseException:
                spare.append(graph)
                raise
        finally:
            for captured in spare:
                self._discard(captured)
        self._graph, self._outputs = graph, outputs

    def _grow(self, spare: list[Any]) -> None:
        """Capture until the pool is as every later capture will find it. No result may live on."""
        if self.recipe.outputs:
            captured, raw = self._record({})
            spare.append(captured)
            found = self.recipe.select(raw)
            self.copies = {name: torch.empty_like(found[name]) for name in self.recipe.outputs}
            del raw, found
        blocks: list[bytes] | None = None
        for _ in range(_GROWTHS):
            spare.append(self._record({})[0])
            before, blocks = blocks, [node.block for node in Graph.of(spare[-1], self._driver).nodes]
            if before == blocks:
                return

    def _places(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each movable tensor as it is captured to serve, and elsewhere."""
        places = {}
        if self.recipe.packed is not None:
            places[STAGING] = self.recipe.staging[0], self.recipe.staging[1]
        movable = {name: self._inputs[name] for name in self.recipe.inputs}
        movable |= {output(name): tensor for name, tensor in self.copies.items()}
        seconds = {state(name): tensor for name, tensor in self._seconds.items()}
        for name, tensor in (movable | {state(name): tensor for name, tensor in self._state.items()}).items():
            try:
                places[name] = tensor, seconds[name] if name in seconds else torch.empty_like(tensor)
            except torch.OutOfMemoryError:
                self.refusals[name] = "there is no memory for a second place, which a proof needs"
        return places

    def _prove(self, first: Graph, seconds: Sequence[tuple[str, Tensor, Tensor, Graph]]) -> None:
        rebinder = Rebinder(first, first, lock=self._family.lock)
        self._homes = {}
        for name, at, elsewhere, second in seconds:
            try:
                rebinder.add(second, Moved.of(name, at, elsewhere))
            except BucketGraphError as error:  # it has no bytes, or lies where another one does
                self.refusals[name] = str(error)
                continue
            self._homes[name] = at
            if (reason := rebinder.refusal(name)) is not None:
                self.refusals[name] = reason
        self._rebinder, self._executable = rebinder, first.executable()
        if STAGING in self._homes:
            self._stop_copying_in(first)

    def _stop_copying_in(self, graph: Graph) -> None:
        """Calls whose inputs lie on the device, and warm-up's own, fill the slots before the launch: no node may."""
        reason = self.refusals.get(STAGING)
        sites = self._movable().sites(STAGING)
        if reason is not None or len(sites) != 1:
            raise NoCopyIn("the inputs' copy cannot be a node", given=reason or f"{len(sites)} sites")
        self._copy_in, self._copies_in = graph.nodes[sites[0].node].handle, True
        try:
            self._copy_inputs(False)
        except DriverError as error:
            raise NoCopyIn("the inputs' copy cannot be passed over", given=str(error)) from error

    def _record(self, at: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """One capture with some tensors at other places: the graph, which is kept, and what the function returned."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pool = self._family.pool()
        with recording(graph, self._pool):
            raw = self._run(at)
        return graph, raw

    def _run(self, at: Mapping[str, Tensor]) -> Any:
        if self.recipe.packed is not None:
            self.recipe.packed.copy_(at.get(STAGING, self.recipe.staging[0]), non_blocking=True)
        raw = self._fn(**{name: at.get(name, tensor) for name, tensor in self._inputs.items()})
        found = self.recipe.select(raw) if self.copies else {}
        for name, place in self.copies.items():
            at.get(output(name), place).copy_(found[name])
        return raw

    def _discard(self, graph: Any) -> None:
        if self._pool is not None:
            self._pool.remove(graph)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._family.device)

    # -- launches ----------------------------------------------------------------------------------------------------

    def replay(self, places: Mapping[str, int] = _HOME) -> Any:
        """Launch with these tensors at these addresses, and all others at home.

        Raises:
            RebindError: an address cannot be set; nothing was launched.
        """
        if self._rebinder is None:
            return super().replay()
        if self._graph is None:
            raise NotWarmError("this bucket's graph was not captured, or was released")
        with self._family.lock:
            moves = self._moves(self._rebinder, places)
            if self._copy_in is not None:
                self._copy_inputs(STAGING in places)
            return self._rebinder.run(moves, self.launch)

    def go_home(self) -> None:
        """Set the addresses that a launch without places would set; raises as `replay` does."""
        if self._rebinder is not None:
            with self._family.lock:
                self._rebinder.run(self._moves(self._rebinder, _HOME), int)

    def _moves(self, rebinder: Rebinder, places: Mapping[str, int]) -> dict[str, int]:
        moves = {}
        for name, home in self._homes.items():
            if name not in self.refusals:
                address = places.get(name) or home.data_ptr()
                if address != rebinder.address(name):
                    moves[name] = address
        return moves

    def launch(self) -> Any:
        """Launch as it is bound now."""
        assert self._graph is not None, "captured before"
        self._graph.replay()
        return self._outputs

    def _copy_inputs(self, copies: bool) -> None:
        if copies != self._copies_in:
            assert self._driver is not None and self._copy_in is not None, "proved before"
            self._driver.set_enabled(self._executable, self._copy_in, copies)
            self._copies_in = copies

    def can_move(self, name: str) -> bool:
        return name in self._homes and name not in self.refusals

    def alignments(self, name: str) -> tuple[tuple[int, int], ...]:
        """(bytes, inside): an address of the tensor plus `inside` must be divisible by `bytes`."""
        return tuple({(site.alignment, site.inside % site.alignment) for site in self._movable().sites(name)})

    def home(self, name: str) -> Tensor:
        return self._homes[name]

    def refuse(self, name: str, reason: str) -> None:
        """Leave a tensor where it was captured, from the next launch on."""
        if self.can_move(name):
            self._movable().rebind(name, self._homes[name])
            self._movable().refuse(name, reason)
        self.refusals[name] = reason

    def doubt(self, name: str) -> str | None:
        """As `Rebinder.doubt`."""
        return self._movable().doubt(name)

    def trust(self, name: str) -> None:
        """As `Rebinder.trust`."""
        self._movable().trust(name)

    def verify(self, name: str, third: Tensor, check: Check[Any]) -> str | None:
        """As `Rebinder.verify`."""
        reason = self._movable().verify(name, third, check)
        if reason is not None:
            self.refusals[name] = reason
        return reason

    def explain(self) -> list[str]:
        """Sites and reasons, a line each."""
        if self._rebinder is None:
            return [f"{name}: refused: {reason}" for name, reason in self.refusals.items()]
        return self._rebinder.explain()

    def release(self) -> None:
        super().release()
        self._rebinder, self._homes, self.copies, self._state = None, {}, {}, {}

    def _movable(self) -> Rebinder:
        assert self._rebinder is not None, "asked of proved graphs only"
        return self._rebinder
