"""CUDA graphs behind the manager: replays equal eager bit by bit, nothing races, a failed capture costs one bucket."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bucketgraph.buckets import Bucket
from bucketgraph.config import BucketSet, InputSpec, parse
from bucketgraph.executables import Family
from bucketgraph.manager import BucketManager
from bucketgraph.selfcheck import same_bits
from bucketgraph.slots import Arena, Slot, StaticInputs, _write
from bucketgraph.warmup import warm_up

WIDTH = 64
CUDA = "cuda"


def bucket_set(dtype: str = "float32", **changed: Any) -> BucketSet:
    base: dict[str, Any] = {
        "version": 1,
        "name": "gpu",
        "executable": "cudagraph",
        "axes": {"batch": [1, 2, 4, 8]},
        "inputs": {
            "x": {"shape": ["batch", WIDTH], "dtype": dtype},
            "k": {"shape": ["batch"], "dtype": "int64", "pad": "skip", "range": [0, 9]},
        },
        "outputs": {"y": {"shape": ["batch", WIDTH]}, "k": {"shape": ["batch"]}},
        "overflow": "error",
    }
    return parse({**base, **changed})


class MLP(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, device=CUDA, dtype=dtype)
        self.down = nn.Linear(4 * WIDTH, WIDTH, device=CUDA, dtype=dtype)

    def forward(self, x: Tensor, k: Tensor) -> dict[str, Tensor]:
        return {"y": self.down(torch.nn.functional.gelu(self.up(x))), "k": k * 2}


def affine(x: Tensor, k: Tensor) -> dict[str, Tensor]:
    return {"y": x * 2 + 1, "k": k * 2}


def warm(fn: Callable[..., Any], made: BucketSet, **options: Any) -> BucketManager:
    manager = BucketManager(fn, made, device=CUDA, **options)
    report = manager.warmup()
    assert report.ok, report.failed
    assert all(row.replay_ms and row.replay_ms > 0 for row in report.buckets), "each graph is timed"
    return manager


def inputs(batch: int, value: float | None = None, device: str = CUDA) -> dict[str, Tensor]:
    shape = (batch, WIDTH)  # made where they are used: a copy from the host would wait for the GPU
    x = torch.randn(shape, device=device) if value is None else torch.full(shape, value, device=device)
    return {"x": x, "k": torch.arange(batch, device=device)}


def reserved() -> int:
    """What torch keeps of the GPU's memory when all that can go has gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- right results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_is_bit_equal_to_eager_at_the_padded_shape(dtype: str) -> None:
    model = MLP(getattr(torch, dtype)).eval()
    with warm(model, bucket_set(dtype)) as manager:
        assert manager.kind == "cudagraph"
        for batch in (1, 2, 3, 4, 5, 7, 8):
            given = inputs(batch)
            given["x"] = given["x"].to(getattr(torch, dtype))
            got = manager(**given)
            plan = manager.plan(batch=batch)
            assert plan.bucket is not None
            static = manager.captured[plan.bucket].inputs.views
            with torch.no_grad():
                want = model(**static)
            assert torch.equal(got["y"], want["y"][:batch]) and torch.equal(got["k"], given["k"] * 2)
            assert torch.equal(static["x"][:batch], given["x"]) and not static["x"][batch:].any()
            assert (static["k"][batch:] == -1).all()


@pytest.mark.parametrize("where", [("cpu", "cpu"), ("cpu", CUDA), (CUDA, "cpu"), (CUDA, CUDA)])
def test_host_and_device_inputs_mix(where: tuple[str, str]) -> None:
    with warm(affine, bucket_set()) as manager:
        for batch in (8, 3, 1, 5):
            given = inputs(batch)
            got = manager(x=given["x"].to(where[0]), k=given["k"].to(where[1]))
            assert torch.equal(got["y"], given["x"] * 2 + 1) and torch.equal(got["k"], given["k"] * 2)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_nan_of_a_large_call_never_reaches_a_small_one(device: str) -> None:
    def sums(x: Tensor, k: Tensor) -> dict[str, Tensor]:
        return {"y": x + 0 * x.sum(), "k": k * 2}  # a cross-row sum, so that a pad row shows

    with warm(sums, bucket_set()) as manager:
        for _ in range(3):
            manager(**inputs(8, float("nan"), device))
            for batch in (1, 3, 5, 7):
                got = manager(**inputs(batch, 2.0, device))
                assert (got["y"] == 2.0).all(), "padding held an earlier call's values"


