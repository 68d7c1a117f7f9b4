"""`bucketgraph inspect SET --graph BUCKET`: capture one bucket as warm-up would, and show what its graph holds.

Rules: all of the command line, the device and the driver are checked before a model is loaded. The bucket is warmed up
and checked first, so what is shown is the function that would serve it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bucketgraph import selfcheck
from bucketgraph.buckets import Bucket
from bucketgraph.config import BucketSet, load
from bucketgraph.cuda import capture, inspect
from bucketgraph.cuda.driver import load_driver
from bucketgraph.cuda.graph import Graph
from bucketgraph.errors import CaptureError, ConfigError
from bucketgraph.manager import BucketManager, device_of
from bucketgraph.planner import document
from bucketgraph.warmup import warm_up


def run(args: argparse.Namespace, callable_of: Callable[[str, str | None], Any]) -> int:
    """Capture, write what was asked for, and print. Raises ConfigError with nothing loaded or written."""
    bucket_set = load(args.set)
    if args.dot is not None:
        document.require_folder(args.dot)
    phase, sizes = parse(args.graph, bucket_set)
    device = device_of(None, args.device)
    if device.type != "cuda":
        raise ConfigError("--graph shows a CUDA graph, which needs a CUDA device", given=device)
    load_driver()
    model = args.model or bucket_set.model
    if model is None:
        raise ConfigError(f"{bucket_set.source} names no model", hint="give --model")
    manager = _manager(bucket_set, phase, model, args, callable_of)
    if manager.kind != "cudagraph":
        raise ConfigError(f"{manager.name} makes no CUDA graphs", given=f"executable {manager.kind}")
    bucket = find(sizes, manager.lattice.buckets)
    graph, tensors = captured(manager, bucket)
    found = inspect.groups(graph, tensors)
    title = f"{bucket_set.name} {phase or ''} {bucket}".replace("  ", " ")
    if args.dot is not None:
        document.write(args.dot, inspect.dot(graph, title, tensors))
    # A pipe or a log has no width: tables must not be folded to 80 columns there.
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(inspect.table(found, title))
    console.print(", ".join(f"{library} {count}" for library, count in inspect.by_library(found).items()))
    return 0


def parse(text: str, bucket_set: BucketSet) -> tuple[str | None, dict[str, int] | tuple[int, ...]]:
    """`PHASE:SIZES` or `SIZES`: the sizes are `8`, `8,128` or `batch=8,tokens=128`, with commas or spaces.

    Returns:
        the phase, which a set of a language model needs, and sizes by axis or in the order of the axes.

    Raises:
        ConfigError: the text is not of this form, or the set has no such phase.
    """
    phase, colon, rest = text.rpartition(":")
    phases = ", ".join(bucket_set.phases or {})
    if bucket_set.phases and phase not in bucket_set.phases:
        raise ConfigError("--graph needs a phase of the set", given=text, expected=f"one of {phases}, such as decode:8")
    if colon and not bucket_set.phases:
        raise ConfigError("this set has no phases", given=text, expected="sizes alone")
    named: dict[str, int] = {}
    plain: list[int] = []
    for part in rest.replace(",", " ").split():
        name, equals, size = part.rpartition("=")
        if not size.isdecimal() or name in named:
            raise ConfigError("--graph is no bucket", given=repr(text), expected="8, or batch=8,tokens=128")
        if equals:
            named[name] = int(size)
        else:
            plain.append(int(size))
    if bool(named) == bool(plain):
        raise ConfigError("--graph is no bucket", given=repr(text), expected="8, or batch=8,tokens=128")
    return phase or None, named or tuple(plain)


def find(sizes: dict[str, int] | tuple[int, ...], buckets: Sequence[Bucket]) -> Bucket:
    """The bucket of exactly these sizes. Raises ConfigError, naming those there are."""
    for bucket in buckets:
        if sizes in (bucket.sizes, bucket.as_dict()):
            return bucket
    some = "; ".join(map(str, buckets[:8])) + ("; ..." if len(buckets) > 8 else "")
    parts = [f"{name}={size}" for name, size in sizes.items()] if isinstance(sizes, dict) else map(str, sizes)
    given = " ".join(parts)
    raise ConfigError("the set has no such bucket", given=given, expected=f"one of {some}")


def _manager(
    bucket_set: BucketSet,
    phase: str | None,
    model: str,
    args: argparse.Namespace,
    callable_of: Callable[[str, str | None], Any],
) -> BucketManager:
    if phase is None:
        return BucketManager(callable_of(model, args.device), bucket_set, device=args.device)
    from bucketgraph.llm.api import LLM

    llm = LLM(model, bucket_set, dtype=args.dtype, device=args.device, max_model_len=args.max_model_len, warmup=False)
    runner = llm._runner
    return runner.prefill_manager if phase == "prefill" else runner.decode_manager


def captured(manager: BucketManager, bucket: Bucket) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of one bucket, kept, and the tensors it is known to read by address: slots and weights.

    Raises:
        CaptureError: the bucket failed in warm-up.
    """
    warm_up([manager], None, [bucket])
    served = manager.captured[bucket]
    if served.error is not None:
        raise CaptureError(f"bucket {bucket} failed in warm-up", given=served.error)
    with torch.cuda.device(manager.device), manager.family.turn(), manager.around_step():
        sizes = selfcheck.inner_sizes(manager, bucket)
        served.inputs.fill(manager.example(sizes, selfcheck.generator(bucket)))
        graph = capture.keep(lambda: served.fn(**served.inputs.views), torch.cuda.Stream(manager.device))
    contract = manager.bind()
    return graph, {**(contract.tensors if contract is not None else {}), **served.inputs.views}
