"""What `bucketgraph plan` prints, and the remarks that its files carry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bucketgraph.planner.choose import Limits
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.demand import Demand
from bucketgraph.planner.document import Target
from bucketgraph.planner.figures import Figures, measure
from bucketgraph.planner.packing import Packed
from bucketgraph.planner.plan import Plan
from bucketgraph.planner.traces import Trace

NOTHING = 0.01  # a saving below this share of the cost is none


@dataclass(frozen=True)
class Result:
    """Everything that one run found."""

    trace: Trace
    demand: Demand
    cost: CostCurve
    limits: Limits
    target: Target
    plan: Plan
    packed: Packed | None = None


def show(result: Result, console: Console) -> None:
    """Print the trade-off, the comparison and the plan."""
    for line in (*about(result), *result.plan.notes):
        console.print(line, highlight=False, markup=False)
    console.print()
    console.print(_trade_off(result))
    console.print(_against(result))
    if result.packed is not None:
        console.print(verdict(result), highlight=False, markup=False)
    for line in planned(result):
        console.print(line, highlight=False, markup=False)


def about(result: Result) -> Iterator[str]:
    """What was planned for."""
    trace, demand = result.trace, result.demand
    names = " x ".join(trace.columns)
    dropped = f"; {trace.dropped:,} of length 0 dropped" if trace.dropped else ""
    yield f"{trace.requests:,} requests in {', '.join(trace.sources)} ({names}): {_range(trace)}{dropped}"
    if result.packed is not None:
        packed = result.packed
        yield (
            f"packed, first come, into {demand.launches:,} launches of up to {packed.tokens:,} tokens and"
            f" {packed.slots} prompts: {percent(packed.fill)} full on average,"
            f" {percent(packed.full)} of them to the last token"
        )
    if demand.left_out:
        share = percent(demand.left_out_work / (demand.work + demand.left_out_work))
        yield f"{demand.left_out:,} over the largest size run eagerly ({share} of tokens) and are not planned for"
    aligned = ",".join(map(str, result.plan.align))
    yield f"cost: {result.cost.name}; sizes are multiples of {aligned}"


def planned(result: Result) -> Iterator[str]:
    """The plan in words."""
    plan, unit = result.plan, result.cost.unit
    sizes = [",".join(map(str, bucket)) for bucket in plan.buckets]
    figures = plan.figures
    count = len(sizes)
    extra = "" if figures.mib is None else f", {figures.mib:,.1f} MiB"
    extra += "" if figures.seconds is None else f", {figures.seconds:,.1f} s"
    yield (
        f"plan for {result.target.title}: {count} bucket{'s' * (count != 1)}, {percent(figures.padding)} padding,"
        f" {percent(figures.waste)} waste of {unit}{extra}: {' '.join(sizes)}"
    )
    if plan.gap is None:
        yield "found by greedy addition, removal and interchange; not proven to be the best of its size"
    elif plan.gap > 1e-6:
        yield f"within the budgets no plan costs less by more than {percent(plan.gap)}"
    else:
        yield "exact: no plan of these sizes within the limits costs less"


def verdict(result: Result) -> str:
    """Whether planning is worth anything for packed launches."""
    assert result.packed is not None, "there is a verdict on packed launches only"
    tokens = result.packed.tokens
    one = measure([[tokens]], result.demand, result.cost)
    saved = 1.0 - (1.0 + result.plan.figures.waste) / (1.0 + one.waste)
    both = (
        f"one bucket of {tokens:,} wastes {percent(one.waste)}, the planned ones {percent(result.plan.figures.waste)}"
    )
    idle = "At the idle end, one prompt a launch, the plan is that of the trace without --packed."
    if saved < NOTHING:
        return f"Packing fills the buckets, and planning gains nothing: {both}. {idle}"
    return f"Planning saves {percent(saved)} of the {result.cost.unit} of packed launches: {both}. {idle}"


def remarks(result: Result, version: str) -> Iterator[str]:
    """The comments of the written set."""
    yield f"Planned by bucketgraph {version}, everything but {result.target.title} as in {result.target.source}."
    yield from (line[0].upper() + line[1:] + "." for line in (*about(result), *result.plan.notes, *planned(result)))
    for each in result.plan.comparisons:
        covered = (
            "" if each.figures.covered > 0.9995 else f" of the {percent(each.figures.covered_work)} of tokens it covers"
        )
        yield f"{each.ladder.name}: {each.figures.buckets} buckets waste {percent(each.figures.waste)}{covered}."


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _trade_off(result: Result) -> Table:
    plan, unit = result.plan, result.cost.unit
    columns = ["buckets", "padding", f"waste of {unit}", f"{unit} a launch", "MiB", "seconds"]
    columns += [f"{unit} and prices per 1,000"] if result.limits.priced else []
    table = Table(title="Trade-off", title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    own = plan.figures
    rows = [(row.figures, row.total) for row in plan.rows if row.figures.buckets != own.buckets]
    same = next((row.total for row in plan.rows if row.figures == own), None)
    for figures, total in sorted([*rows, (own, same)], key=lambda row: row[0].buckets):
        cells = [str(figures.buckets), percent(figures.padding), percent(figures.waste), _number(figures.cost)]
        cells += [_number(figures.mib), _number(figures.seconds)]
        cells += [_number(total)] if result.limits.priced else []
        table.add_row(*cells, style="bold" if figures is own else None)
    return table


def _against(result: Result) -> Table:
    table = Table(title="Against other ladders", title_justify="left", header_style="bold", pad_edge=False)
    for column, side in zip(
        ("ladder", "buckets", "requests", "tokens", "waste", "planned, as many", "planned for that waste"),
        ("left", *["right"] * 6),
        strict=True,
    ):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for each in result.plan.comparisons:
        figures = each.figures
        cells = [each.ladder.name, str(figures.buckets), percent(figures.covered), percent(figures.covered_work)]
        cells += [percent(figures.waste) if figures.covered else "-"]
        cells += [
            _of(each.planned),
            "-" if each.as_good is None else f"{each.as_good} bucket{'s' * (each.as_good > 1)}",
        ]
        table.add_row(*cells)
    table.caption = "requests and tokens: what a bucket covers; the rest runs eagerly. planned: for the same requests"
    table.caption_justify = "left"
    return table


def _of(figures: Figures | None) -> str:
    return "-" if figures is None else f"{percent(figures.waste)} ({figures.buckets})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"


def _range(trace: Trace) -> str:
    parts = []
    for column in trace.sizes.T:
        mean = float(np.average(column, weights=trace.counts))
        parts.append(f"{int(column.min()):,} to {int(column.max()):,}, mean {mean:,.1f}")
    return " x ".join(parts)
