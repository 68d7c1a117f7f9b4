"""Runs calls under torch.profiler, for `trace.parse`. On a GPU only: a CPU has no launches to look at."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bucketgraph.doctor import clock
from bucketgraph.doctor.trace import MARK, Call, parse

CALLS = 5
_SETTLE = 2  # more before them, since the first ones under a profiler are slow


def record(
    call: Callable[[], object], device: torch.device, calls: int = CALLS, wait_ms: float = 0.0
) -> tuple[Call, ...]:
    """The profiled calls, each on an idle GPU, so that one call's work is not mixed with the next one's.

    With `wait_ms` the GPU waits that long first, so that all launches are queued before the first one runs.
    """
    with torch.cuda.device(device):
        cycles = int(wait_ms * clock.cycles_per_ms()) if wait_ms else 0
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            for turn in range(_SETTLE + calls):
                if cycles:
                    torch.cuda._sleep(cycles)
                with record_function(MARK if turn >= _SETTLE else f"{MARK}.settle"):
                    call()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_bytes())["traceEvents"]
    return parse(events)
