#!/usr/bin/env python3
"""Planned buckets against the engines' ladders on real traces: `scripts/plan_traces.py FOLDER`.

FOLDER holds `*.csv.gz` with a column `input_tokens`, and `stats.json` with the source and licence of each. Three
questions for every trace: what padding costs when each prompt is a launch, when long prompts come in pieces (an
encoder's texts are cut off instead), and when launches are packed. Results go to benchmarks/results, and from there
into the tables of docs/planner.md; `--tables` only does the latter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import bucketgraph  # noqa: E402
from bucketgraph.planner import costs, demand, ladders, packing, traces  # noqa: E402
from bucketgraph.planner.choose import Limits, choose  # noqa: E402
from bucketgraph.planner.compare import against  # noqa: E402
from bucketgraph.planner.demand import Demand, candidates  # noqa: E402
from bucketgraph.planner.figures import measure  # noqa: E402

COUNTS = (4, 8, 16, 32)
ALIGN = 16
PIECES, ENCODER = 8192, 512  # the largest launch of a prefill; the longest text of the encoder
PACKED = ((2048, 8), (8192, 8), (8192, 64))  # tokens and prompts in one launch
RESULTS = ROOT / "benchmarks" / "results" / "planner_traces.json"
DOCUMENT = ROOT / "docs" / "planner.md"
START, END = "<!-- tables: made by scripts/plan_traces.py -->", "<!-- end of tables -->"
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="with *.csv.gz and stats.json")
    parser.add_argument("--tables", action="store_true", help="only write the document's tables from the results")
    args = parser.parse_args()
    if not args.tables:
        files = sorted(args.folder.glob("*.csv.gz")) if args.folder else []
        if not files:
            parser.error("give a folder with *.csv.gz")
        result = {"environment": environment(), "align": ALIGN, "cost": "linear (tokens)", "ladders": sources()}
        result["traces"] = [study(file, facts(args.folder).get(file.name.split(".")[0], {})) for file in files]
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(RESULTS.relative_to(ROOT))
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), "utf-8")
    print(DOCUMENT.relative_to(ROOT))
    return 0


def study(file: Path, known: Row) -> Row:
    """All figures of one trace."""
    trace = traces.read([file], ["input_tokens"])
    lengths = trace.sizes[:, 0]
    encoder = "encoder" in file.name
    largest, over = (ENCODER, "truncate") if encoder else (PIECES, "pieces")
    row: Row = {"trace": file.name.split(".")[0], **known, "requests": trace.requests, "dropped": trace.dropped}
    row |= {"mean": round(float(lengths.mean()), 1), "max": int(lengths.max())}
    began = time.perf_counter()
    row["whole"] = compared(demand.of(trace))
    row["limited"] = {"largest": largest, "over": over, **compared(demand.limited(trace, largest, over))}  # type: ignore[arg-type]
    row["packed"] = [] if encoder else [filled(trace, *limit) for limit in PACKED]
    row["seconds"] = round(time.perf_counter() - began, 2)
    print(f"{row['trace']}: {row['seconds']} s", flush=True)
    return row


def compared(launches: Demand) -> Row:
    """The exact optimum for each count, and each ladder beside it."""
    curve, points = costs.linear(), candidates(launches, ALIGN)
    chosen = choose(points, curve, Limits(buckets=max(COUNTS))).counts
    planned = {}
    for count in COUNTS:
        sizes = [int(points.sizes[end]) for end in chosen.ends(min(count, len(chosen.totals)))]
        planned[str(count)] = {
            "sizes": sizes,
            "waste": share(measure([[size] for size in sizes], launches, curve).waste),
        }
    rows = []
    for each in against(ladders.peers(int(points.sizes[-1]), ALIGN), launches, curve, ALIGN):
        row: Row = {"ladder": each.ladder.name, "buckets": each.figures.buckets}
        row |= {"requests": share(each.figures.covered), "tokens": share(each.figures.covered_work)}
        row["waste"] = share(each.figures.waste) if each.figures.covered else None
        row["planned"] = None if each.planned is None else share(each.planned.waste)
        row["planned_buckets"] = None if each.planned is None else each.planned.buckets
        row["as_good"] = each.as_good
        rows.append(row)
    return {"launches": launches.launches, "planned": planned, "ladders": rows}


def filled(trace: traces.Trace, tokens: int, slots: int) -> Row:
    """Packed launches: how full they are, and what eight planned buckets save over one."""
    packed = packing.pack(trace, tokens, slots)
    launches = demand.limited(packed.trace, tokens, "pieces")
    curve, points = costs.linear(), candidates(launches, ALIGN)
    ends = choose(points, curve, Limits(buckets=8)).ends
    one = measure([[tokens]], launches, curve).waste
    eight = measure([[int(points.sizes[end])] for end in ends], launches, curve).waste
    row: Row = {"tokens": tokens, "slots": slots, "launches": launches.launches, "fill": share(packed.fill)}
    return row | {"one": share(one), "eight": share(eight), "saved": share(1 - (1 + eight) / (1 + one))}


def with_tables(document: str, result: Row) -> str:
    """The document with its tables made anew."""
    before, _, rest = document.partition(START)
    _, _, after = rest.partition(END)
    if not rest or END not in document:
        raise SystemExit(f"{DOCUMENT.name} has no place for tables: {START} ... {END}")
    return f"{before}{START}\n{tables(result)}\n{END}{after}"


def tables(result: Row) -> str:
    """The three tables as Markdown."""
    made = result["environment"]
    names = [row["ladder"] for row in result["traces"][0]["whole"]["ladders"]]
    head = ["trace", *(f"K = {count}" for count in COUNTS), *names]
    parts = []
    for key, title in (
        ("whole", "Each prompt is one launch"),
        ("limited", f"Prompts in pieces of at most {PIECES:,} tokens, the encoder's texts cut off at {ENCODER}"),
    ):
        lines = [f"### {title}\n", _line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
        for row in result["traces"]:
            planned = [_percent(row[key]["planned"][str(count)]["waste"]) for count in COUNTS]
            lines.append(_line([row["trace"], *planned, *(_ladder(each) for each in row[key]["ladders"])]))
        parts.append("\n".join(lines))
    head = ["trace", *(f"{tokens:,} tokens, {slots} prompts" for tokens, slots in PACKED)]
    lines = [
        "### Packed launches, a queue that never runs empty\n",
        _line(head),
        _line(["---"] + ["---:"] * len(PACKED)),
    ]
    for row in result["traces"]:
        if row["packed"]:
            lines.append(_line([row["trace"], *(_packed(each) for each in row["packed"])]))
    parts.append("\n".join(lines))
    versions = f"bucketgraph {made['bucketgraph']}, numpy {made['numpy']}, Python {made['python']}, {made['date']}"
    return "\n\n".join([*parts, f"Made with {versions}, commit {made['commit']}."])


def _ladder(row: Row) -> str:
    if row["waste"] is None:
        return f"covers nothing ({row['buckets']})"
    part = "" if row["tokens"] > 0.9995 else f" of the {_percent(row['tokens'])} it covers"
    return f"{_percent(row['waste'])}{part} ({row['buckets']}) → {_percent(row['planned'])} ({row['as_good']})"


def _packed(row: Row) -> str:
    return f"{_percent(row['fill'])} full; {_percent(row['one'])} → {_percent(row['eight'])}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def share(value: float) -> float:
    return round(value, 5)


def facts(folder: Path) -> dict[str, Row]:
    """Source and licence of each trace by name."""
    file = folder / "stats.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return {row["name"]: {"source": row["src"], "licence": row["lic"]} for row in rows}


def sources() -> Row:
    """Where each ladder is from."""
    return {each.name: each.source for each in ladders.peers(1 << 20, ALIGN)}


def environment() -> Row:
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, text=True)
    commit = (asked.stdout.strip() or "unknown") + (" with changes" if dirty.stdout.strip() else "")
    versions = {"bucketgraph": bucketgraph.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return {"date": datetime.date.today().isoformat(), **versions, "commit": commit}


if __name__ == "__main__":
    sys.exit(main())
