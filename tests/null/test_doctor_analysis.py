"""What the doctor makes of a profiler's events, and what it predicts: on made-up events and times, without a GPU."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from null.doctor_double import COSTS, Gpu, call_of, event, launch

from bucketgraph.doctor import advise, blockers
from bucketgraph.doctor.launches import analyse, busy, gaps, overlapping, typical
from bucketgraph.doctor.places import Place
from bucketgraph.doctor.predict import Times, predict
from bucketgraph.doctor.record import CaptureResult, Finding
from bucketgraph.doctor.repeats import Repeat, repeats
from bucketgraph.doctor.timeline import timeline
from bucketgraph.doctor.trace import MARK, Call, Work, parse

# -- events to records -------------------------------------------------------------------------------------------------


def test_work_belongs_to_the_call_that_launched_it_however_late_it_runs() -> None:
    events = [
        event("user_annotation", MARK, 100.0, 20.0),
        event("user_annotation", MARK, 200.0, 20.0),
        event("user_annotation", f"{MARK}.settle", 0.0, 20.0),
        *launch(5.0, 1, "settling", 6.0, 1.0),
        *launch(110.0, 2, "first", 250.0, 1.0),  # runs after the second call has begun
        *launch(210.0, 3, "second", 260.0, 1.0),
        event("cpu_op", "aten::add", 110.0, 9.0),
        event("gpu_user_annotation", MARK, 0.0, 1000.0),
        {"ph": "M", "name": "process_name"},
    ]
    assert [[item.name for item in call.work] for call in parse(events)] == [["first"], ["second"]]
    assert [len(call.api) for call in parse(events)] == [1, 1]


def test_a_graph_launch_holds_all_of_its_kernels() -> None:
    events = [
        event("user_annotation", MARK, 0.0, 50.0),
        event("cuda_runtime", "cudaGraphLaunch", 1.0, 4.0, correlation=9),
    ]
    events += [event("kernel", f"k{n}", 10.0 + n, 1.0, correlation=9, stream=7) for n in range(5)]
    (call,) = parse(events)
    assert len(call.work) == 5 and len(call.api) == 1 and call.api[0].is_launch


def test_figures_of_a_call_are_those_of_a_hand_count() -> None:
    events = call_of(["a", "b", "a", "b", "c"])
    events.append(event("cuda_runtime", "cudaStreamSynchronize", 1048.0, 1.5, correlation=50))
    events.append(event("cuda_runtime", "cudaMemcpyAsync", 1046.0, 1.0, correlation=51))
    pageable = "Memcpy DtoH (Device -> Pageable)"
    events.append(event("gpu_memcpy", pageable, 1050.0, 1.0, correlation=51, stream=7, bytes=4096))
    seen = analyse(parse(events), eager_ms=0.022)
    assert seen is not None
    assert (seen.launches, seen.nodes, seen.streams, seen.launch_us) == (5, 6, 1, 5.0)
    assert seen.busy_ms == pytest.approx(0.011) and seen.busy_share == pytest.approx(0.5)
    # Kernels run from 1004, 1014, ... for 2 us: four gaps of 8 us, and 4 us before the copy at 1050.
    assert seen.gaps is not None
    assert (seen.gaps.count, seen.gaps.p50, seen.gaps.p99, seen.gaps.total) == (5, 8.0, 8.0, 36.0)
    assert [(copied.name, copied.count, copied.bytes) for copied in seen.copies] == [(pageable, 1, 4096)]
    assert [(sync.name, sync.count) for sync in seen.syncs] == [("cudaStreamSynchronize", 1)]
    assert [(cost.name, cost.count, cost.total_us) for cost in seen.kernels[:2]] == [("a", 2, 4.0), ("b", 2, 4.0)]
    assert [(layer.launches, layer.times, layer.kernels) for layer in seen.layers] == [(2, 2, ("a", "b"))]
    assert seen.api[0].name == "cudaLaunchKernel" and seen.api[0].total_us == 25.0


def test_kernels_of_one_name_on_other_grids_are_no_repeat() -> None:
    events = call_of(["a", "a"])
    events[-1]["args"]["grid"] = [2, 1, 1]
    seen = analyse(parse(events))
    assert seen is not None and seen.layers == () and seen.busy_share is None


def test_what_overlaps_is_busy_once_and_leaves_no_gap() -> None:
    work = [
        Work(str(n), "kernel", start, end, n, n) for n, (start, end) in enumerate([(0, 10), (2, 5), (8, 12), (20, 21)])
    ]
    assert busy(work) == 13.0
    found = gaps(work)
    assert found is not None and (found.count, found.largest, found.total) == (3, 8.0, 8.0)


def test_only_kernels_that_start_early_in_their_own_stream_overlap() -> None:
    def share(*spans: tuple[int, int, int]) -> float:
        work = tuple(Work("k", "kernel", start, end, stream, 0) for stream, start, end in spans)
        return overlapping(Call(0.0, 9.0, (), work))

    assert share((7, 0, 4), (7, 4, 8), (7, 9, 12)) == 0.0, "one after the other"
    assert share((7, 0, 4), (8, 1, 5), (7, 5, 9)) == 0.0, "two streams"
    assert share((7, 0, 4), (7, 3, 8), (7, 7, 12), (7, 12, 13)) == 0.5 and share() == 0.0


def test_the_typical_call_is_the_one_of_median_gpu_time() -> None:
    parts = [call_of(["k"], start=1000.0 * n, us=us, first=100 * n) for n, us in enumerate((3.0, 1.0, 50.0), start=1)]
    call = typical(parse([item for part in parts for item in part]))
    assert call is not None and call.work[0].duration == 3.0


def test_a_call_that_launched_nothing_has_no_figures() -> None:
    assert analyse(parse([event("user_annotation", MARK, 0.0, 9.0)])) is None and analyse(()) is None


def test_a_timeline_of_thousands_of_launches_stays_a_small_picture() -> None:
    (call,) = parse(call_of([f"<k{n}>" for n in range(5000)]))
    made = timeline("call", call)
    assert made.count("<rect") < 2200 and len(made) < 600_000 and "<k0>" not in made and "&lt;k0&gt;" in made
    assert timeline("start", call, until=100.0).count("<rect") == 2 * 10


# -- repeats -----------------------------------------------------------------------------------------------------------


def test_layers_are_found_with_their_shortest_period() -> None:
    layer = ["norm", "qkv", "rope", "attend", "o", "norm", "up", "down"]
    assert repeats(["embed", *layer * 16, "norm", "head"])[0] == Repeat(1, 8, 16)
    assert repeats(["a"] * 7) == (Repeat(0, 1, 7),)
    assert repeats(["a", "b", "c"]) == repeats(["a"]) == repeats([]) == ()


def test_repeats_that_follow_each_other_are_both_named() -> None:
    assert repeats([0, *[1, 2, 3] * 10, 9, *[4, 5] * 6]) == (Repeat(1, 3, 10), Repeat(32, 2, 6))


@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_largest_repetition_is_found_as_by_trying_all(items: list[int]) -> None:
    size = len(items)
    best = 0
    for start in range(size):
        for period in range(1, (size - start) // 2 + 1):
            reach = start
            while reach + period < size and items[reach] == items[reach + period]:
                reach += 1
            times = (reach - start) // period + 1
            best = max(best, times * period if times > 1 else 0)
    found = repeats(items, most=100)
    assert max((each.end - each.start for each in found), default=0) == best
    for each in found:
        block = items[each.start : each.start + each.period]
        assert items[each.start : each.end] == block * each.count and each.count >= 2
    for one, two in pairwise(found):
        assert one.end <= two.start


def test_twenty_thousand_launches_are_no_effort() -> None:
    draw = random.Random(0)
    noise = [draw.randrange(50) for _ in range(4000)]
    (found, *_) = sorted(repeats([*noise, *list(range(100, 140)) * 400]), key=lambda each: each.start - each.end)
    assert (found.period, found.count) == (40, 400)


# -- predictions -------------------------------------------------------------------------------------------------------


def test_a_launch_bound_call_gains_what_the_queued_run_says() -> None:
    # 300 kernels of 2 us in the stream, each 1.1 us less in a graph: 600 - 330 us.
    made = predict(Times(3.0, 3.0, 0.6), 300, 0.4, COSTS)
    assert made is not None and made.method == "queued" and made.graph_ms == pytest.approx(0.27)
    assert made.gain == pytest.approx(3.0 / 0.27) and made.is_worth_it
    assert made.capture_ms == pytest.approx(3.0 + 0.5 + 3.0) and made.break_even == 4  # (6.5 + 3.0) / 2.73


def test_launches_that_overlap_save_nothing_in_a_graph() -> None:
    half, none = (predict(Times(3.0, 3.0, 0.6), 300, 0.4, COSTS, share) for share in (0.5, 1.0))
    assert half is not None and half.graph_ms == pytest.approx(0.6 - 150 * 1.1e-3)
    assert none is not None and none.graph_ms == pytest.approx(0.6)


def test_a_compute_bound_call_gains_nothing_worth_it() -> None:
    made = predict(Times(300.0, 8.0, 299.0), 300, 298.0, COSTS)
    assert made is not None and 1.0 < made.gain < 1.01 and not made.is_worth_it


def test_where_the_host_is_ahead_calls_in_a_row_are_the_gpus_own_time() -> None:
    made = predict(Times(110.0, 8.0, 100.0), 300, 99.0, COSTS)  # a single call runs at a higher clock
    assert made is not None and made.graph_ms == pytest.approx(110.0 - 300 * 0.3e-3) and not made.is_worth_it
    made = predict(Times(110.0, 60.0, 100.0), 300, 99.0, COSTS)
    assert made is not None and made.graph_ms == pytest.approx(100.0 - 300 * 0.3e-3)


def test_long_kernels_save_less_than_short_ones() -> None:
    assert [COSTS.saved_us(us) for us in (1.0, 2.0, 6.0, 10.0, 900.0)] == pytest.approx([1.1, 1.1, 0.7, 0.3, 0.3])


def test_a_call_that_waits_is_predicted_from_its_profile() -> None:
    made = predict(Times(5.0, 5.0, None), 100, 0.5, COSTS)
    assert made is not None and made.method == "profiled" and made.graph_ms == pytest.approx(0.5 - 100 * 0.2e-3)


def test_a_graph_is_no_faster_than_its_launch() -> None:
    made = predict(Times(0.05, 0.05, 0.002), 1, 0.001, COSTS)
    assert made is not None and made.graph_ms == pytest.approx(3.005e-3)


def test_a_capture_that_saves_nothing_never_pays() -> None:
    made = predict(Times(1.0, 1.0, 1.5), 10, 1.4, COSTS)
    assert made is not None and made.gain < 1 and made.break_even is None


def test_nothing_is_predicted_of_nothing() -> None:
    assert predict(Times(1.0, 1.0, None), 10, None, COSTS) is None
    assert predict(Times(1.0, 1.0, 0.5), 0, 0.0, COSTS) is None


# -- verdicts ----------------------------------------------------------------------------------------------------------

FAST = predict(Times(3.0, 3.0, 0.6), 300, 0.4, COSTS)
SLOW = predict(Times(300.0, 8.0, 299.0), 300, 298.0, COSTS)
WAIT = Finding("read", "blocks", ".item()")
COPY = Finding("upload", "blocks", "copy from unpinned host memory")


@pytest.mark.parametrize(
    ("findings", "prediction", "capture", "measured", "expected"),
    [
        ([], FAST, CaptureResult(graph_ms=0.3), 10.0, "launch-bound"),
        ([], FAST, None, None, "launch-bound"),
        ([], SLOW, CaptureResult(graph_ms=299.0), 1.003, "compute-bound"),
        ([], FAST, CaptureResult(graph_ms=2.99), 1.003, "compute-bound"),  # what was measured decides
        ([WAIT], FAST, CaptureResult(error="no"), None, "sync-bound"),
        ([WAIT], FAST, None, None, "sync-bound"),
        ([WAIT, COPY], FAST, CaptureResult(error="no"), None, "cannot be captured"),
        ([WAIT], SLOW, CaptureResult(error="no"), None, "cannot be captured"),
        ([], FAST, CaptureResult(error="RuntimeError: no"), None, "cannot be captured"),
        ([WAIT], None, None, None, "cannot be captured"),
        ([], None, None, None, "not timed"),
    ],
)
def test_the_verdict_follows_from_what_was_found(
    findings: list[Finding], prediction: Any, capture: Any, measured: float | None, expected: str
) -> None:
    verdict, text = advise.verdict(findings, prediction, capture, measured)
    assert verdict == expected and text.endswith(".")


def test_wrong_padding_is_in_every_verdict() -> None:
    wrong = Finding("mixes", "padding", "batch norm")
    for prediction in (FAST, SLOW, None):
        assert "Padding changes its results" in advise.verdict([wrong], prediction, None, None)[1]
    assert "Padding" not in advise.verdict([], FAST, None, None)[1]


# -- the whole, on a GPU as it could be --------------------------------------------------------------------------------


def test_the_prediction_stands_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    made = gpu.diagnose(monkeypatch)
    assert made.verdict == "launch-bound" and made.prediction is not None and made.prediction.method == "queued"
    assert gpu.asked == ["watch", "times", "calibrate", "record", "queued", "run", "_device_name"]
    # 242 kernels and a copy of 0.6 ms in all: each saves what lies between 1.1 us (of 2 us) and 0.3 us (of 10 us).
    assert made.prediction.graph_ms == pytest.approx(0.6 - 243 * COSTS.saved_us(600 / 243) / 1e3)
    assert made.measured_gain == pytest.approx(3.0 / 0.35)
    assert "times as fast as eager, measured" in made.summary and "predicted" in made.summary


def test_without_a_capture_the_prediction_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    made = gpu.diagnose(monkeypatch, with_capture=False)
    assert made.verdict == "launch-bound" and "run" not in gpu.asked and made.capture is made.measured_gain is None


def test_dependent_launches_are_seen_and_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Gpu(every=1.5).diagnose(monkeypatch)
    assert made.prediction is not None and made.prediction.graph_ms > 0.59


def test_a_call_that_waits_is_profiled_and_not_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = blockers.Watched(250, {"cuda"})
    watched.seen["read", "blocks", ".item()", None, ""] = 1
    gpu = Gpu(Times(3.0, 3.0, None), CaptureResult(error="RuntimeError: no"), watched=watched)
    made = gpu.diagnose(monkeypatch)
    assert made.verdict == "sync-bound" and ".item()" in made.summary and len(made.findings) == 1
    assert "queued" not in gpu.asked and made.prediction is not None and made.prediction.method == "profiled"


def test_a_capture_that_fails_at_a_line_nobody_named_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("/x/model.py", 7, "forward", "y = strange(x)")
    made = Gpu(capture=CaptureResult(error="RuntimeError: not permitted", place=place)).diagnose(monkeypatch)
    assert made.verdict == "cannot be captured" and "model.py:7" in made.summary and made.findings[0].kind == "capture"


def test_a_capture_that_succeeds_makes_doubts_of_blockers(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = blockers.Watched(250, {"cuda"})
    watched.seen["upload", "blocks", "copy from unpinned host memory", None, ""] = 1
    made = Gpu(watched=watched).diagnose(monkeypatch)
    assert made.verdict == "launch-bound" and [finding.severity for finding in made.findings] == ["suspect"]
    assert any("hold its replays to eager results" in note for note in made.notes)


def test_table_json_and_page_say_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Gpu().diagnose(monkeypatch)
    for text in (made.table(), made.html()):
        for said in ("launch-bound", "242, 5.0 us of CPU each", "30 times the same 8 launches", "1 x Memcpy DtoH"):
            assert said in text, said
        for said in ("p50 8.0 us", "cudaLaunchKernel", "cudaStreamSynchronize", "8.57 times", "3.000 ms, 12.4 us a"):
            assert said in text, said
    assert json.loads(made.json()) == json.loads(json.dumps(made.as_dict()))
    assert made.as_dict()["prediction"]["gain"] == made.prediction.gain  # type: ignore[union-attr]
    page = made.html()
    assert page.count("<svg") == 3 and "stream 7" in page and "<script" not in page
