"""Programmatic dependent launch: a kernel starts while its predecessor runs, and waits before it reads its results.

Rules of a chain: every program of every kernel calls `launch_dependents` first and `wait` once, those that leave early
too. Before the wait a kernel reads what no kernel of its graph writes: weights, a step's lengths, positions and tables,
past K and V. Activations come after it, as do all stores. A wait covers the whole grid before it, which itself waited,
and so on back: hence neither a read nor a reuse of a buffer can overtake a write, however many kernels lie between.
Never wait inside a pipelined loop (loads are hoisted over it). At most 48 KiB of shared memory a program: for more
Triton asks CUDA for another split of L1 and shared memory, and kernels that differ in it do not overlap (Llama-3.1-8B,
one row, on an H200: 4.36 ms a step against 4.10). An ordinary kernel before or after the chain waits for all; compute
capability 9 or later.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