def test_changed_weights_are_seen_without_recapture() -> None:
    model = MLP().eval()
    with warm(model, bucket_set()) as manager:
        given = inputs(3)
        before = manager(**given)["y"]
        with torch.no_grad():
            model.down.bias.add_(1.0)
        torch.testing.assert_close(manager(**given)["y"], before + 1.0)


# -- ownership of outputs --------------------------------------------------------------------------------------------


def test_cloned_outputs_survive_ten_replays() -> None:
    with warm(affine, bucket_set()) as manager:
        held = [manager(**inputs(5, float(step)))["y"] for step in range(11)]
        for step, result in enumerate(held):
            assert (result == 2.0 * step + 1).all()


def test_a_ring_of_four_survives_three_later_calls() -> None:
    with warm(affine, bucket_set(outputs_are={"ring": 4})) as manager:
        held: list[Tensor] = []
        for step in range(12):
            held.append(manager(**inputs(1 + step % 8, float(step)))["y"])
            for age, result in enumerate(reversed(held[-4:])):
                assert (result == 2.0 * (step - age) + 1).all()


def test_borrowed_outputs_are_static_and_a_split_owns_its_result() -> None:
    with warm(affine, bucket_set(outputs_are="borrowed", overflow="split")) as manager:
        assert manager(**inputs(8, 1.0))["y"].data_ptr() == manager(**inputs(8, 2.0))["y"].data_ptr()
        given = inputs(21)
        result = manager(**given)["y"]
        manager(**inputs(8, 7.0))
        assert torch.equal(result, given["x"] * 2 + 1)


# -- order: families, streams, threads, staging ----------------------------------------------------------------------


def test_two_managers_of_one_family_share_a_pool_and_do_not_disturb_each_other() -> None:
    family, model = Family(torch.device("cuda", torch.cuda.current_device())), MLP().eval()
    first = BucketManager(model, bucket_set(), family=family, name="first")
    second = BucketManager(affine, bucket_set(), family=family, name="second")
    assert warm_up([first, second]).ok
    for batch in (8, 1, 3, 8, 5):
        given = inputs(batch)
        a, b = first(**given), second(**given)
        with torch.no_grad():
            torch.testing.assert_close(a["y"], model(**given)["y"], rtol=1e-5, atol=1e-5)
        assert torch.equal(b["y"], given["x"] * 2 + 1)
    first.release()
    assert torch.equal(second(**given)["y"], given["x"] * 2 + 1), "the pool lives on for the other"
    second.release()


def test_calls_from_two_streams_are_ordered_on_the_gpu() -> None:
    with warm(affine, bucket_set()) as manager:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        held: list[Tensor] = []
        torch.cuda.synchronize()
        for step in range(60):
            with torch.cuda.stream(streams[step % 2]):
                torch.cuda._sleep(
                    200_000 if step % 3 else 20_000
                )  # a late reader, whom the next call must not overtake
                held.append(manager(**inputs(1 + step % 8, float(step)))["y"])
        torch.cuda.synchronize()
        assert [bool((result == 2.0 * step + 1).all()) for step, result in enumerate(held)] == [True] * 60


def test_eight_threads_get_their_own_answers() -> None:
    with warm(affine, bucket_set()) as manager:

        def work(worker: int) -> bool:
            right = True
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(50):
                    value = float(worker * 100 + step)
                    device = CUDA if step % 2 else "cpu"
                    got = manager(**inputs(1 + (worker + step) % 8, value, device))["y"]
                    right = right and bool((got == 2.0 * value + 1).all())
            return right

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        assert manager.stats().outcomes == {"replayed": 400}


def test_pinned_staging_is_not_refilled_before_its_copy_is_done() -> None:
    with warm(affine, bucket_set()) as manager:
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # the GPU is busy: copies queue up while the host runs ahead
        held = [manager(**inputs(1 + step % 8, float(step), "cpu"))["y"] for step in range(200)]
        torch.cuda.synchronize()
        wrong = [step for step, result in enumerate(held) if not (result == 2.0 * step + 1).all()]
        assert not wrong


