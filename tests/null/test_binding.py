"""Bound tensors: what is proved is used where it lies, what is not is copied with its reason, and bits never differ."""

from __future__ import annotations

import itertools
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from null.graph_double import Device, StagedArena, graphs_on
from torch import Tensor, nn

from bucketgraph import binding
from bucketgraph.binding import prepare
from bucketgraph.binding.calls import OwnMemory
from bucketgraph.config import BucketSet, parse, schema
from bucketgraph.cuda.bindings import Bindings
from bucketgraph.cuda.driver import KernelAttributes
from bucketgraph.errors import ConfigError, InputError, StaleError
from bucketgraph.manager import BucketManager

WIDTH = 8


def bucket_set(bind: str = "patch", **changed: Any) -> BucketSet:
    base: dict[str, Any] = {
        "version": 1,
        "name": "bound",
        "axes": {"batch": [2, 4]},
        "inputs": {
            "x": {"shape": ["batch", WIDTH], "dtype": "float32", "bind": bind},
            "z": {"shape": ["batch", WIDTH], "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["batch", WIDTH]}},
    }
    return parse({**base, **changed})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    graphs_on(made, monkeypatch)
    return made


class Model(nn.Module):
    """y = (x + z) + w, through a temporary."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.w = nn.Parameter(aligned(4, WIDTH))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        between, y = self.device.empty(*x.shape), self.device.empty(*x.shape)
        self.device.launch(self.device.add, x, z, between)
        self.device.launch(self.device.add, between, self.w, y)
        return y


def served(device: Device, made: BucketSet | None = None, fn: Any = None, **options: Any) -> BucketManager:
    manager = BucketManager(fn or Model(device).eval(), made or bucket_set(), device="cpu", **options)
    report = manager.warmup()
    assert report.ok, report.failed
    device.lock = manager.family.lock
    return manager


def aligned(*shape: int, shift: int = 0) -> Tensor:
    """Memory at a multiple of 64 bytes, plus `shift` floats."""
    size = torch.Size(shape).numel()
    flat = torch.randn(size + 32)
    start = (-flat.data_ptr() % 64) // 4 + shift
    return flat[start : start + size].view(shape)


def right(manager: BucketManager, x: Tensor, z: Tensor) -> Tensor:
    return x + z + manager.fn.w.detach()[: len(x)]  # type: ignore[operator, union-attr, index]


def counts(manager: BucketManager, batch: int) -> dict[str, int]:
    plan = manager.plan(batch=batch)
    assert plan.bucket is not None
    bound = manager.captured[plan.bucket].binding
    assert bound is not None
    return dict(bound._bound["x"].counts)


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_a_graph_reads_the_callers_tensor_where_it_lies(device: Device) -> None:
    manager = served(device)
    slot = manager.captured[manager.lattice.buckets[-1]].inputs.views["x"]
    for _ in range(3):
        x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
        slot.fill_(float("nan"))
        assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert slot.isnan().all(), "nothing was copied"
    assert counts(manager, 4) == {"": 3}


def test_only_nodes_whose_bytes_change_are_set(device: Device) -> None:
    manager = served(device)
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    manager(x=x, z=z)
    device.driver.sets.clear()
    manager(x=x, z=z)
    assert device.driver.sets == []
    manager(x=aligned(4, WIDTH), z=z)
    assert len(device.driver.sets) == 1, "one node of two reads x"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: aligned(3, WIDTH), "it needs padding"),
        (lambda: aligned(4, WIDTH, shift=1), "its address is not a multiple of 16 bytes"),
        (lambda: aligned(4, 2 * WIDTH)[:, ::2], "it is laid out otherwise, with strides (16, 2)"),
    ],
)
def test_what_cannot_be_bound_at_a_call_is_copied_and_counted(device: Device, make: Any, reason: str) -> None:
    manager = served(device)
    bound = aligned(4, WIDTH)
    manager(x=bound, z=torch.randn(4, WIDTH))
    x = make()
    z = torch.randn(len(x), WIDTH)
    for _ in range(2):
        assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert counts(manager, 4) == {"": 1, reason: 2}
    assert any(line.strip() == f"2 calls: {reason}" for line in manager.explain()), manager.explain()


OVERWRITTEN = "it lies in memory of the graphs or of the function, which a launch may overwrite"


def test_memory_that_a_launch_overwrites_is_copied(device: Device) -> None:
    """A slot as an input: bound, the graph would read what this call fills it with."""
    manager = served(device)
    captured = manager.captured[manager.lattice.buckets[-1]]
    x, z = captured.inputs.views["z"], torch.randn(4, WIDTH)
    want = right(manager, x.clone(), z)
    assert torch.equal(manager(x=x, z=z)["y"], want)
    assert counts(manager, 4) == {OVERWRITTEN: 1}
    own = OwnMemory.of(manager.family, captured.inputs.arena_bytes)
    assert own.holds(captured.inputs.arena_bytes[3:9]) and not own.holds(torch.zeros(4))


def test_an_input_in_the_functions_own_state_is_copied(device: Device) -> None:
    """A copied input is read before the launch; bound, it would be read while the function writes."""
    manager = served(device)
    x = manager.fn.w.detach()  # type: ignore[union-attr]
    z = torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert counts(manager, 4) == {OVERWRITTEN: 1}
    bound = aligned(4, WIDTH)
    manager(x=bound, z=z)
    assert counts(manager, 4) == {OVERWRITTEN: 1, "": 1}
    manager.rebind({"w": bound})
    for now in (bound, x):
        assert torch.equal(manager(x=now, z=z)["y"], right(manager, now, z))
    assert counts(manager, 4) == {OVERWRITTEN: 1, "": 1}, "counted anew: the memory that w left is the caller's"


def test_a_copied_call_after_a_bound_one_does_not_read_the_bound_memory(device: Device) -> None:
    manager = served(device)
    z = torch.randn(4, WIDTH)
    x = aligned(4, WIDTH)
    manager(x=x, z=z)
    x.fill_(float("nan"))
    other = aligned(3, WIDTH)
    assert torch.equal(manager(x=other, z=z[:3])["y"], right(manager, other, z[:3]))


def test_random_calls_are_bitwise_right(device: Device) -> None:
    manager, chosen = served(device), random.Random(0)
    for _ in range(200):
        batch = chosen.randint(1, 4)
        x, z = aligned(batch, WIDTH, shift=chosen.choice([0, 0, 4, 1])), torch.randn(batch, WIDTH)
        assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert counts(manager, 4)[""] > 20


# -- what cannot be proved -------------------------------------------------------------------------------------------


def reason(manager: BucketManager, name: str = "x") -> str:
    for captured in manager.captured.values():
        found = binding.how(manager, captured)[name]
    assert any(found in line for line in manager.explain()), manager.explain()
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    manager(x=x, z=z)
    return found


@pytest.mark.parametrize(
    ("attributes", "text"),
    [(KernelAttributes(cluster=(2, 1, 1)), "clusters"), (KernelAttributes(cooperative=True), "cooperative")],
)
def test_a_node_that_cannot_be_updated_falls_to_copy(device: Device, attributes: KernelAttributes, text: str) -> None:
    device.attributes = attributes
    manager = served(device)
    found = reason(manager)
    assert found.startswith("copy: node 0 (_add)") and text in found
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))


class Hidden(Model):
    """y = x + *table: the table holds the address that x had at first."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        if self.device.recording:
            self.table = getattr(self, "table", torch.tensor([x.data_ptr()]))
            y = self.device.empty(*x.shape)
            self.device.launch(self.device.peek, x, self.table, y)
            return y
        return x + x


def test_an_address_in_device_memory_is_found_on_poison(device: Device) -> None:
    manager = served(device, bucket_set(axes={"batch": [4]}), Hidden(device).eval())
    assert "gave other results: the old memory is still used" in reason(manager)
    x = aligned(4, WIDTH)
    assert torch.equal(manager(x=x, z=x)["y"], x + x)


def test_an_input_that_the_function_writes_is_copied(device: Device) -> None:
    class Writes(Model):
        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            self.device.launch(self.device.add, x, z, x)
            return super().forward(x, z)

    manager = served(device, fn=Writes(device).eval(), made=bucket_set(warmup={"self_check": False}))
    assert "the function writes into it" in reason(manager)


def test_without_a_driver_all_is_copied_with_the_reason(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ConfigError("CUDA graphs as data need cuda-bindings")

    monkeypatch.setattr(binding.graph, "load_driver", missing)
    manager = BucketManager(Model(device).eval(), bucket_set(), device="cpu")
    report = manager.warmup()
    assert report.ok and report.buckets[0].bound == {"x": "copy: CUDA graphs as data need cuda-bindings"}
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert any("copy: CUDA graphs as data need cuda-bindings" in line for line in manager.explain())


@pytest.mark.parametrize("bind", ["patch", "auto"])
def test_without_graphs_the_reason_is_the_executable(bind: str) -> None:
    made = bucket_set(bind, executable="eager", io="in_graph")
    manager = BucketManager(lambda x, z: x + z, made, device="cpu")
    report = manager.warmup()
    text = "the executable is eager, which has no graph to be patched"
    assert report.buckets[0].bound == {"x": f"copy: {text}", "io": f"staged: {text}"}
    assert any(f"x: copy: {text}" in line for line in manager.explain())
    x = torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=x)["y"], x + x)


def test_an_update_that_the_driver_refuses_at_a_call_is_copied_from_then_on(device: Device) -> None:
    manager = served(device)
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    failures = iter([1])
    device.driver.refuse = lambda executable, node: next(failures, 0)
    for _ in range(2):
        assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert "copy: cannot rebind x" in binding.how(manager, manager.captured[manager.lattice.buckets[-1]])["x"]


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [({"copy": 3.0, "patch": 1.0}, "patch"), ({"copy": 1.0, "patch": 3.0}, "copy: it was the faster when both were")],
)
def test_auto_takes_the_faster_and_says_both_times(
    device: Device, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], chosen: str
) -> None:
    spans = (span for _ in range(21) for way in ("copy", "patch") for span in (0.0, costs[way]))
    clock = itertools.accumulate(spans)
    monkeypatch.setattr(binding.trial, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    manager = served(device, bucket_set("auto", axes={"batch": [4]}))
    (captured,) = manager.captured.values()
    assert binding.how(manager, captured)["x"].startswith(chosen)
    assert any("(copy " in line and line.endswith(" us)") for line in manager.explain())
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))


