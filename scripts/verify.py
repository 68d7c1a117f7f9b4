#!/usr/bin/env python3
"""Repeats every promise over many random cases, and writes down how many: the figures of the README come from here.

`verify.py` runs all checks; `--case CHECK:SEED` repeats one case, as printed for each failure. A check that did not
run says why, and one that ran out of time says how far it came. Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from seeded_faults import CHECKS as FAULTS
from verify import calls, kernels, lives, phases, plans, sanitizer, tampers
from verify.core import Check, Result, Setting, Workers, run, table, versions

CHECKS: tuple[Check, ...] = (
    *plans.CHECKS,
    *kernels.CHECKS,
    *phases.CHECKS,
    *lives.CHECKS,
    *calls.CHECKS,
    *tampers.CHECKS,
    *FAULTS,
    *sanitizer.CHECKS,
)
MANY_CORES = 8  # then host checks run beside those of the device


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.getLogger("bucketgraph").setLevel(logging.ERROR)  # ways out are provoked by the thousand
    torch.set_num_threads(1)  # small matrices: threads cost more than they bring
    if options.sanitized:
        return sanitizer.run_part(options.sanitized)
    if options.worker:
        return _work(options.worker)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    setting = Setting(torch.device("cuda", 0) if device.startswith("cuda") else torch.device(device))
    if options.case:
        return _case(options.case, setting)
    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    started = time.perf_counter()
    results = run_all(chosen, setting, options.scale, options.seed, options.minutes)
    print("\n" + table(results), flush=True)
    failed = [result for result in results if result.failures]
    for result in failed:
        print(f"\n{result.name}: {result.first}")
        for seed in result.failing_seeds[:3]:
            print(f"  repeat: python3 scripts/verify.py --device {device} --case {result.name}:{seed}")
    seconds = time.perf_counter() - started
    report = {
        "ok": not failed,
        **versions(setting.device),
        "seed": options.seed,
        "scale": options.scale,
        "seconds": round(seconds, 1),
        "checks": [result.as_dict() for result in results],
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\n{len(results) - len(failed)} of {len(results)} checks without a failure in {seconds:.0f} s")
    return 1 if failed else 0


def run_all(
    checks: Sequence[Check], setting: Setting, scale: float | None, seed: int, minutes: float | None
) -> list[Result]:
    """Each check in its share of the time; what one leaves is the next one's. A list of cases is run to its end."""
    started = time.perf_counter()
    total = None if minutes is None else 60 * minutes
    beside: dict[str, Workers] = {}
    if (os.cpu_count() or 1) >= MANY_CORES:
        for check in checks:
            if check.workers and not check.unable(setting):
                seeds = range(seed, seed + check.seeds(setting, scale))
                beside[check.name] = Workers(
                    check, seeds, check.workers, None if total is None or check.fixed else 0.85 * total
                )
    here = [check for check in checks if check.name not in beside]
    shares = sum(check.share for check in here)
    results: dict[str, Result] = {}
    for check in here:
        now = time.perf_counter()
        left = None if total is None or check.fixed else (started + total - now) * check.share / shares
        shares -= check.share
        seeds = range(seed, seed + check.seeds(setting, scale))
        if reason := check.unable(setting):
            results[check.name] = Result(check.name, check.says, 0, not_run=reason)
        elif check.environment:
            results[check.name] = Workers(check, seeds, 1, left).result()
        else:
            results[check.name] = run(check, setting, seeds, None if left is None else now + left, _say)
        _say_result(results[check.name])
    for name, workers in beside.items():
        results[name] = workers.result()
        _say_result(results[name])
    return [results[check.name] for check in checks]


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def _say_result(result: Result) -> None:
    how = result.not_run or f"{result.run} of {result.asked}, {result.failures} failures, {result.seconds:.1f} s"
    print(f"{result.name}: {how}", flush=True)


def _find(name: str) -> Check:
    for check in CHECKS:
        if check.name == name:
            return check
    raise SystemExit(f"no check {name}; there are {', '.join(check.name for check in CHECKS)}")


def _case(case: str, setting: Setting) -> int:
    name, _, seed = case.partition(":")
    check = _find(name)
    if not seed.lstrip("-").isdecimal():
        raise SystemExit(f"--case {case}: expected CHECK:SEED")
    seeds = range(int(seed), int(seed) + 1)
    inline = all(os.environ.get(key) == value for key, value in check.environment.items())
    result = run(check, setting, seeds, None, _say) if inline else Workers(check, seeds, 1, None).result()
    print(f"{case}: {result.first or 'no failure'}")
    return 1 if result.failures else 0


def _work(worker: str) -> int:
    """A part of a check's seeds, in this process; the result is the last line."""
    name, low, high, seconds = worker.split(":")
    until = time.perf_counter() + float(seconds) if float(seconds) else None
    result = run(_find(name), Setting(torch.device("cpu")), range(int(low), int(high)), until, lambda text: None)
    print(json.dumps(result.as_dict()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[check.name for check in CHECKS])
    parser.add_argument("--scale", type=float, help="of the number of cases; 1 on a GPU, less on a CPU")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow it")
    parser.add_argument("--case", metavar="CHECK:SEED", help="repeat one case")
    parser.add_argument("--json", metavar="FILE", help="write the report")
    parser.add_argument("--minutes", type=float, help="stop each check early so that the run takes so long")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--sanitized", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
