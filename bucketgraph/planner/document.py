"""A plan as a bucket set: a commented YAML file that `load` takes.

Rules: a ready or own set is the model, and only the planned axes change in it, so inputs, outputs and policies are
never made up; the text is loaded as a `BucketSet` before it is written; the file appears whole or not at all.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bucketgraph import yaml_strict
from bucketgraph.config import BucketSet, find, parse
from bucketgraph.errors import ConfigError

Buckets = Sequence[tuple[int, ...]]
_WIDTH = 120


@dataclass(frozen=True)
class Target:
    """The axes of a set that a plan is for."""

    data: Mapping[str, Any]  # the set as read
    source: str  # its name, for people
    phase: str | None  # prefill or decode of an LLM set
    axes: tuple[str, ...]

    @property
    def title(self) -> str:
        names = " and ".join(self.axes)
        return f"{self.phase}.{names}" if self.phase else names

    @property
    def section(self) -> Mapping[str, Any]:
        """What holds the axes: the set, or one of its phases."""
        section: Mapping[str, Any] = self.data if self.phase is None else self.data["phases"][self.phase]
        return section


def target(like: str | None, axes: str | None, count: int) -> Target:
    """The place for a plan of `count` axes.

    Args:
        like: a set's file or ready name; None is `llm` for one axis and `minilm` for two.
        axes: `tokens`, `batch,tokens` or `prefill.tokens`; None is `prefill.tokens` of an LLM set, the only axis of
            another, or its `tokens` (with `batch` before it for two).

    Raises:
        ConfigError: there is no such set, axis or phase.
    """
    file = find(like or ("llm" if count == 1 else "minilm"))
    data = yaml_strict.read_file(file)
    made = parse(data, str(file))
    names = () if axes is None else tuple(name.strip() for name in axes.split(","))
    phase: str | None = None
    if made.phases is not None:
        first = names[0] if names else "prefill.tokens"
        phase, dot, name = first.partition(".")
        if not dot or phase not in made.phases:
            raise ConfigError("an LLM set has an axis in a phase", given=first, expected="prefill.tokens, decode.batch")
        names = (name, *names[1:])
    present = made.axes if phase is None else (made.phases or {})[phase].axes
    if not names:
        default = ("batch", "tokens")[-count:]
        names = tuple(present) if len(present) == count else default
    if len(names) != count or len(set(names)) < count:
        raise ConfigError("axes of the plan", given=", ".join(names), expected=f"{count}, one for each column")
    if unknown := [name for name in names if name not in present]:
        expected = f"one of {', '.join(present)}"
        raise ConfigError(f"{file.name} has no axis {unknown[0]!r}", expected=expected, hint="name one with --axis")
    found = Target(data, file.stem, phase, names)
    if "buckets" in found.section and set(names) != set(present):
        hint = "plan all of its axes, or give --like a set without `buckets`"
        raise ConfigError(f"{file.name} lists its buckets one by one", given=", ".join(names), hint=hint)
    return found


def filled(place: Target, buckets: Buckets, name: str) -> dict[str, Any]:
    """The set as a mapping, with these buckets `[k][axes]` instead of its own. One axis becomes a list of sizes."""
    order = list(place.section["axes"])
    sizes = {axis: sorted({point[i] for point in buckets}) for i, axis in enumerate(place.axes)}
    section = {**place.section, "axes": {axis: sizes.get(axis, place.section["axes"][axis]) for axis in order}}
    section.pop("buckets", None)
    if len(place.axes) > 1:
        if len(order) > len(place.axes):
            raise ConfigError(f"{place.source} has more axes than the plan", given=", ".join(order))
        at = [place.axes.index(axis) for axis in order]
        section["buckets"] = sorted([point[i] for i in at] for point in buckets)
    if place.phase is None:
        return {**section, "name": name}
    return {**place.data, "name": name, "phases": {**place.data["phases"], place.phase: section}}


def text(place: Target, buckets: Buckets, name: str, remarks: Sequence[str]) -> str:
    """The YAML text, with `remarks` as comments before it. Raises ConfigError if it is no valid set."""
    lines = [line for remark in remarks for line in textwrap.wrap(remark, _WIDTH - 2)]
    body = yaml.safe_dump(filled(place, buckets, name), sort_keys=False, default_flow_style=None, width=_WIDTH)
    whole = "".join(f"# {line}\n" for line in lines) + body
    check(whole)
    return whole


def check(whole: str) -> BucketSet:
    """The set that a text describes. Raises ConfigError if it is none."""
    return parse(yaml_strict.read(whole, "the planned set"), "the planned set")


def require_folder(path: Path | None) -> None:
    """Raises ConfigError if a file cannot be made there."""
    if path is not None and (not path.absolute().parent.is_dir() or path.is_dir()):
        what = "is a folder" if path.is_dir() else "no such folder"
        raise ConfigError(what, given=str(path if path.is_dir() else path.absolute().parent))


def write(path: Path, whole: str | bytes) -> None:
    """Write the file at once: a reader never sees half of it. Raises ConfigError where nothing can be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(whole if isinstance(whole, bytes) else whole.encode())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