# -- outputs ---------------------------------------------------------------------------------------------------------


def test_a_graph_writes_into_out_itself(device: Device) -> None:
    manager = served(device, bucket_set(outputs={"y": {"shape": ["batch", WIDTH], "bind": "patch"}}))
    x, z, y = aligned(4, WIDTH), torch.randn(4, WIDTH), aligned(4, WIDTH)
    got = manager(x=x, z=z, out={"y": y})["y"]
    assert got is y and torch.equal(y, right(manager, x, z))
    kept = y.clone()
    other = aligned(4, WIDTH)
    assert torch.equal(manager(x=other, z=z)["y"], right(manager, other, z))
    assert torch.equal(y, kept), "a later call leaves it alone"


@pytest.mark.parametrize("bind", ["copy", "patch"])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_out_is_filled_whether_or_not_it_is_bound(device: Device, bind: str, batch: int) -> None:
    manager = served(device, bucket_set(outputs={"y": {"shape": ["batch", WIDTH], "bind": bind}}))
    x, z, y = aligned(batch, WIDTH), torch.randn(batch, WIDTH), torch.empty(batch, WIDTH)
    assert manager(x=x, z=z, out={"y": y})["y"] is y
    assert torch.equal(y, right(manager, x, z))


def test_out_over_a_bound_input_is_right(device: Device) -> None:
    manager = served(device, bucket_set(outputs={"y": {"shape": ["batch", WIDTH], "bind": "patch"}}))
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    want = right(manager, x, z)
    manager(x=x, z=z, out={"y": x})
    assert torch.equal(x, want)


