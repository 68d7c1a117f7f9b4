"""The GPU's clock while something ran, as `nvidia-smi` reports it: figures taken at other clocks do not compare.

An H200 under its power limit computes a fifth slower after some tenths of a second, and the limit, the temperature and
the neighbours differ by machine.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import torch

_EVERY_MS = 50
_POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap
_START_S, _LATE_S = 3.0, 0.5  # the first sample is here by then, and a later one
_QUERY = "timestamp,clocks.sm,clocks_event_reasons.active"
_STAMP = "%Y/%m/%d %H:%M:%S.%f"  # local time


class GpuClock:
    """Samples while it is asked to: its looks at the driver could disturb the host. `device`: an NVIDIA GPU's UUID."""

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, int, bool]] = []  # when, MHz, whether the power limit held it down
        command = ["nvidia-smi", f"--id={device}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen(
            [*command, f"--loop-ms={_EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self._process.kill)
        self._wait(0.0, _START_S)

    @contextmanager
    def meanwhile(self) -> Iterator[dict[str, float]]:
        """What `between` knows of the time inside, once that is over."""
        found: dict[str, float] = {}
        self._process.send_signal(signal.SIGCONT)
        began = time.time()
        try:
            yield found
            found |= self.between(began, time.time())
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Median MHz of the SMs and the share of samples under the power limit; empty if none fell between."""
        self._wait(ended, _LATE_S)
        found = [(mhz, capped) for when, mhz, capped in list(self._samples) if began <= when <= ended]
        if not found:
            return {}
        capped = statistics.fmean(capped for _, capped in found)
        return {"sm_mhz": statistics.median(mhz for mhz, _ in found), "power_capped": round(capped, 2)}

    def _wait(self, moment: float, seconds: float) -> None:
        """For a sample of that moment or later, so long at most; a program that ended sends none."""
        until = time.time() + seconds
        while time.time() < until and self._reader.is_alive():
            if self._samples and self._samples[-1][0] >= moment:
                return
            time.sleep(0.01)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                stamp, mhz, reasons = line.strip().split(", ")
                sample = datetime.strptime(stamp, _STAMP).timestamp(), int(mhz), bool(int(reasons, 16) & _POWER_CAP)
            except ValueError:  # a driver that does not say, or a line that was cut off
                continue
            self._samples.append(sample)


@functools.cache
def gpu_clock(device: torch.device) -> GpuClock | None:
    """Of this device; None without an NVIDIA GPU or `nvidia-smi`."""
    if device.type != "cuda" or torch.version.cuda is None or shutil.which("nvidia-smi") is None:
        return None
    return GpuClock(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
