"""Inputs for the kernel tests, shared by the interpreter lane and the GPU lane.

Rules: all that a kernel may not read is NaN (KV beyond a length, pages nobody owns); page 0 is zeros and pads the
block tables; pages are shuffled; a table is one column wider than the longest request needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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


@dataclass
class Fused(Paged):
    """A decode step whose new tokens, each row's last, are in `qkv` and not yet in the cache, where they are NaN."""

    qkv: Tensor  # [rows, (heads + 2 * kv_heads) * D]
    positions: Tensor  # [rows] int32
    cos_sin: Tensor  # [max_pos, D] float32
    slots: Tensor  # [rows] int64
    heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None


def fused_case(
    lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    norm: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Fused:
    case = paged(lens, kv_heads, dim, page, dtype, device)
    last = (case.kv_lens.long() - 1).clamp_min(0)
    ids = case.block_tables.gather(1, (last // page)[:, None])[:, 0].long()
    real = case.kv_lens > 0
    slots = torch.where(real, ids * page + last % page, -1)
    for cache in (case.k_cache, case.v_cache):
        cache[ids[real], :, (last % page)[real]] = float("nan")
    angles = torch.rand(max(lens) + 1, dim // 2, device=device) * 7
    gains = [torch.randn(dim, device=device).to(dtype) if norm else None for _ in range(2)]
    return Fused(
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.kv_lens,
        torch.randn(len(lens), (heads + 2 * kv_heads) * dim, device=device).to(dtype),
        last.int(),
        torch.cat((angles.cos(), angles.sin()), dim=1),
        slots,
        heads,
        *gains,
    )


def decode(module: ModuleType, case: Paged, q: Tensor, **kwargs: Any) -> Tensor:
    """Attention of `q [rows, heads, D]` over the case's pages through a decode step that changes nothing.

    Each row's last token is what the cache holds, neither normed nor rotated, and is written where it is.
    """
    rows, heads, dim = q.shape
    page = case.k_cache.shape[2]
    last = (case.kv_lens.long() - 1).clamp_min(0)
    ids = case.block_tables.gather(1, (last // page)[:, None])[:, 0].long()
    new = [cache[ids, :, last % page].to(q.dtype) for cache in (case.k_cache, case.v_cache)]
    half = torch.ones(1, dim // 2, device=q.device)
    out: Tensor = module.decode_attention(
        torch.cat([q, *new], 1).flatten(1),
        torch.zeros_like(case.kv_lens),
        torch.cat((half, half * 0), 1),
        case.k_cache,
        case.v_cache,
        torch.where(case.kv_lens > 0, ids * page + last % page, -1),
        case.block_tables,
        case.kv_lens,
        heads,
        dim**-0.5,
        **kwargs,
    )
    return out.view(rows, heads, dim)


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


# Row counts and table widths over every class that the JIT could tell apart: 1, multiples of 16, others.
COUNTS = [(1, 1), (2, 8), (16, 16), (17, 17), (32, 5), (33, 64), (1003, 3)]
# What `forward` may compile over all of them.
VARIANTS = {
    "_rms_norm": 1,
    "_rope_and_write": 1,
    "_prefill": 1,
    "_decode": 4,  # with one split there is nothing to merge; one, two or three stages by rows
    "_swiglu": 1,
    "_tile_best": 1,
    "_candidates": 1,
    "_row_best": 1,
    "_advance": 1,
}


def forward(rows: int, width: int, device: str, odd: bool = False) -> None:
    """Every op on `rows` rows of a model whose sizes no other test uses; `odd` offsets the metadata by one element."""
    from bucketgraph.kernels import triton_ops

    heads, kv_heads, dim, page, hidden = 10, 5, 64, 16, 640

    def meta(fill: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((rows + odd,), fill, dtype=dtype, device=device)[int(odd) :]

    cache = torch.zeros(4, kv_heads, page, dim, dtype=torch.bfloat16, device=device)
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    triton_ops.rms_norm(x, weight, 1e-6)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=torch.bfloat16)
    cos_sin = torch.ones(8, dim, device=device)
    q = triton_ops.rope_and_write(qkv, meta(3), cos_sin, cache, cache, meta(-1, torch.int64), heads)
    tables = torch.ones(rows, width, dtype=torch.int32, device=device)
    triton_ops.prefill_attention(q, cache, cache, tables, meta(rows), meta(rows), 0.125)
    args = (qkv, meta(3), cos_sin, cache, cache, meta(-1, torch.int64), tables, meta(5), heads, 0.125)
    for splits in (1, 2, 3):
        triton_ops.decode_attention(*args, num_splits=splits)
    triton_ops.decode_attention(*args, split_size=64)
    triton_ops.swiglu(torch.randn(rows, 2 * 1920, device=device, dtype=torch.bfloat16))
    one = torch.ones(rows, device=device)
    logits = torch.randn(rows, 1000, device=device)
    triton_ops.sample(logits, one, meta(5), one, meta(5, torch.int64), meta(0))
    long = torch.int64
    columns, flags = torch.ones(2, rows, dtype=torch.int32, device=device), torch.zeros(rows + 1, dtype=torch.int32)
    state = torch.tensor([0, 0, 0, 1], dtype=torch.int32, device=device)
    inputs = (meta(1, long), meta(1, long), meta(1), meta(1, long), meta(1), one, tables)
    triton_ops.advance(*inputs, meta(5), meta(2), columns, state, flags.to(device), columns.clone(), page)
