"""What a check is, how its cases are run, and what is written down about them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Trial = Callable[[int], None]
SCRIPT = Path(__file__).parents[1] / "verify.py"
MOST_FAILURES = 20  # then a check has said enough


class Wrong(AssertionError):
    """A promise was broken; the text says which and how."""


def require(holds: bool, what: str) -> None:
    """Raise Wrong with `what` unless `holds`."""
    if not holds:
        raise Wrong(what)


@dataclass
class Setting:
    """Where checks run, and what they share: made once, used by every check that asks for it."""

    device: torch.device
    small: bool = False  # fewer lengths and buckets: for seeded faults and tests
    made: dict[object, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@dataclass(frozen=True)
class Check:
    """One promise. `prepare` makes what all cases share and returns the function that runs the case of a seed."""

    name: str
    says: str  # what holds, for a reader of the report
    count: int  # cases asked for on a GPU, at scale 1
    prepare: Callable[[Setting], Trial]
    cpu: float = 1.0  # scale on a CPU where none is given
    unit: int = 1  # cases in one seed
    share: float = 1.0  # of a run's time
    workers: int = 0  # above 0: touches no device, so it may run in so many processes beside the others
    unable: Callable[[Setting], str | None] = lambda setting: None  # why it cannot run here
    environment: Mapping[str, str] = field(default_factory=dict)  # needs a process of its own, with these
    fixed: bool = False  # its cases are a list: neither scale nor time cuts it short

    def seeds(self, setting: Setting, scale: float | None) -> int:
        factor = scale if scale is not None else 1.0 if setting.on_gpu else self.cpu
        return max(1, round(self.count * (1.0 if self.fixed else factor) / self.unit))


@dataclass
class Result:
    """How a check went."""

    name: str
    says: str
    asked: int
    run: int = 0
    failures: int = 0  # failing seeds
    failing_seeds: list[int] = field(default_factory=list)  # the first ones
    first: str | None = None  # what the first one said
    seconds: float = 0.0
    not_run: str | None = None  # the reason
    whole: bool = False  # the cases are a list, not a sample: there is no rate to bound

    @property
    def bound(self) -> float | None:
        """The failure rate is below this at 95 %: the rule of three. None where there was a failure, or no case."""
        return 3 / self.run if self.run and not self.failures and not self.whole else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bound_95": self.bound}

    def add(self, other: Result) -> None:
        """Another process's part of the same check."""
        self.run += other.run
        self.failures += other.failures
        self.failing_seeds = (self.failing_seeds + other.failing_seeds)[:MOST_FAILURES]
        self.first = self.first or other.first
        self.seconds = max(self.seconds, other.seconds)

    def fail(self, seed: int | None, error: BaseException) -> None:
        self.failures += 1
        if seed is not None:
            self.failing_seeds.append(seed)
        where = "set-up: " if seed is None else ""
        self.first = self.first or f"{where}{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def run(
    check: Check,
    setting: Setting,
    seeds: range,
    until: float | None,
    say: Callable[[str], None],
    most_failures: int = MOST_FAILURES,
) -> Result:
    """Cases of `seeds` in order, until `until` (of `time.perf_counter`) has come; at least a tenth of them is run."""
    floor = len(seeds) * check.unit / 10
    result = Result(check.name, check.says, len(seeds) * check.unit, whole=check.fixed)
    started = said = time.perf_counter()
    try:
        trial = check.prepare(setting)
    except Exception as error:
        result.fail(None, error)
        seeds = range(0)
    for seed in seeds:
        now = time.perf_counter()
        if (until is not None and now > until and result.run >= floor) or result.failures >= most_failures:
            break
        if now - said > 10:
            said = now
            say(f"{check.name}: {result.run} of {result.asked}, {result.failures} failures, {now - started:.0f} s")
        try:
            trial(seed)
        except Exception as error:
            result.fail(seed, error)
        result.run += check.unit
    result.seconds = time.perf_counter() - started
    return result


class Workers:
    """A check in processes of its own, over parts of the seeds."""

    def __init__(self, check: Check, seeds: range, count: int, seconds: float | None) -> None:
        self._check, self._asked = check, len(seeds) * check.unit
        count = max(1, min(count, len(seeds)))
        edges = [seeds.start + len(seeds) * i // count for i in range(count + 1)]
        environment = {**os.environ, **check.environment}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "--worker", f"{check.name}:{low}:{high}:{seconds or 0}"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for low, high in itertools.pairwise(edges)
        ]

    def result(self) -> Result:
        """Wait for all of them."""
        whole = Result(self._check.name, self._check.says, self._asked, whole=self._check.fixed)
        for process in self._processes:
            out, err = process.communicate()
            lines = out.strip().splitlines()
            try:
                part = json.loads(lines[-1]) if process.returncode == 0 and lines else None
            except json.JSONDecodeError:
                part = None
            if part is None:
                whole.fail(None, RuntimeError(f"a worker ended with {process.returncode}: {err.strip()[-400:]}"))
            else:
                whole.add(Result(**{key: value for key, value in part.items() if key != "bound_95"}))
        return whole


def versions(device: torch.device) -> dict[str, str]:
    try:
        import triton

        compiler = triton.__version__
    except ImportError:
        compiler = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    made = {"device": name, "python": sys.version.split()[0], "torch": torch.__version__, "triton": compiler}
    return {**made, "cuda": torch.version.cuda or "none", "commit": commit()}


def commit() -> str:
    if "BUCKETGRAPH_COMMIT" in os.environ:
        return os.environ["BUCKETGRAPH_COMMIT"]
    asked = ["git", "-C", str(SCRIPT.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def table(results: Sequence[Result]) -> str:
    lines = [f"{'check':<20} {'cases':>9} {'of':>9} {'failures':>8} {'seconds':>8}  at 95 %"]
    for r in results:
        bound = (
            f"< {r.bound:.2g}" if r.bound else f"not run: {r.not_run}" if r.not_run else "a list" if r.whole else "-"
        )
        lines.append(f"{r.name:<20} {r.run:>9} {r.asked:>9} {r.failures:>8} {r.seconds:>8.1f}  {bound}")
    return "\n".join(lines)
