"""A device loop without a device: a thread runs the captured step until it says that it was the last, and publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketgraph.llm.device_loop import loop as loop_module
from bucketgraph.llm.device_loop import loops as loops_module
from bucketgraph.llm.device_loop.ring import Ring


class Launcher:
    """`cuda.conditional.While` of the double."""

    def __init__(self, device: Device, step: Callable[[], object], state: Tensor, ring: Ring, early: bool) -> None:
        self.programmatic, self.released = early, False
        self._device, self._step, self._state, self._ring = device, step, state, ring
        self._thread = threading.Thread(target=int)
        self._error: Exception | None = None

    def launch(self) -> None:
        assert not self.released and self._ended(), "one run at a time"
        if self._device.refuses is not None:
            raise self._device.refuses
        self._device.launches += 1
        self._error, self._thread = None, threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def release(self) -> None:
        assert self._ended(), "released while it runs"
        self.released = True

    def _ended(self) -> bool:
        """Whether no run is left. One that has published its last step may have an instant to go."""
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        return not self._thread.is_alive()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            again = True
            while again:
                if self._device.gate is not None:
                    self._device.gate.acquire()
                self._step()
                self._device.after_step(self, self._ring, self._state)
                steps, going = self._state[:2].tolist()
                again = bool(going)
                self._ring.stamps[steps - 1] = steps
                self._ring.published[0] = 2 * steps + (not again)
        except Exception as error:
            self._error = error


class Device:
    """What the launchers of a test share."""

    def __init__(self, early: bool = False) -> None:
        self.early = early  # whether steps have programmatic edges
        self.launches = 0
        self.launchers: list[Launcher] = []
        self.gate: threading.Semaphore | None = None  # a step each
        self.refuses: Exception | None = None
        self.after_step: Callable[[Launcher, Ring, Tensor], None] = lambda launcher, ring, state: None

    def make(self, step: Any, state: Tensor, ring: Ring, manager: Any, programmatic: bool) -> Launcher:
        self.launchers.append(Launcher(self, step, state, ring, self.early and programmatic))
        return self.launchers[-1]


def installed(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device on which every LLM of the test has its loops."""
    made = Device()
    monkeypatch.setattr(loops_module, "unsupported", lambda manager: None)
    monkeypatch.setattr(loop_module, "make_launcher", made.make)
    return made
