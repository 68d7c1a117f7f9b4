"""After each fill every byte of a static buffer is what its rule says; outputs are overwritten only as promised."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from null.graph_double import StagedArena  # noqa: E402

from bucketgraph.buckets import Bucket  # noqa: E402
from bucketgraph.config import InputSpec, OutputSpec, Ring  # noqa: E402
from bucketgraph.errors import ConfigError, InputError  # noqa: E402
from bucketgraph.slots import Arena, InputCheck, Outputs, Slot, StaticInputs, check_inputs, pack, unpad  # noqa: E402

CPU = torch.device("cpu")
DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


def slot(name: str, shape: Sequence[str | int], dtype: str = "float32", pad: Any = "zero") -> Slot:
    return Slot.from_spec(name, InputSpec.model_validate({"shape": list(shape), "dtype": dtype, "pad": pad}))


def bucket(**sizes: int) -> Bucket:
    return Bucket(tuple(sizes), tuple(sizes.values()))


def padded(source: np.ndarray[Any, Any], shape: tuple[int, ...], pad: float | None) -> np.ndarray[Any, Any]:
    """The naive model: a value everywhere, or the last real element in each direction."""
    if pad is None:
        return np.pad(source, [(0, big - small) for big, small in zip(shape, source.shape, strict=True)], mode="edge")
    whole = np.full(shape, pad, dtype=source.dtype)
    whole[tuple(slice(0, size) for size in source.shape)] = source
    return whole


@settings(max_examples=150)
@given(
    rank=st.integers(1, 3),
    data=st.data(),
    dtype=st.sampled_from(["float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]),
    rule=st.sampled_from(["zero", "repeat_last", "skip", "value"]),
    strided=st.booleans(),
)
def test_fill_writes_every_element_by_its_rule_whatever_lay_there(
    rank: int, data: st.DataObject, dtype: str, rule: str, strided: bool
) -> None:
    names = ("batch", "tokens", "pages")[:rank]
    full = tuple(data.draw(st.integers(1, 5)) for _ in names)
    real = tuple(data.draw(st.integers(1, size)) for size in full)
    if rule == "skip" and dtype not in ("int64", "int32", "int16", "int8"):
        rule = "zero"
    value = 1 if dtype == "bool" else 7
    one = slot("x", names, dtype, value if rule == "value" else rule)
    two = slot("y", [names[0]], "float32", "repeat_last")  # a neighbour, so that one slot's tail is not another's
    space = bucket(**dict(zip(names, full, strict=True)))
    arena = Arena([one, two], [space], CPU)
    static = StaticInputs([one, two], space, arena)
    arena.device_bytes.fill_(0xFF)  # NaN for floats, -1 for integers
    source = torch.randint(0, 2 if dtype == "bool" else 100, real[::-1] if strided else real).to(one.dtype)
    source = source.permute(*reversed(range(rank))) if strided else source
    static.fill({"x": source, "y": torch.arange(real[0], dtype=torch.float32)})
    pad = {"zero": 0.0, "skip": -1.0, "value": float(value), "repeat_last": None}[rule]
    assert np.array_equal(static.views["x"].numpy(), padded(source.numpy(), full, pad))
    assert np.array_equal(static.views["y"].numpy(), padded(np.arange(real[0], dtype=np.float32), full[:1], None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_of_an_earlier_larger_call_is_gone(dtype: str) -> None:
    one, space = slot("x", ["batch", 2], dtype), bucket(batch=4)
    arena = Arena([one], [space], CPU)
    static = StaticInputs([one], space, arena)
    floating = one.dtype.is_floating_point
    static.fill({"x": torch.full((4, 2), float("nan") if floating else 1).to(one.dtype)})
    static.fill({"x": torch.ones(1, 2).to(one.dtype)})
    assert static.views["x"].float().tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_large_buckets_leave_nothing_in_small_ones() -> None:
    slots = [slot("x", ["batch", "tokens"]), slot("n", ["batch"], "int32", "skip")]
    large, small = bucket(batch=8, tokens=16), bucket(batch=2, tokens=4)
    arena = Arena(slots, [large, small], CPU)
    a, b = (StaticInputs(slots, space, arena) for space in (large, small))
    a.fill({"x": torch.full((8, 16), float("nan")), "n": torch.full((8,), 99, dtype=torch.int32)})
    b.fill({"x": torch.ones(1, 3), "n": torch.tensor([5], dtype=torch.int32)})
    assert b.views["x"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]] and b.views["n"].tolist() == [5, -1]


def test_slots_do_not_overlap_and_are_aligned() -> None:
    slots = [slot("a", [3], "int8"), slot("b", ["batch"], "float64"), slot("c", ["batch", 5], "int16")]
    arena = Arena(slots, [bucket(batch=7), bucket(batch=1)], CPU)
    for space in (bucket(batch=7), bucket(batch=1)):
        spans = list(StaticInputs(slots, space, arena).spans.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start % 256 == 0 for start, _ in spans) and spans[-1][1] <= arena.device_bytes.numel()


def staged_arena(slots: list[Slot], buckets: list[Bucket], copies: int = 2) -> StagedArena:
    """Staging as on a GPU, with what would be pinned memory and events replaced: the arithmetic is the same."""
    return StagedArena(slots, buckets, CPU, copies, 0xFF)


class Behind:
    """An event: what it is recorded behind is done once somebody waited for it."""

    def __init__(self, calls: list[int], done: list[int]) -> None:
        self.calls, self.done, self.behind = calls, done, 0

    def record(self, stream: object) -> None:
        self.behind = len(self.calls)

    def synchronize(self) -> None:
        self.done.append(self.behind)


@pytest.mark.parametrize("copies", [2, 8])
def test_a_staging_buffer_comes_up_again_only_behind_the_calls_of_its_last_time(copies: int) -> None:
    arena = staged_arena([slot("a", ["n"])], [bucket(n=4)], copies)
    calls: list[int] = []  # the buffer of each
    done = [0]
    arena._copied = Behind(calls, done), Behind(calls, done)  # type: ignore[assignment]
    for _ in range(50):
        turn = arena.next_staging()
        assert turn not in calls[max(done) :]
        calls.append(turn)
    assert set(calls) == set(range(copies)) and len(done) == 1 + 100 // copies


def test_padding_in_staging_is_written_whenever_it_is_not_there() -> None:
    """Random turns of two buckets that share it, with and without the same sizes as last time."""
    slots = [slot("a", ["n", 2]), slot("b", ["n"], "int32", "skip"), slot("c", ["n"], "bfloat16", "repeat_last")]
    spaces = [bucket(n=4), bucket(n=9)]
    arena = staged_arena(slots, spaces)
    statics = [StaticInputs(slots, space, arena) for space in spaces]
    generator = torch.Generator().manual_seed(0)
    for turn in range(300):
        which = int(torch.randint(2, (), generator=generator))
        n, full = int(torch.randint(1, 5, (), generator=generator)), spaces[which].sizes[0]
        if turn % 50 == 49:
            arena.poison(0xFF)
        a, b, c = torch.randn(n, 2), torch.arange(n, dtype=torch.int32), torch.randn(n).bfloat16()
        arena.device_bytes.fill_(0xFF)
        statics[which].fill({"a": a, "b": b, "c": c})
        views = statics[which].views
        assert torch.equal(views["a"], torch.cat([a, torch.zeros(full - n, 2)]))
        assert views["b"].tolist() == [*range(n), *[-1] * (full - n)]
        assert torch.equal(views["c"], torch.cat([c, c[-1:].expand(full - n)]))


def test_host_inputs_go_through_staging_in_merged_copies_and_staging_is_reset_too() -> None:
    slots = [slot("a", ["batch"]), slot("b", ["batch"]), slot("c", ["batch"])]
    space = bucket(batch=4)
    arena = staged_arena(slots, [space])
    static = StaticInputs(slots, space, arena)
    arena.device_bytes.fill_(0xFF)
    assert static._runs(()) == [(0, 512 + 16)]
    assert static._runs(("b",)) == [(0, 16), (512, 528)]
    for step in range(5):
        static.fill({name: torch.full((1 + step % 3,), float(step)) for name in "abc"})
        for name in "abc":
            assert static.views[name].tolist() == [float(step)] * (1 + step % 3) + [0.0] * (3 - step % 3)


# -- inputs on the device: the same path, with CPU tensors that are said to lie there ----------------------------------


def on_device(static: StaticInputs, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(static, "_there", lambda layout: tuple([name for name in static.views if name in names]))
    static._known.clear()  # layouts say where tensors lie, and these lie elsewhere now


class Operations(TorchDispatchMode):
    """Names of the operations that wrote something."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.writes.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_device_inputs_and_their_padding_are_one_operation_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = ["float32"] * 8 + ["bfloat16", "int64"]
    slots = [slot(f"x{number}", ["n", 3], dtype, 7) for number, dtype in enumerate(dtypes)]
    space = bucket(n=6)
    static = StaticInputs(slots, space, staged_arena(slots, [space]))
    on_device(static, monkeypatch, *static.views)
    for n in (4, 4, 6, 6, 4, 6):
        static._arena.device_bytes.fill_(0xFF)
        inputs = {one.name: torch.randn(n, 3).to(one.dtype) for one in slots}
        with Operations() as seen:
            static.fill(inputs)
        for name, view in static.views.items():
            assert torch.equal(view[:n], inputs[name]) and (view[n:] == 7).all()
    assert seen.writes == ["_foreach_copy_.default"] * 3


