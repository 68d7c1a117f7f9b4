"""Surprises, pinned: what somebody could trip over, and what happens then.

A `raised` surprise says so at once; a `counted` one is in `stats()`; a `silent` one is a choice, written down here. The
tests follow in this order.

| surprise | behaviour | how it shows |
|---|---|---|
| a `borrowed` result is the graph's own memory | the next call of its bucket overwrites it | silent |
| a ring of N has N buffers | the N-th later call overwrites a result | silent |
| a ring's buffers belong to calls, not to buckets | calls of other buckets count, too | silent |
| results of `run_batch` are views of one batch | writing one leaves the others; keeping one keeps all | silent |
| a split call is new memory | even where the set says `borrowed` | silent |
| a call before `warmup()` | is refused | raised |
| a call after `release()` | is refused, until the next `warmup()` | raised |
| a module in training mode | is refused | raised |
| a tensor of another dtype | is refused, never cast | raised |
| a size of 0 | is refused, never padded up from nothing | raised |
| a call over the largest bucket | runs eagerly by default | counted, logged once |
| a function that mixes rows fails its self-check | its buckets run unpadded, and calls go on | counted, in the report |
| a rebound weight under a graph | is refused by name before the launch | raised |
| a rebound weight on an eager bucket | is seen | silent |
| a module's weights updated in place | are seen, graph or not | silent |
| `compiled` sees a rebound weight | whether it compiles again or not | silent |
| the parts of a split call | are hits of their buckets, and one call | counted once |
| `[1, 2, 1e3]` in YAML | 1e3 is text there, not 1000 | raised |
| `yes` in YAML | is text, not true | raised |
| `0100` in YAML | is text, not 64 or 100 | raised |
| one key given twice in YAML | is refused, the last does not win | raised |
| an LLM set's `outputs_are` | its results are the caller's own whatever is configured | raised |
| a prompt of one token | is a prefill, whatever its shape | counted |
| `top_k` -1 and 0 | both keep all tokens | silent |
| `top_p` 0 | is refused, it is not greedy | raised |
| a temperature just above 0 | is refused, it is not greedy | raised |
| without a seed | two equal requests differ, unless the LLM has one | silent |
| `max_tokens` counts the stop token | it is in `token_ids` | silent |
| the end token | is in `token_ids` and not in `text` | silent |
| a stop string is compared with text | it may begin and end inside tokens | silent |
| `from_weights` does not copy | updates in place of the caller's tensors are seen | silent |
| a tied model's `lm_head` is its embedding | one update changes both | silent |
| `numerics: fast` | buckets may differ in the last bits | silent |
| an LLM's `prefill` batch | is advanced in place by `decode` | silent |
| an open batch holds its pages | until it is closed; twice is harmless | raised when they run out |
| a list of numbers as prompts | is one prompt of token ids | silent |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from llm_cases import buckets, loud_weights, tiny, tiny_llm
from torch import Tensor, nn

from bucketgraph import LLM, BucketManager, SamplingParams, executables, yaml_strict
from bucketgraph.config import BucketSet, parse
from bucketgraph.errors import ConfigError, InputError, NotWarmError, StaleError
from bucketgraph.executables import Family
from bucketgraph.executables.eager import Eager
from bucketgraph.llm.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 17, 3, 88, 41]


def rows_set(**changed: Any) -> BucketSet:
    made: dict[str, Any] = {
        "version": 1,
        "name": "rows",
        "axes": {"batch": [2, 4]},
        "inputs": {"x": {"shape": ["batch"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch"]}},
    }
    return parse({**made, **changed})


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def warm(fn: Callable[..., Any] | None = None, **changed: Any) -> BucketManager:
    manager = BucketManager(fn or Scale(), rows_set(**changed), device="cpu")
    manager.warmup()
    return manager


class Graph(Eager):
    """Stands for a graph: reads the weights of its capture, and writes results into memory of its own."""

    kind = "cudagraph"

    def capture(self) -> None:
        weights = {name: tensor.detach() for name, tensor in self._fn.state_dict(keep_vars=True).items()}
        self._run = functools.partial(torch.func.functional_call, self._fn, weights, ())
        self._result = self._run(dict(self._inputs)).clone()

    def replay(self) -> Tensor:
        return self._result.copy_(self._run(dict(self._inputs)))


@contextlib.contextmanager
def graphs() -> Iterator[None]:
    def make(kind: str, fn: Callable[..., Any], inputs: Mapping[str, Tensor], family: Family) -> Graph:
        return Graph(fn, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "make", make)
        patch.setattr(executables, "resolve", lambda kind, device: "cudagraph")
        yield


def graphed(module: nn.Module | None = None, **changed: Any) -> BucketManager:
    with graphs():
        return warm(module, **changed)


def ones(count: int, value: float = 1.0) -> Tensor:
    return torch.full((count,), float(value))


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_borrowed_result_is_overwritten_by_the_next_call() -> None:
    manager = graphed(outputs_are="borrowed")
    held = manager(x=ones(3))["y"]
    manager(x=ones(3, 5))
    assert held.tolist() == [10, 10, 10]


def test_a_ring_of_two_is_overwritten_by_the_second_later_call() -> None:
    manager = graphed(outputs_are={"ring": 2})
    held = manager(x=ones(4))["y"]
    manager(x=ones(4, 5))
    assert held.tolist() == [2, 2, 2, 2]
    manager(x=ones(4, 6))
    assert held.tolist() == [12, 12, 12, 12]


def test_calls_of_other_buckets_turn_the_ring_too() -> None:
    manager = graphed(outputs_are={"ring": 2})
    held = manager(x=ones(4))["y"]
    manager(x=ones(1, 5)), manager(x=ones(2, 6))
    assert held.tolist() == [12, 12, 2, 2], "the buffer is the ring's, and the shorter result lies at its beginning"


def test_results_of_a_batch_share_its_memory() -> None:
    results = graphed().run_batch([{"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}])
    first, second = (result["y"] for result in results)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first.fill_(9)
    assert second.item() == 4


def test_a_split_call_gives_new_memory_though_the_set_says_borrowed() -> None:
    manager = graphed(outputs_are="borrowed", overflow="split")
    held = manager(x=ones(7))["y"]
    manager(x=ones(7, 5))
    assert held.tolist() == [2.0] * 7


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_call_before_warm_up_raises() -> None:
    with pytest.raises(NotWarmError, match=r"call warmup\(\) first"):
        BucketManager(Scale(), rows_set())(x=ones(1))


def test_a_call_after_release_raises_until_the_next_warm_up() -> None:
    manager = warm()
    manager.release()
    with pytest.raises(NotWarmError, match="released"):
        manager(x=ones(1))
    manager.warmup()
    assert manager(x=ones(1))["y"].item() == 2


def test_a_module_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="training mode"):
        BucketManager(Scale().train(), rows_set())


def test_a_tensor_of_another_dtype_is_not_cast() -> None:
    with pytest.raises(InputError, match=r"x has the wrong dtype: given torch\.float64"):
        warm()(x=ones(2).double())


def test_nothing_is_not_padded_up() -> None:
    with pytest.raises(InputError, match="batch is empty"):
        warm()(x=ones(0))


def test_over_the_largest_bucket_a_call_runs_eagerly_and_is_counted() -> None:
    manager = warm()
    assert manager(x=ones(9))["y"].tolist() == [2.0] * 9
    assert manager.stats().fallbacks == {"eager:over_largest": 1}


def test_a_function_that_mixes_rows_runs_unpadded_and_is_counted() -> None:
    manager = BucketManager(lambda x: x - x.mean(), rows_set())
    report = manager.warmup()
    assert not report.ok and "differs from unpadded eager" in str(report.failed[0].error)
    assert manager(x=torch.tensor([1.0, 2.0, 6.0]))["y"].tolist() == [-2, -1, 3]
    assert manager.stats().fallbacks == {"eager:bucket_failed": 1}


# -- weights -----------------------------------------------------------------------------------------------------------


def test_a_rebound_weight_under_a_graph_raises_by_name() -> None:
    module = Scale()
    manager = graphed(module)
    module.weight = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
    with pytest.raises(StaleError, match="weight was rebound"):
        manager(x=ones(2))


def test_a_rebound_weight_is_seen_by_an_eager_bucket() -> None:
    module = Scale()
    manager = warm(module, executable="eager")
    module.weight = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
    assert manager(x=ones(2))["y"].tolist() == [3, 3]


def test_an_update_in_place_is_seen_by_a_graph() -> None:
    module = Scale()
    manager = graphed(module)
    module.weight.fill_(3)
    assert manager(x=ones(2))["y"].tolist() == [3, 3]


def test_compiled_sees_a_rebound_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    # The backend that only traces: what is pinned is that the weights are not part of the program.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    module = Scale()
    manager = warm(module, executable="compiled")
    module.weight = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
    assert manager(x=ones(2))["y"].tolist() == [3, 3]


def test_a_split_call_is_one_call_and_its_parts_are_hits() -> None:
    manager = warm(overflow="split")
    manager(x=ones(7))
    stats = manager.stats()
    assert stats.calls == 1 and stats.outcomes == {"split": 1}
    assert {row.bucket: row.hits for row in stats.buckets} == {"batch=2": 0, "batch=4": 2}


# -- bucket sets -------------------------------------------------------------------------------------------------------

YAML = """version: 1
name: m
axes: {batch: [1, 2, %s]}
inputs: {x: {shape: [batch], dtype: float32}}
outputs: {y: {shape: [batch]}}
"""


@pytest.mark.parametrize(("scalar", "text"), [("1e3", "'1e3'"), ("yes", "'yes'"), ("0100", "'0100'")])
def test_what_looks_like_a_number_to_other_yaml_readers_is_refused_as_text(scalar: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"axes.batch.*whole number.*given {text}"):
        parse(yaml_strict.read(YAML % scalar, "m.yaml"), "m.yaml")
    with pytest.raises(ConfigError, match=r"warmup\.lazy"):
        parse(yaml_strict.read(YAML % 4 + "warmup: {lazy: yes}\n", "m.yaml"), "m.yaml")


def test_the_last_of_two_equal_keys_does_not_win() -> None:
    with pytest.raises(ConfigError, match=r"'name' is given twice, on lines 2 and 6"):
        yaml_strict.read(YAML % 4 + "name: n\n", "m.yaml")


def test_an_llm_set_that_configures_who_owns_its_outputs_is_refused() -> None:
    phases = {"prefill": {"axes": {"tokens": [16]}, "outputs_are": "cloned"}, "decode": {"axes": {"batch": [1]}}}
    with pytest.raises(ConfigError, match=r"phases\.prefill\.outputs_are: an LLM's results are its caller's own"):
        parse({"version": 1, "name": "m", "phases": phases})


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def test_a_prompt_of_one_token_is_a_prefill(llm: LLM) -> None:
    before = {name: stats.calls for name, stats in llm.stats().items()}
    llm.generate([[5]], SamplingParams(max_tokens=1))
    calls = {name: stats.calls - before[name] for name, stats in llm.stats().items()}
    assert calls == {"prefill": 1, "decode": 0}


def token_ids(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def test_top_k_of_minus_one_and_of_zero_keep_all(llm: LLM) -> None:
    drawn = [token_ids(llm, SamplingParams(top_k=k, seed=3, max_tokens=8)) for k in (-1, 0, 97)]
    assert drawn[0] == drawn[1] == drawn[2]
    assert token_ids(llm, SamplingParams(top_k=1, seed=3, max_tokens=8)) == token_ids(llm, GREEDY)


def test_top_p_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="top_p is out of range"):
        SamplingParams(top_p=0)


def test_a_temperature_just_above_zero_is_refused() -> None:
    with pytest.raises(InputError, match="use 0 for greedy"):
        SamplingParams(temperature=1e-5)


def test_without_a_seed_equal_requests_differ_and_with_the_llms_seed_they_repeat_in_order() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=8)
    seeded = tiny_llm(seed=1)
    first, second = token_ids(seeded, params), token_ids(seeded, params)
    assert first != second
    assert token_ids(tiny_llm(seed=1), params) == first


def test_max_tokens_counts_the_stop_token(llm: LLM) -> None:
    going = token_ids(llm, GREEDY)
    stopped = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[going[3]]))[0]
    assert stopped.outputs[0].token_ids == going[: going.index(going[3]) + 1]
    assert stopped.outputs[0].stop_reason == going[3]


def letters() -> Tokenizer:
    """Token i is a piece of two letters, so that text and tokens have different borders."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {chr(97 + i // 10) + chr(107 + i % 10): i for i in range(97)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="ak"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(".."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, bos_token=None, eos_token=None, add_bos=False, add_eos=False)