def test_out_that_does_not_fit_is_refused(device: Device) -> None:
    manager = served(device)
    x = torch.randn(4, WIDTH)
    with pytest.raises(InputError, match="out names no output: given q, expected y"):
        manager(x=x, z=x, out={"q": x})
    with pytest.raises(InputError, match=r"out\['y'\] has the wrong shape: given \[4, 9\], expected \[4, 8\]"):
        manager(x=x, z=x, out={"y": torch.empty(4, 9)})
    with pytest.raises(InputError, match=r"out\['y'\] does not fit: given \[4, 8\] torch.float64"):
        manager(x=x, z=x, out={"y": torch.empty(4, WIDTH, dtype=torch.float64)})
    with pytest.raises(InputError, match="out is no mapping"):
        manager(x=x, z=x, out=[x])  # type: ignore[arg-type]


# -- io: in_graph ----------------------------------------------------------------------------------------------------


def test_host_inputs_are_copied_by_the_graph_from_staging_buffers_in_turn(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_on(device, monkeypatch, staged=True)
    manager = served(device, bucket_set("copy", io="in_graph"))
    captured = manager.captured[manager.lattice.buckets[-1]]
    assert binding.how(manager, captured) == {"io": "in_graph"}
    arena = manager._arena
    assert isinstance(arena, StagedArena)
    monkeypatch.setattr(arena, "copy", lambda *args: pytest.fail("the graph copies"))
    held, before = [], arena._turn
    for event in arena.events:
        event.seen.clear()
    for batch in (4, 3, 4, 4):
        x, z = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
        assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
        held.append(arena._turn)
    assert [a != b for a, b in itertools.pairwise(held)] == [True] * 3
    # Behind the calls that used the other buffer, and before this one is written.
    assert arena.events[before].seen == ["record", "wait"] * 2
    assert arena.events[1 - before].seen == ["wait", "record"] * 2
    assert "    4 calls: copied by the graph" in manager.explain()


def test_bound_inputs_and_inputs_that_the_graph_copies_go_together(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_on(device, monkeypatch, staged=True)
    manager = served(device, bucket_set(io="in_graph"))
    found = binding.how(manager, manager.captured[manager.lattice.buckets[-1]])
    assert found == {"x": "patch", "io": "in_graph"}
    for shift in (0, 1, 0):
        x, z = aligned(4, WIDTH, shift=shift), torch.randn(4, WIDTH)
        assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    lines = manager.explain()
    assert "    2 calls: copied by the graph" in lines and "    1 calls: x is bound, but not in this call" in lines


def test_a_driver_that_cannot_pass_over_a_node_leaves_the_copies_outside(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_on(device, monkeypatch, staged=True)
    monkeypatch.setattr(binding.graph.MovableGraph, "_copy_inputs", _refuse)
    manager = served(device, bucket_set(io="in_graph"))
    found = binding.how(manager, manager.captured[manager.lattice.buckets[-1]])
    assert found["io"].startswith("staged: ") and found["x"] == "patch"
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))


def _refuse(self: object, copies: bool) -> None:
    from bucketgraph.cuda import DriverError

    raise DriverError("cuGraphNodeSetEnabled", 801, "CUDA_ERROR_NOT_SUPPORTED")


# -- state -----------------------------------------------------------------------------------------------------------


def test_a_weight_moves_under_its_graphs(device: Device) -> None:
    manager = served(device, bucket_set("copy"))
    x, z = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    first = manager.fn.w.detach().clone()  # type: ignore[union-attr]
    new = aligned(4, WIDTH)
    want = new.clone()
    old = manager.rebind({"w": new})
    assert torch.equal(old["w"], first) and torch.equal(new, want), "verifying it leaves contents alone"
    for batch in (4, 2, 1):
        assert torch.equal(manager(x=x[:batch], z=z[:batch])["y"], x[:batch] + z[:batch] + want[:batch])
    before = device.captures
    manager.rebind(old)
    assert device.captures == before, "known by now"
    assert torch.equal(manager(x=x, z=z)["y"], x + z + first)


def test_where_no_memory_is_left_the_new_place_serves_the_proof_and_keeps_its_content(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = served(device, bucket_set("copy"))
    monkeypatch.setattr(binding.state, "_scratch", lambda tensor: None)
    new = aligned(4, WIDTH)
    want = new.clone()
    manager.rebind({"w": new})
    assert torch.equal(new, want) and not any(manager.fixed.values())
    x, z = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], x + z + want)


