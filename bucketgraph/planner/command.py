"""`bucketgraph plan`: its options to a plan, and the plan to a table, a set, a picture.

Rules: all of the command line is checked before a file is read, all of the work is done before a file is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import bucketgraph
from bucketgraph.errors import ConfigError
from bucketgraph.planner import costs, demand, document, packing, plot, report, roofline, traces
from bucketgraph.planner.choose import Limits
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.demand import Demand
from bucketgraph.planner.document import Target
from bucketgraph.planner.plan import plan

_ROWS = ("batch", "requests")  # axes that count requests: their sizes need no alignment
Points = dict[tuple[int, ...], dict[str, float]]


def run(args: argparse.Namespace) -> int:
    """Plan, write what was asked for, and print. Raises ConfigError with nothing written."""
    for path in (args.output, args.plot, args.save_costs):
        document.require_folder(path)
    if args.plot is not None:
        plot.require()
    limits = Limits(args.buckets, args.memory, args.startup_seconds, args.price_memory, args.price_startup)
    columns = None if args.column is None else [name.strip() for name in args.column.split(",")]
    place = document.target(args.like, args.axis, 1 if columns is None else len(columns))
    align = _align(args.align, place.axes)
    _check_costs(args)
    trace = traces.read(args.traces, columns)
    launches, packed = _demand(args, trace, place)
    curve, points = _curve(args, place, launches, align)
    curve = costs.with_flat(curve, args.bucket_mib, args.bucket_seconds)
    made = plan(launches, curve, limits, align, decode=place.axes == ("batch",))
    result = report.Result(trace, launches, curve, limits, place, made, packed)
    files: list[tuple[Path, str | bytes]] = []
    if args.output is not None:
        remarks = list(report.remarks(result, bucketgraph.__version__))
        files.append((args.output, document.text(place, made.buckets, args.output.stem, remarks)))
    if args.plot is not None:
        files.append((args.plot, plot.draw(result, args.plot)))
    if args.save_costs is not None:
        files.append((args.save_costs, _as_json(points, curve.name)))
    for path, whole in files:
        document.write(path, whole)
    # A pipe or a log has no width: tables must not be folded to 80 columns there.
    report.show(result, Console(width=None if sys.stdout.isatty() else 200))
    return 0


def _demand(args: argparse.Namespace, trace: traces.Trace, place: Target) -> tuple[Demand, packing.Packed | None]:
    over: demand.Over = args.over or ("pieces" if place.phase == "prefill" else "eager")
    if args.packed is None:
        if args.slots is not None or args.uncut:
            raise ConfigError("--slots and --uncut belong to --packed")
        return demand.limited(trace, args.largest, over), None
    if args.largest is not None:
        raise ConfigError("--packed sets the largest size itself", hint="leave --largest out")
    packed = packing.pack(trace, args.packed, packing.SLOTS if args.slots is None else args.slots, not args.uncut)
    return demand.limited(packed.trace, args.packed, over), packed


def _check_costs(args: argparse.Namespace) -> None:
    given = [args.cost is not None, args.costs is not None, args.calibrate]
    if sum(given) > 1:
        raise ConfigError("costs are given twice", expected="one of --cost, --costs and --calibrate")
    if (args.cost == "roofline" or args.calibrate) and args.model is None:
        raise ConfigError("the cost needs a model", hint="give --model, such as llama-3.1-8b for a roofline")
    if args.cost != "roofline" and (args.bandwidth is not None or args.compute is not None):
        raise ConfigError("--bandwidth and --compute belong to --cost roofline")
    if args.model is not None and not (args.cost == "roofline" or args.calibrate):
        raise ConfigError("--model belongs to --cost roofline or --calibrate")
    if args.save_costs is not None and not args.calibrate:
        raise ConfigError("--save-costs belongs to --calibrate")


def _curve(args: argparse.Namespace, place: Target, launches: Demand, align: Sequence[int]) -> tuple[CostCurve, Points]:
    if args.costs is not None:
        return costs.load_costs(args.costs, len(place.axes)), {}
    if args.calibrate:
        from bucketgraph.planner import calibrate

        return calibrate.calibrate(place, launches, align, args)
    if args.cost != "roofline":
        return costs.linear(), {}
    packed = args.packed is not None or place.phase == "prefill"  # our kernels follow the prompts' own lengths
    shape: roofline.Shape = "decode" if place.axes == ("batch",) else "packed" if packed else "padded"
    bandwidth = roofline.BANDWIDTH_GB_S if args.bandwidth is None else args.bandwidth
    compute = roofline.COMPUTE_TFLOP_S if args.compute is None else args.compute
    return roofline.roofline(roofline.model_shape(args.model), bandwidth, compute, shape), {}


def _align(text: str | None, axes: Sequence[str]) -> tuple[int, ...]:
    if text is None:
        return tuple(1 if axis in _ROWS else 16 for axis in axes)
    parts = text.split(",")
    if len(parts) != len(axes) or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        expected = f"{len(axes)} positive whole number{'s' * (len(axes) > 1)}"
        raise ConfigError("align is out of range", given=repr(text), expected=expected)
    return tuple(int(part) for part in parts)


def _as_json(points: Points, name: str) -> str:
    rows: dict[str, Any] = {",".join(map(str, sizes)): row for sizes, row in sorted(points.items())}
    return json.dumps({"device": name.removeprefix("measured on "), **rows}, indent=2) + "\n"
