"""`LLM`: a model folder or GGUF file, a bucket set, and text in and out.

Rules: everything about a call is checked before any of it runs, so a bad prompt costs the others nothing. Greedy
results do not depend on which buckets are configured or on who else is in the batch, up to rounding.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, overload

import torch

from bucketgraph.config import BucketSet, load
from bucketgraph.errors import ConfigError, InputError
from bucketgraph.llm import padded
from bucketgraph.llm.device_loop import LoopReport
from bucketgraph.llm.engine import Engine
from bucketgraph.llm.kv_cache import PagedKVCache, pages_to_fill
from bucketgraph.llm.model import LanguageModel
from bucketgraph.llm.model_config import ModelConfig, load_config
from bucketgraph.llm.padded import PaddedBatch
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.request import LoopKind, Request
from bucketgraph.llm.runner import Runner
from bucketgraph.llm.sampling import CompletionOutput, Delta, RequestOutput, SamplingParams
from bucketgraph.llm.tokenizer import Tokenizer
from bucketgraph.llm.weights import ModelWeights, load_weights, random_weights
from bucketgraph.manager import device_of
from bucketgraph.saved import Saved
from bucketgraph.stats import Stats
from bucketgraph.warmup import Progress, WarmupReport

log = logging.getLogger("bucketgraph")

Prompt = str | Sequence[int] | Mapping[str, Any]
DEFAULT_SET = "llm"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CPU_CACHE = 2 << 30  # bytes of KV cache on a CPU where the set does not say
_GPU_SHARE = 0.85  # of the memory that is free after the weights, likewise


class LLM:
    """A Llama- or Qwen-family language model served from buckets.

    Args:
        model: a Hugging Face folder with safetensors, a `.gguf` file, `package:NAME/file` for a file in an installed
            package, or `random:PRESET` for random weights of a published shape (`random:PRESET:LAYERS` for fewer
            layers), which then takes and gives token ids only.
        buckets: a bucket set with phases: loaded, a path, or the name of a ready one.
        dtype: float32, float16, bfloat16; auto is float32 on a CPU, else the checkpoint's, else bfloat16.
        device: None takes a GPU if there is one.
        max_model_len: the most tokens of prompt and output together; None takes the set's, else the model's, as far
            as the KV cache holds them.
        seed: makes requests without a seed of their own repeatable in order.
        warmup: capture all buckets now; else `warmup()` does it later.
        loop: what decodes where a call does not say: `host` launches every step; `device` launches once, and the GPU
            goes on by itself until all are done (docs/device-loop.md). Warm-up builds its loops, then.

    Raises:
        ConfigError, ModelError: nothing was loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        buckets: BucketSet | str | os.PathLike[str] = DEFAULT_SET,
        *,
        dtype: str = "auto",
        device: torch.device | str | None = None,
        max_model_len: int | None = None,
        seed: int | None = None,
        warmup: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
        loop: LoopKind = "host",
    ) -> None:
        name = os.fspath(model)
        where = device_of(None, device)
        bucket_set = _llm_set(buckets)
        tokenizer: Tokenizer | None = None
        if name.startswith("random:"):
            config = _random_config(name)
            _check_context(max_model_len, bucket_set, config)
            weights = random_weights(config, _dtype(dtype, config, where), where)
        else:
            config = load_config(name)
            _check_context(max_model_len, bucket_set, config)
            tokenizer = Tokenizer.from_path(name)
            weights = load_weights(name, config, _dtype(dtype, config, where), where)
        self._build(config, weights, tokenizer, bucket_set, max_model_len, seed, loop)
        if warmup:
            self.warmup(on_progress)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        buckets: BucketSet | str | os.PathLike[str] = DEFAULT_SET,
        *,
        tokenizer: Tokenizer | None = None,
        max_model_len: int | None = None,
        seed: int | None = None,
        warmup: bool = True,
        loop: LoopKind = "host",
    ) -> Self:
        """An LLM over weights that are in memory already; it runs on their device, in their dtype."""
        self = cls.__new__(cls)
        self._build(config, weights, tokenizer, _llm_set(buckets), max_model_len, seed, loop)
        if warmup:
            self.warmup()
        return self

    def _build(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        tokenizer: Tokenizer | None,
        bucket_set: BucketSet,
        max_model_len: int | None,
        seed: int | None,
        loop: LoopKind,
    ) -> None:
        self._loop = _loop_kind(loop)
        self.config, self.tokenizer, self.bucket_set = config, tokenizer, bucket_set
        self.note = weights.note
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self._random = random.Random(seed)
        cache, self.max_model_len = _make_cache(config, weights, bucket_set, max_model_len)
        self._runner = Runner(
            LanguageModel(config, weights, cache, self.max_model_len, bucket_set.numerics),
            bucket_set,
            self.max_model_len,
        )
        eos = config.eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ())
        self._engine = Engine(self._runner, tokenizer, eos)
        self.report: WarmupReport | None = None

    def warmup(self, on_progress: Callable[[Progress], None] | None = None) -> WarmupReport:
        """Warm, capture and check both phases' buckets; the report is kept as `report`."""
        with self._engine.alone():
            self.report = self._runner.warmup(on_progress)
            if self._loop == "device":
                self._build_loops()
        for bucket in self.report.failed:
            log.warning("%s bucket %s runs eagerly: %s", bucket.name, bucket.bucket, bucket.error)
        return self.report

    def _build_loops(self) -> None:
        loops = self._engine.loops
        if loops.unsupported is not None:
            log.warning("the host loop decodes: %s", loops.unsupported)
        for row in loops.build():
            if row.error is not None:
                log.warning("decode bucket %s has no device loop: %s", row.bucket, row.error)
        self._runner.settled()

    # -- text ----------------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        loop: LoopKind | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        loop: LoopKind | None = None,
    ) -> Iterator[Delta]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        loop: LoopKind | None = None,
    ) -> list[RequestOutput] | Iterator[Delta]:
        """Continue each prompt.

        Args:
            prompts: one prompt or several; a prompt is text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`.
            sampling_params: one for all, or one for each.
            stream: yield `Delta`s as tokens come, instead of returning when all is done.
            loop: `host` or `device`, see the class; None takes its default. The tokens are the same. What the device
                loop cannot do, such as `logprobs`, the host loop does, counted with its reason in `stats()`.

        Returns:
            one `RequestOutput` per prompt, in order; or an iterator of deltas.

        Raises:
            InputError: a prompt is empty, too long for the context or outside the vocabulary; nothing ran. Or open
                padded batches hold pages of the KV cache that a prompt needs.
        """
        requests = self._requests(prompts, sampling_params)
        kind = self._loop if loop is None else _loop_kind(loop)
        for request in requests:
            request.loop, request.streamed = kind, stream
        if stream:
            return self._stream(requests)
        self._drive(requests)
        return [self._output(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        loop: LoopKind | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput] | Iterator[Delta]:
        """Answer a conversation through the model's chat template. Raises ModelError if it has none."""
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and random weights have none")
        text = self.tokenizer.apply_chat_template(messages, **template_arguments)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        prompt = {"prompt": text, "prompt_token_ids": ids}
        if stream:
            return self.generate(prompt, sampling_params, stream=True, loop=loop)
        return self.generate(prompt, sampling_params, loop=loop)

    # -- batches that are padded already -------------------------------------------------------------------------------

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> PaddedBatch:
        """Run padded prompts `[B, S]`, left- or right-padded by `attention_mask` (1 is real).

        Returns:
            the batch, with the logits after each row's last real token. Close it, or use it in a `with`.

        Raises:
            InputError: ids and mask do not fit, a row is empty or too long, or the KV cache is full.
        """
        found = padded.rows(input_ids, attention_mask, self.config.vocab_size)
        for row, line in enumerate(found):
            self._check_length(f"row {row}", len(line))
        requests = [Request(line, _GREEDY, seed=0, index=row) for row, line in enumerate(found)]
        with self._engine.alone():
            self._reserve(requests)
            try:
                tokens, logits = self._prefill_all(requests)
            except BaseException:
                PaddedBatch(requests, self._runner, *_NOTHING).close()
                raise
        return PaddedBatch(requests, self._runner, tokens, logits)

    def decode(self, batch: PaddedBatch, tokens: torch.Tensor | None = None) -> PaddedBatch:
        """Append `tokens [B]` (None: the batch's greedy ones) and run them. The same batch is returned, advanced.

        Raises:
            InputError: the tokens do not fit, the batch was closed, a row is at the context's end, or no page is free.
        """
        if not batch.requests:
            raise InputError("the batch was closed")
        chosen = batch.tokens if tokens is None else tokens
        new = padded.next_tokens(chosen, len(batch.requests), self.config.vocab_size)
        for request in batch.requests:
            self._check_length(f"row {request.index}", len(request.tokens), 1)
        with self._engine.alone():
            self._reserve(batch.requests, more=1)
            for request, token in zip(batch.requests, new, strict=True):
                request.tokens.append(token)
            try:
                next_tokens, logits = self._runner.decode(batch.requests)
            except BaseException:  # the batch stays where it was
                for request in batch.requests:
                    request.tokens.pop()
                raise
            batch.tokens, batch.logits = next_tokens.clone(), logits.clone()
        return batch

    # -- the rest ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Stats]:
        """Counters of each phase."""
        return self._runner.stats()

    def loops(self) -> tuple[LoopReport, ...]:
        """How each device loop was built, or why it could not be; those that were needed so far."""
        return self._engine.loops.reports

    def save_stats(self, path: str | os.PathLike[str]) -> None:
        """Write both phases' counters, sizes asked for and facts of warm-up as JSON, for `bucketgraph report` and
        `bucketgraph plan --column prefill.tokens`. Raises OSError.
        """
        Saved.of(self.stats(), self.bucket_set).save(path)

    def release(self) -> None:
        """Give the graphs and the buffers back."""
        with self._engine.alone():
            self._engine.loops.release()
            self._runner.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        listed = _prompt_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
        if wrong := [p for p in params if not isinstance(p, SamplingParams)]:
            kind = type(wrong[0]).__name__
            raise InputError("sampling params", given=kind, expected="one SamplingParams, or one for each prompt")
        if len(params) != len(listed):
            raise InputError("sampling params do not match the prompts", given=len(params), expected=len(listed))
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(listed, params, strict=True))]

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        what = f"prompt {index}"
        text, ids = self._ids(prompt, what)
        if not ids:
            raise InputError(f"{what} is empty", hint="give at least one token")
        padded.check_tokens(ids, self.config.vocab_size, what)
        self._check_length(what, len(ids), 1)
        if params.stop_strings and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and random weights have none")
        most = self.max_model_len if params.max_tokens is None else len(ids) + params.max_tokens
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        return Request(ids, params, seed, text, index, limit=min(most, self.max_model_len))

    def _ids(self, prompt: Prompt, what: str) -> tuple[str | None, list[int]]:
        text: object = prompt if isinstance(prompt, str) else None
        ids: object = None if isinstance(prompt, str) else prompt
        if isinstance(prompt, Mapping):
            if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
                raise InputError(f"{what} has unknown keys", given=sorted(unknown), expected="prompt, prompt_token_ids")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
            return (text if isinstance(text, str) else None), list(ids)
        if ids is not None or not isinstance(text, str):
            given = type(text if ids is None else ids).__name__
            raise InputError(f"{what} is neither text nor a list of token ids", given=given)
        if self.tokenizer is None:
            raise InputError(f"{what} is text", hint="random weights have no tokenizer: give token ids")
        return text, self.tokenizer.encode(text)

    def _check_length(self, what: str, tokens: int, new: int = 0) -> None:
        if tokens + new > self.max_model_len:
            raise InputError(
                f"{what} is too long for the context",
                given=f"{tokens} tokens" + (f" and {new} to come" if new else ""),
                expected=f"at most max_model_len {self.max_model_len}",
            )

    def _drive(self, requests: Sequence[Request]) -> None:
        try:
            self._engine.add(requests)
            for request in requests:
                while not request.done:
                    self._engine.step()
                if request.error is not None:
                    raise request.error
        finally:
            self._engine.abort(requests)

    def _stream(self, requests: Sequence[Request]) -> Iterator[Delta]:
        try:
            self._engine.add(requests)
            done = False
            while not done:
                self._engine.step()
                # Seen before the deltas are taken: another thread's step may add the last ones meanwhile.
                done = all(request.done for request in requests)
                for request in requests:
                    while request.deltas:
                        yield request.deltas.popleft()
                    if request.error is not None:
                        raise request.error
        finally:  # a consumer that stops early gives the pages back
            self._engine.abort(requests)

    def _output(self, request: Request) -> RequestOutput:
        wants = request.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=request.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=request.cumulative_logprob if wants else None,
            logprobs=request.logprobs if wants else None,
        )
        prompt_ids = request.tokens[: request.prompt_len]
        return RequestOutput(str(request.index), request.prompt, prompt_ids, [completion])

    def _reserve(self, requests: Sequence[Request], more: int = 0) -> None:
        """Pages for each request's tokens and `more`, all or none."""
        cache = self._runner.cache
        need = [cache.pages_for(len(request.tokens) + more) - len(request.pages) for request in requests]
        pages = cache.allocate(sum(need))
        for request, count in zip(requests, need, strict=True):
            if count:
                request.hold([pages.pop() for _ in range(count)], self._runner.table_width)

    def _prefill_all(self, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill in as many packed runs as the buckets need; each request's last run gives its logits."""
        tokens: dict[Request, torch.Tensor] = {}
        logits: dict[Request, torch.Tensor] = {}
        waiting = list(requests)
        while waiting:
            chunks = self._runner.pack(waiting)
            new_tokens, new_logits = self._runner.prefill(chunks)
            for row, (request, _) in enumerate(chunks):
                if request.pending == 0:
                    tokens[request], logits[request] = new_tokens[row].clone(), new_logits[row].clone()
            waiting = [request for request in waiting if request.pending]
        return torch.stack([tokens[r] for r in requests]), torch.stack([logits[r] for r in requests])

    def swap_cache(self, other: PagedKVCache) -> None:
        """Swap the KV cache with another of the same shape, such as `llm.cache.like()`, under the graphs.

        Both objects stay and exchange memory and pages: `other` then holds what was here, and brings it back when it is
        swapped again. Padded batches stay with the memory that their rows are in, and say so if it is elsewhere.

        Raises:
            InputError: the other one differs in more than its memory, or prompts are being generated; nothing changed.
        """
        with self._engine.alone():
            if not self._engine.idle:
                raise InputError("prompts are being generated", hint="swap between calls")
            self._engine.loops.release()  # they hold addresses of their own, and are built anew when needed
            self._runner.swap_cache(other)

    @property
    def cache(self) -> PagedKVCache:
        """The KV cache that requests are served from."""
        return self._runner.cache


_GREEDY = SamplingParams(temperature=0.0)
_NOTHING = (torch.empty(0), torch.empty(0))


def _llm_set(buckets: BucketSet | str | os.PathLike[str]) -> BucketSet:
    bucket_set = buckets if isinstance(buckets, BucketSet) else load(os.fspath(buckets))
    if not bucket_set.is_llm:
        raise ConfigError(f"{bucket_set.source}: an LLM needs a set with phases", hint="use BucketManager for this one")
    return bucket_set


def _loop_kind(loop: object) -> LoopKind:
    if loop == "host" or loop == "device":
        return loop
    raise ConfigError("unknown loop", given=repr(loop), expected="host or device")


def _random_config(name: str) -> ModelConfig:
    shape, _, layers = name.removeprefix("random:").partition(":")
    if layers and (not layers.isdecimal() or int(layers) < 1):
        raise ConfigError("malformed model", given=name, expected="random:PRESET or random:PRESET:LAYERS")
    return shrink(preset(shape), num_layers=int(layers)) if layers else preset(shape)


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return _DTYPES.get(config.torch_dtype or "", torch.bfloat16)
    if name not in _DTYPES:
        raise ConfigError("unknown dtype", given=name, expected="auto, " + ", ".join(_DTYPES))
    return _DTYPES[name]


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(
            "prompts", given=type(prompts).__name__, expected="text, a list of token ids, or a list of these"
        )
    if not prompts:
        raise InputError("no prompts", given="an empty list", expected="at least one prompt")
    if all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]


