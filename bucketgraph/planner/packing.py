"""Prompts packed into one prefill, as an engine with a token budget launches them.

Rules: first come, first served, from a queue that never runs empty: the busy end of a service. Its idle end is one
request a launch, which is what planning without packing shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bucketgraph.errors import ConfigError
from bucketgraph.planner.readers import Integers
from bucketgraph.planner.traces import Trace, made

SLOTS = 8  # prompts in one launch: what an LLM set without a `requests` axis has


@dataclass(frozen=True)
class Packed:
    """Launches and how full they are."""

    trace: Trace  # one row a launch: the tokens in it
    tokens: int  # the budget
    slots: int
    full: float  # share of launches that reach the budget
    fill: float  # tokens of all launches over their budgets


def pack(trace: Trace, tokens: int, slots: int = SLOTS, cut: bool = True) -> Packed:
    """Fill launches of at most `tokens` tokens and `slots` prompts, in order of arrival.

    Args:
        trace: one axis, in order of arrival.
        cut: a prompt that does not fit is cut, and its rest leads the next launch, as `LLM` does; otherwise it waits
            whole for the next launch, and only one longer than the budget is cut.

    Raises:
        ConfigError: the trace has no order or two axes, or tokens or slots are below 1.
    """
    if trace.counts is not None or trace.sizes.shape[1] != 1:
        what = "a histogram has no order of arrival" if trace.counts is not None else "packing takes one column"
        raise ConfigError(f"packing needs lengths in order of arrival: {what}")
    for name, value in (("packed", tokens), ("slots", slots)):
        if value < 1:
            raise ConfigError(f"{name} is out of range", given=value, expected="at least 1")
    sums: list[int] = []
    total = held = 0
    for length in trace.sizes[:, 0].tolist():
        if held and (held == slots or (total + length > tokens and not cut)):
            sums.append(total)
            total = held = 0
        while length >= tokens - total:  # fills the launch, and may go on in the next
            length -= tokens - total
            sums.append(tokens)
            total = held = 0
        if length:
            total, held = total + length, held + 1
    if held:
        sums.append(total)
    launches: Integers = np.array(sums, dtype=np.int64)
    whole = made(launches[:, None], None, trace.columns, trace.sources)
    return Packed(whole, tokens, slots, float((launches == tokens).mean()), float(launches.mean()) / tokens)
