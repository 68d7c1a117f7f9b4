"""Checks of the core: outcomes, ownership of results, failed captures, threads, quiet, and a long run."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketgraph import BucketManager, monitor
from bucketgraph.errors import NoBucketError

from . import graphs as fake
from .core import Check, Setting, Trial, Wrong, require
from .graphs import Rows, graphs, rows, rows_set, served, whole_numbers
from .models import prompts, worlds
from .phases import PHASES

CALLS, SETS = 40, 24  # calls in a case; different bucket sets


def outcomes(setting: Setting) -> Trial:
    """Calls of all kinds: each has the outcome that brute force gives it, its result is right, and all are counted."""
    module = rows(setting)

    def trial(seed: int) -> None:
        drawn = random.Random(seed % SETS)
        sizes = sorted(drawn.sample(range(1, 17), drawn.randint(1, 4)))
        overflow = ("eager", "split", "error")[seed % 3]
        most = drawn.choice((None, None, 1.5, 3.0))
        changed = {"axes": {"batch": sizes}, "overflow": overflow, "max_padding": most}
        manager = setting.once(("outcomes", seed % SETS), lambda: served(setting, module, **changed))
        generator, earlier = random.Random(seed), manager.stats()
        broken = generator.choice((None, None, *sizes))
        for bucket, captured in manager.captured.items():
            captured.error = "broken on purpose" if bucket["batch"] == broken else None
        expected: Counter[str] = Counter()
        for call in range(CALLS):
            count = generator.randint(1, 20)
            x = whole_numbers(setting, count, seed + call)
            kind = _outcome(count, sizes, overflow, most, broken)
            expected[kind] += 1
            try:
                y = manager(x=x)["y"]
            except NoBucketError:
                require(kind == "refused", f"{count} of {sizes} was refused, expected {kind}")
                continue
            require(torch.equal(y, module(x)), f"{count} of {sizes}: the result is wrong")
        stats = manager.stats()
        found = Counter(stats.outcomes) - Counter(earlier.outcomes)
        require(found == expected, f"outcomes {dict(found)}, expected {dict(expected)}")
        ways_out = Counter({kind: expected[kind] for kind in ("eager", "refused", "split")})
        counted = Counter[str]()
        for key, number in (Counter(stats.fallbacks) - Counter(earlier.fallbacks)).items():
            counted[key.partition(":")[0]] += number
        short = [kind for kind, number in ways_out.items() if counted[kind] < number]
        require(not short, f"fallbacks {stats.fallbacks} miss some of {short} in {dict(ways_out)}")
        require(stats.calls - earlier.calls == CALLS, f"{stats.calls - earlier.calls} calls counted of {CALLS}")

    return trial


def _outcome(count: int, sizes: list[int], overflow: str, most: float | None, broken: int | None) -> str:
    covering = [size for size in sizes if size >= count]
    if not covering:
        return {"eager": "eager", "split": "split", "error": "refused"}[overflow]
    if covering[0] == broken or (most is not None and covering[0] > most * count):
        return "eager"
    return "replayed"


def ownership(setting: Setting) -> Trial:
    """Results kept over the next ten replays."""
    module = rows(setting)
    made = {name: served(setting, module, outputs_are=name) for name in ("cloned",)}
    made |= {f"ring {n}": served(setting, module, outputs_are={"ring": n}) for n in (2, 11)}

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        for name, manager in made.items():
            later = int(name.partition(" ")[2] or 11) - 1
            count = generator.randint(1, 16)
            x = whole_numbers(setting, count, seed)
            held = manager(x=x)["y"]
            snapshot = held.clone()
            require(torch.equal(snapshot, module(x)), f"{name}: the result is wrong")
            for call in range(later):
                manager(x=whole_numbers(setting, count if call % 2 else generator.randint(1, 16), seed + 1 + call))
            require(torch.equal(held, snapshot), f"{name}: a result changed within {later} later calls")

    return trial


# -- failed captures ---------------------------------------------------------------------------------------------------


class Fragile(Rows):
    """Fails while the bucket of `at` rows is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.kind = 0, ""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        recording = torch.cuda.is_current_stream_capturing() if x.is_cuda else fake.capturing
        if recording and x.shape[0] == self.at:
            _FAILURES[self.kind](y)
        return y


