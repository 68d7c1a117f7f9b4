"""What host and device tell each other while a loop runs, in memory that both reach.

A line of `tokens` is whole when `published` counts its step. The device writes in order and never over a line, since
the ring is as long as a run may be.
"""

from __future__ import annotations

import numpy as np
import torch

STEPS = 1024  # of a run at most
RECENT = 8  # steps that the pace is taken from


class Ring:
    """One loop's shared memory, used by one run at a time.

    Args:
        rows: of the loop's bucket.
        pinned: whether kernels are to reach it.
        steps: the most of a run.
    """

    def __init__(self, rows: int, pinned: bool, steps: int = STEPS) -> None:
        self.tokens = torch.full((steps, rows), -1, dtype=torch.int32, pin_memory=pinned)  # -1 in rows that are padding
        self.stamps = torch.zeros(steps, dtype=torch.int64, pin_memory=pinned)  # ns, of the device's clock
        self.published = torch.ones(1, dtype=torch.int64, pin_memory=pinned)  # as in `cuda.conditional.Signals`
        self.flags = torch.zeros(rows + 1, dtype=torch.int32, pin_memory=pinned)  # a row's end, and last the run's
        self._tokens, self._flags = self.tokens.numpy(), self.flags.numpy()
        self._word = memoryview(self.published.numpy())  # type: ignore[arg-type]  # arrays are buffers
        self._clock = memoryview(self.stamps.numpy())  # type: ignore[arg-type]

    def clear(self) -> None:
        """For the next run; the last one is over."""
        self._flags[:] = 0
        self._word[0] = 0

    def read(self) -> tuple[int, bool]:
        """Steps published so far, and whether the run is over."""
        word = self._word[0]  # one load, so that both belong together
        return word >> 1, bool(word & 1)

    def lines(self, start: int, end: int, rows: int) -> np.ndarray:
        """Tokens of steps `start` to `end`, which were published `[steps, rows]`."""
        return self._tokens[start:end, :rows]

    def pace(self, steps: int) -> float:
        """Seconds that one of the last steps took, by the device's clock, when so many were published; 0 at first."""
        last = steps - 1
        first = max(0, last - RECENT)
        return 1e-9 * (self._clock[last] - self._clock[first]) / (last - first) if last > first else 0.0

    def drop(self, row: int) -> None:
        """Ask for a row's end."""
        self._flags[row] = 1

    def halt(self) -> None:
        """Ask for the run's end."""
        self._flags[-1] = 1
