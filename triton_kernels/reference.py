"""Plain-torch twins of every kernel: obviously right, and the production path on machines without a GPU.

Rules: no triton import. Inputs of any float dtype; arithmetic in float32, or in float64 where the inputs are float64;
rounding to the input dtype happens where the kernels round. Lengths are read on the host, a sync on CUDA.
KV caches are `[pages, kv_heads, page_size, head_dim]`; a block table lists a request's pages in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # query positions, and rows of a matmul, that are computed together
_MASK32 = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False, lean: bool = True) -> Tensor:
    """RMS norm of `x [T, H]`; `pdl` here and below, and `lean`, are how a GPU launches: the result is the same.

    Normalised in float32, rounded to the dtype, then multiplied by `weight`: the order of transformers' LlamaRMSNorm.
    """
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope_and_write(
    qkv: Tensor,  # [T, (Hq + 2 Hk) * D]
    positions: Tensor,  # [T] int32
    cos_sin: Tensor,  # [max_pos, D] float32: cos of D/2 angles, then their sin
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,  # [T] int64: page * page_size + offset, negative = write nothing
    num_heads: int,
    q_norm: Tensor | None = None,  # [D]
    k_norm: Tensor | None = None,  # [D]
    eps: float = 1e-6,
    *,
    pdl: bool = False,
) -> Tensor:
    """Split `qkv`, norm q and k per head if weights are given, rotate both, write k and v; return q `[T, Hq, D]`.

    Rotates halves (`x1 cos - x2 sin, x2 cos + x1 sin`), as Llama and Qwen checkpoints expect.
    """
    _, kv_heads, page_size, dim = k_cache.shape
    q, k, v = torch.split(qkv.view(qkv.shape[0], -1, dim), [num_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions.long()].to(_wide(qkv).dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]

    def rotate(x: Tensor, norm: Tensor | None) -> Tensor:
        normed = x if norm is None else rms_norm(x, norm, eps)
        x1, x2 = _wide(normed).chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, offsets] = rotate(k, k_norm)[keep].to(k_cache.dtype)
    v_cache[pages, :, offsets] = v[keep].to(v_cache.dtype)
    return rotate(q, q_norm)


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one request as `[kv_heads, length, head_dim]`."""
    _, kv_heads, page_size, dim = cache.shape
    pages = cache[table[: -(-length // page_size)].long()]  # [n, Hk, page_size, D]
    return _wide(pages.transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length])


def prefill_attention(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,  # [R, W] int32
    query_ends: Tensor,  # [R] int32, ascending; padded request slots repeat the last end
    kv_lens: Tensor,  # [R] int32; 0 in padded request slots
    scale: float,
    *,
    pdl: bool = False,
) -> Tensor:
    """Causal attention of packed requests over their pages; rows that no request owns are zeros.

    Request r owns rows `query_ends[r-1] .. query_ends[r]`: the last of its `kv_lens[r]` tokens.
    """
    out = torch.zeros_like(q)
    start = 0
    for table, end, kv_len in zip(block_tables, query_ends.tolist(), kv_lens.tolist(), strict=True):
        n = end - start
        if n > 0 and kv_len > 0:
            k, v = _gather(k_cache, table, kv_len), _gather(v_cache, table, kv_len)
            out[start:end] = _causal_blocks(_wide(q[start:end]).transpose(0, 1), k, v, scale).to(q.dtype)
        start = end
    return out


def _causal_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last rows `q [Hq, n, D]` of a request over all its `k, v [Hk, kv_len, D]`; `[n, Hq, D]`.

    In blocks of positions that begin at multiples of BLOCK, each filled up with zeros: then a row's bits depend on its
    position and not on where a chunk of the prompt began.
    """
    n, kv_len = q.shape[1], k.shape[1]
    first = kv_len - n
    k, v = (F.pad(x, (0, 0, 0, -kv_len % BLOCK)) for x in (k, v))
    blocks = []
    for base in range(first // BLOCK * BLOCK, kv_len, BLOCK):
        low, high = max(base, first), min(base + BLOCK, kv_len)
        rows = F.pad(q[:, low - first : high - first], (0, 0, low - base, base + BLOCK - high))
        seen = torch.ones(BLOCK, base + BLOCK, dtype=torch.bool, device=q.device).tril(base)
        keys, values = k[:, : base + BLOCK], v[:, : base + BLOCK]
        o = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
        )
        blocks.append(o[0, :, low - base : high - base])
    return torch.cat(blocks, dim=1).transpose(0, 1)


def _attend_decode(
    q: Tensor,  # [B, Hq, D]
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,  # [B, W] int32
    kv_lens: Tensor,  # [B] int32; 0 gives a row of zeros
    scale: float,
) -> Tensor:
    """Attention of one query row per request over its pages."""
    out = torch.zeros_like(q)
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    for row, (table, kv_len) in enumerate(zip(block_tables, kv_lens.tolist(), strict=True)):
        if kv_len > 0:
            k, v = _gather(k_cache, table, kv_len), _gather(v_cache, table, kv_len)
            # A group's query heads share a KV head, so they act as the query rows of one attention: no KV is repeated.
            heads = _wide(q[row]).view(kv_heads, -1, dim)
            o = F.scaled_dot_product_attention(heads[None], k[None], v[None], scale=scale)
            out[row] = o.reshape(-1, dim).to(q.dtype)
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, phase: str
) -> Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N] + residual [T, N]`, a fixed number of rows at a time, so that a row's bits
    do not depend on how many there are. `phase` (prefill or decode) picks the tile of the kernel and nothing here.
    """
    whole = F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK))
    product = torch.cat([F.linear(rows, weight, bias) for rows in whole.split(BLOCK)])[: x.shape[0]]
    return product if residual is None else product + residual


