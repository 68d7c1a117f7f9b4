"""Bad input is one clear error of ours, raised before anything runs, and nothing is held afterwards."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llm_cases import buckets, is_idle, loud_weights, tiny, tiny_llm

from bucketgraph import LLM, BucketManager, SamplingParams
from bucketgraph.config import load
from bucketgraph.errors import BucketGraphError, ConfigError, InputError

ONE = SamplingParams(max_tokens=1)
NAN = float("nan")
LIMIT = 64  # max_model_len


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(max_model_len=LIMIT)


@pytest.fixture(autouse=True)
def nothing_ran(llm: LLM) -> Iterator[None]:
    before = {name: stats.calls for name, stats in llm.stats().items()}
    yield
    assert is_idle(llm)
    assert {name: stats.calls for name, stats in llm.stats().items()} == before


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "no prompts"),
        ([[]], "prompt 0 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ({"prompt_token_ids": []}, "prompt 0 is empty"),
        (None, "prompts: given NoneType"),
        (5, "prompts: given int"),
        (b"abc", "prompts: given bytes"),
        (torch.tensor([1, 2]), "prompts: given Tensor"),
        (np.array([1, 2]), "prompts: given ndarray"),
        ([[1], 5], "prompt 1 is neither text nor a list of token ids: given int"),
        ([[1], None], "prompt 1 is neither text nor a list of token ids: given NoneType"),
        ([b"abc"], "prompt 0 is neither text nor a list of token ids: given bytes"),
        ([torch.tensor([1])], "prompt 0 is neither text nor a list of token ids: given Tensor"),
        ({"prompt_token_ids": 5}, "prompt 0 is neither text nor a list of token ids: given int"),
        ({"prompt_token_ids": "abc"}, "prompt 0 is neither text nor a list of token ids: given str"),
        ({}, "prompt 0 is neither text nor a list of token ids: given NoneType"),
        ({"prompts": [1]}, r"prompt 0 has unknown keys: given \['prompts'\], expected prompt, prompt_token_ids"),
        ("text", "prompt 0 is text; random weights have no tokenizer"),
        ([[1], "text"], "prompt 1 is text"),
        ([1, -1], "prompt 0: token outside the vocabulary: given -1, expected 0 to 96"),
        ([[1], [97]], "prompt 1: token outside the vocabulary: given 97, expected 0 to 96"),
        ([[2**70]], "token outside the vocabulary"),
        ([True, False], "prompt 0: a token id is a whole number: given True"),
        ([[1, 2.0]], "prompt 0: a token id is a whole number: given 2.0"),
        ([[1, "2"]], "prompt 0: a token id is a whole number: given '2'"),
        ([[1], [2, np.int64(3)]], "prompt 1: a token id is a whole number: given np.int64"),
        ([[1] * LIMIT], "prompt 0 is too long for the context: given 64 tokens and 1 to come, expected at most max_mo"),
        ([[1], [1] * 1000], "prompt 1 is too long for the context: given 1000 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompts_are_refused_by_number(llm: LLM, prompts: Any, says: str, stream: bool) -> None:
    with pytest.raises(InputError, match=says):
        llm.generate(prompts, ONE, stream=stream)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([ONE], "sampling params do not match the prompts: given 1, expected 2"),
        ([ONE] * 3, "sampling params do not match the prompts: given 3, expected 2"),
        ([], "sampling params do not match the prompts: given 0, expected 2"),
        ({"temperature": 0.0}, "sampling params: given dict, expected one SamplingParams"),
        ([ONE, None], "sampling params: given NoneType"),
        (0.0, "sampling params: given float"),
        (SamplingParams(stop="x"), "stop strings need a tokenizer"),
    ],
)
def test_bad_params_lists_are_refused(llm: LLM, params: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        llm.generate([[1], [2]], params)


@pytest.mark.parametrize(
    "options",
    [{"temperature": value} for value in (NAN, -0.1, float("inf"), "1", None, True, 1e-3)]
    + [{"top_p": value} for value in (0, 0.0, 1.01, -0.5, NAN, "1", None, True)]
    + [{"top_k": value} for value in (-2, 1.5, True, None, 2**31, "3")]
    + [{"max_tokens": value} for value in (0, -1, 1.0, True, "9")]
    + [{"min_tokens": value} for value in (-1, None, 2.5)]
    + [{"min_tokens": 17}, {"min_tokens": 5, "max_tokens": 4}]
    + [{"stop": value} for value in ("", ["ok", ""], [1], [None], 5, True)]
    + [{"stop_token_ids": value} for value in ([-1], [1.0], [True], 5, "ab")]
    + [{"seed": value} for value in (2**63, -(2**63) - 1, 1.0, "1", True)]
    + [{"logprobs": value} for value in (-1, True, 1.5)],
    ids=str,
)
def test_a_bad_sampling_value_is_named_when_it_is_given(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(InputError, match="stop string" if options.get("stop") not in (None, 5, True) else name):
        SamplingParams(**options)
    if options == {"stop": ""}:
        with pytest.raises(InputError, match="a stop string must be text that is not empty: given ''"):
            SamplingParams(**options)


def test_a_token_id_may_be_of_a_subclass_of_int() -> None:
    ids = enum.IntEnum("Ids", {"one": 1, "two": 2})
    llm = tiny_llm(max_model_len=LIMIT)
    (named,), (plain,) = (llm.generate([row], SamplingParams(temperature=0.0)) for row in ([ids.one, ids.two], [1, 2]))
    assert named.outputs[0].token_ids == plain.outputs[0].token_ids


IDS = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([[1, 2]], None, "input_ids is not a tensor: given list"),
        (torch.tensor([1, 2]), None, r"input_ids has the wrong rank: given \[2\], expected \[B, S\]"),
        (IDS[None], None, "input_ids has the wrong rank"),
        (IDS.float(), None, "input_ids has the wrong dtype: given torch.float32"),
        (IDS[:0], None, "the batch is empty"),
        (IDS[:, :0], None, "the batch is empty"),
        (IDS * 97, None, "input_ids row 0: token outside the vocabulary: given 97"),
        (-IDS, None, "input_ids row 0: token outside the vocabulary: given -1"),
        (IDS.new_ones(1, LIMIT + 1), None, "row 0 is too long for the context: given 65 tokens, expected at most"),
        (IDS, IDS[:, :3], r"attention_mask has another shape: given \[2, 3\], expected \[2, 4\]"),
        (IDS, IDS[0], "attention_mask has the wrong rank"),
        (IDS, IDS.float(), "attention_mask has the wrong dtype"),
        (IDS, IDS.tolist(), "attention_mask is not a tensor"),
        (IDS, torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]), "attention_mask row 1 is neither left- nor right-padded"),
        (IDS, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]), "attention_mask row 1 is neither left- nor right-padded"),
        (IDS, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), "row 1 is empty"),
        (IDS, torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2]]), "attention_mask row 1 has values other than 0 and 1"),
        (IDS, torch.tensor([[1, 1, 1, -1], [1, 1, 1, 1]]), "attention_mask row 0 has values other than 0 and 1"),
    ],
)
def test_bad_padded_batches_are_refused_by_row(llm: LLM, ids: Any, mask: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        llm.prefill(ids, mask)


@pytest.fixture(scope="module")
def padded() -> LLM:
    return tiny_llm(buckets(tokens=[16], batch=[2]), max_model_len=LIMIT)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (torch.tensor([1]), "tokens do not fit the batch: given 1, expected 2 rows"),
        (torch.tensor([1, 2, 3]), "tokens do not fit the batch: given 3, expected 2 rows"),
        (torch.tensor([[1], [2]]), "tokens has the wrong rank"),
        (torch.tensor([1.0, 2.0]), "tokens has the wrong dtype"),
        (torch.tensor([True, False]), "tokens has the wrong dtype"),
        ([1, 2], "tokens is not a tensor"),
        (torch.tensor([1, 97]), "tokens: token outside the vocabulary: given 97"),
        (torch.tensor([1, -1]), "tokens: token outside the vocabulary: given -1"),
    ],
)
def test_bad_tokens_leave_a_padded_batch_where_it_was(padded: LLM, tokens: Any, says: str) -> None:
    with padded.prefill(IDS) as batch:
        with pytest.raises(InputError, match=says):
            padded.decode(batch, tokens)
        assert batch.lengths == [4, 4] and padded.stats()["decode"].calls == 0


def test_the_contexts_end_is_exact() -> None:
    own = tiny_llm(max_model_len=LIMIT)
    assert len(own.generate([[1] * (LIMIT - 1)], ONE)[0].outputs[0].token_ids) == 1
    with own.prefill(torch.ones(1, LIMIT - 1, dtype=torch.int64)) as batch:
        own.decode(batch)
        assert batch.lengths == [LIMIT]
        with pytest.raises(InputError, match="row 0 is too long for the context: given 64 tokens and 1 to come"):
            own.decode(batch)
        assert batch.lengths == [LIMIT]
    own.prefill(torch.ones(1, LIMIT, dtype=torch.int64)).close()
    assert is_idle(own)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_other_mask_dtypes_are_taken(padded: LLM, dtype: torch.dtype) -> None:
    with padded.prefill(IDS.int(), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).to(dtype)) as batch:
        assert batch.lengths == [2, 4]


# -- sets and settings that do not fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, -1, 257])
def test_a_context_that_the_model_has_not_is_refused(length: int) -> None:
    with pytest.raises(
        ConfigError, match=f"max_model_len is out of range: given {length}, expected 1 to the model's 256"
    ):
        tiny_llm(max_model_len=length)
    if length > 0:
        with pytest.raises(ConfigError, match="max_model_len is out of range"):
            tiny_llm(buckets(max_model_len=length))


def test_a_bad_context_is_refused_before_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketgraph.llm.api.random_weights", lambda *_: pytest.fail("weights were made"))
    with pytest.raises(ConfigError, match="max_model_len is out of range"):
        LLM("random:llama-3.1-8b", buckets(), device="cpu", max_model_len=10**6)


@pytest.mark.parametrize(
    ("bucket_set", "options", "says"),
    [
        ({"memory": "1KiB"}, {}, "the KV cache holds no page"),
        (
            {"memory": "32KiB"},
            {"max_model_len": 256},
            "the KV cache is smaller than max_model_len: given 48 tokens, ex",
        ),
        ({"memory": "32KiB"}, {}, "prefill's largest bucket exceeds the KV cache: given 64 tokens"),
        (
            {"memory": "32KiB", "tokens": [16], "batch": [4]},
            {},
            "decode's largest bucket exceeds the KV cache: given 4",
        ),
        (
            {"tokens": [64], "requests": [2]},
            {"max_model_len": 31},
            "can be filled by no requests: given 64 tokens for 2 ",
        ),
    ],
)
def test_buckets_that_the_cache_or_context_cannot_fill_are_refused(
    bucket_set: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tiny_llm(buckets(**bucket_set), **options)


def test_a_context_that_nobody_asked_for_is_cut_to_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        own = tiny_llm(buckets(memory="64KiB"))
    assert own.max_model_len == 7 * 16 and "context limited to 112 tokens" in caplog.text


def test_a_single_row_set_still_fits_its_prefill_bucket() -> None:
    """Pages for one request of 32 tokens would be fewer than the bucket of 64 packs."""
    own = tiny_llm(buckets(tokens=[64], batch=[1], requests=[4]), max_model_len=32)
    assert own._runner.cache.pages - 1 == 4


def test_sets_of_the_other_kind_name_what_takes_them() -> None:
    config = tiny()
    with pytest.raises(ConfigError, match="an LLM needs a set with phases; use BucketManager"):
        LLM.from_weights(config, loud_weights(config), "minilm")
    with pytest.raises(ConfigError, match=r"an LLM set has phases; use bucketgraph\.LLM"):
        BucketManager(lambda **_: None, load("llm"))
    with pytest.raises(ConfigError, match="no such bucket set"):
        LLM.from_weights(config, loud_weights(config), "no-such-set")


def test_every_error_is_of_one_tree_and_a_value_error() -> None:
    assert issubclass(InputError, BucketGraphError) and issubclass(InputError, ValueError)
    assert issubclass(ConfigError, BucketGraphError) and issubclass(ConfigError, ValueError)
