#!/usr/bin/env python3
"""The host's decode loop beside the device's: time per token, the CPU's part in it, and how soon a run is cancelled.

    scripts/bench_loop.py [--shapes smollm2-135m,llama-3.2-1b] [--batches 1,8] [--prompt 64] [--tokens 128]
                          [--long 1024] [--rounds 5] [--cancels 20] [--out DIR]

Random weights, bfloat16. Each loop is measured on an idle CPU and with a spinning process on every core. `arrival` is
what a reader of the stream sees, `device` the GPU's own clock at the end of each step, `wall` a whole call without a
stream. CPU time is the process's: `cpu_ms_per_call` of a whole call of `--tokens`, with prefill, launch and results;
`cpu_us_per_step`, what each further step adds up to a call of `--long` on an idle CPU. Waiting (the host loop's sync,
the device loop's polling) is taken out of both and given apart. Gate: tokens of both loops are equal, greedy and
seeded, and the device made all of them; the long calls are held to the same.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bench_common as bench
import torch
from bench_common import Gate, Row

from bucketgraph import LLM, SamplingParams
from bucketgraph.llm.device_loop.loop import Loop
from bucketgraph.llm.device_loop.ring import STEPS
from bucketgraph.llm.presets import preset
from bucketgraph.llm.request import LoopKind
from bucketgraph.llm.weights import random_weights

LOOPS: tuple[LoopKind, ...] = ("host", "device")
LONG_ROUNDS: dict[LoopKind, int] = {"host": 1, "device": 3}  # a step of the host's costs far more than a call's noise
Prompts = list[list[int]]


def params_of(rows: int, tokens: int, seeded: bool = False) -> list[SamplingParams]:
    heat = 0.8 if seeded else 0.0
    return [SamplingParams(temperature=heat, seed=row, max_tokens=tokens, ignore_eos=True) for row in range(rows)]


def generated(llm: LLM, prompts: Prompts, params: list[SamplingParams], loop: LoopKind) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, loop=loop)]


def looped(llm: LLM) -> int:
    return llm.stats()["decode"].outcomes.get("looped", 0)


def right(llm: LLM, prompts: Prompts, tokens: int, gate: Gate, what: str) -> bool:
    """Whether both loops generate the same, the second one on the device alone."""
    green = True
    for seeded in (False, True):
        params, kind = params_of(len(prompts), tokens, seeded), "seeded" if seeded else "greedy"
        want = generated(llm, prompts, params, "host")
        before = looped(llm)
        got = generated(llm, prompts, params, "device")
        steps, reasons = looped(llm) - before, llm.stats()["decode"].reasons
        green &= gate.require(got == want, f"{what}: {kind} tokens of the two loops differ")
        green &= gate.require(steps == tokens - 1, f"{what}: {steps} of {tokens - 1} steps looped, {reasons}")
    return green


def loop_of(llm: LLM, rows: int) -> Loop:
    found = next(loop for _, loop, _ in llm._engine.loops._loops.values() if loop is not None and loop.rows == rows)
    assert found is not None, "the gate was green"
    return found


def arrivals(llm: LLM, prompts: Prompts, tokens: int, loop: LoopKind) -> list[float]:
    """ms from each token of the first prompt to the next, as a reader of the stream has them; several at once share."""
    gaps: list[float] = []
    last = 0.0
    for delta in llm.generate(prompts, params_of(len(prompts), tokens), stream=True, loop=loop):
        if delta.index:
            continue
        now = time.perf_counter()
        if last:
            gaps += [1e3 * (now - last) / len(delta.token_ids)] * len(delta.token_ids)
        last = now
    return gaps


class Waiting:
    """CPU seconds that this thread spends on waiting for the GPU while it is installed: all of it from one step to the
    next where the same run of the device stays in flight, and the host loop's sync.
    """

    def __init__(self, llm: LLM, loop: LoopKind) -> None:
        self.seconds = 0.0
        self._engine = engine = llm._engine
        self._last = time.thread_time()
        step, accept = engine.step, engine._accept

        def polled() -> None:
            run = engine._run
            step()
            now = time.thread_time()
            if run is not None and engine._run is run:
                self.seconds += now - self._last
            self._last = now

        def synced(*args: Any) -> None:
            began = time.thread_time()
            if llm.device.type == "cuda":
                torch.cuda.synchronize(llm.device)
            self.seconds += time.thread_time() - began
            accept(*args)

        if loop == "device":
            engine.step = polled  # type: ignore[method-assign]
        else:
            engine._accept = synced  # type: ignore[method-assign]

    def remove(self) -> None:
        for name in ("step", "_accept"):
            self._engine.__dict__.pop(name, None)


def measured(llm: LLM, prompts: Prompts, args: Namespace, loop: LoopKind) -> Row:
    rows, tokens = len(prompts), args.tokens
    steps, params = tokens - 1, params_of(rows, tokens)
    generated(llm, prompts, params, loop)
    gaps: list[float] = []
    walls: list[float] = []
    stamps: list[float] = []
    for _ in range(args.rounds):
        gaps += arrivals(llm, prompts, tokens, loop)
    calls: list[Row] = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        calls.append(cpu_of_call(llm, prompts, params, loop))
        walls.append(1e3 * (time.perf_counter() - began) / tokens)
        if loop == "device":
            clock = loop_of(llm, rows).ring.stamps[:steps].double()
            stamps += (1e-6 * clock.diff()).tolist()
    row: Row = {"arrival_ms": bench.spread(gaps), "wall_ms": bench.spread(walls), **median_call(calls)}
    return row | ({"device_ms": bench.spread(stamps)} if stamps else {})


def cpu_of_call(llm: LLM, prompts: Prompts, params: list[SamplingParams], loop: LoopKind) -> Row:
    """A call's tokens, its CPU ms apart from waiting, and those of waiting."""
    waiting, began = Waiting(llm, loop), time.process_time()
    try:
        ids = generated(llm, prompts, params, loop)
        cpu = time.process_time() - began
    finally:
        waiting.remove()
    return {"ids": ids, "cpu_ms_per_call": 1e3 * (cpu - waiting.seconds), "waiting_ms_per_call": 1e3 * waiting.seconds}


