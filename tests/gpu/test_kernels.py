"""The kernels on a GPU against their float64 twins at realistic sizes; their JIT keys; their capture in a graph."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import COUNTS, VARIANTS, Paged, decode, ends, forward, paged, queries, relative_error

from bucketgraph.kernels import (
    decode_attention,
    prefill_attention,
    reference,
    rms_norm,
    rope,
    sampling,
    sampling_math,
    swiglu,
    triton_ops,
)

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 2e-5}
VOCAB = 128256

# head_dim, query heads, KV heads, page size, dtype: every value of each, every head_dim in every dtype
SHAPES = [
    (64, 32, 8, 16, BF16),
    (96, 32, 32, 64, BF16),
    (128, 32, 8, 128, BF16),
    (64, 14, 2, 64, FP16),
    (96, 9, 3, 16, FP16),
    (128, 16, 2, 16, FP16),
    (64, 9, 1, 128, FP32),
    (96, 4, 1, 16, FP32),
    (128, 8, 1, 64, FP32),
    (64, 9, 3, 16, BF16),
    (128, 16, 8, 16, BF16),
    (128, 32, 1, 64, BF16),
]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def prefill(module, case: Paged, q, query_ends):
    scale = q.shape[2] ** -0.5
    return module.prefill_attention(q, case.k_cache, case.v_cache, case.block_tables, query_ends, case.kv_lens, scale)


def wide(case: Paged) -> Paged:
    return Paged(case.k_cache.double(), case.v_cache.double(), case.block_tables, case.kv_lens)


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "dtype"), SHAPES)
def test_prefill_pad_rows_are_zero_and_stale_nan_is_never_read(dim, heads, kv_heads, page, dtype, nan_memory):
    # Whole prompts, a lone token after a long context, a chunk, and padded slots.
    counts, lens = [1000, 1, 513, 64, 128, 0, 0], [1000, 2049, 1537, 64, 128, 0, 0]
    case = paged(lens, kv_heads, dim, page, dtype, DEVICE)
    tokens, real = 1792, sum(counts)
    q = queries(tokens, heads, dim, dtype, DEVICE)
    q[real:] = float("nan")
    out = prefill(triton_ops, case, q, ends(counts, DEVICE))
    ref = prefill(reference, wide(case), q.double(), ends(counts, DEVICE))
    assert relative_error(out, ref) < TOLERANCE[dtype]
    assert (out[real:] == 0).all()


def test_prefill_of_4096_tokens_at_a_context_of_8192(nan_memory):
    case = paged([8192], 8, 128, 16, BF16, DEVICE)
    q = queries(4096, 32, 128, BF16, DEVICE)
    out = prefill(triton_ops, case, q, ends([4096], DEVICE))
    ref = prefill(reference, case, q.float(), ends([4096], DEVICE))
    assert relative_error(out, ref) < 1e-2


def test_prefill_in_chunks_equals_prefill_at_once():
    case = paged([3000], 8, 128, 16, BF16, DEVICE)
    q = queries(3000, 32, 128, BF16, DEVICE)
    whole = prefill(triton_ops, case, q, ends([3000], DEVICE))
    parts = []
    for begin, end in ((0, 1111), (1111, 1112), (1112, 3000)):
        case.kv_lens = ints(end)
        parts.append(prefill(triton_ops, case, q[begin:end].contiguous(), ends([end - begin], DEVICE)))
    assert relative_error(torch.cat(parts), whole) < 4e-3


def test_prefill_of_a_request_is_bitwise_independent_of_its_pack_and_its_bucket():
    case = paged([900, 100, 500], 8, 128, 16, BF16, DEVICE)
    q = queries(2048, 32, 128, BF16, DEVICE)
    packed = prefill(triton_ops, case, q, ends([900, 100, 500], DEVICE))[900:1000]
    alone = Paged(case.k_cache, case.v_cache, case.block_tables[1:2].contiguous(), case.kv_lens[1:2])
    assert torch.equal(prefill(triton_ops, alone, q[900:1000], ends([100], DEVICE)), packed)


def test_prefill_with_more_requests_than_one_search_step(nan_memory):
    counts = [(7 * i) % 11 for i in range(300)]
    case = paged(counts, 8, 64, 16, BF16, DEVICE)
    q = queries(2048, 32, 64, BF16, DEVICE)
    out = prefill(triton_ops, case, q, ends(counts, DEVICE))
    ref = prefill(reference, wide(case), q.double(), ends(counts, DEVICE))
    assert relative_error(out, ref) < 1e-2


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "dtype"), SHAPES)
def test_decode_length_zero_is_zeros_and_stale_nan_is_never_read(dim, heads, kv_heads, page, dtype, nan_memory):
    case = paged([8191, 0, 1, 64, 65, 4096, 17], kv_heads, dim, page, dtype, DEVICE)
    q = queries(7, heads, dim, dtype, DEVICE)
    q[1] = float("nan")
    ref = decode(reference, wide(case), q.double())
    for kwargs in ({"num_splits": 16}, {"split_size": 256}):
        out = decode(triton_ops, case, q, **kwargs)
        assert relative_error(out, ref) < TOLERANCE[dtype], kwargs
        assert (out[1] == 0).all()


def test_decode_in_one_split_and_in_many_agree(nan_memory):
    case = paged([700, 0, 3, 1024], 8, 128, 16, BF16, DEVICE)
    q = queries(4, 32, 128, BF16, DEVICE)
    ref = decode(reference, wide(case), q.double())
    for splits in (1, 2, 32, 128, None):
        assert relative_error(decode(triton_ops, case, q, num_splits=splits), ref) < 1e-2


def test_decode_with_a_split_size_is_bitwise_independent_of_batch_and_table_width():
    case = paged([100, 3000, 8000], 8, 128, 16, BF16, DEVICE)
    q = queries(3, 32, 128, BF16, DEVICE)
    together = decode(triton_ops, case, q, split_size=256)
    for row, width in ((0, 16), (0, 100), (1, 200)):
        alone = Paged(
            case.k_cache,
            case.v_cache,
            case.block_tables[row : row + 1, :width].contiguous(),
            case.kv_lens[row : row + 1],
        )
        assert torch.equal(decode(triton_ops, alone, q[row : row + 1], split_size=256)[0], together[row])


def test_pages_beyond_2_to_the_31_elements_are_addressed(nan_memory):
    kv_heads, page, dim = 8, 128, 128
    first = 2**31 // (kv_heads * page * dim) + 7
    case = paged([300, 200], kv_heads, dim, page, BF16, DEVICE, first_page=first)
    assert case.k_cache.numel() > 2**31 and int(case.block_tables.max()) >= first
    q = queries(2, 32, dim, BF16, DEVICE)
    assert relative_error(decode(triton_ops, case, q), decode(reference, case, q.float())) < 1e-2
    q = queries(64, 32, dim, BF16, DEVICE)
    query_ends = ends([40, 24], DEVICE)
    out, ref = prefill(triton_ops, case, q, query_ends), prefill(reference, case, q.float(), query_ends)
    assert relative_error(out, ref) < 1e-2

    last = case.k_cache.shape[0] * page - 1
    qkv = torch.randn(2, (32 + 16) * dim, device=DEVICE).to(BF16)
    cos_sin = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), 1).to(DEVICE)  # no rotation
    case.k_cache[-1, :, -1] = 5
    slots = ints(last, -1, dtype=torch.int64)
    triton_ops.rope_and_write(qkv, ints(0, 0), cos_sin, case.k_cache, case.v_cache, slots, 32)
    assert torch.equal(case.k_cache[-1, :, -1], qkv[0].view(48, dim)[32:40])
    assert torch.equal(case.v_cache[-1, :, -1], qkv[0].view(48, dim)[40:])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [576, 1024, 4096, 8192])
def test_rms_norm(width, dtype, nan_memory):
    x = torch.randn(333, width, device=DEVICE).to(dtype)
    weight = torch.randn(width, device=DEVICE).to(dtype)
    ref = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert relative_error(triton_ops.rms_norm(x, weight, 1e-5), ref) < TOLERANCE[dtype]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "page", "dtype"),
    [(64, 32, 8, 16, BF16), (96, 9, 3, 64, FP16), (128, 32, 8, 128, FP32), (128, 16, 8, 16, BF16)],
)
def test_a_negative_slot_writes_nothing_and_leaves_the_last_slot(dim, heads, kv_heads, page, dtype, norm, nan_memory):
    tokens, real = 300, 257
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    qkv[real:] = float("nan")
    angles = torch.rand(9000, dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 9000, (tokens,), device=DEVICE, dtype=torch.int32)
    pages = 8192 // page
    slots = torch.randperm(pages * page - page - 1, device=DEVICE)[:tokens] + page
    slots[real:] = -1
    weights = [torch.randn(dim, device=DEVICE).to(dtype) for _ in range(2)] if norm else [None, None]
    k, v = torch.full((2, pages, kv_heads, page, dim), 7.0, dtype=dtype, device=DEVICE)
    k_ref, v_ref = k.double(), v.double()
    q = triton_ops.rope_and_write(qkv, positions, cos_sin, k, v, slots, heads, *weights)
    wider = [None if w is None else w.double() for w in weights]
    q_ref = reference.rope_and_write(qkv.double(), positions, cos_sin, k_ref, v_ref, slots, heads, *wider)
    assert relative_error(q[:real], q_ref[:real]) < TOLERANCE[dtype]
    untouched = v_ref == 7.0
    assert torch.equal(v.double(), v_ref)
    assert (k[untouched] == 7.0).all() and (k[-1, :, -1] == 7.0).all()
    assert relative_error(k[~untouched], k_ref[~untouched]) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "width"), [(BF16, 8192), (FP16, 1536), (FP32, 14336)])
def test_swiglu(width, dtype, nan_memory):
    gate_up = torch.randn(333, 2 * width, device=DEVICE).to(dtype) * 4
    assert relative_error(triton_ops.swiglu(gate_up), reference.swiglu(gate_up.double())) < TOLERANCE[dtype]


@triton.jit
def _draw(seed, position, out, V: tl.constexpr):
    token = tl.arange(0, V)
    tl.store(out + token, sampling_math.uniform(tl.load(seed), token, tl.load(position)))


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_uniform_noise_is_bit_equal_to_the_twin(seed):
    out = torch.empty(1024, device=DEVICE)
    seeds, positions = ints(seed, dtype=torch.int64), ints(131071)
    _draw[(1,)](seeds, positions, out, V=1024)
    assert torch.equal(out, reference.uniform(seeds, positions, 1024)[0])


def sampling_args(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0):
    return (
        torch.full((rows,), temperature, device=DEVICE),
        torch.full((rows,), top_k, device=DEVICE, dtype=torch.int32),
        torch.full((rows,), top_p, device=DEVICE),
        torch.arange(rows, device=DEVICE) * 977 - 5,
        torch.arange(rows, device=DEVICE, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_greedy_takes_the_first_of_ties(dtype, nan_memory):
    logits = (torch.randn(64, VOCAB, device=DEVICE) * 3).to(dtype)  # bfloat16 makes ties common
    logits[0] = 0.0
    logits[1, [5, 90000]] = 50.0
    found = triton_ops.sample(logits, *sampling_args(64, 0.0, 10, 0.5))
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(found, first)


def test_draws_stay_inside_top_k_and_top_p_and_match_the_twin(nan_memory):
    logits = torch.randn(64, VOCAB, device=DEVICE) * 3
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 50, 1.0), (1.0, 0, 0.9), (0.8, 20, 0.8), (2.0, 0, 0.3)):
        args = sampling_args(64, temperature, top_k, top_p)
        found = triton_ops.sample(logits, *args)
        # Sums of floats in another order may move a token at the edge of top-p, never more than that.
        assert (found == reference.sample(logits.double(), *args)).sum() >= 63
        chosen = logits.gather(1, found[:, None])
        kept = logits.double()
        if top_k:
            kth = logits.topk(top_k).values[:, -1:]
            assert (chosen >= kth).all()
            kept = kept.masked_fill(logits < kth, float("-inf"))
        mass = torch.softmax(kept / temperature, 1)
        above = torch.where(logits > chosen, mass, 0.0).sum(1)
        assert (above < top_p + 1e-5).all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_rows_of_mixed_limits_match_the_twin_and_each_row_alone(dtype, spread, nan_memory):
    """Flat logits refuse many a winner of top-p; top-k of 5000 and ties have more candidates than fit in registers."""
    settings = [
        (0.0, 20, 0.8),
        (1.0, 0, 1.0),
        (0.7, 20, 0.8),
        (1.0, 50, 1.0),
        (1.0, 0, 0.9),
        (1.0, 0, 0.02),
        (0.8, 200, 0.95),
        (1.0, 5000, 0.5),
    ]
    t, k, p = (torch.tensor(column, device=DEVICE).repeat(8) for column in zip(*settings, strict=True))
    logits = (torch.randn(64, VOCAB, device=DEVICE) * spread).to(dtype)
    logits[7] = 0.0
    args = (t.float(), k.int(), p.float(), *sampling_args(64, 1.0)[3:])
    found = triton_ops.sample(logits, *args)
    # Scores round in float32, so the best of near ties may differ.
    assert (found == reference.sample(logits.double(), *args)).sum() >= 63
    alone = [triton_ops.sample(logits[i : i + 1], *(a[i : i + 1] for a in args)) for i in range(64)]
    assert torch.equal(found, torch.cat(alone))


def test_draws_follow_the_distribution():
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], device=DEVICE)
    draws = 200_000
    many = (p.log() * 0.7)[None].expand(draws, -1).contiguous()
    counts = torch.bincount(triton_ops.sample(many, *sampling_args(draws, 0.7)), minlength=5)
    chi2 = ((counts - draws * p) ** 2 / (draws * p)).sum()
    assert chi2 < 18.5, counts  # 4 degrees of freedom: exceeded once in a thousand


def compiled() -> dict[str, int]:
    """How many variants each kernel has compiled in this process."""
    kernels = (
        rms_norm._rms_norm,
        rope._rope_and_write,
        prefill_attention._prefill,
        decode_attention._decode,
        swiglu._swiglu,
        sampling._tile_best,
        sampling._candidates,
        sampling._row_best,
    )
    return {k.fn.__name__: sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels}


def test_no_count_and_no_metadata_alignment_compiles_anew():
    before = compiled()
    for rows, width in COUNTS:
        forward(rows, width, DEVICE)
        forward(rows, width, DEVICE, odd=True)
    after = compiled()
    new = {name: after[name] - before[name] for name in after}
    # Fewer where a test before this one has compiled the same; one more would be a count that compiles anew.
    assert all(new[name] <= VARIANTS[name] for name in new), new


def test_capture_and_replay_equal_the_eager_call_bit_for_bit():
    case = paged([700, 33, 0, 512], 8, 128, 16, BF16, DEVICE)
    hidden, heads, dim = 4096, 32, 128
    x = torch.randn(4, hidden, device=DEVICE, dtype=BF16)
    weight = torch.randn(hidden, device=DEVICE, dtype=BF16)
    qkv = torch.randn(4, (heads + 16) * dim, device=DEVICE, dtype=BF16)
    cos_sin = torch.randn(1024, dim, device=DEVICE)
    positions, slots = ints(699, 32, 0, 511), ints(-1, -1, -1, -1, dtype=torch.int64)
    query_ends, chunk_lens = ints(1, 3, 4, 4), ints(700, 33, 9, 0)
    logits = torch.randn(4, VOCAB, device=DEVICE)
    args = sampling_args(4, 1.0, 40, 0.9)

    def step() -> list[torch.Tensor]:
        y = triton_ops.rms_norm(x, weight, 1e-5)
        q = triton_ops.rope_and_write(qkv, positions, cos_sin, case.k_cache, case.v_cache, slots, heads)
        o = decode(triton_ops, case, q)
        chunks = Paged(case.k_cache, case.v_cache, case.block_tables, chunk_lens)
        return [y, q, o, prefill(triton_ops, chunks, q, query_ends), triton_ops.sample(logits, *args)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new_lens in ((700, 33, 0, 512), (1, 0, 0, 300), (0, 0, 0, 0)):
        case.kv_lens.copy_(torch.tensor(new_lens, dtype=torch.int32))
        logits.normal_()
        x.normal_()
        graph.replay()
        replayed = [t.clone() for t in captured]
        for eager, replay in zip(step(), replayed, strict=True):
            assert torch.equal(eager, replay)
