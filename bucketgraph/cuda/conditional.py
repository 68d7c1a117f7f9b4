"""A loop that the GPU runs alone: one launch, and a captured step is run again until it says that it was the last.

    outer graph: WHILE node ── body: [the step, as a child graph] ──▶ publish

The step keeps `state`: how many steps there were, and whether to go on. `publish` tells the host, behind a fence that
covers all that the step wrote, and sets the node's condition; that call exists in CUDA C++ only. Nothing is launched by
the CPU between two steps. Whoever launches has seen the end of the last launch, and has reset state and counter.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from bucketgraph.cuda.driver import Driver, DriverError, KernelParams, load_driver
from bucketgraph.errors import CaptureError
from bucketgraph.executables.cudagraph import recording
from bucketgraph.executables.family import Family

PUBLISH = r"""
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);

extern "C" __global__ void publish(cudaGraphConditionalHandle condition, const int *state,
                                   unsigned long long *published, unsigned long long *stamps) {
  int steps = state[0], again = state[1] != 0;
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  stamps[steps - 1] = now;
  __threadfence_system();  // of the whole step, whose kernels have ended
  *(volatile unsigned long long *)published = 2ull * steps + !again;
  cudaGraphSetConditional(condition, again);
}
"""
_functions: dict[int, int] = {}  # `publish` by device: compiled once a process


@dataclass(frozen=True)
class Signals:
    """What a loop and its host tell each other by."""

    state: Tensor  # int32 on the device: steps so far, whether to go on, and what else the step keeps
    published: Tensor  # [1] int64, pinned: twice the steps, and 1 more when the run is over
    stamps: Tensor  # [most steps of a run] int64, pinned: the GPU's clock at the end of each, in ns


@dataclass(frozen=True)
class Assembled:
    """What can be launched (CUgraphExec), and whether its step's kernels may start before their predecessors end."""

    executable: int
    programmatic: bool


def assemble(driver: Driver, step: int, publish: int, addresses: Sequence[int], programmatic: bool = True) -> Assembled:
    """An executable that runs graph `step`, then `publish(condition, *addresses)`, while the condition holds.

    Where the driver refuses programmatic edges inside a body, or the caller does, they become ordinary ones: the same
    results, and kernels that do not overlap. Raises DriverError if it is refused even so.
    """
    early = [edge for edge in driver.edges(step) if edge.programmatic]
    if programmatic or not early:
        try:
            return Assembled(_instantiate(driver, step, publish, addresses), bool(early))
        except DriverError:
            if not early:
                raise
    plain = driver.clone_graph(step)
    try:
        driver.require_ends(plain, [edge for edge in driver.edges(plain) if edge.programmatic])
        return Assembled(_instantiate(driver, plain, publish, addresses), False)
    finally:
        driver.destroy_graph(plain)


def _instantiate(driver: Driver, step: int, publish: int, addresses: Sequence[int]) -> int:
    outer = driver.create_graph()
    try:
        condition, body = driver.add_while(outer)
        child = driver.add_child(body, step)
        values = [ctypes.c_uint64(value) for value in (condition, *addresses)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        params = KernelParams(publish, 0, 0, (1, 1, 1), (1, 1, 1), 0, ctypes.addressof(pointers))
        driver.add_kernel(body, params, [child])  # copies the arguments
        return driver.instantiate(outer)
    finally:
        driver.destroy_graph(outer)


class While:
    """`step` captured in a family's pool, and what launches it in a loop.

    Args:
        step: a function that was warmed up; it allocates and computes, syncs nothing, and writes `signals.state`.
        programmatic: False makes edges of programmatic dependent launch ordinary ones.

    Raises:
        CaptureError: it cannot be captured, or its graph cannot be a loop's body.
        ConfigError: cuda-bindings, NVRTC or a driver is missing.
    """

    def __init__(
        self,
        step: Callable[[], object],
        signals: Signals,
        family: Family,
        *,
        programmatic: bool = True,
        driver: Driver | None = None,
    ) -> None:
        self._family, self._signals = family, signals
        self._driver = driver or load_driver()
        self._event = torch.cuda.Event()
        self._built: Assembled | None = None
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(family.device):
            torch.cuda.synchronize(family.device)
            self._pool = family.pool()
            with recording(self._graph, self._pool):
                self._kept = step()  # what it returned lies in the pool, and is written by each step
            try:
                self._built = built = self._assemble(programmatic)
                # A loop that is dropped without `release` gives its executable back, too; not at exit, after CUDA's.
                self._destroy = weakref.finalize(self, _destroy, self._driver, built.executable)
                self._destroy.atexit = False
            except BaseException as error:
                self.release()
                if isinstance(error, DriverError):
                    raise CaptureError("the step cannot be the body of a loop", given=str(error)) from error
                raise

    @property
    def programmatic(self) -> bool:
        """Whether kernels of the step may start before their predecessors end."""
        return self._built is not None and self._built.programmatic

    def launch(self) -> None:
        """Start a run on torch's current stream; returns at once. Raises CaptureError if it cannot be launched."""
        if self._built is None:
            raise CaptureError("the loop was released")
        stream = torch.cuda.current_stream(self._family.device)
        with torch.cuda.device(self._family.device):
            try:
                self._driver.launch(self._built.executable, stream.cuda_stream)
            except DriverError as error:
                raise CaptureError("the loop cannot be launched", given=str(error)) from error
            self._event.record(stream)

    def done(self) -> bool:
        """Whether the last launch has ended. Raises what CUDA says if it failed."""
        return bool(self._event.query())

    def release(self) -> None:
        """Give executable and memory back, after the last launch's end."""
        built, self._built, self._kept = self._built, None, None
        alive = self._family.broken is None
        if alive:
            torch.cuda.synchronize(self._family.device)
        if built is not None:
            self._destroy()
        self._pool.remove(self._graph)
        if alive:
            self._pool.reclaim()

    def _assemble(self, programmatic: bool) -> Assembled:
        driver, signals = self._driver, self._signals
        hosts = [driver.device_address(tensor.data_ptr()) for tensor in (signals.published, signals.stamps)]
        addresses = [signals.state.data_ptr(), *hosts]
        step = int(self._graph.raw_cuda_graph())
        return assemble(driver, step, _publish(driver, self._family.device), addresses, programmatic)


def _destroy(driver: Driver, executable: int) -> None:
    with suppress(DriverError):  # of a broken context
        driver.destroy_executable(executable)


def _publish(driver: Driver, device: torch.device) -> int:
    index = device.index or 0
    if index not in _functions:
        major, minor = torch.cuda.get_device_capability(device)
        module = driver.load_module(PUBLISH, f"sm_{major}{minor}")
        _functions[index] = driver.function(module, "publish")
    return _functions[index]
