"""The matmul whose bits do not depend on the number of rows, against its twin, in the interpreter."""

import pytest
import torch
from kernel_cases import relative_error

from bucketgraph.kernels import ops, reference

triton_ops = ops("cuda")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 48, 100), (17, 33, 64), (130, 200, 96)])
def test_linear_with_and_without_bias(rows, columns, width, dtype, phase, nan_memory):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(columns, width).to(dtype)
    for bias in (None, torch.randn(columns).to(dtype)):
        out = triton_ops.linear(x, weight, bias, phase=phase)
        wide = None if bias is None else bias.double()
        assert relative_error(out, reference.linear(x.double(), weight.double(), wide, phase=phase)) < TOLERANCE[dtype]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_row_has_the_same_bits_alone_and_among_others(phase, nan_memory):
    x, weight = torch.randn(40, 96), torch.randn(33, 96)
    whole = triton_ops.linear(x, weight, phase=phase)
    for row in (0, 15, 16, 39):
        assert torch.equal(triton_ops.linear(x[row : row + 1].contiguous(), weight, phase=phase)[0], whole[row])


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"linear: given x \(2, 8\), weight \(4, 9\)"):
        triton_ops.linear(torch.zeros(2, 8), torch.zeros(4, 9), phase="decode")
