"""The device-side decode loop on a CPU: tokens, endings, cancelling, late readers, and why the host decodes instead."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from llm_cases import buckets, free_pages, is_idle, tiny, tiny_llm
from null.loop_double import Device, installed

from bucketgraph import LLM, SamplingParams
from bucketgraph.cli import _parser
from bucketgraph.errors import ConfigError, DeviceError, InputError
from bucketgraph.llm.device_loop import PAUSE, Run
from bucketgraph.llm.device_loop import loop as loop_module
from bucketgraph.llm.device_loop.ring import Ring
from bucketgraph.llm.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return installed(monkeypatch)


@pytest.fixture(scope="module")
def host() -> LLM:
    """What decodes on the host, to compare with."""
    return tiny_llm(buckets(batch=[1, 4, 8]))


def looped(**options: Any) -> LLM:
    return tiny_llm(buckets(batch=[1, 4, 8]), loop="device", **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY, **options: Any) -> list[list[int]]:
    results = [result.outputs[0].token_ids for result in llm.generate(prompts, params, **options)]
    assert is_idle(llm)
    return results


def decode(llm: LLM) -> Any:
    stats = llm.stats()["decode"]
    assert sum(stats.outcomes.values()) == stats.calls == sum(stats.sizes.values()), "outcomes add up to calls"
    return stats


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "never came"
        time.sleep(1e-3)


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
def test_greedy_and_seeded_tokens_equal_the_host_loops(host: LLM, device: Device, rows: int) -> None:
    """20 tokens further, every row crosses a page boundary; rows end at different steps."""
    llm = looped()
    prompts = [prompt(3 + 7 * row, row) for row in range(rows)]
    params = [
        SamplingParams(temperature=0.9 * (row % 2), top_k=20 * (row % 3), seed=row, max_tokens=COUNT - 2 * row)
        for row in range(rows)
    ]
    assert tokens(llm, prompts, params) == tokens(host, prompts, params)
    assert set(decode(llm).outcomes) == {"looped"}


def test_64_rows_that_end_at_different_steps(device: Device) -> None:
    made = buckets(batch=[1, 8, 64], requests=[8])
    prompts = [prompt(1 + row % 9, row) for row in range(64)]
    params = [SamplingParams(temperature=0.8, seed=row, max_tokens=1 + row % 23 if row else 30) for row in range(64)]
    host, llm = tiny_llm(made), tiny_llm(made, loop="device")
    launches = device.launches
    assert tokens(llm, prompts, params) == tokens(host, prompts, params)
    assert device.launches - launches == 3, "a run in each of the buckets that the shrinking batch goes through"


def test_steps_are_counted_as_the_host_loop_counts_them(device: Device) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in (2, 9, 17, 17, 30)]
    prompts = [prompt(4, row) for row in range(5)]
    stats = []
    for llm in (looped(), tiny_llm(buckets(batch=[1, 4, 8]))):
        tokens(llm, prompts, params)
        stats.append(decode(llm))
    ours, theirs = stats
    assert ours.sizes == theirs.sizes and ours.calls == theirs.calls
    assert ours.outcomes == {"looped": 29} and theirs.outcomes == {"replayed": 29}
    for one, other in zip(ours.buckets, theirs.buckets, strict=True):
        assert (one.hits, one.real, one.padded) == (other.hits, other.real, other.padded)
    assert not ours.fallbacks


def test_endings_are_the_host_loops(host: LLM, device: Device) -> None:
    """End and stop tokens, in the first step and later, ignored, too early for `min_tokens`, and limits."""
    row = prompt(10, 1)
    (whole,) = tokens(host, [row])
    first = {token: whole.index(token) for token in whole}
    eos, at = next((token, place) for token, place in first.items() if 3 <= place <= 12)
    assert first[whole[1]] == 1
    ending = partial(LLM.from_weights, tiny(eos_token_ids=(eos,)), host._runner.model.weights, buckets(batch=[1, 16]))
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({}, at + 1, "stop"),
        ({"ignore_eos": True}, COUNT, "length"),
        ({"ignore_eos": True, "stop_token_ids": [96, whole[1]]}, 2, "stop"),  # in the loop's first step
        ({"stop_token_ids": [whole[0]]}, 1, "stop"),  # in the prefill
        ({"min_tokens": at}, at + 1, "stop"),
        ({"max_tokens": at + 1}, at + 1, "stop"),
        ({"max_tokens": at}, at, "length"),
        ({"max_tokens": 1}, 1, "length"),
        ({"max_tokens": 2}, 2, "length"),
    ]
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, **changes}) for changes, _, _ in cases]
    params.append(SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=at + 1))
    ours, theirs = (llm.generate([row] * len(params), params) for llm in (ending(loop="device"), ending()))
    for one, other, case in zip(ours, theirs, [*cases, None], strict=True):
        assert one.outputs == other.outputs
        if case is not None:
            assert (one.outputs[0].token_ids, one.outputs[0].finish_reason) == (whole[: case[1]], case[2])
    assert len(ours[-1].outputs[0].token_ids) > at + 1, "the minimum held the end token off"


def test_a_call_of_one_token_launches_nothing(device: Device) -> None:
    llm = looped()
    launches = device.launches
    tokens(llm, [prompt(5)], SamplingParams(max_tokens=1))
    assert device.launches == launches and decode(llm).calls == 0


def test_a_run_longer_than_the_ring_goes_on_in_another(
    host: LLM, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "Ring", partial(Ring, steps=8))
    llm = looped()
    launches = device.launches
    assert tokens(llm, [prompt(9)]) == tokens(host, [prompt(9)])
    assert device.launches - launches == 3, "19 steps, 8 at most in each"


class Letters:
    """A tokenizer: token n is a letter, or an empty text."""

    eos_token_ids = ()

    class Stream:
        def feed(self, ids: list[int]) -> str:
            return "".join(chr(token) for token in ids if token > 32)

        def finish(self) -> str:
            return ""

    def stream(self, skip_special_tokens: bool) -> Stream:
        return self.Stream()


def test_a_stop_string_ends_a_row_and_the_others_go_on(device: Device) -> None:
    whole = tiny_llm(tokenizer=Letters()).generate([prompt(5), prompt(6)], GREEDY)  # type: ignore[arg-type]
    text = whole[0].outputs[0].text
    stop = text[len(text) // 2 :][:2]
    params = [SamplingParams(temperature=0.0, max_tokens=COUNT, stop=stop), GREEDY]
    llms = tiny_llm(tokenizer=Letters()), tiny_llm(tokenizer=Letters(), loop="device")  # type: ignore[arg-type]
    theirs, ours = (llm.generate([prompt(5), prompt(6)], params) for llm in llms)
    assert [one.outputs for one in ours] == [other.outputs for other in theirs]
    assert ours[0].outputs[0].finish_reason == "stop" and ours[1].outputs == whole[1].outputs
    assert is_idle(llms[1])


@pytest.mark.parametrize("limit", [7, 30])
def test_many_tokens_at_once_mean_what_they_mean_one_by_one(limit: int) -> None:
    """Ends of all kinds, too early ones, and text, however the tokens are cut into parts."""
    ids = [65, 66, 10, 67, 65, 66, 68, 96, 67, 68, 69, 70, 71, 72, 73]
    cases: list[dict[str, Any]] = [
        {},
        {"stop_token_ids": [68, 66]},
        {"stop_token_ids": [68, 66], "min_tokens": 3},
        {"stop_token_ids": [96], "ignore_eos": True},
        {"ignore_eos": True, "min_tokens": 5},
        {"min_tokens": 9, "max_tokens": 30},
        {"stop": ["BD", "ABC", "DEFGX"], "ignore_eos": True},
        {"stop": ["AB", "CD"], "min_tokens": 2, "include_stop_str_in_output": True},
        {"stop": ["BC", "EFG"], "ignore_eos": True, "min_tokens": 5},
        {"stop": ["BC", "EFG"], "stop_token_ids": [71], "ignore_eos": True, "min_tokens": 5},
    ]
    llm = tiny_llm(buckets(batch=[1]), tiny(eos_token_ids=(96,)), tokenizer=Letters(), warmup=False)  # type: ignore[arg-type]
    engine = llm._engine

    def fed(params: SamplingParams, size: int) -> Request:
        request = Request([1, 2], params, 0, limit=2 + limit, streamed=True)
        engine._running.append(request)
        for start in range(0, len(ids), size):
            if not request.done:
                engine._finish_or_go_on(request, ids[start : start + size])
        assert request.text == "".join(delta.text for delta in request.deltas)
        assert request.output_ids == [token for delta in request.deltas for token in delta.token_ids]
        assert request.deltas[-1].finish_reason == request.finish_reason
        assert (request not in engine._running) == (request not in engine._streams) == request.done
        if not request.done:
            engine._leave(request)
        return request

    ends = set()
    for case in cases:
        params = SamplingParams(**{"max_tokens": limit, **case})
        one, *others = (fed(params, size) for size in (1, 2, 5, len(ids)))
        ends.add((one.finish_reason, one.stop_reason))
        for other in others:
            for name in ("output_ids", "text", "finish_reason", "stop_reason"):
                assert getattr(other, name) == getattr(one, name), (case, name)
    late = {("stop", None), ("stop", 96), ("stop", "ABC"), ("stop", "AB"), ("stop", "EFG"), ("stop", 71)}
    assert ends >= {("stop", 66), *({("length", None)} if limit == 7 else late)}


def test_a_request_is_done_only_when_all_of_it_is_there() -> None:
    """Its caller looks without the lock."""

    class Watched(Request):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "finish_reason" and value is not None:
                assert self.tokens == [1, 5] and self.deltas[-1].finish_reason == value
            super().__setattr__(name, value)

    engine = tiny_llm(buckets(batch=[1]), warmup=False)._engine
    request = Watched([1], GREEDY, 0, limit=2, streamed=True)
    engine._running.append(request)
    engine._finish_or_go_on(request, [5, 6])
    assert request.done


# -- streams, and others beside a run ----------------------------------------------------------------------------------


def test_a_late_reader_of_a_stream_loses_no_token(host: LLM, device: Device) -> None:
    llm = looped()
    stream = llm.generate([prompt(5), prompt(9)], GREEDY, stream=True)
    got = {0: list[int](), 1: list[int]()}
    for _ in range(2):  # both first tokens are the prefill's
        delta = next(stream)
        got[delta.index] += delta.token_ids
    llm._engine.step()
    run = llm._engine._run
    assert run is not None
    until(run._launcher.done)
    assert run._taken < run._ring.read()[0] == COUNT - 1, "all is done, and nothing of it was read"
    for delta in stream:
        got[delta.index] += delta.token_ids
    assert [got[0], got[1]] == tokens(host, [prompt(5), prompt(9)])
    assert is_idle(llm)


def test_a_stream_yields_while_the_device_runs(device: Device) -> None:
    llm = looped()
    device.gate = threading.Semaphore(0)
    stream = llm.generate(prompt(5), GREEDY, stream=True)
    assert len(next(stream).token_ids) == 1
    for _ in range(COUNT - 1):
        device.gate.release()
        assert len(next(stream).token_ids) == 1
    assert next(stream, None) is None and is_idle(llm)


def test_a_dropped_stream_cancels_its_run_and_gives_its_pages_back(device: Device) -> None:
    llm = looped()
    stream = llm.generate([prompt(5)], SamplingParams(temperature=0.0, max_tokens=200), stream=True)
    device.gate = threading.Semaphore(3)
    next(stream), next(stream)
    launcher = device.launchers[-1]
    device.gate.release(2)  # all that cancelling may take
    stream.close()  # type: ignore[attr-defined]
    assert is_idle(llm) and launcher.done()
    assert decode(llm).outcomes["looped"] <= 5


def test_a_new_prompt_ends_the_run_and_joins(host: LLM, device: Device) -> None:
    llm, long = looped(), SamplingParams(temperature=0.0, max_tokens=200)
    stream = llm.generate([prompt(30)], long, stream=True)
    got = [next(stream).token_ids[0]]
    device.gate = threading.Semaphore(2)
    got += next(stream).token_ids
    assert llm._engine._run is not None
    device.gate.release(1000)
    (other,) = [result.outputs[0].token_ids for result in llm.generate([prompt(5)], GREEDY)]
    for delta in stream:
        got += delta.token_ids
    assert [got, other] == [*tokens(host, [prompt(30)], long), *tokens(host, [prompt(5)])] and is_idle(llm)
    assert decode(llm).sizes[2,] == COUNT - 1, "they ran together"


def test_a_padded_batch_beside_a_run_ends_it_first(host: LLM, device: Device) -> None:
    llm = looped()
    stream = llm.generate([prompt(30)], GREEDY, stream=True)
    got = [token for _ in range(2) for token in next(stream).token_ids]
    with llm.prefill(torch.tensor([prompt(5)])) as batch:
        assert llm._engine._run is None
        assert batch.tokens.tolist() == [tokens(host, [prompt(5)])[0][0]]
    for delta in stream:
        got += delta.token_ids
    assert [got] == tokens(host, [prompt(30)]) and is_idle(llm)


def test_more_requests_than_the_cache_holds_all_finish(host: LLM, device: Device) -> None:
    page = 2 * 2 * 2 * 16 * 16 * 4
    made = buckets(batch=[1, 4], tokens=[16, 64], memory=f"{8 * page}B")
    llm = tiny_llm(made, max_model_len=64, loop="device")
    prompts = [prompt(10 + 3 * row, row) for row in range(8)]
    assert tokens(llm, prompts) == tokens(host, prompts)
    assert decode(llm).outcomes["looped"] > 0


def test_threads_get_what_they_get_alone(host: LLM, device: Device) -> None:
    llm = looped()
    prompts = [prompt(5 + 9 * row, row) for row in range(4)]
    want, got = [tokens(host, [row])[0] for row in prompts], [list[int]()] * 4

    def one(index: int) -> None:
        loop = "device" if index else "host"  # a mixed batch runs on the host
        got[index] = llm.generate([prompts[index]], GREEDY, loop=loop)[0].outputs[0].token_ids  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == want and is_idle(llm)
    decode(llm)


# -- a run by itself ---------------------------------------------------------------------------------------------------


def launched(llm: LLM, device: Device, rows: int = 2) -> Run:
    """A gated run of these rows in flight, beyond their prefill."""
    device.gate = threading.Semaphore(0)
    llm._engine.add(llm._requests([prompt(5, row) for row in range(rows)], GREEDY))
    for request in llm._engine._waiting:
        request.loop = "device"
    while llm._engine._run is None:
        llm._engine.step()
    return llm._engine._run


def test_cancelling_takes_at_most_two_steps_and_keeps_what_came(host: LLM, device: Device) -> None:
    llm = looped()
    run = launched(llm, device)
    assert device.gate is not None
    device.gate.release(5)
    until(lambda: [run.poll(), run.steps][1] == 5)
    run.cancel()
    device.gate.release(2)
    run.wait()
    assert run.over and 5 < run.steps <= 7
    want = tokens(host, [prompt(5, row) for row in range(2)])
    assert [ids for _, ids in run.take()] == [line[1 : 1 + run.steps] for line in want]
    assert run.take() == [] and run.counts() == {2: run.steps}
    llm._engine.abort(run.requests)
    assert is_idle(llm)


def test_a_dropped_row_ends_and_the_rest_goes_on(device: Device) -> None:
    llm = looped()
    run = launched(llm, device, rows=4)
    assert device.gate is not None
    run.drop(run.requests[0])
    device.gate.release(1000)
    run.wait()
    taken = run.take()
    assert [request for request, _ in taken] == run.requests[1:], "what a dropped row still generated is not taken"
    assert all(len(ids) == COUNT - 1 for _, ids in taken) and run.counts() == {4: 1, 3: COUNT - 2}
    llm._engine.abort(run.requests)
    assert is_idle(llm)


def test_an_interrupt_ends_the_run_and_is_raised(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = looped()
    run = launched(llm, device)
    assert device.gate is not None
    device.gate.release(1000)
    poll = run.poll

    def interrupted() -> bool:
        monkeypatch.setattr(run, "poll", poll)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm._engine.step()
    assert run.over and is_idle(llm)


def test_one_who_waits_for_the_end_looks_ever_less_often(device: Device) -> None:
    run = Run(Ring(1, False), None, None, [])  # type: ignore[arg-type]
    soon = run.pause(reading=False)
    run._began -= 0.05
    later = run.pause(reading=False)
    run._began -= 100
    assert 0 < soon < later < run.pause(reading=False) == 1e-3


def test_one_who_reads_along_looks_again_after_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1.6 ms by the device's clock, after two slow ones that are forgotten."""
    now = 50.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    ring = Ring(1, False)
    ring.stamps[:12] = torch.tensor([0, 10**8, 2 * 10**8, *(2 * 10**8 + 1_600_000 * step for step in range(1, 10))])
    ring.clear()
    run = Run(ring, None, None, [])  # type: ignore[arg-type]
    assert run.pause(reading=True) == PAUSE, "the pace is not known yet"
    for steps, pause in ((1, PAUSE), (2, 1e-3), (12, 8e-4)):
        ring.published[0] = 2 * steps
        assert run.poll() and run.pause(reading=True) == pytest.approx(pause)
    now += 5e-4
    assert not run.poll() and run.pause(reading=True) == pytest.approx(3e-4), "since the news, not since the last look"
    now += 1.0
    assert run.pause(reading=True) == PAUSE


