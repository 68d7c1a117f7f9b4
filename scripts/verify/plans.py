"""Checks of pure integers and bytes: the choice of a bucket, pad rules, and bucket sets read from text."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketgraph import buckets, config, yaml_strict
from bucketgraph.buckets import Lattice
from bucketgraph.config import BucketSet, load, parse
from bucketgraph.errors import ConfigError
from bucketgraph.slots import Arena, Slot, StaticInputs

from .core import Check, Setting, Trial, require

READY = sorted((Path(config.__file__).parent / "configs").glob("*.yaml"))
LOOKUPS = 2000


def bucket_choice(setting: Setting) -> Trial:
    def trial(seed: int) -> None:
        rng = np.random.default_rng(seed)
        axes, points = _random_axes(rng)
        try:
            lattice = Lattice(axes, points=points)
        except ConfigError as error:  # a list of points may hold one that another covers at no more cost
            require(
                points is not None and "reached by no request" in str(error), f"a good lattice was refused: {error}"
            )
            return
        names = list(axes)
        wanted = np.stack([_near(rng, np.array(axes[name]), LOOKUPS) for name in names], axis=1)
        _compare(lattice, wanted)

    return trial


def _random_axes(rng: np.random.Generator) -> tuple[dict[str, list[int]], list[tuple[int, ...]] | None]:
    axes: dict[str, list[int]] = {}
    for name in ("tokens", "batch")[: int(rng.integers(1, 3))]:
        if rng.random() < 0.5:
            step = int(rng.choice([1, 8, 16]))
            start = step * int(rng.integers(1, 5))
            to, growth = start + step * int(rng.integers(0, 300)), float(rng.uniform(1.05, 3.0))
            sizes = list(config.ladder(start, to, growth, step))
            require(sizes[-1] == to and sizes[0] == start, f"a ladder from {start} to {to} is {sizes}")
            require(all(a < b and b % step == 0 for a, b in itertools.pairwise(sizes)), f"ladder {sizes}")
        else:
            top = int(rng.choice([12, 300, 5000, 3_000_000]))  # the last is looked up by bisection
            sizes = sorted({int(n) for n in rng.integers(1, top, int(rng.integers(1, 12)))})
        axes[name] = sizes[-12:] if rng.random() < 0.5 else sizes
    grid = [(a, b) for a in axes["tokens"] for b in axes.get("batch", [])]
    if not grid or rng.random() < 0.5:
        return axes, None
    keep = [grid[i] for i in sorted(rng.choice(len(grid), min(len(grid), 6), replace=False))]
    return {"tokens": sorted({a for a, _ in keep}), "batch": sorted({b for _, b in keep})}, keep


def _near(rng: np.random.Generator, sizes: np.ndarray, count: int) -> np.ndarray:
    """Lengths at, just below and just above the sizes, and others up to past the largest."""
    edges = rng.choice(sizes, count) + rng.integers(-1, 2, count)
    anywhere = rng.integers(1, int(sizes[-1] * 1.1) + 3, count)
    return np.maximum(np.where(rng.random(count) < 0.5, edges, anywhere), 1)


def _compare(lattice: Lattice, wanted: np.ndarray) -> None:
    """Every lookup against all buckets: the cheapest that covers, by work and then volume; an exact fit is itself."""
    sizes = np.array([bucket.sizes for bucket in lattice.buckets])  # [buckets, axes]
    work = np.array([lattice.work_of(bucket.sizes) for bucket in lattice.buckets], dtype=np.int64)
    cost = np.where((sizes[None] >= wanted[:, None]).all(axis=2), work[None], np.iinfo(np.int64).max)
    best = cost.min(axis=1)
    for row, least in zip(wanted.tolist(), best.tolist(), strict=True):
        plan = lattice.plan(row)
        if plan.bucket is None:
            require(least == np.iinfo(np.int64).max, f"{row} got no bucket of {sizes.tolist()}")
            continue
        fits = all(b >= n for b, n in zip(plan.bucket.sizes, row, strict=True))
        require(fits and plan.padded == least, f"{row} got {plan.bucket}, the cheapest covering costs {least}")


def shipped_sets(setting: Setting) -> Trial:
    """Every length of every axis of every ready set, the other axes at and around their sizes."""

    def trial(seed: int) -> None:
        made = load(READY[seed % len(READY)])
        for phase in made.phases.values() if made.phases is not None else (made,):
            lattice = phase.lattice()
            around = [sorted({max(1, s + d) for s in a.sizes for d in (-1, 0, 1)}) for a in lattice.axes]
            for at, axis in enumerate(lattice.axes):
                others = [line if i != at else range(1, axis.largest + 3) for i, line in enumerate(around)]
                grid = np.stack([g.ravel() for g in np.meshgrid(*others, indexing="ij")], axis=1)
                stride = max(1, len(grid) // 20_000) if len(others) > 1 else 1
                _compare(lattice, grid[::stride])

    return trial


def pad_rules(setting: Setting) -> Trial:
    """What lies in a slot after `fill`, against numpy's own padding, whatever lay there before."""

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        rank = generator.randint(1, 3)
        axes = [f"a{i}" for i in range(rank)]
        padded = [generator.randint(1, 9) for _ in axes]
        real = [generator.randint(1, size) for size in padded]
        rule = generator.choice(("zero", "skip", "repeat_last", 7))
        spec = config.InputSpec(shape=tuple(axes), dtype=generator.choice(("int64", "int32", "int8")), pad=rule)
        slot = Slot.from_spec("x", spec)
        bucket = buckets.Bucket(tuple(axes), tuple(padded))
        inputs = StaticInputs([slot], bucket, Arena([slot], [bucket], torch.device("cpu")))
        inputs.poison(generator.choice((0xFF, 0x7F, 0x55)))
        rng = np.random.default_rng(seed)
        x = rng.integers(-100, 100, real)
        inputs.fill({"x": torch.from_numpy(x).to(slot.dtype)})
        tail = [(0, size - n) for size, n in zip(padded, real, strict=True)]
        fill = {"zero": 0, "skip": -1, 7: 7}
        mode: dict[str, Any] = {"mode": "edge"} if rule == "repeat_last" else {"constant_values": fill[rule]}
        want = np.pad(x, tail, **mode)
        require(np.array_equal(inputs.views["x"].numpy(), want), f"pad {rule}, {real} in {padded}")

    return trial


