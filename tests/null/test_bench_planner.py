"""The planner's benchmark: its arithmetic, its launches and its gates, on a small model and the CPU."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from llm_cases import buckets, tiny, tiny_llm

from bucketgraph import executables
from bucketgraph.llm import presets
from bucketgraph.planner import calibrate, costs, packing, traces

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
Main = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("bench_planner")
    sys.path.remove(str(SCRIPTS))


def trace(lengths: list[int]) -> traces.Trace:
    return traces.made(np.array(lengths)[:, None], None, ("n",), ("t",))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_a_launch_costs_its_bucket_and_what_no_bucket_covers_its_own_size(bench: ModuleType) -> None:
    sizes = bench.Sizes("s", (16, 64))
    assert [sizes.cover(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, None]
    assert sizes.predicted([1, 16, 17, 100], costs.linear()) == 16 + 16 + 64 + 100


def test_attention_is_that_of_the_real_length(bench: ModuleType) -> None:
    """n + n^2 / 64 for one prompt; a bucket is calibrated as 8 of an eighth each: n + n^2 / 512."""
    sizes = [8, 16, 64]
    alone, shared = {n: n + n * n / 64 for n in sizes}, {n: n + n * n / 512 for n in sizes}
    attends = bench.attention(alone, shared)
    assert attends.cost(np.array(sizes)[:, None]) == pytest.approx([n * n / 64 for n in sizes])
    curve = costs.measured({(n,): {"ms": ms} for n, ms in shared.items()}, "shared")
    assert bench.Sizes("s", (64,)).predicted([8, 16], curve, attends) == pytest.approx(2 * 64 + 1 + 4)


def test_each_ladder_stands_beside_as_many_planned_buckets_that_cover_all(bench: ModuleType) -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 500).tolist()
    packed = packing.pack(trace(lengths), 2048, 1).trace
    powers, vllm, sglang = bench.pairs(packed, costs.linear(), 2048, 3)
    assert powers.ladder.tokens == (16, 32, 64, 128, 256, 512, 1024, 2048) and vllm.ladder.tokens[-1] == 512
    for pair in (powers, vllm, sglang):
        assert len(pair.planned.tokens) == len(pair.ladder.tokens) and pair.planned.tokens[-1] == 2048
        assert all(size % bench.ALIGN == 0 for size in pair.planned.tokens)
    counts, curve = packed.sizes[:, 0].tolist(), costs.linear()
    for pair in (powers, sglang):
        assert pair.planned.predicted(counts, curve) < pair.ladder.predicted(counts, curve)


@pytest.mark.parametrize(("measured", "fast", "trusted"), [(1.3, True, True), (1.1, False, False), (1.2, True, False)])
def test_the_verdict_is_on_powers_of_two(bench: ModuleType, measured: float, fast: bool, trusted: bool) -> None:
    row = {"ladder": "powers of two", "predicted": bench.compared(140.0, 100.0), "measured": None}
    row["measured"] = bench.compared(100.0 * measured, 100.0)
    bench.judge(row)
    assert row["gain_error"] == pytest.approx(measured / 1.4 - 1, abs=1e-4)
    assert row["saved_error"] == pytest.approx((100 * measured - 100) / 40 - 1, abs=1e-4)
    told = bench.verdict([{"ladder": "vLLM"}, row])
    assert told["gain"] == measured and told["fast_enough"] is fast and told["as_predicted"] is trusted


@pytest.mark.parametrize("slots", [1, 4])
def test_the_launches_are_those_that_the_planner_counts(bench: ModuleType, slots: int) -> None:
    llm = tiny_llm(buckets())  # 64 tokens a launch
    lengths = [3, 64, 130, 1, 1, 1, 1, 1, 90, 60, 5, 200]
    made = list(bench.launches(llm, lengths, slots))
    assert [count for count, _ in made] == packing.pack(trace(lengths), 64, slots).trace.sizes[:, 0].tolist()
    assert all(len(inputs["input_ids"]) == count == inputs["query_ends"][-1] for count, inputs in made)
    assert sum(len(inputs["query_ends"]) for _, inputs in made) >= len(lengths) and llm._runner.cache.is_idle


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Main:
    """The script on a tiny model and forty lengths: status, output, and the file that it wrote."""
    monkeypatch.setitem(presets.PRESETS, "tiny", tiny())
    monkeypatch.setattr(calibrate, "_SECONDS", 0.001)
    monkeypatch.setattr(executables, "milliseconds", lambda executable, device: 1.0)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # takes longer than what is run here
    lengths = np.random.default_rng(1).integers(1, 150, 40).tolist()
    (tmp_path / "t.csv").write_text("input_tokens\n" + "".join(f"{n}\n" for n in lengths))

    def call() -> tuple[int, str, dict[str, Any]]:
        options = ["--shape", "tiny", "--device", "cpu", "--largest", "128", "--requests", "30"]
        status = bench.main([str(tmp_path / "t.csv"), *options, "--out", str(tmp_path)])
        return status, capsys.readouterr().out, json.loads((tmp_path / "planner_h200.json").read_text())

    return call


def test_a_green_run_has_a_row_for_each_ladder_and_a_verdict(run: Main) -> None:
    status, printed, result = run()
    assert status == 0 and "gates green" in printed and not result["red"] and result["requests"] == 30
    assert [row["ladder"] for row in result["rows"]] == ["powers of two", "vLLM", "SGLang", "powers of two"]
    assert [row["slots"] for row in result["rows"]] == [1, 1, 1, 8]
    for row in result["rows"]:
        assert row["measured"]["ladder_ms"] > 0 and row["predicted"]["planned_ms"] > 0
    assert {tuple(row) for row in result["checks"]} == {("tokens", "bucket", "equal", "error")}
    captured = {row["tokens"] for row in result["sizes"]}
    assert all(captured >= {*row["ladder_sizes"], *row["planned_sizes"]} for row in result["rows"])
    assert result["verdict"]["gain"] == result["rows"][0]["measured"]["gain"]


@pytest.mark.parametrize(
    ("patched", "by"), [("graph_equals_eager", lambda *_: False), ("relative_error", lambda *_: 1.0)]
)
def test_a_red_gate_times_nothing(
    run: Main, bench: ModuleType, monkeypatch: pytest.MonkeyPatch, patched: str, by: object
) -> None:
    monkeypatch.setattr(bench.bench, patched, by)
    status, printed, result = run()
    assert status == 1 and "gate RED" in printed and result["red"] and result["rows"] == []
    assert "verdict" not in result