def _check_context(asked: int | None, bucket_set: BucketSet, config: ModelConfig) -> int:
    """The context length that is asked for, or else the model's."""
    length = next((n for n in (asked, bucket_set.max_model_len) if n is not None), config.max_position_embeddings)
    if not 1 <= length <= config.max_position_embeddings:
        given, expected = length, f"1 to the model's {config.max_position_embeddings}"
        raise ConfigError("max_model_len is out of range", given=given, expected=expected)
    return length


def _make_cache(
    config: ModelConfig, weights: ModelWeights, bucket_set: BucketSet, max_model_len: int | None
) -> tuple[PagedKVCache, int]:
    """The KV cache and the context length: as long as asked, or as the model and the memory allow."""
    spec = bucket_set.kv_cache_spec
    dtype, device = weights.embed.dtype, weights.embed.device
    length = _check_context(max_model_len, bucket_set, config)
    assert bucket_set.phases is not None, "an LLM set has phases"
    batch, tokens = bucket_set.phases["decode"].axes["batch"][-1], bucket_set.phases["prefill"].axes["tokens"][-1]
    memory = spec.memory
    if memory is None:
        memory = _CPU_CACHE if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    fits = memory // PagedKVCache.page_bytes(config, spec.page_size, dtype)
    wanted = max(batch * -(-length // spec.page_size), pages_to_fill(tokens, length, spec.page_size))
    pages = min(fits, wanted + 1)
    cache = PagedKVCache(config, pages, spec.page_size, dtype, device)
    if length > cache.capacity:
        if max_model_len is not None or bucket_set.max_model_len is not None:
            raise ConfigError(
                "the KV cache is smaller than max_model_len",
                given=f"{cache.capacity} tokens",
                expected=length,
                hint="raise kv_cache.memory or lower max_model_len",
            )
        log.warning("context limited to %d tokens, which is what the KV cache holds", cache.capacity)
        length = cache.capacity
    return cache, length
