"""The matmul whose bits do not depend on the number of rows, against its twin, in the interpreter."""

import pytest
import torch
from kernel_cases import relative_error

from bucketgraph.kernels import ops, reference
from bucketgraph.kernels.matmul import linear_tile

triton_ops = ops("cuda")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 48, 100), (17, 33, 64), (130, 200, 96)])
def test_linear_with_and_without_bias_and_residual(rows, columns, width, dtype, phase, nan_memory):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(columns, width).to(dtype)
    bias, residual = torch.randn(columns).to(dtype), torch.randn(rows, columns).to(dtype)
    for more in ((), (bias,), (None, residual), (bias, residual)):
        out = triton_ops.linear(x, weight, *more, phase=phase)
        wide = [None if tensor is None else tensor.double() for tensor in more]
        assert relative_error(out, reference.linear(x.double(), weight.double(), *wide, phase=phase)) < TOLERANCE[dtype]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_row_has_the_same_bits_alone_and_among_others(phase, nan_memory):
    # A row stays at its place in its tile: here numpy multiplies, whose rows differ by place on some CPUs.
    x, weight = torch.randn(150, 96), torch.randn(33, 96)
    whole, tile = triton_ops.linear(x, weight, phase=phase), linear_tile(x.dtype, phase)[0]
    for row in (0, tile, 2 * tile):
        assert torch.equal(triton_ops.linear(x[row : row + 1].contiguous(), weight, phase=phase)[0], whole[row])
        part = triton_ops.linear(x[row : row + 7].contiguous(), weight, phase=phase)
        assert torch.equal(part, whole[row : row + 7])


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"linear: given x \(2, 8\), weight \(4, 9\)"):
        triton_ops.linear(torch.zeros(2, 8), torch.zeros(4, 9), phase="decode")
