"""`bucketgraph report`: numbers that were checked by hand, files that load, one-line errors with nothing written."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_cases import tiny_llm

import bucketgraph
from bucketgraph import SamplingParams
from bucketgraph.cli import main
from bucketgraph.config import load, parse
from bucketgraph.errors import ConfigError
from bucketgraph.manager import BucketManager
from bucketgraph.reporting.build import Report, report
from bucketgraph.saved import Saved
from bucketgraph.stats import BucketStats, Stats

HOSTILE = "<script>alert('x')</script>\"&\x1b[31m\ud800"


def rows(sizes: dict[int, tuple[int, int]], **more: Any) -> tuple[BucketStats, ...]:
    """Buckets of one axis: size to hits and real work."""
    return tuple(
        BucketStats(f"tokens={size}", "cudagraph", hits, real, hits * size, {"tokens": size}, **more)
        for size, (hits, real) in sizes.items()
    )


def made_up(asked: dict[int, int], buckets: tuple[BucketStats, ...], **more: Any) -> Saved:
    """Statistics of one axis, `tokens`, and a set that has these buckets."""
    calls = sum(asked.values())
    fields = {"outcomes": {"replayed": calls}, "fallbacks": {}, "buckets": buckets, "sizes": {}, **more}
    fields["sizes"] = {(size,): count for size, count in asked.items()}
    stats = Stats("toy", calls, axes=("tokens",), work=("tokens",), **fields)
    spec = parse(
        {
            "version": 1,
            "name": "toy",
            "axes": {"tokens": [row.sizes["tokens"] for row in buckets]},
            "inputs": {"x": {"shape": ["tokens"], "dtype": "float32"}},
            "outputs": {"y": {"shape": ["tokens"]}},
        }
    )
    return Saved.of({"": stats}, spec)


# Ten calls of 10 tokens and two of 60 in buckets of 16, 32 and 64: 10 x 16 + 2 x 64 = 288 padded, 220 real.
BY_HAND = made_up({10: 10, 60: 2}, rows({16: (10, 100), 32: (0, 0), 64: (2, 120)}, mib=2.0, seconds=0.5))


def spread(seed: int, name: str = "s") -> Saved:
    """Some hundred calls over the buckets of 128, 256, 384 and 512."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4, 0.9, 400).astype(int), 1, 512)
    asked = {int(size): int(count) for size, count in zip(*np.unique(lengths, return_counts=True), strict=True)}
    edges = (128, 256, 384, 512)
    real = {edge: [n for n in lengths.tolist() if edge - 128 < n <= edge] for edge in edges}
    return made_up(asked, rows({edge: (len(part), sum(part)) for edge, part in real.items()}))


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_a_hand_count() -> None:
    made = report(BY_HAND)
    (phase,) = made.as_dict()["phases"]
    assert phase["waste"] == pytest.approx(288 / 220 - 1) and phase["hits"] == 12 and phase["mib"] == 6.0
    assert phase["dead"] == ["tokens=32"] and phase["dead_mib"] == 2.0
    assert [row["state"] for row in phase["buckets"]] == ["in use", "never hit", "in use"]
    assert [row["share"] for row in phase["buckets"]] == pytest.approx([10 / 12, 0, 2 / 12])
    assert [row["waste"] for row in phase["buckets"]] == pytest.approx([0.6, 0.0, 8 / 120])
    # Multiples of 16: 10 needs 16 and 60 needs 64, so two buckets do as well as three.
    assert phase["proposal"]["buckets"] == [[16], [64]] and phase["proposal"]["saved"] == 0.0
    assert not phase["proposal"]["worth"] and phase["proposal"]["exact"]
    text = made.table()
    assert "waste 30.9 %" in text and "dead: 1 of 3 buckets were never hit, holding 2.0 MiB" in text
    assert "no gain but 1 bucket less" in text


def test_what_a_proposal_saves_is_counted_on_the_calls_that_came() -> None:
    # 90 calls of 40 in the bucket of 128, 10 of 120; two buckets: 48 and 128 instead of 64 and 128.
    made = report(made_up({40: 90, 120: 10}, rows({64: (90, 3600), 128: (10, 1200)})))
    proposal = made.phases[0].proposal
    assert proposal is not None and proposal.buckets == ((48,), (128,)) and proposal.align == (16,)
    assert proposal.now.padding == pytest.approx((90 * 64 + 1280) / 4800 - 1) == pytest.approx(made.phases[0].waste)
    assert proposal.then.padding == pytest.approx((90 * 48 + 1280) / 4800 - 1)
    assert proposal.saved == pytest.approx(1 - (90 * 48 + 1280) / (90 * 64 + 1280)) and proposal.worth


