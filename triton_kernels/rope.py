"""Splits a QKV row into heads, norms q and k per head (Qwen3), rotates them, and writes k and v into the paged cache.

A negative slot writes nothing: -1 taken as an index would be the last physical slot. Every address is int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from . import pdl as chain

HEADS_PER_PROGRAM = 16


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rope_and_write(
    qkv,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    slot_mapping,
    q_norm,
    k_norm,
    q_out,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    chain.launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, HALF)  # HALF is D / 2 padded to a power of two
    in_dim = d < D // 2
    is_q = head < HQ
    is_k = (head >= HQ) & (head < HQ + HK)
    is_v = (head >= HQ + HK) & (head < HQ + 2 * HK)
    inside = (head < HQ + 2 * HK)[:, None] & in_dim[None, :]

    chain.wait(PDL)
    source = qkv + (token * (HQ + 2 * HK) + head)[:, None] * D + d[None, :]
    x1 = tl.load(source, mask=inside, other=0.0)
    x2 = tl.load(source + D // 2, mask=inside, other=0.0)
    v1, v2 = x1, x2
    if NORM:
        a, b = x1.to(tl.float32), x2.to(tl.float32)
        inv = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        wq1 = tl.load(q_norm + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        wq2 = tl.load(q_norm + D // 2 + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        wk1 = tl.load(k_norm + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        wk2 = tl.load(k_norm + D // 2 + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        w1, w2 = tl.where(is_q[:, None], wq1, wk1), tl.where(is_q[:, None], wq2, wk2)
        x1 = ((a * inv).to(x1.dtype).to(tl.float32) * w1).to(x1.dtype)
        x2 = ((b * inv).to(x2.dtype).to(tl.float32) * w2).to(x2.dtype)

    angle = cos_sin + tl.load(positions + token).to(tl.int64) * D + d
    cos = tl.load(angle, mask=in_dim, other=0.0)[None, :]
    sin = tl.load(angle + D // 2, mask=in_dim, other=0.0)[None, :]
    a, b = x1.to(tl.float32), x2.to(tl.float32)
    y1 = (a * cos - b * sin).to(x1.dtype)
    y2 = (b * cos + a * sin).to(x1.dtype)

    q_row = q_out + (token * HQ + head)[:, None] * D + d[None, :]
    q_mask = is_q[:, None] & in_dim[None, :]
    tl.store(q_row, y1, mask=q_mask)
    tl.store(q_row + D // 2, y2, mask=q_mask)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        page, offset = slot // PAGE, slot % PAGE
        kv_head = tl.where(is_v, head - HQ - HK, head - HQ)
        cell = ((page * HK + kv_head) * PAGE + offset)[:, None] * D + d[None, :]
        k_mask = is_k[:, None] & in_dim[None, :]
        tl.store(k_cache + cell, y1, mask=k_mask)
        tl.store(k_cache + cell + D // 2, y2, mask=k_mask)
        v_mask = is_v[:, None] & in_dim[None, :]
        tl.store(v_cache + cell, v1, mask=v_mask)
        tl.store(v_cache + cell + D // 2, v2, mask=v_mask)


def rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    pdl: bool = False,
) -> Tensor:
    """Rotate q and k of `qkv [T, (Hq + 2 Hk) * D]` and write k and v at `slot_mapping [T]`; return q `[T, Hq, D]`.

    `positions [T]` int32 index `cos_sin [max_pos, D]` float32 (D/2 cosines, then D/2 sines) and must be in range, pad
    rows too. A slot is `page * page_size + offset`, int64; negative writes nothing. `q_norm`, `k_norm` `[D]`: both or
    neither. `pdl`: as part of a chain (`pdl.py`). Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    tokens, width = qkv.shape
    _, kv_heads, page_size, dim = k_cache.shape
    checks.floats(qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    checks.caches(k_cache, v_cache, dim)
    padded = checks.head_dim(dim)
    checks.vector("positions", positions, tokens, torch.int32)
    checks.vector("slot_mapping", slot_mapping, tokens, torch.int64)
    checks.contiguous(cos_sin=cos_sin)
    checks.require(
        width == (num_heads + 2 * kv_heads) * dim and cos_sin.shape[1] == dim and cos_sin.dtype == torch.float32,
        f"rope_and_write: given qkv {tuple(qkv.shape)}, cos_sin {tuple(cos_sin.shape)} {cos_sin.dtype}, expected "
        f"rows of ({num_heads} + 2 * {kv_heads}) * {dim} and float32 rows of {dim}",
    )
    checks.require((q_norm is None) == (k_norm is None), "rope_and_write: q_norm and k_norm come together or not")
    if q_norm is not None and k_norm is not None:
        checks.vector("q_norm", q_norm, dim, qkv.dtype)
        checks.vector("k_norm", k_norm, dim, qkv.dtype)
    q = torch.empty((tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    heads = num_heads + 2 * kv_heads
    block = min(triton.next_power_of_2(heads), HEADS_PER_PROGRAM)
    chain.launch(
        _rope_and_write,
        (tokens, triton.cdiv(heads, block)),
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        eps,
        HQ=num_heads,
        HK=kv_heads,
        D=dim,
        PAGE=page_size,
        NORM=q_norm is not None,
        BLOCK_H=block,
        HALF=padded // 2,
        pdl=pdl,
        lean=False,
        num_warps=4,
    )
    return q
