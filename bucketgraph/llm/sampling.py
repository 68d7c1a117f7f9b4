"""What a caller may ask of generation, and what comes back, under the names that vLLM made common.

Rules: everything is checked when a `SamplingParams` is made, so a bad value never reaches a batch of other requests.
Randomness is a function of (seed, position, token id), computed on the device; the same seed gives the same tokens
whatever else runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from bucketgraph.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a request ends.

    Args:
        temperature: 0 is greedy.
        top_k: the most likely tokens to keep; 0 or -1 keeps all.
        top_p: the probability mass to keep, in (0, 1].
        max_tokens: the most tokens to generate; None means up to the context's end.
        min_tokens: stop conditions count only after this many tokens.
        stop: text at which generation ends; it is not part of the result unless `include_stop_str_in_output`.
        stop_token_ids: tokens at which generation ends.
        ignore_eos: go on after the model's own end token.
        seed: 64-bit; None draws one per request.
        logprobs: the number of most likely tokens to report beside each chosen one; None reports nothing.

    Raises:
        InputError: a value is out of range, NaN, or of the wrong kind.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InputError("top_p is out of range", given=0, expected="above 0, at most 1")
        if 0 < self.temperature < 1e-2:
            raise InputError("temperature is too close to 0", given=self.temperature, hint="use 0 for greedy")
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        for name, low in (("max_tokens", 1), ("seed", -(2**63)), ("logprobs", 0)):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, low, 2**63 - 1 if name == "seed" else 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError("min_tokens is above max_tokens", given=f"{self.min_tokens} and {self.max_tokens}")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Collection):
                raise InputError(f"{name} is of the wrong kind", given=repr(value), expected="a list, or None")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InputError("a stop string must be text that is not empty", given=repr(text))
        for token in self.stop_token_ids or ():
            _whole("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isinf(value):
        raise InputError(f"{name} is out of range", given=repr(value), expected=f"a number from {low:g} to {high:g}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{name} is out of range", given=repr(value), expected=f"a whole number, at least {low}")


@dataclass(frozen=True)
class Logprob:
    """One token's log probability under the model, before temperature and truncation."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """What was generated for a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop or length
    stop_reason: str | int | None = None  # the stop string or token that ended it; None for the model's own end token
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the chosen one and the most likely


@dataclass
class RequestOutput:
    """One prompt and its completion. `outputs` has one element."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True)
class Delta:
    """What a streamed request gained. The texts of one index join to the text that `generate` would return."""

    index: int  # which prompt
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