def test_the_end_token_is_in_the_ids_and_not_in_the_text(llm: LLM) -> None:
    end = token_ids(llm, GREEDY)[2]
    config = tiny(eos_token_ids=(end,))
    ending = LLM.from_weights(config, loud_weights(config), buckets(), tokenizer=letters())
    output = ending.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == end
    assert len(output.text) == 2 * (len(output.token_ids) - 1)


def test_a_stop_string_may_begin_and_end_inside_tokens() -> None:
    llm = tiny_llm(tokenizer=letters())
    text = llm.generate([PROMPT], GREEDY)[0].outputs[0].text
    stop = text[3:5]  # the second half of one token and the first half of the next
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=stop)
    output = llm.generate([PROMPT], params)[0].outputs[0]
    assert output.text == text[: text.find(stop)] and output.stop_reason == stop
    assert len(output.token_ids) * 2 > len(output.text), "the tokens that made the stop string are in the ids"


def test_from_weights_shares_the_callers_tensors() -> None:
    config = tiny()
    weights = loud_weights(config)
    llm = LLM.from_weights(config, weights, buckets())
    before = token_ids(llm, GREEDY)
    weights.lm_head.copy_(weights.lm_head.flip(0))
    assert token_ids(llm, GREEDY)[0] == config.vocab_size - 1 - before[0]


