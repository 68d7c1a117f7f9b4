"""`bucketgraph doctor`: its options to a workload, and the diagnosis to a terminal and files.

Rules: all of the command line is checked before anything is loaded, all of the work is done before a file is written.
Whatever the verdict, the exit status is 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from bucketgraph.config import load
from bucketgraph.cuda import command as graphs
from bucketgraph.doctor import table, workload
from bucketgraph.doctor.examine import diagnose
from bucketgraph.doctor.workload import Workload
from bucketgraph.errors import BucketGraphError, ConfigError
from bucketgraph.planner import document


def run(args: argparse.Namespace, callable_of: Callable[[str, str | None], Any]) -> int:
    """Diagnose, write what was asked for, and print. Raises BucketGraphError with nothing written."""
    files = [path for path in (args.json, args.html) if path is not None]
    for path in files:
        document.require_folder(path)
    if len({path.resolve() for path in files}) < len(files):
        raise ConfigError("a file is named twice", given=str(files[0]), expected="one file for each output")
    _check(args)
    made = diagnose(_workload(args, callable_of), with_capture=not args.no_capture)
    for path, whole in ((args.json, made.json), (args.html, made.html)):
        if path is not None:
            document.write(path, whole())
    # A pipe or a log has no width: tables must not be folded to 80 columns there.
    table.show(made, Console(width=None if sys.stdout.isatty() else 200))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go together."""
    if (args.target is None) == (args.model is None):
        raise ConfigError("what to diagnose", given="both" if args.target else "nothing", expected="FUNC or --model")
    steps = [name for name in ("prefill", "batch", "context") if getattr(args, name) is not None]
    is_llm = args.model is not None and args.set is None
    if steps and not is_llm:
        raise ConfigError(f"--{steps[0]} belongs to --model of a language model")
    if args.prefill is not None and len(steps) > 1:
        raise ConfigError("--prefill runs one prompt", hint="leave --batch and --context out")
    if args.dtype != "auto" and not is_llm:
        raise ConfigError("--dtype belongs to --model of a language model")
    if args.bucket is not None and args.set is None:
        raise ConfigError("--bucket belongs to --set")
    if args.target is not None and ":" not in args.target:
        raise ConfigError("no function is named", given=args.target, expected="MODULE:FUNC")


def _workload(args: argparse.Namespace, callable_of: Callable[[str, str | None], Any]) -> Workload:
    if args.set is not None:
        bucket_set = load(args.set)
        if bucket_set.is_llm:
            raise ConfigError(f"{bucket_set.source}: an LLM set has phases", hint="use --model without --set")
        chosen = None
        if args.bucket is not None:
            _, sizes = graphs.parse(args.bucket, bucket_set)
            chosen = graphs.find(sizes, bucket_set.lattice().buckets)
        name = args.target or args.model
        return workload.of_set(name, _loaded(name, args, callable_of), bucket_set, chosen, args.device)
    if args.target is not None:
        return workload.of_function(args.target, _loaded(args.target, args, callable_of), args.device)
    from bucketgraph.doctor.models import Step, of_model

    batch, context = args.batch, args.context
    step = Step(args.prefill, 1 if batch is None else batch, 512 if context is None else context)
    return of_model(args.model, step, dtype=args.dtype, device=args.device)


def _loaded(name: str, args: argparse.Namespace, callable_of: Callable[[str, str | None], Any]) -> Any:
    """What the name stands for. A module of the user's that fails while it is imported is bad input, too."""
    try:
        return callable_of(name, args.device)
    except BucketGraphError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot import {name}", given=workload.told(error)) from error
