"""The real capture, as a bucket's warm-up does it, and its replays timed as the eager calls were."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from bucketgraph.doctor import clock, places
from bucketgraph.doctor.record import CaptureResult
from bucketgraph.doctor.workload import told
from bucketgraph.executables import Family
from bucketgraph.executables.cudagraph import CudaGraph


def run(call: Callable[[], object], device: torch.device) -> CaptureResult:
    """Capture and time a call that was run before; what goes wrong is in the result.

    Raises:
        DeviceError: the failure broke the CUDA context.
    """
    family = Family(device)
    executable = CudaGraph(lambda: call(), {}, family)
    failed: CaptureResult | None = None
    with torch.cuda.device(device), family.turn():
        try:
            return _measured(executable, device)
        except Exception as error:
            failed = CaptureResult(error=told(error), place=places.of_error(error))
            family.examine(error)
        finally:  # after the handler, since a traceback holds on to the function's tensors
            if family.broken is None:
                executable.release()
    return failed


def _measured(executable: CudaGraph, device: torch.device) -> CaptureResult:
    gc.collect()  # garbage found during a capture would end it
    torch.cuda.empty_cache()
    torch.cuda.synchronize(device)
    free, began = torch.cuda.mem_get_info(device)[0], time.perf_counter()
    executable.warm()
    torch.cuda.synchronize(device)
    warm = time.perf_counter()
    executable.capture()
    ended = time.perf_counter()
    executable.replay()
    torch.cuda.synchronize(device)
    mib = max(0, free - torch.cuda.mem_get_info(device)[0]) / 2**20
    replay_ms = statistics.median(clock.in_a_row(executable.replay, device))
    return CaptureResult(replay_ms, 1e3 * (ended - warm), 1e3 * (warm - began), mib)
