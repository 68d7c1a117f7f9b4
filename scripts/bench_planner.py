#!/usr/bin/env python3
"""Planned prefill buckets against engines' ladders on a real trace: what the planner predicts, and what a GPU takes.

    scripts/bench_planner.py TRACE [--requests 2000] [--shape llama-3.2-1b] [--largest 8192] [--out DIR]

The cost curve is measured as `bucketgraph plan --calibrate` does, and the buckets are planned on it: as many as powers
of two, vLLM and SGLang have. Then the first requests of the trace run in order, one a launch, through every set's
graphs, the sets in turns of some hundred launches; what a ladder does not cover runs eagerly, unpadded. The same with
prompts packed as `LLM` packs them, against powers of two. GPU time is the sum of the times between events around each
replay. Gates: logits of padded replays against the exact lengths, replay against eager bit for bit, and the launches
are those that the planner counted.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import bench_common as bench
import numpy as np
import torch
from bench_common import Gate, Row
from torch import Tensor

from bucketgraph import LLM, SamplingParams, executables
from bucketgraph.config import parse
from bucketgraph.llm.kv_cache import PagedKVCache
from bucketgraph.llm.presets import preset
from bucketgraph.llm.request import Request
from bucketgraph.manager import Captured
from bucketgraph.planner import calibrate, costs, demand, document, ladders, packing, traces
from bucketgraph.planner.choose import Limits, choose
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.document import Target
from bucketgraph.planner.traces import Trace

ALIGN = 16
SLOTS = packing.SLOTS
TURN = 250  # launches of one set in a row
WANTED = 1.15  # how much faster planned buckets must be than powers of two
TRUSTED = 0.1  # how far a measured gain may be from the predicted one, as a share
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Sizes:
    """One set of buckets: token counts, ascending."""

    name: str
    tokens: tuple[int, ...]

    def cover(self, count: int) -> int | None:
        """The bucket of a launch of `count` tokens; None over the largest."""
        at = bisect_left(self.tokens, count)
        return self.tokens[at] if at < len(self.tokens) else None

    def predicted(self, launches: Sequence[int], curve: CostCurve, attends: CostCurve | None = None) -> float:
        """Milliseconds of all launches by the curve; what is not covered costs its own size.

        With `attends`, attention costs what one prompt of the real length takes; the curve has a bucket's, of `SLOTS`.
        """
        padded = np.array([self.cover(count) or count for count in launches], dtype=np.int64)[:, None]
        total = curve.cost(padded).sum()
        if attends is not None:
            total += (attends.cost(np.array(launches, dtype=np.int64)[:, None]) - attends.cost(padded) / SLOTS).sum()
        return float(total)


@dataclass(frozen=True)
class Pair:
    """A ladder, and as many planned buckets."""

    ladder: Sizes
    planned: Sizes


def pairs(packed: Trace, curve: CostCurve, largest: int, count: int) -> list[Pair]:
    """The first `count` ladders, each beside the planner's best buckets of the same number for these launches."""
    points = demand.candidates(demand.limited(packed, largest, "pieces"), ALIGN)
    found = []
    for peer in ladders.peers(largest, ALIGN)[:count]:
        tokens = tuple(sorted({min(size, largest) for size in peer.sizes}))
        ends = choose(points, curve, Limits(buckets=min(len(tokens), len(points)))).ends
        sizes = tuple(min(int(points.sizes[end]), largest) for end in ends)
        found.append(Pair(Sizes(peer.name, tokens), Sizes(f"planned, {len(sizes)}", sizes)))
    return found


def attention(alone: dict[int, float], shared: dict[int, float]) -> CostCurve:
    """What attention costs one prompt of a size. A bucket is calibrated as `SLOTS` equal prompts, and so with that part
    of one prompt's attention.
    """
    share = 1.0 - 1.0 / SLOTS
    points: dict[tuple[int, ...], dict[str, float]] = {
        (size,): {"ms": max(alone[size] - shared[size], 0.0) / share} for size in alone
    }
    return costs.measured(points, "attention")