class _Broken(RuntimeError):
    pass


def _raise(y: Tensor) -> None:
    raise _Broken("broken on purpose")


def _exhaust(y: Tensor) -> None:
    if y.is_cuda:
        torch.empty(1 << 48, dtype=torch.uint8, device=y.device)
    raise torch.OutOfMemoryError("out of memory on purpose")


def _illegal(y: Tensor) -> None:
    y.sum().item()  # a sync, which capture forbids
    raise _Broken("a sync was allowed, as it is without a GPU")


def _collect(y: Tensor) -> None:
    cycle: list[Any] = [torch.empty(1024, device=y.device)]
    cycle.append(cycle)
    del cycle
    gc.collect()


_FAILURES: dict[str, Callable[[Tensor], None]] = {
    "exception": _raise,
    "out of memory": _exhaust,
    "illegal operation": _illegal,
    "garbage collection": _collect,
}


def capture_failure(setting: Setting) -> Trial:
    """At every bucket in every way: that bucket alone runs eagerly and says why, and a later warm-up is whole."""
    cases = [(size, kind) for size in rows_set().axes["batch"] for kind in _FAILURES]

    def trial(seed: int) -> None:
        at, kind = cases[seed % len(cases)]
        module = Fragile().to(setting.device)
        module.table = module.table.to(setting.device)
        module.at, module.kind = at, kind
        with graphs(setting):
            manager = BucketManager(module, rows_set(), device=setting.device)
            report = manager.warmup()
            failed = [row.bucket for row in report.failed]
            allowed = [[f"batch={at}"], []] if kind == "garbage collection" else [[f"batch={at}"]]
            require(failed in allowed, f"{kind} at {at}: buckets {failed} failed")
            require(all(row.error for row in report.failed), "a failure without a reason")
            if setting.on_gpu:
                require(not torch.cuda.is_current_stream_capturing(), f"{kind}: a stream is still capturing")
            _all_right(setting, manager, module, {at} if failed else set())
            module.at = 0
            require(manager.warmup().ok, f"after {kind} at {at}: a later capture failed")
            _all_right(setting, manager, module, set())
        manager.release()

    return trial


def _all_right(setting: Setting, manager: BucketManager, module: Rows, eager: set[int]) -> None:
    before = Counter(manager.stats().outcomes)
    sizes = rows_set().axes["batch"]
    for count in sizes:
        x = whole_numbers(setting, count, count)
        require(torch.equal(manager(x=x)["y"], module(x)), f"bucket {count} is wrong after a failed capture")
    found = Counter(manager.stats().outcomes) - before
    expected = Counter({"replayed": len(sizes) - len(eager), "eager": len(eager)}) + Counter()
    require(found == expected, f"outcomes {dict(found)}, expected {dict(expected)}")


# -- many threads, many calls ------------------------------------------------------------------------------------------

THREADS, PER_THREAD = 8, 250


def threads(setting: Setting) -> Trial:
    """Threads share two managers of one family, switch as often as Python can, and let others in half way."""
    module = rows(setting)
    first = served(setting, module)
    with graphs(setting):
        second = BucketManager(module, rows_set(name="second"), device=setting.device, family=first.family)
        second.warmup()

    def trial(seed: int) -> None:
        wrong: list[str] = []

        def work(number: int) -> None:
            generator = random.Random(seed * THREADS + number)
            batches = [whole_numbers(setting, n, seed + number * 100 + n) for n in range(1, 17)]
            wants = [module(x) for x in batches]
            for call in range(PER_THREAD):
                at = generator.randrange(16)
                try:
                    got = (first if generator.random() < 0.5 else second)(x=batches[at])["y"]
                    if not torch.equal(got, wants[at]):
                        wrong.append(f"thread {number}, call {call}: wrong")
                except Exception as error:
                    wrong.append(f"thread {number}, call {call}: {type(error).__name__}: {error}")
                if wrong:
                    return

        interval, hook = sys.getswitchinterval(), fake.hook[0]
        sys.setswitchinterval(1e-6)
        fake.hook[0] = lambda: threading.Event().wait(0 if seed % 2 else 1e-5)  # gives the others a turn
        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(60)
        finally:
            sys.setswitchinterval(interval)
            fake.hook[0] = hook
        stuck = sum(worker.is_alive() for worker in workers)
        require(not stuck, f"{stuck} threads did not end within 60 s")
        require(not wrong, f"{wrong[0]} ({len(wrong)} threads)" if wrong else "")

    return trial