def test_measured_times_decide_where_every_bucket_has_one() -> None:
    asked = {40: 90, 120: 10}
    timed = [
        dataclasses.replace(row, replay_ms=1.0 + row.sizes["tokens"] / 64)
        for row in rows({64: (90, 3600), 128: (10, 1200)})
    ]
    proposal = report(made_up(asked, tuple(timed))).phases[0].proposal
    assert proposal is not None and proposal.unit == "ms"
    assert proposal.now.cost == pytest.approx((90 * 2 + 10 * 3) / 100)  # below the smallest size the curve is flat
    assert proposal.then.cost <= proposal.now.cost
    timed[0] = dataclasses.replace(timed[0], replay_ms=None)
    made = report(made_up(asked, tuple(timed))).phases[0]
    assert made.proposal is not None and made.proposal.unit == "tokens"
    assert any("1 of 2 buckets have a time" in note for note in made.notes)


def test_failed_buckets_are_not_dead_and_those_of_a_lazy_set_are_not_captured() -> None:
    failed, lazy = rows({16: (0, 0)}, error="capture: no")[0], rows({32: (0, 0)})[0]
    lazy = dataclasses.replace(lazy, executable="none")
    (phase,) = report(made_up({60: 1}, (failed, lazy, *rows({64: (1, 60)})))).phases
    assert [row["state"] for row in phase.as_dict()["buckets"]] == ["failed", "not captured", "in use"]
    assert phase.dead == ()


def test_ways_out_have_their_reasons() -> None:
    why = "tokens 99 is over the largest bucket's 64"
    more = {"fallbacks": {"eager:over_largest": 3}, "reasons": {"eager:over_largest": why}}
    made = report(made_up({10: 1, 99: 3}, rows({16: (1, 10), 64: (0, 0)}), **more))
    assert made.as_dict()["phases"][0]["fallbacks"] == [{"way": "eager:over_largest", "count": 3, "reason": why}]
    assert why in made.table() and "Ways out by reason" in made.html()
    assert any(note.startswith("3 calls are over the largest bucket") for note in made.phases[0].notes)
    assert made.phases[0].proposal is not None and made.phases[0].proposal.buckets[-1] == (64,)


def test_no_calls_and_no_fitting_calls_propose_nothing() -> None:
    for asked, says in (({}, "no calls were counted"), ({99: 3}, "no call's sizes fit the largest bucket")):
        made = report(made_up(asked, rows({16: (0, 0), 64: (0, 0)})))
        assert made.phases[0].proposal is None and any(says in note for note in made.phases[0].notes)
        assert "0.0 %" in made.table() and "<svg" in made.html()
        with pytest.raises(ConfigError, match="no sizes to propose"):
            made.proposed_set("x")


def test_calls_of_too_many_sizes_are_said() -> None:
    made = report(made_up({10: 1}, rows({16: (1, 10)}), other_sizes=7))
    assert any(note.startswith("7 calls had sizes beyond the first 65,536") for note in made.phases[0].notes)


# -- drift -------------------------------------------------------------------------------------------------------------


def drift(tmp_path: Path, trace: Saved, came: Saved) -> Any:
    trace.save(tmp_path / "trace.json")
    found = report(came, tmp_path / "trace.json").phases[0].drift
    assert found is not None
    return found


def test_the_drift_of_equal_traffic_is_nothing(tmp_path: Path) -> None:
    found = drift(tmp_path, BY_HAND, BY_HAND)
    assert found.total_variation == found.kolmogorov_smirnov == 0.0 and found.planned_waste == found.served_waste
    # Twice as many calls in the same shares are the same distribution.
    twice = made_up({10: 20, 60: 4}, BY_HAND.phases[""].buckets)
    found = drift(tmp_path, twice, BY_HAND)
    assert found.total_variation == found.kolmogorov_smirnov == 0.0


