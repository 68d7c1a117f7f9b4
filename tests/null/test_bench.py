"""The benchmarks' arithmetic, gates and output, on small models and the CPU: nothing here is a figure."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from llm_cases import tiny
from null.loop_double import installed

from bucketgraph.llm import presets
from bucketgraph.llm.weights import random_weights

SMI = """#!/bin/sh
echo "2026/01/02 10:00:00.000, 1980, 0x0000000000000000"
echo "2026/01/02 10:00:01.000, 1500, 0x0000000000000004"
echo "2026/01/02 10:00:01.050, 1400, 0x0000000000000005"
echo "2026/01"
echo "2026/01/02 10:00:02.000, 1900, 0x0000000000000001"
"""

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
COMMON = ["--device", "cpu", "--shapes", "tiny", "--repeats", "5", "--numerics", "fast"]
DECODE = [*COMMON, "--context", "20", "--batches", "1,3", "--also", "2x30", "--max-model-len", "64"]
DECODE += ["--sampling", "greedy"]
BOTH = ["--numerics", "fast,invariant", "--sampling", "greedy,top-p"]
MODEL = [*COMMON, "--what", "model", "--tokens", "64"]
ATTENTION = ["--device", "cpu", "--what", "attention", "--tokens", "64", "--pages", "16"]
ATTENTION += ["--heads", "4", "--kv-heads", "2", "--dim", "16", "--repeats", "5"]
DISPATCH = ["--device", "cpu", "--inputs", "2", "--calls", "20", "--peers", "none"]
LOOP = ["--device", "cpu", "--shapes", "tiny", "--batches", "1,3", "--prompt", "8", "--tokens", "12"]
LOOP += ["--rounds", "1", "--cancels", "2", "--long", "30"]
Run = Callable[[str, list[str]], tuple[int, str, dict[str, Any]]]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by name."""
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def bench(scripts: Callable[[str], ModuleType]) -> ModuleType:
    return scripts("bench_common")


