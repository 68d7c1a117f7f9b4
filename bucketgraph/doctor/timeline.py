"""One call on a line of time, as inline SVG: what the host called, and what ran on each stream of the GPU.

Bars that lie closer than can be seen are drawn as one, so a call of any length stays a small picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from bucketgraph.doctor.launches import kernel_name
from bucketgraph.doctor.trace import Call
from bucketgraph.reporting.svg import WIDTH, plot, text

_LEFT, _RIGHT = 78, WIDTH - 12
_ROW, _BAR = 26, 18
_NEAR = 0.7  # of the plot's units: closer bars are one
_TICKS = 4


@dataclass(frozen=True)
class _Bar:
    kind: str  # its class: dead (the host), bar (kernels), copy
    start: float  # us
    end: float
    label: str
    count: int = 1


def timeline(title: str, call: Call, until: float | None = None) -> str:
    """The call from its first moment on, to its end or to `until` microseconds later."""
    begin = min([call.start, *(item.start for item in call.work)])
    end = max([call.end, *(item.end for item in call.work)]) if until is None else begin + until
    scale = (_RIGHT - _LEFT) / max(end - begin, 1e-3)
    rows = [("host", [_Bar("dead", one.start, one.end, one.name) for one in call.api])]
    for stream in dict.fromkeys(item.stream for item in call.work):
        mine = [item for item in call.work if item.stream == stream]
        bars = [_Bar("bar" if w.kind == "kernel" else "copy", w.start, w.end, kernel_name(w.name)) for w in mine]
        rows.append((f"stream {stream}", bars))
    parts = []
    for place, (name, bars) in enumerate(rows):
        y = place * _ROW + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{text(name[:10])}</text>')
        for bar in _merged(bars, _NEAR / scale):
            if bar.start < end:
                parts.append(_drawn(bar, begin, min(bar.end, end), scale, y))
    height = len(rows) * _ROW + 6
    parts.append(f'<path class="base" d="M{_LEFT} {height}H{_RIGHT}"/>')
    parts += _ticks(end - begin, height)
    return plot(title, height + 22, parts)


def _merged(bars: Iterable[_Bar], near: float) -> Iterator[_Bar]:
    """Neighbours of one kind that would touch become one bar."""
    held: _Bar | None = None
    for bar in sorted(bars, key=lambda bar: bar.start):
        if held is not None and bar.kind == held.kind and bar.start - held.end < near:
            held = replace(held, end=max(held.end, bar.end), count=held.count + 1)
            continue
        if held is not None:
            yield held
        held = bar
    if held is not None:
        yield held


def _drawn(bar: _Bar, begin: float, end: float, scale: float, y: float) -> str:
    more = f" and {bar.count - 1} more" if bar.count > 1 else ""
    what = f"{bar.label}{more}: {end - bar.start:.1f} us from {bar.start - begin:.1f} us on"
    x, width = _LEFT + scale * (bar.start - begin), max(0.5, scale * (end - bar.start))
    return (
        f'<g class="{bar.kind}"><title>{text(what)}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}"/></g>'
    )


def _ticks(span: float, height: float) -> Iterator[str]:
    for place in range(_TICKS + 1):
        us = span * place / _TICKS
        x = _LEFT + (_RIGHT - _LEFT) * place / _TICKS
        label = f"{us / 1e3:.2f} ms" if span >= 1e4 else f"{us:.0f} us"
        anchor = "start" if place == 0 else "end" if place == _TICKS else "middle"
        yield f'<text class="tick" x="{x:.1f}" y="{height + 16}" text-anchor="{anchor}">{label}</text>'