def compared(ladder: float, planned: float) -> Row:
    """Milliseconds of all launches by either set, and how much faster the planned one is."""
    return {"ladder_ms": round(ladder, 2), "planned_ms": round(planned, 2), "gain": round(ladder / planned, 4)}


def judge(row: Row) -> Row:
    """How far what was measured is from what was predicted: the gain, and the milliseconds that are saved."""
    found, told = row["measured"], row["predicted"]
    row["gain_error"] = round(found["gain"] / told["gain"] - 1.0, 4)
    saved, expected = (each["ladder_ms"] - each["planned_ms"] for each in (found, told))
    row["saved_error"] = round(saved / expected - 1.0, 4) if expected else None
    return row


def verdict(rows: Sequence[Row]) -> Row:
    """What is asked of planning one request a launch, by the row of powers of two."""
    row = next(row for row in rows if row["ladder"] == "powers of two")
    return {
        "gain": row["measured"]["gain"],
        "gain_wanted": WANTED,
        "fast_enough": row["measured"]["gain"] >= WANTED,
        "gain_error": row["gain_error"],
        "gain_error_allowed": TRUSTED,
        "as_predicted": abs(row["gain_error"]) <= TRUSTED,
    }


# -- the model ---------------------------------------------------------------------------------------------------------


def place(args: Namespace, longest: int) -> Target:
    """A set of the shape whose prefill sizes are to be filled in. Decode is not asked for, and so not captured."""
    context = max(args.largest, longest)
    pages = SLOTS * -(-context // bench.PAGE_SIZE) + 65
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    data = {
        "version": 1,
        "name": "planner",
        "phases": {
            "prefill": {"axes": {"tokens": [args.largest], "requests": [SLOTS]}},
            "decode": {"executable": "eager", "axes": {"batch": [SLOTS]}},
        },
        "kv_cache": {
            "page_size": bench.PAGE_SIZE,
            "memory": pages * PagedKVCache.page_bytes(preset(args.shape), bench.PAGE_SIZE, dtype),
        },
        "max_model_len": context,
    }
    return Target(data, "planner", "prefill", ("tokens",))


def serve(at: Target, sizes: Sequence[int], args: Namespace) -> LLM:
    """An LLM with a prefill bucket of each size. Not self-checked: `check` looks at some, calibration at others."""
    data = document.filled(at, [(size,) for size in sizes], "planner")
    return LLM(args.model, parse({**data, "warmup": {"self_check": False}}), device=args.device)


def bucket(llm: LLM, tokens: int) -> Captured:
    return bench.captured_of(llm._runner.prefill_manager, tokens=tokens, requests=SLOTS)


def launches(llm: LLM, lengths: Sequence[int], slots: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Tokens and inputs of each prefill of these prompts, packed by the runner with up to `slots` in one."""
    runner, waiting, left = llm._runner, deque[Request](), iter(lengths)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, llm.config.vocab_size, (max(lengths),), generator=draw).tolist()
    while True:
        for length in islice(left, slots - len(waiting)):
            request = Request(ids[:length], GREEDY, seed=0)
            request.hold(runner.cache.allocate(runner.cache.pages_for(length)), runner.table_width)
            waiting.append(request)
        if not waiting:
            return
        chunks = runner.pack(list(waiting))
        yield sum(count for _, count in chunks), runner.prefill_arrays(chunks)
        for request, count in chunks:
            request.computed += count
        while waiting and not waiting[0].pending:
            runner.cache.release(waiting.popleft().pages)


def check(llm: LLM, lengths: Sequence[int], sets: Sequence[Sizes], gate: Gate) -> list[Row]:
    """Some lengths in each set's bucket against the function at the exact length, and against itself in the bucket."""
    manager, rows = llm._runner.prefill_manager, []
    tolerance = manager.policy.tolerance or 0.0
    some = sorted({int(length) for length in np.quantile(lengths, [0.0, 0.25, 0.5, 0.9, 1.0], method="nearest")})
    for count, inputs in launches(llm, some, 1):
        with manager.family.turn():
            want = manager.run_unpadded(inputs)["logits"][0].clone()
            for tokens in sorted({size for each in sets if (size := each.cover(count))}):
                captured = bucket(llm, tokens)
                captured.inputs.fill(inputs)
                equal = bench.graph_equals_eager(manager, captured)
                error = bench.relative_error(manager.check_outputs(captured)["logits"][0], want)
                what = f"{count} tokens in the bucket of {tokens}"
                gate.require(equal, f"{what}: the graph's bits differ from eager's")
                gate.require(error <= tolerance, f"{what}: logits differ from unpadded by {error:.1e}")
                rows.append({"tokens": count, "bucket": tokens, "equal": equal, "error": error})
    return rows


# -- time --------------------------------------------------------------------------------------------------------------


def alone(llm: LLM, sizes: Sequence[int]) -> dict[int, float]:
    """Milliseconds of a replay whose bucket one prompt fills."""
    manager, found = llm._runner.prefill_manager, {}
    for count, inputs in launches(llm, sizes, 1):
        with manager.family.turn():
            captured = bucket(llm, count)
            captured.inputs.fill(inputs)
            found[count] = executables.milliseconds(captured.executable, llm.device)
    return found


class Clock:
    """Sums of the times between events around each run; read once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, list[tuple[Any, Any]]] = {}

    def run(self, name: str, call: bench.Run) -> None:
        marks = []
        for step in (call, None):
            event = torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else None
            if event is not None:
                event.record()
            marks.append(event or time.perf_counter())
            if step is not None:
                step()
        self._events.setdefault(name, []).append((marks[0], marks[1]))

    def totals(self) -> dict[str, float]:
        """Milliseconds by name."""
        if self._device.type != "cuda":
            return {name: 1e3 * sum(end - start for start, end in each) for name, each in self._events.items()}
        torch.cuda.synchronize(self._device)
        return {name: sum(start.elapsed_time(end) for start, end in each) for name, each in self._events.items()}


def through(
    llm: LLM, lengths: Sequence[int], slots: int, sets: Sequence[Sizes], gate: Gate
) -> tuple[dict[str, float], list[int]]:
    """Milliseconds of all launches by each set, and the launches' tokens."""
    manager, clock, counts = llm._runner.prefill_manager, Clock(llm.device), []
    source = launches(llm, lengths, slots)
    with manager.family.turn():
        while turn := list(islice(source, TURN)):
            counts += [count for count, _ in turn]
            for each in sets:
                for count, inputs in turn:
                    tokens = each.cover(count)
                    if tokens is not None:
                        captured = bucket(llm, tokens)
                        captured.inputs.fill(inputs)
                        clock.run(each.name, captured.executable.replay)
                    else:
                        moved = {name: tensor.to(llm.device) for name, tensor in inputs.items()}
                        clock.run(each.name, partial(manager.fn, **moved))
    return clock.totals(), counts


def rows_of(
    found: Sequence[Pair], llm: LLM, lengths: Sequence[int], slots: int, packed: Trace, curve: CostCurve, gate: Gate
) -> list[Row]:
    """Predicted and measured, a row for each ladder."""
    sets = list({each.tokens: each for pair in found for each in (pair.ladder, pair.planned)}.values())
    names = {each.tokens: each.name for each in sets}
    times, counts = through(llm, lengths, slots, sets, gate)
    gate.require(counts == packed.sizes[:, 0].tolist(), f"{slots} slots: the launches are not the planner's")
    rows = []
    for pair in found:
        told = compared(pair.ladder.predicted(counts, curve), pair.planned.predicted(counts, curve))
        took = compared(times[names[pair.ladder.tokens]], times[names[pair.planned.tokens]])
        covered = sum(count for count in counts if pair.ladder.cover(count)) / sum(counts)
        row: Row = {"ladder": pair.ladder.name, "graphs": len(pair.ladder.tokens), "slots": slots}
        row |= {"launches": len(counts), "covered_tokens": round(covered, 4), "predicted": told, "measured": took}
        rows.append(judge(row) | {"ladder_sizes": pair.ladder.tokens, "planned_sizes": pair.planned.tokens})
    return rows


# -- the whole ---------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    print("\nms of all launches; gain is ladder / planned at as many graphs")
    table = []
    for row in rows:
        kind = "one a launch" if row["slots"] == 1 else f"packed, {row['slots']}"
        cells = [row[key][name] for key in ("measured", "predicted") for name in ("ladder_ms", "planned_ms", "gain")]
        table.append([row["ladder"], row["graphs"], kind, row["launches"], *cells, row["gain_error"]])
    heads = (
        "ladder",
        "graphs",
        "prompts",
        "launches",
        "ms",
        "planned ms",
        "gain",
        "told ms",
        "told",
        "told gain",
        "error",
    )
    bench.table(heads, table)


def arguments(argv: Sequence[str] | None) -> Namespace:
    parser = bench.parser(__doc__, peers="none")
    parser.add_argument("trace", type=Path, help="CSV or JSON Lines of lengths in order, plain or gzip")
    parser.add_argument("--column", help="the trace's column of lengths")
    parser.add_argument("--requests", type=int, default=2000, help="so many of the first")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--largest", type=int, default=8192, help="tokens of a launch; longer prompts come in pieces")
    args = parser.parse_args(argv)
    args.dtype = "auto"
    args.model = f"random:{args.shape}" + (f":{args.layers}" if args.layers else "")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, gate = arguments(argv), Gate()
    device = torch.device(args.device)
    trace = traces.read([args.trace], None if args.column is None else [args.column])
    trace = replace(trace, sizes=trace.sizes[: args.requests])
    lengths = trace.sizes[:, 0].tolist()
    single, packed = (packing.pack(trace, args.largest, slots).trace for slots in (1, SLOTS))
    at, began = place(args, max(lengths)), time.perf_counter()
    rows: list[Row] = []
    result: Row = {
        "what": f"{args.shape}, random weights: GPU time of the prefills of {len(lengths)} requests",
        "trace": args.trace.name,
        "gate": "logits of padded replays against the exact length within warm-up's tolerance; replay equals eager",
        "requests": len(lengths),
        "tokens": sum(lengths),
    }

    def keep(**more: Any) -> None:
        result.update(more, seconds=round(time.perf_counter() - began, 1))
        bench.save("planner_h200", {**result, "rows": rows, "red": gate.red}, args)

    curve, points = calibrate.calibrate(at, demand.limited(single, args.largest, "pieces"), [ALIGN], args)
    shared = {size: row["ms"] for (size,), row in points.items()}
    keep(curve=curve.name, curve_notes=curve.notes, calibrated_ms=shared)
    bench.release_memory(device)
    ones, several = pairs(single, curve, args.largest, 3), pairs(packed, curve, args.largest, 1)
    sets = [each for pair in (*ones, *several) for each in (pair.ladder, pair.planned)]
    sizes = sorted({*shared, *(tokens for each in sets for tokens in each.tokens)})
    print(f"calibrated {sorted(shared)}, {curve.name}; {len(sizes)} sizes to capture", flush=True)
    with serve(at, sizes, args) as llm, gate.guard("replays"):
        gate.require(not bench.failed(llm), bench.failed(llm))
        keep(checks=check(llm, lengths, sets, gate))
        if gate.red:
            return gate.conclude()
        by_size = {row.bucket["tokens"]: row.replay_ms for row in llm._runner.prefill_manager.captured.values()}
        told = curve.cost(np.array(sizes)[:, None]).tolist()
        keep(sizes=[{"tokens": n, "curve_ms": ms, "replay_ms": by_size[n]} for n, ms in zip(sizes, told, strict=True)])
        attends = attention(alone(llm, sorted(shared)), shared)
        with gate.guard("one request a launch"):
            rows += rows_of(ones, llm, lengths, 1, single, curve, gate)
            counts = single.sizes[:, 0].tolist()
            for pair, row in zip(ones, rows, strict=True):
                own = [each.predicted(counts, curve, attends) for each in (pair.ladder, pair.planned)]
                row["predicted_by_own_length"] = compared(*own)
            keep(verdict=verdict(rows))
        with gate.guard("packed"):
            rows += rows_of(several, llm, lengths, SLOTS, packed, curve, gate)
        keep()
    show(rows)
    if "verdict" in result:
        print(f"planned against powers of two, one request a launch: {result['verdict']}")
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