def median_call(calls: list[Row]) -> Row:
    return {
        key: round(statistics.median(c[key] for c in calls), 4) for key in ("cpu_ms_per_call", "waiting_ms_per_call")
    }


def long_calls(llm: LLM, prompts: Prompts, args: Namespace, gate: Gate, what: str) -> dict[LoopKind, Row] | None:
    """CPU ms of each loop's calls of `--long`; None if these are not right."""
    params, steps, before = params_of(len(prompts), args.long), args.long - 1, looped(llm)
    calls = {loop: [cpu_of_call(llm, prompts, params, loop) for _ in range(LONG_ROUNDS[loop])] for loop in LOOPS}
    count = (looped(llm) - before) / LONG_ROUNDS["device"]
    equal = all(call["ids"] == calls["host"][0]["ids"] for loop in LOOPS for call in calls[loop])
    green = gate.require(equal, f"{what}: tokens of the two loops' long calls differ")
    green &= gate.require(count == steps, f"{what}: {count:g} of {steps} steps of a long call looped")
    return {loop: median_call(calls[loop]) for loop in LOOPS} if green else None


def per_step(short: Row, long: Row, steps: int) -> Row:
    """CPU us that each of the steps between two calls adds."""

    def added(kind: str) -> float:
        return round(1e3 * (long[f"{kind}_ms_per_call"] - short[f"{kind}_ms_per_call"]) / steps, 3)

    return {"cpu_us_per_step": added("cpu"), "waiting_us_per_step": added("waiting")}