def test_what_is_new_is_taken_by_slices() -> None:
    """Ended rows are padding from then on; a dropped one and steps that are not published are not taken."""
    requests = [Request([1], GREEDY, row) for row in range(4)]
    ring = Ring(8, False, steps=8)
    ring.tokens[:] = torch.arange(64).view(8, 8)
    ring.tokens[3:, 1] = ring.tokens[:, 2] = -1
    ring.clear()
    run = Run(ring, None, None, requests)  # type: ignore[arg-type]
    run.drop(requests[3])
    assert run.take() == []
    ring.published[0] = 2 * 5
    assert run.poll() and run.take() == [(requests[0], [0, 8, 16, 24, 32]), (requests[1], [1, 9, 17])]
    ring.published[0] = 2 * 7 + 1
    assert run.poll() and run.over and run.take() == [(requests[0], [40, 48])]
    assert run.counts() == {3: 3, 2: 4}


# -- the host loop instead ---------------------------------------------------------------------------------------------


def test_without_a_gpu_the_host_decodes_and_says_why(host: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bucketgraph"):
        llm = looped()
    assert "the host loop decodes: the device loop needs a CUDA GPU" in caplog.text
    assert tokens(llm, [prompt(5)]) == tokens(host, [prompt(5)]) and llm.loops() == ()
    stats = decode(llm)
    assert stats.outcomes == {"replayed": COUNT - 1} and stats.fallbacks == {"host loop:unsupported": COUNT - 1}
    assert "needs a CUDA GPU, and decode runs on cpu" in stats.reasons["host loop:unsupported"]


@pytest.mark.parametrize(
    ("code", "rows", "changes", "reason"),
    [
        ("logprobs", 1, {"logprobs": 2}, "log probabilities"),
        ("stop_tokens", 1, {"stop_token_ids": list(range(200, 265))}, "65 stop tokens, the loop takes 64"),
        ("over_largest", 9, {}, "batch"),
    ],
)
def test_what_the_loop_cannot_do_the_host_does(
    host: LLM, device: Device, code: str, rows: int, changes: dict[str, Any], reason: str
) -> None:
    llm, prompts = looped(), [prompt(5, row) for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=5, **changes)
    launches = device.launches
    assert tokens(llm, prompts, params) == tokens(host, prompts, params)
    stats = decode(llm)
    assert stats.fallbacks[f"host loop:{code}"] == 4 and reason in stats.reasons[f"host loop:{code}"]
    assert device.launches == launches and "looped" not in stats.outcomes


def test_the_loop_of_a_call_overrules_the_llms(device: Device) -> None:
    llm = looped()
    launches = device.launches
    tokens(llm, [prompt(5)], loop="host")
    assert device.launches == launches and not decode(llm).fallbacks
    assert tokens(llm, [prompt(5)], loop="device") == tokens(llm, [prompt(5)], loop=None)
    assert device.launches == launches + 2
    for call in (lambda: llm.generate(prompt(5), loop="gpu"), lambda: tiny_llm(loop="gpu")):  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="unknown loop: given 'gpu', expected host or device"):
            call()
    assert _parser().parse_args(["generate", "hi", "--loop", "device"]).loop == "device"