@pytest.mark.parametrize("device", [CUDA, "cpu"])
def test_a_call_never_waits_for_the_gpu(device: str) -> None:
    model = MLP().eval()
    with warm(model, bucket_set()) as manager:
        asked = [inputs(batch, None, device) for batch in (1, 3, 8, 5, 2)]
        for given in asked:
            manager(**given)
        with no_syncs():
            for given in asked * 3:
                manager(**given)


def test_calls_leave_profiler_ranges_balanced() -> None:
    with warm(affine, bucket_set()) as manager:
        before = torch.cuda.nvtx.range_push("outer")
        torch.cuda.nvtx.range_pop()
        for batch in (1, 8, 3):
            manager(**inputs(batch))
        after = torch.cuda.nvtx.range_push("outer")
        torch.cuda.nvtx.range_pop()
        assert before == after


# -- failures and memory ---------------------------------------------------------------------------------------------


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def syncs(x: Tensor) -> None:
    x.sum().item()


def raises(x: Tensor) -> None:
    if capturing():
        raise ValueError("not while capturing")


def swallows(x: Tensor) -> None:
    with suppress(RuntimeError):
        x.sum().item()


@pytest.mark.parametrize("failing", [8, 4, 1], ids=lambda n: f"batch={n}")
@pytest.mark.parametrize("how", [syncs, raises, swallows])
def test_a_failed_capture_costs_its_bucket_alone_and_gives_its_memory_back(
    how: Callable[[Tensor], None], failing: int
) -> None:
    def touchy(x: Tensor, k: Tensor) -> dict[str, Tensor]:
        big = x.repeat(1, 4096)  # 8 MiB at eight rows, so that a leak shows
        if len(x) == failing:
            how(x)
        return {"y": big[:, :WIDTH] * 2 + 1, "k": k * 2}

    before = reserved()
    manager = BucketManager(touchy, bucket_set(), device=CUDA)
    report = manager.warmup()
    assert [row.bucket for row in report.failed] == [f"batch={failing}"], report.failed
    assert str(report.failed[0].error).startswith("capture: ") and report.failed[0].mib == 0
    assert gc.isenabled() and not capturing()
    assert torch.randn(8, device=CUDA).isfinite().all(), "the random generator still works"
    for batch in (1, 2, 3, 4, 5, 8):
        given = inputs(batch)
        assert torch.equal(manager(**given)["y"], given["x"] * 2 + 1)
    stats = manager.stats()
    plans = [manager.plan(batch=batch).bucket for batch in (1, 2, 3, 4, 5, 8)]
    eager = sum(bucket is not None and bucket["batch"] == failing for bucket in plans)
    assert stats.outcomes == {"replayed": 6 - eager, "eager": eager}
    del given
    manager.release()
    assert reserved() - before <= 4 << 20


def test_a_later_manager_captures_after_a_broken_capture() -> None:
    def broken(x: Tensor, k: Tensor) -> dict[str, Tensor]:
        syncs(x)
        return affine(x, k)

    report = BucketManager(broken, bucket_set(), device=CUDA).warmup()
    assert len(report.failed) == 4, "every bucket fails, each with its own error"
    assert all("captur" in str(row.error) for row in report.failed), report.failed
    with warm(affine, bucket_set()) as manager:
        assert (manager(**inputs(3, 1.0))["y"] == 3.0).all()


def test_memory_comes_back_and_a_released_manager_can_be_warmed_again() -> None:
    model = MLP().eval()
    before = reserved()
    manager = BucketManager(model, bucket_set(), device=CUDA)
    for _ in range(3):
        assert manager.warmup().ok
        given = inputs(5)
        with torch.no_grad():
            torch.testing.assert_close(manager(**given)["y"], model(**given)["y"], rtol=1e-5, atol=1e-5)
        del given
        manager.release()
        assert manager.family.mib == pytest.approx(0.0)
        assert reserved() - before <= 4 << 20


def test_warming_up_again_while_warm_replaces_the_graphs() -> None:
    with warm(affine, bucket_set()) as manager:
        for value in (1.0, 2.0):
            assert manager.warmup().ok
            assert (manager(**inputs(7, value))["y"] == 2 * value + 1).all()