def test_inputs_stay_bound_when_a_weight_moves(device: Device) -> None:
    manager = served(device)
    manager.rebind({"w": aligned(4, WIDTH)})
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(manager(x=x, z=z)["y"], right(manager, x, z))
    assert counts(manager, 4) == {"": 1}


def test_a_graph_that_cannot_follow_is_looked_at_once_before_the_move(device: Device) -> None:
    """A second look would run it when only a part of its memory has moved: a KV cache, whose free pages went first."""
    device.attributes = KernelAttributes(cooperative=True)
    manager = served(device, bucket_set("copy"))
    new = {"w": aligned(4, WIDTH)}
    prepare([manager], new)
    looked = [captured.executable for captured in manager.captured.values()]
    prepare([manager], new)
    assert all(c.executable is one for c, one in zip(manager.captured.values(), looked, strict=True))


def test_a_graph_that_cannot_follow_is_captured_anew_and_says_so(device: Device) -> None:
    device.attributes = KernelAttributes(cooperative=True)
    manager = served(device, bucket_set("copy"))
    x, z = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for _ in range(2):
        new = aligned(4, WIDTH)
        manager.rebind({"w": new})
        assert torch.equal(manager(x=x, z=z)["y"], x + z + new)
    assert any("captured anew when it moves" in line and "cooperative" in line for line in manager.explain())
    assert manager.stats().fallbacks == {"recaptured:moved": 4}, "two buckets, twice"
    assert "cooperative" in manager.stats().reasons["recaptured:moved"]