def test_a_loop_that_is_built_by_a_call_waits_for_a_page_to_be_checked_on(host: LLM, device: Device) -> None:
    """An open padded batch leaves one page, which the request itself needs."""
    page = 2 * 2 * 2 * 16 * 16 * 4
    llm = tiny_llm(buckets(batch=[1], tokens=[16], memory=f"{5 * page}B"), max_model_len=64)
    short = SamplingParams(temperature=0.0, max_tokens=3)
    with llm.prefill(torch.tensor([prompt(33)])):
        assert free_pages(llm) == 1
        got = [result.outputs[0].token_ids for result in llm.generate([prompt(5)], short, loop="device")]
    assert got == tokens(host, [prompt(5)], short)
    assert decode(llm).fallbacks == {"host loop:no_page": 2}
    assert tokens(llm, [prompt(5)], short, loop="device") == got
    assert decode(llm).outcomes == {"replayed": 2, "looped": 2}


# -- building, checking, failing ---------------------------------------------------------------------------------------


def test_warm_up_builds_a_loop_for_each_bucket_and_leaves_the_cache_clean(device: Device) -> None:
    llm = looped()
    assert [row.bucket for row in llm.loops()] == ["batch=8", "batch=4", "batch=1"]
    assert all(row.error is None and row.seconds > 0 and not row.programmatic for row in llm.loops())
    assert is_idle(llm) and not llm._runner.cache.data.any()
    assert decode(llm).calls == 0, "the check is no call"
    llm.warmup()
    assert [launcher.released for launcher in device.launchers] == [True] * 3 + [False] * 3, "of the captures replaced"
    llm.release()
    assert all(launcher.released for launcher in device.launchers) and llm.loops() == ()


