"""Inputs for the kernel tests, shared by the interpreter lane and the GPU lane.

Rules: all that a kernel may not read is NaN (KV beyond a length, pages nobody owns); page 0 is zeros and pads the
block tables; pages are shuffled; a table is one column wider than the longest request needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass
class Paged:
    k_cache: Tensor  # [pages, Hk, page_size, D]
    v_cache: Tensor
    block_tables: Tensor  # [rows, width] int32
    kv_lens: Tensor  # [rows] int32


def paged(
    lens: list[int],
    kv_heads: int,
    dim: int,
    page: int,
    dtype: torch.dtype,
    device: str = "cpu",
    first_page: int = 1,
) -> Paged:
    """A cache in which row r owns `lens[r]` random tokens on shuffled pages from `first_page` up."""
    counts = [-(-n // page) for n in lens]
    pages = first_page + sum(counts) + 2
    order = (torch.randperm(sum(counts)) + first_page).int()
    tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    caches = []
    for _ in range(2):
        if first_page == 1:
            cache = torch.full((pages, kv_heads, page, dim), float("nan"), dtype=dtype, device=device)
        else:
            cache = torch.empty((pages, kv_heads, page, dim), dtype=dtype, device=device)
        cache[0] = 0
        used = 0
        for row, (n, count) in enumerate(zip(lens, counts, strict=True)):
            ids = order[used : used + count]
            tokens = torch.randn(kv_heads, count * page, dim, device=device)
            tokens[:, n:] = float("nan")
            cache[ids.long().to(device)] = tokens.view(kv_heads, count, page, dim).transpose(0, 1).to(dtype)
            tables[row, :count] = ids
            used += count
        caches.append(cache)
    return Paged(*caches, tables.to(device), torch.tensor(lens, dtype=torch.int32, device=device))


def queries(rows: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(rows, heads, dim, device=device).to(dtype)


def ends(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0).int().to(device)


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; NaN in either gives NaN, which fails."""
    return float((out.double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-30))


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty hands out NaN (the largest integer for integers), so an element that nobody wrote shows."""

    def poison(make):  # type: ignore[no-untyped-def]
        def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
            t = make(*args, **kwargs)
            return t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max)

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    yield