def test_the_drift_of_disjoint_traffic_is_all(tmp_path: Path) -> None:
    buckets = rows({16: (1, 10), 32: (0, 0), 64: (0, 0)})
    for other in ({60: 5}, {20: 1, 40: 1}, {1000: 3}):
        found = drift(tmp_path, made_up(other, buckets), made_up({10: 12}, buckets))
        assert found.total_variation == found.kolmogorov_smirnov == 1.0


def test_the_drift_in_between_is_that_of_a_hand_count(tmp_path: Path) -> None:
    buckets = rows({16: (1, 10), 64: (0, 0)})
    # Shares of the buckets: 1/2, 1/2 and 3/4, 1/4. Over the sizes the most is at 10: 1/2 against 1/4.
    found = drift(tmp_path, made_up({10: 2, 60: 2}, buckets), made_up({10: 1, 16: 2, 60: 1}, buckets))
    assert found.total_variation == pytest.approx(0.25) and found.kolmogorov_smirnov == pytest.approx(0.25)
    assert found.planned_waste == pytest.approx((2 * 16 + 2 * 64) / 140 - 1)
    assert found.served_waste == pytest.approx((3 * 16 + 64) / 102 - 1)
    # r = 5/8, 3/8 and n = m = 4: each bucket's part is sqrt(2/pi * 15/64 * 1/2).
    assert found.by_chance == pytest.approx((2 / np.pi * 15 / 64 / 2) ** 0.5)


def test_what_no_bucket_covers_is_drift_too(tmp_path: Path) -> None:
    buckets = rows({16: (1, 10)})
    found = drift(tmp_path, made_up({10: 4}, buckets), made_up({10: 3, 99: 1}, buckets))
    assert found.total_variation == pytest.approx(0.25)


def test_samples_of_one_distribution_drift_about_as_chance_says(tmp_path: Path) -> None:
    ratios = []
    for seed in range(20):
        found = drift(tmp_path, spread(2 * seed), spread(2 * seed + 1))
        ratios.append(found.total_variation / found.by_chance)
    assert 0.7 < sum(ratios) / len(ratios) < 1.3


