"""What the README and the pages in docs/ quote is what lies in benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
STRATEGIES = {
    "our kernels launched eagerly": "eager",
    "segmented: eager prefill, graphed decode": "segmented",
    "bucketed: both in graphs": "bucketed",
    "bucketed, `numerics: invariant`": "bucketed, invariant",
    "device loop": "device loop",
    "transformers, its eager loop as it comes": "transformers",
    "transformers, cuDNN attention off": "transformers, cuDNN attention off",
}
PEERS = ("transformers", "transformers, cuDNN attention off")


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(page: Path, first: str) -> Iterator[list[str]]:
    """The cells of each row of the table whose heading begins so."""
    lines = page.read_text(encoding="utf-8").splitlines()
    (start,) = (at for at, line in enumerate(lines) if line.startswith(first))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def said(cell: str, values: list[float], unit: float = 1.0) -> None:
    """Each number of a cell is its value, rounded to the places that it has."""
    numbers = cell.removesuffix("%").split("/")
    assert len(numbers) == len(values), cell
    for number, value in zip(numbers, values, strict=True):
        places = len(number.strip().partition(".")[2])
        assert abs(float(number) - value * unit) <= 0.500001 * 10**-places, f"{cell}: {value * unit}"


def test_decode() -> None:
    rows = list(table(README, "| shape | limit | greedy, GPU |"))
    assert len(rows) == 4
    for shape, limit, greedy, share, top_p, caller, invariant, _ in rows:
        found = {
            (row["batch"], row["numerics"], row["sampling"]): row
            for row in result(f"decode_{shape.lower()}")["rows"]
            if row["context"] == 512
        }
        fast, drawn = ([found[batch, "fast", how] for batch in (1, 8, 64)] for how in ("greedy", "top-p"))
        same = [found[batch, "invariant", "greedy"] for batch in (1, 8, 64)]
        said(limit, [row["limit_ms"] for row in fast])
        said(greedy, [row["gpu_ms"]["p50"] for row in fast])
        said(share, [row["share_of_limit"] for row in fast], 100)
        said(top_p, [row["gpu_ms"]["p50"] for row in drawn])
        said(caller, [row["wall_ms"]["p50"] for row in fast])
        said(invariant, [row["gpu_ms"]["p50"] for row in same])


def test_prefill() -> None:
    rows = list(table(README, "| shape | tokens | limit | graph |"))
    assert len(rows) == 12
    for shape, tokens, limit, graph, share, eager, first, peer in rows:
        (row,) = (
            row
            for row in result(f"prefill_{shape.lower()}")["rows"]
            if row["tokens"] == int(tokens.replace(",", "")) and row["numerics"] == "fast"
        )
        said(limit, [row["limit_ms"]])
        said(graph, [row["graph_ms"]["p50"]])
        said(share, [row["share_of_limit"]], 100)
        said(eager, [row["eager_ms"]["p50"]])
        said(first, [row["ttft_ms"]["p50"]])
        said(peer, [row["peers"]["transformers"]["wall_ms"]["p50"]])


def test_rates_and_attention() -> None:
    text, found = README.read_text(encoding="utf-8"), result("prefill_attention")
    rates = found["rates"]
    assert f"({rates['copy_tb_s']:.2f} TB/s, {rates['matmul_tflop_s']:.0f} TFLOP/s)" in text
    kernels = {row["tokens"]: row["kernels"] for row in found["rows"] if row["tokens"] >= 512}
    ours = {n: max(rows[f"ours, page {page}"]["tflop_s"] for page in (64, 128)) for n, rows in kernels.items()}
    speeds = ", ".join(f"{speed:.0f}" for speed in ours.values())
    ratios = ", ".join(f"{speed / kernels[n]['cuDNN']['tflop_s']:.2f}" for n, speed in ours.items())
    assert f"{speeds} TFLOP/s at 512, 1,024, 2,048, 4,096, 8,192 tokens, {ratios} times cuDNN's rate" in text


@pytest.mark.parametrize(
    ("page", "name"), [(README, "smollm2"), (ROOT / "docs" / "device-loop.md", "llama-3.2-1b")], ids=["readme", "loop"]
)
def test_strategies(page: Path, name: str) -> None:
    made = result(f"strategies_{name}")["strategies"]
    rows = list(table(page, "| strategy | TTFT |"))
    if page == README:
        over = [result(f"strategies_{name}")["ratios"][f"{peer} / bucketed"] for peer in ("eager", *PEERS)]
        first, second, third = (f"{ratio:.1f}" for ratio in over)
        said_of = f"{first} times faster than the same kernels launched eagerly, and {second} and {third} times faster"
        assert said_of in page.read_text(encoding="utf-8")
    assert {STRATEGIES[row[0]] for row in rows} == set(made)
    for label, first, token, busy, mib, warm_up in rows:
        row = made[STRATEGIES[label]]
        said(first, [row["ttft_ms"]["p50"]])
        said(token, [row["token_ms"][key] for key in ("p50", "p99", "max")])
        said(busy, [row["busy"]["token_ms"][key] for key in ("p50", "p99", "max")])
        if mib != "-":
            said(mib, [row["graph_mib"]])
            said(warm_up, [row["warmup_s"]])
