#!/usr/bin/env python3
"""Times the tiles of the small-batch decode matmuls and compares the best with what the model uses and with cuBLAS.

    scripts/tune_skinny.py [--shapes llama-3.2-1b,qwen3-0.6b] [--rows 1,2,4,8,16] [--seconds 90] [--json FILE]

A candidate runs as one CUDA graph over many distinct weights, more than the L2 holds, launched as a chain. It is timed
only if it agrees with the float64 twin. TB/s counts weights alone; cuBLAS's figure is its matmul without norm, silu or
addition. Candidates are compiled beforehand in every core. What --seconds left untimed is said at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_common as bench
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bucketgraph.kernels import pdl, reference, skinny, streamed
from bucketgraph.kernels.skinny import Tile
from bucketgraph.llm.presets import PRESETS

DTYPE = torch.bfloat16
SHAPES = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "smollm2-135m")
STREAMED = 256 * 2**20  # bytes of distinct weights a graph reads: five times an H200's L2
MAX_COPIES = 256
TOLERANCE = 1e-2
DOT_TILES: tuple[Tile, ...] = (
    (16, 256, 2, 4),
    (16, 256, 4, 4),
    (16, 512, 4, 3),
    (32, 128, 4, 5),
    (32, 256, 4, 4),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 8, 4),
    (128, 64, 4, 4),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
)


@dataclass(frozen=True)
class Op:
    """One matmul of a model at one row count."""

    shape: str
    name: str  # qkv, o, gate_up, down or head
    columns: int  # of the result
    width: int
    rows: int

    @property
    def gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.columns * (1 + self.gated), self.width

    @property
    def nbytes(self) -> int:
        return math.prod(self.weight_shape) * DTYPE.itemsize

    def heuristics(self) -> list[Tile]:
        """What the model would run: by `skinny_tile`, and streamed where it is an alternative."""
        found = [skinny.skinny_tile(self.rows, self.columns, self.width, DTYPE, self.gated)]
        if 1 < self.rows <= streamed.MAX_ROWS and streamed.compiles():
            found.append((*streamed.streamed_tile(self.rows, self.weight_shape[0], self.width), -1))
        return found

    def call(self, x: Tensor, gain: Tensor, weight: Tensor, out: Tensor, tile: Tile | None, chain: bool) -> Tensor:
        """The op through its wrapper, or with a float64 `x` through its twin."""
        module: Any = reference if x.dtype == torch.float64 else skinny
        kwargs: dict[str, Any] = {"pdl": chain}
        if module is skinny:
            kwargs["tile"] = tile
        if self.name in ("o", "down"):
            result: Tensor = module.linear_add(x, weight, out, **kwargs)
        elif self.gated:
            result = module.norm_gate_up(x, gain, 1e-5, weight, **kwargs)
        else:
            result = module.norm_linear(x, gain, 1e-5, weight, **kwargs)
        return result


def ops(shapes: list[str], rows: list[int]) -> Iterator[Op]:
    for shape in shapes:
        c = PRESETS[shape]
        attended = c.num_heads * c.head_dim
        for name, columns, width in (
            ("qkv", attended + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
            ("o", c.hidden_size, attended),
            ("gate_up", c.intermediate_size, c.hidden_size),
            ("down", c.hidden_size, c.intermediate_size),
            ("head", c.vocab_size, c.hidden_size),
        ):
            for b in rows:
                yield Op(shape, name, columns, width, b)


def candidates(op: Op) -> list[Tile]:
    """In use first; whole rows with 32 to 256 weights a thread; from two rows on the loop's tiles and streamed ones."""
    found = op.heuristics()
    block_k = max(triton.next_power_of_2(op.width), 128)
    for block_n, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        a_thread = block_n * block_k * (1 + op.gated) / (32 * warps)
        most = 256 if op.rows == 1 else 128
        if op.rows <= 8 and 32 <= a_thread <= most and op.columns >= 66 * block_n:
            found.append((block_n, block_k, warps, 0))
    if op.rows > 1:
        found += [t for t in DOT_TILES if op.columns >= 33 * t[0] and t[1] <= block_k]
    if 1 < op.rows <= streamed.MAX_ROWS and streamed.compiles():
        for columns, slice_size, warps in itertools.product((16, 32, 64), (64, 128, 256, 512), (2, 4, 8)):
            a_thread = columns * slice_size // 64  # registers
            if 32 <= a_thread <= 128 and slice_size * warps < 2 * op.width and op.columns >= 64 * columns:
                found.append((columns, slice_size, warps, -1))
    return list(dict.fromkeys(found))


