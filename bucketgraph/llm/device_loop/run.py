"""One launch of a loop, from the host's side: look for news, take tokens, drop rows, end it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bucketgraph.buckets import Bucket
from bucketgraph.errors import DeviceError
from bucketgraph.llm.device_loop.ring import Ring
from bucketgraph.llm.request import Request

PAUSE = 3e-5  # seconds between two looks, at least
LONGEST_PAUSE = 1e-3  # seconds
ASK_EVERY = 64  # looks without news, till the device itself is asked


class Launcher(Protocol):
    """`cuda.conditional.While`, or what stands in for it."""

    @property
    def programmatic(self) -> bool: ...

    def launch(self) -> None: ...

    def done(self) -> bool: ...

    def release(self) -> None: ...


class Run:
    """What was launched over `ring` for these requests, which are the first rows of `bucket`."""

    def __init__(self, ring: Ring, launcher: Launcher, bucket: Bucket, requests: Sequence[Request]) -> None:
        self.bucket, self.requests = bucket, list(requests)
        self.steps = 0  # that the device has published, as far as was looked
        self.over = False
        # Whether a request's tokens are wanted as they come; else all are taken at once at the end.
        self.read_along = any(request.streamed or request.params.stop_strings for request in requests)
        self._ring, self._launcher = ring, launcher
        self._rows = {request: row for row, request in enumerate(requests)}
        self._dropped: set[Request] = set()
        self._taken = 0
        self._idle = 0
        self._began = self._news = time.perf_counter()

    def pause(self, reading: bool) -> float:
        """Seconds to the next look.

        One who reads along looks again when half a step has passed since the last news: each look gives the core away,
        and may get it back late. One who waits for the end does after a hundredth of what it took so far.
        """
        now = time.perf_counter()
        left = self._news + self._ring.pace(self.steps) / 2 - now if reading else (now - self._began) / 100
        return min(LONGEST_PAUSE, max(PAUSE, left))

    def poll(self) -> bool:
        """Look for news; whether there are any. Raises what CUDA says of a launch that failed."""
        news = self._ring.read()
        if news == (self.steps, self.over):
            self._idle += 1
            # After the launch's end nothing is published any more: look once more, and give up.
            if self.over or self._idle % ASK_EVERY or not self._launcher.done() or self._ring.read() != news:
                return False
            raise DeviceError("the device loop ended without saying so", given=f"{self.steps} steps")
        self._idle, self._news = 0, time.perf_counter()
        self.steps, self.over = news
        return True

    def take(self) -> list[tuple[Request, list[int]]]:
        """New tokens since the last time, of each request that has some and was not dropped."""
        lines = self._ring.lines(self._taken, self.steps, len(self.requests))
        self._taken = self.steps
        found: list[tuple[Request, list[int]]] = []
        if not len(lines):
            return found
        for request, ids in zip(self.requests, lines.T.tolist(), strict=True):
            if min(ids) < 0:  # it ended, and its row became padding
                ids = [token for token in ids if token >= 0]
            if ids and request not in self._dropped:
                found.append((request, ids))
        return found

    def drop(self, request: Request) -> None:
        """End one row, within two steps; what it still generates is not taken."""
        self._dropped.add(request)
        self._ring.drop(self._rows[request])

    def cancel(self) -> None:
        """End the run within two steps; what it generates till then is valid."""
        self._ring.halt()

    def wait(self) -> None:
        """Wait for the end. An interrupt meanwhile is raised when nothing runs any more."""
        interrupt: KeyboardInterrupt | None = None
        while not self.over:
            try:
                if not self.poll():
                    time.sleep(PAUSE)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def stop(self) -> None:
        """Cancel, and wait for the end."""
        self.cancel()
        self.wait()

    def counts(self) -> dict[int, int]:
        """Steps by how many rows they had, of what was published."""
        lines = self._ring.lines(0, self.steps, len(self.requests))
        rows, steps = np.unique((lines >= 0).sum(axis=1), return_counts=True)
        return dict(zip(rows.tolist(), steps.tolist(), strict=True))
