"""The fast decode path's kernels against their twins, in the interpreter: every listed value once, not the product."""

import pytest
import torch
from kernel_cases import Paged, decode, fused_case, relative_error

from bucketgraph.kernels import ops, reference, skinny, streamed, tiled
from bucketgraph.llm import projections

triton_ops = ops("cuda")
FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP32: 1e-5, FP16: 2e-3}

# rows, columns, K, dtype: whole weight rows in registers for one row, dot beyond; sizes that no tile divides
SHAPES = [
    (1, 70, 200, FP32),
    (1, 40, 576, FP16),
    (3, 33, 96, FP32),
    (4, 16, 130, FP16),
    (5, 70, 200, FP32),
    (16, 33, 600, FP16),
    (9, 48, 64, FP16),
]


def matrices(rows, columns, width, dtype):
    x, gain = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    return x, gain, (torch.randn(columns, width) / width**0.5).to(dtype)


@pytest.mark.parametrize(("rows", "columns", "width", "dtype"), SHAPES)
def test_norm_linear_with_and_without_bias(rows, columns, width, dtype, nan_memory):
    x, gain, weight = matrices(rows, columns, width, dtype)
    for bias in (None, torch.randn(columns).to(dtype)):
        out, ref = (m.norm_linear(x, gain, 1e-5, weight, bias) for m in (triton_ops, reference))
        assert out.shape == ref.shape and out.dtype == dtype
        assert relative_error(out, ref) < TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "columns", "width", "dtype"), SHAPES)
def test_linear_add_into_a_new_tensor_and_in_place(rows, columns, width, dtype, nan_memory):
    x, _, weight = matrices(rows, columns, width, dtype)
    residual = torch.randn(rows, columns).to(dtype)
    before = residual.clone()
    out, ref = (m.linear_add(x, weight, residual) for m in (triton_ops, reference))
    assert relative_error(out, ref) < TOLERANCE[dtype]
    assert torch.equal(residual, before)
    assert triton_ops.linear_add(x, weight, residual, residual) is residual
    assert torch.equal(residual, out)


@pytest.mark.parametrize(("rows", "columns", "width", "dtype"), SHAPES)
def test_norm_gate_up(rows, columns, width, dtype, nan_memory):
    x, gain, weight = matrices(rows, 2 * columns, width, dtype)
    out, ref = (m.norm_gate_up(x, gain, 1e-5, weight) for m in (triton_ops, reference))
    assert out.shape == (rows, columns)
    assert relative_error(out, ref) < TOLERANCE[dtype]


def test_the_model_offers_each_form_the_rows_that_it_takes():
    """The model knows the numbers without Triton."""
    kernels = skinny.MAX_ROWS, streamed.MAX_ROWS, tiled.MAX_ROWS
    offered = projections.FUSED_ROWS, projections.STREAMED_ROWS, projections.TILED_ROWS
    assert kernels == offered


@pytest.mark.parametrize(("rows", "columns", "width"), [(5, 70, 200), (64, 33, 600), (65, 200, 96), (130, 140, 520)])
def test_the_tiled_gate_up(rows, columns, width, nan_memory):
    """Rows, columns and K that no tile divides, in one block of rows and in two."""
    x, gain, weight = matrices(rows, 2 * columns, width, FP16)
    out, ref = (m.norm_gate_up(x, gain, 1e-5, weight, form="tiled") for m in (triton_ops, reference))
    assert out.shape == ref.shape and relative_error(out, ref) < TOLERANCE[FP16]


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "said"),
    [(9, 64, FP32, "float32"), (9, 60, FP16, "multiple"), (257, 64, FP16, "1 to 256")],
)
def test_the_tiled_gate_up_refuses_what_it_cannot_run(rows, width, dtype, said):
    x, gain, weight = matrices(rows, 32, width, dtype)
    with pytest.raises(ValueError, match=said):
        triton_ops.norm_gate_up(x, gain, 1e-5, weight, form="tiled")


@pytest.mark.parametrize("rows", [5, 16])
def test_a_row_of_the_dot_form_does_not_depend_on_the_others(rows):
    x, gain, weight = matrices(rows, 40, 200, FP32)
    tile = (16, 64, 4, 3)
    together = triton_ops.norm_linear(x, gain, 1e-5, weight, tile=tile)
    x[:3], x[4:] = float("nan"), float("inf")
    assert torch.equal(triton_ops.norm_linear(x, gain, 1e-5, weight, tile=tile)[3], together[3])
    alone = triton_ops.norm_linear(x[3:4].contiguous(), gain, 1e-5, weight, tile=tile)
    assert torch.equal(alone[0], together[3])


def test_more_rows_than_sixty_four_and_shapes_that_do_not_fit_are_refused():
    x, gain, weight = matrices(65, 32, 64, FP32)
    with pytest.raises(ValueError, match=r"norm_linear: given x \(65, 64\)"):
        triton_ops.norm_linear(x, gain, 1e-5, weight)
    with pytest.raises(ValueError, match="norm_gate_up"):
        triton_ops.norm_gate_up(x[:2], gain, 1e-5, weight[:31])
    with pytest.raises(ValueError, match="linear_add"):
        triton_ops.linear_add(x[:2], weight, x[:2])
    with pytest.raises(ValueError, match="given 2 rows, expected one"):
        triton_ops.norm_linear(x[:2], gain, 1e-5, weight, tile=(1, 64, 1, 0))
    with pytest.raises(ValueError, match="strides"):
        triton_ops.linear_add(x[:2], weight, torch.zeros(32, 2).T)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("columns", "width"), [(576, 576), (1024, 2048), (28672, 4096), (4096, 14336), (128256, 2048)])
