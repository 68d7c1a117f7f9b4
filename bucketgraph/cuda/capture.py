"""Captures made to be looked at and compared: graphs that are kept, and pairs that differ in one tensor's place.

Rules: everything runs on one side stream, so that library workspaces are the same ones; results of the function are
dropped, so that the pool is empty again after each capture. A function whose results are needed writes them into
tensors that were made before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bucketgraph.cuda.driver import Driver
from bucketgraph.cuda.graph import Graph


def keep(fn: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> Graph:
    """Capture a function that was warmed up; the graph is instantiated, its results are dropped."""
    captured = _capture(fn, stream, pool or torch.cuda.graph_pool_handle())
    captured.instantiate()
    return Graph.of(captured)


def alike(
    *calls: Callable[[], object], stream: torch.cuda.Stream | None = None, driver: Driver | None = None
) -> list[Graph]:
    """Capture calls of one function that differ in where a tensor lies; the first graph is instantiated.

    Args:
        calls: each allocates the same, and keeps nothing that it allocated. Each graph after the first one proves the
            tensors that lie elsewhere in it: one at a time, unless they can only move together.
        stream: the side stream to run on; a new one if it does not matter.

    Raises:
        RuntimeError: a call cannot be captured.
    """
    stream = stream or torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for call in calls:  # compiles what each of them needs
            call()
    torch.cuda.synchronize(stream.device)
    # The first capture grows the pool; the others then find the same free memory, and temporaries the same addresses.
    grown = _capture(calls[0], stream, pool)
    captured = [_capture(call, stream, pool) for call in calls]
    grown.reset()
    captured[0].instantiate()
    return [Graph.of(each, driver) for each in captured]


def pair(
    fn: Callable[[Tensor], object], first: Tensor, second: Tensor, *, stream: torch.cuda.Stream | None = None
) -> tuple[Graph, Graph]:
    """Capture `fn` with its tensor in two places, as `alike` does.

    Args:
        first, second: equal in shape, strides and dtype; in contents, too, where the function looks at them.
    """
    one, other = alike(partial(fn, first), partial(fn, second), stream=stream)
    return one, other


def _capture(fn: Callable[[], object], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # a graph or a compiled kernel that dies during capture ends it
    try:
        with torch.cuda.graph(captured, pool=pool, stream=stream, capture_error_mode="thread_local"):
            fn()
    finally:
        if collects:
            gc.enable()
    return captured
