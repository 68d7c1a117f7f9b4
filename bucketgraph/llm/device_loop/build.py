"""How a loop comes to be trusted: it is built, and held to the host loop's tokens before it serves anyone."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketgraph.errors import CaptureError
from bucketgraph.llm.device_loop.loop import Loop
from bucketgraph.llm.request import Request
from bucketgraph.llm.sampling import SamplingParams
from bucketgraph.manager import Captured

if TYPE_CHECKING:
    from bucketgraph.llm.runner import Runner


@dataclass(frozen=True)
class LoopReport:
    """How the device loop of one bucket was built."""

    bucket: str
    seconds: float  # capture, instantiation and self-check
    mib: float  # device memory that it took
    programmatic: bool  # whether its kernels start before their predecessors end, as in the bucket's own graph
    error: str | None = None  # why the host loop runs in its place


def build(runner: Runner, captured: Captured) -> tuple[Loop | None, LoopReport]:
    """A checked loop, or None and the reason. The family's turn is held. Raises DeviceError if the device is gone."""
    family = runner.decode_manager.family
    began, free, error = time.perf_counter(), _free(family.device), None
    loop: Loop | None = None
    try:
        loop = _checked(runner, captured)
    except Exception as problem:
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())[:500]}"
        family.examine(problem)
    mib = max(0, free - _free(family.device)) / 2**20 if loop is not None else 0.0
    family.mib += mib
    early = loop is not None and loop.launcher.programmatic
    return loop, LoopReport(str(captured.bucket), round(time.perf_counter() - began, 4), mib, early, error)


def _checked(runner: Runner, captured: Captured, programmatic: bool = True) -> Loop:
    """A loop whose tokens are the host loop's; with ordinary edges if programmatic ones are not right in it."""
    gc.collect()  # garbage found during a capture would end it
    loop = Loop(runner, captured, programmatic)
    early = loop.launcher.programmatic
    try:
        check(runner, loop)
        return loop
    except BaseException as error:
        loop.launcher.release()
        if not (early and isinstance(error, CaptureError)):
            raise
    return _checked(runner, captured, programmatic=False)


def check(runner: Runner, loop: Loop) -> None:
    """Up to four steps of made-up requests on pages that are free. Raises CaptureError where the two loops differ."""
    cache, rows = runner.cache, min(loop.rows, runner.cache.free_pages)
    if runner.max_model_len < 2:  # then nothing is ever decoded
        return
    draw = torch.Generator().manual_seed(loop.rows)
    ids = torch.randint(0, runner.model.config.vocab_size, (rows,), generator=draw).tolist()
    kinds = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
    limits = [min(2 + row % 4, runner.max_model_len) for row in range(rows)]
    made = [Request([token], kinds[row % 2], row, limit=limits[row]) for row, token in enumerate(ids)]
    try:
        for request in made:
            request.hold(cache.allocate(1), runner.table_width)
        want = _by_host(runner, loop, made)
        for request in made:
            del request.tokens[1:]
            request.computed = 0
        run = loop.start(made, [()] * rows, 0)
        run.wait()
        got = {request: list[int]() for request in made} | dict(run.take())
        wrong = [row for row, request in enumerate(made) if got[request] != want[row]]
        if wrong:
            what = f"the device loop's tokens differ from the host loop's in {len(wrong)} of {rows} rows"
            raise CaptureError(what, given=got[made[wrong[0]]], expected=want[wrong[0]])
    finally:
        pages = [page for request in made for page in request.pages]
        cache.data.index_fill_(2, torch.tensor(pages, device=cache.data.device), 0)
        for request in made:
            cache.release(request.pages)


def _by_host(runner: Runner, loop: Loop, requests: Sequence[Request]) -> list[list[int]]:
    live = list(requests)
    while live:
        result = runner.decode_manager.replay(loop.captured, runner.decode_arrays(live), {"batch": len(live)})
        for request, token in zip(live, result["tokens"].tolist(), strict=True):
            request.tokens.append(token)
            request.computed += 1
        live = [request for request in live if len(request.tokens) < request.limit]
    return [request.tokens[1:] for request in requests]


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
