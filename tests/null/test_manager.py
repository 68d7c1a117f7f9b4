"""A call's whole path on the CPU: the result is what the function alone gives, or the way out is named and counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from bucketgraph.config import BucketSet, load, parse  # noqa: E402
from bucketgraph.errors import ConfigError, InputError, NoBucketError, NotWarmError  # noqa: E402
from bucketgraph.executables import Family  # noqa: E402
from bucketgraph.manager import BucketManager, profiler_ranges  # noqa: E402

CPU = torch.device("cpu")


def bucket_set(**changed: Any) -> BucketSet:
    """`x [batch, tokens, 3]` and `n [batch]` in; `y [batch, tokens, 3]` and `s [batch]` out."""
    base: dict[str, Any] = {
        "version": 1,
        "name": "test",
        "executable": "eager",
        "axes": {"batch": [1, 2, 4], "tokens": [4, 8]},
        "inputs": {
            "x": {"shape": ["batch", "tokens", 3], "dtype": "float32"},
            "n": {"shape": ["batch"], "dtype": "int64", "range": [1, 5]},
        },
        "outputs": {"y": {"shape": ["batch", "tokens", 3]}, "s": {"shape": ["batch"]}},
    }
    return parse({**base, **changed})


def twice(x: Tensor, n: Tensor) -> dict[str, Tensor]:
    return {"y": x * 2 + 1, "s": x.sum((1, 2)) * n}


def call(batch: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, tokens, 3, generator=generator),
        "n": torch.randint(1, 5, (batch,), generator=generator),
    }


def warm(fn: Callable[..., Any] = twice, **changed: Any) -> BucketManager:
    manager = BucketManager(fn, bucket_set(**changed))
    manager.warmup()
    return manager


def assert_equal(got: dict[str, Tensor], inputs: dict[str, Tensor], fn: Callable[..., Any] = twice) -> None:
    want = fn(**inputs)
    assert set(got) == set(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


# -- results equal the function alone --------------------------------------------------------------------------------


@dataclass
class Result:
    y: Tensor
    s: Tensor


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(self.linear(x)), n.float()


KINDS: dict[str, Callable[..., Any]] = {
    "mapping": twice,
    "tuple": lambda x, n: tuple(twice(x, n).values()),
    "list": lambda x, n: [*twice(x, n).values(), "more"],
    "dataclass": lambda x, n: Result(**twice(x, n)),
    "views of the inputs": lambda x, n: (x, n.float()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_result_equals_the_function_alone(kind: str) -> None:
    manager = warm(KINDS[kind])
    for batch in range(1, 5):
        for tokens in range(1, 9):
            inputs = call(batch, tokens)
            raw = KINDS[kind](**inputs)
            want = (
                raw
                if isinstance(raw, dict)
                else vars(raw)
                if isinstance(raw, Result)
                else dict(zip("ys", raw, strict=False))
            )
            got = manager(**inputs)
            for name in "ys":
                torch.testing.assert_close(got[name], want[name])
    assert manager.stats().outcomes == {"replayed": 32}


def test_a_module_runs_and_its_weights_may_change_in_place() -> None:
    module = Module().eval()
    manager = warm(module)
    assert manager.device == CPU and manager.kind == "eager"
    for _ in range(2):
        inputs = call(3, 5)
        torch.testing.assert_close(manager(**inputs)["y"], module(**inputs)[0])
        with torch.no_grad():
            module.linear.weight.mul_(2)


def test_a_tensor_alone_is_the_only_output() -> None:
    manager = warm(lambda x, n: x + n[:, None, None], outputs={"y": {"shape": ["batch", "tokens", 3]}})
    inputs = call(3, 7)
    torch.testing.assert_close(manager(**inputs)["y"], inputs["x"] + inputs["n"][:, None, None])


def test_results_carry_no_gradient_and_inputs_may() -> None:
    inputs = call(3, 7)
    inputs["x"].requires_grad_()
    assert not warm()(**inputs)["y"].requires_grad


def test_warm_up_and_calls_mix_with_inference_mode() -> None:
    manager = BucketManager(twice, bucket_set(outputs_are={"ring": 2}))
    with torch.inference_mode():
        manager.warmup()
        inside = manager(**call(2, 3))
    assert_equal(inside, call(2, 3))
    for seed in range(3):
        assert_equal(manager(**call(4, 8, seed)), call(4, 8, seed))  # writes what was made inside
    with torch.inference_mode():
        inputs = call(2, 5)
        held = manager(**inputs)
    assert_equal(held, inputs)


def test_inputs_named_like_python_words_reach_the_function() -> None:
    made = bucket_set(
        axes={"batch": [2]},
        inputs={"self": {"shape": ["batch"], "dtype": "float32"}},
        outputs={"y": {"shape": ["batch"]}},
    )
    manager = BucketManager(lambda **inputs: inputs["self"] * 2, made)
    manager.warmup()
    assert manager(**{"self": torch.ones(1)})["y"].tolist() == [2.0]


# -- what is refused at once -----------------------------------------------------------------------------------------


def test_a_cold_or_released_manager_says_so() -> None:
    manager = BucketManager(twice, bucket_set())
    with pytest.raises(NotWarmError, match=r"test is cold; call warmup\(\) first"):
        manager(**call(1, 1))
    with pytest.raises(NotWarmError, match="cold"):
        manager.run_batch([{"x": torch.zeros(1, 3), "n": torch.tensor(1)}])
    manager.warmup()
    with manager:
        manager(**call(1, 1))
    with pytest.raises(NotWarmError, match="test is released"):
        manager(**call(1, 1))
    manager.warmup()
    assert_equal(manager(**call(3, 3)), call(3, 3))


def test_a_lazy_manager_stays_released_until_it_is_warmed_again() -> None:
    manager = BucketManager(twice, bucket_set(warmup={"lazy": True}))
    manager(**call(1, 1))
    manager.release()
    with pytest.raises(NotWarmError, match="released"):
        manager(**call(1, 1))
    assert manager.warmup().buckets == ()
    assert_equal(manager(**call(1, 1)), call(1, 1))


def test_a_call_that_waited_while_the_manager_was_released_does_not_capture_anew() -> None:
    manager = warm()
    started, result = threading.Event(), []

    def late() -> None:
        started.set()
        try:
            manager(**call(1, 1))
        except NotWarmError as error:
            result.append(error)

    with manager.family.lock:
        thread = threading.Thread(target=late)
        thread.start()
        started.wait()
        manager.release()
    thread.join()
    assert len(result) == 1 and not manager.captured


def test_a_module_in_training_mode_is_refused_and_so_is_a_part_of_one() -> None:
    with pytest.raises(ConfigError, match=r"the module is in training mode; call .eval\(\)"):
        BucketManager(Module(), bucket_set())
    module = Module().eval()
    module.dropout.train()
    with pytest.raises(ConfigError, match="dropout is in training mode"):
        BucketManager(module, bucket_set())


def test_devices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="cudagraph needs a CUDA device: given cpu"):
        BucketManager(twice, bucket_set(executable="cudagraph"), device="cpu")
    assert BucketManager(twice, bucket_set(executable="auto"), device="cpu").kind == "eager"
    with pytest.raises(ConfigError, match="the module is on another device: given meta, expected cpu"):
        BucketManager(Module().eval().to("meta"), bucket_set(), device="cpu")
    with pytest.raises(ConfigError, match="the family is on another device: given cpu, expected meta"):
        BucketManager(twice, bucket_set(), device="meta", family=Family(CPU))


def test_an_llm_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an LLM set has phases; use bucketgraph\.LLM"):
        BucketManager(twice, load("llm"))


def test_wrong_tensors_are_refused_and_not_counted() -> None:
    manager = warm()
    for wrong in ({"x": torch.zeros(1, 1, 3)}, call(0, 1), {**call(1, 1), "x": torch.zeros(1, 1, 4)}):
        with pytest.raises(InputError):
            manager(**wrong)
    with pytest.raises(InputError, match=r"a plan needs every axis: given batch, expected batch, tokens"):
        manager.plan(batch=1)
    assert manager.stats().calls == 0


# -- overflow, splits, fallbacks and their counts --------------------------------------------------------------------


def test_overflow_eager_is_right_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = warm()
    with caplog.at_level(logging.WARNING, "bucketgraph"):
        for batch, tokens in ((5, 3), (9, 9), (2, 20)):
            assert_equal(manager(**call(batch, tokens)), call(batch, tokens))
        manager(**call(1, 1))
    stats = manager.stats()
    assert stats.outcomes == {"eager": 3, "replayed": 1} and stats.fallbacks == {"eager:over_largest": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "test: eager call: batch 5 is over the largest bucket's 4 (logged once, counted in stats)"
    ]


def test_overflow_error_names_sizes_and_runs_nothing() -> None:
    ran: list[int] = []

    def spy(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        ran.append(len(x))
        return twice(x, n)

    manager = warm(spy, overflow="error")
    ran.clear()
    with pytest.raises(NoBucketError, match="tokens 9 is over the largest bucket's 8"):
        manager(**call(1, 9))
    assert not ran and manager.stats().outcomes == {"refused": 1}
    assert manager.stats().fallbacks == {"refused:over_largest": 1}


@pytest.mark.parametrize("ownership", ["cloned", "borrowed", {"ring": 1}])
def test_a_split_call_equals_the_function_alone(ownership: Any) -> None:
    manager = warm(overflow="split", outputs_are=ownership)
    for batch in (5, 8, 9, 23):
        assert_equal(manager(**call(batch, 7)), call(batch, 7))
    stats = manager.stats()
    assert stats.outcomes == {"split": 4} and stats.calls == 4
    assert sum(row.hits for row in stats.buckets) == 2 + 2 + 3 + 6
    assert sum(row.real for row in stats.buckets) == 7 * (5 + 8 + 9 + 23)


def test_a_split_whose_other_axis_overflows_is_refused_before_anything_runs() -> None:
    manager = warm(overflow="split")
    with pytest.raises(NoBucketError, match="tokens 9 is over the largest bucket's 8"):
        manager(**call(9, 9))
    stats = manager.stats()
    assert stats.outcomes == {"refused": 1} and not any(row.hits for row in stats.buckets)


def test_a_split_takes_one_turn_of_the_ring() -> None:
    manager = warm(overflow="split", outputs_are={"ring": 2})
    first = manager(**call(2, 3))
    manager(**call(23, 7))
    assert_equal(first, call(2, 3))


def test_parts_of_a_split_that_no_bucket_served_are_counted() -> None:
    def bad_on_four(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        return twice(x, n + (len(x) == 4 and not x[-1].any()))  # wrong where a row of four is padding

    manager = warm(bad_on_four, overflow="split")
    assert any("batch=4" in row.bucket for row in manager.warmup().failed)
    assert_equal(manager(**call(9, 8)), call(9, 8))
    assert manager.stats().fallbacks == {"eager:bucket_failed": 2, "split:over_largest": 1}
    assert manager.stats().outcomes == {"split": 1}


def test_above_max_padding_a_call_runs_eagerly() -> None:
    manager = warm(max_padding=2.0)
    assert_equal(manager(**call(3, 1)), call(3, 1))
    stats = manager.stats()
    assert stats.outcomes == {"eager": 1} and stats.fallbacks == {"eager:over_padding": 1}


def test_a_call_that_raises_is_counted_as_that_and_as_no_hit() -> None:
    def touchy(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        if x.isnan().any():
            raise ZeroDivisionError("not today")
        return twice(x, n)

    manager = warm(touchy)
    with pytest.raises(ZeroDivisionError):
        manager(x=torch.full((2, 4, 3), float("nan")), n=torch.ones(2, dtype=torch.int64))
    assert_equal(manager(**call(2, 4)), call(2, 4))
    stats = manager.stats()
    assert stats.outcomes == {"raised": 1, "replayed": 1} and sum(row.hits for row in stats.buckets) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_ranges_of_profilers_are_closed_however_a_call_ends(fails: bool) -> None:
    def touchy(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        if x.isnan().any():
            raise ZeroDivisionError("not today")
        return twice(x, n)

    manager, steps = warm(touchy), []
    manager._push, manager._pop = steps.append, lambda: steps.append("pop")
    try:
        manager(x=torch.full((2, 4, 3), float("nan") if fails else 1.0), n=torch.ones(2, dtype=torch.int64))
    except ZeroDivisionError:
        assert fails
    names = ["fill", "replay"] if fails else ["fill", "replay", "read"]
    assert steps == [step for name in names for step in (f"bucketgraph.{name}", "pop")]


@pytest.mark.parametrize(
    ("depth", "injected", "listens"), [(-2, False, False), (-2, True, True), (0, False, True), (3, False, True)]
)
def test_ranges_are_made_only_where_a_profiler_may_listen(
    depth: int, injected: bool, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    nvtx = SimpleNamespace(range_push=lambda name: (made.append(name), depth)[1], range_pop=lambda: made.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    if injected:
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/libToolsInjection64.so")
    push, pop = profiler_ranges(torch.device("cuda"))
    assert made == ["bucketgraph", "pop"], "asked once, and left balanced"
    push("bucketgraph.fill")
    pop()
    assert made[2:] == (["bucketgraph.fill", "pop"] if listens else [])
    profiler_ranges(torch.device("cpu"))[0]("nothing")
    assert "nothing" not in made


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 11), st.integers(1, 10)), min_size=1, max_size=8),
    st.sampled_from(["eager", "split", "error"]),
)
def test_outcomes_add_up_to_calls(sizes: list[tuple[int, int]], overflow: str) -> None:
    manager = warm(overflow=overflow, max_padding=6.0)
    for batch, tokens in sizes:
        try:
            assert_equal(manager(**call(batch, tokens)), call(batch, tokens))
        except NoBucketError:
            assert overflow != "eager"
    stats = manager.stats()
    assert sum(stats.outcomes.values()) == stats.calls == len(sizes)
    assert stats.padding >= 1.0 and stats.as_dict()["calls"] == len(sizes)


# -- run_batch -------------------------------------------------------------------------------------------------------


def ragged(lengths: list[int]) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(n, 3), "n": torch.tensor(n)} for n in lengths]


def assert_each(results: list[dict[str, Tensor]], requests: list[dict[str, Tensor]]) -> None:
    assert len(results) == len(requests)
    for got, request in zip(results, requests, strict=True):
        want = twice(request["x"][None], request["n"][None])
        torch.testing.assert_close(got["y"], want["y"][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got["s"], want["s"][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overflow", ["eager", "split"])
@pytest.mark.parametrize("ownership", ["cloned", "borrowed", {"ring": 1}])
def test_ragged_requests_each_get_their_own_result(overflow: str, ownership: Any) -> None:
    manager = warm(overflow=overflow, outputs_are=ownership)
    for lengths in ([3], [1, 8, 5], [2, 7, 1, 8, 3, 3, 4, 8, 1]):
        requests = ragged(lengths)
        assert_each(manager.run_batch(requests), requests)


def test_run_batch_refuses_before_anything_runs() -> None:
    manager = warm(overflow="split")
    with pytest.raises(NoBucketError, match="tokens 9"):
        manager.run_batch(ragged([1, 2, 3, 4, 9]))
    stats = manager.stats()
    assert stats.outcomes == {"refused": 1} and not any(row.hits for row in stats.buckets)


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "the batch is empty"),
        ([{"x": torch.zeros(2, 3)}], "given x, expected x, n"),
        ([*ragged([2]), {"x": torch.zeros(2, 3), "n": torch.zeros(1, dtype=torch.int64)}], "n has the wrong rank"),
        ([{"x": torch.zeros(0, 3), "n": torch.tensor(1)}], "tokens is empty"),
        ([{"x": torch.zeros(2, 3), "n": torch.tensor(1.0)}], "n has the wrong dtype"),
    ],
    ids=["empty", "missing", "rank", "no tokens", "dtype"],
)
def test_run_batch_names_what_is_wrong(requests: list[dict[str, Tensor]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        warm().run_batch(requests)


def test_run_batch_needs_an_axis_that_leads_everything_and_is_nowhere_else() -> None:
    square = {"m": {"shape": ["batch", "batch"], "dtype": "float32"}}
    manager = BucketManager(
        lambda m: m, bucket_set(axes={"batch": [2]}, inputs=square, outputs={"y": {"shape": ["batch", "batch"]}})
    )
    manager.warmup()
    with pytest.raises(InputError, match="no axis that leads every input"):
        manager.run_batch([{"m": torch.zeros(1)}])


# -- failures cost one bucket ----------------------------------------------------------------------------------------


def test_a_function_that_raises_in_one_bucket_costs_that_bucket() -> None:
    def touchy(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        if x.shape[:2] == (2, 8):
            raise ValueError("no kernel for 2 by 8")
        return twice(x, n)

    manager = BucketManager(touchy, bucket_set())
    report = manager.warmup()
    assert [row.bucket for row in report.failed] == ["batch=2 tokens=8"]
    assert "ValueError: no kernel for 2 by 8 (in touchy, test_manager.py:" in str(report.failed[0].error)
    assert not report.ok and len(report.buckets) == 6
    assert_equal(manager(**call(2, 7)), call(2, 7))  # its sizes, unpadded: another shape than the one that fails
    assert_equal(manager(**call(2, 3)), call(2, 3))
    assert_equal(manager(**call(3, 8)), call(3, 8))
    stats = manager.stats()
    assert stats.outcomes == {"eager": 1, "replayed": 2} and stats.fallbacks == {"eager:bucket_failed": 1}
    assert {row.bucket: row.executable for row in stats.buckets if row.hits or row.bucket == "batch=2 tokens=8"} == {
        "batch=2 tokens=8": "eager", "batch=2 tokens=4": "eager", "batch=4 tokens=8": "eager"
    }  # fmt: skip


def mean_over_padding(x: Tensor, n: Tensor) -> dict[str, Tensor]:
    return {"y": x, "s": x.mean((1, 2))}


def norm_over_rows(x: Tensor, n: Tensor) -> dict[str, Tensor]:
    return {"y": x - x.mean(0), "s": n.float()}


def reads_the_tail(x: Tensor, n: Tensor) -> dict[str, Tensor]:
    return {"y": x, "s": x[:, -1, 0]}


@pytest.mark.parametrize("fn", [mean_over_padding, norm_over_rows, reads_the_tail])
def test_a_function_that_padding_changes_is_caught_and_runs_unpadded(fn: Callable[..., Any]) -> None:
    manager = BucketManager(fn, bucket_set())
    report = manager.warmup()
    assert report.failed and all("differs from unpadded eager" in str(row.error) for row in report.failed)
    for batch in range(1, 5):
        for tokens in (3, 5, 8):
            assert_equal(manager(**call(batch, tokens)), call(batch, tokens), fn)


def test_without_the_self_check_nothing_is_compared() -> None:
    report = BucketManager(mean_over_padding, bucket_set(warmup={"self_check": False})).warmup()
    assert report.ok and all(row.check is None for row in report.buckets)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            {"y": {"shape": ["batch", "tokens", 4]}, "s": {"shape": ["batch"]}},
            "output y has another shape than declared",
        ),
        ({"y": {"shape": ["batch", "tokens"]}, "s": {"shape": ["batch"]}}, "output y has another shape than declared"),
        ({"y": {"shape": ["batch", "tokens", 3]}, "t": {"shape": ["batch"]}}, "returns no tensor for output t"),
    ],
)
def test_outputs_declared_wrongly_are_named_by_every_bucket(outputs: dict[str, Any], says: str) -> None:
    report = BucketManager(twice, bucket_set(outputs=outputs)).warmup()
    assert len(report.failed) == 6 and all(says in str(row.error) for row in report.failed)


def test_equal_infinities_pass_the_self_check_and_nan_does_not() -> None:
    def masked(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        return {"y": x.masked_fill(x > 0, float("-inf")), "s": n.float()}

    assert BucketManager(masked, bucket_set()).warmup().ok

    def broken(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        return {"y": x / 0 * 0, "s": n.float()}

    report = BucketManager(broken, bucket_set()).warmup()
    assert len(report.failed) == 6 and "the function itself holds NaN" in str(report.failed[0].error)


# -- lazy sets, families, ownership, threads -------------------------------------------------------------------------


def test_a_lazy_set_captures_what_is_called_and_nothing_else() -> None:
    manager = BucketManager(twice, bucket_set(warmup={"lazy": True}, outputs_are={"ring": 2}))
    first = manager(**call(2, 3))
    assert [str(bucket) for bucket in manager.captured] == ["batch=2 tokens=4"]
    second = manager(**call(4, 8))  # its capture and self-check take no turn of the ring
    assert_equal(first, call(2, 3))
    assert_equal(second, call(4, 8))
    assert len(manager.captured) == 2
    kinds = {row.bucket: row.executable for row in manager.stats().buckets}
    assert kinds["batch=2 tokens=4"] == "eager" and kinds["batch=1 tokens=4"] == "none"


def test_a_ring_of_n_outlives_n_minus_1_calls_of_whatever_buckets() -> None:
    manager = warm(outputs_are={"ring": 3})
    held = [manager(**call(batch, 5, batch)) for batch in (4, 1, 3)]
    for batch, result in zip((4, 1, 3), held, strict=True):
        assert_equal(result, call(batch, 5, batch))


def test_cloned_outputs_outlive_later_calls_and_borrowed_ones_are_static() -> None:
    manager = warm(lambda x, n: (x, n.float()))
    first = manager(**call(3, 5))
    for seed in range(10):
        manager(**call(4, 8, seed))
    torch.testing.assert_close(first["y"], call(3, 5)["x"])
    borrowed = warm(lambda x, n: (x, n.float()), outputs_are="borrowed")
    pointers = {borrowed(**call(3, 5, seed))["y"].data_ptr() for seed in range(3)}
    assert len(pointers) == 1


def test_warming_up_again_keeps_serving_and_counts_memory_once() -> None:
    manager = warm()
    manager.family.mib = 3.0
    for captured in manager.captured.values():
        captured.mib = 0.5
    assert manager.warmup().ok and manager.family.mib == pytest.approx(0.0)
    assert_equal(manager(**call(3, 3)), call(3, 3))


def test_threads_share_one_manager() -> None:
    manager = warm(overflow="split")
    asked = [
        (batch, tokens, seed) for seed, (batch, tokens) in enumerate((b, t) for b in (1, 3, 4, 6) for t in (1, 4, 5, 8))
    ]
    answers = [twice(**call(*sizes)) for sizes in asked]

    def work(worker: int) -> int:
        for step in range(200):
            index = (worker * 7 + step) % len(asked)
            got = manager(**call(*asked[index]))
            for name, want in answers[index].items():
                torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5)
        return 200

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 1600
    stats = manager.stats()
    assert stats.calls == sum(stats.outcomes.values()) == 1600


def test_static_inputs_never_grow_over_thousands_of_calls() -> None:
    """A function that adds in place to its static input sees fresh padding in every call."""

    def greedy(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        x += 1
        return {"y": x, "s": n.float()}

    manager = warm(greedy, warmup={"self_check": False})
    for _ in range(2000):
        got = manager(x=torch.zeros(1, 3, 3), n=torch.ones(1, dtype=torch.int64))
    assert got["y"].unique().tolist() == [1.0]
    bucket = next(b for b in manager.captured if str(b) == "batch=1 tokens=4")
    assert manager.captured[bucket].inputs.views["x"].unique().tolist() == [1.0]


# -- compiled --------------------------------------------------------------------------------------------------------


def test_compiled_serves_more_buckets_than_dynamo_recompiles_by_default() -> None:
    sizes = list(range(1, 13))
    made = bucket_set(
        executable="compiled",
        axes={"batch": sizes},
        inputs={"x": {"shape": ["batch", 4], "dtype": "float32"}},
        outputs={"y": {"shape": ["batch", 4]}},
    )
    weight, ran_as_python = torch.randn(4, 4), []

    def product(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            ran_as_python.append(len(x))
        return x @ weight  # one library call: nothing for a C++ compiler to do

    manager = BucketManager(product, made)
    report = manager.warmup()
    assert report.ok, report.failed
    ran_as_python.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):  # served by what warm-up compiled
        for batch in (1, 5, 12, 8, 9, 12, 2):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(manager(x=x)["y"], x @ weight)
        with torch.inference_mode():
            torch.testing.assert_close(manager(x=torch.ones(3, 4))["y"], torch.ones(3, 4) @ weight)
    assert manager.stats().outcomes == {"replayed": 8}
    assert not ran_as_python, "past its limit Dynamo runs eagerly without a word"
