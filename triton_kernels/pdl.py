"""Programmatic dependent launch: a kernel starts while its predecessor runs, and waits before it reads its results.

Rules of a chain: every program of every kernel calls `launch_dependents` first and `wait` once, those that leave early
too. Before the wait a kernel reads what no kernel of its graph writes: weights, a step's lengths, positions and tables,
past K and V. Activations come after it, as do all stores. A wait covers the whole grid before it, which itself waited,
and so on back: hence neither a read nor a reuse of a buffer can overtake a write, however many kernels lie between.
Never wait inside a pipelined loop (loads are hoisted over it). Where rows are few, at most 48 KiB of shared memory a
program: for more Triton asks CUDA for another split of L1 and shared memory, and kernels that differ in it do not
overlap (Llama-3.1-8B, one row, on an H200: 4.36 ms a step against 4.10). An ordinary kernel before or after the chain
waits for all; compute capability 9 or later.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any
from weakref import WeakSet

import torch
import triton
import triton.language as tl

# Of an SM's on-chip memory that is asked for as shared memory by the kernels of a chain of few rows: the rest is L1,
# through which weights in flight pass. CUDA's own choice differs by kernel. On an H200 a layer of Llama-3.2-1B at one
# row takes 38.2 us so, 39.0 by CUDA's choice and 42.6 with 15 %.
SHARED_PERCENT = 8
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_asked: WeakSet[Any] = WeakSet()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool, lean: bool = True, **constants: Any) -> None:
    """Launch `kernel[grid]` with a constant `PDL`, as part of a chain if `pdl`.

    `lean`: whether it gets by with little shared memory, and asks for no more; several programs that need much would
    not fit on an SM together.
    """
    compiled = kernel[grid](*args, **constants, PDL=pdl, launch_pdl=pdl)
    # The interpreter gives None, and what was only compiled has no function.
    if pdl and lean and compiled is not None and compiled not in _asked and compiled.function:
        _asked.add(compiled)
        # A preference: where it is refused the kernel runs all the same.
        _cuda().cuFuncSetAttribute(ctypes.c_void_p(compiled.function), _CARVEOUT, SHARED_PERCENT)


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the 128-byte lines of `pointers` in L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def pdl_supported(device: torch.device | str) -> bool:
    """Whether the kernels of the fast decode path may be called with `pdl=True` on `device`."""
    on_gpu = torch.device(device).type == "cuda" and torch.version.cuda is not None
    return on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)
