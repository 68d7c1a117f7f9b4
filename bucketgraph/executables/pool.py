"""A pool of torch's allocator and the graphs in it: whose memory it is, and what a failed capture leaves behind.

A pool's handle serves as long as a graph lives in it and no longer: torch refuses one that was emptied. Nor does it
serve after a capture that CUDA itself ended. Torch up to 2.13 then skips parts of its own clean-up: allocators believe
that the capture goes on, so may a random generator, and one user of the pool is never counted off.
"""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch

_WRECKS: list[torch.cuda.CUDAGraph] = []  # captures that CUDA ended: kept, since allocators may still point at them


class Pool:
    """Shared by the graphs of a family, until it can take no more of them."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._index = device.index or 0
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._used = False
        self._broken = 0  # captures that CUDA ended, and that may still count as users of the pool

    @property
    def usable(self) -> bool:
        return not self._broken and (not self._used or len(self._graphs) > 0)

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """A capture succeeded."""
        self._graphs.add(graph)
        self._used = True

    def remove(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.reset()
        self._graphs.discard(graph)

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """A capture failed: end it, so that it costs nothing but itself."""
        self._used = True
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._index, self.handle)
            with suppress(RuntimeError):
                generator = torch.cuda.default_generators[self._index]
                generator.graphsafe_set_state(generator.clone_state())
            self._broken += 1
            _WRECKS.append(graph)
        with suppress(RuntimeError):
            graph.reset()

    def reclaim(self) -> None:
        """Count off what broken captures left, once no graph needs the pool: only then is it certain that they did."""
        while self._broken and not self._graphs and self._is_stuck():
            torch._C._cuda_releasePool(self._index, self.handle)
            self._broken -= 1

    def _is_stuck(self) -> bool:
        """Whether memory that nothing uses stays in the pool, which is so only while something counts as its user."""
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        return any(s["segment_pool_id"] == self.handle and s["active_size"] == 0 for s in segments)