# -- text that is no bucket set ----------------------------------------------------------------------------------------

SMALL = """version: 1
name: small
axes: {batch: [1, 2, 4], tokens: {from: 16, to: 64, growth: 1.5, multiple_of: 16}}
inputs:
  ids: {shape: [batch, tokens], dtype: int64, pad: 0, range: [0, 9]}
outputs:
  y: {shape: [batch, any]}
overflow: split
outputs_are: {ring: 3}
"""
LLM = """version: 1
name: llm
phases:
  prefill: {axes: {tokens: [16, 64], requests: [4]}}
  decode: {axes: {batch: [1, 4]}}
kv_cache: {page_size: 16, memory: 64MiB}
"""
# Each must be refused: to accept it would be to guess what was meant.
ABUSES: dict[str, str] = {
    "duplicate key": SMALL + "overflow: eager\n",
    "duplicate key inside": SMALL.replace("dtype: int64,", "dtype: int64, dtype: int32,"),
    "duplicate axis": SMALL.replace("{batch: [1, 2, 4],", "{batch: [1], batch: [1, 2, 4],"),
    "yes for a boolean": SMALL + "warmup: {lazy: yes}\n",
    "a float for a size": SMALL.replace("[1, 2, 4]", "[1, 2, 1e3]"),
    "octal": SMALL.replace("[1, 2, 4]", "[1, 2, 0100]"),
    "sexagesimal": SMALL.replace("[1, 2, 4]", "[1, 2, 1:30]"),
    "unknown key": SMALL + "overflw: eager\n",
    "two documents": SMALL + "---\n" + SMALL,
    "a tag": SMALL.replace("name: small", "name: !!python/object:os.system x"),
    "descending": SMALL.replace("[1, 2, 4]", "[1, 4, 2]"),
    "twice the same size": SMALL.replace("[1, 2, 4]", "[1, 2, 2]"),
    "zero": SMALL.replace("[1, 2, 4]", "[0, 2, 4]"),
    "an axis that nobody declared": SMALL.replace("shape: [batch, tokens]", "shape: [batch, tokns]"),
    "nothing": "",
    "a list": "[1, 2]",
    "deep": "a: " + "[" * 5000,
    "bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"b{i}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for i, (p, c) in
                                                 enumerate(zip("abcdefgh", "bcdefghi", strict=True))),
    "no decode": LLM.replace("  decode: {axes: {batch: [1, 4]}}\n", ""),
    "odd page": LLM.replace("page_size: 16", "page_size: 17"),
    "skip on floats": SMALL.replace("dtype: int64, pad: 0, range: [0, 9]", "dtype: float32, pad: skip"),
}  # fmt: skip
TOKENS = (
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
    "- ",
    "&a",
    "*a",
    "<<",
    "!!int",
    "|",
    "#",
    "\n",
    "  ",
    "\t",
    "'",
    '"',
    "\0",
    "%",
)
VALUES = ("1e3", "yes", "~", ".nan", "-1", "0", "99999999999999999999", "2026-01-01", "0x10", "1_000", "''", "[]", "{}")


