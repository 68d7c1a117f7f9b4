"""The attention kernels against their twins, in the interpreter: every listed value once, not the full product."""

import pytest
import torch
from kernel_cases import decode, ends, paged, queries, relative_error

from bucketgraph.kernels import decode_attention as decode_module
from bucketgraph.kernels import ops, reference
from bucketgraph.kernels import prefill_attention as prefill_module

triton_ops = ops("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

# head_dim, query heads, KV heads, page size, dtype
SHAPES = [
    (64, 2, 2, 16, torch.float32),
    (96, 6, 2, 64, torch.float32),
    (128, 4, 1, 128, torch.float16),
    (64, 7, 1, 128, torch.float16),
    (128, 8, 1, 16, torch.float16),
    (96, 9, 1, 16, torch.float16),
    (64, 32, 1, 64, torch.float32),
]


def prefill(case, module, q, query_ends):
    return module.prefill_attention(
        q, case.k_cache, case.v_cache, case.block_tables, query_ends, case.kv_lens, q.shape[2] ** -0.5
    )


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "dtype"), SHAPES)
def test_prefill_pad_rows_are_zero_and_stale_nan_is_never_read(dim, heads, kv_heads, page, dtype, nan_memory):
    counts, lens = [35, 1, 12, 0, 0], [35, 20, 77, 0, 0]  # whole, one token after 19, a chunk; two padded slots
    case = paged(lens, kv_heads, dim, page, dtype)
    q = queries(51, heads, dim, dtype)
    q[48:] = float("nan")
    out = prefill(case, triton_ops, q, ends(counts))
    ref = prefill(case, reference, q, ends(counts))
    assert relative_error(out, ref) < TOLERANCE[dtype]
    assert (out[48:] == 0).all()


def test_prefill_large_tile_matches(monkeypatch, nan_memory):
    monkeypatch.setattr(prefill_module, "prefill_tile", lambda *_: (128, 64, 4, 3))
    case = paged([100, 128], 1, 64, 16, torch.float16)
    q = queries(160, 4, 64, torch.float16)
    out, ref = (prefill(case, m, q, ends([100, 60])) for m in (triton_ops, reference))
    assert relative_error(out, ref) < 2e-3


def test_prefill_in_chunks_equals_prefill_at_once():
    case = paged([70], 1, 64, 16, torch.float32)
    q = queries(70, 2, 64, torch.float32)
    whole = prefill(case, triton_ops, q, ends([70]))
    parts = []
    for begin, end in ((0, 33), (33, 34), (34, 70)):
        case.kv_lens = torch.tensor([end], dtype=torch.int32)
        parts.append(prefill(case, triton_ops, q[begin:end].contiguous(), ends([end - begin])))
    assert relative_error(torch.cat(parts), whole) < 1e-6


def test_prefill_owner_search_beyond_one_step(monkeypatch, nan_memory):
    monkeypatch.setattr(prefill_module, "SEARCH", 4)
    counts = [3, 1, 0, 2, 5, 1, 1, 0, 4]
    case = paged(counts, 1, 64, 16, torch.float32)
    q = queries(20, 1, 64, torch.float32)
    out, ref = (prefill(case, m, q, ends(counts)) for m in (triton_ops, reference))
    assert relative_error(out, ref) < 1e-5


@pytest.mark.parametrize("counts", [[0, 0], [16, 0]])
def test_prefill_without_requests_or_without_pad_rows(counts, nan_memory):
    case = paged([max(n, 0) for n in counts], 1, 64, 16, torch.float32)
    q = queries(16, 1, 64, torch.float32)
    out, ref = (prefill(case, m, q, ends(counts)) for m in (triton_ops, reference))
    assert relative_error(out, ref) < 1e-5


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "dtype"), SHAPES)
def test_decode_length_zero_is_zeros_and_stale_nan_is_never_read(dim, heads, kv_heads, page, dtype, nan_memory):
    case = paged([65, 0, 128, 1], kv_heads, dim, page, dtype)
    q = queries(4, heads, dim, dtype)
    q[1] = float("nan")
    out, ref = (decode(m, case, q, num_splits=n) for m, n in ((triton_ops, 2), (reference, 2)))
    assert relative_error(out, ref) < TOLERANCE[dtype]
    assert (out[1] == 0).all()


