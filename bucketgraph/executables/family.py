"""What executables that share a graph pool have in common: device, pool, and the order of replays.

Graphs of one pool may reuse each other's memory, so two of them must never run at once. A host lock orders the calls,
and an event orders the GPU: the next replay waits until the last one's outputs were read, whatever stream it runs on.
While all calls come on the default stream, which is ordered by itself and cannot go away, nothing is recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from bucketgraph.contract import Contract
from bucketgraph.errors import DeviceError
from bucketgraph.executables.pool import Pool

_DEFAULT = 0  # the default stream's handle


def synchronize(device: torch.device) -> None:
    """Wait for the device; a sticky CUDA error comes out here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def event() -> torch._C._CudaEventBase:
    """A `torch.cuda.Event` without the Python around its methods."""
    return torch._C._CudaEventBase()


class CurrentStream:
    """The current stream of a device and its handle, as `torch.cuda.current_stream` gives it in a few times the time.

    A stream that is gone and one that came at its handle are the same to CUDA, so the object remembered is right.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self._last: tuple[int, torch.cuda.Stream] | None = None

    def __call__(self) -> tuple[int, torch.cuda.Stream]:
        assert self._handle is not None, "asked only where there is CUDA"
        handle = self._handle(self._index)
        last = self._last
        if last is None or last[0] != handle:
            last = self._last = handle, torch.cuda.current_stream(self._device)
        return last


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
        self._read: torch._C._CudaEventBase | None = None  # when the last outputs were read, if it was recorded
        self._read_on: tuple[int, torch.cuda.Stream] | None = None  # the stream they were read on
        self._recorded = False
        self._streams_differ = False  # whether calls came on more than one stream so far
        self._stream = CurrentStream(device)
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._read = event()
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

    def turn(self) -> AbstractContextManager[None]:
        """Fill, replay and read happen inside: one caller at a time, after the last caller's reads on the GPU.

        No gradients are recorded inside, and the caller's inference mode is left: tensors made in it could not be
        written by a call outside it.
        """
        return _Turn(self, self.lock)

    def _begin(self) -> tuple[int, torch.cuda.Stream] | None:
        """After the last reads; the stream that the caller's work goes to."""
        if self.broken is not None:
            self.require_alive()
        if self._read is None:
            return None
        stream, last = self._stream(), self._read_on
        if last is not None and last[0] != stream[0]:
            if not self._recorded:  # late, so that the wait is for what came on that stream since, too: once
                self._read.record(last[1])
                self._recorded = True
            self._streams_differ = True
            self._read.wait(stream[1])
        return stream

    def _end(self, stream: tuple[int, torch.cuda.Stream]) -> None:
        if self.broken is None and self._read is not None:
            self._read_on = stream
            self._recorded = self._streams_differ or stream[0] != _DEFAULT
            if self._recorded:
                self._read.record(stream[1])

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


class _Turn:
    """`Family.turn`, without a generator and without torch's context managers: every call enters it."""

    __slots__ = ("_family", "_graded", "_inference", "_lock", "_stream")

    def __init__(self, family: Family, lock: threading.RLock) -> None:
        self._family, self._lock = family, lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()  # brings its own mode of gradients, and takes it away with it
        self._graded = torch.is_grad_enabled()
        if self._graded:
            torch._C._set_grad_enabled(False)
        try:
            self._stream = self._family._begin()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._stream is not None:
                self._family._end(self._stream)
        finally:
            self._leave()

    def _leave(self) -> None:
        torch._C._set_grad_enabled(self._graded)  # whatever was set inside
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        self._lock.release()
