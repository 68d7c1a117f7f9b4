"""What of a bucket's graph is movable, and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bucketgraph.errors import BucketGraphError

STAGING = "staging buffer"  # the pinned buffer that a graph copies host inputs from


def output(name: str) -> str:
    """What an output is called among the movable tensors."""
    return f"output {name}"


def state(name: str) -> str:
    return f"state {name}"


@dataclass(frozen=True)
class Recipe:
    """What of a bucket is to be movable, and what its graph does beside calling the function."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # the graph ends by copying these out of the pool, to where they can be moved
    select: Callable[[Any], Mapping[str, Tensor]] = lambda raw: {}  # the declared outputs in what the function returned
    packed: Tensor | None = None  # the slots as bytes, which the graph begins by copying from staging
    staging: tuple[Tensor, ...] = ()


class NoCopyIn(BucketGraphError, RuntimeError):
    """The copy of the inputs cannot be a node of the graph whose source changes."""


@contextmanager
def moved(tensor: Tensor | None, second: Tensor) -> Iterator[None]:
    """While inside, the function finds its own tensor at its second place."""
    if tensor is None:
        yield
        return
    first = tensor.data
    tensor.data = second
    try:
        yield
    finally:
        tensor.data = first