@pytest.fixture
def gate_apart(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the comparison in float32, where another gate is looked at."""
    monkeypatch.setattr(bench, "float32_gate", lambda *_: {"fast": 0.0})


@pytest.fixture
def run(
    scripts: Callable[[str], ModuleType],
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """A script's main on a tiny model: status, output, and the one file that it wrote."""
    monkeypatch.setitem(presets.PRESETS, "tiny", tiny())
    monkeypatch.setattr(bench.Rates, "measure", lambda device: bench.Rates(1e9, 1e9))
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # takes longer than what is run here

    def call(name: str, arguments: list[str]) -> tuple[int, str, dict[str, Any]]:
        status = scripts(name).main([*arguments, "--out", str(tmp_path)])
        (file,) = tmp_path.glob("*.json")
        return status, capsys.readouterr().out, json.loads(file.read_text())

    return call


def compared(result: object) -> set[str]:
    """Names of shares and ratios anywhere in a result."""
    if isinstance(result, dict):
        own = {key for key in result if key.startswith(("share", "ratio"))}
        return own.union(*(compared(value) for value in result.values()))
    return set().union(*(compared(item) for item in result)) if isinstance(result, list) else set()


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_once_and_a_tied_head_once(bench: ModuleType, kind: str, tied: bool) -> None:
    config = tiny(kind, tie_word_embeddings=tied)
    tensors = random_weights(config, torch.float32, "cpu").tensors()
    skipped = 0 if tied else tensors["embed"].numel()
    assert bench.weight_count(config) == sum(tensor.numel() for tensor in tensors.values()) - skipped


def test_decode_reads_the_weights_once_and_each_requests_cache(bench: ModuleType) -> None:
    config = tiny()
    one, eight = bench.decode_work(config, 1, 511), bench.decode_work(config, 8, 511)
    cached = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 512
    assert one.bytes == 2 * bench.weight_count(config) + cached
    assert eight.bytes - one.bytes == 7 * cached
    matrices = sum(rows * columns * count for rows, columns, count in bench.matrices(config).values())
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * 512
    assert one.operations == 2 * matrices + attention and eight.operations == 8 * one.operations


def test_the_limit_of_a_llama_1b_step_is_what_the_published_numbers_give(bench: ModuleType) -> None:
    config = presets.preset("llama-3.2-1b")
    work, rates = bench.decode_work(config, 1, 512), bench.Rates(4.3e12, 770e12)
    assert bench.weight_count(config) == 1_235_814_400
    assert work.limit_ms(rates) == pytest.approx(0.579, abs=2e-3)
    assert work.row(rates)["limit_by"] == "bytes"
    assert bench.prefill_work(config, 8192).limit_ms(rates) == pytest.approx(25.8, rel=0.1)
    assert bench.prefill_work(config, 8192).row(rates)["limit_by"] == "operations"


def test_prefill_counts_the_head_for_one_row_and_half_the_square(bench: ModuleType) -> None:
    config = tiny()
    short, long = bench.prefill_work(config, 64), bench.prefill_work(config, 128)
    rows, columns, _ = bench.matrices(config)["head"]
    body = sum(r * c * n for name, (r, c, n) in bench.matrices(config).items() if name != "head")
    square = config.num_layers * 2 * config.num_heads * config.head_dim
    assert short.operations == 2 * rows * columns + 2 * 64 * body + square * 64**2
    assert long.operations - short.operations == 2 * 64 * body + square * (128**2 - 64**2)
    assert bench.attention_work(8192, 32, 8, 128).operations == 2 * 2 * 8192 * 8192 // 2 * 128 * 32
    assert bench.attention_work(8192, 32, 8, 128).bytes == 2 * 2 * 8192 * 40 * 128


def test_the_limit_is_the_larger_of_bytes_and_operations(bench: ModuleType) -> None:
    rates = bench.Rates(copy=1e9, matmul=1e12)
    assert bench.Work(2_000_000, 10**9, "").limit_ms(rates) == pytest.approx(2.0)
    assert bench.Work(2_000_000, 10**9, "").row(rates)["limit_by"] == "bytes"
    assert bench.Work(2_000_000, 5 * 10**9, "").limit_ms(rates) == pytest.approx(5.0)
    assert bench.Work(2_000_000, 5 * 10**9, "").row(rates)["limit_by"] == "operations"


def test_errors_are_relative_and_nan_is_infinitely_wrong(bench: ModuleType) -> None:
    want = torch.tensor([4.0, -2.0])
    assert bench.relative_error(torch.tensor([4.0, -1.0]), want) == pytest.approx(0.25)
    assert bench.rms_error(want * 1.1, want) == pytest.approx(0.1)
    for measure in (bench.relative_error, bench.rms_error):
        assert measure(torch.tensor([float("nan"), 0.0]), want) == float("inf")


# -- green and red -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "arguments", "names"),
    [
        ("bench_decode", [*DECODE, *BOTH, "--peers", "quick"], {"share_of_limit", "share_of_limit_wall", "ratio_wall"}),
        ("bench_decode", [*DECODE, "--peers", "none", "--what", "matmul"], {"share_of_limit", "ratio_to_cublas"}),
        ("bench_prefill", MODEL, {"share_of_limit", "share_of_limit_ttft", "ratio_eager", "ratio_wall"}),
        ("bench_prefill", [*ATTENTION, "--peers", "quick"], {"share_of_limit", "ratios"}),
        ("bench_dispatch", DISPATCH, {"share_of_limit"}),
    ],
)
def test_a_green_run_compares_with_limit_and_peers(
    run: Run, script: str, arguments: list[str], names: set[str]
) -> None:
    if script == "bench_decode" or arguments is MODEL:
        pytest.importorskip("transformers")
    status, printed, result = run(script, arguments)
    assert status == 0 and "gates green" in printed and not result["red"]
    assert names <= compared(result)
    if script == "bench_decode" and "matmul" not in arguments:
        rows = [row for row in result["rows"] if (row["numerics"], row["sampling"]) == ("fast", "greedy")]
        points = [(row["batch"], row["context"], bool(row["peers"])) for row in rows]
        assert points == [(1, 20, True), (3, 20, True), (2, 30, False)]
    assert result["limit_formula"] and "commit" in result["environment"]


