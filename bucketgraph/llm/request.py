"""A request's state from arrival to its last token. The engine fills it, the runner reads tokens and pages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bucketgraph.llm.sampling import Delta, Logprob, SamplingParams

LoopKind = Literal["host", "device"]  # what decodes: see `LLM`


@dataclass(eq=False)
class Request:
    """One prompt being served. Requests are compared by identity."""

    tokens: list[int]  # the prompt, then what was generated
    params: SamplingParams
    seed: int  # signed 64-bit
    prompt: str | None = None
    index: int = 0  # place in the caller's list
    loop: LoopKind = "host"  # what its caller asks to decode it
    streamed: bool = False  # whether its deltas are read as they come

    # KV: set at admission, advanced by every run
    pages: list[int] = field(default_factory=list)
    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [width] pages in order, then zeros
    computed: int = 0  # tokens whose KV is in the cache

    # output: advanced by every sampled token
    prompt_len: int = 0
    limit: int = 0  # tokens at which it ends, prompt included
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    deltas: deque[Delta] = field(default_factory=deque)  # what a stream has not taken yet; none where there is none
    error: BaseException | None = None  # the step that ran it failed

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens to run before the next one can be sampled: the rest of the prompt, or the one just sampled."""
        return len(self.tokens) - self.computed

    @property
    def in_prompt(self) -> bool:
        """Whether a part of the prompt has not run yet."""
        return self.computed < self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def hold(self, pages: list[int], width: int) -> None:
        """Take pages; `width` is the block table's."""
        self.pages.extend(pages)
        self.table = np.zeros(width, np.int32)
        self.table[: len(self.pages)] = self.pages
