"""Seeds, temperature and truncation take effect as stated, and a draw depends on nothing but the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llm_cases import buckets, is_idle, pad, tiny_llm

from bucketgraph import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 16


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def drawn(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[list[int]]:
    results = llm.generate(prompts, list(params) if len(params) > 1 else params[0])
    assert is_idle(llm)
    return [result.outputs[0].token_ids for result in results]


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": COUNT, **options})


PROMPTS = [[1, 2, 3], [4] * 20, [5], [6, 7] * 40]


def test_the_same_seed_draws_the_same_tokens_whatever_the_batch_or_buckets(llm: LLM) -> None:
    params = [sampled(seed=seed, top_p=0.9, top_k=40 * (seed % 2)) for seed in (0, 1, -(2**63), 2**63 - 1)]
    together = drawn(llm, PROMPTS, *params)
    assert drawn(llm, PROMPTS[::-1], *params[::-1]) == together[::-1]
    assert [drawn(llm, [row], one)[0] for row, one in zip(PROMPTS, params, strict=True)] == together
    other = tiny_llm(buckets(tokens=[7], batch=[3], requests=[2]))
    assert drawn(other, PROMPTS, *params) == together


def test_different_seeds_differ(llm: LLM) -> None:
    lines = drawn(llm, [[1, 2, 3]] * 8, *(sampled(seed=seed) for seed in range(8)))
    assert len({tuple(line) for line in lines}) == 8


def test_requests_without_a_seed_differ_and_an_llms_seed_makes_a_run_repeatable() -> None:
    first, second, third = (tiny_llm(seed=seed) for seed in (5, 5, 6))
    runs = [[drawn(llm, [[1, 2, 3]] * 3, sampled()), drawn(llm, [[1, 2, 3]], sampled())] for llm in (first, second)]
    assert runs[0] == runs[1]
    assert len({tuple(line) for run in runs[0] for line in run}) == 4
    assert drawn(third, [[1, 2, 3]] * 3, sampled()) != runs[0][0]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_draw_from_one_token_is_greedy(llm: LLM, options: dict[str, Any]) -> None:
    assert drawn(llm, PROMPTS, sampled(seed=9, **options)) == drawn(llm, PROMPTS, sampled(temperature=0.0))


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 97}, {"top_k": 5000}, {"top_p": 1.0}])
def test_truncation_that_keeps_everything_changes_nothing(llm: LLM, off: dict[str, Any]) -> None:
    assert drawn(llm, PROMPTS, sampled(seed=4, **off)) == drawn(llm, PROMPTS, sampled(seed=4))


def reported(llm: LLM, **options: Any) -> Iterator[tuple[int, dict[int, Any]]]:
    params = sampled(max_tokens=40, logprobs=97, **options)
    for result in llm.generate([[row] for row in range(6)], params):
        done = result.outputs[0]
        assert done.logprobs is not None
        yield from zip(done.token_ids, done.logprobs, strict=True)


def test_top_k_draws_from_the_k_most_likely(llm: LLM) -> None:
    ranks = [entry[token].rank for token, entry in reported(llm, top_k=3, temperature=3.0)]
    assert set(ranks) == {1, 2, 3}


def test_top_p_draws_from_the_mass_and_from_all_of_it(llm: LLM) -> None:
    seen = 0
    for token, entry in reported(llm, top_p=0.6):
        above = sum(
            torch.tensor(item.logprob).exp().item() for item in entry.values() if item.logprob > entry[token].logprob
        )
        assert above < 0.6 + 1e-5
        seen = max(seen, entry[token].rank)
    assert seen > 2, "more than the most likely was drawn"


def test_temperature_flattens(llm: LLM) -> None:
    cold, warm, hot = (
        sum(entry[token].rank for token, entry in reported(llm, temperature=temperature)) / 240
        for temperature in (0.2, 1.0, 5.0)
    )
    assert 1.0 <= cold < warm < hot


def test_draws_follow_the_softmax() -> None:
    """2,000 draws of one token: every count within five standard deviations of its probability."""
    llm = tiny_llm(buckets(tokens=[256], batch=[4], requests=[64]))
    with llm.prefill(*pad([[11, 12, 13]], "left")) as batch:
        p = torch.softmax(batch.logits[0] / 0.8, dim=-1)
    params = [sampled(temperature=0.8, max_tokens=1, seed=seed) for seed in range(2000)]
    lines = drawn(llm, [[11, 12, 13]] * 2000, *params)
    counts = torch.bincount(torch.tensor([line[0] for line in lines]), minlength=97)
    assert bool(((counts - 2000 * p).abs() <= 5 * (2000 * p * (1 - p)).sqrt() + 1).all())


@pytest.mark.parametrize("top", [0, 1, 5, 97, 500])
def test_logprobs_report_as_many_as_asked_and_always_the_chosen(llm: LLM, top: int) -> None:
    for result in llm.generate(PROMPTS, sampled(seed=2, temperature=2.0, logprobs=top)):
        done = result.outputs[0]
        assert done.logprobs is not None
        total = 0.0
        for token, entry in zip(done.token_ids, done.logprobs, strict=True):
            assert token in entry
            assert min(top, 97) <= len(entry) <= min(top + 1, 97)
            ranks = sorted(item.rank for item in entry.values())
            assert ranks[: min(top, 97)] == list(range(1, min(top, 97) + 1))
            assert all(item.decoded_token is None for item in entry.values())
            total += entry[token].logprob
        assert done.cumulative_logprob == pytest.approx(total)


def test_logprobs_are_reported_to_those_who_asked(llm: LLM) -> None:
    results = llm.generate(PROMPTS, [sampled(logprobs=n) for n in (None, 2, None, 0)])
    lists = [result.outputs[0].logprobs for result in results]
    assert lists[0] is None and lists[2] is None and results[0].outputs[0].cumulative_logprob is None
    assert lists[1] is not None and max(map(len, lists[1])) == 3
    assert lists[3] is not None and max(map(len, lists[3])) == 1