def test_what_lies_in_the_slots_is_copied_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, space = [slot(name, ["n"]) for name in "ab"], bucket(n=4)
    static = StaticInputs(slots, space, staged_arena(slots, [space]))
    on_device(static, monkeypatch, "a", "b")
    a, b = static.views["a"], static.views["b"]
    for _ in range(4):
        a.copy_(torch.arange(4.0))
        b.fill_(9.0)
        static.fill({"a": b, "b": a})  # `a` is written first
        assert a.tolist() == b.tolist() == [9.0] * 4
        static.fill({"a": a, "b": torch.arange(3.0)})
        assert a.tolist() == [9.0] * 4 and b.tolist() == [0.0, 1.0, 2.0, 0.0]
        with pytest.raises(RuntimeError, match="single memory location"):
            static.fill({"a": a[1:], "b": torch.zeros(3)})  # overlaps in part: refused, as ever


def test_inputs_on_both_sides_any_layout_and_bound_ones_fill_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"a": "zero", "b": 3, "c": "repeat_last", "d": 1}
    slots = [slot(name, ["n", "m"], "float16" if name == "b" else "float32", rule) for name, rule in rules.items()]
    space = bucket(n=3, m=4)
    static = StaticInputs(slots, space, staged_arena(slots, [space]))
    generator = random.Random(0)
    for _ in range(400):
        real = generator.randint(1, 3), generator.randint(1, 4)
        inputs = {one.name: torch.randn(real[::-1]).t().to(one.dtype) for one in slots}
        inputs = {name: t if generator.random() < 0.3 else t.contiguous() for name, t in inputs.items()}
        there = [name for name in rules if generator.random() < 0.6]
        bound = {name: 0 for name in there if generator.random() < 0.2}
        on_device(static, monkeypatch, *there)
        static._arena.device_bytes.fill_(0xFF)
        static.fill(inputs, bound)
        for one in slots:
            want = padded(inputs[one.name].numpy(), (3, 4), one.pad)
            if one.name in bound:
                assert static.views[one.name].isnan().all(), "left alone"
            else:
                assert np.array_equal(static.views[one.name].numpy(), want)