def test_decode_empty_splits_add_nothing(nan_memory):
    case = paged([3, 0, 97], 1, 64, 16, torch.float32)
    q = queries(3, 4, 64, torch.float32)
    ref = decode(reference, case, q)
    for splits in (1, 4, 32):
        assert relative_error(decode(triton_ops, case, q, num_splits=splits), ref) < 1e-5
    assert relative_error(decode(triton_ops, case, q), ref) < 1e-5


def test_decode_group_wider_than_one_tile(nan_memory):
    case = paged([40, 7], 1, 64, 16, torch.float32)
    q = queries(2, 71, 64, torch.float32)
    assert relative_error(decode(triton_ops, case, q), decode(reference, case, q)) < 1e-5


def test_decode_with_a_split_size_is_bitwise_independent_of_batch_and_table_width():
    case = paged([70, 130], 1, 64, 16, torch.float32)
    q = queries(2, 4, 64, torch.float32)
    both = decode(triton_ops, case, q, split_size=64)
    case.block_tables, case.kv_lens = case.block_tables[:1, :5].contiguous(), case.kv_lens[:1]
    alone = decode(triton_ops, case, q[:1].contiguous(), split_size=64)
    assert torch.equal(both[:1], alone)


def test_decode_split_size_and_short_table_agree_on_one_split():
    case = paged([60], 1, 64, 16, torch.float32)
    q = queries(1, 4, 64, torch.float32)
    wide = decode(triton_ops, case, q, split_size=64)
    case.block_tables = case.block_tables[:, :4].contiguous()
    assert torch.equal(wide, decode(triton_ops, case, q, split_size=64))


def test_pages_beyond_2_to_the_31_elements_are_addressed():
    # The interpreter wraps int32 as a GPU does. Untouched pages of the cache take no memory.
    first = 2**31 // (128 * 64) + 7
    case = paged([20, 5], 1, 64, 128, torch.float16, first_page=first)
    assert case.k_cache.numel() > 2**31
    q = queries(2, 2, 64, torch.float16)
    assert relative_error(decode(triton_ops, case, q), decode(reference, case, q)) < 2e-3
    assert relative_error(*(prefill(case, m, q, ends([1, 1])) for m in (triton_ops, reference))) < 2e-3
    slots = torch.tensor([case.k_cache.shape[0] * 128 - 1])
    qkv, zero = torch.randn(1, 4 * 64).half(), torch.zeros(1, dtype=torch.int32)
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)  # no rotation
    triton_ops.rope_and_write(qkv, zero, cos_sin, case.k_cache, case.v_cache, slots, 2)
    assert torch.equal(case.k_cache[-1, 0, -1], qkv[0, 128:192])
    assert torch.equal(case.v_cache[-1, 0, -1], qkv[0, 192:])


def test_default_splits_fill_the_gpu_at_batch_one_and_stop_at_the_tables_capacity():
    assert decode_module.decode_splits(1, 8, 8192, 64) == 16
    assert decode_module.decode_splits(1, 8, 256, 64) == 4
    assert decode_module.decode_splits(64, 8, 8192, 64) == 1


@pytest.mark.parametrize("dim", [8, 300, 100])
def test_a_head_dim_that_does_not_fit_is_refused_by_name(dim):
    case = paged([5], 1, dim, 16, torch.float32)
    q = queries(1, 1, dim, torch.float32)
    with pytest.raises(ValueError, match=f"head_dim {dim}"):
        decode(triton_ops, case, q)
    with pytest.raises(ValueError, match=f"head_dim {dim}"):
        prefill(case, triton_ops, q, ends([1]))
