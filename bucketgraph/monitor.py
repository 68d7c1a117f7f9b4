"""What must not happen after warm-up, counted: compiles, new memory segments, and syncs of host and device.

Compiles (Triton's, torch.compile's) and segments of torch's allocator are counted all the time, for nothing: one hook,
and a counter that torch keeps anyway. Syncs need torch's sync debug mode, which is the whole process's, so they are
counted only inside `watch`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_triton_compiles = 0
_hooked = False


@dataclass
class Disturbances:
    """How often each happened."""

    compiles: int = 0
    segments: int = 0
    syncs: int = 0

    def __str__(self) -> str:
        return f"{self.compiles} compiles, {self.segments} new memory segments, {self.syncs} syncs"

    @property
    def any(self) -> bool:
        return bool(self.compiles or self.segments or self.syncs)


def compiles() -> int:
    """Specialisations that Triton and torch.compile have made in this process since the first call of this."""
    _hook_triton()
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    frames = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
    return _triton_compiles + int(frames)


def segments(device: torch.device) -> int:
    """Segments that torch's allocator has taken from the device, in all."""
    if device.type != "cuda":
        return 0
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    return int(stats.get("segment.all.allocated", 0))


@contextmanager
def watch(device: torch.device) -> Iterator[Disturbances]:
    """Count all three inside the block. For one thread at a time: torch's sync debug mode has no owner."""
    seen = Disturbances()
    before = compiles(), segments(device)
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            yield seen
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode(mode)
            syncs = [item for item in caught if "synchronizing CUDA operation" in str(item.message)]
            seen.compiles, seen.segments = compiles() - before[0], segments(device) - before[1]
            seen.syncs = len(syncs)
    for item in caught:
        if item not in syncs:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)


def _hook_triton() -> None:
    """Count in Triton's own hook, and call whoever was there before."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    try:
        from triton import knobs
    except ImportError:  # no Triton here, so it compiles nothing
        return
    earlier = knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> Any:
        global _triton_compiles
        _triton_compiles += 1
        return earlier(*args, **kwargs) if earlier is not None else None

    knobs.runtime.jit_post_compile_hook = count
