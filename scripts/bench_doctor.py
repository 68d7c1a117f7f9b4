#!/usr/bin/env python3
"""The doctor on a workload that launches bound and on one that kernels bound: its verdicts, its prediction, what came.

    scripts/bench_doctor.py [--launch-bound smollm2-135m] [--compute-bound llama-3.1-8b] [--context 512]
                            [--prefill 8192] [--out DIR]

Random weights, bfloat16: a decode step of one request, and a prompt. Gate: a replay gives the eager call's bits, the
verdicts are opposite, and the times behind the measured gain are what this script's own clock finds. A row whose gate
is red carries no ratio.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from typing import Any

import bench_common as bench
import torch
from bench_common import Gate, Row
from torch.utils._pytree import tree_leaves

from bucketgraph.doctor import Diagnosis, diagnose
from bucketgraph.doctor.models import Step, of_model
from bucketgraph.doctor.workload import Workload
from bucketgraph.executables import Executable, Family, make, resolve

AGREE = 0.15  # of a time: two clocks, one after the other, on a machine that others use


def captured(work: Workload) -> Executable:
    """The call as a bucket would hold it."""
    made = make(resolve("auto", work.device), lambda: work.call(), {}, Family(work.device))
    made.warm()
    made.capture()
    return made


def same_bits(work: Workload, executable: Executable) -> bool:
    want = [tensor.clone() for tensor in tree_leaves(work.call())]
    got = tree_leaves(executable.replay())
    return len(got) == len(want) and all(map(torch.equal, got, want))


def wall_ms(run: bench.Run, device: torch.device, seconds: float = 0.5) -> list[float]:
    """ms of a run of several in a row, over five rounds."""
    rounds = []
    for turn in range(6):
        count = 1 if not turn else max(1, int(1e3 * seconds / 5 / max(rounds[0], 1e-3)))
        sync(device)
        began = time.perf_counter()
        for _ in range(count):
            run()
        sync(device)
        rounds.append(1e3 * (time.perf_counter() - began) / count)
    return rounds[1:]


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row_of(made: Diagnosis) -> Row:
    """What the diagnosis says, without its lists."""
    times, found, result = made.times, made.prediction, made.capture
    row: Row = {
        "workload": made.name,
        "verdict": made.verdict,
        "summary": made.summary,
        "times": times and asdict(times),
    }
    if made.launches is not None:
        kept = ("launches", "nodes", "streams", "launch_us", "busy_ms", "busy_share", "gaps")
        row["launches"] = {key: value for key, value in asdict(made.launches).items() if key in kept}
        row["repeats"] = [f"{each.times} x {each.launches}" for each in made.launches.layers]
    row["findings"] = [f"{each.severity}: {each}" for each in made.findings]
    row["predicted"] = found and {**asdict(found), "gain": round(found.gain, 3)}
    row["capture"] = result and asdict(result)
    return row


def by_hand(work: Workload, gate: Gate, what: str) -> tuple[list[float], list[float]] | None:
    """ms of eager calls and of replays; None if a replay gives other bits."""
    bench.release_memory(work.device)  # a graph that dies in a capture ends it
    with torch.no_grad():
        executable = captured(work)
        try:
            if not gate.require(same_bits(work, executable), f"{what}: a replay differs from the eager call"):
                return None
            return wall_ms(work.call, work.device), wall_ms(executable.replay, work.device)
        finally:
            executable.release()


def examined(kind: str, model: str, step: Step, args: Namespace, gate: Gate) -> Row:
    work = of_model(f"random:{model}", step, device=args.device)
    what, own = f"{model}, {step}", None
    with gate.guard(f"{what}, captured by hand"):
        own = by_hand(work, gate, what)
    bench.release_memory(work.device)
    made = diagnose(work)
    row: Row = {"kind": kind, "green": False, **row_of(made)}
    if own is not None:
        row |= {"eager_ms": bench.spread(own[0]), "replay_ms": bench.spread(own[1])}
    if made.verdict == "not timed" and work.device.type == "cpu":
        return row
    right = gate.require(made.verdict == kind, f"{what}: {made.verdict}, {made.summary}")
    row["green"] = own is not None and right and agrees(made, *map(statistics.median, own), gate, what)
    if row["green"]:
        assert made.prediction is not None and made.measured_gain is not None, "agrees has looked"
        row["ratio_predicted_gain"] = round(made.prediction.gain, 3)
        row["ratio_measured_gain"] = round(made.measured_gain, 3)
        row["ratio_predicted_measured"] = round(made.prediction.gain / made.measured_gain, 3)
    return row


def agrees(made: Diagnosis, eager: float, replay: float, gate: Gate, what: str) -> bool:
    """Whether the doctor's times of eager calls and replays are this script's own."""
    result = made.capture
    if not gate.require(result is not None and result.graph_ms is not None, f"{what}: no capture, {result}"):
        return False
    assert result is not None and result.graph_ms is not None and made.times is not None, "just asked"
    green = gate.require(made.prediction is not None, f"{what}: no prediction, {made.notes}")
    for name, doctors, ours in (("eager", made.times.eager_ms, eager), ("graph", result.graph_ms, replay)):
        text = f"{what}: {name} {doctors:.3f} ms by the doctor, {ours:.3f} ms by this script"
        green &= gate.require(abs(doctors - ours) <= AGREE * ours, text)
    return green


def show(found: list[Row]) -> None:
    heads = ("workload", "verdict", "nodes", "eager", "busy", "predicted", "graph", "predicted gain", "measured gain")
    lines = []
    for row in found:
        predicted, result, seen = (row.get(key) or {} for key in ("predicted", "capture", "launches"))
        cells = (
            seen.get("nodes"),
            (row["times"] or {}).get("eager_ms"),
            seen.get("busy_ms"),
            predicted.get("graph_ms"),
        )
        gains = (row.get("ratio_predicted_gain"), row.get("ratio_measured_gain"))
        lines.append((row["workload"], row["verdict"], *cells, result.get("graph_ms"), *gains))
    bench.table(heads, lines)


def main(argv: list[str] | None = None) -> int:
    parser = bench.parser(__doc__, peers="none")
    parser.add_argument("--launch-bound", default="smollm2-135m", help="a preset, for decode")
    parser.add_argument("--compute-bound", default="llama-3.1-8b", help="a preset, for prefill")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=8192, help="tokens")
    args = parser.parse_args(argv)
    gate, found = Gate(), []
    cases: list[tuple[str, str, Any]] = [
        ("launch-bound", args.launch_bound, Step(context=args.context)),
        ("compute-bound", args.compute_bound, Step(prefill=args.prefill)),
    ]
    for kind, model, step in cases:
        with gate.guard(f"{model}, {step}"):
            found.append(examined(kind, model, step, args, gate))
        bench.release_memory(torch.device(args.device))
    show(found)
    result = {
        "what": "random weights, bfloat16; ms a call, many in a row; gains are eager over graph",
        "gate": "replays equal eager calls bit by bit; opposite verdicts; times as this script's own within 15 %",
        "red": gate.red,
        "rows": found,
    }
    print(f"written to {bench.save('doctor', result, args)}")
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
