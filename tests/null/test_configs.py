"""Every ready set that describes one function warms up on the CPU and serves calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketgraph import config, yaml_strict
from bucketgraph.config import BucketSet, load, parse
from bucketgraph.manager import BucketManager

READY = [load(path) for path in sorted((Path(config.__file__).parent / "configs").glob("*.yaml"))]
FUNCTIONS = [bucket_set for bucket_set in READY if not bucket_set.is_llm]


def stand_in(bucket_set: BucketSet) -> Any:
    """A function with the set's shapes: each output element is a sum over what the inputs hold for its axes."""

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        sizes = {
            dim: tensor.shape[at]
            for name, tensor in inputs.items()
            for at, dim in enumerate(bucket_set.inputs[name].shape)
            if isinstance(dim, str)
        }
        found = {}
        for name, spec in bucket_set.outputs.items():
            shape = [dim if isinstance(dim, int) else sizes.get(dim, 5) for dim in spec.shape]
            value = torch.zeros(shape)
            for key, tensor in inputs.items():
                dims = bucket_set.inputs[key].shape
                summed = tensor.float()
                for at in reversed(range(len(dims))):
                    if dims[at] not in spec.shape:
                        summed = summed.sum(at)
                kept = [dim for dim in dims if dim in spec.shape]
                value = value + summed.reshape([sizes.get(str(dim), 1) if dim in kept else 1 for dim in spec.shape])
            found[name] = value
        return found

    return run


def few(bucket_set: BucketSet) -> BucketSet:
    """The set with each axis cut to its first two sizes and its policies as they are."""
    data = yaml_strict.read_file(Path(bucket_set.source))
    data["axes"] = {name: list(sizes[:2]) for name, sizes in bucket_set.axes.items()}
    data.pop("buckets", None)
    return parse(data, bucket_set.source)


def test_there_is_a_ready_set_of_each_kind() -> None:
    assert FUNCTIONS and len(FUNCTIONS) < len(READY)


@pytest.mark.parametrize("bucket_set", FUNCTIONS, ids=lambda s: s.name)
def test_a_ready_set_warms_up_and_is_called(bucket_set: BucketSet) -> None:
    small = few(bucket_set)
    run = stand_in(small)
    manager = BucketManager(run, small, device="cpu")
    report = manager.warmup()
    assert report.ok and len(report.buckets) == len(manager.lattice.buckets)
    generator = torch.Generator().manual_seed(0)
    for bucket in manager.lattice.buckets:
        for short in (0, 1):
            sizes = {axis: max(1, size - short) for axis, size in bucket.as_dict().items()}
            inputs = manager.example(sizes, generator)
            got, want = manager(**inputs), run(**inputs)
            for name in want:
                torch.testing.assert_close(got[name], want[name])
    assert manager.stats().outcomes == {"replayed": 2 * len(manager.lattice.buckets)}


@pytest.mark.parametrize("bucket_set", READY, ids=lambda s: s.name)
def test_a_ready_set_has_a_lattice_that_every_size_up_to_its_largest_fits(bucket_set: BucketSet) -> None:
    for phase in (bucket_set.phases or {"": bucket_set}).values():
        lattice = phase.lattice()
        largest = [axis.largest for axis in lattice.axes]
        assert lattice.plan(largest).kind == "replay" and lattice.plan([1] * len(largest)).kind in ("replay", "eager")