@pytest.mark.parametrize("there", ["", "x"])
def test_slots_take_no_gradients_over(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, space = slot("x", ["n"]), bucket(n=3)
    static = StaticInputs([one], space, staged_arena([one], [space]))
    on_device(static, monkeypatch, there)
    for _ in range(6):
        static.fill({"x": torch.ones(2, requires_grad=True)})
        assert static.views["x"].tolist() == [1.0, 1.0, 0.0] and not static.views["x"].requires_grad
        assert not any(buffer.requires_grad for buffer in static._arena.staging)


def test_static_memory_is_given_back_without_the_garbage_collector() -> None:
    slots, space = [slot("a", ["n"]), slot("b", ["n"])], bucket(n=4)
    arena = staged_arena(slots, [space])
    static = StaticInputs(slots, space, arena)
    static._there = lambda layout: ("b",)  # type: ignore[method-assign]
    for _ in range(6):
        static.fill({"a": torch.ones(3), "b": torch.ones(2)})
    held = weakref.ref(arena)
    collects = gc.isenabled()
    gc.disable()
    try:
        del arena, static
        assert held() is None
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "bool", "uint8", "int64"])
@pytest.mark.parametrize("pad", ["zero", 1, "repeat_last"])
def test_host_memory_is_written_in_every_dtype_and_from_any_layout(dtype: str, pad: Any) -> None:
    one = slot("x", ["n", 3], dtype, pad if dtype != "bool" or pad != 1 else "zero")
    space = bucket(n=5)
    static = StaticInputs([one], space, Arena([one], [space], CPU))
    wide = (torch.arange(12).view(3, 4) % 5).to(one.dtype)
    for source in (wide[:, 1:], wide.t()[:3], wide[:2, :3], wide[:1, :3]):  # strided, transposed, and shorter
        static._arena.poison(0xFF)
        static.fill({"x": source})
        last = source[-1:] if one.pad is None else torch.full((1, 3), one.pad, dtype=one.dtype)
        want = torch.cat([source, last.expand(5 - len(source), 3)])
        assert torch.equal(static.views["x"], want)


