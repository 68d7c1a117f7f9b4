"""Bound tensors on a GPU: whatever is patched, copied or captured anew, the bits are those of a fresh run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from llm_cases import buckets, is_idle
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bucketgraph import LLM, BucketManager, binding
from bucketgraph.binding import MovableGraph
from bucketgraph.config import parse
from bucketgraph.cuda import capture, inspect
from bucketgraph.kernels import ops
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.weights import random_weights
from bucketgraph.selfcheck import same_bits

CUDA = torch.device("cuda")
ROWS, WIDTH = 64, 256
Fn = Callable[[Tensor, Tensor], Tensor]


@triton.jit
def _mix(x, z, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = offs < n
    mixed = tl.load(x + offs, mask=held, other=0.0) * 3 + tl.load(z + offs, mask=held, other=0.0)
    tl.store(out + offs, mixed, mask=held)


def mix(x: Tensor, z: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _mix[(triton.cdiv(x.numel(), 1024),)](x, z, out, x.numel(), BLOCK=1024)
    return out


def served(fn: Callable[..., Any], dtype: str = "float32", **changed: Any) -> BucketManager:
    """`x` is bound, and `z` too unless said otherwise; two buckets."""
    made: dict[str, Any] = {
        "version": 1,
        "name": "bound",
        "executable": "cudagraph",
        "axes": {"batch": [ROWS // 2, ROWS]},
        "inputs": {n: {"shape": ["batch", WIDTH], "dtype": dtype, "bind": "patch"} for n in ("x", "z")},
        "outputs": {"y": {"shape": ["batch", WIDTH]}},
    }
    manager = BucketManager(fn, parse({**made, **changed}), device=CUDA)
    report = manager.warmup()
    assert report.ok, report.failed
    return manager


# -- 1,000 random calls over random graphs ---------------------------------------------------------------------------


def random_function(chosen: random.Random, dtype: torch.dtype) -> Fn:
    """A chain of Triton, ATen and cuBLAS nodes over both inputs and views of them; rows stay apart."""
    weight = torch.randn(WIDTH, WIDTH, device=CUDA, dtype=dtype) / 16
    half = torch.randn(WIDTH // 2, WIDTH, device=CUDA, dtype=dtype) / 16
    steps: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda y, x, z: mix(y, z),
        lambda y, x, z: mix(x, y),
        lambda y, x, z: y + x[:, : WIDTH // 2].repeat(1, 2),
        lambda y, x, z: y.mul(2).sub_(z[:, 16:17]),
        lambda y, x, z: torch.tanh(y) + torch.relu(x),
        lambda y, x, z: F.layer_norm(y, (WIDTH,)),
        lambda y, x, z: torch.softmax(y, -1) * z,
        lambda y, x, z: y @ weight,
        lambda y, x, z: y + z[:, WIDTH // 2 :] @ half,
        lambda y, x, z: y + x @ weight,
        lambda y, x, z: torch.cat([y[:, 8:], z[:, :8]], 1),
    ]
    picked = [chosen.choice(steps) for _ in range(chosen.randint(2, 6))]

    def fn(x: Tensor, z: Tensor) -> Tensor:
        y = mix(x, z)
        for step in picked:
            y = step(y, x, z)
        return y

    return fn


def random_tensor(chosen: random.Random, rows: int, dtype: torch.dtype) -> Tensor:
    """Fresh memory mostly; or a view with an offset, a misaligned one, or one that is laid out otherwise."""
    made = chosen.random()
    if made < 0.7:
        return torch.randn(rows, WIDTH, device=CUDA, dtype=dtype)
    if made < 0.85:
        return torch.randn(rows + 9, WIDTH, device=CUDA, dtype=dtype)[chosen.randint(1, 9) :][:rows]
    if made < 0.93:
        return torch.randn(rows * WIDTH + 16, device=CUDA, dtype=dtype)[chosen.randint(1, 8) :][: rows * WIDTH].view(
            rows, WIDTH
        )
    return torch.randn(WIDTH, rows, device=CUDA, dtype=dtype).t()


@torch.no_grad()
def test_a_thousand_random_rebinds_are_bitwise_right(record_property: pytest.RecordProperty) -> None:
    chosen = random.Random(0)
    patched, copied = 0, Counter[str]()
    for number in range(10):
        dtype = "bfloat16" if number % 3 == 2 else "float32"
        fn = random_function(chosen, getattr(torch, dtype))
        with served(fn, dtype, warmup={"self_check": False}) as manager:
            for turn in range(100):
                rows = chosen.choice([ROWS] * 4 + [ROWS // 2] * 3 + [5])
                x, z = (random_tensor(chosen, rows, getattr(torch, dtype)) for _ in range(2))
                got = manager(x=x, z=z)["y"]
                bucket = manager.plan(batch=rows).bucket
                assert bucket is not None
                padded = [F.pad(t.contiguous(), (0, 0, 0, bucket["batch"] - rows)).clone() for t in (x, z)]
                assert same_bits(got, fn(*padded)[:rows]), (number, turn, manager.explain())
            text = "\n".join(manager.explain())
            for captured in manager.captured.values():
                bound = captured.binding
                assert bound is not None
                for name, way in bound.how().items():
                    assert way == "patch" or (way.startswith("copy: ") and len(way) > 20 and way in text), way
                    calls = (
                        bound._bound[name].counts if name in bound._bound else Counter({way: _hits(manager, captured)})
                    )
                    patched += calls.pop("", 0)
                    copied.update(calls)
                    assert all(reason in text for reason in calls)
    record_property("patched", patched)
    record_property("copied", dict(copied))
    assert patched + copied.total() == 2000
    assert patched >= 1000, copied


def _hits(manager: BucketManager, captured: Any) -> int:
    return next(row.hits for row in manager.stats().buckets if row.bucket == str(captured.bucket))


# -- everything in one graph -----------------------------------------------------------------------------------------


@torch.no_grad()
def test_everything_in_one_graph() -> None:
    """cuBLAS, cuDNN and FlashAttention, our kernels, ATen's, Triton's, and copies: one graph, the bits of eager."""
    q, k, v = (torch.randn(2, 8, 128, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(64, 64, device=CUDA, dtype=torch.bfloat16)
    norm = torch.ones(64, device=CUDA, dtype=torch.bfloat16)
    own = ops(CUDA)
    names = ("cudnn", "flash", "mixed", "kept")
    out = {name: torch.empty(2, 8, 128, 64, device=CUDA, dtype=torch.bfloat16) for name in names}

    def everything() -> None:
        x = own.rms_norm((q.view(-1, 64) @ weight), norm, 1e-6).view_as(q)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out["cudnn"].copy_(F.scaled_dot_product_attention(x, k, v, is_causal=True))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            out["flash"].copy_(F.scaled_dot_product_attention(x, k, v, is_causal=True))
        out["mixed"].copy_(mix(out["cudnn"], out["flash"]))
        out["kept"].copy_(torch.tanh(out["mixed"]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        everything()
    torch.cuda.synchronize()
    graph = capture.keep(everything, stream)
    found = inspect.by_library(inspect.groups(graph))
    wanted = {"cuBLAS", "cuDNN", "FlashAttention", "bucketgraph", "Triton", "ATen", "memcpy"}
    assert wanted <= found.keys(), (found, [node.label for node in graph.nodes])
    for _ in range(3):
        q.normal_()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            everything()
        torch.cuda.synchronize()
        want = {name: tensor.clone() for name, tensor in out.items()}
        for tensor in out.values():
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert [name for name in names if not same_bits(out[name], want[name])] == []


# -- inputs and outputs ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_bound_call_copies_nothing_and_is_quiet() -> None:
    with served(mix, quiet="raise") as manager:
        captured = manager.captured[manager.lattice.buckets[-1]]
        x, z = (torch.randn(ROWS, WIDTH, device=CUDA) for _ in range(2))
        want = mix(x, z)
        manager(x=x, z=z)
        captured.inputs.views["x"].fill_(float("nan"))
        assert same_bits(manager(x=x, z=z)["y"], want)
        assert captured.inputs.views["x"].isnan().all()


@torch.no_grad()
def test_a_borrowed_result_that_goes_in_again_is_copied() -> None:
    with served(mix, outputs_are="borrowed") as manager:
        x, z = (torch.randn(ROWS, WIDTH, device=CUDA) for _ in range(2))
        first = manager(x=x, z=z)["y"]
        want = mix(first.clone(), z)
        assert same_bits(manager(x=first, z=z)["y"], want)
        assert any("memory of the graphs or of the function" in line for line in manager.explain()), manager.explain()


@torch.no_grad()
def test_auto_measures_both_and_serves_right() -> None:
    inputs = {n: {"shape": ["batch", WIDTH], "dtype": "float32", "bind": "auto"} for n in ("x", "z")}
    with served(mix, inputs=inputs) as manager:
        assert sum(" us)" in line for line in manager.explain()) == 4, manager.explain()
        for rows in (ROWS, ROWS // 2, 7):
            x, z = (torch.randn(rows, WIDTH, device=CUDA) for _ in range(2))
            assert same_bits(manager(x=x, z=z)["y"], mix(x, z))


@pytest.mark.parametrize("bind", ["copy", "patch"])
@torch.no_grad()
def test_out_is_written(bind: str) -> None:
    with served(mix, outputs={"y": {"shape": ["batch", WIDTH], "bind": bind}}) as manager:
        for rows in (ROWS, ROWS // 2, 9):
            x, z = (torch.randn(rows, WIDTH, device=CUDA) for _ in range(2))
            y = torch.full((rows, WIDTH), float("nan"), device=CUDA)
            assert manager(x=x, z=z, out={"y": y})["y"] is y
            assert same_bits(y, mix(x, z))
            kept = y.clone()
            manager(x=z, z=x)
            assert same_bits(y, kept), "a later call leaves it alone"
        ways = [binding.how(manager, captured).get("output y") for captured in manager.captured.values()]
        assert ways == [None if bind == "copy" else "patch"] * 2, manager.explain()


# -- io: in_graph ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_host_inputs_copied_in_the_graph_are_never_overwritten_by_the_next() -> None:
    inputs = {n: {"shape": ["batch", WIDTH], "dtype": "float32"} for n in ("x", "z")}
    with served(mix, io="in_graph", inputs=inputs) as manager:
        ways = [binding.how(manager, captured) for captured in manager.captured.values()]
        assert ways == [{"io": "in_graph"}] * 2, manager.explain()
        calls = []
        torch.cuda._sleep(50_000_000)  # the host runs ahead as far as the buffers let it
        for turn in range(60):
            rows = (ROWS, 11, ROWS // 2)[turn % 3]
            x, z = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
            calls.append((x, z, manager(x=x, z=z)["y"]))
        for x, z, y in calls:
            assert same_bits(y, mix(x.to(CUDA), z.to(CUDA)))
        x, z = torch.randn(ROWS, WIDTH, device=CUDA), torch.randn(ROWS, WIDTH)
        assert same_bits(manager(x=x, z=z)["y"], mix(x, z.to(CUDA))), "one on the device: copied outside"
        x, z = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        assert same_bits(manager(x=x, z=z)["y"], mix(x.to(CUDA), z.to(CUDA)))


# -- state -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, device=CUDA))
        self.linear = nn.Linear(WIDTH, WIDTH, device=CUDA)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.linear(x * self.scale) + z


@pytest.mark.parametrize("name", ["scale", "linear.weight"])
@torch.no_grad()
def test_a_moved_weight_equals_a_fresh_capture(name: str) -> None:
    model = Layer().eval()
    with served(model) as manager:
        x, z = (torch.randn(ROWS, WIDTH, device=CUDA) for _ in range(2))
        before = manager(x=x, z=z)["y"]
        new = torch.randn_like(dict(model.named_parameters())[name])
        old = manager.rebind({name: new})
        got = manager(x=x, z=z)["y"]
        with served(model) as fresh:
            assert same_bits(got, fresh(x=x, z=z)["y"]) and not same_bits(got, before)
        manager.rebind(old)
        assert same_bits(manager(x=x, z=z)["y"], before)
        if name == "scale":
            assert not manager.fixed, manager.explain()
        assert all(reason for reasons in manager.fixed.values() for reason in reasons.values())


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[[], LLM]]:
    config = shrink(preset("llama-3.2-1b"), num_layers=2)
    weights = random_weights(config, torch.bfloat16, CUDA)
    made = buckets(tokens=[64], batch=[1, 4], requests=[4], memory="64MiB", numerics="invariant")
    yield lambda: LLM.from_weights(config, weights, made, max_model_len=256)


def stepped(llm: LLM, rows: Tensor, count: int = 3) -> list[Tensor]:
    with llm.prefill(rows) as batch:
        return [batch.logits.clone(), *(llm.decode(batch).logits.clone() for _ in range(count))]


@torch.no_grad()
def test_a_decode_graph_moves_to_another_cache_bitwise(
    models: Callable[[], LLM], record_property: pytest.RecordProperty
) -> None:
    rows, others = (torch.randint(0, 1000, (4, n)) for n in (13, 9))
    with models() as llm, models() as fresh:
        want, wanted = stepped(fresh, rows), stepped(fresh, others)
        assert all(map(same_bits, stepped(llm, rows), want))
        other = llm.cache.like()
        other.data.fill_(float("nan"))  # what is read there was written there
        other.data[:, :, 0].zero_()
        one = llm.prefill(rows)
        llm.swap_cache(other)
        assert all(map(same_bits, stepped(llm, others), wanted)), "in the other cache"
        record_property("decode", llm._runner.decode_manager.explain())
        record_property("prefill", llm._runner.prefill_manager.explain())
        assert not llm._runner.decode_manager.fixed, llm._runner.decode_manager.fixed
        graphs = [captured.executable for captured in llm._runner.decode_manager.captured.values()]
        llm.swap_cache(other)
        assert [captured.executable for captured in llm._runner.decode_manager.captured.values()] == graphs
        assert all(isinstance(graph, MovableGraph) for graph in graphs)
        got = [one.logits.clone(), *(llm.decode(one).logits.clone() for _ in range(3))]
        assert all(map(same_bits, got, want)), "back, with rows that never left"
        one.close()
        assert is_idle(llm) and other.is_idle
