"""From a demand and a cost curve to a plan: one axis exactly, two by the heuristic, with the trade-off around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bucketgraph.planner import demand as demands
from bucketgraph.planner import ladders, two_axes
from bucketgraph.planner.choose import Limits, choose
from bucketgraph.planner.compare import Comparison, against
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.demand import Demand, aligned, candidates
from bucketgraph.planner.figures import Figures, measure
from bucketgraph.planner.ladders import PeerLadder

SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # counts in the trade-off
AS_MANY = 32  # buckets of two axes at most beside a ladder's, since the search takes its time


@dataclass(frozen=True)
class Row:
    """One count of the trade-off."""

    figures: Figures
    total: float  # cost and prices per 1,000 launches


@dataclass(frozen=True)
class Plan:
    """Buckets for a demand."""

    buckets: tuple[tuple[int, ...], ...]  # [k][axes], ascending
    align: tuple[int, ...]  # as used, for each axis
    figures: Figures
    rows: tuple[Row, ...]  # the trade-off, the plan's own count among them if no budget bent it
    gap: float | None  # how far above the best possible its cost and prices can be, as a share; None: not known
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()


def plan(demand: Demand, curve: CostCurve, limits: Limits, align: Sequence[int], *, decode: bool = False) -> Plan:
    """The best buckets for `demand` within `limits`.

    Args:
        align: sizes are multiples of this, one for each axis.
        decode: sizes are sequences that decode one token each, for the ladders to compare with.

    Raises:
        ConfigError: align is below 1, the budgets fit no bucket, or they or the prices need what the curve lacks.
    """
    largest = [int(size) for size in demand.sizes.max(axis=0)]
    curve = curve.reaching(largest)
    if demand.axes == 1:
        made = _one_axis(demand, curve, limits, align[0], decode)
    else:
        made = _two_axes(demand, curve, limits, align)
    return replace(made, notes=(*curve.notes, *made.notes))


def _one_axis(demand: Demand, curve: CostCurve, limits: Limits, align: int, decode: bool) -> Plan:
    notes = []
    coarse = demands.coarse_enough(demand.lengths, align)
    if coarse != align:
        most = f"at most {demands.MAX_CANDIDATES:,} come into question"
        notes.append(f"sizes are multiples of {coarse}, not {align}, so that {most}")
    points = candidates(demand, coarse)
    chosen = choose(points, curve, limits, max(SHOWN))

    def sizes(ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple((int(points.sizes[end]),) for end in ends)

    totals = chosen.counts.totals
    counts = sorted({*SHOWN, len(chosen.ends)} & set(range(1, len(totals) + 1)))
    rows = tuple(Row(measure(sizes(chosen.counts.ends(k)), demand, curve), float(totals[k - 1])) for k in counts)
    buckets = sizes(chosen.ends)
    peers = ladders.peers(int(points.sizes[-1]), _power(coarse), decode)
    compared = tuple(against(peers, demand, curve, coarse))
    return Plan(buckets, (coarse,), measure(buckets, demand, curve), rows, chosen.gap, compared, tuple(notes))


def _two_axes(demand: Demand, curve: CostCurve, limits: Limits, align: Sequence[int]) -> Plan:
    cells = two_axes.grid(demand, align)
    notes = []
    if cells.coarse:
        notes.append(f"each axis is planned over its best {two_axes.PER_AXIS} sizes, since it has more")
    tops = [int(aligned(demand.sizes[:, axis], align[axis]).max()) for axis in (0, 1)]
    grid = ladders.grid_of_powers((tops[0], tops[1]), (_power(align[0]), _power(align[1])))
    as_many = two_axes.plans(cells, curve, Limits(), max(limits.most, min(len(grid), AS_MANY)))
    free = not limits.budgeted and not limits.priced
    steps = as_many[: limits.most] if free else two_axes.plans(cells, curve, limits, limits.most)
    as_many = as_many[: len(grid)]
    # Without a price each step costs no more than the one before; with one, the cheapest step may not be the last.
    best = min(steps, key=lambda step: step.total)
    counts = {*SHOWN, len(best.buckets)}
    rows = tuple(Row(measure(s.buckets, demand, curve), s.total) for s in steps if len(s.buckets) in counts)
    figures = measure(best.buckets, demand, curve)
    more = 1000 * figures.cost / best.cost - 1
    if more > 0.001:
        text = f"a set picks the bucket of least work, not of least cost; that makes {100 * more:.1f} % of the cost"
        notes.append(text)
    peer = PeerLadder("powers of two, both axes", (), "common practice")
    reached = measure(grid, demand, curve)
    enough = [len(step.buckets) for step in as_many if step.total <= 1000 * reached.cost * (1 + 1e-9)]
    compared = Comparison(peer, reached, measure(as_many[-1].buckets, demand, curve), min(enough, default=None))
    return Plan(best.buckets, tuple(align), figures, rows, None, (compared,), tuple(notes))


def _power(size: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (size - 1).bit_length()
