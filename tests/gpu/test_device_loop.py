"""The device-side decode loop on a GPU: the host loop's tokens, its endings, two steps to cancel, nothing left over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llm_cases import buckets, free_pages, is_idle

from bucketgraph import LLM, SamplingParams, monitor
from bucketgraph.errors import StaleError
from bucketgraph.llm.device_loop import Run
from bucketgraph.llm.device_loop.build import check
from bucketgraph.llm.device_loop.loop import Loop
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.weights import random_weights

CUDA = torch.device("cuda")
LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
MIB = 1 << 20


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 1000, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = shrink(preset("llama-3.2-1b"), num_layers=2)
    made = buckets(tokens=[64, 512], batch=[1, 8, 64], requests=[8], warmup={"self_check": True})
    weights = random_weights(config, torch.bfloat16, "cuda")
    with LLM.from_weights(config, weights, made, max_model_len=1024, loop="device") as llm:
        assert llm.report is not None and llm.report.ok, llm.report
        yield llm


def tokens(llm: LLM, prompts: list[list[int]], params: Any, loop: Any) -> list[list[int]]:
    results = [result.outputs[0].token_ids for result in llm.generate(prompts, params, loop=loop)]
    assert is_idle(llm)
    return results


def both(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """The device loop's tokens, which are the host loop's, and none of which the host loop made."""
    want = tokens(llm, prompts, params, "host")
    before = dict(llm.stats()["decode"].outcomes)
    got = tokens(llm, prompts, params, "device")
    after = llm.stats()["decode"].outcomes
    assert got == want
    assert {name for name in after if after[name] != before.get(name, 0)} <= {"looped"}, llm.stats()["decode"].reasons
    return got


def in_flight(llm: LLM, rows: int = 4, steps: int = 1) -> Run:
    """A run that has published at least so many steps, beyond its prefill."""
    llm._engine.add(llm._requests([prompt(9, row) for row in range(rows)], LONG))
    for request in llm._engine._waiting:
        request.loop = "device"
    while llm._engine._run is None:
        llm._engine.step()
    run, end = llm._engine._run, time.monotonic() + 20
    while run._ring.read()[0] < steps:
        assert time.monotonic() < end, "no step was published"
    return run


def test_every_bucket_has_a_loop(llm: LLM, record_property: pytest.RecordProperty) -> None:
    record_property("loops", [str(row) for row in llm.loops()])
    assert [(row.bucket, row.error) for row in llm.loops()] == [(f"batch={n}", None) for n in (64, 8, 1)]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_tokens_equal_the_host_loops(llm: LLM, rows: int, seeded: bool) -> None:
    prompts = [prompt(1 + 13 * row % 60, row) for row in range(rows)]
    kinds: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"temperature": 0.0}]
    params = [
        SamplingParams(**{"temperature": 0.8 * seeded, "seed": row, **kinds[row % 4 * seeded]}, max_tokens=40)
        for row in range(rows)
    ]
    got = both(llm, prompts, params)
    assert rows == 1 or len({tuple(line) for line in got}) > 1


def test_64_rows_that_end_at_different_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    for _, loop, _ in llm._engine.loops._loops.values():
        assert loop is not None
        launch = loop.launcher.launch
        monkeypatch.setattr(loop.launcher, "launch", lambda launch=launch: (launches.append(1), launch())[1])
    limits = [1 + 3 * row % 61 for row in range(63)] + [70]
    params = [SamplingParams(temperature=0.7, seed=row, max_tokens=n, ignore_eos=True) for row, n in enumerate(limits)]
    got = both(llm, [prompt(1 + row % 30, row) for row in range(64)], params)
    assert [len(line) for line in got] == limits
    assert len(launches) == 3, "one launch in each bucket, for all 69 steps"


def test_endings_are_the_host_loops(llm: LLM) -> None:
    """A stop token in the loop's first step, in the prefill, and before `min_tokens`; limits of 1 and 2."""
    common: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 30, "ignore_eos": True}
    for seed in range(20):
        row = prompt(10, seed)
        whole = tokens(llm, [row] * 8, SamplingParams(**common), "host")[0]  # of the same bucket, so of the same bits
        if whole[0] != whole[1] and whole.index(whole[9]) == 9:
            break
    cases: list[tuple[dict[str, Any], int]] = [
        ({"stop_token_ids": [whole[1]]}, 2),
        ({"stop_token_ids": [whole[0]]}, 1),
        ({"stop_token_ids": [5, whole[9], 6]}, 10),
        ({"stop_token_ids": [whole[1]], "min_tokens": 1}, 2),
        ({"stop_token_ids": [whole[9]], "min_tokens": 9}, 10),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 2}, 2),
    ]
    params = [SamplingParams(**{**common, **changes}) for changes, _ in cases]
    params.append(SamplingParams(**common, stop_token_ids=[whole[9]], min_tokens=10))
    got = both(llm, [row] * len(params), params)
    assert got[:-1] == [whole[:length] for _, length in cases]
    assert len(got[-1]) > 10
    for one in params:
        both(llm, [row], one)


