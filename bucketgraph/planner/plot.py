"""The trade-off as a picture: buckets against waste, and where the planned sizes lie among the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketgraph.errors import ConfigError

if TYPE_CHECKING:
    from bucketgraph.planner.report import Result


def require() -> Any:
    """matplotlib's `Figure`, which needs no display. Raises ConfigError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib", hint="pip install matplotlib, or leave --plot out") from error
    return Figure


def draw(result: Result, path: Path) -> bytes:
    """The picture as the file's suffix wants it. Raises ConfigError for a missing matplotlib or an unknown suffix."""
    figure = require()(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _trade_off(left, result)
    _lengths(right, result)
    figure.suptitle(", ".join(result.trace.sources), fontsize=10)
    made = BytesIO()
    try:
        figure.savefig(made, format=path.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be drawn: {' '.join(str(error).split())}") from error
    return made.getvalue()


def _trade_off(axes: Any, result: Result) -> None:
    rows = result.plan.rows
    axes.plot([row.figures.buckets for row in rows], [100 * row.figures.waste for row in rows], "o-", label="planned")
    for each in result.plan.comparisons:
        label = each.ladder.name
        if each.figures.covered < 0.9995:
            label += f", covers {100 * each.figures.covered_work:.0f} % of tokens"
        if each.figures.covered:
            axes.plot([each.figures.buckets], [100 * each.figures.waste], "x", markersize=9, label=label)
    axes.axvline(result.plan.figures.buckets, color="0.8", zorder=0)
    axes.set(xlabel="buckets", ylabel=f"waste of {result.cost.unit}, %", xscale="log", yscale="log", title="Trade-off")
    axes.legend(fontsize=8)


def _lengths(axes: Any, result: Result) -> None:
    if result.demand.axes == 2:
        axes.scatter(*result.demand.sizes.T, s=2, color="0.7", label="requests")
        axes.scatter(*np.array(result.plan.buckets).T, marker="s", s=14, label="buckets")
        axes.set(xlabel=result.target.axes[0], ylabel=result.target.axes[1], xscale="log", yscale="log")
    else:
        share = np.cumsum(result.demand.counts) / result.demand.launches
        axes.plot(result.demand.lengths, 100 * share, label="launches")
        _lines(axes, [size for (size,) in result.plan.buckets])
        axes.set(xlabel="tokens in a launch", ylabel="share up to this length, %", xscale="log")
    axes.set_title("Planned sizes")
    axes.legend(fontsize=8)


def _lines(axes: Any, sizes: Sequence[int]) -> None:
    for place, size in enumerate(sizes):
        axes.axvline(size, color="tab:orange", linewidth=0.8, label=None if place else "buckets")
