"""cuBLASLt by measurement: right for any shape it takes, the same bits in a graph, and what it cannot run is said."""

from __future__ import annotations

import pytest
import torch

from bucketgraph.llm.cublaslt import MeasuredMatmul, available

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def measured() -> MeasuredMatmul:
    if not available(DEVICE):
        pytest.skip("no cuBLASLt")
    return MeasuredMatmul(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns, width", [(1, 64, 64), (3, 576, 1536), (64, 4096, 1024), (128, 1000, 520)])
def test_linear_and_add_are_the_library_s_but_for_rounding(
    measured: MeasuredMatmul, rows: int, columns: int, width: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator(DEVICE).manual_seed(rows)
    x, weight, residual = (
        torch.randn(shape, generator=draw, device=DEVICE).to(dtype)
        for shape in ((rows, width), (columns, width), (rows, columns))
    )
    want = x.double() @ weight.double().t()
    close = {"atol": 0.02 * float(want.abs().max()), "rtol": 0.0}
    torch.testing.assert_close(measured.linear(x, weight).double(), want, **close)
    into = residual.clone()
    assert measured.add(x, weight, into) is into
    torch.testing.assert_close(into.double(), want + residual.double(), **close)


def test_a_graph_holds_what_was_measured(measured: MeasuredMatmul) -> None:
    x, weight = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((64, 2048), (512, 2048)))
    eager = measured.linear(x, weight).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = measured.linear(x, weight)
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)


def test_a_shape_first_seen_in_a_capture_takes_the_library_s_choice(measured: MeasuredMatmul) -> None:
    x, weight = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((48, 256), (384, 256)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = measured.linear(x, weight)
    graph.replay()
    torch.testing.assert_close(captured, torch.mm(x, weight.t()), rtol=0.02, atol=0.5)


def test_what_it_cannot_run_is_refused(measured: MeasuredMatmul) -> None:
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"no plan for torch\.float32"):
        measured.linear(x, x)
    half = torch.zeros(8, 2, device=DEVICE, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="no plan"):
        measured.linear(half.t(), half.t())
