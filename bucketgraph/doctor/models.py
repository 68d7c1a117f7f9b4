"""Workloads of language models: one decode step or one prompt through `LanguageModel`, on tensors that are there.

The caller's part of a step (building arrays, copying them in, fetching the token) is left out: it is the same with and
without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bucketgraph.config import BucketSet, parse
from bucketgraph.doctor.workload import Workload
from bucketgraph.errors import ConfigError
from bucketgraph.llm.api import LLM
from bucketgraph.llm.request import Request
from bucketgraph.llm.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Step:
    """What a language model runs: a prompt of `prefill` tokens, or a token for each of `batch` requests."""

    prefill: int | None = None
    batch: int = 1
    context: int = 512  # tokens that each request has in the cache before the step

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prefill", self.prefill, 1),
            ("batch", self.batch, 1),
            ("context", self.context, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} is out of range", given=value, expected=f"at least {least}")

    @property
    def longest(self) -> int:
        """Tokens of a request, the step's own included."""
        return self.context + 1 if self.prefill is None else self.prefill

    def __str__(self) -> str:
        if self.prefill is not None:
            return f"prefill of {self.prefill:,} tokens"
        return f"decode, batch {self.batch}, {self.context:,} tokens of context"


def of_model(model: str, step: Step, *, dtype: str = "auto", device: torch.device | str | None = None) -> Workload:
    """A step of a model, by its reference as `LLM` takes it. Raises ConfigError, ModelError."""
    llm = LLM(model, _set(step), dtype=dtype, device=device, max_model_len=step.longest, warmup=False)
    return of_llm(llm, step, model)


def of_llm(llm: LLM, step: Step, name: str) -> Workload:
    """A step of an LLM that is loaded and has the pages for it."""
    runner = llm._runner
    runner.cache.data.normal_(generator=torch.Generator(device=llm.device).manual_seed(3))
    runner.cache.data[:, :, 0].zero_()
    draw = torch.Generator().manual_seed(2)
    requests = []
    for row in range(step.batch if step.prefill is None else 1):
        ids = torch.randint(0, llm.config.vocab_size, (step.longest,), generator=draw).tolist()
        request = Request(ids, _GREEDY, seed=row, index=row, computed=step.context if step.prefill is None else 0)
        request.hold(runner.cache.allocate(runner.cache.pages_for(step.longest)), runner.table_width)
        requests.append(request)
    fn: Callable[..., Any]
    if step.prefill is None:
        fn, arrays = runner.model.decode, runner.decode_arrays(requests)
    else:
        fn, arrays = runner.model.prefill, runner.prefill_arrays([(requests[0], step.prefill)])
    moved: dict[str, Any] = {key: tensor.to(llm.device) for key, tensor in arrays.items()}
    return Workload(f"{name}, {step}", partial(fn, **moved), llm.device)


def _set(step: Step) -> BucketSet:
    """A set with the step's own sizes: only its cache is used."""
    phases = {
        "prefill": {"axes": {"tokens": [step.prefill or 16], "requests": [16]}},
        "decode": {"axes": {"batch": [step.batch]}},
    }
    return parse({"version": 1, "name": "doctor", "phases": phases}, "the doctor's set")
