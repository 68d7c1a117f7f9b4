"""`bucketgraph plan`: a set that loads, tables that say what was found, one-line errors with nothing written."""

from __future__ import annotations

import builtins
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketgraph.buckets import ladder
from bucketgraph.cli import main
from bucketgraph.config import load
from bucketgraph.planner import costs, demand, document, ladders
from bucketgraph.planner.choose import Limits
from bucketgraph.planner.compare import against
from bucketgraph.planner.figures import measure
from bucketgraph.planner.plan import plan

ROOT = Path(__file__).resolve().parents[2]
TOY = """\
version: 1
name: toy
axes: {batch: [1, 2], n: [1, 2, 4]}
inputs:
  x: {shape: [batch, n, 3], dtype: float32, pad: 0}
outputs:
  y: {shape: [batch, n, 3]}
max_padding: 4
"""
TINY_LLM = """\
version: 1
name: tiny
phases:
  prefill: {axes: {tokens: [16], requests: [2]}}
  decode: {axes: {batch: [1, 2]}}
max_model_len: 64
warmup: {self_check: false}
"""
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """`main` in a folder with traces and a set: status, standard output, standard error."""
    random = np.random.default_rng(1)
    lengths = np.maximum(1, random.lognormal(5, 1, 500).astype(int)).tolist()
    (tmp_path / "trace.csv").write_text("input_tokens,batch\n" + "".join(f"{n},{n % 7 + 1}\n" for n in [0, *lengths]))
    (tmp_path / "toy.yaml").write_text(TOY)
    (tmp_path / "costs.json").write_text(
        json.dumps({str(n): {"ms": 1 + n / 900, "mib": 2, "seconds": 0.5} for n in (16, 9000)})
    )
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> tuple[int, str, str]:
        status = main(["plan", *argv])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def sizes(path: str, *, phase: str = "prefill", axis: str = "tokens") -> tuple[int, ...]:
    made = load(path)
    return made.phases[phase].axes[axis] if made.phases else made.axes[axis]


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_plan_is_a_set_that_loads_and_says_where_it_is_from(run: Main) -> None:
    status, out, err = run("trace.csv", "--buckets", "5", "-o", "out.yaml")
    assert status == 0 and err == ""
    made, base = load("out.yaml"), load("llm")
    assert made.name == "out" and made.phases is not None and base.phases is not None
    assert len(sizes("out.yaml")) == 5 and all(size % 16 == 0 for size in sizes("out.yaml"))
    assert made.phases["decode"] == base.phases["decode"] and made.kv_cache == base.kv_cache
    text = Path("out.yaml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "500 requests in trace.csv (input_tokens)" in text and "1 of length 0 dropped" in text
    assert "# Cost: tokens; sizes are multiples of 16." in comments and "waste of tokens" in text
    assert any("powers of two: " in line for line in comments) and all(len(line) <= 120 for line in comments)
    assert " ".join(map(str, sizes("out.yaml"))) in out and "exact: no plan" in out
    assert str(ROOT) not in text and not list(Path().glob("*.partial"))


def test_any_set_and_axis_can_be_planned(run: Main) -> None:
    assert run("trace.csv", "--like", "toy.yaml", "--axis", "n", "-o", "a.yaml", "--buckets", "3")[0] == 0
    made = load("a.yaml")
    assert made.axes["batch"] == (1, 2) and len(made.axes["n"]) == 3 and made.max_padding == 4
    assert run("trace.csv", "--column", "batch", "--axis", "decode.batch", "-o", "b.yaml", "--buckets", "3")[0] == 0
    assert sizes("b.yaml", phase="decode", axis="batch")[-1] == 7, "a batch needs no alignment"
    assert sizes("b.yaml") == sizes("llm")
    assert run("trace.csv", "--like", "minilm", "--largest", "512", "--over", "truncate", "-o", "c.yaml")[0] == 0
    assert sizes("c.yaml")[-1] == 512 and load("c.yaml").axes["batch"] == load("minilm").axes["batch"]


def test_two_axes_are_written_as_buckets(run: Main) -> None:
    status, out, _ = run("trace.csv", "--column", "batch,input_tokens", "--buckets", "6", "-o", "two.yaml")
    made = load("two.yaml")
    assert (
        status == 0 and made.buckets is not None and len(made.buckets) == 6 and tuple(made.axes) == ("batch", "tokens")
    )
    assert len(made.lattice().buckets) == 6 and "not proven" in out and "powers of two, both axes" in out
    swapped = ("--column", "input_tokens,batch", "--axis", "n,batch", "--align", "16,1", "--like", "toy.yaml")
    assert run("trace.csv", *swapped, "--buckets", "6", "-o", "swap.yaml")[0] == 0
    assert load("swap.yaml").buckets == made.buckets, "the order of columns and axes does not matter"
    assert run("trace.csv", "--like", "two.yaml", "--column", "batch,input_tokens", "-o", "again.yaml")[0] == 0


def test_the_largest_size_is_always_a_bucket(run: Main) -> None:
    assert run("trace.csv", "--largest", "8192", "-o", "a.yaml", "--buckets", "4")[0] == 0
    assert sizes("a.yaml")[-1] == 8192 and len(sizes("a.yaml")) == 4
    status, out, _ = run("trace.csv", "--like", "minilm", "--largest", "128", "-o", "b.yaml")
    assert status == 0 and sizes("b.yaml")[-1] == 128 and "over the largest size run eagerly" in out


def test_costs_limits_and_prices_reach_the_plan(run: Main) -> None:
    status, out, _ = run(
        "trace.csv", "--costs", "costs.json", "--memory", "9", "--startup-seconds", "9", "-o", "a.yaml"
    )
    assert status == 0 and len(sizes("a.yaml")) == 4 and "8.0 MiB, 2.0 s" in out and "measured (costs.json)" in out
    status, out, _ = run("trace.csv", "--costs", "costs.json", "--price-memory", "20", "-o", "b.yaml")
    assert status == 0 and "ms and prices per 1,000" in out and 1 < len(sizes("b.yaml")) < 16
    model = ("--cost", "roofline", "--model", "llama-3.2-1b")
    status, out, _ = run("trace.csv", *model, "--bucket-mib", "3", "--memory", "10")
    assert status == 0 and "roofline of 16 layers" in out and "waste of ms" in out and "9.0 MiB" in out
    status, out, _ = run("trace.csv", *model, "--bandwidth", "300", "--compute", "30", "--buckets", "2")
    assert status == 0 and "300 GB/s, 30 TFLOP/s" in out


def test_saved_sizes_of_a_service_can_be_planned(run: Main) -> None:
    Path("saved.json").write_text('{"prefill": {"sizes": {"tokens": {"100": 5, "30": 9}}}, "decode": {"sizes": {}}}')
    status, out, _ = run("saved.json", "-o", "a.yaml")
    assert status == 0 and sizes("a.yaml") == (32, 112) and "14 requests in saved.json (prefill.tokens)" in out


def test_packing_says_what_planning_gains(run: Main) -> None:
    status, out, _ = run("trace.csv", "--packed", "256", "--slots", "64")
    assert status == 0 and "Packing fills the buckets, and planning gains nothing: one bucket of 256 wastes" in out
    status, out, _ = run("trace.csv", "--packed", "4096", "--slots", "2", "-o", "a.yaml")
    assert status == 0 and "Planning saves" in out and "prompts: " in out and sizes("a.yaml")[-1] == 4096
    assert run("trace.csv", "--packed", "256", "--uncut")[0] == 0


def test_the_trade_off_is_drawn(run: Main) -> None:
    pytest.importorskip("matplotlib")
    assert run("trace.csv", "--plot", "one.png")[0] == 0 and Path("one.png").read_bytes()[:4] == b"\x89PNG"
    assert run("trace.csv", "--column", "batch,input_tokens", "--buckets", "3", "--plot", "two.svg")[0] == 0
    assert "<svg" in Path("two.svg").read_text()


def test_calibration_measures_the_model_and_keeps_it(run: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("toy_plan_module.py").write_text("def double(x):\n    return x * 2\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ("--like", "toy.yaml", "--axis", "n", "--largest", "256", "--buckets", "3")
    measure_it = ("--calibrate", "--model", "toy_plan_module:double", "--device", "cpu", "--save-costs", "c.json")
    status, out, err = run("trace.csv", *options, *measure_it, "-o", "a.yaml")
    assert status == 0 and "measured on this CPU" in out and "check" in err and load("a.yaml").axes["n"][-1] == 256
    saved = json.loads(Path("c.json").read_text())
    assert saved.pop("device") and all(row["ms"] > 0 and row["seconds"] > 0 for row in saved.values())
    assert max(map(int, saved)) == 256
    status, _, _ = run("trace.csv", *options, "--costs", "c.json", "-o", "b.yaml")
    assert status == 0 and load("b.yaml").axes == load("a.yaml").axes


def test_calibration_measures_a_phase_of_a_language_model(run: Main) -> None:
    Path("tiny.yaml").write_text(TINY_LLM)
    options = ("--like", "tiny.yaml", "--largest", "64", "--buckets", "2", "-o", "a.yaml", "--save-costs", "c.json")
    status, out, _ = run("trace.csv", *options, "--calibrate", "--model", "random:smollm2-135m:1", "--device", "cpu")
    assert status == 0 and "waste of ms" in out and sizes("a.yaml")[-1] == 64
    assert set(json.loads(Path("c.json").read_text())) == {"device", "16", "32", "48", "64"}


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("none.csv",), "none.csv: cannot be read"),
        (("trace.csv", "--column", "nope"), "no column 'nope': expected one of input_tokens, batch"),
        (("trace.csv", "--column", "a,b,c"), "axes of the plan"),
        (("trace.csv", "--like", "nope"), "nope: no such bucket set"),
        (("trace.csv", "--axis", "tokens"), "an LLM set has an axis in a phase: given tokens"),
        (("trace.csv", "--axis", "prefill.words"), "llm.yaml has no axis 'words': expected one of tokens, requests"),
        (("trace.csv", "--like", "toy.yaml"), "toy.yaml has no axis 'tokens': expected one of batch, n; name one with"),
        (
            ("trace.csv", "--like", "minilm", "--axis", "batch,tokens"),
            "axes of the plan: given batch, tokens, expected 1",
        ),
        (("trace.csv", "--align", "0"), "align is out of range: given '0', expected 1 positive whole number"),
        (("trace.csv", "--align", "16,16"), "align is out of range"),
        (("trace.csv", "--buckets", "0"), "buckets is out of range: given 0"),
        (("trace.csv", "--memory", "5"), "memory and price-memory need the MiB of a bucket"),
        (("trace.csv", "--memory", "5", "--bucket-mib", "6"), "that covers everything is over the budget by itself"),
        (("trace.csv", "--startup-seconds", "0.4", "--costs", "costs.json"), "given 0.5 s of 0.4"),
        (("trace.csv", "--price-startup", "-1"), "price-startup is out of range"),
        (("trace.csv", "--largest", "0"), "largest is out of range"),
        (("trace.csv", "--packed", "0"), "packed is out of range"),
        (("trace.csv", "--packed", "64", "--largest", "64"), "--packed sets the largest size itself"),
        (("trace.csv", "--slots", "4"), "--slots and --uncut belong to --packed"),
        (("trace.csv", "--packed", "64", "--column", "batch,input_tokens"), "packing takes one column"),
        (("trace.csv", "--cost", "roofline"), "the cost needs a model"),
        (("trace.csv", "--calibrate"), "the cost needs a model"),
        (("trace.csv", "--cost", "linear", "--costs", "costs.json"), "costs are given twice"),
        (("trace.csv", "--cost", "roofline", "--model", "random:what"), "unknown model preset"),
        (("trace.csv", "--cost", "roofline", "--model", "qwen3-0.6b", "--bandwidth", "0"), "bandwidth is out of range"),
        (("trace.csv", "--bandwidth", "5"), "--bandwidth and --compute belong to --cost roofline"),
        (("trace.csv", "--model", "qwen3-0.6b"), "--model belongs to --cost roofline or --calibrate"),
        (("trace.csv", "--save-costs", "c.json"), "--save-costs belongs to --calibrate"),
        (("trace.csv", "--costs", "toy.yaml"), "toy.yaml: not JSON"),
        (("trace.csv", "--costs", "costs.json", "--column", "batch,input_tokens"), "costs of other axes"),
        (("trace.csv", "--plot", "no/such/p.png"), "no such folder"),
        (("trace.csv", "-o", "."), "is a folder"),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(run: Main, argv: tuple[str, ...], says: str) -> None:
    before = sorted(Path().iterdir())
    output = () if "-o" in argv else ("-o", "out.yaml")
    status, out, err = run(*argv, *output)
    assert status == 2 and out == "" and err.startswith("bucketgraph: ") and err.count("\n") == 1
    assert says in err and sorted(Path().iterdir()) == before


def test_a_set_that_lists_its_buckets_is_not_planned_by_half(run: Main) -> None:
    Path("listed.yaml").write_text(TOY + "buckets: [[1, 1], [1, 2], [2, 4]]\n")
    status, _, err = run("trace.csv", "--like", "listed.yaml", "--axis", "n", "-o", "out.yaml")
    assert status == 2 and "listed.yaml lists its buckets one by one" in err and not Path("out.yaml").exists()


def test_a_missing_matplotlib_is_said_before_any_work(run: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    status, _, err = run("none.csv", "--plot", "p.png")
    assert status == 2 and "--plot needs matplotlib; pip install matplotlib" in err


def test_a_picture_of_an_unknown_kind_is_an_error(run: Main) -> None:
    pytest.importorskip("matplotlib")
    status, _, err = run("trace.csv", "--plot", "p.xyz", "-o", "out.yaml")
    assert status == 2 and "p.xyz: cannot be drawn" in err
    assert not Path("p.xyz").exists() and not Path("out.yaml").exists()


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(document.ConfigError, match="cannot be written"):
        document.write(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


# -- ladders -----------------------------------------------------------------------------------------------------------


def test_the_ladders_are_those_of_the_engines_sources() -> None:
    """vllm-project/vllm@000fc94b vllm/config/vllm.py; sgl-project/sglang@019667ad
    python/sglang/srt/arg_groups/cuda_graph_hook.py; NVIDIA/TensorRT-LLM@14e6b10f
    docs/source/features/torch_compile_and_piecewise_cuda_graph.md and @fcd3f316 tensorrt_llm/llmapi/llm_args.py.
    """
    assert list(ladders.vllm().sizes) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert len(ladders.vllm().sizes) == 51 and len(ladders.vllm(1024).sizes) == 83 and ladders.vllm(3).sizes == (1, 2)
    prefill = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    prefill += [*range(1280, 4097, 256), *range(4608, 8193, 512)]
    assert list(ladders.sglang().sizes) == prefill
    counts = {2048: 42, 4096: 50, 8192: 58, 16384: 74}
    assert {size: len(ladders.sglang(size).sizes) for size in counts} == counts
    assert list(ladders.sglang_decode().sizes) == [1, 2, 4, 8, 12, *range(16, 257, 8)]
    assert ladders.sglang_decode(300).sizes[-3:] == (272, 288, 300) and ladders.sglang_decode(576).sizes[-2:] == (
        544,
        576,
    )
    assert list(ladders.tensorrt_llm().sizes) == [2**i for i in range(8)] + list(range(256, 3073, 256))
    assert list(ladders.tensorrt_llm_decode().sizes) == [1, 2, 4, *range(8, 129, 8)]
    assert ladders.powers_of_two(1000).sizes == (16, 32, 64, 128, 256, 512, 1000)
    assert ladders.powers_of_two(5).sizes == (5,)
    for peer in (*ladders.peers(100, 16), *ladders.peers(100, 1, decode=True)):
        assert peer.sizes[-1] >= 100 > (peer.sizes[-2]) and peer.source and list(peer.sizes) == sorted(set(peer.sizes))
    assert ladders.vllm().upto(10_000).sizes == ladders.vllm().sizes
    assert len(ladders.grid_of_powers((32, 512), (1, 16))) == 36


def random_demand(seed: int, largest: int) -> demand.Demand:
    random = np.random.default_rng(seed)
    lengths = np.unique(np.minimum(largest, random.lognormal(6, 1.2, 700).astype(np.int64) + 1))
    return demand.Demand(lengths[:, None], random.integers(1, 9, len(lengths)))


def test_a_plan_of_the_same_size_never_wastes_more_than_a_ladder() -> None:
    for seed in range(5):
        asked = random_demand(seed, 20_000)
        for align in (1, 16, 64):
            for each in against(ladders.peers(int(-(-asked.lengths[-1] // 64) * 64), 16), asked, costs.linear(), align):
                assert each.planned is not None and each.as_good is not None and each.planned.covered == 1.0
                assert each.planned.waste <= each.figures.waste + 1e-12 and each.planned.buckets <= each.figures.buckets
                assert each.as_good <= each.figures.buckets
                part = asked.up_to(each.ladder.sizes[-1])
                assert each.figures.covered == pytest.approx(part.launches / asked.launches)
                assert each.figures.waste == pytest.approx(padding_by_hand(each.ladder.sizes, part))


def padding_by_hand(sizes: tuple[int, ...], asked: demand.Demand) -> float:
    rows = zip(asked.lengths.tolist(), asked.counts.tolist(), strict=True)
    padded = sum(min(size for size in sizes if size >= length) * count for length, count in rows)
    return float(padded / asked.work - 1)


def test_a_ladder_that_covers_nothing_is_not_compared() -> None:
    asked = demand.Demand(np.array([[900]]), np.array([3]))
    (each,) = against([ladders.vllm()], asked, costs.linear(), 16)
    assert each.figures.covered == 0.0 and each.planned is None and each.as_good is None


def test_the_rows_of_a_plan_are_the_figures_of_its_buckets() -> None:
    asked = random_demand(9, 3000)
    made = plan(asked, costs.linear(), Limits(buckets=7), (16,))
    assert [row.figures.buckets for row in made.rows][:6] == [1, 2, 3, 4, 6, 7] and made.gap == 0.0
    assert made.figures == measure(made.buckets, asked, costs.linear()) == made.rows[5].figures
    assert made.figures.waste == pytest.approx(padding_by_hand(tuple(size for (size,) in made.buckets), asked))
    wastes = [row.figures.waste for row in made.rows]
    assert wastes == sorted(wastes, reverse=True)
    assert made.rows[5].total == pytest.approx(1000 * made.figures.cost)
    even = ladder(1632, 3008, 1.01, 16)  # some other sizes
    assert measure([[size] for size in even[-7:]], asked, costs.linear()).waste > made.figures.waste


# -- the study of real traces ------------------------------------------------------------------------------------------


def test_the_documents_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("plan_traces", ROOT / "scripts" / "plan_traces.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.DOCUMENT.read_text(encoding="utf-8")
    results = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    assert script.with_tables(text, results) == text, "run scripts/plan_traces.py --tables"
    assert len(results["traces"]) == 8 and all(row["licence"] and row["source"] for row in results["traces"])
