"""`torch.compile(dynamic=False)` over static buffers: one specialised program per bucket.

Dynamo silently runs eagerly past its recompile limit (8), and a bucket set is larger than that: the limit is raised
while buckets are warmed, and hitting it is an error instead of a slow surprise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor

from bucketgraph.buckets import MAX_BUCKETS
from bucketgraph.executables.family import Family


class Compiled:
    """One compiled program for one bucket; programs of one function share Dynamo's cache."""

    kind = "compiled"

    def __init__(self, fn: Callable[..., Any], inputs: Mapping[str, Tensor], family: Family) -> None:
        self._inputs = dict(inputs)
        self._compiled = family.compiled(fn, lambda: torch.compile(fn, dynamic=False))

    def warm(self) -> None:
        with dynamo_config.patch(
            recompile_limit=MAX_BUCKETS,
            accumulated_recompile_limit=MAX_BUCKETS,
            fail_on_recompile_limit_hit=True,
        ):
            self._compiled(**self._inputs)

    def capture(self) -> None:
        self.warm()  # the first call compiled; the second shows that its guards hold

    def replay(self) -> Any:
        return self._compiled(**self._inputs)

    def release(self) -> None:
        self._inputs = {}