def test_a_lazy_set_builds_loops_as_calls_need_them(host: LLM, device: Device) -> None:
    llm = tiny_llm(buckets(batch=[1, 4], warmup={"lazy": True, "self_check": False}), loop="device")
    assert not device.launchers
    assert tokens(llm, [prompt(5)]) == tokens(host, [prompt(5)])
    assert [row.bucket for row in llm.loops()] == ["batch=1"]


def spoil(launcher: Any, ring: Ring, state: torch.Tensor) -> None:
    ring.tokens[int(state[0]) - 1] ^= 1


def test_a_loop_whose_tokens_are_wrong_serves_nobody(
    host: LLM, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.after_step = spoil
    with caplog.at_level(logging.WARNING, "bucketgraph"):
        llm = looped()
    assert "has no device loop: CaptureError: the device loop's tokens differ from the host loop's" in caplog.text
    assert tokens(llm, [prompt(5)]) == tokens(host, [prompt(5)])
    assert decode(llm).fallbacks == {"host loop:loop_failed": COUNT - 1}
    assert all(launcher.released for launcher in device.launchers)


def test_programmatic_edges_that_are_wrong_in_a_loop_become_ordinary_ones(host: LLM, device: Device) -> None:
    device.early = True
    device.after_step = lambda launcher, ring, state: spoil(launcher, ring, state) if launcher.programmatic else None
    llm = looped()
    assert [(row.error, row.programmatic) for row in llm.loops()] == [(None, False)] * 3
    assert [launcher.released for launcher in device.launchers] == [True, False] * 3
    assert tokens(llm, [prompt(5)]) == tokens(host, [prompt(5)])
    device.after_step = lambda launcher, ring, state: None
    assert all(row.programmatic for row in looped().loops()), "and are kept where they are right"


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_that_fails_reaches_its_caller_and_the_llm_works_on(host: LLM, device: Device, stream: bool) -> None:
    llm = looped()

    def broken(launcher: Any, ring: Ring, state: torch.Tensor) -> None:
        if state[0] == 3:
            raise RuntimeError("in a step")

    device.after_step = broken
    with pytest.raises(RuntimeError, match="in a step"):
        list(llm.generate(prompt(5), GREEDY, stream=True)) if stream else llm.generate(prompt(5), GREEDY)
    assert is_idle(llm) and decode(llm).outcomes == {"raised": 1}
    device.after_step = lambda launcher, ring, state: None
    device.refuses = InputError("no launch")
    with pytest.raises(InputError, match="no launch"):
        llm.generate(prompt(5), GREEDY)
    device.refuses = None
    assert tokens(llm, [prompt(5)]) == tokens(host, [prompt(5)])
    assert decode(llm).outcomes == {"raised": 2, "looped": COUNT - 1}


def test_a_launch_that_ends_without_a_word_is_an_error(device: Device) -> None:
    llm = looped()
    run = launched(llm, device)
    launcher: Any = run._launcher
    launcher.done = lambda: True
    with pytest.raises(DeviceError, match="ended without saying so: given 0 steps"):
        run.wait()
    assert device.gate is not None
    device.gate.release(1000)
    del launcher.done
    llm._engine.abort(run.requests)
    assert is_idle(llm)
