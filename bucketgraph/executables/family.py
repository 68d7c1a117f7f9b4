"""What executables that share a graph pool have in common: device, pool, capture stream, and the order of replays.

Graphs of one pool may reuse each other's memory, so two of them must never run at once. A host lock orders the calls,
and an event orders the GPU: the next replay waits until the last one's outputs were read, whatever stream it runs on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bucketgraph.contract import Contract
from bucketgraph.errors import DeviceError
from bucketgraph.executables.pool import Pool


def synchronize(device: torch.device) -> None:
    """Wait for the device; a sticky CUDA error comes out here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Family:
    """Shared by all buckets of a manager, and by the managers of an LLM's phases."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.broken: str | None = None  # the sticky CUDA error that ended the context
        self.mib = 0.0  # device memory that captures took so far
        self.changes = 0  # how often graphs were captured or what they read moved
        self.contracts = weakref.WeakSet[Contract]()  # what their functions read
        self._compiled: dict[int, tuple[object, Any]] = {}
        self._read: torch.cuda.Event | None = None  # when the last outputs were read
        self._read_on: int | None = None  # the stream they were read on
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.stream = torch.cuda.Stream(device)
                self._read = torch.cuda.Event()
            self._pool = Pool(device)

    def require_alive(self) -> None:
        """Raises DeviceError if the CUDA context was found broken; nothing can be launched in it."""
        if self.broken is not None:
            raise DeviceError("the CUDA context is broken", given=self.broken, hint="restart the process")

    def examine(self, error: Exception) -> None:
        """After a failed call: raises DeviceError from `error` if it took the whole context with it."""
        try:
            synchronize(self.device)
        except RuntimeError as broken:
            self.broken = str(broken).splitlines()[0]
            raise DeviceError("the CUDA context is broken", given=self.broken, hint="restart the process") from error

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Fill, replay and read happen inside: one caller at a time, after the last caller's reads on the GPU."""
        # Outside the caller's inference mode: tensors made inside it could not be written by a call outside it.
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.require_alive()
            if self._read is None:
                yield
                return
            stream = torch.cuda.current_stream(self.device)
            if self._read_on is not None and self._read_on != stream.cuda_stream:
                stream.wait_event(self._read)
            try:
                yield
            finally:
                if self.broken is None:
                    self._read.record(stream)
                    self._read_on = stream.cuda_stream

    def pool(self) -> Pool:
        """The pool for the next capture."""
        if not self._pool.usable:
            self._pool = Pool(self.device)
        return self._pool

    def compiled(self, fn: object, compile_it: Callable[[], Any]) -> Any:
        """One compiled object per function, so that all buckets share its cache."""
        if id(fn) not in self._compiled:
            self._compiled[id(fn)] = (fn, compile_it())  # the function is kept, or its id could be reused
        return self._compiled[id(fn)][1]
