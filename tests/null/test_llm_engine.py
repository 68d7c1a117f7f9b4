"""Requests come and go at their own length; whatever ends them gives their pages back and leaves the others alone."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from llm_cases import (
    buckets,
    free_pages,
    is_idle,
    loud_weights,
    pad,
    padded_greedy,
    tiny,
    tiny_llm,
    transformers_greedy,
    transformers_twin,
)

from bucketgraph import LLM, SamplingParams
from bucketgraph.errors import InputError, NoBucketError, NotWarmError
from bucketgraph.llm.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT)
PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, page, head_dim, float32


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture(scope="module")
def twin() -> Any:
    pytest.importorskip("transformers")
    return transformers_twin(tiny(), loud_weights(tiny()))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    results = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    assert is_idle(llm)
    return results


def hits(llm: LLM, phase: str) -> dict[str, int]:
    return {row.bucket: row.hits for row in llm.stats()[phase].buckets if row.hits}


# -- boundaries --------------------------------------------------------------------------------------------------------


# The buckets hold 16 and 64 tokens: below, at and above each; 65 and more is chunked. Pages hold 16 tokens.
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193])
def test_a_prompt_at_any_boundary_equals_unbucketed(llm: LLM, twin: Any, length: int) -> None:
    """20 tokens further, every case crosses a page boundary while it decodes."""
    want, gaps = transformers_greedy(twin, [prompt(length)], COUNT)
    assert min(gaps[0]) > 1e-4, "no float tie that would make the test a coin toss"
    assert tokens(llm, [prompt(length)]) == want


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, {"tokens=16 requests=4": 1}),
        (16, {"tokens=16 requests=4": 1}),
        (17, {"tokens=64 requests=4": 1}),
        (64, {"tokens=64 requests=4": 1}),
        (65, {"tokens=64 requests=4": 1, "tokens=16 requests=4": 1}),
        (129, {"tokens=64 requests=4": 2, "tokens=16 requests=4": 1}),
    ],
)
def test_a_prompt_takes_the_smallest_bucket_and_one_token_is_a_prefill(length: int, expected: dict[str, int]) -> None:
    llm = tiny_llm()
    tokens(llm, [prompt(length)], SamplingParams(temperature=0.0, max_tokens=1))
    assert hits(llm, "prefill") == expected
    assert llm.stats()["decode"].calls == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7])
def test_a_batch_at_any_decode_boundary_equals_unbucketed(twin: Any, batch: int) -> None:
    llm = tiny_llm(buckets(batch=[1, 3, 6], requests=[8]))
    prompts = [prompt(3 + row, row) for row in range(batch)]
    assert tokens(llm, prompts) == transformers_greedy(twin, prompts, COUNT)[0]
    expected = {1: {"batch=1"}, 2: {"batch=3"}, 3: {"batch=3"}, 7: {"batch=6", "batch=1"}}
    assert set(hits(llm, "decode")) == expected.get(batch, {"batch=6"})
    assert llm.stats()["decode"].outcomes == {"split" if batch == 7 else "replayed": COUNT - 1}


def test_more_prompts_than_request_slots_are_packed_in_several_prefills(twin: Any) -> None:
    llm = tiny_llm(buckets(requests=[1, 3]))
    prompts = [prompt(2 + row, row) for row in range(8)]
    assert tokens(llm, prompts) == transformers_greedy(twin, prompts, COUNT)[0]
    assert hits(llm, "prefill") == {"tokens=16 requests=3": 1, "tokens=64 requests=3": 2}


def test_a_prompt_cut_by_others_in_its_prefill_goes_on_where_it_was_cut(llm: LLM, twin: Any) -> None:
    prompts = [prompt(30), prompt(50), prompt(3), prompt(70), prompt(1)]
    assert tokens(llm, prompts) == transformers_greedy(twin, prompts, COUNT)[0]


def test_any_bucket_set_gives_the_same_tokens(twin: Any) -> None:
    prompts = [prompt(length, 7) for length in (1, 40, 17, 90, 5)]
    want = transformers_greedy(twin, prompts, COUNT)[0]
    for tokens_axis, batch, page in ([[1], [2], 32], [[7, 100], [2, 5], 64], [[256], [16], 128]):
        llm = tiny_llm(buckets(tokens=tokens_axis, batch=batch, kv_cache={"page_size": page}))
        assert tokens(llm, prompts) == want
        assert padded_greedy(llm, prompts, COUNT, "left") == want


def test_eager_prefill_with_bucketed_decode_gives_the_same_tokens(llm: LLM) -> None:
    segmented = {
        "prefill": {"executable": "eager", "axes": {"tokens": [16, 64]}},
        "decode": {"axes": {"batch": [1, 4]}},
    }
    other = tiny_llm(buckets(phases=segmented))
    assert tokens(other, [prompt(20), prompt(100)]) == tokens(llm, [prompt(20), prompt(100)])
    assert {row.executable for row in other.stats()["prefill"].buckets} == {"eager"}


# -- endings -----------------------------------------------------------------------------------------------------------


def test_each_request_leaves_at_its_own_length_and_the_others_go_on(llm: LLM) -> None:
    prompts = [prompt(10, row) for row in range(6)]
    whole = tokens(llm, prompts)
    limits = [1, 20, 3, 7, 2, 12]
    results = llm.generate(prompts, [SamplingParams(temperature=0.0, max_tokens=limit) for limit in limits])
    for row, (result, limit) in enumerate(zip(results, limits, strict=True)):
        done = result.outputs[0]
        assert done.token_ids == whole[row][:limit]
        assert (done.finish_reason, done.stop_reason, result.request_id) == ("length", None, str(row))
    assert is_idle(llm)


def test_end_tokens_stop_tokens_and_minimum(llm: LLM) -> None:
    row = prompt(10)
    (whole,) = tokens(llm, [row])
    first = {token: whole.index(token) for token in whole}
    eos, at = next((token, place) for token, place in first.items() if 3 <= place <= 12)
    ending = LLM.from_weights(tiny(eos_token_ids=(eos,)), llm._runner.model.weights, buckets())
    cases: dict[str, tuple[dict[str, Any], int, str, int | None]] = {
        "end token": ({}, at + 1, "stop", None),
        "end token ignored": ({"ignore_eos": True}, COUNT, "length", None),
        "stop token": ({"ignore_eos": True, "stop_token_ids": [eos]}, at + 1, "stop", eos),
        "another stop token": ({"ignore_eos": True, "stop_token_ids": [96, whole[2]]}, first[whole[2]] + 1, "stop", 0),
        "minimum reached": ({"min_tokens": at}, at + 1, "stop", None),
        "at the limit": ({"max_tokens": at + 1}, at + 1, "stop", None),
        "limit before it": ({"max_tokens": at}, at, "length", None),
    }
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, **case[0]}) for case in cases.values()]
    for result, (name, (_, length, reason, stop)) in zip(
        ending.generate([row] * len(cases), params), cases.items(), strict=True
    ):
        done = result.outputs[0]
        assert done.token_ids == whole[:length], name
        assert done.finish_reason == reason, name
        assert done.stop_reason == (whole[2] if stop == 0 else stop), name
    late = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=at + 1)
    (delayed,) = tokens(ending, [row], late)
    assert delayed[: at + 1] == whole[: at + 1] and len(delayed) > at + 1
    assert is_idle(ending)


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context() -> None:
    llm = tiny_llm(max_model_len=64)
    (result,) = llm.generate([prompt(40)], SamplingParams(temperature=0.0, max_tokens=None))
    assert len(result.outputs[0].token_ids) == 24 and result.outputs[0].finish_reason == "length"
    (last,) = llm.generate([prompt(63)], GREEDY)
    assert len(last.outputs[0].token_ids) == 1 and last.outputs[0].finish_reason == "length"


def test_more_requests_than_the_cache_holds_all_finish(llm: LLM) -> None:
    small = tiny_llm(buckets(memory=f"{8 * PAGE_BYTES}B"), max_model_len=64)
    assert free_pages(small) == 7, "two or three requests at a time"
    prompts = [prompt(10 + 3 * row, row) for row in range(12)]
    assert tokens(small, prompts) == tokens(llm, prompts)


def test_streams_join_to_what_generate_returns_with_each_end(llm: LLM) -> None:
    prompts = [prompt(10, row) for row in range(5)]
    params = [SamplingParams(temperature=0.7, seed=row, max_tokens=1 + 4 * row) for row in range(5)]
    whole = [result.outputs[0] for result in llm.generate(prompts, params)]
    seen = list(llm.generate(prompts, params, stream=True))
    for index, want in enumerate(whole):
        own = [delta for delta in seen if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == want.token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
    assert is_idle(llm)


def test_a_stream_dropped_half_way_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.generate([prompt(30), prompt(5)], GREEDY, stream=True)
    assert is_idle(llm), "nothing is held for a stream that nobody reads yet"
    next(stream), next(stream), next(stream)
    assert not is_idle(llm)
    stream.close()  # type: ignore[attr-defined]
    assert is_idle(llm)
    unread = llm.generate([prompt(30)], GREEDY, stream=True)
    del unread
    assert is_idle(llm)


def test_streams_and_calls_interleave(llm: LLM) -> None:
    (a,), (b,), (c,) = (tokens(llm, [prompt(length)]) for length in (30, 5, 70))
    first = llm.generate([prompt(30)], GREEDY, stream=True)
    got = [next(first).token_ids[0] for _ in range(3)]
    second = llm.generate([prompt(5)], GREEDY, stream=True)
    other = [next(second).token_ids[0]]
    assert [result.outputs[0].token_ids for result in llm.generate([prompt(70)], GREEDY)] == [c]
    other += [delta.token_ids[0] for delta in second]
    got += [delta.token_ids[0] for delta in first]
    assert (got, other) == (a, b) and is_idle(llm)


class Letters:
    """A tokenizer: token n is a letter, or an empty text."""

    eos_token_ids = ()

    def __init__(self) -> None:
        self.fed = 0  # calls

    def stream(self, skip_special_tokens: bool) -> Letters:
        return self

    def feed(self, ids: list[int]) -> str:
        self.fed += 1
        return "".join(chr(token) for token in ids if token > 32)

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("end", ["length", "stop token", "kept stop token", "too early"])
def test_text_made_at_the_end_is_what_a_stream_joins_to(end: str) -> None:
    letters = Letters()
    llm = tiny_llm(tokenizer=letters)
    ((*_, last), *_) = tokens(llm, [prompt(5)], SamplingParams(temperature=0.0, max_tokens=COUNT - 3))
    options: dict[str, Any] = {
        "length": {},
        "stop token": {"stop_token_ids": [last]},
        "kept stop token": {"stop_token_ids": [last], "include_stop_str_in_output": True},
        "too early": {"stop_token_ids": [last], "min_tokens": COUNT},
    }[end]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, **options)
    prompts = [prompt(5), prompt(9), prompt(17)]
    letters.fed = 0
    done = [result.outputs[0] for result in llm.generate(prompts, params)]
    assert letters.fed == 3, "once for each prompt, when it ends"
    for row, (one, line) in enumerate(zip(done, prompts, strict=True)):
        deltas = list(llm.generate(line, params, stream=True))
        assert (one.text, one.token_ids) == (
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.token_ids],
        ), row
        assert deltas[-1].finish_reason == one.finish_reason
    shown = done[0].token_ids[: -1 if end == "stop token" else None]
    assert done[0].text == "".join(chr(token) for token in shown if token > 32)
    assert (done[0].finish_reason == "stop") == (end in ("stop token", "kept stop token"))


def test_a_stop_string_ends_a_request_where_it_is_complete_with_a_stream_and_without() -> None:
    llm = tiny_llm(tokenizer=Letters())
    (whole,) = llm.generate(prompt(5), GREEDY)[0].outputs
    stop = whole.text[len(whole.text) // 2 :][:2]
    count = next(n for n in range(COUNT) if stop in "".join(chr(t) for t in whole.token_ids[:n] if t > 32))
    assert 2 < count < COUNT
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, stop=stop)
    (done,) = llm.generate(prompt(5), params)[0].outputs
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (whole.token_ids[:count], "stop", stop)
    assert done.text == whole.text[: whole.text.index(stop)]
    deltas = list(llm.generate(prompt(5), params, stream=True))
    assert "".join(delta.text for delta in deltas) == done.text
    assert [token for delta in deltas for token in delta.token_ids] == done.token_ids
    assert is_idle(llm)


def test_a_call_without_a_stream_keeps_no_deltas(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would take them, however long the generation is."""
    seen: list[Any] = []
    add = llm._engine.add
    monkeypatch.setattr(llm._engine, "add", lambda requests: (seen.extend(requests), add(requests)))
    tokens(llm, [prompt(5), prompt(9)])
    assert len(seen) == 2 and not any(request.deltas for request in seen)


