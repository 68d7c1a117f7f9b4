#!/usr/bin/env python3
"""What it costs the host to point a captured graph at other memory, beside copying there and beside capturing anew.

    scripts/bench_rebind.py [--mib 64] [--shape llama-3.2-1b] [--batches 1,8] [--calls 300] [--out DIR]

Input: a row sum over one tensor, which is copied into its slot or read where it lies; a launch of the graph alone is
the limit. Each time starts on an idle GPU and ends when the launch returns; `end to end` waits for the result. State:
the decode graph of a released shape (random weights, bfloat16) moves between two KV caches and launches; beside it one
capture of the same graph, and `LLM.swap_cache` as a whole. Gates: the bits of eager and of a fresh capture.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import bench_common as bench
import torch
from bench_common import Gate, Row
from torch import Tensor

from bucketgraph import LLM, BucketManager, SamplingParams
from bucketgraph.binding import MovableGraph
from bucketgraph.binding.recipe import state
from bucketgraph.config import parse
from bucketgraph.executables.cudagraph import CudaGraph
from bucketgraph.executables.family import synchronize
from bucketgraph.llm.presets import preset
from bucketgraph.llm.weights import random_weights
from bucketgraph.selfcheck import same_bits

CACHE = "cache.data"
CONTEXT = 512
Timed = Callable[[int], object]


def host(run: Timed, device: torch.device, calls: int, waits: bool = False, warm: int = 20) -> Row:
    """Microseconds of `run(turn)`, each time on an idle device; with `waits` until the device is idle again."""
    times = []
    for turn in range(warm + calls):
        synchronize(device)
        began = time.perf_counter_ns()
        result = run(turn)
        if waits:
            synchronize(device)
        ended = time.perf_counter_ns()
        del result
        if turn >= warm:
            times.append((ended - began) / 1e3)
    return bench.spread(times)


# -- an input ----------------------------------------------------------------------------------------------------------


def row_sums(x: Tensor) -> Tensor:
    return x.sum(1)


def managed(rows: int, bind: str, device: torch.device) -> BucketManager:
    made: dict[str, Any] = {
        "version": 1,
        "name": f"rebind-{bind}",
        "axes": {"batch": [rows]},
        "inputs": {"x": {"shape": ["batch", 1024], "dtype": "float32", "bind": bind}},
        "outputs": {"y": {"shape": ["batch"]}},
    }
    manager = BucketManager(row_sums, parse(made), device=device)
    report = manager.warmup()
    if not report.ok:
        raise RuntimeError(f"warm-up: {report.failed[0].error}")
    return manager


def an_input(args: Namespace, gate: Gate) -> Row:
    device = torch.device(args.device)
    rows = args.mib * 2**20 // 4096
    places = [torch.randn(rows, 1024, device=device) for _ in range(2)]
    want = [row_sums(x) for x in places]
    row: Row = {"mib": args.mib, "calls": {}}
    with managed(rows, "patch", device) as patched, managed(rows, "copy", device) as copied:
        (captured,) = patched.captured.values()
        graph = captured.executable
        ways = {"patch": patched, "copy": copied}
        green = gate.require(
            isinstance(graph, MovableGraph) and graph.can_move("x"), f"input: not bound: {patched.explain()}"
        )
        for way, manager in ways.items():
            right = all(same_bits(manager(x=places[turn % 2])["y"], want[turn % 2]) for turn in range(6))
            green &= gate.require(right, f"input, {way}: the bits differ from eager's")
        if not green or not isinstance(graph, MovableGraph):
            return row
        addresses, slot = [x.data_ptr() for x in places], captured.inputs.views["x"]

        def copy(turn: int) -> None:
            slot.copy_(places[turn % 2])
            graph.replay()

        runs: dict[str, Timed] = {
            "launch alone": lambda turn: graph.replay(),
            "rebind and launch": lambda turn: graph.replay({"x": addresses[turn % 2]}),
            "copy and launch": copy,
        }
        whole: dict[str, Timed] = {
            f"a whole call, {way}": lambda turn, m=manager: m(x=places[turn % 2]) for way, manager in ways.items()
        }
        for name, run in (runs | whole).items():
            row["calls"][name] = {
                "host_us": host(run, device, args.calls),
                "end_to_end_us": host(run, device, args.calls, waits=True),
            }
    calls = row["calls"]
    alone = calls["launch alone"]["host_us"]["p50"]
    row["rebind_us"] = round(calls["rebind and launch"]["host_us"]["p50"] - alone, 2)
    row["copy_us"] = round(calls["copy and launch"]["host_us"]["p50"] - alone, 2)
    return row


# -- a KV cache --------------------------------------------------------------------------------------------------------


def a_cache(llm: LLM, batch: int, args: Namespace, gate: Gate) -> Row:
    manager, device = llm._runner.decode_manager, llm.device
    what = f"{args.shape}, batch {batch}"
    other = llm.cache.like()
    llm.swap_cache(other)
    llm.swap_cache(other)
    captured = bench.captured_of(manager, batch=batch)
    graph, row = captured.executable, Row(shape=args.shape, batch=batch)
    row["fixed"] = {str(bucket): reasons for bucket, reasons in manager.fixed.items()}
    movable = isinstance(graph, MovableGraph) and graph.can_move(state(CACHE))
    if not gate.require(movable, f"{what}: the decode graph cannot move: {row['fixed']}"):
        return row
    assert isinstance(graph, MovableGraph), "required just now"
    name = state(CACHE)
    row["sites"] = sum(f"{name} + " in line for line in graph.explain())
    requests = bench.held(llm, batch, CONTEXT + 1, CONTEXT, SamplingParams(temperature=0.0, ignore_eos=True))
    try:
        bench.fill_cache(llm)
        other.data.copy_(llm.cache.data)
        with manager.family.turn():
            captured.inputs.fill(llm._runner.decode_arrays(requests))
            there, here = other.data.data_ptr(), llm.cache.data.data_ptr()
            want = outputs(manager, graph.replay())
            # What lies at home by now is poison to a graph that still reads it.
            written, before = llm.cache.data.clone(), other.data.clone()
            llm.cache.data.fill_(float("nan"))
            got = outputs(manager, graph.replay({name: there}))
            same = all(map(same_bits, got, want)) and same_bits(other.data, written)
            green = gate.require(same, f"{what}: the moved graph's bits differ from those at home")
            other.data.copy_(before)
            llm.cache.data.copy_(other.data)
            graph.replay()
            fresh = CudaGraph(captured.fn, captured.inputs.views, manager.family)
            took = []
            for _ in range(5):
                synchronize(device)
                began = time.perf_counter()
                fresh.capture()
                took.append(1e3 * (time.perf_counter() - began))
                same = all(map(same_bits, outputs(manager, fresh.replay()), got))
                green &= gate.require(same, f"{what}: a fresh capture's bits differ from the moved graph's")
                fresh.release()
                fresh = CudaGraph(captured.fn, captured.inputs.views, manager.family)
            row["capture_ms"] = bench.spread(took)
            if green:
                row["launch_us"] = host(lambda turn: graph.replay(), device, args.calls)
                runs = [{name: there}, {name: here}]
                row["move_and_launch_us"] = host(lambda turn: graph.replay(runs[turn % 2]), device, args.calls)
                graph.replay()
    finally:
        bench.let_go(llm, requests)
    if green:
        row["swap_cache_us"] = host(lambda turn: llm.swap_cache(other), device, 10, warm=2)
        moved, capture = row["move_and_launch_us"]["p50"], 1e3 * row["capture_ms"]["p50"]
        row["capture_over_move"] = round(capture / moved, 2)
    return row


def outputs(manager: BucketManager, raw: object) -> list[Tensor]:
    synchronize(manager.device)
    return [tensor.clone() for tensor in manager.outputs_of(raw).values()]


def caches(args: Namespace, gate: Gate, rows: list[Row]) -> None:
    config, device = preset(args.shape), torch.device(args.device)
    weights = random_weights(config, torch.bfloat16, device)
    live = max(args.batches) * (CONTEXT + 64)
    with bench.serve(config, weights, "fast", [64], args.batches, 1024, live=live) as llm:
        gate.require(not bench.failed(llm), bench.failed(llm))
        for batch in args.batches:
            with gate.guard(f"{args.shape}, batch {batch}"):
                rows.append(a_cache(llm, batch, args, gate))


def show(result: Row) -> None:
    lines: list[list[object]] = []
    for name, times in result["input"].get("calls", {}).items():
        lines.append([f"{result['input']['mib']} MiB input: {name}", times["host_us"]["p50"], times["host_us"]["p99"]])
        lines.append([f"  {name}, end to end", times["end_to_end_us"]["p50"], times["end_to_end_us"]["p99"]])
    for row in result["caches"]:
        for key, scale in (("launch_us", 1), ("move_and_launch_us", 1), ("swap_cache_us", 1), ("capture_ms", 1e3)):
            if key in row:
                label = f"{row['shape']} batch {row['batch']}: {key.rpartition('_')[0].replace('_', ' ')}"
                lines.append([label, scale * row[key]["p50"], scale * row[key]["p99"]])
    bench.table(("microseconds of the host", "p50", "p99"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser(__doc__, peers="none")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--batches", type=bench.numbers, default="1,8")
    parser.add_argument("--calls", type=int, default=300)
    args, gate = parser.parse_args(argv), Gate()
    result: Row = {
        "what": "microseconds of the host: binding a graph to other memory, copying there, capturing anew",
        "gate": "the bits of eager and of a fresh capture; old memory holds NaN where a moved graph is checked",
        "limit_formula": "measured: a launch of the same graph with nothing to set",
        "input": {},
        "caches": [],
    }
    with torch.no_grad():
        with gate.guard("input"):
            result["input"] = an_input(args, gate)
        with gate.guard("caches"):
            caches(args, gate, result["caches"])
    result["red"] = gate.red
    path = bench.save("rebind", result, args)
    show(result)
    print(f"limit: {result['limit_formula']}; written to {path}")
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
