"""A pool of torch's allocator, its stream and its graphs: whose memory it is, and what a failed capture leaves behind.

torch keeps the workspaces of cuBLAS by stream, and a graph keeps their addresses. Those that eager work on the stream
made are freed under its graphs by whoever clears torch's workspaces: `torch.compile` with graphs of its own does, and
in some releases the end of any graph does for its stream (pytorch/pytorch#193402). So a pool has a stream on which
nothing runs but its captures: the first that needs a workspace allocates it in the pool, which lives as long as a graph
in it. Where the end of a graph clears nothing, that workspace stays allocated after the pool's end.

A pool's handle serves as long as a graph lives in it and no longer: torch refuses one that was emptied. Nor does it
serve after a capture that CUDA itself ended. Torch up to 2.13 then skips parts of its own clean-up: allocators believe
that the capture goes on, so may a random generator, and one user of the pool is never counted off.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from functools import cached_property

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on the default stream is no part of a capture
_WRECKS: list[torch.cuda.CUDAGraph] = []  # captures that CUDA ended: kept, since allocators may still point at them


class Pool:
    """Shared by the graphs of a family, until it can take no more of them."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._device, self._index = device, device.index or 0
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._used = False
        self._broken = 0  # captures that CUDA ended, and that may still count as users of the pool

    @property
    def usable(self) -> bool:
        return not self._broken and (not self._used or len(self._graphs) > 0)

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """For captures alone. Not one of torch's, which serve many; never destroyed, or its handle could return.

        Raises RuntimeError if CUDA makes no stream.
        """
        torch.cuda.synchronize(self._device)  # there is a context now
        handle = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
        if code:
            raise RuntimeError(f"cuStreamCreate failed with CUresult {code}")
        return torch.cuda.ExternalStream(handle.value, device=self._device)

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