# -- what the runner hands to decode -----------------------------------------------------------------------------------


def held(llm: LLM, lengths: list[int]) -> list[Request]:
    """Requests whose last token is to run, with pages for a few more."""
    runner, requests = llm._runner, []
    for row, length in enumerate(lengths):
        params = SamplingParams(temperature=0.5 * row, top_k=row - 1, top_p=1 - 0.1 * row)
        request = Request(prompt(length, row), params, seed=2**62 + row, computed=length - 1)
        request.hold(runner.cache.allocate(runner.cache.pages_for(length + 8)), runner.table_width)
        requests.append(request)
    return requests


def plainly(requests: list[Request]) -> dict[str, Any]:
    at = [request.computed for request in requests]
    return {
        "input_ids": [request.tokens[n] for request, n in zip(requests, at, strict=True)],
        "positions": at,
        "slot_mapping": [int(r.table[n // 16]) * 16 + n % 16 for r, n in zip(requests, at, strict=True)],
        "kv_lens": [n + 1 for n in at],
        "block_tables": [request.table.tolist() for request in requests],
        "temperature": [request.params.temperature for request in requests],
        "top_k": [max(request.params.top_k, 0) for request in requests],
        "top_p": torch.tensor([request.params.top_p for request in requests]).tolist(),
        "seeds": [request.seed for request in requests],
    }


def test_places_prepared_ahead_are_used_for_the_very_step_they_are_of(llm: LLM) -> None:
    """A run prepares the next one's; whatever changes meanwhile, the arrays are those of the requests as they are."""
    runner = llm._runner
    requests = held(llm, [15, 16, 31])

    def step() -> None:
        for request, token in zip(requests, runner.decode(requests)[0].tolist(), strict=True):
            request.tokens.append(token)

    def same(now: list[Request]) -> None:
        got = {name: tensor.tolist() for name, tensor in runner.decode_arrays(now).items()}
        assert got == plainly(now)

    same(requests)
    step()
    same(requests)  # as prepared
    same(requests)  # again: what was handed out is the caller's
    step()
    runner.decode_arrays(requests)["slot_mapping"].fill_(-1)
    same(requests)
    step()
    same(requests[::-1])
    step()
    same(requests[1:])
    step()
    requests[1].computed -= 1
    same(requests)
    step()
    requests[0].hold(runner.cache.allocate(1), runner.table_width)
    same(requests)
    step()
    (requests[0].table, requests[1].table) = (requests[1].table, requests[0].table)
    same(requests)
    step()
    requests[2].params, requests[2].seed = SamplingParams(temperature=0.0), 7
    same(requests)
    for request in requests:
        runner.cache.release(request.pages)
    assert is_idle(llm)


def test_a_temperature_beyond_float32_is_infinite_without_a_warning(llm: LLM) -> None:
    largest = torch.finfo(torch.float32).max
    given = [0, 1, 0.7, largest, 1e39, 10**30]
    requests = [Request([1], SamplingParams(temperature=t), seed=0, computed=0) for t in given]
    for request in requests:
        request.hold([1], llm._runner.table_width)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arrays in (
            llm._runner.prefill_arrays([(request, 1) for request in requests]),
            llm._runner.decode_arrays(requests),
        ):
            want = torch.tensor([0.0, 1.0, 0.7, largest, float("inf"), 1e30], dtype=torch.float32)
            assert torch.equal(arrays["temperature"], want)
        sampling = SamplingParams(temperature=1e39, seed=1, max_tokens=3)
        assert len(tokens(llm, [prompt(5)], sampling)[0]) == 3


def test_pages_are_handed_out_low_ones_first_all_or_none() -> None:
    cache = tiny_llm(buckets(memory=f"{8 * PAGE_BYTES}B"), max_model_len=64, warmup=False)._runner.cache
    first = cache.allocate(3)
    assert first == [1, 2, 3] and cache.allocate(0) == [] and cache.free_pages == 4
    with pytest.raises(InputError, match="5 pages wanted, 4 free"):
        cache.allocate(5)
    assert cache.allocate(4) == [4, 5, 6, 7] and cache.allocate(0) == []
    cache.release(first)
    assert first == [] and cache.allocate(2) == [1, 2]


# -- failures ----------------------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_raises_reaches_its_caller_and_the_llm_works_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, phase: str, stream: bool
) -> None:
    (want,) = tokens(llm, [prompt(10)])
    with monkeypatch.context() as patch:
        patch.setattr(llm._runner.model, "_next", lambda *_: None)  # no tensors: the manager refuses what it returns
        if phase == "decode":
            patch.undo()
            good, calls = llm._runner.decode, iter(range(100))

            def broken(requests: Any) -> Any:
                if next(calls) == 3:
                    raise Broken("in a step")
                return good(requests)

            patch.setattr(llm._runner, "decode", broken)
        with pytest.raises(Exception, match="in a step" if phase == "decode" else "None"):
            list(llm.generate([prompt(10), prompt(80)], GREEDY, stream=True)) if stream else llm.generate(
                [prompt(10), prompt(80)], GREEDY
            )
        assert is_idle(llm)
    assert tokens(llm, [prompt(10)]) == [want]


def test_a_failure_while_some_requests_have_just_ended_ends_only_the_rest(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request of the batch is done when the second one's bookkeeping fails."""
    good = llm._engine._finish_or_go_on

    def broken(request: Any, token: int) -> None:
        if request.index == 1:
            raise Broken("after the first")
        good(request, token)

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "_finish_or_go_on", broken)
        with pytest.raises(Broken):
            llm.generate([prompt(3), prompt(4)], SamplingParams(temperature=0.0, max_tokens=1))
    assert is_idle(llm)


def test_a_caller_whose_step_runs_into_the_failure_of_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(buckets(requests=[1]))
    (want,) = tokens(llm, [prompt(10)])
    good = llm._runner.prefill

    def broken(chunks: Any) -> Any:
        if any(len(request.tokens) == 13 for request, _ in chunks):
            raise Broken("unlucky")
        return good(chunks)

    monkeypatch.setattr(llm._runner, "prefill", broken)
    mine = llm.generate([prompt(10)], GREEDY, stream=True)
    got = [next(mine).token_ids[0]]
    (unlucky,) = llm._requests([prompt(13)], GREEDY)
    llm._engine.add([unlucky])  # as another thread does that waits for the lock
    got += [delta.token_ids[0] for delta in mine]
    assert got == want and isinstance(unlucky.error, Broken)
    with pytest.raises(Broken):
        llm.generate([prompt(10), prompt(13)], GREEDY)
    assert is_idle(llm)


def test_a_batch_that_the_set_refuses_gives_its_pages_back() -> None:
    phases = {"prefill": {"axes": {"tokens": [64]}}, "decode": {"axes": {"batch": [1, 2]}, "overflow": "error"}}
    llm = tiny_llm(buckets(phases=phases))
    with pytest.raises(NoBucketError, match="batch 3"):
        llm.generate([prompt(3)] * 3, GREEDY)
    assert is_idle(llm) and len(tokens(llm, [prompt(3)] * 2)) == 2


def test_a_cold_or_released_llm_says_so_and_can_be_warmed_again() -> None:
    llm = tiny_llm(warmup=False)
    with pytest.raises(NotWarmError, match="cold"):
        llm.generate([prompt(3)], GREEDY)
    with pytest.raises(NotWarmError, match="cold"):
        llm.prefill(torch.tensor([prompt(3)]))
    assert is_idle(llm)
    assert llm.warmup().ok and llm.report is not None
    want = tokens(llm, [prompt(3)])
    with llm:
        pass
    with pytest.raises(NotWarmError, match="released"):
        llm.generate([prompt(3)], GREEDY)
    assert is_idle(llm)
    llm.warmup()
    assert tokens(llm, [prompt(3)]) == want


def test_four_threads_get_what_they_get_alone(llm: LLM) -> None:
    jobs = [
        ([prompt(5 + 30 * row, row), prompt(2, row)], SamplingParams(temperature=0.5 * row, seed=row, max_tokens=15))
        for row in range(4)
    ]
    alone = [tokens(llm, prompts, params) for prompts, params in jobs]
    results: dict[int, list[list[list[int]]]] = {row: [] for row in range(4)}

    def work(row: int) -> None:
        prompts, params = jobs[row]
        for turn in range(4):
            if turn % 2:
                found: list[list[int]] = [[] for _ in prompts]
                for delta in llm.generate(prompts, params, stream=True):
                    found[delta.index] += delta.token_ids
            else:
                found = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
            results[row].append(found)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {row: [alone[row]] * 4 for row in range(4)}
    assert is_idle(llm)


# -- padded batches ----------------------------------------------------------------------------------------------------


def test_padded_batches_hold_pages_until_closed(llm: LLM) -> None:
    start = free_pages(llm)
    batch = llm.prefill(*pad([prompt(16), prompt(3)], "right"))
    assert free_pages(llm) == start - 2
    llm.decode(batch)
    assert free_pages(llm) == start - 3, "one row went over its page"
    batch.close()
    batch.close()
    assert is_idle(llm)
    with pytest.raises(InputError, match="closed"):
        llm.decode(batch)


def test_padded_results_are_the_callers_own(llm: LLM) -> None:
    with llm.prefill(torch.tensor([prompt(9)])) as batch:
        first, copy = batch.logits, batch.logits.clone()
        llm.decode(batch)
        tokens_before = llm._runner.cache.free_pages
        llm.prefill(torch.tensor([prompt(20)])).close()
        assert torch.equal(first, copy) and free_pages(llm) == tokens_before
        assert batch.logits.shape == (1, 97) and batch.logits is not first


def test_padding_never_reaches_a_result(llm: LLM) -> None:
    """Whatever the padding holds and on whichever side it is."""
    rows = [prompt(5), prompt(17), prompt(1)]
    seen = []
    for side, fill in (("left", 0), ("left", 96), ("right", 0), ("right", -100)):
        with llm.prefill(*pad(rows, side, fill)) as batch:
            seen.append(batch.logits)
    assert all(torch.equal(seen[0], other) for other in seen[1:])


def test_a_padded_call_that_fails_gives_its_pages_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "prefill", broken)
        with pytest.raises(Broken):
            llm.prefill(torch.tensor([prompt(20)]))
    assert is_idle(llm)
    with llm.prefill(torch.tensor([prompt(20)])) as batch:
        with monkeypatch.context() as patch:
            patch.setattr(llm._runner, "decode", broken)
            with pytest.raises(Broken):
                llm.decode(batch)
        assert batch.lengths == [20]
        again = [llm.decode(batch).tokens.item() for _ in range(5)]
    assert again == tokens(llm, [prompt(20)])[0][1:6]
    assert is_idle(llm)


def test_generate_beside_padded_batches_waits_for_nobody() -> None:
    """Pages that open batches hold never come back by themselves: an error, not a hang."""
    llm = tiny_llm(buckets(memory=f"{8 * PAGE_BYTES}B"), max_model_len=64)
    with llm.prefill(torch.tensor([prompt(60), prompt(60, 1)][:1])) as batch:
        assert free_pages(llm) == 3
        assert len(tokens_of(llm, prompt(10))) == COUNT, "what fits runs"
        with pytest.raises(InputError, match=r"KV cache is full.*release finished batches"):
            llm.generate([prompt(10), prompt(40)], GREEDY)
        with pytest.raises(InputError, match="KV cache is full"):
            llm.prefill(torch.tensor([prompt(60)]))
        assert free_pages(llm) == 3
        llm.decode(batch)
    assert len(tokens(llm, [prompt(40)])[0]) == COUNT


def tokens_of(llm: LLM, row: list[int]) -> list[int]:
    return llm.generate([row], GREEDY)[0].outputs[0].token_ids


def test_warm_up_between_requests_leaves_their_pages_alone(llm: LLM) -> None:
    """A lazy set warms a bucket up when the first request that needs it holds its pages already."""
    prompts = [prompt(40, row) for row in range(3)]
    lazy = tiny_llm(buckets(batch=[1, 2, 4], warmup={"lazy": True, "self_check": True}))
    assert lazy.report is not None and not lazy.report.buckets
    limits = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in (20, 4, 9)]
    want = [line[:limit] for line, limit in zip(tokens(llm, prompts), (20, 4, 9), strict=True)]
    assert tokens(lazy, prompts, limits) == want
    assert set(hits(lazy, "decode")) == {"batch=4", "batch=2", "batch=1"}

    again = tiny_llm(buckets(warmup={"self_check": True}))
    with again.prefill(torch.tensor([prompts[0]])) as batch:
        got = [batch.tokens.item()]
        again.warmup()
        got += [again.decode(batch).tokens.item() for _ in range(19)]
    assert got == tokens(llm, prompts[:1])[0]


