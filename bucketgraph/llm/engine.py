"""Scheduling: which requests run in the next step, and what their new tokens mean.

Rules: a request holds all the pages it may need before it starts, so it never stops half way; waiting prompts go
before running decodes; a prompt longer than the largest prefill bucket is run in chunks. A step that fails ends the
requests it ran, gives their pages back, and is their callers' to raise. Threads may share an engine: each caller steps
it under the lock until its own requests are done. A run of the device loop stays in flight between steps: whoever
needs the device for something else ends it first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from bucketgraph.errors import InputError
from bucketgraph.llm.device_loop import PAUSE, DeviceLoops, Run
from bucketgraph.llm.request import Request
from bucketgraph.llm.runner import Runner
from bucketgraph.llm.sampling import Delta, Logprob
from bucketgraph.llm.text_stream import TextStream
from bucketgraph.llm.tokenizer import Tokenizer

_NONE: frozenset[int] = frozenset()


class Engine:
    """Continuous batching over a `Runner`."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._streams: dict[Request, TextStream] = {}
        self.loops = DeviceLoops(runner, tuple(eos_token_ids))
        self._run: Run | None = None  # in flight on the device
        self.lock = threading.RLock()

    def add(self, requests: Sequence[Request]) -> None:
        with self.lock:
            self._waiting.extend(requests)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The device to oneself: the lock is held, and no run is in flight."""
        with self.lock:
            self._settle()
            yield

    def abort(self, requests: Sequence[Request]) -> None:
        """Forget requests that are not done, and take their pages back."""
        with self.lock:
            gone = {request for request in requests if not request.done}
            run = self._run
            if run is not None and (not gone.isdisjoint(run.requests) or all(r.done for r in run.requests)):
                self._settle()
                gone = {request for request in gone if not request.done}
            if not gone:
                return
            self._waiting = deque(request for request in self._waiting if request not in gone)
            for request in [request for request in self._running if request in gone]:
                self._leave(request)

    def step(self) -> None:
        """Admit what fits, then run one prefill, or one decode if no prompt is waiting.

        While a run of the device loop is in flight, take what is new instead, or wait a moment, without the lock. The
        step may hold requests of other callers only, so its exception is not raised here: it becomes the `error` of
        the requests that ran.
        """
        with self.lock:
            pause = self._follow(self._run) if self._run is not None else self._step()
        if pause:
            time.sleep(pause)

    def _step(self) -> float:
        """Returns the seconds to the next step that makes sense."""
        self._admit()
        chunks = self._runner.pack([request for request in self._running if request.in_prompt])
        batch = [request for request, _ in chunks] or list(self._running)
        if not batch:
            return 0.0
        try:
            if chunks:
                self._prefill(chunks)
                return 0.0
            if any(request.loop == "device" for request in batch):
                self._run = self.loops.start(batch)
            if self._run is None:
                self._accept(batch, *self._runner.decode(batch))
        except BaseException as error:
            self._fail(batch, error)
        return 0.0 if self._run is None else PAUSE

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        for request in requests:
            if not request.done:
                request.error = error
                self._leave(request)
        if not isinstance(error, Exception):  # an interrupt is meant for this thread, too
            raise error

    # -- a run in flight ---------------------------------------------------------------------------------------------

    def _follow(self, run: Run) -> float:
        """Take what a run has done where somebody waits for it. Returns the seconds to the next look."""
        cache = self._runner.cache
        try:
            if self._waiting and cache.pages_for(self._waiting[0].limit) <= cache.free_pages:
                run.cancel()
            wanted = run.read_along or bool(self._waiting)
            if not run.poll() or not (run.over or wanted):
                return run.pause(wanted)
            self._take(run)
            if run.over:
                self._run = None
                self.loops.ended(run)
        except BaseException as error:
            self._abandon(run, error)
        return 0.0

    def _settle(self) -> None:
        """End the run in flight, if any, and take what it has done."""
        run = self._run
        if run is None:
            return
        try:
            run.stop()
            self._take(run)
            self._run = None
            self.loops.ended(run)
        except BaseException as error:
            self._abandon(run, error)

    def _abandon(self, run: Run, error: BaseException) -> None:
        """Following a run failed: nothing of it may run on while its pages go to others."""
        self._run = None
        try:
            if isinstance(error, Exception):
                self.loops.failed(error, len(run.requests))
        except Exception as broken:
            error = broken
        else:
            with suppress(Exception):
                run.stop()
        self._fail(run.requests, error)

    def _take(self, run: Run) -> None:
        for request, ids in run.take():
            request.computed += len(ids)
            self._finish_or_go_on(request, ids)
            if request.done:
                run.drop(request)  # the device knows no stop strings

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
        self._accept(whole, tokens, logits)

    def _accept(self, requests: Sequence[Request], tokens: Tensor, logits: Tensor) -> None:
        """Append each request's new token, which are the first of `tokens`, and see whether it ends there."""
        if not requests:
            return
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        details = _logprobs([requests[row] for row in wanted], wanted, tokens, logits) if wanted else {}
        for row, (request, token) in enumerate(zip(requests, tokens.tolist()[: len(requests)], strict=True)):
            if row in details:
                self._note_logprobs(request, token, details[row])
            self._finish_or_go_on(request, [token])

    def _finish_or_go_on(self, request: Request, ids: list[int]) -> None:
        """Take new tokens up to the one that ends the request, if any."""
        params, text = request.params, ""
        early = max(0, params.min_tokens - (len(request.tokens) - request.prompt_len)) if params.min_tokens else 0
        ids, reason, stop = self._until_end(request, ids, early)
        watched = request.streamed or bool(params.stop)  # somebody looks at the text before its end
        if self._tokenizer is not None and (watched or reason is not None):
            stream = self._streams.get(request)
            if stream is None:
                stream = self._streams[request] = TextStream(self._tokenizer, request)
            text, taken, found = stream.push(ids if watched else request.output_ids + ids, early, reason)
            if found is not None:
                ids, reason, stop = ids[:taken], "stop", found
            request.text += text
        request.tokens += ids
        if request.streamed:
            request.deltas.append(Delta(request.index, text, ids, reason))
        if reason is not None:
            # Last, as its caller may look without the lock.
            request.stop_reason, request.finish_reason = stop, reason
            self._leave(request)

    def _until_end(
        self, request: Request, ids: list[int], early: int
    ) -> tuple[list[int], str | None, str | int | None]:
        """Tokens up to the one that ends the request, finish and stop reason; the first `early` ones cannot stop it."""
        params, room = request.params, request.limit - len(request.tokens)
        if len(ids) > room:
            ids = ids[:room]
        eos = _NONE if params.ignore_eos else self._eos
        stops = eos.union(params.stop_token_ids) if params.stop_token_ids else eos
        if not stops.isdisjoint(ids[early:] if early else ids):
            at = next(at for at in range(early, len(ids)) if ids[at] in stops)
            return ids[: at + 1], "stop", None if ids[at] in eos else ids[at]
        return ids, "length" if len(ids) == room else None, None

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

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._running


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