def swiglu(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """`silu(gate) * up` of `gate_up [T, 2F]`; silu is rounded to the dtype before the product, as in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(_wide(gate)).to(gate_up.dtype) * up


def norm_linear(
    residual: Tensor,  # [B, H]
    norm_weight: Tensor,  # [H]
    eps: float,
    weight: Tensor,  # [N, H]
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    form: str = "auto",
) -> Tensor:
    """RMS norm, then a matmul; `form` here and below is which kernel, and says nothing about the result."""
    return F.linear(rms_norm(residual, norm_weight, eps), weight, bias)


def linear_add(
    x: Tensor,  # [B, K]
    weight: Tensor,  # [N, K]
    residual: Tensor,  # [B, N]
    out: Tensor | None = None,  # may be `residual`
    *,
    pdl: bool = False,
    form: str = "auto",
) -> Tensor:
    """A matmul, added to the residual."""
    total = residual + F.linear(x, weight)
    return total if out is None else out.copy_(total)


def norm_gate_up(
    residual: Tensor,  # [B, H]
    norm_weight: Tensor,  # [H]
    eps: float,
    gate_up: Tensor,  # [2F, H]: gate, then up
    *,
    pdl: bool = False,
    form: str = "auto",
) -> Tensor:
    """RMS norm, both matmuls of a gated MLP, and `silu(gate) * up`."""
    return swiglu(norm_linear(residual, norm_weight, eps, gate_up))


def decode_attention(
    qkv: Tensor,  # [B, (Hq + 2 Hk) * D]
    positions: Tensor,  # [B] int32
    cos_sin: Tensor,  # [max_pos, D] float32
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,  # [B] int64: where the row's last token belongs; negative writes nothing
    block_tables: Tensor,  # [B, W] int32
    kv_lens: Tensor,  # [B] int32, the new token counted; 0 writes nothing and gives zeros
    num_heads: int,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    num_splits: int | None = None,
    split_size: int = 0,
    counters: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """`rope_and_write`, then attention of the row over its pages as `[B, Hq * D]`; an unwritten token is attended, too.

    How the kernel splits a row (`num_splits`, `split_size`, `counters`) does not change the result.
    """
    page_size = k_cache.shape[2]
    last = (kv_lens.long() - 1).clamp_min(0)
    page = block_tables.gather(1, (last // page_size)[:, None])[:, 0].long()
    attended = torch.where(kv_lens > 0, page * page_size + last % page_size, -1)
    written = torch.where(kv_lens > 0, slot_mapping, -1)
    args = (num_heads, q_norm, k_norm, eps)
    q = rope_and_write(qkv, positions, cos_sin, k_cache, v_cache, written, *args)
    if bool(((written < 0) & (attended >= 0)).any()):
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        rope_and_write(qkv, positions, cos_sin, k_cache, v_cache, attended, *args)
    return _attend_decode(q, k_cache, v_cache, block_tables, kv_lens, scale).flatten(1)


def pdl_supported(device: torch.device | str) -> bool:
    """Plain torch has no launches to overlap."""
    return False


def philox(seeds: Tensor, counter0: Tensor, counter1: Tensor) -> Tensor:
    """First output word of Philox4x32-10 with key `seeds` (64 bits) and counter `(counter0, counter1, 0, 0)`.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). uint32 words live in int64: a product wraps
    modulo 2^64, which keeps all its bits, so shift and mask give the exact high and low words.
    """
    k0, k1 = seeds & _MASK32, (seeds >> 32) & _MASK32
    c0, c1 = counter0.long() & _MASK32, counter1.long() & _MASK32
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * _PHILOX_M0, c2 * _PHILOX_M1
        c0, c2 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, ((p0 >> 32) & _MASK32) ^ c3 ^ k1
        c1, c3 = p1 & _MASK32, p0 & _MASK32
        k0, k1 = (k0 + _PHILOX_W0) & _MASK32, (k1 + _PHILOX_W1) & _MASK32
    return c0


def uniform(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Float32 noise `[B, vocab]`: the top 23 bits of Philox at the cell centres, so never 0 or 1, and exact."""
    tokens = torch.arange(vocab, device=seeds.device)
    words = philox(seeds[:, None], tokens[None, :], positions.long()[:, None])
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _allowed(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens top-k and then top-p leave, as booleans `[B, V]`; tokens of equal logits share their fate."""
    vocab = logits.shape[1]
    ranked, order = logits.sort(dim=-1, descending=True)
    k = torch.where(top_k > 0, top_k.long().clamp(max=vocab), vocab)
    ranked = ranked.masked_fill(ranked < ranked.gather(1, k[:, None] - 1), float("-inf"))
    mass = torch.softmax(ranked / temperature[:, None], dim=-1)
    above = torch.cumsum(mass, dim=-1) - mass
    # Mass strictly above: a tie takes the value of the first of its equals.
    first = torch.cat((torch.ones_like(ranked[:, :1], dtype=torch.bool), ranked[:, 1:] != ranked[:, :-1]), dim=-1)
    above = torch.cummax(torch.where(first, above, 0.0), dim=-1).values
    keep = ((above < top_p[:, None]) | (top_p[:, None] >= 1)) & (ranked > float("-inf"))
    keep[:, 0] = True
    keep |= ranked == ranked[:, :1]
    return torch.zeros_like(keep).scatter(1, order, keep)


def sample(
    logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B] float32; 0 = greedy
    top_k: Tensor,  # [B] int32; 0 = off
    top_p: Tensor,  # [B] float32; 1 = off
    seeds: Tensor,  # [B] int64
    positions: Tensor,  # [B] int32
    *,
    pdl: bool = False,
) -> Tensor:
    """One token per row as int64, a function of nothing but the row's logits, parameters, seed and position.

    Greedy rows take the first largest logit. Others take the Gumbel-max: the argmax of `logits + temperature * g`,
    `g = -log(-log(u))`, which draws from the softmax of `logits / temperature`; `u` is counter-based (`uniform`).
    Top-k keeps ties of the k-th value; then top-p keeps a token while the mass strictly above it is below `top_p`.
    """
    tokens = logits.argmax(dim=-1)
    drawn = temperature > 0
    if bool(drawn.any()):
        t, k, p = temperature[drawn], top_k[drawn], top_p[drawn]
        rows = _wide(logits[drawn])
        noise = uniform(seeds[drawn], positions[drawn], logits.shape[1]).to(rows.dtype)
        scores = rows - t[:, None] * torch.log(-torch.log(noise))
        wants = (k > 0) | (p < 1)
        if bool(wants.any()):
            keep = _allowed(rows[wants], t[wants], k[wants], p[wants])
            scores[wants] = scores[wants].masked_fill(~keep, float("-inf"))
        tokens[drawn] = scores.argmax(dim=-1)
    return tokens


def advance(
    tokens: Tensor,  # [B] int64: what the step sampled
    input_ids: Tensor,  # [B] int64; this and the next five are the step's inputs, and are made the next one's
    positions: Tensor,  # [B] int32
    slot_mapping: Tensor,  # [B] int64
    kv_lens: Tensor,  # [B] int32, 0 in rows that are padding
    temperature: Tensor,  # [B] float32
    block_tables: Tensor,  # [B, W] int32
    limits: Tensor,  # [B] int32: tokens at which a row ends, its prompt included
    stops_after: Tensor,  # [B] int32: stop tokens count in a row of more tokens than this
    stops: Tensor,  # [any, B] int32: stop tokens of each row, filled up with -1
    state: Tensor,  # [4] int32: steps so far; whether to go on; rows that are too few to go on; columns of `stops` used
    flags: Tensor,  # [B + 1] int32, set by the host: a row that is to end, and last the whole run
    ring: Tensor,  # [steps, B] int32: gets a line of tokens, -1 in rows that are padding
    page_size: int,
) -> None:
    """Make the next decode step's inputs from what this one sampled, in place, and say whether there is a next one.

    Rows go on until their limit, a stop token or their flag; the run until as few rows as `state[2]` go on, it is
    halted or the ring is full. The tokens of the step count all the same.
    """
    steps, _, floor, columns = state.tolist()
    live, now = kv_lens > 0, kv_lens + 1
    ring[steps] = torch.where(live, tokens, -1)
    stopped = (stops[:columns] == tokens).any(0) & (now > stops_after)
    goes = live & ~stopped & (now < limits) & (flags[:-1] == 0)
    entry = (kv_lens // page_size).clamp(max=block_tables.shape[1] - 1).long()
    page = block_tables.gather(1, entry[:, None])[:, 0].long()
    slot_mapping.copy_(torch.where(goes, page * page_size + kv_lens % page_size, -1))
    input_ids.copy_(torch.where(goes, tokens, 0))
    positions.copy_(torch.where(goes, kv_lens, 0))
    kv_lens.copy_(torch.where(goes, now, 0))
    temperature.copy_(torch.where(goes, temperature, 0.0))
    again = int(goes.sum()) > floor and int(flags[-1]) == 0 and steps + 1 < len(ring)
    state[0], state[1] = steps + 1, int(again)
