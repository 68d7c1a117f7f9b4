"""What is diagnosed: one call, without arguments, on a device.

The rule for MODULE:FUNC: FUNC is called once, without arguments. If it returns a pair of a callable and its inputs (a
mapping: by keyword; a sequence or one tensor: by position), a call of the workload is that callable on these inputs;
otherwise FUNC itself is the workload. With a bucket set, FUNC takes the set's inputs by keyword, and nothing is called
to find that out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from bucketgraph import selfcheck
from bucketgraph.buckets import Bucket
from bucketgraph.config import BucketSet
from bucketgraph.doctor import places
from bucketgraph.doctor.rows import Inputs
from bucketgraph.errors import ConfigError, InputError
from bucketgraph.manager import device_of
from bucketgraph.slots import Arena, Slot, StaticInputs

T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """One call that can be made again and again."""

    name: str
    call: Callable[[], object]
    device: torch.device
    fn: Callable[..., Any] | None = None  # with its set, where padding can be checked
    bucket_set: BucketSet | None = None
    inputs: Inputs | None = None  # without a set: what the call takes, if that is known


def of_function(name: str, target: object, device: torch.device | str | None) -> Workload:
    """The workload behind MODULE:FUNC, or behind a callable of Python's.

    Raises:
        ConfigError: it cannot be called without arguments, or the pair that it returns holds no inputs.
        InputError: its first call failed.
    """
    if not callable(target) or isinstance(target, type):
        expected = "a function that can be called without arguments"
        raise ConfigError(f"{name} is no workload", given=_kind(target), expected=expected)
    with torch.no_grad():
        made = attempt(target, f"{name}()")
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and not isinstance(made[0], Tensor)):
        return Workload(name, target, device_of(None, device))
    fn, inputs = made
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        taken = Inputs(fn, (), inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        taken = Inputs(fn, tuple(inputs), {})
    else:
        expected = "(fn, inputs), where inputs is a mapping, a sequence or a tensor"
        raise ConfigError(f"{name} returns no inputs", given=_kind(inputs), expected=expected)
    own = {tensor.device for tensor in taken.tensors.values()}
    if device is None and len(own) == 1 and not isinstance(fn, torch.nn.Module):  # a module says so itself
        device = own.pop()
    return Workload(name, partial(fn, *taken.args, **taken.kwargs), device_of(fn, device), inputs=taken)


def of_set(
    name: str, fn: object, bucket_set: BucketSet, bucket: Bucket | None, device: torch.device | str | None
) -> Workload:
    """A bucketed function in one bucket (None: the largest), filled with drawn inputs and no padding."""
    if not callable(fn) or isinstance(fn, type):
        raise ConfigError(f"{name} is no function of {bucket_set.name}'s inputs", given=_kind(fn))
    if bucket_set.is_llm:
        raise ConfigError(f"{bucket_set.source}: an LLM set has phases", hint="use --model with --prefill or --batch")
    bucket = bucket or max(bucket_set.lattice().buckets, key=lambda each: prod(each.sizes))
    found = device_of(fn, device)
    slots = tuple(Slot.from_spec(key, item) for key, item in bucket_set.inputs.items())
    static = StaticInputs(slots, bucket, Arena(slots, [bucket], found))
    random = selfcheck.generator(bucket)
    static.fill({slot.name: slot.example(bucket.as_dict(), random) for slot in slots})
    return Workload(f"{name} in {bucket_set.name} {bucket}", partial(fn, **static.views), found, fn, bucket_set)


def attempt(call: Callable[[], T], what: str) -> T:
    """The call's result. Raises InputError if the workload itself fails, naming its line."""
    try:
        return call()
    except Exception as error:
        place = places.of_error(error)
        where = "" if place is None else f" ({place})"
        raise InputError(f"{what} fails", given=f"{told(error)}{where}") from error


def told(error: BaseException) -> str:
    """In one line."""
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _kind(target: object) -> str:
    return f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
