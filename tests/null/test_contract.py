"""What a graph reads by address: every way to pull it away is named before a launch; updates in place are fine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bucketgraph import LLM, BucketManager, executables
from bucketgraph.config import parse
from bucketgraph.contract import Contract
from bucketgraph.errors import StaleError
from bucketgraph.executables import Family
from bucketgraph.executables.eager import Eager


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.table = torch.arange(4.0)  # not registered, and read all the same
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.table


def rebind(model: Model) -> None:
    model.body[0].weight = nn.Parameter(torch.zeros(4, 4))


def swap_data(model: Model) -> None:
    model.body[0].weight.data = torch.zeros(4, 4)


def assign(model: Model) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def move(model: Model) -> None:
    model.double()


def resize(model: Model) -> None:
    model.body[1].running_mean.resize_(2)


def free(model: Model) -> None:
    model.body[0].bias.untyped_storage().resize_(0)


def delete(model: Model) -> None:
    del model.body[0].bias


def replace_module(model: Model) -> None:
    model.body[0] = nn.Linear(4, 4)


def rebind_plain(model: Model) -> None:
    model.table = torch.zeros(4)


def transpose(model: Model) -> None:
    model.body[0].weight.data = model.body[0].weight.data.t()  # the same memory, shape and object; other strides


def rebind_one_element(model: Model) -> None:
    model.body[1].num_batches_tracked = torch.tensor(0)  # equal in value to the one that is captured


TAMPERS: list[tuple[Callable[[Model], None], str]] = [
    (rebind, "body.0.weight was rebound"),
    (swap_data, "body.0.weight was moved, resized or freed"),
    (assign, "body.0.weight was rebound"),
    (move, "was rebound|was moved"),
    (resize, "body.1.running_mean was moved, resized or freed"),
    (free, "body.0.bias was moved, resized or freed"),
    (delete, "body.0.bias was deleted"),
    (replace_module, "body.0 was rebound"),
    (rebind_plain, "table was rebound"),
    (transpose, "body.0.weight was moved, resized or freed"),
    (rebind_one_element, "body.1.num_batches_tracked was rebound"),
]


@pytest.mark.parametrize(("tamper", "says"), TAMPERS, ids=lambda item: getattr(item, "__name__", ""))
def test_a_tensor_that_was_pulled_away_is_named(tamper: Callable[[Model], None], says: str) -> None:
    model = Model()
    contract = Contract(model)
    contract.check()
    tamper(model)
    with pytest.raises(StaleError, match=says):
        contract.check()


def test_updates_in_place_are_no_error() -> None:
    model = Model()
    contract = Contract(model)
    with torch.no_grad():
        model.body[0].weight.mul_(2)
        model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
    contract.check()
    model.requires_grad_(False)
    contract.check()


def test_closures_globals_partials_and_state_are_watched() -> None:
    weight = torch.zeros(3)
    contract = Contract(lambda x: x + weight)
    assert list(contract.tensors) == ["weight"]
    weight = torch.ones(3)
    with pytest.raises(StaleError, match="weight was rebound"):
        contract.check()

    assert list(Contract(functools.partial(torch.add, other=torch.ones(2))).tensors) == ["other"]
    state = {"table": torch.zeros(2)}
    contract = Contract(abs, state)
    state["table"] = torch.zeros(2)
    with pytest.raises(StaleError, match="table was rebound"):
        contract.check()


def test_objects_that_hold_tensors_are_walked_to_the_end() -> None:
    @dataclass
    class Layer:
        w: Tensor

    class Holder:
        def __init__(self) -> None:
            self.layers = [Layer(torch.zeros(1)), Layer(torch.zeros(1))]
            self.options = {"a": (torch.zeros(1), 3, "text")}
            self.itself = self

        def run(self, x: Tensor) -> Tensor:
            return x

    holder = Holder()
    contract = Contract(holder.run)
    assert sorted(contract.tensors) == ["layers[0].w", "layers[1].w", "options['a'][0]"]
    holder.layers[1] = Layer(torch.zeros(1))
    with pytest.raises(StaleError, match=r"layers\[1\] was rebound"):
        contract.check()


def test_an_llm_watches_its_weights_and_its_kv_cache() -> None:
    llm = LLM("random:smollm2-135m:1", max_model_len=64, warmup=False)
    contract = Contract(llm._runner.model.decode)
    assert {"weights.embed", "weights.layers[0].qkv", "cache.data", "_cos_sin"} <= set(contract.tensors)
    llm._runner.cache.data = llm._runner.cache.data.clone()
    with pytest.raises(StaleError, match=r"cache\.data was rebound"):
        contract.check()


class Recorded(Eager):
    """Stands for a graph: reads the tensors that were there when it was captured, wherever they are now."""

    kind = "cudagraph"

    def capture(self) -> None:
        self._recorded = functools.partial(
            torch.func.functional_call,
            self._fn,
            {k: v.detach() for k, v in self._fn.state_dict(keep_vars=True).items()},
        )

    def replay(self) -> Any:
        return self._recorded((), dict(self._inputs))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(kind: str, fn: Callable[..., Any], inputs: Mapping[str, Tensor], family: Family) -> Recorded:
        return Recorded(fn, inputs)

    monkeypatch.setattr(executables, "make", make)
    monkeypatch.setattr(executables, "resolve", lambda kind, device: "cudagraph")


def served(model: nn.Module, **changed: Any) -> BucketManager:
    made = {
        "version": 1,
        "name": "m",
        "axes": {"batch": [2, 4]},
        "inputs": {"x": {"shape": ["batch", 4], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["batch", 4]}},
    }
    manager = BucketManager(model, parse({**made, **changed}))
    assert manager.warmup().ok
    return manager


@pytest.mark.usefixtures("graphs")
def test_without_the_contract_a_rebound_weight_would_be_silently_wrong() -> None:
    model, x = Model(), torch.randn(3, 4)
    manager = served(model)
    model.body[0].weight = nn.Parameter(torch.zeros(4, 4))
    manager._contract = None
    assert not torch.equal(manager(x=x)["y"], model(x)), "the corruption that the contract prevents"


@pytest.mark.usefixtures("graphs")
def test_a_stale_call_launches_nothing_and_an_update_in_place_is_seen() -> None:
    model, x = Model(), torch.randn(3, 4)
    manager = served(model)
    with torch.no_grad():
        model.body[0].weight.add_(1)
    torch.testing.assert_close(manager(x=x)["y"], model(x))
    hits = sum(bucket.hits for bucket in manager.stats().buckets)
    model.body[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StaleError, match=r"body\.0\.weight"):
        manager(x=x)
    stats = manager.stats()
    assert sum(bucket.hits for bucket in stats.buckets) == hits and stats.outcomes["raised"] == 1


@pytest.mark.usefixtures("graphs")
def test_recapture_by_policy_serves_the_new_weights() -> None:
    model, x = Model(), torch.randn(3, 4)
    manager = served(model, on_stale="recapture")
    model.body[0].weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(manager(x=x)["y"], model(x))
    assert manager.stats().fallbacks == {"recaptured:stale": 1}
    torch.testing.assert_close(manager(x=x)["y"], model(x))
    assert manager.stats().fallbacks == {"recaptured:stale": 1}, "captured again once, not on every call"


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_of_two_names_is_compared_once_and_recorded_once(
    monkeypatch: pytest.MonkeyPatch, grad: bool, inference: bool
) -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    model.head.weight = model.embed.weight
    contract, recorded = Contract(model.eval(), {"alias": model.embed.weight}), 0
    record = contract._record

    def counted() -> None:
        nonlocal recorded
        recorded += 1
        record()

    monkeypatch.setattr(contract, "_record", counted)
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        for _ in range(3):
            contract.check()
    assert recorded <= 1, "the first look may be in another mode of gradients; no other one records anew"
    assert set(contract.tensors) == {"embed.weight", "head.weight", "alias"}
    model.embed.weight.data = torch.zeros(4, 3)
    with pytest.raises(StaleError, match=r"embed.weight was moved"):
        contract.check()


def test_a_mapping_of_many_is_compared_name_by_name() -> None:
    state = {f"w{number}": torch.full((2,), float(number)) for number in range(40)}
    contract = Contract(abs, state)
    held = dict(state)
    for name in ("w0", "w7", "w39"):
        state[name] = state.pop(name)  # the same, in another order
        contract.check()
    state["w3"], state["w4"] = state["w4"], state["w3"]
    with pytest.raises(StaleError, match="w3 was rebound"):
        contract.check()
    state.clear()
    state |= {
        f"w{(number + 1) % 40}": tensor for number, tensor in enumerate(held.values())
    }  # in order, by other names
    with pytest.raises(StaleError, match="w0 was rebound"):
        contract.check()
    state.clear()
    state |= held
    contract.check()
    del state["w39"]
    with pytest.raises(StaleError, match="w39 was deleted"):
        contract.check()
    state["w39"] = held["w39"].clone()
    with pytest.raises(StaleError, match="w39 was rebound"):
        contract.check()


def test_comparing_300_tensors_does_not_grow_into_milliseconds() -> None:
    contract = Contract(nn.Sequential(*(nn.Linear(2, 2) for _ in range(150))))
    assert len(contract) == 300
    contract.check()
    best = min(_seconds(contract.check) for _ in range(20))
    assert best < 2e-3, "forty times the promise: a loaded machine passes, a quadratic walk does not"


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
