"""A captured graph, its executable and its nodes.

captured = torch.cuda.CUDAGraph(keep_graph=True)   # or there is no graph left to look at
with torch.cuda.graph(captured): ...
captured.instantiate()                             # only to launch or to update it
graph = Graph.of(captured)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bucketgraph.cuda.driver import Driver, load_driver
from bucketgraph.cuda.memory import Pointer, Regions
from bucketgraph.cuda.nodes import Node
from bucketgraph.cuda.reading import read
from bucketgraph.errors import CaptureError


class Graph:
    """The nodes of one captured graph, read once.

    Args:
        handle: the graph (CUgraph).
        driver: what reads it.
        owner: kept alive as long as this, since the handle is its own: the graph of torch.
    """

    def __init__(self, handle: int, driver: Driver, owner: torch.cuda.CUDAGraph | None = None) -> None:
        self.handle = handle
        self.driver = driver
        self.nodes: tuple[Node, ...] = read(driver, handle)
        self._owner = owner

    @classmethod
    def of(cls, captured: torch.cuda.CUDAGraph, driver: Driver | None = None) -> Graph:
        """The graph that torch captured.

        Raises:
            CaptureError: it was captured without `keep_graph=True`, or not at all.
            ConfigError: `cuda.bindings` or a CUDA driver is missing.
            DriverError: the driver refused.
        """
        driver = driver or load_driver()
        try:
            handle = int(captured.raw_cuda_graph())
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            hint = "capture into torch.cuda.CUDAGraph(keep_graph=True)"
            raise CaptureError("there is no graph to look at", given=text, hint=hint) from error
        return cls(handle, driver, captured)

    def executable(self) -> int:
        """What replays launch (CUgraphExec), until torch instantiates anew. Raises CaptureError if there is none."""
        if self._owner is None:
            raise CaptureError("this graph has no executable", hint="make it with Graph.of")
        try:
            return int(self._owner.raw_cuda_graph_exec())
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise CaptureError("the graph has no executable", given=text, hint="call instantiate()") from error

    def replay(self) -> None:
        """Launch on torch's current stream. Raises CaptureError where there is no graph of torch behind this."""
        if self._owner is None:
            raise CaptureError("this graph has no executable", hint="make it with Graph.of")
        self._owner.replay()

    def pointers(self, tensors: Mapping[str, Tensor]) -> tuple[Pointer, ...]:
        """Where the nodes' bytes point into known tensors, by name. See `Regions.pointers` for what may be missed."""
        regions = Regions.of(tensors)
        return tuple(pointer for node in self.nodes for pointer in regions.pointers(node))