class Compiling:
    """What key computation and compilation ask of a driver: a worker needs no GPU of its own."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> None:
    """Make launches of this process compile into Triton's cache and nothing else."""
    driver.set_active(Compiling(capability))
    run = JITFunction.run

    def warm(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = warm


def warm(job: tuple[Op, Tile]) -> str | None:
    op, tile = job
    x, gain = (
        torch.empty(op.rows, op.width, dtype=DTYPE, device="meta"),
        torch.empty(op.width, dtype=DTYPE, device="meta"),
    )
    weight = torch.empty(op.weight_shape, dtype=DTYPE, device="meta")
    out = torch.empty(op.rows, op.columns, dtype=DTYPE, device="meta")
    try:
        op.call(x, gain, weight, out, tile, True)
    except Exception as error:  # the compiler raises many types; the main process meets it again and reports it
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(jobs: list[tuple[Op, Tile]]) -> None:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    begin = time.perf_counter()
    # fork, and before CUDA starts here: workers inherit the imports and never touch the GPU.
    number = int(capability.replace(".", ""))
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), compile_only, (number,)) as pool:
        errors = [e for e in pool.map(warm, jobs, chunksize=1) if e]
    print(f"compiled {len(jobs)} in {time.perf_counter() - begin:.0f} s, {len(errors)} failed {errors[:1]}", flush=True)


def seconds(step: Callable[[int], object], copies: int) -> float:
    """Time of one call: a graph of `copies` calls, the median of its replays."""
    for i in range(min(copies, 3)):
        step(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            step(i)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) / copies / 1e3


def tune(op: Op, weights: Tensor, deadline: float) -> dict[str, Any]:
    x = torch.randn(op.rows, op.width, device="cuda").to(DTYPE)
    gain = torch.randn(op.width, device="cuda").to(DTYPE)
    out = torch.randn(op.rows, op.columns, device="cuda").to(DTYPE)
    right = op.call(x.double(), gain.double(), weights[0].double(), out.double(), None, False)
    copies = len(weights)
    timed: dict[Tile, float] = {}
    failed: dict[str, str] = {}
    skipped = 0
    for tile in candidates(op):
        if time.perf_counter() > deadline:
            skipped += 1
            continue
        try:
            got = op.call(x, gain, weights[0], out, tile, True)
            error = float((got.double() - right).norm() / right.norm())
            if not error < TOLERANCE:
                failed[str(tile)] = f"relative error {error:.3g}"
                continue
            timed[tile] = seconds(lambda i, t=tile: op.call(x, gain, weights[i], out, t, True), copies)
        except triton.runtime.errors.TritonError as failure:
            failed[str(tile)] = f"{type(failure).__name__}: {str(failure)[:100]}"
    library = seconds(lambda i: F.linear(x, weights[i]), copies)

    def rate(t: float | None) -> float | None:
        return None if t is None else round(op.nbytes / t / 1e12, 3)

    best = min(timed, key=timed.__getitem__) if timed else None
    return {
        "shape": op.shape,
        "op": op.name,
        "columns": op.columns,
        "width": op.width,
        "rows": op.rows,
        "best": best,
        "best_tbs": rate(timed.get(best)) if best else None,
        "heuristics": [[tile, rate(timed.get(tile))] for tile in op.heuristics()],
        "cublas_tbs": rate(library),
        "all": {str(t): rate(s) for t, s in sorted(timed.items(), key=lambda item: item[1])},
        "failed": failed,
        "skipped": skipped,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.2-1b", help=f"comma separated, of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=90, help="start no candidate later than this")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    begin = time.perf_counter()
    todo = list(ops(args.shapes.split(","), [int(b) for b in args.rows.split(",")]))
    compile_all([(op, tile) for op in todo for tile in candidates(op)])
    if not pdl.pdl_supported("cuda"):
        print("this GPU has no programmatic dependent launch: nothing to tune", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    table = []
    print(f"{'shape':<14}{'op':<9}{'[N, K]':<16}{'B':>3}  {'best':<20}{'TB/s':>6}{'cuBLAS':>8}  chosen")
    for _, group in itertools.groupby(todo, key=lambda op: (op.shape, op.name)):
        same = list(group)
        copies = min(max(math.ceil(STREAMED / same[0].nbytes), 1), MAX_COPIES)
        weights = torch.empty((copies, *same[0].weight_shape), dtype=DTYPE, device="cuda").normal_(0, 0.02)
        for op in same:
            row = tune(op, weights, begin + args.seconds)
            table.append(row)
            size = str([op.weight_shape[0], op.width])
            chosen = ", ".join(f"{tile} {tbs or 0:.2f}" for tile, tbs in row["heuristics"])
            print(
                f"{op.shape:<14}{op.name:<9}{size:<16}{op.rows:>3}  {row['best']!s:<20}{row['best_tbs'] or 0:>6.2f}"
                f"{row['cublas_tbs']:>8.2f}  {chosen}" + (f"  FAILED {row['failed']}" if row["failed"] else ""),
                flush=True,
            )
        del weights
    skipped = sum(row["skipped"] for row in table)
    print(f"{time.perf_counter() - begin:.0f} s, {skipped} candidates not timed for want of time")
    if args.json:
        args.json.write_text(json.dumps({"environment": bench.environment(), "rows": table}, indent=1) + "\n")
    wrong = any("relative error" in text for row in table for text in row["failed"].values())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
