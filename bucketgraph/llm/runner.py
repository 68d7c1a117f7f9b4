"""Requests to tensors and back: the two phases' bucket managers over one KV cache.

Rules: the host builds plain arrays from requests and hands them to a manager, which pads, dispatches and replays; no
device value is read here. Both phases share a family: one pool, one capture stream, one replay at a time. The phase,
not the shape, picks the manager: a one-token prompt is a prefill.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from bucketgraph.binding import prepare, rebind
from bucketgraph.config import BucketSet, PhaseSpec
from bucketgraph.errors import ConfigError, InputError
from bucketgraph.executables import Family
from bucketgraph.llm import model as forward
from bucketgraph.llm.examples import Examples
from bucketgraph.llm.kv_cache import PagedKVCache, pages_to_fill
from bucketgraph.llm.model import LanguageModel, Limits
from bucketgraph.llm.request import Request
from bucketgraph.manager import BucketManager
from bucketgraph.selfcheck import TOLERANCE
from bucketgraph.stats import Stats
from bucketgraph.warmup import Progress, WarmupReport, warm_up

REQUEST_SLOTS = (8,)  # prompts that one prefill can pack, where the set declares no `requests` axis


class Runner:
    """Runs prefill and decode steps for lists of requests."""

    def __init__(self, model: LanguageModel, bucket_set: BucketSet, max_model_len: int) -> None:
        assert bucket_set.phases is not None, "an LLM set has phases"
        self.model, self.cache = model, model.cache
        self.max_model_len = max_model_len
        # One spare column: a kernel may load the entry after the last one it needs.
        self.table_width = self.cache.pages_for(max_model_len) + 1
        self._examples = Examples(self)
        self._rows: tuple[list[tuple[int, int, int]], object, dict[str, Tensor]] = [], None, {}  # of the last decode
        self._ahead: tuple[list[np.ndarray], list[int], dict[str, Tensor]] = [], [], {}  # places of the next one
        policy = bucket_set.warmup
        if policy.tolerance is None:
            policy = policy.model_copy(update={"tolerance": _tolerance(model)})
        family = Family(model.weights.embed.device)

        def manager(name: str, phase: PhaseSpec, fn: Callable[..., object]) -> BucketManager:
            example = self._examples.prefill if name == "prefill" else self._examples.decode
            head = "requests" if name == "prefill" else "batch"  # the LM head's rows
            return BucketManager(
                fn,
                phase,
                family=family,
                example=example,
                variants=lambda bucket: model.variants(fn, max(bucket.sizes), bucket[head]),
                around_step=self._examples.step,
                name=name,
                warmup=policy,
                memory=bucket_set.memory,
                quiet=bucket_set.quiet,
            )

        limits = Limits(model.config.vocab_size, max_model_len, self.cache.pages, self.table_width)
        prefill, decode = _complete(bucket_set, limits)
        _check_fit(prefill, decode, self.cache, max_model_len)
        self.prefill_manager = manager("prefill", prefill, model.prefill)
        self.decode_manager = manager("decode", decode, model.decode)
        self.max_tokens, self.max_requests = prefill.axes["tokens"][-1], prefill.axes["requests"][-1]

    def warmup(self, on_progress: Callable[[Progress], None] | None = None) -> WarmupReport:
        """Warm both phases together."""
        with self._examples.kept():
            return warm_up([self.prefill_manager, self.decode_manager], on_progress)

    def settled(self) -> None:
        """What was built up to now belongs to warm-up: stats count compiles and memory segments from here on."""
        for manager in (self.prefill_manager, self.decode_manager):
            manager.ready()

    def stats(self) -> dict[str, Stats]:
        return {"prefill": self.prefill_manager.stats(), "decode": self.decode_manager.stats()}

    def release(self) -> None:
        self.prefill_manager.release()
        self.decode_manager.release()

    def pack(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """What the next prefill runs of these, and how many tokens of each: only the last can be cut short."""
        chunks, budget = [], self.max_tokens
        for request in requests[: self.max_requests]:
            if budget == 0:
                break
            count = min(request.pending, budget)
            chunks.append((request, count))
            budget -= count
        return chunks

    # -- runs: the returned tensors are static memory, to be read before the next run --------------------------------

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> tuple[Tensor, Tensor]:
        """Run the next `n` pending tokens of each request. Returns tokens `[R]` and logits `[R, vocab]`."""
        result = self.prefill_manager(**self.prefill_arrays(chunks))
        for request, count in chunks:
            request.computed += count
        return result["tokens"], result["logits"]

    def decode(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Run the one pending token of each request. Returns tokens `[B]` and logits `[B, vocab]`."""
        result = self.decode_manager(**self.decode_arrays(requests))
        for request in requests:
            request.computed += 1
        # While the device runs: the next step is most often the same requests'.
        tables, at = [request.table for request in requests], [request.computed for request in requests]
        self._ahead = tables, at, self._places(tables, at)
        return result["tokens"], result["logits"]

    def prefill_arrays(self, chunks: Sequence[tuple[Request, int]]) -> dict[str, Tensor]:
        """What the prefill function takes for these."""
        ids: list[int] = []
        positions, slots = [], []
        for request, count in chunks:
            start, end = request.computed, request.computed + count
            ids.extend(request.tokens[start:end])
            at = np.arange(start, end, dtype=np.int64)
            positions.append(at)
            slots.append(self._slots(request, at))
        return {
            "input_ids": _tensor(ids, np.int64),
            "positions": torch.from_numpy(np.concatenate(positions).astype(np.int32)),
            "slot_mapping": torch.from_numpy(np.concatenate(slots)),
            "query_ends": _tensor(list(accumulate(count for _, count in chunks)), np.int32),
            "kv_lens": _tensor([request.computed + count for request, count in chunks], np.int32),
            **self._row_arrays([request for request, _ in chunks]),
        }

    def decode_arrays(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """What the decode function takes for these."""
        tables, at = [request.table for request in requests], [request.computed for request in requests]
        ids = [request.tokens[n] for request, n in zip(requests, at, strict=True)]
        # The same requests decode many times in a row. What the ids stand for is held, so that they stay theirs.
        key = [(id(request.table), id(request.params), request.seed) for request in requests]
        if key != self._rows[0]:
            held = [(request.table, request.params) for request in requests]
            self._rows = key, held, self._row_arrays(requests)
        ahead, self._ahead = self._ahead, ([], [], {})  # handed out once
        known = ahead[1] == at and all(map(operator.is_, ahead[0], tables))
        return {
            "input_ids": _tensor(ids, np.int64),
            **(ahead[2] if known else self._places(tables, at)),
            **self._rows[2],
        }

    def _places(self, tables: Sequence[np.ndarray], at: Sequence[int]) -> dict[str, Tensor]:
        """Where decode puts the tokens of requests with these block tables at positions `at`."""
        size = self.cache.page_size
        # Of plain integers: each numpy call on an array of a few costs as much as all of this.
        slots = [int(table[n // size]) * size + n % size for table, n in zip(tables, at, strict=True)]
        return {
            "positions": _tensor(at, np.int32),
            "slot_mapping": _tensor(slots, np.int64),
            "kv_lens": _tensor([n + 1 for n in at], np.int32),
        }

    def _row_arrays(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        params = [request.params for request in requests]
        return {
            "block_tables": torch.from_numpy(np.array([request.table for request in requests])),
            "temperature": torch.tensor([p.temperature for p in params], dtype=torch.float32),  # may be beyond float32
            "top_k": _tensor([max(p.top_k, 0) for p in params], np.int32),
            "top_p": _tensor([p.top_p for p in params], np.float32),
            "seeds": _tensor([request.seed for request in requests], np.int64),
        }

    def _slots(self, request: Request, positions: np.ndarray) -> np.ndarray:
        size = self.cache.page_size
        slots: np.ndarray = request.table[positions // size].astype(np.int64) * size + positions % size
        return slots

    def swap_cache(self, other: PagedKVCache) -> None:
        """Swap memory and pages of the KV cache with another; graphs follow where that is proved, or are recaptured.

        Raises InputError, with nothing swapped, if the other one is of another shape, page size, dtype or device.
        """
        if other.page_size != self.cache.page_size:
            raise InputError("the caches differ in page size", given=other.page_size, expected=self.cache.page_size)
        managers = [self.prefill_manager, self.decode_manager]
        prepare(managers, {"cache.data": other.data})  # on pages that are free where the data still is
        self.cache.exchange(other, lambda new: rebind(managers, {"cache.data": new})["cache.data"])


def _tensor(numbers: Sequence[float], dtype: type[np.number]) -> Tensor:
    """As `torch.tensor`, in less than half the time. The numbers have to fit."""
    return torch.from_numpy(np.array(numbers, dtype))


def _tolerance(model: LanguageModel) -> float:
    """What the self-check allows of logits: rounding errors of layers add up as a random walk does: with its root."""
    return float(TOLERANCE[model.weights.embed.dtype] * max(1.0, (model.config.num_layers / 8) ** 0.5))


def _complete(bucket_set: BucketSet, limits: Limits) -> tuple[PhaseSpec, PhaseSpec]:
    """The set's phases with the model's own inputs and outputs, and the set's defaults."""
    assert bucket_set.phases is not None, "an LLM set has phases"
    prefill, decode = bucket_set.phases["prefill"], bucket_set.phases["decode"]

    axes = prefill.axes if "requests" in prefill.axes else {**prefill.axes, "requests": REQUEST_SLOTS}
    own = {
        "axes": axes,
        "work": ("tokens",),
        "inputs": forward.prefill_inputs(limits),
        "outputs": forward.outputs("requests"),
    }
    rows = {"inputs": forward.decode_inputs(limits), "outputs": forward.outputs("batch")}
    # Results are read before the next run, so nothing is cloned that nobody asked for.
    borrowed = {"outputs_are": "borrowed"}
    return prefill.model_copy(update={**own, **borrowed}), decode.model_copy(update={**rows, **borrowed})


def _check_fit(prefill: PhaseSpec, decode: PhaseSpec, cache: PagedKVCache, max_model_len: int) -> None:
    """Refuse buckets that the KV cache or the context can never fill."""
    tokens, requests, batch = prefill.axes["tokens"][-1], prefill.axes["requests"][-1], decode.axes["batch"][-1]
    hint = "lower the largest bucket, or give kv_cache more memory"
    if tokens > requests * max_model_len:
        raise ConfigError(
            "prefill's largest bucket can be filled by no requests",
            given=f"{tokens} tokens for {requests} requests of at most {max_model_len}",
            hint="lower prefill's largest `tokens`, or raise its `requests` or max_model_len",
        )
    if pages_to_fill(tokens, max_model_len, cache.page_size) > cache.pages - 1:
        raise ConfigError(
            "prefill's largest bucket exceeds the KV cache",
            given=f"{tokens} tokens in requests of at most {max_model_len}",
            expected=f"at most {cache.pages - 1} pages of {cache.page_size} tokens",
            hint=hint,
        )
    if batch > cache.pages - 1:
        raise ConfigError(
            "decode's largest bucket exceeds the KV cache",
            given=batch,
            expected=f"at most {cache.pages - 1} requests",
            hint=hint,
        )