def test_a_tensor_that_requires_grad_is_copied_like_any_other() -> None:
    one, space = slot("x", ["n"]), bucket(n=3)
    static = StaticInputs([one], space, Arena([one], [space], CPU))
    static.fill({"x": torch.tensor([1.0, 2.0], requires_grad=True)})
    assert static.views["x"].tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("pad", "dtype", "expected"),
    [
        ("zero", "int64", 0),
        ("skip", "int64", -1),
        (2**62 + 1, "int64", 2**62 + 1),
        (10**30, "float32", 1e30),
        (0.5, "float32", 0.5),
    ],
)
def test_a_pad_value_arrives_exactly(pad: Any, dtype: str, expected: float) -> None:
    one, space = slot("x", ["n"], dtype, pad), bucket(n=2)
    static = StaticInputs([one], space, Arena([one], [space], CPU))
    static.fill({"x": torch.zeros(1, dtype=one.dtype)})
    assert static.views["x"][1].item() == torch.tensor(expected, dtype=one.dtype).item()


# -- check_inputs ----------------------------------------------------------------------------------------------------

SLOTS = [slot("ids", ["batch", "tokens"], "int64"), slot("scale", ["batch", 3]), slot("n", ["batch"], "int32")]


def inputs(**changed: Any) -> dict[str, Any]:
    good = {"ids": torch.zeros(2, 5, dtype=torch.int64), "scale": torch.zeros(2, 3), "n": torch.zeros(2).int()}
    return {name: value for name, value in {**good, **changed}.items() if value is not None}


def test_sizes_are_read_from_the_tensors() -> None:
    assert check_inputs(SLOTS, inputs(), CPU) == {"batch": 2, "tokens": 5}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"n": None}, "given ids, scale, expected ids, scale, n"),
        ({"mask": torch.zeros(2)}, "given ids, scale, n, mask, expected ids, scale, n"),
        ({"n": None, "m": torch.zeros(2).int()}, "given ids, scale, m, expected ids, scale, n"),
        ({"n": [0, 0]}, "n is not a tensor: given list"),
        ({"n": np.zeros(2, dtype=np.int32)}, "n is not a tensor: given ndarray"),
        ({"ids": torch.zeros(2, 5)}, "ids has the wrong dtype: given torch.float32, expected torch.int64"),
        (
            {"ids": torch.zeros(2, dtype=torch.int64)},
            r"ids has the wrong rank: given \[2\], expected \[batch, tokens\]",
        ),
        ({"scale": torch.zeros(2, 4)}, r"scale has the wrong shape: given \[2, 4\]"),
        ({"scale": torch.zeros(3, 3)}, "tensors disagree about batch: given 2 in ids, 3 in scale"),
        ({"n": torch.zeros(1).int()}, "tensors disagree about batch: given 2 in ids, 1 in n"),
        ({"scale": torch.zeros(2, 3, device="meta")}, "scale is on another device: given meta, expected cpu"),
        ({"ids": torch.zeros(2, 0, dtype=torch.int64)}, "tokens is empty: given ids of size 0"),
    ],
)
def test_a_wrong_call_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_inputs(SLOTS, inputs(**changed), CPU)
    remembers = InputCheck(SLOTS, CPU)
    for _ in range(2):
        assert remembers(inputs())[0] == {"batch": 2, "tokens": 5}
    with pytest.raises(InputError, match=says):
        remembers(inputs(**changed))


def test_an_empty_batch_is_named() -> None:
    empty = {"ids": torch.zeros(0, 5, dtype=torch.int64), "scale": torch.zeros(0, 3), "n": torch.zeros(0).int()}
    with pytest.raises(InputError, match="batch is empty"):
        check_inputs(SLOTS, empty, CPU)


# -- outputs ---------------------------------------------------------------------------------------------------------


def outputs(kind: Literal["cloned", "borrowed"] | Ring) -> Outputs:
    return Outputs({"y": OutputSpec(shape=("batch", "any"))}, kind)


def test_cloned_outputs_survive_and_are_contiguous() -> None:
    static, out = torch.zeros(4, 3), outputs("cloned")
    kept = []
    for step in range(5):
        static.fill_(step)
        kept.append(out.read({"y": static}, {"batch": 2})["y"])
    assert [t.unique().tolist() for t in kept] == [[0], [1], [2], [3], [4]]
    assert all(t.is_contiguous() and t.shape == (2, 3) for t in kept)