def test_a_bucket_warmed_up_by_a_call_writes_nothing_but_the_calls_own_tokens() -> None:
    lazy = tiny_llm(buckets(batch=[8], warmup={"lazy": True, "self_check": True}))
    with lazy.prefill(*pad([prompt(100, row) for row in range(8)], "left")) as batch:
        cache = lazy._runner.cache.data
        before = cache.clone()
        lazy.decode(batch)
        changed = (cache != before).any(-1).any(3).any(0).any(0)  # [pages, page_size]
        assert int(changed.sum()) == 8
        for request in batch.requests:
            page, offset = divmod(100, 16)
            assert changed[request.table[page], offset]


def test_warm_up_leaves_the_cache_clean_and_page_0_is_never_written(llm: LLM) -> None:
    checked = tiny_llm(buckets(warmup={"self_check": True}))
    assert checked.report is not None and checked.report.ok
    assert all(row.check is not None and row.check < 1e-5 for row in checked.report.buckets)
    assert not checked._runner.cache.data.any()
    tokens(checked, [prompt(100), prompt(1)])
    assert not checked._runner.cache.data[:, :, 0].any() and checked._runner.cache.data[:, :, 1].any()


def test_contexts_that_are_no_multiple_of_the_page_fit_their_buckets() -> None:
    """A bucket of 64 tokens takes three prompts of at most 24, so six pages, although 64 tokens fill four."""
    llm = tiny_llm(buckets(tokens=[64], batch=[1], requests=[4], warmup={"self_check": True}), max_model_len=24)
    assert llm.report is not None and llm.report.ok, llm.report
    assert [len(line) for line in tokens(llm, [prompt(20), prompt(23)])] == [4, 1]