def test_a_lazy_set_captures_on_its_first_call() -> None:
    manager = BucketManager(affine, bucket_set(warmup={"lazy": True}), device=CUDA)
    held = [manager(**inputs(batch, float(batch)))["y"] for batch in (3, 8, 1, 3, 8, 1)]
    for batch, result in zip((3, 8, 1, 3, 8, 1), held, strict=True):
        assert (result == 2.0 * batch + 1).all()
    assert len(manager.captured) == 3 and all(c.executable.kind == "cudagraph" for c in manager.captured.values())
    manager.release()


@torch.no_grad()
def test_clearing_the_workspaces_of_cublas_takes_nothing_from_a_graph() -> None:
    """`torch.compile` with graphs of its own does that, and the end of a graph on the same stream may."""
    wide = nn.Linear(8192, 2048, device=CUDA, dtype=torch.bfloat16)  # K is shared out: partial sums go to the workspace
    biasless = nn.Linear(8192, 512, bias=False, device=CUDA, dtype=torch.bfloat16)
    made: dict[str, Any] = {
        "version": 1,
        "name": "workspace",
        "executable": "cudagraph",
        "axes": {"batch": [8, 64]},
        "inputs": {"x": {"shape": ["batch", 8192], "dtype": "bfloat16"}},
        "outputs": {"y": {"shape": ["batch", 2048]}, "z": {"shape": ["batch", 512]}},
    }
    with BucketManager(lambda x: {"y": wide(x), "z": biasless(x)}, parse(made), device=CUDA) as manager:
        assert manager.warmup().ok
        given = [{"x": torch.randn(batch, 8192, device=CUDA, dtype=torch.bfloat16)} for batch in (8, 64)]
        before = [manager(**one) for one in given]
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        taken = [torch.full((1 << 20,), 7, dtype=torch.uint8, device=CUDA) for _ in range(512)]  # what was freed
        for one, want in zip(given, before, strict=True):
            got = manager(**one)
            assert torch.equal(got["y"], want["y"]) and torch.equal(got["z"], want["z"])
        assert all((part == 7).all() for part in taken)
        del taken
        torch.cuda.empty_cache()  # and given back to CUDA
        for one, want in zip(given, before, strict=True):
            assert torch.equal(manager(**one)["y"], want["y"])


def test_a_budget_leaves_out_the_graphs_that_would_exceed_it() -> None:
    def hungry(x: Tensor, k: Tensor) -> dict[str, Tensor]:
        return {"y": x.repeat(1, 1 << 15)[:, :WIDTH] * 2 + 1, "k": k * 2}  # 64 MiB at eight rows, 8 MiB at one

    manager = BucketManager(hungry, bucket_set(memory={"budget": "48MiB"}), device=CUDA)
    report = manager.warmup()
    left_out = {row.bucket for row in report.failed}
    assert "batch=8" in left_out and "batch=1" not in left_out, report
    assert all("memory budget" in str(row.error) for row in report.failed)
    assert manager.family.mib <= 48
    for batch in (8, 1):
        assert (manager(**inputs(batch, 3.0))["y"] == 7.0).all()
    manager.release()


def test_other_threads_may_use_the_gpu_during_capture() -> None:
    stop, trouble = threading.Event(), []

    def noise() -> None:
        try:
            while not stop.is_set():
                torch.ones(64, device=CUDA).sum().item()
        except RuntimeError as error:
            trouble.append(error)

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        with warm(MLP().eval(), bucket_set()) as manager:
            manager(**inputs(3))
    finally:
        stop.set()
        thread.join()
    assert not trouble


def test_warm_up_leaves_the_garbage_collector_as_it_was() -> None:
    gc.disable()
    try:
        with warm(affine, bucket_set()):
            assert not gc.isenabled()
    finally:
        gc.enable()


# -- a real architecture ---------------------------------------------------------------------------------------------


