"""Other sizes for the same number of buckets: what the planner makes of the sizes that were asked for.

Rules: the largest bucket stays, so the set serves what it serves today; both sets are measured on the same calls by the
planner's own figures; a proposal that is no better says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import bucketgraph
from bucketgraph import yaml_strict
from bucketgraph.errors import ConfigError
from bucketgraph.planner import costs, document
from bucketgraph.planner.choose import Limits
from bucketgraph.planner.costs import CostCurve
from bucketgraph.planner.demand import Demand
from bucketgraph.planner.document import Target
from bucketgraph.planner.figures import Figures, measure
from bucketgraph.planner.plan import plan
from bucketgraph.reporting.traffic import Ladder
from bucketgraph.stats import Stats

WORTH = 0.01  # a proposal that saves less than this share of the cost is none


@dataclass(frozen=True)
class Proposal:
    """As many buckets as the set has, at the sizes that cost least."""

    axes: tuple[str, ...]  # the work axes, in the set's order
    buckets: tuple[tuple[int, ...], ...]  # [k][axes], ascending
    align: tuple[int, ...]  # what the sizes are multiples of, for each axis
    cost: str  # what they are chosen by: tokens, or measured times
    unit: str  # tokens or ms
    now: Figures  # of the set's own buckets, on the same calls
    then: Figures  # of the proposed ones
    exact: bool  # whether no other sizes cost less

    @property
    def saved(self) -> float:
        """The share of today's cost that it saves."""
        return 1.0 - self.then.cost / self.now.cost if self.now.cost else 0.0

    @property
    def worth(self) -> bool:
        return self.saved >= WORTH


def propose(stats: Stats, served: Demand, place: Ladder) -> Proposal:
    """The planner's buckets for what was served, at the set's own count."""
    curve = times(stats, place) or costs.linear()
    made = plan(served, curve, Limits(buckets=len(place.buckets)), place.align)
    # The planner may have had to take coarser steps, and to round the largest size up to one.
    capped = {tuple(map(min, bucket, place.largest)) for bucket in made.buckets}
    now, then = measure(place.buckets, served, curve), measure(sorted(capped), served, curve)
    exact = made.gap == 0.0 and made.align == place.align
    order = [place.axes.index(axis) for axis in stats.work]
    buckets = tuple(sorted(tuple(bucket[i] for i in order) for bucket in capped))
    align = tuple(made.align[i] for i in order)
    return Proposal(stats.work, buckets, align, curve.name, curve.unit, now, then, exact)


def times(stats: Stats, place: Ladder) -> CostCurve | None:
    """The curve through the buckets' replay times, in ms; None unless every bucket has one.

    Buckets of the same work are one point: their mean time, as each of them is as likely to be taken.
    """
    rows: dict[tuple[int, ...], list[float]] = {}
    for bucket in stats.buckets:
        if not bucket.replay_ms or bucket.error is not None:
            return None
        rows.setdefault(tuple(bucket.sizes[axis] for axis in place.axes), []).append(bucket.replay_ms)
    try:
        return costs.measured({sizes: {"ms": sum(ms) / len(ms)} for sizes, ms in rows.items()}, "measured replays")
    except ConfigError:  # buckets of two axes that are no full grid: nothing to interpolate on
        return None


def proposed_set(set_text: str | None, proposals: Mapping[str, Proposal], name: str, about: str) -> str:
    """The set with the proposed sizes instead of its own, as YAML that `load` takes.

    Args:
        set_text: the set as it is.
        proposals: by phase, "" for a set without phases.
        name: of the new set.
        about: what was measured, for its comments.

    Raises:
        ConfigError: there is no proposal, the set is not known, or it lists its buckets so that one axis cannot change.
    """
    if not proposals:
        raise ConfigError("there are no sizes to propose", hint="the report says why; leave --propose out")
    if set_text is None:
        raise ConfigError("the statistics name no bucket set", hint="save them with save_stats of a manager or an LLM")
    data = yaml_strict.read(set_text, "the statistics' set")
    document.check(set_text)  # before it is taken apart
    remarks = [f"Proposed by bucketgraph {bucketgraph.__version__} for {about}."]
    whole = ""
    for phase, made in proposals.items():
        place = Target(data, "the statistics' set", phase or None, made.axes)
        if "buckets" in place.section and set(made.axes) != set(place.section["axes"]):
            raise ConfigError(
                "the set lists its buckets one by one", hint=f"plan {place.title} with `bucketgraph plan`"
            )
        remarks += [f"{place.title}: {line}" for line in words(made)]
        whole = document.text(place, made.buckets, name, remarks)
        data = document.filled(place, made.buckets, name)
    return whole


def words(made: Proposal) -> Sequence[str]:
    """What a proposal comes to."""
    sizes = " ".join(",".join(map(str, bucket)) for bucket in made.buckets)
    count = len(made.buckets)
    lines = [f"{count} bucket{'s' * (count != 1)} of {','.join(made.axes)}: {sizes}"]
    gain = f"padding {percent(made.now.padding)} -> {percent(made.then.padding)}"
    if made.unit == "ms":
        gain += f", {made.now.cost:.4g} -> {made.then.cost:.4g} ms a call by {made.cost}"
    lines.append(f"expected gain: {gain}, {percent(made.saved)} of the {'time' if made.unit == 'ms' else 'work'} saved")
    if not made.worth:
        fewer = made.now.buckets - count
        lines.append(f"no gain but {fewer} bucket{'s' * (fewer != 1)} less" if fewer else "not worth a change")
    return lines


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
