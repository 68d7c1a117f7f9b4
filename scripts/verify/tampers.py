"""Checks of what must be refused before anything runs: weights pulled away from under a graph, and bad weight files."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bucketgraph import BucketManager
from bucketgraph.errors import ModelError, StaleError
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.weights import load_weights, random_weights, to_hf_state_dict

from .core import Check, Setting, Trial, Wrong, require
from .graphs import Rows, graphs, rows, rows_set, served, whole_numbers
from .models import World, llm_set, model_config


@dataclass(frozen=True)
class Tamper:
    """A way to pull a tensor away, and which names the error may say."""

    name: str
    do: Callable[[Rows], None]
    names: tuple[str, ...]


def _set(module: nn.Module, path: str, tensor: Tensor) -> None:
    owner, _, name = path.rpartition(".")
    at = module.get_submodule(owner)
    if name in at._buffers:
        at._buffers[name] = tensor
    else:
        at._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _swap(module: Rows, path: str) -> None:
    _named(module)[path].data = torch.zeros_like(_named(module)[path])


def _free(module: Rows, path: str) -> None:
    _named(module)[path].data.untyped_storage().resize_(0)


def _resize(module: Rows, path: str) -> None:
    tensor = _named(module)[path]
    tensor.resize_(1 if tensor.numel() > 1 else 2)


def _delete(module: Rows, path: str) -> None:
    owner, _, name = path.rpartition(".")
    delattr(module.get_submodule(owner), name)


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _move(module: Rows) -> None:
    module.to(torch.float64)


def _assign(module: Rows) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def _replace(module: Rows) -> None:
    module.inner[0] = nn.Linear(8, 8).to(module.weight.device).eval()


def _replace_all(module: Rows) -> None:
    module.inner = nn.Sequential(nn.Linear(8, 8)).to(module.weight.device).eval()


def _plain(module: Rows) -> None:
    module.table = module.table.clone()


PATHS = ("weight", "shift", "inner.0.weight", "inner.0.bias", "scale")
TAMPERS = (
    *(
        Tamper(f"{name} {path}", lambda m, do=do, path=path: do(m, path), (path,))
        for name, do in {
            "rebind": lambda m, path: _set(m, path, torch.zeros_like(_named(m)[path])),
            "swap data of": _swap,
            "free": _free,
            "resize": _resize,
            "delete": _delete,
        }.items()
        for path in PATHS
    ),
    Tamper("move to float64", _move, PATHS),
    Tamper("load with assign", _assign, PATHS),
    Tamper("replace a submodule", _replace, ("inner.0",)),
    Tamper("replace a container", _replace_all, ("inner",)),
    Tamper("rebind an attribute", _plain, ("table",)),
)


def tampered(setting: Setting) -> Trial:
    """Four of five cases pull a tensor away, the fifth updates in place."""

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        kind = seed % 5
        if kind == 4:
            _in_place(setting, generator)
            return
        at = generator.randrange(len(TAMPERS) + 2) if seed >= 2 * len(TAMPERS) else (seed - seed // 5) % len(TAMPERS)
        if at == len(TAMPERS):
            _closure(setting)
        elif at == len(TAMPERS) + 1:
            _kv_cache(setting)
        else:
            module = rows(setting)
            manager = served(setting, module, axes={"batch": [4, 16]})
            manager(x=whole_numbers(setting, 3, seed))
            TAMPERS[at].do(module)
            _refused(manager, {"x": whole_numbers(setting, 3, seed)}, TAMPERS[at].names, TAMPERS[at].name)
            manager.release()

    return trial


def _refused(manager: BucketManager, inputs: dict[str, Tensor], names: tuple[str, ...], what: str) -> None:
    before = sum(bucket.hits for bucket in manager.stats().buckets)
    try:
        manager(**inputs)
    except StaleError as error:
        require(any(str(error).startswith(f"{name} ") for name in names), f"{what}: the error names another: {error}")
    else:
        raise Wrong(f"{what}: nothing was raised")
    require(sum(bucket.hits for bucket in manager.stats().buckets) == before, f"{what}: something was launched")


def _in_place(setting: Setting, generator: random.Random) -> None:
    module = rows(setting)
    manager = served(setting, module)
    x, path = whole_numbers(setting, generator.randint(1, 16), 1), generator.choice(PATHS)
    with torch.no_grad():
        _named(module)[path].add_(generator.randint(1, 5))
    require(torch.equal(manager(x=x)["y"], module(x)), f"an update of {path} in place is not seen")
    manager.release()


def _closure(setting: Setting) -> None:
    weight = whole_numbers(setting, 1, 0)[0]

    def fn(x: Tensor) -> Tensor:
        return x * weight

    with graphs(setting):
        manager = BucketManager(fn, rows_set(), device=setting.device)
        require(manager.warmup().ok, "warm-up of a closure failed")
    weight = weight.clone()
    _refused(manager, {"x": whole_numbers(setting, 3, 0)}, ("weight",), "rebind a closure's tensor")
    manager.release()


def _kv_cache(setting: Setting) -> None:
    with graphs(setting):
        world = World(setting, llm_set("chunks", "fast"))
    for name, manager in (("prefill", world.runner.prefill_manager), ("decode", world.runner.decode_manager)):
        inputs = manager.example({axis.name: 1 for axis in manager.lattice.axes}, torch.Generator().manual_seed(0))
        kept, world.cache.data = world.cache.data, world.cache.data.clone()
        _refused(manager, inputs, ("cache.data", "cache"), f"rebind the KV cache under {name}")
        world.cache.data = kept
    world.runner.release()


# -- weight files ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor], str, random.Random], None]


def _poke(value: float) -> Change:
    def change(tensors: dict[str, Tensor], name: str, generator: random.Random) -> None:
        flat = tensors[name].view(-1)
        flat[generator.randrange(flat.numel())] = value

    return change


def _reshape(tensors: dict[str, Tensor], name: str, generator: random.Random) -> None:
    shape = list(tensors[name].shape)
    other = [1, *shape] if generator.random() < 0.5 or len(shape) == 1 else [shape[0] * 2, shape[1] // 2]
    tensors[name] = tensors[name].reshape(other).contiguous()


def _extra(tensors: dict[str, Tensor], name: str, generator: random.Random) -> None:
    tensors[f"{name}_x"] = torch.zeros(3)


CHANGES: dict[str, Change] = {
    "missing": lambda t, name, generator: t.__delitem__(name),
    "reshaped": _reshape,
    "cut short": lambda t, name, generator: t.update({name: t[name][:-1].contiguous()}),
    "retyped": lambda t, name, generator: t.update({name: t[name].to(torch.int32)}),
    "extra": _extra,
    "NaN": _poke(float("nan")),
    "infinite": _poke(float("-inf")),
}


def weights(setting: Setting) -> Trial:
    """A safetensors folder with one thing wrong is refused by the tensor's name; without, it is loaded."""
    config: ModelConfig = model_config()
    good: dict[str, Any] = to_hf_state_dict(random_weights(config, torch.float32, "cpu"), config)

    def trial(seed: int) -> None:
        from safetensors.torch import save_file

        generator = random.Random(seed)
        kind = [*CHANGES, "truncated", "none"][seed % (len(CHANGES) + 2)]
        tensors = {name: tensor.clone().contiguous() for name, tensor in good.items()}
        name = generator.choice(sorted(tensors))
        if kind in CHANGES:
            CHANGES[kind](tensors, name, generator)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            save_file(tensors, file)
            if kind == "truncated":
                whole = file.read_bytes()
                file.write_bytes(whole[: generator.randrange(len(whole))])
            try:
                load_weights(folder, config, torch.float32, "cpu")
            except ModelError as error:
                said = file.name if kind == "truncated" else name
                require(kind != "none", f"good weights were refused: {error}")
                require(said in str(error), f"{kind} {name}: the error names another: {error}")
            else:
                require(kind == "none", f"{kind} {name} was accepted")

    return trial


CHECKS = (
    Check("tampered", "a tensor pulled away is named before a launch", 250, tampered, cpu=0.6, share=3),
    Check("weights", "bad weight files are refused by name", 500, weights, cpu=0.2, share=0.5, workers=1),
)
