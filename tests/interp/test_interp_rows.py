"""RMS norm, RoPE with the KV write, and SwiGLU against their twins, in the interpreter."""

import pytest
import torch
from kernel_cases import relative_error

from bucketgraph.kernels import ops, reference

triton_ops = ops("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1000])
def test_rms_norm(width, dtype, nan_memory):
    x = torch.randn(3, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    out, ref = (m.rms_norm(x, weight, 1e-5) for m in (triton_ops, reference))
    assert relative_error(out, ref) < TOLERANCE[dtype]


def test_rms_norm_of_a_zero_row_is_zero(nan_memory):
    y = triton_ops.rms_norm(torch.zeros(1, 64), torch.ones(64), 1e-6)
    assert (y == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "page", "norm"),
    [(64, 9, 3, 16, False), (96, 2, 2, 64, True), (128, 4, 1, 128, True), (64, 32, 4, 16, False)],
)
def test_a_negative_slot_writes_nothing_and_leaves_the_last_slot(dim, heads, kv_heads, page, norm, dtype, nan_memory):
    tokens = 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    qkv[3:] = float("nan")  # pad rows
    angles = torch.rand(50, dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([49, 0, 7, 0, 0], dtype=torch.int32)
    slots = torch.tensor([page, 2 * page - 1, 3 * page + 5, -1, -1])
    weights = [torch.randn(dim).to(dtype) for _ in range(2)] if norm else [None, None]
    found = []
    for module in (triton_ops, reference):
        k, v = torch.full((2, 4, kv_heads, page, dim), 7.0, dtype=dtype)
        q = module.rope_and_write(qkv, positions, cos_sin, k, v, slots, heads, *weights)
        found.append((q[:3], k, v))
    for out, ref in zip(*found, strict=True):
        assert relative_error(out, ref) < TOLERANCE[dtype]
    (_, k, v), (_, _, v_ref) = found
    assert torch.equal(v, v_ref)
    untouched = v_ref == 7.0
    assert (k[untouched] == 7.0).all() and (v[untouched] == 7.0).all()
    assert (k[3, :, -1] == 7.0).all() and (v[3, :, -1] == 7.0).all()
    assert (k[0] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_tails_and_large_gates(dtype, nan_memory):
    gate_up = torch.randn(3, 2 * 1100).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    out, ref = (m.swiglu(gate_up) for m in (triton_ops, reference))
    assert relative_error(out, ref) < TOLERANCE[dtype]
    assert torch.isfinite(out).all()


def test_wrong_shapes_and_dtypes_are_refused_with_both_sides():
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match="one dtype"):
        triton_ops.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        triton_ops.swiglu(torch.randn(64, 2).t())
    cache = torch.zeros(2, 1, 16, 64)
    good = torch.zeros(1, dtype=torch.int32), torch.zeros(4, 64), cache, cache, torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"given qkv \(1, 128\)"):
        triton_ops.rope_and_write(torch.randn(1, 128), *good, 1)
    with pytest.raises(ValueError, match="q_norm and k_norm"):
        triton_ops.rope_and_write(torch.randn(1, 192), *good, 1, torch.ones(64))