def test_a_place_that_breaks_the_alignment_is_captured_anew(device: Device) -> None:
    manager = served(device, bucket_set("copy"))
    x, z = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    manager.rebind({"w": aligned(4, WIDTH)})
    new = aligned(4, WIDTH, shift=1)
    manager.rebind({"w": new})
    assert torch.equal(manager(x=x, z=z)["y"], x + z + new)
    assert "not aligned" in manager.stats().reasons["recaptured:moved"] and not any(manager.fixed.values())
    new = aligned(4, WIDTH)
    manager.rebind({"w": new})
    before = device.captures
    manager.rebind({"w": aligned(4, WIDTH)})
    assert device.captures == before, "another place is another matter"


def test_another_managers_graphs_of_the_same_weight_are_stale_until_told(device: Device) -> None:
    model = Model(device).eval()
    one = served(device, fn=model)
    two = served(device, fn=model, family=one.family)
    one.rebind({"w": aligned(4, WIDTH)})
    x, z = aligned(4, WIDTH), torch.randn(4, WIDTH)
    assert torch.equal(one(x=x, z=z)["y"], right(one, x, z))
    with pytest.raises(StaleError):
        two(x=x, z=z)


def test_a_node_is_passed_over_by_one_call_of_the_driver() -> None:
    sent: list[Any] = []
    handles = dict.fromkeys(("CUgraphExec", "CUgraphNode"), int)
    calls = {
        "cuDriverGetVersion": lambda: (0, 13000),
        "cuGraphNodeSetEnabled": lambda *args: (sent.append(args), (0,))[1],
    }
    cuda = SimpleNamespace(**calls, **handles)
    Bindings(cuda).set_enabled(3, 4, False)
    assert sent == [(3, 4, 0)]


