"""Plots as inline SVG: bars lying, and a histogram with edges. Colours come from the page's style, by class.

Rules: every text is escaped here; every plot has a title for who cannot see it; labels never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log

from bucketgraph.reporting.table import shown

WIDTH = 720  # of a plot, in its own units; it scales with the page
_CHAR = 6.7  # width of a character in a label, a little more than it is
_LABEL = 34  # characters of a bar's label
_ROW = 20
BARS = 48  # of a histogram
MOST_ROWS = 60  # of a plot of bars


@dataclass(frozen=True)
class Bar:
    """One lying bar."""

    label: str
    value: float
    text: str  # the value for people
    kind: str = "bar"  # its class: bar, or dead where there is nothing


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Bars from a common start, the longest as long as there is room."""
    left = 10 + _CHAR * max(min(len(row.label), _LABEL) for row in rows)
    room = WIDTH - left - 16 - _CHAR * max(len(row.text) for row in rows)
    most = max(row.value for row in rows) or 1.0
    parts = []
    for place, row in enumerate(rows):
        y, length = place * _ROW + 3, max(1.0, room * row.value / most)
        parts.append(
            f'<g class="{row.kind}"><title>{text(row.label)}: {text(row.text)}</title>'
            f'<text x="{left - 8:.1f}" y="{y + 11}" text-anchor="end">{text(_short(row.label))}</text>'
            f'<rect x="{left:.1f}" y="{y}" width="{length:.1f}" height="14" rx="2"/>'
            f'<text x="{left + length + 6:.1f}" y="{y + 11}">{text(row.text)}</text></g>'
        )
    return plot(title, len(rows) * _ROW + 6, parts)


def histogram(title: str, sizes: Sequence[int], counts: Sequence[int], edges: Sequence[int], axis: str) -> str:
    """How often each size was asked for, with the buckets' sizes as lines across.

    Args:
        sizes: ascending.
        edges: the buckets' sizes, ascending.
        axis: the name of what is asked for.
    """
    height, top, left, right = 190, 26, 10, WIDTH - 10
    low, high = min(sizes[0], edges[0]), max(sizes[-1], edges[-1])
    limits = _limits(low, high)
    filled = [0] * (len(limits) - 1)
    at = 0
    for size, count in zip(sizes, counts, strict=True):
        while size >= limits[at + 1]:
            at += 1
        filled[at] += count
    scale = _Scale(limits[0], limits[-1], left, right)
    most = max(filled) or 1
    parts = []
    for place, count in enumerate(filled):
        x, end = scale(limits[place]), scale(limits[place + 1])
        tall = (height - top) * count / most
        last = limits[place + 1] - 1
        span = f"{limits[place]:,}" + (f" to {last:,}" if last > limits[place] else "")
        if count:
            parts.append(
                f'<g class="bar"><title>{text(axis)} {span}: {count:,} calls</title><rect x="{x:.1f}"'
                f' y="{height - tall:.1f}" width="{max(1.0, end - x - 1):.1f}" height="{max(1.0, tall):.1f}"/></g>'
            )
    free = float(left)
    for edge in edges:  # a bucket's line stands behind the last size that it takes
        x = scale(edge + 1)
        label = f"{edge:,}"
        parts.append(f'<g class="edge"><title>bucket {label}</title><path d="M{x:.1f} {top - 6}V{height}"/></g>')
        half = _CHAR * len(label) / 2
        middle = min(max(x, left + half), right - half)
        if middle - half >= free or edge == edges[0]:
            parts.append(f'<text class="tick" x="{middle:.1f}" y="{top - 11}" text-anchor="middle">{label}</text>')
            free = middle + half + 6
    parts.append(f'<path class="base" d="M{left} {height}H{right}"/>')
    parts.append(f'<text class="tick" x="{left}" y="{height + 16}">{limits[0]:,}</text>')
    span = "sizes asked for, and buckets" if limits[-1] - limits[0] <= BARS + 1 else "logarithmic; lines are buckets"
    parts.append(
        f'<text class="tick" x="{WIDTH / 2}" y="{height + 16}" text-anchor="middle">{text(axis)} ({span})</text>'
    )
    parts.append(f'<text class="tick" x="{right}" y="{height + 16}" text-anchor="end">{limits[-1] - 1:,}</text>')
    return plot(title, height + 24, parts)


class _Scale:
    """Sizes to places: even where there are few, logarithmic otherwise."""

    def __init__(self, low: int, high: int, left: float, right: float) -> None:
        self._even = high - low <= BARS + 1
        self._low, self._span = low, (high - low) if self._even else log(high / low)
        self._left, self._room = left, right - left

    def __call__(self, size: int) -> float:
        part = (size - self._low) if self._even else log(size / self._low)
        return self._left + self._room * part / self._span


def _limits(low: int, high: int) -> list[int]:
    """Where bars begin, and where the last one ends: whole numbers, one for each size where there are few."""
    if high - low <= BARS:
        return list(range(low, high + 2))
    ratio = (high + 1) / low
    return sorted({round(low * ratio ** (place / BARS)) for place in range(BARS + 1)})


def text(value: str) -> str:
    """Text for a page: nothing in it is taken for markup."""
    return escape(shown(value), quote=True)


def _short(label: str) -> str:
    return label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"


def plot(title: str, height: float, parts: Sequence[str]) -> str:
    """An SVG of the common width, named for who cannot see it."""
    named = text(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{named}"><title>{named}</title>'
        + "".join(parts)
        + "</svg>"
    )
