"""Made-up requests for warm-up, on pages borrowed from the live cache for one step, and what they must not touch.

The tokens before a request's run have the K and V that the model gives them; every other entry of its pages is NaN, so
a read beyond a length shows. Random numbers would not do: behind them the last bit of a bfloat16 can turn all logits of
trained weights (SmolLM2-135M: errors up to 1.2 of the largest logit, mostly 0.02 behind its own K and V), and no
tolerance could tell rounding from a fault. Afterwards nothing but the run's own slots may have changed, and page 0 must
be zeros. Pages of live requests are never written: where too few are free, made-up requests read pages that may be
held, and write none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bucketgraph.errors import CaptureError
from bucketgraph.llm.request import Request
from bucketgraph.llm.sampling import SamplingParams
from bucketgraph.selfcheck import same_bits
from bucketgraph.slots import SKIP

if TYPE_CHECKING:
    from bucketgraph.llm.runner import Runner

_GREEDY = SamplingParams(temperature=0.0)
_CONTEXTS = 4  # different ones, for rows in turn
_PAGES = 3  # of a context
_SHORT = 8  # tokens of a prompt


@dataclass(frozen=True)
class _Contexts:
    """Made-up prompts, and their K and V by the model `[layers, 2, prompts * pages, kv_heads, page_size, head_dim]`."""

    tokens: list[list[int]]
    pages: int  # of each
    data: Tensor


class Examples:
    """Inputs of given sizes for both phases of a runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._cache = runner, runner.cache
        self._pages: list[int] = []  # borrowed in this step
        self._stale = torch.zeros(0, dtype=torch.bool)  # [pages, page_size] entries that must still be NaN afterwards
        self._last: Tensor | None = None  # the cache's last page before the step: where an index of -1 would write
        self._contexts: list[_Contexts | None] = []  # once they were asked for; None where there are none
        self._keeping = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is made for one step inside serves the next ones, too."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping, self._contexts = False, []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of warm-up: pages that its examples borrow are looked at, zeroed and given back at its end."""
        self._last = self._cache.data[:, :, -1].clone()
        try:
            yield
            self._require_untouched()
        finally:
            self._give_back()
            self._cache.data[:, :, -1] = self._last
            if not self._keeping:
                self._contexts = []

    def prefill(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """`tokens` in up to `requests` prompts. The first goes on where an earlier chunk ended, if there is room, and
        so do those of a few tokens, whose logits are often as ill conditioned as behind random K and V.
        """
        total, slots = sizes["tokens"], sizes["requests"]
        room = self._cache.pages - 1 - self._cache.pages_for(total)  # each further request may open one more page
        count = max(-(-total // self._runner.max_model_len), min(slots, total, room + 1))
        runs = [total // count + (row < total % count) for row in range(count)]
        before = [0] * count
        going_on = [row for row, n in enumerate(runs) if n < _SHORT or row == 0]
        if room <= count + 3 * len(going_on):
            going_on = [0] if room > count + 2 else []
        for row in going_on:
            far = min(self._cache.page_size + 3 + row, _PAGES * self._cache.page_size)
            before[row] = max(0, min(far, self._runner.max_model_len - runs[row]))
        requests = self._requests(before, runs, generator)
        arrays = self._runner.prefill_arrays(list(zip(requests, runs, strict=True)))
        if count < slots:  # an empty slot looks like padding: it repeats the last end and has length 0
            rest = slots - count
            arrays["query_ends"] = torch.cat([arrays["query_ends"], arrays["query_ends"][-1:].expand(rest)])
            for name, spec in self._runner.prefill_manager.spec.inputs.items():
                if spec.shape[0] == "requests" and name != "query_ends":
                    arrays[name] = torch.cat([arrays[name], arrays[name].new_zeros(rest, *arrays[name].shape[1:])])
        return self._harmless(arrays)

    def decode(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """`batch` requests of lengths that end within, at and just past a page: always the same ones."""
        batch, page = sizes["batch"], self._cache.page_size
        longest = min(self._runner.max_model_len, (self._cache.pages - 1) // batch * page, _PAGES * page)
        lengths = torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
        return self._harmless(
            self._runner.decode_arrays(self._requests([n - 1 for n in lengths], [1] * batch, generator))
        )

    def _requests(self, before: Sequence[int], runs: Sequence[int], generator: torch.Generator) -> list[Request]:
        """Requests that have `before` tokens in the cache and `runs` tokens to run."""
        self._give_back()
        contexts = self._made_contexts() if any(before) else None
        counts = [self._cache.pages_for(b + n) for b, n in zip(before, runs, strict=True)]
        borrowed = sum(counts) <= self._cache.free_pages
        pages = self._cache.allocate(sum(counts)) if borrowed else list(range(1, sum(counts) + 1))
        self._pages = list(pages) if borrowed else []
        requests, kept, written, sources = [], [], [], []
        for row, (b, n, count) in enumerate(zip(before, runs, counts, strict=True)):
            tokens = torch.randint(0, self._runner.model.config.vocab_size, (b + n,), generator=generator).tolist()
            if contexts is not None:
                which = row % len(contexts.tokens)
                tokens[:b] = contexts.tokens[which][:b]
                sources += [which * contexts.pages + min(page, contexts.pages - 1) for page in range(count)]
            request = Request(tokens, _GREEDY, seed=0, computed=b)
            request.hold([pages.pop(0) for _ in range(count)], self._runner.table_width)
            requests.append(request)
            at = torch.arange(count * self._cache.page_size).view(count, -1)
            kept.append(at < b)
            written.append(at < b + n)
        if borrowed:
            self._stale = ~torch.cat(written)
            self._write(torch.cat(kept), contexts, sources, generator)
        return requests

    def _made_contexts(self) -> _Contexts | None:
        """None where no pages are free for one, or the model cannot make one: its own warm-up says why."""
        if not self._contexts:
            try:
                self._contexts = [self._make_contexts()]
            except Exception:
                self._contexts = [None]
        return self._contexts[0]

    def _make_contexts(self) -> _Contexts | None:
        runner, cache, device = self._runner, self._cache, self._cache.data.device
        length = min(_PAGES * cache.page_size, runner.max_model_len)
        each = cache.pages_for(length)
        count = min(_CONTEXTS, cache.free_pages // each)
        if count == 0:
            return None
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, runner.model.config.vocab_size, (count, length), generator=draw).tolist()
        pages = cache.allocate(count * each)
        places = torch.tensor(pages, device=device)
        try:
            requests = [Request(list(ids), _GREEDY, seed=0) for ids in tokens]
            for row, request in enumerate(requests):
                request.hold(pages[row * each : (row + 1) * each], runner.table_width)
            arrays = runner.prefill_arrays([(request, length) for request in requests])
            runner.prefill_manager.run_unpadded(arrays)
            data = cache.data[:, :, places]
        finally:
            cache.data.index_fill_(2, places, 0)
            cache.release(pages)
        # The last entries of a context that is no whole number of pages are zeros.
        return _Contexts(tokens, each, data) if bool(data.isfinite().all()) else None

    def _write(
        self, kept: Tensor, contexts: _Contexts | None, sources: Sequence[int], generator: torch.Generator
    ) -> None:
        """K and V of the tokens before the run `kept [pages, page_size]`, and NaN everywhere else."""
        data = self._cache.data
        _, _, _, heads, size, dim = data.shape
        places = torch.tensor(self._pages, device=data.device)
        if contexts is not None:
            mask, source = kept[:, None, :, None].to(data.device), torch.tensor(sources, device=data.device)
            for layer, made in zip(data, contexts.data, strict=True):  # one at a time: together they may be gigabytes
                layer[:, places] = torch.where(mask, made[:, source], torch.nan)
            return
        tile = torch.randn((heads, size, dim), generator=generator)
        scale = torch.rand((len(kept), 1, 1, 1), generator=generator) + 0.5
        values = torch.where(kept[:, None, :, None], tile * scale, torch.nan)
        data[:, :, places] = values.to(device=data.device, dtype=data.dtype)

    def _require_untouched(self) -> None:
        """Raises CaptureError if page 0, the last page or an entry that belongs to no token was written."""
        data = self._cache.data
        if bool(data[:, :, 0].any()):
            raise CaptureError("page 0 of the KV cache was written, which pads block tables and belongs to nobody")
        borrowed_last = self._cache.pages - 1 in self._pages
        if not borrowed_last and self._last is not None and not same_bits(data[:, :, -1], self._last):
            raise CaptureError("the last page of the KV cache was written, as an index of -1 would: it means `skip`")
        if not self._pages:
            return
        pages = torch.tensor(self._pages, device=data.device)
        for layer in {0, len(data) - 1}:
            intact = data[layer][:, pages].isnan().all(dim=-1)  # [2, pages, heads, page_size]
            if not bool(intact.all(dim=2).all(dim=0).cpu()[self._stale].all()):
                raise CaptureError("the KV cache was written outside the slots of the run")

    def _give_back(self) -> None:
        if self._pages:
            data = self._cache.data
            data.index_fill_(2, torch.tensor(self._pages, device=data.device), 0)
            self._cache.release(self._pages)

    def _harmless(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._pages:
            arrays["slot_mapping"].fill_(SKIP)
        return arrays