def test_a_tied_models_lm_head_is_its_embedding() -> None:
    config = tiny(tie_word_embeddings=True)
    weights = loud_weights(config)
    assert weights.lm_head.data_ptr() == weights.embed.data_ptr()


def test_fast_numerics_may_differ_between_buckets_and_invariant_ones_do_not() -> None:
    config = tiny(hidden_size=256, intermediate_size=512)
    weights = loud_weights(config)
    found: dict[str, list[Tensor]] = {"fast": [], "invariant": []}
    for numerics, logits in found.items():
        for tokens, requests in ((16, 1), (64, 4)):
            made = buckets(tokens=[tokens], requests=[requests], batch=[4], numerics=numerics)
            with LLM.from_weights(config, weights, made).prefill(torch.tensor([PROMPT])) as batch:
                logits.append(batch.logits)
    torch.testing.assert_close(*found["fast"], rtol=1e-4, atol=1e-4)  # not equal in general, close always
    assert torch.equal(*found["invariant"])


def test_decode_advances_the_batch_that_it_is_given(llm: LLM) -> None:
    with llm.prefill(torch.tensor([PROMPT])) as batch:
        first = batch.logits
        assert llm.decode(batch) is batch and batch.lengths == [6]
        assert batch.logits is not first and not torch.equal(batch.logits, first), "what was held stays as it was"


def test_an_open_batch_holds_its_pages_and_closing_it_twice_is_harmless() -> None:
    llm = tiny_llm(buckets(batch=(1,), memory="64KiB"), max_model_len=64)
    free = llm._runner.cache.free_pages
    batch = llm.prefill(torch.tensor([PROMPT * 9]))
    assert llm._runner.cache.free_pages == free - 3
    with pytest.raises(InputError, match=r"the KV cache is full.*release finished batches"):
        llm.prefill(torch.tensor([PROMPT * 12]))
    batch.close(), batch.close()
    assert llm._runner.cache.free_pages == free
    with pytest.raises(InputError, match="the batch was closed"):
        llm.decode(batch)


def test_a_list_of_numbers_is_one_prompt(llm: LLM) -> None:
    results = llm.generate(PROMPT, GREEDY)
    assert len(results) == 1 and results[0].prompt_token_ids == PROMPT