QUIET = 1000


def quiet(setting: Setting) -> Trial:
    """Dispatches of host and device inputs: nothing compiles, no segment is added, nothing syncs."""
    manager = served(setting)
    here = [whole_numbers(setting, n, n) for n in range(1, 17)]
    there = [x.cpu() for x in here]
    world, order = worlds(setting, "fast")[0], random.Random(0)
    picks = prompts(setting)[:4]
    arrays = []
    for phase in PHASES:
        requests = phase.open(world, picks, order)
        runner = world.runner
        if phase.name == "prefill":
            arrays.append((phase.manager(world), runner.prefill_arrays([(r, len(r.tokens)) for r in requests])))
        else:
            for request, prompt in zip(requests, picks, strict=True):
                request.tokens.append(prompt.forced[0])
            arrays.append((phase.manager(world), runner.decode_arrays(requests)))

    def calls(generator: random.Random, count: int) -> None:
        for _ in range(count):
            at = generator.randrange(16)
            manager(x=(here if generator.random() < 0.7 else there)[at])
            if at == 0:
                owner, inputs = generator.choice(arrays)
                owner(**inputs)

    calls(random.Random(0), 100)

    def trial(seed: int) -> None:
        with monitor.watch(setting.device) as seen:
            calls(random.Random(seed), QUIET)
        require(not seen.any, f"{seen} in {QUIET} dispatches")

    return trial


SOAK = 10_000


def soak(setting: Setting) -> Trial:
    """Dispatches of random sizes: allocated bytes do not move by one on a GPU; resident memory is bounded."""
    manager = served(setting)
    batches = [whole_numbers(setting, n, n) for n in range(1, 17)]
    start: dict[str, float] = {}

    def memory() -> tuple[int, float]:
        gc.collect()
        return torch.cuda.memory_allocated(setting.device) if setting.on_gpu else 0, _resident_mib()

    def calls(generator: random.Random, count: int) -> None:
        for _ in range(count):
            manager(x=batches[generator.randrange(16)])

    calls(random.Random(0), 2000)
    allocated, resident = memory()
    start["calls"] = 0

    def trial(seed: int) -> None:
        calls(random.Random(seed), SOAK)
        start["calls"] += SOAK
        now, here = memory()
        require(now == allocated, f"{now - allocated:+} bytes on the device after {start['calls']:.0f} calls")
        limit = 8 + start["calls"] / 100_000
        require(here - resident < limit, f"{here - resident:+.1f} MiB resident after {start['calls']:.0f} calls")

    return trial


def _resident_mib() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError as error:
        raise Wrong("resident memory cannot be read here") from error
    return pages * 4096 / 2**20


CHECKS = (
    Check("outcomes", "each call has one outcome, the right one, counted", 20_000, outcomes, cpu=0.5, unit=CALLS),
    Check("ownership", "results keep over the calls that they promise", 500, ownership, cpu=0.5, share=0.5),
    Check("capture_failure", "a failed capture costs its bucket", 20, capture_failure, share=0.7, fixed=True),
    Check("threads", "8 threads, right answers", 16_000, threads, cpu=0.25, unit=THREADS * PER_THREAD),
    Check("quiet", "no compile, segment or sync", 100_000, quiet, cpu=0.1, unit=QUIET, share=2),
    Check("soak", "memory is flat", 1_000_000, soak, cpu=0.1, unit=SOAK, share=5),
)