def test_what_cannot_move_is_refused_and_nothing_moved(device: Device) -> None:
    manager = served(device)
    w = manager.fn.w  # type: ignore[union-attr]
    place = w.data_ptr()
    for new, text in (
        ({"q": w}, "reads no such tensor: given q, expected w"),
        ({"w": torch.zeros(3)}, "w cannot move there: given .3. torch.float32"),
        ({"w": w.detach()}, "w lies in memory of w"),
        ({"w": 3}, "w is not a tensor: given int"),
    ):
        with pytest.raises(InputError, match=text):
            manager.rebind(new)  # type: ignore[arg-type]
    assert w.data_ptr() == place


def test_a_tensor_whose_view_is_read_too_does_not_move() -> None:
    a = torch.arange(4.0)
    b = a[:2]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * a.sum() + b.sum()

    spec = {
        "version": 1,
        "name": "views",
        "axes": {"batch": [2]},
        "inputs": {"x": {"shape": ["batch"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch"]}},
    }
    manager = BucketManager(fn, parse(spec), device="cpu")
    assert manager.warmup().ok
    with pytest.raises(InputError, match="b lies in memory of a, and would stay there"):
        manager.rebind({"a": torch.ones(4)})
    assert torch.equal(manager(x=torch.ones(2))["y"], torch.full((2,), 7.0))


def test_a_weight_that_moved_behind_our_back_is_still_stale(device: Device) -> None:
    manager = served(device)
    manager.fn.w.data = torch.zeros(4, WIDTH)  # type: ignore[union-attr]
    with pytest.raises(StaleError):
        manager.rebind({"w": aligned(4, WIDTH)})
    x = torch.randn(4, WIDTH)
    with pytest.raises(StaleError):
        manager(x=x, z=x)


def test_eager_functions_take_the_new_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = nn.Linear(WIDTH, WIDTH).eval()
    made = bucket_set(executable="eager", inputs={"input": {"shape": ["batch", WIDTH], "dtype": "float32"}})
    manager = BucketManager(model, made, device="cpu")
    manager.warmup()
    new = torch.randn(WIDTH, WIDTH)
    manager.rebind({"weight": new})
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(manager(input=x)["y"], x @ new.T + model.bias)


def test_calls_and_moves_of_two_threads_never_mix(device: Device) -> None:
    manager = served(device)
    places = [torch.full((4, WIDTH), float(n)) for n in range(2)]
    manager.rebind({"w": places[0].clone()})
    wrong: list[Tensor] = []

    def call() -> None:
        for _ in range(50):
            x, z = aligned(4, WIDTH).fill_(10), torch.zeros(4, WIDTH)
            y = manager(x=x, z=z)["y"]
            if not (torch.equal(y, places[0] + 10) or torch.equal(y, places[1] + 10)):
                wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(50):
        manager.rebind({"w": places[turn % 2].clone()})
    for thread in threads:
        thread.join()
    assert not wrong


# -- the set ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"inputs": {"x": {"shape": ["batch"], "dtype": "int64", "bind": "move"}}}, "inputs.x.bind"),
        ({"outputs": {"y": {"shape": ["batch"], "bind": "auto"}}}, "outputs.y.bind"),
        ({"io": "graph"}, "io"),
    ],
)
def test_a_wrong_word_is_named(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        bucket_set(**changed)


def test_the_schema_knows_the_words() -> None:
    text = str(schema())
    assert "'in_graph'" in text and "'patch'" in text