# Both work: transformers 5 looks at the mask's values (a sync) only while no stream is capturing.
def test_minilm_replays_equal_the_model_alone() -> None:
    attention = (
        "sdpa"  # what an encoder is loaded with; transformers 5.17's `eager` copies from the CPU, which no graph can
    )
    transformers = pytest.importorskip("transformers")
    folder = os.environ.get("BUCKETGRAPH_MINILM")
    if folder:
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        shape = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
            attn_implementation=attention,
        )  # fmt: skip
        model = transformers.BertModel(shape)
    model = model.to(CUDA).eval()
    ids = {"shape": ["batch", "tokens"], "dtype": "int64", "pad": 0}
    made = parse(
        {
            "version": 1,
            "name": "minilm",
            "executable": "cudagraph",
            "axes": {"batch": [1, 4], "tokens": [16, 48]},
            "inputs": {"input_ids": {**ids, "range": [1000, 30522]}, "attention_mask": {**ids, "range": [1, 2]}},
            "outputs": {"last_hidden_state": {"shape": ["batch", "tokens", 384]}},
            "overflow": "split",
        }
    )
    with warm(model, made) as manager:
        generator = torch.Generator().manual_seed(0)
        requests = [
            {
                "input_ids": torch.randint(1000, 30522, (length,), generator=generator),
                "attention_mask": torch.ones(length, dtype=torch.int64),
            }
            for length in (3, 16, 48, 17, 33, 1, 40)
        ]
        results = manager.run_batch(requests) + [manager.run_batch([request])[0] for request in requests]
        for request, result in zip(requests * 2, results, strict=True):
            with torch.no_grad():
                alone = model(**{name: tensor[None].to(CUDA) for name, tensor in request.items()}).last_hidden_state[0]
            torch.testing.assert_close(result["last_hidden_state"], alone, rtol=0, atol=1e-4)
        assert manager.stats().outcomes == {"replayed": 9}


@torch.no_grad()
def test_ten_device_inputs_and_their_padding_are_one_launch() -> None:
    names = [f"x{number}" for number in range(10)]
    made = {
        "version": 1,
        "name": "ten",
        "executable": "cudagraph",
        "axes": {"batch": [8]},
        "inputs": {name: {"shape": ["batch", 16], "dtype": "float32", "pad": 3} for name in names},
        "outputs": {"y": {"shape": ["batch", 16]}},
    }
    with BucketManager(lambda **x: sum(x.values()), parse(made), device="cuda") as manager:
        assert manager.warmup().ok
        (captured,) = manager.captured.values()
        inputs = {name: torch.randn(5, 16, device="cuda") for name in names}
        for _ in range(3):
            got = manager(**inputs)["y"]
            assert torch.equal(got, sum(inputs.values()))
            assert all((view[5:] == 3).all() for view in captured.inputs.views.values())
        with manager.family.turn():
            for _ in range(2):  # to be known without the call's own look at the inputs
                captured.inputs.fill(inputs)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                captured.inputs.fill(inputs)
                torch.cuda.synchronize()
        kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == 1, kernels


def test_joint_copies_move_the_very_bits() -> None:
    """NaN payloads too, from any layout; and what lies in a slot itself goes the old way."""
    dtypes = {"a": "float32", "b": "bfloat16", "c": "float16", "d": "bool", "e": "int64", "f": "float32"}
    rules = {"a": 3, "b": "zero", "c": 1, "d": "zero", "e": "skip", "f": "repeat_last"}
    slots = [
        Slot.from_spec(name, InputSpec.model_validate({"shape": ["n", "m"], "dtype": dtype, "pad": rules[name]}))
        for name, dtype in dtypes.items()
    ]
    space, device = Bucket(("n", "m"), (6, 8)), torch.device(CUDA, torch.cuda.current_device())
    static = StaticInputs(slots, space, Arena(slots, [space], device))
    for step in range(12):
        n, m = ((6, 8), (4, 8), (4, 5))[step % 3]
        inputs = {}
        for one in slots:
            bits = torch.randint(0, 256, (n, 2 * m * one.dtype.itemsize), dtype=torch.uint8, device=CUDA)
            wide = bits % 2 == 1 if one.dtype == torch.bool else bits.view(one.dtype)
            inputs[one.name] = wide[:, ::2] if one.name == "f" else wide[:, :m].clone()
        static._arena.device_bytes.fill_(0xFF)
        static.fill(inputs)
        for one in slots:
            want = torch.empty_like(static.views[one.name])
            _write(want, inputs[one.name], one.pad)
            assert same_bits(static.views[one.name], want), (step, one.name)
    assert len(static._route(tuple(dtypes))._device_copies._made) == 3, "the joint way was taken"
    own = {**inputs, "a": static.views["f"][:n, :m]}
    kept = own["a"].clone()
    static.fill(own)
    assert same_bits(static.views["a"][:n, :m].contiguous(), kept)