def wrong(*_: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("script", "arguments", "patched", "by"),
    [
        ("bench_decode", [*DECODE, "--peers", "none"], "bench_common.graph_equals_eager", lambda *_: False),
        ("bench_decode", [*DECODE, "--peers", "none"], "bench_common.FLOAT32_TOLERANCE", -1.0),
        ("bench_decode", [*DECODE, "--peers", "none", "--what", "matmul"], "bench_common.relative_error", wrong),
        ("bench_prefill", [*MODEL, "--peers", "none"], "bench_common.graph_equals_eager", lambda *_: False),
        ("bench_prefill", [*MODEL, "--peers", "none"], "bench_common.FLOAT32_TOLERANCE", -1.0),
        ("bench_prefill", ATTENTION, "bench_common.relative_error", wrong),
        ("bench_dispatch", DISPATCH, "bench_dispatch.right", lambda *_: False),
    ],
)
def test_a_red_gate_ends_with_status_1_and_compares_nothing(
    run: Run,
    scripts: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    arguments: list[str],
    patched: str,
    by: object,
) -> None:
    if "attention" not in arguments and script != "bench_dispatch":
        pytest.importorskip("transformers")
    module, name = patched.split(".")
    monkeypatch.setattr(scripts(module), name, by)
    status, printed, result = run(script, arguments)
    assert status == 1 and "gate RED" in printed and "gates green" not in printed
    assert result["red"] and not compared(result)


@pytest.mark.usefixtures("gate_apart")
def test_a_peer_whose_logits_differ_gets_no_ratio(run: Run, bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "rms_error", wrong)
    status, printed, result = run("bench_decode", [*DECODE, "--peers", "quick"])
    assert status == 1 and "transformers's logits differ from ours" in printed
    assert not {"ratio_wall", "ratio_gpu"} & compared(result)


