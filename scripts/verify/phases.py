"""Checks of prefill and decode on small language models: the same bits whatever is around, before and behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bucketgraph.llm.request import Request
from bucketgraph.manager import BucketManager

from .core import Check, Setting, Trial, Wrong, require
from .models import MIXES, STEPS, Prompt, Right, World, llm_set, prompts, right, worlds

Found = tuple[Tensor, Tensor]  # tokens [R], logits [R, vocab]


@dataclass(frozen=True)
class Phase:
    """How a case of a phase is set up in a world and run; a phase written later is verified by being listed."""

    name: str
    open: Callable[[World, Sequence[Prompt], random.Random], list[Request]]
    run: Callable[[World, Sequence[Request], Sequence[Prompt]], Found]  # again and again, with the same result
    manager: Callable[[World], BucketManager]


def _open_cold(world: World, picks: Sequence[Prompt], order: random.Random) -> list[Request]:
    return [world.open(prompt, order) for prompt in picks]


def _open_filled(world: World, picks: Sequence[Prompt], order: random.Random) -> list[Request]:
    requests = _open_cold(world, picks, order)
    world.prefill(requests)
    return requests


def _run_prefill(world: World, requests: Sequence[Request], picks: Sequence[Prompt]) -> Found:
    for request, prompt in zip(requests, picks, strict=True):
        request.tokens, request.computed = list(prompt.tokens), 0
    return world.prefill(requests)


def _run_decode(world: World, requests: Sequence[Request], picks: Sequence[Prompt]) -> Found:
    for request, prompt in zip(requests, picks, strict=True):
        request.tokens, request.computed = list(prompt.tokens), len(prompt.tokens)
    return world.decode(requests, [prompt.forced[0] for prompt in picks])


PREFILL = Phase("prefill", _open_cold, _run_prefill, lambda world: world.runner.prefill_manager)
DECODE = Phase("decode", _open_filled, _run_decode, lambda world: world.runner.decode_manager)
PHASES = (PREFILL, DECODE)


def same(got: Found, want: Found, what: str) -> None:
    """Bit for bit."""
    for name, one, other in zip(("tokens", "logits"), got, want, strict=True):
        if not torch.equal(one, other):
            rows = [i for i in range(len(one)) if not torch.equal(one[i], other[i])]
            apart = float((one.float() - other.float()).abs().max())
            raise Wrong(f"{what}: {name} of rows {rows} of {len(one)} differ, by up to {apart:.3g}")


def _draw(setting: Setting, generator: random.Random, most: int) -> list[int]:
    """Which prompts."""
    pool = len(prompts(setting))
    return generator.sample(range(pool), min(generator.randint(1, most), pool))


def prefill_exact(setting: Setting) -> Trial:
    """A random batch of prompts in a random world against each alone in a bucket of its own length."""
    truth, pool, places = right(setting), prompts(setting), worlds(setting)

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        world, picks = generator.choice(places), _draw(setting, generator, 8)
        requests = _open_cold(world, [pool[i] for i in picks], generator)
        got = world.prefill(requests)
        world.close(requests)
        same(got, _truth(truth, [(i, 0) for i in picks]), f"lengths {[len(pool[i].tokens) for i in picks]}")

    return trial


ROUNDS = 4


def decode_exact(setting: Setting) -> Trial:
    """Rounds of random batches of requests that are at different steps, against each alone in a bucket of one."""
    truth, pool, places = right(setting), prompts(setting), worlds(setting)

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        world, picks = generator.choice(places), _draw(setting, generator, 8)
        requests = _open_filled(world, [pool[i] for i in picks], generator)
        steps = [0] * len(picks)
        for _ in range(ROUNDS):
            batch = generator.sample(range(len(picks)), generator.randint(1, len(picks)))
            got = world.decode([requests[r] for r in batch], [pool[picks[r]].forced[steps[r]] for r in batch])
            for row in batch:
                steps[row] += 1
            same(got, _truth(truth, [(picks[r], steps[r]) for r in batch]), f"rows {batch} at steps {steps}")
        world.close(requests)

    return trial


def _truth(truth: Right, at: Sequence[tuple[int, int]]) -> Found:
    """(prompt, step) alone."""
    return torch.stack([truth.tokens[i][s] for i, s in at]), torch.stack([truth.logits[i][s] for i, s in at])


def graph_equals_eager(setting: Setting) -> Trial:
    sets = [(numerics, kind) for numerics in ("fast", "invariant") for kind in ("auto", "eager")]
    made = {key: worlds(setting, *key) for key in sets}
    pool = prompts(setting)

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        numerics, place = generator.choice(("fast", "invariant")), generator.randrange(len(made["fast", "auto"]))
        chosen = [pool[i] for i in _draw(setting, generator, 8)]
        found: list[list[Found]] = []
        for kind in ("auto", "eager"):
            world = made[numerics, kind][place]
            require(world.executable == ("cudagraph" if kind == "auto" else "eager"), f"ran on {world.executable}")
            requests = _open_cold(world, chosen, random.Random(seed))
            found.append([world.prefill(requests), _run_decode(world, requests, chosen)])
            world.close(requests)
        for phase, graph, eager in zip(PHASES, *found, strict=True):
            same(graph, eager, f"{phase.name}, {numerics}")

    return trial


# -- what lies around a call must not matter, in fast numerics either: the shapes are the same both times -------------


def _twice(disturb: Callable[[World, Phase, random.Random, list[Request]], None]) -> Callable[[Setting], Trial]:
    """The same call, before and after `disturb`."""

    def prepare(setting: Setting) -> Trial:
        places, pool = worlds(setting, "fast"), prompts(setting)

        def trial(seed: int) -> None:
            generator = random.Random(seed)
            world, phase = generator.choice(places), generator.choice(PHASES)
            chosen = [pool[i] for i in _draw(setting, generator, 6)]
            requests = phase.open(world, chosen, generator)
            before = phase.run(world, requests, chosen)
            disturb(world, phase, generator, requests)
            after = phase.run(world, requests, chosen)
            world.close(requests)
            same(after, before, phase.name)

        return trial

    return prepare


def _poison(world: World, phase: Phase, generator: random.Random, requests: list[Request]) -> None:
    """Arena, staging and every free page: NaN, infinities, huge ids, noise, or what the last call left."""
    arena = phase.manager(world)._arena
    assert arena is not None, "a warm manager has an arena"
    if world.runner.model.weights.embed.device.type == "cuda":
        torch.cuda.synchronize()
    pattern = generator.choice((0xFF, 0x7F, 0x80, None, "noise"))
    staging = arena.staging if generator.random() < 0.5 else ()
    if staging:  # what a fill left there is remembered, since fills alone write it
        arena.forget()
    for buffer in (arena.device_bytes, *staging):
        if pattern == "noise":
            buffer.random_(0, 256, generator=torch.Generator(buffer.device).manual_seed(generator.getrandbits(31)))
        elif pattern is not None:
            buffer.fill_(pattern)
    if world.cache._free:
        free = torch.tensor(world.cache._free, device=world.cache.data.device)
        value = generator.choice((float("nan"), float("inf"), float("-inf"), 1e30, 3.0))
        world.cache.data.index_fill_(2, free, value)


def _history(world: World, phase: Phase, generator: random.Random, requests: list[Request]) -> None:
    """Twenty calls of other sizes, in both phases."""
    others: list[Request] = []
    for _ in range(20):
        room = [n for n in range(1, 150) if world.cache.pages_for(n + 1) <= world.cache.free_pages]
        if others and (generator.random() < 0.5 or not room):
            count = generator.randint(1, len(others))
            world.decode(others[:count], [generator.randrange(100) for _ in range(count)])
            world.close(others[:count])
            others = others[count:]
            continue
        tokens = tuple(generator.randrange(100) for _ in range(generator.choice(room)))
        other = Prompt(tokens, (), requests[0].params, 0)
        others.append(world.open(other, generator, 1))
        world.prefill(others[-1:])
    world.close(others)


def neighbours(setting: Setting) -> Trial:
    """Row 0 beside others of the same lengths and other tokens, whose KV may be NaN."""
    places, pool = worlds(setting, "fast"), prompts(setting)

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        world, phase = generator.choice(places), generator.choice(PHASES)
        chosen = [pool[i] for i in _draw(setting, generator, 6)]
        others = [chosen[0]]
        for prompt in chosen[1:]:
            tokens, forced = (tuple(generator.randrange(500) for _ in old) for old in (prompt.tokens, prompt.forced))
            others.append(Prompt(tokens, forced, prompt.params, generator.getrandbits(62)))
        requests = phase.open(world, chosen, generator)
        before = phase.run(world, requests, chosen)
        if phase is DECODE and len(requests) > 1 and generator.random() < 0.5:
            pages = [page for request in requests[1:] for page in request.pages]
            world.cache.data.index_fill_(2, torch.tensor(pages, device=world.cache.data.device), float("nan"))
        for request, prompt in zip(requests, others, strict=True):
            request.params, request.seed = prompt.params, prompt.seed
        after = phase.run(world, requests, others)
        world.close(requests)
        same((after[0][:1], after[1][:1]), (before[0][:1], before[1][:1]), phase.name)

    return trial


# -- the two phases against each other ---------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of the largest logit


def prefill_decode(setting: Setting) -> Trial:
    """prefill(n) and k decodes against prefill(n + k): float32, and on a GPU bfloat16, too."""
    dtypes = (torch.float32, torch.bfloat16) if setting.on_gpu else (torch.float32,)
    pairs = list(zip(("odd", "chunks"), MIXES, strict=False))
    make = lambda dtype: [World(setting, llm_set(name, "fast"), dtype, mix) for name, mix in pairs]  # noqa: E731
    made = {dtype: setting.once(("prefill_decode", dtype), lambda dtype=dtype: make(dtype)) for dtype in dtypes}
    pool = prompts(setting)

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        dtype = generator.choice(dtypes)
        world = generator.choice(made[dtype])
        chosen = [pool[i] for i in _draw(setting, generator, 4)]
        requests = [world.open(prompt, generator) for prompt in chosen]
        got = world.prefill(requests)[1]
        for step in range(STEPS):
            got = world.decode(requests, [prompt.forced[step] for prompt in chosen])[1]
        world.close(requests)
        whole = [Prompt(p.tokens + p.forced, (), p.params, p.seed) for p in chosen]
        requests = [world.open(prompt, generator, 0) for prompt in whole]
        want = world.prefill(requests)[1]
        world.close(requests)
        error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
        require(error <= TOLERANCE[dtype], f"{dtype}: apart by {error:.2e} of the largest logit")

    return trial


def warm_up(setting: Setting) -> Trial:
    """Every bucket of every small set passes warm-up: its examples lie on pages that are NaN wherever no token is."""

    def trial(seed: int) -> None:
        names = ("chunks", "odd") if setting.small else ("wide", "chunks", "ladder", "odd")
        name, numerics = names[seed % len(names)], ("fast", "invariant")[seed % 2]
        world = World(setting, llm_set(name, numerics, warmup={"self_check": "full"}))
        require(world.cache.is_idle, "warm-up kept pages")
        require(not bool(world.cache.data.any()), "warm-up left something in the KV cache")
        world.runner.release()

    return trial


def _exact_says(phase: str) -> str:
    return f"invariant {phase}: logits and tokens of a request are the bits of the request alone in its exact bucket"


CHECKS = (
    Check("warm_up", "every bucket passes the full self-check", 8, warm_up, share=0.5, fixed=True),
    Check("prefill_exact", _exact_says("prefill"), 10_000, prefill_exact, cpu=0.02, share=3),
    Check("decode_exact", _exact_says("decode"), 10_000, decode_exact, cpu=0.03, unit=ROUNDS, share=3),
    Check(
        "graph_equals_eager",
        "a graph gives the bits of the eager function in the same bucket",
        10_000,
        graph_equals_eager,
        unit=len(PHASES),
        share=4,
        unable=lambda setting: None if setting.on_gpu else "without a GPU there is no graph to compare",
    ),
    Check("poison", "no byte left in arena, staging or free pages", 5_000, _twice(_poison), cpu=0.03, share=2),
    Check("neighbours", "other rows, NaN ones too", 2_000, neighbours, cpu=0.05, share=1),
    Check("history", "any twenty calls before", 2_000, _twice(_history), cpu=0.02, share=3),
    Check("prefill_decode", "prefill(n) and k decodes give prefill(n + k)", 1_000, prefill_decode, cpu=0.1, share=2),
)