def test_cancelling_takes_at_most_two_steps(llm: LLM) -> None:
    taken = []
    for turn in range(10):
        run = in_flight(llm, steps=5 + turn)
        run.cancel()
        at = run._ring.read()[0]
        run.wait()
        taken.append(run.steps - at)
        llm._engine.abort(run.requests)
        assert is_idle(llm)
    assert max(taken) <= 2 and run.steps < 800, taken


def test_what_was_generated_before_a_cancel_is_valid(llm: LLM) -> None:
    want = tokens(llm, [prompt(9, row) for row in range(4)], LONG, "host")
    run = in_flight(llm, steps=30)
    run.stop()
    assert [ids for _, ids in run.take()] == [line[1 : 1 + run.steps] for line in want]
    llm._engine.abort(run.requests)
    assert is_idle(llm)


def test_a_late_reader_of_a_stream_loses_no_token(llm: LLM) -> None:
    want = tokens(llm, [prompt(9)], LONG, "host")
    stream = llm.generate([prompt(9)], LONG, stream=True, loop="device")
    got = next(stream).token_ids + next(stream).token_ids
    run = llm._engine._run
    assert run is not None
    end = time.monotonic() + 20
    while not run._ring.read()[1]:
        assert time.monotonic() < end
    for delta in stream:
        got += delta.token_ids
    assert [got] == want and is_idle(llm)


def test_a_dropped_stream_gives_its_pages_back_and_ends_its_run(llm: LLM) -> None:
    free = free_pages(llm)
    stream = llm.generate([prompt(9), prompt(5)], LONG, stream=True, loop="device")
    for _ in range(4):
        next(stream)
    run = llm._engine._run
    stream.close()  # type: ignore[attr-defined]
    assert free_pages(llm) == free and is_idle(llm)
    assert run is not None and run.over and run.steps < 890


def test_a_prompt_that_comes_during_a_run_joins_it(llm: LLM) -> None:
    want = tokens(llm, [prompt(9)], LONG, "host"), tokens(llm, [prompt(300, 1)], LONG, "host")
    stream = llm.generate([prompt(9)], LONG, stream=True, loop="device")
    got = next(stream).token_ids + next(stream).token_ids
    other = [result.outputs[0].token_ids for result in llm.generate([prompt(300, 1)], LONG, loop="device")]
    for delta in stream:
        got += delta.token_ids
    # In a batch of two it is another bucket's kernels that decode, so only lengths must agree; no token is lost.
    assert len(got) == len(want[0][0]) and len(other[0]) == len(want[1][0]) and is_idle(llm)
    assert other[0][0] == want[1][0][0] and got[:2] == want[0][0][:2]


def test_the_loop_without_programmatic_edges_gives_the_same_tokens(llm: LLM) -> None:
    runner = llm._runner
    manager = runner.decode_manager
    with manager.family.turn():
        for captured in manager.captured.values():
            loop = Loop(runner, captured, programmatic=False)
            try:
                assert not loop.launcher.programmatic
                check(runner, loop)
            finally:
                loop.launcher.release()
    assert is_idle(llm)


def test_repeats_compile_nothing_and_take_no_memory(llm: LLM) -> None:
    prompts = [prompt(5 + row, row) for row in range(8)]

    def once(turn: int) -> None:
        params = SamplingParams(temperature=0.8 * (turn % 2), seed=turn, max_tokens=5 + turn % 7, ignore_eos=True)
        for count in (1, 3, 8):
            tokens(llm, prompts[:count], params, "device")

    once(0), once(1)
    torch.cuda.synchronize()
    before = monitor.compiles(), monitor.segments(CUDA), torch.cuda.mem_get_info()[0]
    for turn in range(40):
        once(turn)
    torch.cuda.synchronize()
    assert (monitor.compiles(), monitor.segments(CUDA)) == before[:2]
    assert torch.cuda.mem_get_info()[0] >= before[2] - MIB


def test_a_launch_waits_for_nothing_on_the_host(llm: LLM) -> None:
    with monitor.watch(CUDA) as seen:
        run = in_flight(llm)
        run.stop()
        llm._engine.abort(run.requests)
    # The prefill's token is fetched, which is one sync; the run itself is none.
    assert seen.syncs <= 1 and seen.compiles == seen.segments == 0, seen


def test_a_rebound_weight_is_refused_before_the_launch(llm: LLM) -> None:
    weights = llm._runner.model.weights
    kept, free = weights.final_norm.data, free_pages(llm)
    llm._engine.add(llm._requests([prompt(9)], LONG))
    llm._engine._waiting[0].loop = "device"
    llm._engine.step()  # the prefill
    (request,) = llm._engine._running
    weights.final_norm.data = kept.clone()
    try:
        llm._engine.step()
        assert isinstance(request.error, StaleError), request.error
    finally:
        weights.final_norm.data = kept
    assert free_pages(llm) == free and is_idle(llm)


def test_loops_that_are_released_and_built_again_leak_nothing(llm: LLM) -> None:
    loops, free = llm._engine.loops, []
    for _ in range(5):
        with llm._engine.alone():
            loops.release()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
            assert all(row.error is None for row in loops.build())
    assert free[-1] >= free[1] - 2 * MIB, free
    both(llm, [prompt(7)], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
