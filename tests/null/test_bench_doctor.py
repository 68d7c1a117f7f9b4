"""The doctor's benchmark: its gates, on a small model and the CPU, and on a GPU as it could be."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from llm_cases import tiny
from null.doctor_double import Gpu

from bucketgraph.doctor.record import CaptureResult, Diagnosis
from bucketgraph.doctor.workload import Workload
from bucketgraph.llm import presets

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
Main = Callable[..., tuple[int, str, dict[str, Any]]]
CALL = Workload("step", lambda: (torch.ones(3), torch.zeros(2)), torch.device("cpu"))


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("bench_doctor")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Main:
    monkeypatch.setitem(presets.PRESETS, "tiny", tiny())
    monkeypatch.setattr(bench, "wall_ms", lambda *_: [1.0, 2.0])
    arguments = ["--launch-bound", "tiny", "--compute-bound", "tiny", "--context", "8", "--prefill", "20"]

    def call(*more: str) -> tuple[int, str, dict[str, Any]]:
        status = bench.main(["--device", "cpu", "--out", str(tmp_path), *arguments, *more])
        return status, capsys.readouterr().out, json.loads((tmp_path / "doctor.json").read_text())

    return call


def test_a_cpu_tries_the_script_and_compares_nothing(run: Main) -> None:
    status, printed, result = run()
    assert status == 0 and [row["verdict"] for row in result["rows"]] == ["not timed"] * 2
    assert "decode, batch 1, 8 tokens" in printed and "prefill of 20 tokens" in printed and "ratio" not in str(result)


def test_other_bits_of_a_replay_are_red_and_the_other_workload_still_runs(
    run: Main, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = iter([False, True])
    monkeypatch.setattr(bench, "same_bits", lambda *_: next(same))
    status, printed, result = run()
    assert status == 1 and "a replay differs" in printed
    assert [("eager_ms" in row) for row in result["rows"]] == [False, True]


def test_a_workload_that_cannot_be_loaded_costs_nothing_else(run: Main) -> None:
    status, printed, result = run("--launch-bound", "nothing")
    assert status == 1 and "unknown model preset" in printed and len(result["rows"]) == 1


def test_bits_are_compared_one_output_after_the_other(bench: ModuleType) -> None:
    assert bench.same_bits(CALL, bench.captured(CALL))
    turns = iter(range(9))
    assert not bench.same_bits(replace(CALL, call=lambda: torch.full((2,), next(turns))), bench.captured(CALL))


@pytest.mark.parametrize(
    ("kind", "gpu", "own", "red"),
    [
        ("launch-bound", Gpu(), ([3.1], [0.36]), None),
        ("compute-bound", Gpu(), ([3.1], [0.36]), "launch-bound, Graphs will help"),
        ("launch-bound", Gpu(), ([3.1], [0.5]), "graph 0.350 ms by the doctor, 0.500 ms by this script"),
        ("launch-bound", Gpu(), ([2.0], [0.35]), "eager 3.000 ms by the doctor, 2.000 ms by this script"),
        ("launch-bound", Gpu(capture=CaptureResult(error="no")), ([3.0], [0.35]), "cannot be captured"),
        ("launch-bound", Gpu(), None, "by hand"),
    ],
)
def test_a_row_is_green_where_verdict_and_clocks_agree(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, gpu: Gpu, own: Any, red: str | None
) -> None:
    made: Diagnosis = gpu.diagnose(monkeypatch)
    work = replace(CALL, device=torch.device("cuda", 0))

    def by_hand(*_: object) -> Any:
        if own is None:
            raise RuntimeError("on purpose")
        return own

    for name, value in (("of_model", lambda *_, **__: work), ("diagnose", lambda _: made), ("by_hand", by_hand)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench.bench, "release_memory", lambda _: None)
    gate = bench.Gate()
    args = bench.bench.parser("").parse_args([])
    row = bench.examined(kind, "tiny", bench.Step(), args, gate)
    assert row["green"] == (red is None) and all(red is None or red in what for what in gate.red[:1])
    assert bool(gate.red) == (red is not None) and ("ratio_predicted_measured" in row) == row["green"]
    if row["green"]:
        assert row["ratio_measured_gain"] == round(3.0 / 0.35, 3) and row["launches"]["nodes"] == 243
        assert row["ratio_predicted_measured"] == pytest.approx(row["predicted"]["gain"] / (3.0 / 0.35), abs=1e-2)
    json.dumps(row)
