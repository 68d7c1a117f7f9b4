"""Joint copies write what single ones do, bit by bit, whatever the dtype, the layout and the padding."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from bucketgraph.copies import SMALL, DeviceCopies, HostCopies, Padding, Prepared
from bucketgraph.executables.family import CurrentStream, Family
from bucketgraph.layouts import Layouts
from bucketgraph.slots import Slot, _write

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def a_slot(chosen: random.Random, number: int) -> tuple[Slot, tuple[int, ...]]:
    dtype = chosen.choice(DTYPES)
    pads = (None, 0, 1) if dtype in (torch.bool, torch.uint8) else (None, 0, -1, 7)
    shape = tuple(chosen.choice((1, 2, 5, 8)) for _ in range(chosen.randint(1, 3)))
    if chosen.random() < 0.05:
        shape = (SMALL // 2, 3)
    pad = chosen.choice(pads)
    return Slot(f"s{number}", shape, dtype, float(pad) if pad is not None and dtype.is_floating_point else pad), shape


def a_source(chosen: random.Random, slot: Slot, shape: tuple[int, ...]) -> Tensor:
    real = tuple(chosen.randint(1, size) for size in shape)
    bits = torch.randint(0, 256, (*real[:-1], 2 * real[-1] * slot.dtype.itemsize), dtype=torch.uint8)
    wide = bits % 2 == 1 if slot.dtype == torch.bool else bits.view(slot.dtype)  # NaN payloads, too
    return wide[..., ::2] if chosen.random() < 0.3 else wide[..., : real[-1]].clone()


@pytest.mark.parametrize("seed", range(40))
def test_joint_copies_equal_single_ones_bit_by_bit(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    made = [a_slot(chosen, number) for number in range(chosen.randint(1, 6))]
    slots = [slot for slot, _ in made]
    sources = [a_source(chosen, slot, shape) for slot, shape in made]
    views, want = ([torch.zeros(shape, dtype=slot.dtype) for slot, shape in made] for _ in range(2))
    for slot, view, source in zip(slots, want, sources, strict=True):
        _write(view, source, slot.pad)
    padding = Padding(slots, max(view.nbytes for view in views), torch.device("cpu"))
    on_device = DeviceCopies(slots, views, [tuple(s.shape) for s in sources], [s.stride() for s in sources], padding)
    for _ in range(2):
        for view in views:
            view.view(torch.uint8).fill_(1)
        on_device.run(sources)
        for view, right in zip(views, want, strict=True):
            assert torch.equal(view.view(torch.uint8), right.view(torch.uint8))
    for view in views:
        view.view(torch.uint8).fill_(1)
    on_host = HostCopies(slots, views, [tuple(source.shape) for source in sources], padding)
    on_host.run(sources, padded=False)
    for place, (view, right) in enumerate(zip(views, want, strict=True)):
        if place not in on_host.rest:
            assert torch.equal(view.view(torch.uint8), right.view(torch.uint8))


def test_shapes_that_come_once_are_not_prepared() -> None:
    made: list[int] = []
    prepared = Prepared[int, int]()

    def make(key: int) -> int:
        made.append(key)
        return key

    assert [prepared.get(key, make) for key in (1, 2, 1, 1)] == [None, None, 1, 1] and made == [1]


def test_padding_of_minus_zero_is_not_zeros() -> None:
    slots = [Slot("a", (4,), torch.float32, pad) for pad in (0.0, -0.0)]
    padding = Padding(slots, 16, torch.device("cpu"))
    assert [padding.of(slot, (2,)).signbit().tolist() for slot in slots] == [[False] * 2, [True] * 2]


def test_a_device_is_asked_for_its_stream_object_only_when_the_stream_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles, asked = iter([0, 0, 7, 7, 0]), []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(handles), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (asked.append(device), f"stream {len(asked)}")[1])
    current = CurrentStream(torch.device("cuda", 3))
    found = [current() for _ in range(5)]
    assert found == [(0, "stream 1"), (0, "stream 1"), (7, "stream 2"), (7, "stream 2"), (0, "stream 3")]
    assert asked == [torch.device("cuda", 3)] * 3


class Clock:
    """Events and streams that write down what is asked of them."""

    def __init__(self, family: Family) -> None:
        self.said: list[str] = []
        self.at = 0
        family._read = self  # type: ignore[assignment]
        family._stream = lambda: (self.at, f"stream {self.at}")  # type: ignore[assignment, return-value]

    def record(self, stream: object) -> None:
        self.said.append(f"record on {stream}")

    def wait(self, stream: object) -> None:
        self.said.append(f"{stream} waits")

    def turn(self, family: Family, handle: int) -> list[str]:
        self.at, self.said = handle, []
        with family.turn():
            self.said.append("turn")
        return self.said


def test_the_default_stream_is_recorded_only_when_another_one_comes() -> None:
    family = Family(torch.device("cpu"))
    clock = Clock(family)
    assert [clock.turn(family, 0) for _ in range(3)] == [["turn"]] * 3
    assert clock.turn(family, 7) == ["record on stream 0", "stream 7 waits", "turn", "record on stream 7"]
    assert clock.turn(family, 7) == ["turn", "record on stream 7"]
    assert clock.turn(family, 0) == ["stream 0 waits", "turn", "record on stream 0"], "at once, from now on"
    assert clock.turn(family, 7) == ["stream 7 waits", "turn", "record on stream 7"]


def test_a_stream_that_may_go_away_is_recorded_at_once() -> None:
    family = Family(torch.device("cpu"))
    clock = Clock(family)
    assert clock.turn(family, 7) == ["turn", "record on stream 7"]
    assert clock.turn(family, 9) == ["stream 9 waits", "turn", "record on stream 9"]
    assert clock.turn(family, 0) == ["stream 0 waits", "turn", "record on stream 0"]


def test_a_failed_turn_is_waited_for_too() -> None:
    family = Family(torch.device("cpu"))
    clock = Clock(family)
    with pytest.raises(KeyError), family.turn():
        raise KeyError
    assert clock.turn(family, 7)[:2] == ["record on stream 0", "stream 7 waits"]
    with pytest.raises(KeyError), family.turn():
        raise KeyError
    assert clock.said[-1] == "record on stream 7"


class Sub(Tensor):
    pass


CHANGES = {
    "shape": lambda: torch.zeros(3, 3),
    "rank": lambda: torch.zeros(2, 3, 1),
    "strides": lambda: torch.zeros(3, 2).t(),
    "dtype": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "device": lambda: torch.zeros(2, 3, device="meta"),
    "type": lambda: torch.zeros(2, 3).as_subclass(Sub),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("calls", [1, 2, 3, 9])
def test_a_layout_is_known_again_and_another_one_is_not_taken_for_it(change: str, calls: int) -> None:
    layouts = Layouts()
    found = [layouts.of([torch.zeros(1), torch.rand(2, 3)]) for _ in range(calls)]
    assert len(set(found)) == 1 and found[0].shapes == ((1,), (2, 3)) and found[0].strides == ((1,), (3, 1))
    other = layouts.of([torch.zeros(1), CHANGES[change]()])
    assert other is not found[0] and other.plain == (change != "type")
    assert layouts.of([torch.zeros(1), CHANGES[change]()]) is other
    assert layouts.of([torch.zeros(1), torch.zeros(2, 3)]) is found[0]


def test_a_layout_is_the_same_in_every_mode_and_for_one_tensor_twice() -> None:
    layouts, tensor = Layouts(), torch.zeros(2)
    first = layouts.of([tensor, tensor])
    for _ in range(5):
        for given in ([tensor, tensor], [torch.ones(2), torch.ones(2, requires_grad=True)]):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    assert layouts.of(given) is first
            with torch.autocast("cpu"):
                assert layouts.of(given) is first


def test_layouts_that_take_turns_are_compared_in_c_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = Layouts()
    shapes = [(n, m) for n in (1, 2, 3) for m in (4, 5)]
    given = [[torch.zeros(n, m), torch.zeros(2), torch.zeros(m)] for n, m in shapes]
    found = [layouts.of(each) for _ in range(4) for each in given]
    assert len(set(found)) == 6 and found[:6] * 4 == found
    monkeypatch.setattr(layouts, "_known", {})
    assert [layouts.of(each) for each in given] == found[:6], "without their keys"
    between = [torch.zeros(3, 5), torch.zeros(3), torch.zeros(5)]
    assert layouts.of(between) not in found, "the ends are those of another one"


def test_a_layout_that_stays_is_compared_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few calls in a row, in whatever mode they are made."""
    layouts = Layouts()
    for mode in (torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            given = [torch.zeros(2), torch.zeros(3)]
            for _ in range(8):
                found = layouts.of(given)
            monkeypatch.setattr(layouts, "_known", {})
            assert layouts.of(given) is found, "without its key"
            monkeypatch.undo()


@pytest.mark.parametrize("bad", [3, None, [1.0], "text"])
def test_what_is_no_tensor_has_no_layout(bad: object) -> None:
    layouts = Layouts()
    for _ in range(3):
        layouts.of([torch.zeros(2)])
    with pytest.raises((AttributeError, TypeError)):
        layouts.of([bad])  # type: ignore[list-item]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_turn_sets_modes_and_sets_them_back(mode: type, fails: bool) -> None:
    family = Family(torch.device("cpu"))
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        try:
            with family.turn():
                assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
                with family.turn():
                    pass
                assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert family.lock.acquire(blocking=False)
    family.lock.release()


def test_a_turn_of_a_broken_family_leaves_nothing_behind() -> None:
    family = Family(torch.device("cpu"))
    family.broken = "gone"
    with pytest.raises(Exception, match="broken"), family.turn():
        pass
    assert torch.is_grad_enabled()
