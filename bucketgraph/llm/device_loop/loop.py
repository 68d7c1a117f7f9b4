"""One bucket's loop: the step, the tensors it needs beside the bucket's inputs, and what launches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bucketgraph import kernels
from bucketgraph.llm.device_loop.ring import Ring
from bucketgraph.llm.device_loop.run import Launcher, Run
from bucketgraph.llm.request import Request
from bucketgraph.manager import BucketManager, Captured

if TYPE_CHECKING:
    from bucketgraph.llm.runner import Runner

STOPS = 64  # stop tokens that a row may have
_FAR = 2**31 - 1


def make_launcher(
    step: Callable[[], object], state: Tensor, ring: Ring, manager: BucketManager, programmatic: bool
) -> Launcher:
    """The real one. Raises CaptureError, or ConfigError where a library is missing."""
    from bucketgraph.cuda.conditional import Signals, While

    return While(step, Signals(state, ring.published, ring.stamps), manager.family, programmatic=programmatic)


class Loop:
    """Decode in one bucket, captured once more with `advance` behind it. The family's turn is held.

    Args:
        programmatic: as in `cuda.conditional.While`.

    Raises:
        CaptureError, ConfigError: it cannot be built here.
    """

    def __init__(self, runner: Runner, captured: Captured, programmatic: bool = True) -> None:
        self.captured, self.rows = captured, captured.bucket["batch"]
        self._runner = runner
        manager = runner.decode_manager
        self._device = manager.device
        on_gpu = self._device.type == "cuda"
        self.ring = Ring(self.rows, on_gpu)
        # One block, so that a run's parameters travel in one copy.
        self._staging = torch.zeros(4 + 2 * self.rows + STOPS * self.rows, dtype=torch.int32, pin_memory=on_gpu)
        self._block = self._staging.to(self._device, copy=True)
        self._parts = self._split(self._block)
        self._warm()
        self.launcher = make_launcher(self._step, self._parts[0], self.ring, manager, programmatic)

    def start(self, requests: Sequence[Request], stops: Sequence[Sequence[int]], floor: int) -> Run:
        """Fill and launch; the last run is over.

        Args:
            stops: each request's stop tokens, `STOPS` at most.
            floor: the run ends where this many rows, or fewer, would go on.
        """
        count, width = len(requests), max(map(len, stops), default=0)
        state, limits, after, columns = self._split(self._staging)
        state.copy_(torch.tensor([0, 1, floor, width], dtype=torch.int32))
        limits[:count] = torch.tensor([request.limit for request in requests], dtype=torch.int32)
        least = [min(request.prompt_len + request.params.min_tokens, _FAR) for request in requests]
        after[:count] = torch.tensor(least, dtype=torch.int32)
        columns[:width].fill_(-1)
        for row, ids in enumerate(stops):
            columns[: len(ids), row] = torch.tensor(ids, dtype=torch.int32)
        self.ring.clear()
        self.captured.inputs.fill(self._runner.decode_arrays(requests))
        self._block.copy_(self._staging, non_blocking=True)
        self.launcher.launch()
        return Run(self.ring, self.launcher, self.captured.bucket, requests)

    def _step(self) -> object:
        """A decode step, and what makes the next one's inputs of it."""
        views = self.captured.inputs.views
        tokens, logits = self.captured.fn(**views)
        self._advance(tokens, views)
        return tokens, logits

    def _advance(self, tokens: Tensor, views: dict[str, Tensor]) -> None:
        state, limits, after, stops = self._parts
        names = ("input_ids", "positions", "slot_mapping", "kv_lens", "temperature", "block_tables")
        inputs = [views[name] for name in names]
        shared, page = (self.ring.flags, self.ring.tokens), self._runner.cache.page_size
        kernels.ops(self._device).advance(tokens, *inputs, limits, after, stops, state, *shared, page)

    def _warm(self) -> None:
        """Compile what the step has and decode has not, on copies of padding."""
        views = {name: torch.zeros_like(tensor) for name, tensor in self.captured.inputs.views.items()}
        self._advance(torch.zeros_like(views["input_ids"]), views)

    def _split(self, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """State `[4]`, limits `[rows]`, what stop tokens count after `[rows]`, stop tokens `[STOPS, rows]`."""
        state, limits, after, stops = block.split([4, self.rows, self.rows, STOPS * self.rows])
        return state, limits, after, stops.view(STOPS, self.rows)