def test_a_ring_of_n_keeps_a_result_for_n_minus_1_later_calls_and_then_reuses_it() -> None:
    static, out = torch.zeros(4, 3), outputs(Ring(ring=3))
    kept = []
    for step in range(4):
        static.fill_(step)
        kept.append(out.read({"y": static}, {"batch": 4})["y"])
        recent = kept[-3:]
        assert [int(t[0, 0]) for t in recent] == list(range(max(0, step - 2), step + 1))
    assert kept[3].data_ptr() == kept[0].data_ptr()


def test_a_ring_buffer_that_is_too_small_is_replaced_not_shared_with_its_holder() -> None:
    out = outputs(Ring(ring=1))
    small = out.read({"y": torch.zeros(4, 3)}, {"batch": 1})["y"]
    large = out.read({"y": torch.ones(4, 3)}, {"batch": 4})["y"]
    assert small.tolist() == [[0, 0, 0]] and large.shape == (4, 3) and small.data_ptr() != large.data_ptr()


def test_keep_takes_no_turn_of_a_ring() -> None:
    out = outputs(Ring(ring=1))
    held = out.read({"y": torch.zeros(4, 3)}, {"batch": 4})["y"]
    other = out.read({"y": torch.ones(4, 3)}, {"batch": 4}, keep=True)["y"]
    assert held.sum() == 0 and other.data_ptr() != held.data_ptr()


def test_borrowed_outputs_are_the_static_memory() -> None:
    static = torch.zeros(4, 3)
    assert outputs("borrowed").read({"y": static}, {"batch": 2})["y"].data_ptr() == static.data_ptr()


@pytest.mark.parametrize(
    "raw",
    [
        {"a": torch.zeros(1), "b": torch.ones(1), "more": 3},
        (torch.zeros(1), torch.ones(1)),
        [torch.zeros(1), torch.ones(1), None],
        SimpleNamespace(a=torch.zeros(1), b=torch.ones(1)),
    ],
    ids=["mapping", "tuple", "longer list", "object"],
)
def test_outputs_are_found_by_name_or_by_place(raw: object) -> None:
    found = Outputs({"a": OutputSpec(shape=(1,)), "b": OutputSpec(shape=(1,))}, "cloned").select(raw)
    assert [found[name].item() for name in ("a", "b")] == [0, 1]


@pytest.mark.parametrize(
    "raw", [torch.zeros(2, 1), {"a": torch.zeros(1)}, (torch.zeros(1),), (torch.zeros(1), None), None, 7, "ab"]
)
def test_a_result_without_a_declared_output_is_named(raw: object) -> None:
    both = Outputs({"a": OutputSpec(shape=(1,)), "b": OutputSpec(shape=(1,))}, "cloned")
    with pytest.raises(ConfigError, match=f"returns no tensor for output [ab]: given {type(raw).__name__}"):
        both.select(raw)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 1), (2,)])
def test_an_output_of_another_shape_than_declared_is_named(shape: tuple[int, ...]) -> None:
    out = Outputs({"y": OutputSpec(shape=("batch", 4))}, "cloned")
    out.check({"y": torch.zeros(2, 4)}, bucket(batch=2))
    with pytest.raises(ConfigError, match="output y has another shape than declared"):
        out.check({"y": torch.zeros(shape)}, bucket(batch=2))


def test_unpad_cuts_axes_only() -> None:
    whole = torch.arange(24).view(4, 6)
    assert unpad(whole, ("batch", "any"), {"batch": 2}).shape == (2, 6)
    assert unpad(whole, ("batch", "tokens"), {"batch": 4, "tokens": 3}).tolist() == whole[:, :3].tolist()
    assert unpad(whole, (4, 6), {}) is whole


# -- pack ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=5))
def test_pack_pads_each_request_by_its_rule_to_the_longest(shapes: list[tuple[int, int]]) -> None:
    slots = [slot("ids", ["tokens", "heads"], "int64", "skip"), slot("end", ["tokens"], "int64", "repeat_last")]
    slots.append(slot("k", [2]))
    asked: list[dict[str, Tensor]] = [
        {"ids": torch.randint(0, 9, shape), "end": torch.arange(shape[0]), "k": torch.full((2,), float(row))}
        for row, shape in enumerate(shapes)
    ]
    batch = pack(slots, asked, [{"tokens": n, "heads": h} for n, h in shapes])
    tokens, heads = (max(sizes) for sizes in zip(*shapes, strict=True))
    for row, request in enumerate(asked):
        assert np.array_equal(batch["ids"][row].numpy(), padded(request["ids"].numpy(), (tokens, heads), -1))
        assert np.array_equal(batch["end"][row].numpy(), padded(request["end"].numpy(), (tokens,), None))
        assert batch["k"][row].tolist() == [row, row]