def cancelling(llm: LLM, prompts: Prompts, args: Namespace) -> Row:
    """Steps that the device still makes, and ms until it is over, from the flag on."""
    engine, steps, times = llm._engine, [], []
    for turn in range(args.cancels):
        requests = llm._requests(prompts, params_of(len(prompts), args.tokens))
        for request in requests:
            request.loop = "device"
        engine.add(requests)
        while (run := engine._run) is None:
            engine.step()
        while run._ring.read()[0] < min(3 + turn, args.tokens // 2):
            pass
        began = time.perf_counter()
        run.cancel()
        at = run._ring.read()[0]
        while not run._ring.read()[1]:
            pass
        times.append(1e3 * (time.perf_counter() - began))
        run.wait()
        steps.append(float(run.steps - at))
        engine.abort(requests)
    return {"steps": bench.spread(steps), "ms": bench.spread(times)}


def cases_of(shape: str, args: Namespace, gate: Gate) -> list[Row]:
    device = torch.device(args.device)
    config, found = preset(shape), []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = random_weights(config, dtype, device)
    most = max(args.batches)
    length = args.prompt + args.long
    llm = bench.serve(
        config, weights, "fast", [args.prompt * min(most, 8)], args.batches, length, live=most * length, loop="device"
    )
    with llm:
        gate.require(not bench.failed(llm), f"{shape}: {bench.failed(llm)}")
        built = {row.bucket: row for row in llm.loops()}
        draw = torch.Generator().manual_seed(0)
        for batch in args.batches:
            what = f"{shape} x {batch}"
            row: Row = {"shape": shape, "batch": batch, "green": False}
            found.append(row)
            with gate.guard(what):
                ids = torch.randint(0, config.vocab_size, (batch, args.prompt), generator=draw).tolist()
                report = built.get(f"batch={batch}")
                gate.require(report is not None and report.error is None, f"{what}: no device loop, {report}")
                if report is not None:
                    row |= {"build_s": report.seconds, "mib": report.mib, "programmatic": report.programmatic}
                row["green"] = right(llm, ids, args.tokens, gate, what)
                long = long_calls(llm, ids, args, gate, what) if row["green"] else None
                if long is None:
                    row["green"] = False
                    continue
                row["cancel"] = cancelling(llm, ids, args)
                worst = row["cancel"]["steps"]["max"]
                row["green"] = gate.require(worst <= 2, f"{what}: a cancel took {worst} steps")
                for state, around in (("idle", nullcontext), ("busy", bench.busy_cpu)):
                    row[state] = timed(llm, ids, args, around)
                for loop in LOOPS:
                    row["idle"][loop] |= per_step(row["idle"][loop], long[loop], args.long - args.tokens)
    return found


def timed(llm: LLM, ids: Prompts, args: Namespace, around: Callable[[], Any]) -> Row:
    with around():
        both = {loop: measured(llm, ids, args, loop) for loop in LOOPS}
    ratio = both["host"]["wall_ms"]["p50"] / both["device"]["wall_ms"]["p50"]
    return {**both, "ratio_host_device": round(ratio, 3)}


def show(found: list[Row]) -> None:
    heads = ("shape", "batch", "CPU", "loop", "wall", "p50", "p99", "max", "GPU p50", "p99", "max")
    heads += ("CPU ms a call", "waiting", "CPU us a step", "waiting")
    costs = [f"{kind}_{unit}" for unit in ("ms_per_call", "us_per_step") for kind in ("cpu", "waiting")]
    lines = []
    for row in found:
        for state in ("idle", "busy"):
            for loop, part in row.get(state, {}).items():
                if loop in LOOPS:
                    clocks = [part["arrival_ms"], part.get("device_ms", {})]
                    cells = [clock.get(key) for clock in clocks for key in ("p50", "p99", "max")]
                    own = (part["wall_ms"]["p50"], *cells, *(part.get(key) for key in costs))
                    lines.append((row["shape"], row["batch"], state, loop, *own))
    bench.table(heads, lines)
    for row in found:
        if "cancel" in row:
            print(f"{row['shape']} x {row['batch']}: cancelled within steps {row['cancel']['steps']}")


def main(argv: list[str] | None = None) -> int:
    parser = bench.parser(__doc__, peers="none")
    parser.add_argument("--shapes", type=bench.names, default=["smollm2-135m", "llama-3.2-1b"])
    parser.add_argument("--batches", type=bench.numbers, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--long", type=int, default=1024, help="tokens of the calls that show what a step costs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cancels", type=int, default=20)
    args = parser.parse_args(argv)
    if not args.tokens < args.long <= STEPS + 1:
        parser.error(
            f"--long: given {args.long}, expected more than --tokens and at most {STEPS + 1}, which is one run"
        )
    gate, found = Gate(), []
    for shape in args.shapes:
        with gate.guard(shape):
            found += cases_of(shape, args, gate)
        bench.release_memory(torch.device(args.device))
    show(found)
    result = {
        "what": f"random weights, prompt {args.prompt}, {args.tokens} tokens, greedy; ms a step, CPU ms a call; "
        f"CPU us of each step from {args.tokens} to {args.long} tokens",
        "gate": "greedy and seeded tokens of both loops are equal; all steps of the second one ran on the device",
        "red": gate.red,
        "rows": found,
    }
    print(f"written to {bench.save('device_loop', result, args)}")
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
