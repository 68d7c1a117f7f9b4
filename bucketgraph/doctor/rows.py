"""Padding of a call that has no bucket set: the first dimension of its inputs, taken as the batch, doubled with zeros.

Rules: only where that reading is safe: the inputs go to a module, or there is one tensor alone; all tensors have as
many rows; a result has as many, too. A bucket set says more: other axes, other padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from bucketgraph.config import BucketSet, parse
from bucketgraph.errors import ConfigError

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a call takes: `fn(*args, **kwargs)`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> Named:
        """Those with rows, by name or position."""
        each = {**{f"input_{place}": value for place, value in enumerate(self.args)}, **self.kwargs}
        return {name: value for name, value in each.items() if isinstance(value, Tensor) and value.dim()}

    def results(self, **given: Tensor) -> Named:
        """The tensors in the call's result, by where they stand in it."""
        args = [given.get(f"input_{place}", value) for place, value in enumerate(self.args)]
        kwargs = {name: given.get(name, value) for name, value in self.kwargs.items()}
        leaves, _ = tree_flatten_with_path(self.fn(*args, **kwargs))
        return {keystr(path).strip("[].'") or "0": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def bucket_set(inputs: Inputs) -> BucketSet:
    """A set with one bucket of twice as many rows. Raises ConfigError saying why there is none."""
    tensors = inputs.tensors
    if not tensors or (len(tensors) > 1 and not isinstance(inputs.fn, torch.nn.Module)):
        raise ConfigError("its inputs do not tell which of them are padded")
    rows = {len(tensor) for tensor in tensors.values()}
    if len(rows) > 1 or rows == {0}:
        raise ConfigError("the first dimensions of its inputs are no batch", given=sorted(rows))
    (count,) = rows
    results = {name: tensor for name, tensor in inputs.results().items() if tensor.shape[:1] == (count,)}
    if not results:
        raise ConfigError("no result has its rows", given=count)
    return parse(
        {
            "version": 1,
            "name": "inputs",
            "axes": {"batch": [2 * count]},
            "inputs": {
                name: {"shape": ["batch", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}
                for name, tensor in tensors.items()
            },
            "outputs": {name: {"shape": ["batch", *["any"] * (tensor.dim() - 1)]} for name, tensor in results.items()},
        },
        "its inputs",
    )