@pytest.mark.usefixtures("gate_apart")
def test_a_peer_that_cannot_run_is_named_and_costs_nothing_else(
    run: Run, scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(scripts("bench_decode"), "transformers_eager", broken)
    status, printed, result = run("bench_decode", [*DECODE, "--peers", "quick"])
    assert status == 0 and "no such kernel" in printed
    assert "share_of_limit" in compared(result) and "ratio_wall" not in compared(result)


@pytest.mark.usefixtures("gate_apart")
def test_a_failure_in_the_middle_is_red_and_keeps_what_was_measured(
    run: Run, scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    module = scripts("bench_decode")
    whole = module.ours

    def failing(llm: Any, requests: list[Any], repeats: int) -> Any:
        if len(requests) == 3:
            raise RuntimeError("out of memory")
        return whole(llm, requests, repeats)

    monkeypatch.setattr(module, "ours", failing)
    status, _, result = run("bench_decode", [*DECODE, "--peers", "none"])
    assert status == 1 and [row["batch"] for row in result["rows"]] == [1, 2]
    assert len(result["red"]) == 1 and "out of memory" in result["red"][0]


# -- what is shown and kept --------------------------------------------------------------------------------------------


def measured(**changes: Any) -> dict[str, Any]:
    """A decode row as the script makes them, of made-up numbers."""
    times = {"p50": 2.0, "p99": 3.0, "max": 4.0, "n": 9}
    peer = {"wall_ms": {**times, "p50": 8.0}, "gpu_ms": {**times, "p50": 4.0}, "rms_error": 0.01}
    row = {"shape": "s", "batch": 1, "context": 9, "sampling": "greedy", "numerics": "fast", "limit_ms": 1.0}
    row |= {"graph_equals_eager": True, "gpu_ms": times, "wall_ms": {**times, "p50": 2.5}, "peers": {"them": peer}}
    return {**row, **changes}


def test_shares_and_ratios_say_which_over_which(
    bench: ModuleType, scripts: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    decode, gate, row = scripts("bench_decode"), bench.Gate(), measured()
    decode.judge(row, gate)
    assert row["share_of_limit"] == 0.5 and row["share_of_limit_wall"] == 0.4
    assert row["peers"]["them"]["ratio_wall"] == 3.2 and row["peers"]["them"]["ratio_gpu"] == 2.0
    decode.show([row], [])
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[:2]}) == 1
    assert lines[1].split() == ["s", "1", "9", "fast", "greedy", "1.000", "2.000", "0.500", "2.500", "3.000", "0.400"]
    assert gate.conclude() == 0


def test_a_red_row_is_shown_with_dashes(
    bench: ModuleType, scripts: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    decode, gate, row = scripts("bench_decode"), bench.Gate(), measured(graph_equals_eager=False)
    decode.judge(row, gate)
    decode.show([row], [])
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line[7] == line[10] == "-" and gate.conclude() == 1
    assert decode.panels([row]) == []


def test_results_are_json_with_the_environment_and_what_they_were_measured_with(
    bench: ModuleType, tmp_path: Path
) -> None:
    args = bench.parser("", peers="none").parse_args(["--out", str(tmp_path / "new")])
    args.page_size, args.trace = bench.PAGE_SIZE, tmp_path / "a.csv"
    path = bench.save("decode_s", {"rows": [measured()]}, args)
    kept = json.loads(path.read_text())
    assert kept["arguments"] == {"peers": "none", "device": "cuda", "page_size": 64, "trace": "a.csv"}
    assert path.name == "decode_s.json" and kept["rows"] == [measured()]
    assert {"date", "torch", "commit"} <= kept["environment"].keys()


def test_the_picture_is_drawn_with_the_limit(
    bench: ModuleType, scripts: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    rows = [measured(batch=batch, limit_ms=float(batch)) for batch in (1, 8)]
    for row in rows:
        scripts("bench_decode").judge(row, bench.Gate())
    panels = scripts("bench_decode").panels(rows)
    assert panels[0].limit == [(1.0, 1.0), (8.0, 8.0)] and "them" in panels[0].lines
    bench.plot(str(tmp_path / "p.png"), panels)
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_the_committed_results_are_drawn(scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert scripts("plot_results").main(["--out", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"decode.png", "prefill.png"}
    with pytest.raises(FileNotFoundError):
        scripts("plot_results").main(["--results", str(tmp_path), "--out", str(tmp_path)])


# -- the device loop ---------------------------------------------------------------------------------------------------


def test_both_loops_are_measured_idle_and_busy(run: Run, bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    busy: list[int] = []
    monkeypatch.setattr(bench, "busy_cpu", lambda: (busy.append(1), nullcontext())[1])
    status, printed, result = run("bench_loop", LOOP)
    assert status == 0, printed
    assert [(row["batch"], row["green"]) for row in result["rows"]] == [(1, True), (3, True)] and len(busy) == 2
    for row in result["rows"]:
        assert row["cancel"]["steps"]["n"] == 2 and row["cancel"]["steps"]["max"] <= 2
        for state in ("idle", "busy"):
            host, device = row[state]["host"], row[state]["device"]
            assert host["arrival_ms"]["n"] == device["arrival_ms"]["n"] == 11
            assert device["device_ms"]["n"] == 10 and "device_ms" not in host
            for part in (host, device):
                assert part["cpu_ms_per_call"] > 0 and part["waiting_ms_per_call"] >= 0
                assert ("cpu_us_per_step" in part) == ("waiting_us_per_step" in part) == (state == "idle")
            assert row[state]["ratio_host_device"] > 0
    assert "cancelled within steps" in printed and "gates green" in printed


def test_a_loop_that_did_not_run_on_the_device_is_not_timed(run: Run) -> None:
    status, printed, result = run("bench_loop", LOOP)
    assert status == 1 and "no device loop" in printed and "0 of 11 steps looped" in printed
    assert not compared(result) and not any("idle" in row for row in result["rows"])


def test_long_calls_that_are_wrong_are_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's 15th step is wrong: beyond the calls that the gate looks at first."""

    def spoil(launcher: Any, ring: Any, state: torch.Tensor) -> None:
        if state[0] == 15:
            ring.tokens[14] ^= 1

    installed(monkeypatch).after_step = spoil
    status, printed, result = run("bench_loop", LOOP)
    assert status == 1 and "tokens of the two loops' long calls differ" in printed
    assert not compared(result) and not any("idle" in row for row in result["rows"])


def test_what_a_step_costs_is_the_difference_of_two_calls(scripts: Callable[[str], ModuleType]) -> None:
    calls = [{"cpu_ms_per_call": cost, "waiting_ms_per_call": 2 * cost} for cost in (5.0, 5.896)]
    assert scripts("bench_loop").per_step(*calls, 896) == {"cpu_us_per_step": 1.0, "waiting_us_per_step": 2.0}


@pytest.mark.parametrize("long", ["12", "1026"])
def test_a_long_call_is_longer_than_the_others_and_one_run(
    scripts: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], long: str
) -> None:
    with pytest.raises(SystemExit):
        scripts("bench_loop").main([*LOOP, "--long", long])
    assert f"--long: given {long}, expected more than --tokens and at most 1025" in capsys.readouterr().err


def test_polling_is_taken_out_of_a_calls_cpu_time(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second of CPU to launch, two looks of three without news, five seconds to take the tokens."""
    made = scripts("bench_loop")
    clock, runs = iter([0.0, 1.0, 4.0, 7.0, 12.0]), iter([7, 7, 7, None])  # runs: in flight after each step
    monkeypatch.setattr(made.time, "thread_time", lambda: next(clock))
    engine = SimpleNamespace(_run=None, _accept=None)
    engine.step = lambda: setattr(engine, "_run", next(runs))
    waiting = made.Waiting(SimpleNamespace(_engine=engine), "device")
    for _ in range(4):
        engine.step()
    assert waiting.seconds == 6.0


STRATEGIES = ["--device", "cpu", "--model", "random:tiny", "--peers", "none", "--batches", "1", "--prompt", "5"]
STRATEGIES += ["--tokens", "4", "--rounds", "1", "--strategies"]


@pytest.fixture
def strategies(scripts: Callable[[str], ModuleType], bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script where a CPU can run all that it does."""
    pytest.importorskip("transformers")
    made = scripts("bench_strategies")
    monkeypatch.setattr(bench, "busy_cpu", nullcontext)
    monkeypatch.setattr(made, "TOKENS", [16, 64])
    monkeypatch.setitem(made.STRATEGIES, "bucketed", made.Strategy("eager", "eager"))
    monkeypatch.setitem(made.STRATEGIES, "device loop", made.Strategy("eager", "eager", loop="device"))
    return made


def test_the_device_loop_is_a_strategy_among_others(
    run: Run, strategies: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    status, printed, result = run("bench_strategies", [*STRATEGIES, "bucketed", "device loop"])
    assert status == 0 and "4 of 4 float32 tokens compared" in printed, printed
    assert list(result["ratios"]) == ["device loop / bucketed"] and result["red"] == []
    for row in result["strategies"].values():
        assert row["token_ms"]["n"] == row["busy"]["token_ms"]["n"] == 3 and row["ttft_ms"]["n"] == 1
        assert row["warmup_s"] > 0 and row["buckets_failed"] == 0


def test_a_strategy_whose_loop_did_not_run_has_no_row(run: Run, strategies: ModuleType) -> None:
    status, printed, result = run("bench_strategies", [*STRATEGIES, "bucketed", "device loop"])
    assert status == 1 and "gate RED: device loop" in printed and list(result["strategies"]) == ["bucketed"]
    assert result["red"] and not result["ratios"]


def test_busy_cores_are_idle_afterwards(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda pid: {0})
    started: list[Any] = []
    popen = bench.subprocess.Popen
    monkeypatch.setattr(bench.subprocess, "Popen", lambda *args: (started.append(popen(*args)), started[-1])[1])
    with bench.busy_cpu():
        assert [process.poll() for process in started] == [None]
    assert all(process.poll() is not None for process in started)


def test_the_clock_of_a_gpu_is_that_of_the_time_asked_for(
    scripts: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    module = scripts("gpu_clock")
    assert module.gpu_clock(torch.device("cpu")) is None
    clock = module.GpuClock("GPU-0")
    clock._reader.join()  # the program ended
    start = datetime(2026, 1, 2, 10).timestamp()
    assert clock.between(start, start + 0.5) == {"sm_mhz": 1980, "power_capped": 0.0}
    assert clock.between(start + 0.5, start + 1.5) == {"sm_mhz": 1450, "power_capped": 1.0}
    assert clock.between(start, start + 2) == {"sm_mhz": 1700, "power_capped": 0.5}
    assert clock.between(start + 3, start + 4) == {}, "nobody waits for a program that ended"
    with clock.meanwhile() as known:
        pass
    assert known == {}


def test_the_clock_is_asked_for_inside_alone(
    scripts: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nwhile sleep 0.01; do echo "$(date "+%Y/%m/%d %H:%M:%S.%3N"), 1980, 0x0"; done\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    clock = scripts("gpu_clock").GpuClock("GPU-0")
    try:
        with clock.meanwhile() as known:
            entered = time.time()
            while clock._samples[-1][0] < entered:
                time.sleep(0.01)
        assert known == {"sm_mhz": 1980, "power_capped": 0.0}
        stat = Path(f"/proc/{clock._process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":  # it is stopped
            time.sleep(0.01)
    finally:
        clock._process.kill()
