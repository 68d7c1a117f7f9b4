"""Costs measured on this device: a model's buckets warmed as at service start, and their replays timed.

Rules: what is timed is what serves: the same set, executable, warm-up and self-check, only with other sizes; MiB and
seconds are warm-up's own. Larger buckets are captured first, so the MiB of a size are what it adds to those above it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console

from bucketgraph import tables
from bucketgraph.cli import _callable
from bucketgraph.config import BucketSet, parse
from bucketgraph.errors import ConfigError
from bucketgraph.executables.family import synchronize
from bucketgraph.manager import BucketManager, Captured
from bucketgraph.planner.costs import CostCurve, measured
from bucketgraph.planner.demand import Demand, aligned
from bucketgraph.planner.document import Target, filled
from bucketgraph.selfcheck import generator
from bucketgraph.warmup import WarmupReport

SIZES = 12  # of one axis; of each axis of a grid the square root of twice as many
_SECONDS = 0.3  # about as long as one bucket is timed


def calibrate(
    place: Target, launches: Demand, align: Sequence[int], args: argparse.Namespace
) -> tuple[CostCurve, dict[tuple[int, ...], dict[str, float]]]:
    """The measured curve, and its points for `costs.load_costs`.

    Raises:
        ConfigError, ModelError: the model does not load or does not fit the set.
        ConfigError: a bucket failed, since its time would be another path's.
    """
    grid = knots(launches, align)
    buckets = [(one,) for one in grid[0]] if len(grid) == 1 else [(one, two) for one in grid[0] for two in grid[1]]
    bucket_set = parse(filled(place, buckets, "calibration"), "the calibration set")
    manager, report = _warm(args, bucket_set, place.phase)
    if report.failed:
        bad = report.failed[0]
        raise ConfigError(f"calibration: {bad.name} {bad.bucket} failed: {bad.error}")
    seconds = {row.bucket: row.seconds for row in report.buckets if row.name == manager.name}
    points: dict[tuple[int, ...], dict[str, float]] = {}
    for captured in manager.captured.values():
        sizes = tuple(captured.bucket[axis] for axis in place.axes)
        row = points.setdefault(sizes, {"ms": 0.0, "mib": 0.0, "seconds": 0.0})
        # Where the set has more axes, a size is captured once for each of theirs; it costs the mean and takes the sum.
        row["ms"] += milliseconds(manager, captured) * len(buckets) / len(manager.captured)
        row["mib"] += captured.mib
        row["seconds"] += seconds[str(captured.bucket)]
    device = torch.cuda.get_device_name(manager.device) if manager.device.type == "cuda" else "this CPU"
    manager.release()
    return measured(points, f"measured on {device}, {args.model}"), points


def knots(launches: Demand, align: Sequence[int]) -> list[list[int]]:
    """Sizes to measure for each axis: evenly spread in the logarithm over what could be a bucket, ends included."""
    count = SIZES if launches.axes == 1 else round((2 * SIZES) ** 0.5)
    found = []
    for axis, step in enumerate(align):
        sizes = aligned(launches.sizes[:, axis], step)
        spread = np.geomspace(float(sizes.min()), float(sizes.max()), count)
        found.append(sorted(set(aligned(np.ceil(spread - 1e-9).astype(np.int64), step).tolist())))
    return found


def milliseconds(manager: BucketManager, captured: Captured) -> float:
    """Median time of a replay: of five batches of replays in a row, without the copies in and out."""
    replay, device = captured.executable.replay, manager.device
    with manager.family.turn(), manager.around_step():
        captured.inputs.fill(manager.example(captured.bucket.as_dict(), generator(captured.bucket)))
        once = _timed(replay, device, 1)
        many = max(1, min(200, int(_SECONDS / 5 / max(once, 1e-6))))
        return 1e3 * statistics.median(_timed(replay, device, many) for _ in range(5))


def _timed(replay: object, device: torch.device, count: int) -> float:
    assert callable(replay), "an executable replays"
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        replay()
    synchronize(device)
    return (time.perf_counter() - began) / count


def _warm(args: argparse.Namespace, bucket_set: BucketSet, phase: str | None) -> tuple[BucketManager, WarmupReport]:
    with tables.progress(Console(file=sys.stderr)) as on_progress:
        if phase is None:
            manager = BucketManager(_callable(args.model, args.device), bucket_set, device=args.device)
            return manager, manager.warmup(on_progress)
        from bucketgraph.llm.api import LLM

        llm = LLM(args.model, bucket_set, dtype=args.dtype, device=args.device, warmup=False)
        report = llm.warmup(on_progress)
        runner = llm._runner
        return runner.prefill_manager if phase == "prefill" else runner.decode_manager, report
