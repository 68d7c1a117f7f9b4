"""Graphs as data on a GPU: nodes are what was captured, and a rebound graph gives the bits of a fresh capture.

Whether a library's kernel can be rebound is its own affair (TMA descriptors, clusters): then the reason is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from cuda.bindings import driver
from torch import Tensor

from bucketgraph.cli import main
from bucketgraph.cuda import Check, Graph, Moved, Rebinder, RebindError, capture, inspect
from bucketgraph.cuda.nodes import KernelNode, MemcpyNode, MemsetNode
from bucketgraph.errors import CaptureError

CUDA = "cuda"
N = 4096
REASONS = ("TMA descriptor", "clusters", "cooperative", "other bytes changed", "changed from", "cuGraphExec")


@triton.jit
def _scale(src, dst, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offs, tl.load(src + offs, mask=offs < n, other=0.0) * 3, mask=offs < n)


def scale(src: Tensor, dst: Tensor) -> None:
    _scale[(triton.cdiv(src.numel(), 1024),)](src, dst, src.numel(), BLOCK=1024)


@pytest.fixture(scope="module")
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.fixture
def fresh(stream: torch.cuda.Stream) -> Callable[[Callable[[], object], Tensor], Tensor]:
    """What `out` holds after a graph of the function, captured now, was replayed."""

    def run(fn: Callable[[], object], out: Tensor) -> Tensor:
        graph = keep(fn, stream)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return out.clone()

    return run


def keep(fn: Callable[[], object], stream: torch.cuda.Stream) -> Graph:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.synchronize()
    return capture.keep(fn, stream)


def bind(
    fn: Callable[[Tensor], object], first: Tensor, second: Tensor, stream: torch.cuda.Stream
) -> tuple[Rebinder, Graph]:
    """`fn` with its tensor `x` rebindable, where that is possible; the places hold the same.

    Tests compare what a moved graph computes, so they trust bytes that nobody wrote."""
    graphs = capture.pair(fn, first, second, stream=stream)
    rebinder = Rebinder(*graphs, Moved.of("x", first, second))
    rebinder.trust("x")
    return rebinder, graphs[0]


def replayed(rebinder: Rebinder, graph: Graph, x: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    rebinder.run({"x": x}, graph.replay)
    torch.cuda.synchronize()
    return out.clone()


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_a_graph_of_everything_is_read_as_it_is(stream: torch.cuda.Stream, tmp_path: Path) -> None:
    x, y, copied = (torch.randn(N, device=CUDA) for _ in range(3))
    a, b = (torch.randn(128, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)

    def everything() -> None:
        scale(x, y)
        torch.add(y, 1, out=y)
        torch.mm(a, b, out=product)
        copied.copy_(y)
        code, *_ = driver.cuMemsetD8Async(x.data_ptr(), 0, 64, torch.cuda.current_stream().cuda_stream)
        assert int(code) == 0

    graph = keep(everything, stream)
    tensors = {"x": x, "y": y, "a": a, "b": b, "product": product, "copied": copied}
    found = inspect.by_library(inspect.groups(graph, tensors))
    assert {"Triton", "ATen", "cuBLAS", "memcpy", "memset"} <= found.keys(), found

    first = graph.nodes[0]
    assert isinstance(first, KernelNode) and first.label.startswith("_scale")
    assert first.params.grid == (N // 1024, 1, 1) and first.after == ()
    assert [p.size for p in first.parameters[-2:]] == [8, 8], "Triton's two scratch pointers"
    pointers = [(p.parameter, p.tensor, p.inside) for p in graph.pointers(tensors) if p.node == 0]
    assert pointers == [(0, "x", 0), (1, "y", 0)]
    added = graph.nodes[1]
    assert isinstance(added, KernelNode) and added.name.startswith("void at::native::") and added.library == "ATen"
    assert [dependency.node for dependency in added.after] == [0]

    (copy,) = (node for node in graph.nodes if isinstance(node, MemcpyNode))
    assert (copy.params.source, copy.params.destination) == (y.data_ptr(), copied.data_ptr())
    assert copy.size == 4 * N
    fills = {node.params.destination: node.size for node in graph.nodes if isinstance(node, MemsetNode)}
    assert fills[x.data_ptr()] == 64

    text = inspect.dot(graph, "everything", tensors)
    assert text.count("->") == sum(len(node.after) for node in graph.nodes) >= 4


def test_a_graph_that_torch_dropped_says_so() -> None:
    x = torch.zeros(8, device=CUDA)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        x.add_(1)
    with pytest.raises(CaptureError, match="keep_graph=True"):
        Graph.of(captured)


def test_inspect_shows_the_graph_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inspected_model.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "set.yaml").write_text(
        "version: 1\nname: doubles\naxes: {batch: [1, 8]}\n"
        "inputs: {x: {shape: [batch, 64], dtype: float32}}\noutputs: {y: {shape: [batch, 64]}}\n"
    )
    monkeypatch.chdir(tmp_path)
    args = ["inspect", "set.yaml", "--graph", "batch=8", "--model", "inspected_model:double", "--dot", "out.dot"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "doubles batch=8" in out and "ATen" in out and "at::native" in out
    assert (tmp_path / "out.dot").read_text().startswith('digraph "doubles batch=8" {')


# -- rebinding -------------------------------------------------------------------------------------------------------


def test_a_triton_input_is_rebound(stream: torch.cuda.Stream, fresh: Callable[..., Tensor]) -> None:
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)
    rebinder, graph = bind(lambda tensor: scale(tensor, out), x, x.clone(), stream)
    assert rebinder.refusal("x") is None, rebinder.explain()
    for _ in range(3):
        other = torch.randn(N, device=CUDA)
        want = fresh(lambda other=other: scale(other, out), out)
        assert torch.equal(replayed(rebinder, graph, other, out), want)


def test_an_elementwise_input_is_rebound(stream: torch.cuda.Stream, fresh: Callable[..., Tensor]) -> None:
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)
    rebinder, graph = bind(lambda tensor: torch.exp(tensor, out=out), x, x.clone(), stream)
    assert rebinder.refusal("x") is None, rebinder.explain()
    other = torch.randn(N, device=CUDA)
    want = fresh(lambda: torch.exp(other, out=out), out)
    assert torch.equal(replayed(rebinder, graph, other, out), want)


def test_an_output_is_rebound(stream: torch.cuda.Stream) -> None:
    x, first = torch.randn(N, device=CUDA), torch.zeros(N, device=CUDA)
    second, third = torch.zeros_like(first), torch.zeros_like(first)
    rebinder, graph = bind(lambda out: torch.neg(x, out=out), first, second, stream)
    assert rebinder.refusal("x") is None, rebinder.explain()
    first.zero_()
    assert torch.equal(replayed(rebinder, graph, third, third), -x)
    assert not first.any(), "the old output was written"


def test_a_view_with_an_offset_is_rebound(stream: torch.cuda.Stream, fresh: Callable[..., Tensor]) -> None:
    base = torch.randn(16, 256, device=CUDA)
    out = torch.empty(5, 256, device=CUDA)
    rebinder, graph = bind(lambda whole: torch.mul(whole[3:8], 2, out=out), base, base.clone(), stream)
    assert rebinder.refusal("x") is None, rebinder.explain()
    assert any("x + 3072" in line for line in rebinder.explain())
    other = torch.randn_like(base)
    want = fresh(lambda: torch.mul(other[3:8], 2, out=out), out)
    assert torch.equal(replayed(rebinder, graph, other, out), want)


def test_temporaries_do_not_spoil_the_proof(stream: torch.cuda.Stream, fresh: Callable[..., Tensor]) -> None:
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)

    def fn(tensor: Tensor) -> None:
        out.copy_(torch.softmax(tensor * 2, -1) + tensor.relu())

    rebinder, graph = bind(fn, x, x.clone(), stream)
    assert rebinder.refusal("x") is None, rebinder.explain()
    other = torch.randn_like(x)
    assert torch.equal(replayed(rebinder, graph, other, out), fresh(lambda: fn(other), out))


@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_is_rebound_or_says_why(
    which: str, dtype: torch.dtype, stream: torch.cuda.Stream, fresh: Callable[..., Tensor]
) -> None:
    a, b = torch.randn(64, 512, device=CUDA, dtype=dtype), torch.randn(512, 1024, device=CUDA, dtype=dtype)
    out = torch.empty(64, 1024, device=CUDA, dtype=dtype)

    def fn(tensor: Tensor) -> None:
        torch.mm(*((tensor, b) if which == "input" else (a, tensor)), out=out)

    moves = a if which == "input" else b
    rebinder, graph = bind(fn, moves, moves.clone(), stream)
    print("\n".join(rebinder.explain()))
    reason = rebinder.refusal("x")
    other = torch.randn_like(moves)
    if reason is not None:
        assert any(text in reason for text in REASONS), reason
        with pytest.raises(RebindError):
            rebinder.rebind("x", other)
        return
    assert torch.equal(replayed(rebinder, graph, other, out), fresh(lambda: fn(other), out))


@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_copy_is_rebound_or_says_why(end: str, stream: torch.cuda.Stream) -> None:
    x, out = torch.randn(N, device=CUDA), torch.zeros(N, device=CUDA)
    fn = (lambda tensor: out.copy_(tensor)) if end == "source" else (lambda tensor: tensor.copy_(x))
    moves = x if end == "source" else out
    rebinder, graph = bind(fn, moves, moves.clone(), stream)
    assert isinstance(graph.nodes[0], MemcpyNode)
    print("\n".join(rebinder.explain()))
    if (reason := rebinder.refusal("x")) is not None:
        assert "cuGraphExecMemcpyNodeSetParams" in reason, reason
        return
    other = torch.randn_like(moves)
    target = out if end == "source" else other
    assert torch.equal(replayed(rebinder, graph, other, target), other if end == "source" else x)


def test_a_memset_is_rebound_or_says_why(stream: torch.cuda.Stream) -> None:
    first, second, third = (torch.ones(256, dtype=torch.uint8, device=CUDA) for _ in range(3))

    def fn(tensor: Tensor) -> None:
        code, *_ = driver.cuMemsetD8Async(tensor.data_ptr(), 7, 256, torch.cuda.current_stream().cuda_stream)
        assert int(code) == 0

    rebinder, graph = bind(fn, first, second, stream)
    if (reason := rebinder.refusal("x")) is not None:
        assert "cuGraphExecMemsetNodeSetParams" in reason, reason
        return
    first.fill_(1)
    assert (replayed(rebinder, graph, third, third) == 7).all() and (first == 1).all()


def test_a_misaligned_address_is_refused_and_nothing_changes(stream: torch.cuda.Stream) -> None:
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)
    rebinder, graph = bind(lambda tensor: scale(tensor, out), x, x.clone(), stream)
    shifted = torch.randn(N + 1, device=CUDA)[1:]
    with pytest.raises(RebindError, match="not aligned"):
        rebinder.rebind("x", shifted)
    assert rebinder.address("x") == x.data_ptr()
    assert torch.equal(replayed(rebinder, graph, x, out), x * 3)


def test_an_aligned_and_an_unaligned_capture_are_different_kernels(stream: torch.cuda.Stream) -> None:
    out, storage = torch.empty(N, device=CUDA), torch.randn(2, N + 4, device=CUDA)
    rebinder, _ = bind(lambda tensor: scale(tensor, out), storage[0, :N], storage[1, 1 : N + 1], stream)
    reason = rebinder.refusal("x")
    assert reason is not None and "changed" in reason


def test_the_third_run_on_poison(stream: torch.cuda.Stream) -> None:
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)
    second, other = x.clone(), torch.randn(N, device=CUDA)
    kept = x.clone()
    rebinder, graph = bind(lambda tensor: scale(tensor, out), x, second, stream)

    def poison() -> None:
        for place in (x, second):
            place.fill_(float("nan"))

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return out.clone()

    check = Check(lambda: other * 3, poison, replay, torch.equal, restore=lambda: (x.copy_(kept), None)[1])
    assert rebinder.verify("x", other, check) is None
    assert rebinder.address("x") == x.data_ptr()
    assert torch.equal(replayed(rebinder, graph, x, out), kept * 3)


def test_an_address_in_device_memory_is_caught_on_poison(stream: torch.cuda.Stream) -> None:
    """A kernel that takes the tensor from a table of pointers beside its argument: no proof from bytes can see it."""
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)
    second, other = x.clone(), torch.randn(N, device=CUDA)
    table = torch.tensor([x.data_ptr()], dtype=torch.int64, device=CUDA)

    def fn(tensor: Tensor) -> None:
        _indirect[(N // 1024,)](tensor, table, out, BLOCK=1024)

    rebinder, graph = bind(fn, x, second, stream)
    assert rebinder.refusal("x") is None, rebinder.explain()

    def poison() -> None:
        for place in (x, second):
            place.fill_(float("nan"))

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return out.clone()

    reason = rebinder.verify("x", other, Check(lambda: other * 2, poison, replay, torch.equal))
    assert reason is not None and rebinder.refusal("x") == reason


@triton.jit
def _indirect(src, table, dst, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hidden = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(dst + offs, tl.load(src + offs) + tl.load(hidden + offs))


def test_a_graph_instantiated_anew_gets_what_was_bound(stream: torch.cuda.Stream) -> None:
    x, out = torch.randn(N, device=CUDA), torch.empty(N, device=CUDA)
    second = x.clone()
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    graphs = capture.pair(lambda tensor: scale(tensor, out), x, second, stream=stream)
    with torch.cuda.graph(captured, stream=stream):
        scale(x, out)
    captured.instantiate()
    own = Graph.of(captured)
    rebinder = Rebinder(own, graphs[1], Moved.of("x", x, second))
    other = torch.randn(N, device=CUDA)
    rebinder.rebind("x", other)
    captured.instantiate()
    rebinder.renew()
    out.zero_()
    own.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, other * 3)


def test_two_hundred_random_rebinds(stream: torch.cuda.Stream) -> None:
    places = torch.randn(32, N, device=CUDA)
    outs = torch.zeros(8, N, device=CUDA)
    x, y, out = places[0], places[1], outs[0]

    def fn(x: Tensor, y: Tensor, out: Tensor) -> None:
        scale(x, out)
        out.add_(torch.sin(y).mul_(2))

    moves = [(places[2], y, out), (x, places[3], out), (x, y, outs[1])]
    calls = [partial(fn, *tensors) for tensors in [(x, y, out), *moves]]
    first, *others = capture.alike(*calls, stream=stream)
    rebinder = Rebinder(first, others[0], Moved.of("x", x, places[2]))
    rebinder.add(others[1], Moved.of("y", y, places[3]))
    rebinder.add(others[2], Moved.of("out", out, outs[1]))
    assert [rebinder.refusal(name) for name in ("x", "y", "out")] == [None] * 3, rebinder.explain()
    for name in ("x", "y", "out"):
        rebinder.trust(name)  # every turn is compared

    chosen = random.Random(0)
    now = {"x": x, "y": y, "out": out}
    for turn in range(200):
        new = {name: chosen.choice(outs if name == "out" else places) for name in chosen.sample(list(now), turn % 4)}
        now |= new
        now["out"].zero_()
        if turn % 2:
            rebinder.run(new, first.replay)
        else:
            rebinder.launch(new, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert torch.equal(now["out"], now["x"] * 3 + torch.sin(now["y"]) * 2), turn


def test_an_update_does_not_touch_a_launch_that_is_enqueued(stream: torch.cuda.Stream) -> None:
    first, second, third = (torch.full((N,), float(value), device=CUDA) for value in (1, 2, 3))
    out, seen = torch.empty(N, device=CUDA), torch.empty(2, N, device=CUDA)
    rebinder, graph = bind(lambda tensor: scale(tensor, out), first, second, stream)
    torch.cuda._sleep(50_000_000)
    for row, place in enumerate((first, third)):
        rebinder.run({"x": place}, graph.replay)
        seen[row].copy_(out)
    torch.cuda.synchronize()
    assert (seen[0] == 3).all() and (seen[1] == 9).all()
