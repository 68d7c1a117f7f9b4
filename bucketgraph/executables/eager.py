"""The function as it is, over static buffers: what runs on a CPU, and what a failed capture falls back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Eager:
    """Calls the function on every replay."""

    kind = "eager"

    def __init__(self, fn: Callable[..., Any], inputs: Mapping[str, Tensor]) -> None:
        self._fn = fn
        self._inputs = dict(inputs)

    def warm(self) -> None:
        """Nothing to prepare: the first replay of warm-up runs it."""

    def capture(self) -> None:
        """Nothing to record."""

    def replay(self) -> Any:
        return self._fn(**self._inputs)

    def release(self) -> None:
        self._inputs = {}
