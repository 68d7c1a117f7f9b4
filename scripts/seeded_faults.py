#!/usr/bin/env python3
"""Puts each seeded fault into this process, one at a time, and demands that its guard turns red; and green without.

`--list` prints the table of docs/seeded-faults.md, `--only ID ...` runs some. Exit status 1 if a fault was not caught,
or if a guard is red without one. Everything runs on the CPU: there the faults need no compiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from verify import calls, kernels, lives, phases, plans, tampers
from verify.core import Check, Setting, Trial, Wrong, require, run
from verify.faults import FAULTS, KERNEL_FAULTS, Fault, KernelFault

GUARDS = {c.name: c for m in (plans, phases, lives, calls, tampers, kernels) for c in m.CHECKS}
KERNEL_ROUNDS = 6  # cases of the faulty kernel


def red(name: str, cases: int) -> str | None:
    """What the guard says over `cases` small cases, made anew; None if it is green."""
    setting = Setting(torch.device("cpu"), small=True)
    result = run(GUARDS[name], setting, range(cases), None, lambda text: None, most_failures=1)
    return result.first


def green(name: str) -> str | None:
    """What the guard says without a fault, over as many cases as any of its faults gets."""
    return red(name, max((fault.cases for fault in FAULTS if fault.guard == name), default=1))


def caught(fault: Fault) -> str | None:
    """How the guard turned red with the fault in place; None if it did not."""
    with fault.patch():
        return red(fault.guard, fault.cases)


def kernel_run(fault: str) -> subprocess.CompletedProcess[str]:
    """`interp_exact` with a faulty kernel (or `none`), in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "--kernel", fault]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def kernel_caught(fault: KernelFault) -> str | None:
    done = kernel_run(fault.id)
    return done.stdout.strip() if done.returncode == 1 else None


def _kernel(name: str) -> int:
    """In the process of its own: put the faulty source in the kernel's place, and run the guard. 1 is red, 0 green."""
    names = [kernel.name for kernel in kernels.KERNELS]
    places: Sequence[int] = range(len(names))
    for fault in KERNEL_FAULTS:
        if fault.id == name:
            _import_faulty(fault)
            places = [names.index(fault.kernel)]
    step = len(names)
    seeds = [place + step * turn for place in places for turn in range(KERNEL_ROUNDS if len(places) == 1 else 2)]
    check = GUARDS["interp_exact"]
    for seed in seeds:
        result = run(check, Setting(torch.device("cpu")), range(seed, seed + 1), None, lambda text: None)
        if result.first:
            print(result.first)
            return 1
    return 0


def _import_faulty(fault: KernelFault) -> None:
    import bucketgraph.kernels

    source = Path(bucketgraph.kernels.__file__).parent / f"{fault.file}.py"
    text = source.read_text(encoding="utf-8")
    if fault.old not in text:
        print(f"the fault is out of date: {fault.file} has no {fault.old!r}")
        raise SystemExit(2)
    file = Path(tempfile.mkdtemp()) / source.name  # Triton reads it again, so it must stay while the process lives
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    name = f"bucketgraph.kernels.{fault.file}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def table() -> str:
    lines = ["| id | what it simulates | what must catch it |", "|---|---|---|"]
    lines += [f"| {fault.id} | {fault.simulates} | `{fault.guard}` |" for fault in FAULTS]
    lines += [f"| {fault.id} | {fault.simulates} | `interp_exact` |" for fault in KERNEL_FAULTS]
    return "\n".join(lines)


def seeded_faults(every: Sequence[Fault | KernelFault]) -> Trial:
    """One fault a seed, after its guard was green without it."""
    guards: dict[str, str | None] = {}

    def trial(seed: int) -> None:
        fault = every[seed % len(every)]
        if isinstance(fault, KernelFault):
            if "interp_exact" not in guards:
                guards["interp_exact"] = kernel_run("none").stdout.strip() or None
            name, said = "interp_exact", kernel_caught(fault)
        else:
            name = fault.guard
            if name not in guards:
                guards[name] = green(name)
            said = caught(fault)
        if guards[name]:
            raise Wrong(f"{name} is red without a fault: {guards[name]}")
        require(said is not None, f"{fault.id} ({fault.simulates}) was not caught by {name}")
        require("out of date" not in str(said), f"{fault.id}: {said}")

    return trial


CHECKS = (
    Check(
        "seeded_faults",
        "every seeded fault of the Python side and the twins turns its guard red",
        len(FAULTS),
        lambda setting: seeded_faults(FAULTS),
        share=3,
        workers=3,
        fixed=True,
    ),
    Check(
        "kernel_faults",
        "every seeded fault of a kernel's source turns its guard red, in the interpreter",
        len(KERNEL_FAULTS),
        lambda setting: seeded_faults(KERNEL_FAULTS),
        workers=2,
        fixed=True,
        unable=kernels.no_interpreter,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="some of the faults")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--kernel", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.getLogger("bucketgraph").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if options.list:
        print(table())
        return 0
    if options.kernel:
        return _kernel(options.kernel)
    every, missed = [*FAULTS, *KERNEL_FAULTS], []
    trial = seeded_faults(every)
    for seed, fault in enumerate(every):
        if options.only and fault.id not in options.only:
            continue
        started, said = time.perf_counter(), "caught"
        try:
            trial(seed)
        except Exception as error:
            said = str(error)
            missed.append(fault.id)
        print(f"{fault.id:<26} {time.perf_counter() - started:5.1f} s  {said}", flush=True)
    print(f"{len(missed)} faults were not caught" + (f": {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
