"""Made-up requests for warm-up, on pages borrowed from the live cache for one step, and what they must not touch.

The tokens before a request's run have random K and V; every other entry of its pages is NaN, so a read beyond a length
shows. Afterwards nothing but the run's own slots may have changed, and page 0 must be zeros. Pages of live requests are
never written: where too few are free, made-up requests read pages that may be held, and write none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class Examples:
    """Inputs of given sizes for both phases of a runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._cache = runner, runner.cache
        self._pages: list[int] = []  # borrowed in this step
        self._stale = torch.zeros(0, dtype=torch.bool)  # [pages, page_size] entries that must still be NaN afterwards
        self._last: Tensor | None = None  # the cache's last page before the step: where an index of -1 would write

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

    def prefill(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """`tokens` in up to `requests` prompts; the first goes on where an earlier chunk ended, if there is room."""
        total, slots = sizes["tokens"], sizes["requests"]
        room = self._cache.pages - 1 - self._cache.pages_for(total)  # each further request may open one more page
        count = max(-(-total // self._runner.max_model_len), min(slots, total, room + 1))
        runs = [total // count + (row < total % count) for row in range(count)]
        before = [0] * count
        if room > count + 2:
            before[0] = max(0, min(self._cache.page_size + 3, self._runner.max_model_len - runs[0]))
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
        """`batch` requests of lengths that end within, at and just past a page."""
        batch, page = sizes["batch"], self._cache.page_size
        longest = min(self._runner.max_model_len, (self._cache.pages - 1) // batch * page, 3 * page)
        lengths = torch.randint(1, longest + 1, (batch,), generator=generator).tolist()
        return self._harmless(
            self._runner.decode_arrays(self._requests([n - 1 for n in lengths], [1] * batch, generator))
        )

    def _requests(self, before: Sequence[int], runs: Sequence[int], generator: torch.Generator) -> list[Request]:
        """Requests that have `before` tokens in the cache and `runs` tokens to run."""
        self._give_back()
        counts = [self._cache.pages_for(b + n) for b, n in zip(before, runs, strict=True)]
        borrowed = sum(counts) <= self._cache.free_pages
        pages = self._cache.allocate(sum(counts)) if borrowed else list(range(1, sum(counts) + 1))
        self._pages = list(pages) if borrowed else []
        requests, kept, written = [], [], []
        for b, n, count in zip(before, runs, counts, strict=True):
            tokens = torch.randint(0, self._runner.model.config.vocab_size, (b + n,), generator=generator).tolist()
            request = Request(tokens, _GREEDY, seed=0, computed=b)
            request.hold([pages.pop(0) for _ in range(count)], self._runner.table_width)
            requests.append(request)
            at = torch.arange(count * self._cache.page_size).view(count, -1)
            kept.append(at < b)
            written.append(at < b + n)
        if borrowed:
            self._stale = ~torch.cat(written)
            self._write(torch.cat(kept), generator)
        return requests

    def _write(self, kept: Tensor, generator: torch.Generator) -> None:
        """K and V of the tokens before the run `kept [pages, page_size]`, and NaN everywhere else."""
        data = self._cache.data
        _, _, _, heads, size, dim = data.shape
        tile = torch.randn((heads, size, dim), generator=generator)
        scale = torch.rand((len(kept), 1, 1, 1), generator=generator) + 0.5
        values = torch.where(kept[:, None, :, None], tile * scale, torch.nan)
        data[:, :, torch.tensor(self._pages, device=data.device)] = values.to(device=data.device, dtype=data.dtype)

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