# -- proposals ---------------------------------------------------------------------------------------------------------

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """`main` in a folder with statistics: status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    spread(1).save("s.json")
    Path("trace.csv").write_text("input_tokens,batch\n" + "".join(f"{n},{n % 3 + 1}\n" for n in range(1, 300)))

    def call(*argv: str) -> tuple[int, str, str]:
        status = main(list(argv))
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_a_proposal_is_the_planners_own(run: Main) -> None:
    status, out, err = run("report", "s.json", "--propose", "new.yaml")
    assert status == 0 and err == "" and "proposed: 4 buckets of tokens" in out
    Path("like.yaml").write_text(Saved.load("s.json").set_text or "")
    planned = ("plan", "s.json", "--buckets", "4", "--largest", "512", "--like", "like.yaml", "-o", "planned.yaml")
    assert run(*planned)[0] == 0
    new = load("new.yaml")
    assert new.axes == load("planned.yaml").axes and new.name == "new" and new.axes["tokens"][-1] == 512
    assert "# Proposed by bucketgraph" in Path("new.yaml").read_text()


def untimed(*managers: BucketManager) -> None:
    """Forget how long replays took: of small tensors the clock shows noise, and sizes would be proposed by it."""
    for manager in managers:
        for captured in manager.captured.values():
            captured.replay_ms = None


def test_a_proposal_of_two_axes_is_a_list_of_buckets(tmp_path: Path) -> None:
    spec = {
        "version": 1,
        "name": "toy",
        "axes": {"batch": [1, 4], "tokens": [4, 8]},
        "inputs": {"x": {"shape": ["batch", "tokens"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", "tokens"]}},
        "overflow": "split",
    }
    manager = BucketManager(lambda x: {"y": x}, parse(spec), device="cpu")
    manager.warmup()
    untimed(manager)
    for batch, tokens in [(2, 4)] * 9 + [(3, 8)] * 3 + [(9, 2)]:
        manager(x=torch.ones(batch, tokens))
    made = bucketgraph.report(manager)
    (phase,) = made.phases
    assert phase.proposal is not None and phase.proposal.axes == ("batch", "tokens")
    assert phase.proposal.buckets[-1] == (4, 8) and (2, 4) in phase.proposal.buckets
    assert phase.proposal.then.cost < phase.proposal.now.cost
    (tmp_path / "new.yaml").write_text(made.proposed_set("new"))
    new = load(tmp_path / "new.yaml")
    assert new.buckets == phase.proposal.buckets and new.overflow == "split" and new.inputs == manager.spec.inputs
    manager.save_stats(tmp_path / "s.json")
    again = bucketgraph.report(tmp_path / "s.json", tmp_path / "s.json")
    assert again.phases[0].drift is not None and again.phases[0].drift.total_variation == 0.0
    assert again.phases[0].drift.kolmogorov_smirnov is None and again.phases[0].stats == phase.stats


def test_a_set_that_lists_its_buckets_is_not_changed_by_half() -> None:
    saved = made_up({10: 4}, rows({16: (4, 40)}))
    listed = (saved.set_text or "").replace("inputs:", "buckets: [[16]]\ninputs:")
    assert "tokens: [16]" in report(dataclasses.replace(saved, set_text=listed)).proposed_set("x")
    with pytest.raises(ConfigError, match="name no bucket set"):
        report(dataclasses.replace(saved, set_text=None)).proposed_set("x")


# -- a language model --------------------------------------------------------------------------------------------------


def test_a_language_models_phases_are_saved_reported_and_planned(run: Main) -> None:
    llm = tiny_llm()
    untimed(llm._runner.prefill_manager, llm._runner.decode_manager)
    llm.generate([[1, 2, 3], [4] * 20, [5] * 30], SamplingParams(temperature=0.0, max_tokens=5))
    llm.save_stats("llm.json")
    status, out, _ = run("report", "llm.json", "--json", "r.json", "--html", "r.html", "--propose", "new.yaml")
    assert status == 0 and "small: prefill, 1 calls" in out and "small: decode, 4 calls" in out
    prefill, decode = json.loads(Path("r.json").read_text())["phases"]
    assert prefill["sizes"] == {"tokens": {"53": 1}} and decode["sizes"] == {"batch": {"3": 4}}
    assert prefill["dead"] == ["tokens=16 requests=4"] and decode["dead"] == ["batch=1"]
    assert decode["waste"] == pytest.approx(1 / 3) and decode["proposal"]["buckets"] == [[3], [4]]
    assert decode["proposal"]["then"]["padding"] == 0.0
    new = load("new.yaml")
    assert new.phases is not None and new.phases["decode"].axes == {"batch": (3, 4)}
    assert new.phases["prefill"].axes == {"tokens": (64,), "requests": (4,)} and new.kv_cache == llm.bucket_set.kv_cache
    assert "decode</h2>" in Path("r.html").read_text()
    tiny_llm(new).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert run("plan", "llm.json", "--column", "decode.batch", "--axis", "decode.batch", "-o", "p.yaml")[0] == 0
    # A trace of prompts is prefill's; earlier statistics are both phases'.
    live = bucketgraph.report(llm, "trace.csv")
    assert live.phases[0].drift is not None and live.phases[1].drift is None
    both = bucketgraph.report(llm, "llm.json")
    assert [phase.drift is not None and phase.drift.total_variation for phase in both.phases] == [0.0, 0.0]


def test_a_long_prompt_of_the_trace_is_cut_as_the_service_cuts_it(tmp_path: Path) -> None:
    llm = tiny_llm()
    llm.generate([[1] * 130], SamplingParams(temperature=0.0, max_tokens=1))
    assert llm.stats()["prefill"].sizes == {(64,): 2, (2,): 1}
    (tmp_path / "t.csv").write_text("tokens\n130\n")
    found = bucketgraph.report(llm, tmp_path / "t.csv").phases[0].drift
    assert found is not None and found.total_variation == found.kolmogorov_smirnov == 0.0


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("self_check", [True, False])
def test_each_bucket_has_the_time_of_its_replay_in_table_json_and_page(kind: str, self_check: bool) -> None:
    def fails(x: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(x) == 16:
            raise ValueError("no")
        return {"y": x + 1}

    spec = {"version": 1, "name": "toy", "axes": {"batch": [4, 8, 16]}, "executable": kind}
    spec |= {"inputs": {"x": {"shape": ["batch", 3], "dtype": "float32"}}, "outputs": {"y": {"shape": ["batch", 3]}}}
    manager = BucketManager(fails, parse({**spec, "warmup": {"self_check": self_check}}), device="cpu")
    warm = {row.bucket: row.replay_ms for row in manager.warmup().buckets}
    assert warm["batch=16"] is None and all(0 < (warm[f"batch={n}"] or 0) < 1000 for n in (4, 8))
    made = bucketgraph.report(manager).as_dict()["phases"][0]
    assert {row["bucket"]: row["replay_ms"] for row in made["buckets"]} == warm
    for captured in manager.captured.values():
        if captured.replay_ms is not None:
            captured.replay_ms = 10.0 / captured.bucket["batch"]
    shown = bucketgraph.report(manager)
    for text in (shown.table(), shown.html()):
        assert "2.500" in text and "1.250" in text and "2 of 3 buckets have a time" in text


def test_json_says_what_the_report_says(run: Main) -> None:
    made: Report = report("s.json", "trace.csv", ["input_tokens"])
    assert json.loads(made.json()) == made.as_dict() and made.as_dict()["phases"][0]["drift"]["requests"] == 299
    assert run("report", "s.json", "--trace", "trace.csv", "--json", "r.json")[0] == 0
    assert json.loads(Path("r.json").read_text()) == made.as_dict()


def test_a_hostile_name_is_text_and_no_more(tmp_path: Path) -> None:
    row = BucketStats(HOSTILE, HOSTILE, 1, 10, 16, {"tokens": 16}, variant=HOSTILE)
    more = {"fallbacks": {HOSTILE: 2}, "reasons": {HOSTILE: HOSTILE}, "outcomes": {HOSTILE: 1}}
    saved = made_up({10: 1}, (row,), **more)
    saved = dataclasses.replace(saved, title=HOSTILE, phases={HOSTILE: saved.phases[""]})
    made = report(saved)
    made.save_html(tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in html and "\x1b" not in html and html.count("&lt;script&gt;") >= 10
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,)""", html) and "url(" not in html
    assert "\x1b" not in made.table() and "<script>alert" in made.table()
    assert json.loads(made.json())["name"] == HOSTILE