@pytest.mark.parametrize("fused", [False, True])
def test_tiles_hold_a_bounded_number_of_weights_a_thread(rows, columns, width, fused):
    for dtype in (torch.bfloat16, FP32):
        block_n, block_k, warps, stages = skinny.skinny_tile(rows, columns, width, dtype, fused)
        for n in (block_n, block_k, warps):
            assert n > 0 and n & (n - 1) == 0
        if stages == 0:
            assert block_k >= width and block_n * block_k * (1 + fused) <= 256 * 32 * warps
        else:
            assert block_n >= 16 and block_k <= 256


# head_dim, query heads, KV heads, page size, QK norm, dtype
HEADS = [
    (64, 2, 2, 16, False, FP32),
    (96, 6, 2, 64, True, FP32),
    (128, 4, 1, 128, True, FP16),
    (64, 7, 1, 128, False, FP16),
    (128, 8, 1, 16, False, FP16),
    (64, 32, 1, 64, True, FP32),
]


def attend(module, case, **kwargs):
    """The result and the caches it leaves; the case's own caches stay as they are."""
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    args = (case.qkv, case.positions, case.cos_sin, k_cache, v_cache, case.slots, case.block_tables, case.kv_lens)
    out = module.decode_attention(
        *args, case.heads, case.k_cache.shape[3] ** -0.5, case.q_norm, case.k_norm, 1e-6, **kwargs
    )
    return out, k_cache, v_cache


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "norm", "dtype"), HEADS)
def test_attention_writes_one_token_a_row_and_never_reads_stale_nan(
    dim, heads, kv_heads, page, norm, dtype, nan_memory
):
    case = fused_case([65, 0, 128, 1], heads, kv_heads, dim, page, norm, dtype)
    case.qkv[1] = float("nan")
    for splits in (1, 2):
        (out, *caches), (ref, *expected) = (attend(m, case, num_splits=splits) for m in (triton_ops, reference))
        assert relative_error(out, ref) < TOLERANCE[dtype]
        assert (out[1] == 0).all()
        for cache, right in zip(caches, expected, strict=True):
            torch.testing.assert_close(cache, right, rtol=2e-3, atol=2e-3, equal_nan=True)
    assert attend(triton_ops, case)[0].shape == (4, heads * dim)


def test_attention_with_slot_minus_one_attends_the_token_and_writes_nothing(nan_memory):
    case = fused_case([20, 64], 4, 2, 64, 16, False, FP32)
    ref = attend(triton_ops, case)[0]
    case.slots.fill_(-1)
    for module in (triton_ops, reference):
        out, k_cache, v_cache = attend(module, case)
        assert relative_error(out, ref) < 1e-5
        for cache, before in ((k_cache, case.k_cache), (v_cache, case.v_cache)):
            torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def test_attention_in_one_split_and_in_many_agree(nan_memory):
    case = fused_case([3, 0, 97, 65], 4, 1, 64, 16, False, FP32)
    ref = attend(reference, case)[0]
    for kwargs in ({"num_splits": 1}, {"num_splits": 3}, {"num_splits": 32}, {"split_size": 64}):
        assert relative_error(attend(triton_ops, case, **kwargs)[0], ref) < 1e-5, kwargs


def test_splits_are_merged_in_more_than_one_step(nan_memory):
    case = fused_case([130], 1, 1, 64, 16, False, FP32)
    out = attend(triton_ops, case, num_splits=150)[0]
    assert relative_error(out, attend(reference, case)[0]) < 1e-5


def test_attention_of_a_group_wider_than_one_tile_writes_each_head_once(nan_memory):
    case = fused_case([40, 7], 71, 1, 64, 16, False, FP32)
    (out, *caches), (ref, *expected) = (attend(m, case) for m in (triton_ops, reference))
    assert relative_error(out, ref) < 1e-5
    for cache, right in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, right, equal_nan=True)


def test_the_new_token_is_what_rope_and_write_writes(nan_memory):
    case = fused_case([33, 80], 6, 2, 96, 16, True, FP32)
    out, k_cache, v_cache = attend(triton_ops, case, num_splits=2)
    k_two, v_two = case.k_cache.clone(), case.v_cache.clone()
    q = triton_ops.rope_and_write(
        case.qkv, case.positions, case.cos_sin, k_two, v_two, case.slots, 6, case.q_norm, case.k_norm, 1e-6
    )
    written = Paged(k_two, v_two, case.block_tables, case.kv_lens)
    assert relative_error(out, decode(triton_ops, written, q, num_splits=2).flatten(1)) < 1e-6
    torch.testing.assert_close(k_cache, k_two, equal_nan=True)
    torch.testing.assert_close(v_cache, v_two, rtol=0, atol=0, equal_nan=True)
