"""Kernels and replayed graphs under NVIDIA's compute-sanitizer, in processes of their own.

memcheck: no access outside an allocation; racecheck: no hazard between threads in shared memory; initcheck: no read of
global memory that nobody wrote. Each tool must first find a planted fault of its kind. Kernels run on memory that torch
does not pool, since a pool hides an overrun into its neighbour; capture needs the pool, so graphs run with it.
"""

from __future__ import annotations

import inspect
import os
import random
import shutil
import subprocess
import sys
from typing import Any

import torch

from .core import SCRIPT, Check, Setting, Trial, Wrong, require

TOOLS = {"memcheck": ["--padding", "32"], "racecheck": [], "initcheck": []}
PARTS = ("kernels", "graphs")
FOUND = 9  # the tool's exit status for an error
SINGLE = frozenset({"temperature", "top_p", "cos_sin"})  # stay float32 beside bfloat16 activations

PLANTED = r"""
extern "C" __global__ void planted(float* x, int kind) {
    __shared__ float shared[64];
    int i = threadIdx.x;
    if (kind == 0) x[(1 << 20) + i] = 1.0f;      // far outside of 64 floats
    if (kind == 1) {                             // two warps, no barrier between write and read
        shared[i] = i;
        x[i] = shared[63 - i];
    }
    if (kind == 2 && x[i] == 5.0f) x[i] = 0.0f;  // nobody wrote x
}
"""


def command(tool: str, part: str) -> list[str]:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    wrapped = [found, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5", *TOOLS[tool]]
    return [*wrapped, sys.executable, str(SCRIPT), "--sanitized", f"{part}:{tool}"]


def unable(setting: Setting) -> str | None:
    if not setting.on_gpu:
        return "without a GPU there is nothing to watch"
    if shutil.which("compute-sanitizer") is None and not os.path.exists("/usr/local/cuda/bin/compute-sanitizer"):
        return "compute-sanitizer is not installed"
    return None


def _watched(tool: str, part: str) -> subprocess.CompletedProcess[str]:
    pooled = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if part != "graphs" else {}
    return subprocess.run(
        command(tool, part), env={**os.environ, **pooled}, capture_output=True, text=True, timeout=500, check=False
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.removeprefix("========= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    return " | ".join(lines[1:6]) or f"exit status {done.returncode}: {done.stderr[-300:]}"


def sanitizer(setting: Setting) -> Trial:
    def trial(seed: int) -> None:
        tool, part = list(TOOLS)[seed % len(TOOLS)], PARTS[seed // len(TOOLS) % len(PARTS)]
        if seed < len(TOOLS):
            planted = _watched(tool, "planted")
            require(planted.returncode == FOUND, f"{tool} does not find the planted fault: {_said(planted)}")
        done = _watched(tool, part)
        if done.returncode != 0:
            raise Wrong(f"{tool}, {part}: {_said(done)}")

    return trial


def run_part(what: str) -> int:
    """What runs under a tool."""
    part, _, tool = what.partition(":")
    {"planted": _planted, "kernels": _kernels, "graphs": _graphs}[part](tool)
    torch.cuda.synchronize()
    return 0


def _planted(tool: str) -> None:
    kernel = torch.cuda._compile_kernel(PLANTED, "planted")
    x = torch.empty(64, device="cuda")
    kernel((1, 1, 1), (64, 1, 1), (x, list(TOOLS).index(tool)))


def _kernels(tool: str) -> None:
    from bucketgraph.kernels import triton_ops

    from .kernels import KERNELS

    for dtype in (torch.float32, torch.bfloat16):
        for seed, kernel in enumerate(KERNELS):
            torch.manual_seed(seed)
            _, padded, _ = kernel.draw(random.Random(seed))
            # Made on the CPU and copied: no other kernel runs here.
            args = {name: _moved(name, value, dtype) for name, value in padded.items()}
            takes_pdl = "pdl" in inspect.signature(getattr(triton_ops, kernel.name)).parameters
            for pdl in ({}, {"pdl": triton_ops.pdl_supported("cuda")})[: 1 + takes_pdl]:
                kernel.run(triton_ops, {**args, **pdl})
                torch.cuda.synchronize()


def _moved(name: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    keeps = not value.is_floating_point() or name in SINGLE
    return (value if keeps else value.to(dtype)).contiguous().to("cuda")


def _graphs(tool: str) -> None:
    """Prefill in chunks and decode, captured and replayed in padded buckets.

    In `invariant` numerics alone for two tools: racecheck takes minutes for the library's matmuls, and initcheck does
    not see what they store through tensor descriptors.
    """
    from .models import World, llm_set, prompts

    setting, order = Setting(torch.device("cuda", 0), small=True), random.Random(0)
    for numerics in ("fast", "invariant") if tool == "memcheck" else ("invariant",):
        world = World(setting, llm_set("chunks", numerics))
        require(world.executable == "cudagraph", f"served {world.executable}, so no graph was watched")
        requests = [world.open(prompt, order) for prompt in prompts(setting)[:4]]
        world.prefill(requests)
        world.decode(requests, [1, 2, 3, 4])


CHECKS = (
    Check(
        "sanitizer",
        "compute-sanitizer's memcheck, racecheck and initcheck find nothing in kernels and replayed graphs",
        len(TOOLS) * len(PARTS),
        sanitizer,
        share=1,
        workers=6,
        fixed=True,
        unable=unable,
    ),
)
