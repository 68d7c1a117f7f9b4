"""Counters and their files: every call's sizes are counted once, memory is bounded, and a file says what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketgraph import stats as module
from bucketgraph.config import load, parse
from bucketgraph.errors import ConfigError, NoBucketError
from bucketgraph.manager import BucketManager
from bucketgraph.planner import traces
from bucketgraph.saved import Saved
from bucketgraph.stats import Recorder, Stats


def manager(fn: Any = lambda x: {"y": x * 2}, **changed: Any) -> BucketManager:
    """`x [batch, tokens]` in and `y` of its shape out, warm."""
    base: dict[str, Any] = {
        "version": 1,
        "name": "toy",
        "axes": {"batch": [1, 4], "tokens": [4, 8]},
        "inputs": {"x": {"shape": ["batch", "tokens"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", "tokens"]}},
    }
    made = BucketManager(fn, parse({**base, **changed}), device="cpu")
    made.warmup()
    return made


def run(made: BucketManager, *sizes: tuple[int, int]) -> None:
    for batch, tokens in sizes:
        made(x=torch.ones(batch, tokens))


def adds_up(stats: Stats) -> bool:
    return sum(stats.sizes.values()) + stats.other_sizes == stats.calls == sum(stats.outcomes.values())


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_replayed_and_eager_calls_are_counted_at_the_sizes_they_asked_for() -> None:
    made = manager()
    run(made, (1, 3), (1, 3), (3, 8), (1, 9))
    stats = made.stats()
    assert stats.outcomes == {"replayed": 3, "eager": 1} and adds_up(stats)
    assert stats.sizes == {(1, 3): 2, (3, 8): 1, (1, 9): 1}
    assert stats.as_dict()["sizes"] == {"batch,tokens": {"1,3": 2, "1,9": 1, "3,8": 1}}
    assert stats.reasons == {"eager:over_largest": "tokens 9 is over the largest bucket's 8"}


def test_a_split_call_is_one_call_at_its_whole_size() -> None:
    made = manager(overflow="split")
    run(made, (9, 8))
    stats = made.stats()
    assert stats.sizes == {(9, 8): 1} and stats.outcomes == {"split": 1} and adds_up(stats)
    assert sum(row.hits for row in stats.buckets) == 3


def test_refused_and_raised_calls_are_counted_too() -> None:
    made = manager(overflow="error")
    for _ in range(2):
        with pytest.raises(NoBucketError):
            run(made, (5, 8))
    assert made.stats().sizes == {(5, 8): 2} and adds_up(made.stats())

    def fails(x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.shape[1] > 8:
            raise ValueError("too long")
        return {"y": x}

    made = manager(fails)
    with pytest.raises(ValueError, match="too long"):
        run(made, (2, 9))
    assert made.stats().sizes == {(2, 9): 1} and made.stats().outcomes == {"raised": 1}


def test_each_part_of_a_batch_is_one_call() -> None:
    made = manager(overflow="split")
    made.run_batch([{"x": torch.ones(n)} for n in (3, 4, 5, 6, 7)])
    assert made.stats().sizes == {(4, 6): 1, (1, 7): 1} and adds_up(made.stats())


def test_only_the_work_axes_are_in_the_sizes() -> None:
    made = manager(work=["tokens"])
    run(made, (1, 3), (3, 3), (1, 8))
    assert made.stats().sizes == {(3,): 2, (8,): 1}
    assert made.stats().as_dict()["sizes"] == {"tokens": {"3": 2, "8": 1}} and adds_up(made.stats())


def test_memory_is_bounded_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIZES", 3)
    recorder = Recorder("toy", parse(manager().spec.model_dump(exclude_unset=True)))
    for size in (1, 2, 3, 4, 5, 4, 1):
        recorder.asked((1, size))
        recorder.call("replayed")
    stats = recorder.snapshot({}, [])
    assert stats.sizes == {(1, 1): 2, (1, 2): 1, (1, 3): 1} and stats.other_sizes == 3 and adds_up(stats)


def test_warm_ups_facts_stand_beside_each_bucket() -> None:
    def fails(x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.shape[1] in (7, 8):
            raise ValueError("no")
        return {"y": x}

    made = manager(fails)
    rows = {row.bucket: row for row in made.stats().buckets}
    assert rows["batch=4 tokens=4"].sizes == {"batch": 4, "tokens": 4} and rows["batch=4 tokens=4"].seconds > 0
    assert rows["batch=4 tokens=4"].error is None and rows["batch=4 tokens=4"].replay_ms
    assert "ValueError: no" in (rows["batch=4 tokens=8"].error or "") and rows["batch=4 tokens=8"].executable == "eager"
    assert rows["batch=4 tokens=8"].replay_ms is None
    lazy = manager(warmup={"lazy": True})
    assert {(row.executable, row.seconds) for row in lazy.stats().buckets} == {("none", 0.0)}


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_holds_the_counters_and_the_set(tmp_path: Path) -> None:
    made = manager(overflow="split", outputs_are={"ring": 3})
    run(made, (1, 3), (9, 8), (4, 4))
    made.save_stats(tmp_path / "s.json")
    saved = Saved.load(tmp_path / "s.json")
    assert (
        saved.phases == {"": made.stats()} and saved.title == "toy" and [*tmp_path.iterdir()] == [tmp_path / "s.json"]
    )
    assert Stats.load(tmp_path / "s.json") == made.stats()
    (tmp_path / "set.yaml").write_text(saved.set_text or "")
    assert load(tmp_path / "set.yaml").model_dump() == made.spec.model_dump()


def test_stats_alone_are_saved_without_a_set(tmp_path: Path) -> None:
    stats = manager().stats()
    stats.save(tmp_path / "s.json")
    assert Stats.load(tmp_path / "s.json") == stats and Saved.load(tmp_path / "s.json").set_text is None


def test_padding_that_json_cannot_say_is_kept(tmp_path: Path) -> None:
    made = manager(inputs={"x": {"shape": ["batch", "tokens"], "dtype": "float32", "pad": float("-inf")}})
    made.save_stats(tmp_path / "s.json")
    assert "-.inf" in (Saved.load(tmp_path / "s.json").set_text or "")
    json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail)


def test_the_planner_reads_the_file(tmp_path: Path) -> None:
    made = manager()
    run(made, (1, 3), (1, 3), (3, 8))
    made.save_stats(tmp_path / "s.json")
    trace = traces.read([tmp_path / "s.json"], ["batch", "tokens"])
    assert trace.sizes.tolist() == [[1, 3], [3, 8]] and trace.counts is not None and trace.counts.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("", "is empty"),
        ("{", "not JSON"),
        ("[1]", "not saved statistics"),
        ('{"sizes": {"tokens": {"3": 1}}}', "not saved statistics"),
        ({"version": 2}, "an unknown version of statistics: given 2, expected 1"),
        ({"title": 3}, "damaged statistics: title"),
        ({"set": {}}, "damaged statistics: set"),
        ({"phases": []}, "damaged statistics: phases"),
        ({"phases": ["prefill"]}, "damaged statistics: prefill"),
        ({"calls": -1}, "damaged statistics: calls"),
        ({"calls": 1.5}, "damaged statistics: calls"),
        ({"outcomes": {"eager": True}}, "damaged statistics: outcomes.eager"),
        ({"buckets": []}, "damaged statistics: axes"),
        ({"axes": ["tokens"], "work": ["tokens"]}, "damaged statistics: buckets.sizes"),
        ({"work": ["n"]}, "damaged statistics: axes"),
        ({"sizes": {"batch,tokens": {"1,x": 1}}}, "damaged statistics: sizes: given '1,x'"),
        ({"sizes": {"batch,tokens": {"1": 1}}}, "damaged statistics: sizes: given 1, expected 2 for each call"),
        ({"sizes": {"batch,tokens": {"1,0": 1}}}, "damaged statistics: sizes"),
        ({"sizes": {"batch,tokens": {"1,1": "many"}}}, "damaged statistics: sizes"),
        ({"sizes": 3}, "damaged statistics: sizes"),
    ],
)
def test_a_file_that_is_no_statistics_is_one_error(tmp_path: Path, change: Any, says: str) -> None:
    path = tmp_path / "s.json"
    manager().save_stats(path)
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"^s\.json: ") as error:
        Saved.load(path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_and_one_of_several_phases_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Saved.load(tmp_path / "none.json")
    stats = manager().stats()
    Saved("llm", {"prefill": stats, "decode": stats}).save(tmp_path / "s.json")
    with pytest.raises(ConfigError, match="has several phases: given prefill, decode"):
        Stats.load(tmp_path / "s.json")
