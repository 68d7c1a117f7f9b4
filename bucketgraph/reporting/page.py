"""The report as one HTML page: no script, no request, plots as inline SVG, readable on light and on dark.

Rules: whatever comes from statistics is escaped; the page forbids itself to load anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import bucketgraph
from bucketgraph.reporting import svg
from bucketgraph.reporting.phase import PhaseReport
from bucketgraph.reporting.proposal import percent, words
from bucketgraph.reporting.svg import Bar, text
from bucketgraph.reporting.table import COLUMNS, NUMBERS, moved, number, rows

if TYPE_CHECKING:
    from bucketgraph.reporting.build import Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --front: #1c2530; --soft: #55606e; --line: #d5dbe2; --bar: #2a6fb0;
  --edge: #b4500f; --dead: #818c98; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --front: #e6eaef; --soft: #a3adb9; --line: #343c46;
  --bar: #5fa3e0; --edge: #f0924a; --dead: #6b7683; } }
body { background: var(--back); color: var(--front); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 60rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p.soft, figcaption, .note { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; overflow-wrap: normal; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.long { white-space: normal; min-width: 16rem; } .right { text-align: right; font-variant-numeric: tabular-nums; }
tr.dead td { color: var(--soft); }
figure { margin: 1rem 0; overflow-x: auto; } svg { width: 100%; min-width: 34rem; height: auto; display: block; }
svg text { font: 12px ui-monospace, monospace; font-size: 11px; fill: var(--front); } svg .tick { fill: var(--soft); }
.bar rect { fill: var(--bar); } .dead rect { fill: var(--dead); } .edge path { stroke: var(--edge); stroke-width: 1.2; }
.copy rect { fill: var(--edge); } .base { stroke: var(--soft); }
"""


def page(report: Report) -> str:
    """The whole page."""
    body = "".join(part for phase in report.phases for part in _phase(phase))
    return document(f"{report.name}: bucket report", f"From {report.source}", body)


def document(title: str, origin: str, body: str) -> str:
    """A page that loads nothing, around a body that is markup already."""
    made_by = f"{origin}, by bucketgraph {bucketgraph.__version__}."
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><h1>{text(title)}</h1><p class="soft">{text(made_by)}</p>\n{body}</body></html>\n'
    )


def _phase(phase: PhaseReport) -> Iterator[str]:
    stats = phase.stats
    yield f'<section id="{text(phase.title)}"><h2>{text(phase.title)}</h2>\n'
    yield _facts(phase)
    yield from _said("Drift from the planned trace", [moved(phase.drift)] if phase.drift is not None else [])
    yield from _said("Proposed sizes", words(phase.proposal) if phase.proposal is not None else [])
    yield from _sizes(phase)
    most = sorted(stats.buckets, key=lambda row: -row.hits)[: svg.MOST_ROWS]
    kept = [row for row in stats.buckets if row in most]
    cut = "" if len(kept) == len(stats.buckets) else f" The {len(kept)} most used of {len(stats.buckets)}."
    hits = [Bar(row.bucket, row.hits, f"{row.hits:,}", "bar" if row.hits else "dead") for row in kept]
    yield figure("Hits of each bucket", svg.bars("Hits of each bucket", hits), f"Grey: never hit.{cut}")
    used = [row for row in kept if row.hits]
    if used:
        waste = [Bar(row.bucket, row.padding - 1, percent(row.padding - 1)) for row in used]
        yield figure("Waste of each bucket", svg.bars("Waste of each bucket", waste), "Padded over real work, less 1.")
    if stats.fallbacks:
        ways = sorted(stats.fallbacks.items(), key=lambda item: -item[1])[: svg.MOST_ROWS]
        made = svg.bars("Ways out by reason", [Bar(key, count, f"{count:,}") for key, count in ways])
        yield figure("Ways out by reason", made, "Calls, and parts of split calls, that no bucket served.")
        reasons = [(key, f"{count:,}", stats.reasons.get(key, "")) for key, count in ways]
        yield table(("way out", "count", "reason, as first seen"), reasons, right={1}, long={2})
    yield "<h3>Buckets</h3>" + _buckets(phase)
    yield "".join(f'<p class="note">{text(note[0].upper() + note[1:])}.</p>' for note in phase.notes)
    yield "</section>\n"


def _facts(phase: PhaseReport) -> str:
    stats = phase.stats
    facts = [("calls", f"{stats.calls:,}"), *((name, f"{count:,}") for name, count in stats.outcomes.items())]
    facts += [("waste", percent(phase.waste)), ("dead buckets", f"{len(phase.dead)} of {len(stats.buckets)}")]
    mib = sum(row.mib for row in stats.buckets)
    facts += [("MiB in buckets", number(mib)), ("MiB in dead ones", number(sum(row.mib for row in phase.dead)))]
    return (
        "<dl>" + "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts) + "</dl>"
    )


def _sizes(phase: PhaseReport) -> Iterator[str]:
    """A histogram of each work axis, with the buckets' sizes."""
    for place, axis in enumerate(phase.stats.work):
        counts: dict[int, int] = {}
        for asked, count in phase.stats.sizes.items():
            counts[asked[place]] = counts.get(asked[place], 0) + count
        if counts:
            sizes = sorted(counts)
            edges = sorted({row.sizes[axis] for row in phase.stats.buckets})
            title = f"Sizes asked for: {axis}"
            yield figure(title, svg.histogram(title, sizes, [counts[size] for size in sizes], edges, axis), "")


def _buckets(phase: PhaseReport) -> str:
    listed = list(rows(phase))
    return table(COLUMNS, listed, set(NUMBERS), {len(COLUMNS) - 1} if any(row[-1] for row in listed) else set())


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], right: set[int], long: set[int]) -> str:
    """Rows of text; `right` and `long` are places of columns that are numbers, and that may break."""
    kinds = ["right" if at in right else "long" if at in long else "" for at in range(len(columns))]
    head = "".join(f'<th class="{kind}">{text(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = []
    for row in lines:
        cells = "".join(f'<td class="{kind}">{text(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        body.append(f'<tr class="dead">{cells}</tr>' if "never hit" in row[2:3] else f"<tr>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>\n'


def figure(title: str, plot: str, caption: str) -> str:
    """A plot under its title, and over its caption if there is one."""
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<h3>{text(title)}</h3><figure>{plot}{below}</figure>\n"


def _said(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"<h3>{text(title)}</h3>" + "".join(f"<p>{text(line[0].upper() + line[1:])}.</p>" for line in lines)