def yaml_fuzz(setting: Setting) -> Trial:
    bases = [SMALL, LLM, SMALL, LLM, *(path.read_text() for path in READY)]
    abuses = list(ABUSES.items())

    def trial(seed: int) -> None:
        if seed % 1000 < len(abuses):
            name, text = abuses[seed % 1000]
        else:
            generator = random.Random(seed)
            name, text = "", generator.choice(bases)
            for _ in range(generator.randint(1, 4)):
                text = generator.choice(_MUTATIONS)(text, generator)
        seconds = []
        while not seconds or (seconds[-1] >= 1.0 and len(seconds) < 3):  # a slow text is slow each time
            started = time.process_time()
            accepted = _accepts(text)
            seconds.append(time.process_time() - started)
        require(not (name and accepted), f"{name} was accepted")
        require(min(seconds) < 1.0, f"reading took {min(seconds):.2f} s")

    return trial


def _accepts(text: str) -> bool:
    """Whether it is a bucket set. Anything else than a set or a ConfigError with words comes out as it is."""
    try:
        made = parse(yaml_strict.read(text, "fuzz.yaml"), "fuzz.yaml")
    except ConfigError as error:
        require(str(error).startswith("fuzz.yaml: "), f"an error that does not name the file: {error}")
        return False
    require(isinstance(made, BucketSet), "parse returned no bucket set")
    return True


def _byte(text: str, generator: random.Random) -> str:
    at = generator.randrange(len(text) + 1)
    return text[:at] + chr(generator.choice((generator.randrange(128), generator.randrange(0x2000)))) + text[at + 1 :]


def _token(text: str, generator: random.Random) -> str:
    at = generator.randrange(len(text) + 1)
    return text[:at] + generator.choice(TOKENS) + text[at:]


def _value(text: str, generator: random.Random) -> str:
    found = list(re.finditer(r"[\w.]+", text))
    if not found:
        return text
    match = generator.choice(found)
    return text[: match.start()] + generator.choice(VALUES) + text[match.end() :]


def _line(text: str, generator: random.Random) -> str:
    lines = text.split("\n")
    one, other = generator.randrange(len(lines)), generator.randrange(len(lines))
    action = generator.randrange(3)
    if action == 0:
        lines.insert(other, lines[one])
    elif action == 1:
        del lines[one]
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return "\n".join(lines)


def _cut(text: str, generator: random.Random) -> str:
    start = generator.randrange(len(text) + 1)
    return text[:start] + text[start + generator.randrange(1, 30) :]


_MUTATIONS: tuple[Callable[[str, random.Random], str], ...] = (_byte, _token, _value, _line, _cut)

CHECKS = (
    Check(
        "bucket_choice",
        "the cheapest covering bucket, or none",
        1_000_000,
        bucket_choice,
        unit=LOOKUPS,
        share=2,
        workers=1,
    ),
    Check("shipped_sets", "every length of every ready set", len(READY), shipped_sets, workers=1, fixed=True),
    Check("pad_rules", "fill against numpy's padding", 20_000, pad_rules, cpu=0.5, share=0.5, workers=1),
    Check("yaml_fuzz", "a bucket set or a ConfigError", 100_000, yaml_fuzz, cpu=0.1, share=3, workers=4),
)