def test_many_buckets_are_drawn_in_part_and_listed_in_full() -> None:
    made = report(made_up({5: 3}, rows({size: (size == 5 and 3, size == 5 and 15) for size in range(1, 101)})))
    html = made.html()
    assert "The 60 most used of 100." in html and html.count("<tr") == 101 and "tokens=5:" in html


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("none.json",), "none.json: cannot be read"),
        (("trace.csv",), "trace.csv: not saved statistics"),
        (("empty.json",), "empty.json: is empty"),
        (("old.json",), "an unknown version of statistics: given 99"),
        (("s.json", "--trace", "none.csv"), "none.csv: cannot be read"),
        (("s.json", "--trace", "other.json"), "no sizes of the set's axes: given batch, expected tokens"),
        (("s.json", "--trace", "two.csv"), "no column is known as the lengths"),
        (("s.json", "--trace", "trace.csv", "--column", "what"), "no column 'what'"),
        (("s.json", "--trace", "trace.csv", "--column", "batch,input_tokens"), "not the columns of the set's axes"),
        (("s.json", "--column", "batch"), "--column belongs to --trace"),
        (("s.json", "--json", "no/such.json"), "no such folder"),
        (("s.json", "--json", "."), "is a folder"),
        (("s.json", "--json", "s.json"), "a file is named twice"),
        (("s.json", "--propose", "out.html"), "a file is named twice"),
        (("idle.json", "--propose", "p.yaml"), "there are no sizes to propose"),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(run: Main, argv: tuple[str, ...], says: str) -> None:
    Path("empty.json").write_text(" \n")
    Path("old.json").write_text(json.dumps({**json.loads(Path("s.json").read_text()), "version": 99}))
    Path("other.json").write_text('{"sizes": {"batch": {"3": 1}}}')
    Path("two.csv").write_text("a,b\n1,2\n")
    made_up({}, rows({16: (0, 0)})).save("idle.json")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    status, out, err = run("report", *argv, "--html", "out.html")
    assert status == 2 and out == "" and err.startswith("bucketgraph: ") and err.count("\n") == 1
    assert says in err and {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_live_report_needs_something_that_counts() -> None:
    with pytest.raises(ConfigError, match="nothing to report on: given int"):
        bucketgraph.report(3)  # type: ignore[arg-type]


def test_the_function_stays_a_function_when_its_package_is_imported() -> None:
    import bucketgraph.reporting.command

    assert callable(bucketgraph.report) and bucketgraph.reporting.command.run
