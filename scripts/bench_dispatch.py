#!/usr/bin/env python3
"""What a call costs on the host, from Python arguments to a launched graph, for a function that computes little.

    scripts/bench_dispatch.py [--inputs 2,10] [--calls 2000] [--peers none|quick|all] [--out DIR]

Each call starts on an idle GPU and ends when it returns, so nothing but the host's own work is timed. Variants: the
contract of 300 tensors checked or not, outputs cloned or borrowed, inputs on the host or the device, exact or padded.
Rows that are compared take turns, so that a noisy host slows all of them. The limit is the same work by hand: the
copies into static memory and the graph's launch. Gates: every variant and peer returns the function's own bits, and
calls of ours sync nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bench_common as bench
import torch
from bench_common import Gate, Row
from torch import Tensor

from bucketgraph import BucketManager, monitor
from bucketgraph.config import parse
from bucketgraph.contract import Contract

WATCHED = 300  # tensors: about what a model of 32 layers holds
BATCH, WIDTH, PADDED = 64, 16, 50
BY_HAND = "by hand"
ROUNDS, WARM = 20, 10  # in which rows take turns; calls that are not counted in each
Call = Callable[[], Tensor]


def total(*inputs: Tensor, **named: Tensor) -> Tensor:
    """The trivial function: every input is read."""
    first, *rest = (*inputs, *named.values())
    result = first + 1
    for tensor in rest:
        result = result + tensor
    return result


def state(device: torch.device) -> dict[str, Tensor]:
    return {f"w{index}": torch.zeros(4, device=device) for index in range(WATCHED)}


def served(inputs: int, outputs_are: str, device: torch.device) -> BucketManager:
    made: dict[str, Any] = {
        "version": 1,
        "name": f"dispatch-{outputs_are}",
        "axes": {"batch": [BATCH]},
        "inputs": {f"x{index}": {"shape": ["batch", WIDTH], "dtype": "float32"} for index in range(inputs)},
        "outputs": {"y": {"shape": ["batch", WIDTH]}},
        "outputs_are": outputs_are,
    }
    manager = BucketManager(total, parse(made), device=device, state=state(device))
    report = manager.warmup()
    if not report.ok:
        raise RuntimeError(f"warm-up: {report.failed[0].error}")
    return manager


def example(inputs: int, rows: int, device: torch.device | str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(inputs)
    drawn = torch.randint(0, 100, (inputs, BATCH, WIDTH), generator=draw).float()
    return {f"x{index}": drawn[index, :rows].to(device) for index in range(inputs)}


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def microseconds(calls: Mapping[str, Callable[[], object]], device: torch.device, count: int) -> dict[str, Row]:
    """Time until each returns, always on an idle GPU; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for turn in range(WARM + -(-count // ROUNDS)):
                sync(device)
                began = time.perf_counter_ns()
                result = call()
                ended = time.perf_counter_ns()
                del result  # while the clock stands still
                if turn >= WARM:
                    times[name].append((ended - began) / 1e3)
    return {name: bench.spread(found) for name, found in times.items()}


# -- who is timed ------------------------------------------------------------------------------------------------------


def ours(manager: BucketManager, inputs: Mapping[str, Tensor], contract: Contract | None) -> Call:
    manager._contract = contract
    return lambda: manager(**inputs)["y"]


def variants(inputs: int, where: str, device: torch.device) -> dict[str, tuple[BucketManager, Call]]:
    """Each with a manager of its own, so that taking away a contract touches no other."""
    source = example(inputs, BATCH, "cpu" if where == "host" else device)
    padded = {name: tensor[:PADDED] for name, tensor in source.items()}
    found = {}
    for name, outputs_are, checked, given in (
        ("as served: contract, cloned", "cloned", True, source),
        ("contract, borrowed", "borrowed", True, source),
        ("no contract, cloned", "cloned", False, source),
        ("no contract, borrowed", "borrowed", False, source),
        ("as served, padded", "cloned", True, padded),
    ):
        manager = served(inputs, outputs_are, device)
        # On a CPU nothing is bound to addresses, so there is none to check.
        contract = (manager._contract or Contract(total, manager._state_tensors)) if checked else None
        found[name] = (manager, ours(manager, given, contract))
    return found


def by_hand(inputs: int, where: str, device: torch.device) -> Call:
    """The least: one copy from pinned memory, or one for each input on the device, and the launch of the graph."""
    if device.type != "cuda":
        given = list(example(inputs, BATCH, device).values())
        return lambda: total(*given)
    static = torch.zeros(inputs, BATCH, WIDTH, device=device)
    views = list(static.unbind())
    graph, out = _graph(views, device)
    pinned = torch.stack(list(example(inputs, BATCH, "cpu").values())).pin_memory()
    given = list(pinned.to(device).unbind())

    def call() -> Tensor:
        if where == "host":
            static.copy_(pinned, non_blocking=True)
        else:
            for view, tensor in zip(views, given, strict=True):
                view.copy_(tensor)
        graph.replay()
        return out

    return call


def _graph(views: Sequence[Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        total(*views)
    torch.cuda.synchronize(device)
    gc.collect()
    with torch.cuda.graph(graph, stream=stream):
        out = total(*views)
    return graph, out


def peers(inputs: int, where: str, device: torch.device, which: str) -> dict[str, Callable[[], Call]]:
    """Makers, since one that cannot run must not stop the others. Host inputs are moved by the caller."""
    source = list(example(inputs, BATCH, "cpu" if where == "host" else device).values())

    def calling(fn: Any) -> Call:
        if where == "host":
            return lambda: fn(*(tensor.to(device, non_blocking=True) for tensor in source))
        return lambda: fn(*source)

    def graphed() -> Call:
        samples = tuple(torch.zeros(BATCH, WIDTH, device=device) for _ in source)
        return calling(torch.cuda.make_graphed_callables(lambda *given: total(*given), samples))

    def compiled() -> Call:
        torch._dynamo.reset()
        return calling(torch.compile(total, mode="reduce-overhead"))

    makers: dict[str, Callable[[], Call]] = {}
    if which != "none":
        makers["torch.cuda.make_graphed_callables"] = graphed
    if which == "all":
        makers["torch.compile, reduce-overhead"] = compiled
    return makers


# -- rows --------------------------------------------------------------------------------------------------------------


def right(call: Call, rows: int, inputs: int) -> bool:
    """Whether the result is the function's own, three times in a row: a compiled peer records in its first calls."""
    want = total(*example(inputs, rows, "cpu").values())
    return all(torch.equal(call().cpu(), want) for _ in range(3))


def disturbances(call: Call, device: torch.device) -> monitor.Disturbances:
    """What 50 calls in a row compiled, allocated and waited for."""
    sync(device)
    with monitor.watch(device) as seen:
        for _ in range(50):
            call()
    sync(device)
    return seen


def measure(inputs: int, where: str, args: Namespace, gate: Gate) -> Row:
    device = torch.device(args.device)
    label = f"{inputs} inputs on the {where}"
    row: Row = {"inputs": inputs, "where": where, "ours": {}, "peers": {}}
    calls: dict[str, Call] = {BY_HAND: by_hand(inputs, where, device)}
    wrong = "the result differs from the function's"
    green = gate.require(right(calls[BY_HAND], BATCH, inputs), f"{label}, {BY_HAND}: {wrong}")
    made = variants(inputs, where, device)
    for name, (_, call) in made.items():
        green &= gate.require(right(call, PADDED if "padded" in name else BATCH, inputs), f"{label}, {name}: {wrong}")
        seen = disturbances(call, device)
        green &= gate.require(not seen.any, f"{label}, {name}: {seen}")
        row["ours"][name], calls[name] = {"syncs": seen.syncs}, call
    for name, make in peers(inputs, where, device, args.peers).items():
        try:
            call = make()
            green &= gate.require(right(call, BATCH, inputs), f"{label}, {name}: {wrong}")
        except Exception as problem:
            row["peers"][name] = {"failed": bench.failure(problem)}
            continue
        row["peers"][name], calls[name] = {}, call
    times = microseconds(calls, device, args.calls)
    row["limit_us"] = times.pop(BY_HAND)
    for name, found in times.items():
        row["ours" if name in made else "peers"][name]["us"] = found
    for manager, _ in made.values():
        manager.release()
    if green:
        judge(row)
    return row


def judge(row: Row) -> None:
    """Shares of the limit, and every peer over ours as served."""
    for found in row["ours"].values():
        found["share_of_limit"] = round(row["limit_us"]["p50"] / found["us"]["p50"], 4)
    base = row["ours"]["as served: contract, cloned"]["us"]["p50"]
    for peer in row["peers"].values():
        if "us" in peer:
            peer["ratio"] = round(peer["us"]["p50"] / base, 3)


def contracts(device: torch.device, calls: int) -> dict[str, Row]:
    """The check alone: of a mapping, and of a module with as many parameters, three to each submodule."""
    held = state(device)
    module = torch.nn.Sequential(*(_Part(list(held.values())[i : i + 3]) for i in range(0, WATCHED, 3)))
    made = {"mapping": Contract(total, held), "module": Contract(module)}
    checks = {f"{name} of {len(contract)} tensors": contract.check for name, contract in made.items()}
    return microseconds(checks, device, calls)


class _Part(torch.nn.Module):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"b{index}", tensor)


def show(rows: Sequence[Row], checks: Mapping[str, Row]) -> None:
    lines: list[list[object]] = [
        ["-", "-", f"contract check alone, {name}", found["p50"], found["p99"], None, None]
        for name, found in checks.items()
    ]
    for row in rows:
        start = [row["inputs"], row["where"]]
        lines.append(
            [*start, "limit: copies and launch by hand", row["limit_us"]["p50"], row["limit_us"]["p99"], 1, None]
        )
        for name, found in row["ours"].items():
            lines.append([*start, name, found["us"]["p50"], found["us"]["p99"], found.get("share_of_limit"), None])
        for name, found in row["peers"].items():
            times = found.get("us", {})
            label = name if times else f"{name}: {found['failed'][:60]}"
            lines.append([*start, label, times.get("p50"), times.get("p99"), None, found.get("ratio")])
    bench.table(("inputs", "where", "microseconds a call", "p50", "p99", "share of limit", "peer / as served"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser(__doc__, peers="all")
    parser.add_argument("--inputs", type=bench.numbers, default="2,10")
    parser.add_argument("--calls", type=int, default=2000)
    args, gate = parser.parse_args(argv), Gate()
    device = torch.device(args.device)
    rows: list[Row] = []
    with torch.no_grad():
        checks = contracts(device, args.calls)
        for inputs in args.inputs:
            for where in ("host", "device"):
                with gate.guard(f"{inputs} inputs on the {where}"):
                    rows.append(measure(inputs, where, args, gate))
    result: Row = {
        "what": f"host time of one call of a sum of [{BATCH}, {WIDTH}] float32 inputs, each call on an idle GPU",
        "gate": "the function's own bits; no compile, no memory segment and no sync in 50 calls",
        "limit_formula": "measured: a copy from pinned memory (host) or of each input (device), and graph.replay()",
        "contract_us": checks,
        "rows": rows,
        "red": gate.red,
    }
    path = bench.save("dispatch", result, args)
    show(rows, checks)
    print(f"limit: {result['limit_formula']}; written to {path}")
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
