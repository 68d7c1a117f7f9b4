"""Two KV caches under one LLM: each keeps its rows and its pages, and neither is read or given pages for the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llm_cases import buckets, is_idle, tiny, tiny_llm

from bucketgraph import LLM, SamplingParams
from bucketgraph.errors import InputError
from bucketgraph.llm import runner
from bucketgraph.llm.kv_cache import PagedKVCache

ROWS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
OTHERS = torch.tensor([[40, 41, 42], [43, 44, 45]])


@pytest.fixture
def llm() -> LLM:
    return tiny_llm(buckets(batch=(1, 2)), max_model_len=64)


def steps(llm: LLM, rows: torch.Tensor, count: int = 4) -> list[torch.Tensor]:
    with llm.prefill(rows) as batch:
        return [batch.logits.clone(), *(llm.decode(batch).logits.clone() for _ in range(count))]


def test_batches_of_two_caches_decode_in_turns_as_if_alone(llm: LLM) -> None:
    want = steps(llm, ROWS), steps(llm, OTHERS)
    other = llm.cache.like()
    data = llm.cache.data
    one = llm.prefill(ROWS)
    held = llm.cache.free_pages
    llm.swap_cache(other)
    assert llm.cache.data is data and llm.cache.is_idle and other.free_pages == held
    two = llm.prefill(OTHERS)
    got: tuple[list[torch.Tensor], list[torch.Tensor]] = [one.logits.clone()], [two.logits.clone()]
    for _ in range(4):
        got[1].append(llm.decode(two).logits.clone())
        llm.swap_cache(other)
        got[0].append(llm.decode(one).logits.clone())
        llm.swap_cache(other)
    for mine, alone in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, alone, strict=True))
    one.close()
    two.close()
    assert is_idle(llm) and other.is_idle, "each page went back where it is"


def test_a_batch_whose_cache_is_out_says_so(llm: LLM) -> None:
    other = llm.cache.like()
    with llm.prefill(ROWS) as batch:
        llm.swap_cache(other)
        with pytest.raises(InputError, match="the batch lies in another KV cache; swap its cache in first"):
            llm.decode(batch)
        assert batch.lengths == [4, 4]
        llm.swap_cache(other)
        llm.decode(batch)
    assert is_idle(llm)


def test_another_shape_is_refused_and_nothing_moves(llm: LLM) -> None:
    cache = llm.cache
    for other, text in (
        (PagedKVCache(tiny(), cache.pages, 32, torch.float32, torch.device("cpu")), "differ in page size"),
        (PagedKVCache(tiny(), cache.pages + 1, 16, torch.float32, torch.device("cpu")), "cache.data cannot move"),
    ):
        before, ledger = cache.data.data_ptr(), cache.ledger
        with pytest.raises(InputError, match=text):
            llm.swap_cache(other)
        assert (cache.data.data_ptr(), other.free_pages) == (before, other.pages - 1)
        assert cache.ledger is ledger
    with pytest.raises(InputError, match="lies in memory of"):
        llm.swap_cache(cache)
    assert cache.is_idle


def test_prompts_in_flight_are_not_moved(llm: LLM) -> None:
    stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0), stream=True)
    next(stream)
    with pytest.raises(InputError, match="prompts are being generated"):
        llm.swap_cache(llm.cache.like())
    list(stream)
    llm.swap_cache(llm.cache.like())


def test_graphs_are_prepared_while_pages_and_memory_still_belong_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proving runs the function on free pages: of the memory that is in place, or it would write into live rows."""
    ledger, place, seen = llm.cache.ledger, llm.cache.data.data_ptr(), []
    prepare = runner.prepare

    def watched(*args: Any) -> Any:
        seen.append((llm.cache.ledger is ledger, llm.cache.data.data_ptr() == place))
        return prepare(*args)

    monkeypatch.setattr(runner, "prepare", watched)
    llm.swap_cache(llm.cache.like())
    assert seen == [(True, True)] and llm.cache.ledger is not ledger
