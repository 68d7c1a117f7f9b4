"""A CUDA graph per bucket: recorded once, replayed with one launch.

Recorded on its pool's stream, with the garbage collector off: a graph or a compiled kernel that dies during capture
ends it, so warm-up collects garbage beforehand. Capture is thread-local, so that errors of
other threads cannot end it. Whatever happens, nothing stays capturing: a failed capture is ended and its graph dropped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bucketgraph.errors import NotWarmError
from bucketgraph.executables.family import Family
from bucketgraph.executables.pool import Pool


class CudaGraph:
    """The function captured over one bucket's static inputs."""

    kind = "cudagraph"

    def __init__(self, fn: Callable[..., Any], inputs: Mapping[str, Tensor], family: Family) -> None:
        self._fn = fn
        self._inputs = dict(inputs)
        self._family = family
        self._pool: Pool | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def warm(self) -> None:
        """Run it, so that handles, JIT compiles and module loads are there; not on the capture stream (`pool.py`)."""
        self._fn(**self._inputs)

    def capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._family.device)
        self._pool = self._family.pool()
        with recording(graph, self._pool):
            outputs = self._fn(**self._inputs)
        self._graph, self._outputs = graph, outputs

    def replay(self) -> Any:
        if self._graph is None:
            raise NotWarmError("this bucket's graph was not captured, or was released")
        self._graph.replay()
        return self._outputs

    def release(self) -> None:
        graph, self._graph, self._outputs, self._inputs = self._graph, None, None, {}
        if self._pool is None:
            return
        alive = self._family.broken is None
        if alive:
            torch.cuda.synchronize(self._family.device)
        if graph is not None:
            self._pool.remove(graph)
        if alive:
            self._pool.reclaim()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Pool) -> Iterator[None]:
    """Capture what runs inside into `graph`, by the rules of this file."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(pool.stream):
            try:
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                yield
                graph.capture_end()
            except BaseException:
                pool.abandon(graph)
                raise
            pool.add(graph)
    finally:
        if collects:
            gc.enable()
