"""Scheduling: which requests run in the next step, and what their new tokens mean.

Rules: a request holds all the pages it may need before it starts, so it never stops half way; waiting prompts go
before running decodes; a prompt longer than the largest prefill bucket is run in chunks. A step that fails ends the
requests it ran, gives their pages back, and is their callers' to raise. Threads may share an engine: each caller steps
it under the lock until its own requests are done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from bucketgraph.errors import InputError
from bucketgraph.llm.request import Request
from bucketgraph.llm.runner import Runner
from bucketgraph.llm.sampling import Delta, Logprob
from bucketgraph.llm.tokenizer import Tokenizer


class Engine:
    """Continuous batching over a `Runner`."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._streams: dict[Request, _TextStream] = {}
        self.lock = threading.RLock()

    def add(self, requests: Sequence[Request]) -> None:
        with self.lock:
            self._waiting.extend(requests)

    def abort(self, requests: Sequence[Request]) -> None:
        """Forget requests that are not done, and take their pages back."""
        with self.lock:
            gone = {request for request in requests if not request.done}
            self._waiting = deque(request for request in self._waiting if request not in gone)
            for request in [request for request in self._running if request in gone]:
                self._leave(request)

    def step(self) -> None:
        """Admit what fits, then run one prefill, or one decode if no prompt is waiting.

        The run may hold requests of other callers only, so its exception is not raised here: it becomes the `error` of
        the requests that ran.
        """
        with self.lock:
            self._admit()
            chunks = self._runner.pack([request for request in self._running if request.in_prompt])
            batch = [request for request, _ in chunks] or list(self._running)
            if not batch:
                return
            try:
                if chunks:
                    self._prefill(chunks)
                else:
                    self._accept(batch, *self._runner.decode(batch))
            except BaseException as error:
                for request in batch:
                    if not request.done:
                        request.error = error
                        self._leave(request)
                if not isinstance(error, Exception):  # an interrupt is meant for this thread, too
                    raise

    def _admit(self) -> None:
        cache = self._runner.cache
        while self._waiting:
            count = cache.pages_for(self._waiting[0].limit)
            if count > cache.free_pages and self._running:
                return  # those running give theirs back
            request = self._waiting.popleft()
            try:
                request.hold(cache.allocate(count), self._runner.table_width)
            except InputError as error:  # open padded batches hold the pages, and nothing here would free them
                request.error = error
                continue
            self._running.append(request)

    def _prefill(self, chunks: Sequence[tuple[Request, int]]) -> None:
        tokens, logits = self._runner.prefill(chunks)
        whole = [request for request, _ in chunks if request.pending == 0]  # all, or all but the last
        self._accept(whole, tokens[: len(whole)], logits[: len(whole)])

    def _accept(self, requests: Sequence[Request], tokens: Tensor, logits: Tensor) -> None:
        """Append each request's new token and see whether it ends there."""
        if not requests:
            return
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        details = _logprobs([requests[row] for row in wanted], wanted, tokens, logits) if wanted else {}
        for row, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
            request.tokens.append(token)
            if row in details:
                self._note_logprobs(request, token, details[row])
            self._finish_or_go_on(request, token)

    def _finish_or_go_on(self, request: Request, token: int) -> None:
        params, count = request.params, len(request.tokens) - request.prompt_len
        counts = count > params.min_tokens or params.min_tokens == 0
        if counts and token in self._eos and not params.ignore_eos:
            request.finish_reason = "stop"
        elif counts and token in (params.stop_token_ids or ()):
            request.finish_reason, request.stop_reason = "stop", token
        elif len(request.tokens) >= request.limit:
            request.finish_reason = "length"
        text = ""
        if self._tokenizer is not None:
            if request not in self._streams:
                self._streams[request] = _TextStream(self._tokenizer, request)
            text = self._streams[request].push(token, counts)
        request.text += text
        request.deltas.append(Delta(request.index, text, [token], request.finish_reason))
        if request.finish_reason is not None:
            self._leave(request)

    def _note_logprobs(self, request: Request, token: int, entries: dict[int, tuple[float, int]]) -> None:
        name = self._tokenizer.decode if self._tokenizer is not None else None
        request.logprobs.append(
            {i: Logprob(value, rank, name([i], False) if name else None) for i, (value, rank) in entries.items()}
        )
        request.cumulative_logprob += entries[token][0]

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self._streams.pop(request, None)
        self._runner.cache.release(request.pages)


class _TextStream:
    """One request's text as it grows, held back while it might still turn into a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._stream = tokenizer.stream(request.params.skip_special_tokens)
        self._request = request
        self._held = ""

    def push(self, token: int, stops_count: bool) -> str:
        """The text that is certain now. Sets the request's finish reason when a stop string is complete."""
        request, stops = self._request, self._request.params.stop_strings
        # A token that ends the request by itself is part of the text only where stop strings are, as in vLLM.
        if request.finish_reason != "stop" or request.params.include_stop_str_in_output:
            self._held += self._stream.feed(token)
        if request.finish_reason is not None:
            self._held += self._stream.finish()
        if stops_count:
            found = [(at, stop) for stop in stops if (at := self._held.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                request.finish_reason, request.stop_reason = "stop", stop
                return self._held[: at + len(stop) if request.params.include_stop_str_in_output else at]
        keep = 0 if request.finish_reason is not None else _possible_start(self._held, stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def _logprobs(
    requests: Sequence[Request], rows: Sequence[int], tokens: Tensor, logits: Tensor
) -> dict[int, dict[int, tuple[float, int]]]:
    """For each row: token id -> (log probability, rank), of the chosen token and the most likely ones."""
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    table = torch.log_softmax(logits[index].float(), dim=-1)
    chosen = tokens[index]
    values = table.gather(1, chosen[:, None])
    ranks = (table > values).sum(dim=1) + 1
    most = max(request.params.logprobs or 0 for request in requests)
    top_values, top_ids = table.topk(min(most, table.shape[1]), dim=-1)
    lists = (chosen.tolist(), values[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top_values.tolist())
    details = {}
    for row, request, token, value, rank, ids, likely in zip(rows, requests, *lists, strict=True):
        count = request.params.logprobs or 0
        entry = {i: (v, place) for place, (i, v) in enumerate(zip(ids[:count], likely[:count], strict=True), start=1)}
        entry.setdefault(token, (value, rank))
        details[row] = entry
    return details
