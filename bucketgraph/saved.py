"""Files of statistics: the counters of a manager, or of both phases of an LLM, with the bucket set they belong to.

Rules: a file is JSON that `bucketgraph report` shows and `bucketgraph plan` plans from; it appears whole or not at all;
what is read is checked, since it may come from anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import TypeAdapter, ValidationError

from bucketgraph.config import BucketSet, PhaseSpec
from bucketgraph.errors import ConfigError
from bucketgraph.stats import Stats

FORMAT, VERSION = "bucketgraph stats", 1


@dataclass(frozen=True)
class Saved:
    """What a file of statistics holds."""

    title: str
    phases: dict[str, Stats]  # by name; the only one of a set without phases is ""
    set_text: str | None = None  # the bucket set, as YAML; None where it is not known

    @classmethod
    def of(cls, phases: Mapping[str, Stats], spec: PhaseSpec) -> Self:
        """Counters with the set that they belong to."""
        data = spec.model_dump(mode="json", exclude_unset=True)
        title = spec.name if isinstance(spec, BucketSet) else next(iter(phases.values())).name
        if not isinstance(spec, BucketSet):  # a phase by itself has no name, and becomes a set by one
            data = {"version": 1, "name": title, **data}
        return cls(title, dict(phases), yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, at once: a reader never sees half a file. Raises OSError."""
        parts: dict[str, Any] = {name: stats.as_dict() for name, stats in self.phases.items()}
        body = parts[""] if "" in parts else {"phases": list(parts), **parts}
        whole = {"format": FORMAT, "version": VERSION, "title": self.title, "set": self.set_text, **body}
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a file.

        Raises:
            ConfigError: it is missing, empty, no JSON, no statistics, of an unknown version, or damaged; the text names
                the file and the value.
        """
        name = Path(path).name
        try:
            text = Path(path).read_text(encoding="utf-8")
            data = json.loads(text) if text.strip() else None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: not saved statistics: not JSON: {error}") from error
        if data is None:
            raise ConfigError(f"{name}: is empty", expected="what save_stats wrote")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ConfigError(f"{name}: not saved statistics", expected="what save_stats of a manager or an LLM wrote")
        if data.get("version") != VERSION:
            given = repr(data.get("version"))[:40]
            raise ConfigError(f"{name}: an unknown version of statistics", given=given, expected=VERSION)
        title, set_text, phases = data.get("title"), data.get("set"), data.get("phases")
        if not isinstance(title, str):
            raise _damaged(name, "title", title, "a name")
        if set_text is not None and not isinstance(set_text, str):
            raise _damaged(name, "set", set_text, "the set's YAML, or nothing")
        if phases is None:
            return cls(title, {"": _stats(name, "", data)}, set_text)
        if not isinstance(phases, list) or not phases or not all(isinstance(phase, str) and phase for phase in phases):
            raise _damaged(name, "phases", phases, "names of its parts")
        return cls(title, {phase: _stats(name, f"{phase}.", data.get(phase)) for phase in phases}, set_text)


def _stats(name: str, prefix: str, data: object) -> Stats:
    """One phase's counters. Raises ConfigError naming the value that is wrong."""
    if not isinstance(data, dict):
        raise _damaged(name, prefix.rstrip("."), data, "an object")
    try:
        stats = TypeAdapter(Stats).validate_python({**data, "sizes": _sizes(name, prefix, data.get("sizes"))})
    except ValidationError as error:
        first = error.errors()[0]
        where = prefix + ".".join(map(str, first["loc"]))
        raise _damaged(name, where, first.get("input"), first["msg"][0].lower() + first["msg"][1:]) from error
    if not stats.buckets or not stats.axes or not stats.work or not set(stats.work) <= set(stats.axes):
        raise _damaged(name, f"{prefix}axes", list(stats.axes), "axes, work among them, and buckets")
    for bucket in stats.buckets:
        if tuple(bucket.sizes) != stats.axes:
            raise _damaged(name, f"{prefix}buckets.sizes", bucket.sizes, f"one for each of {', '.join(stats.axes)}")
    if wrong := [sizes for sizes in stats.sizes if len(sizes) != len(stats.work)]:
        raise _damaged(name, f"{prefix}sizes", ",".join(map(str, wrong[0])), f"{len(stats.work)} for each call")
    return stats


def _sizes(name: str, prefix: str, data: object) -> dict[tuple[int, ...], Any]:
    """`{"batch,tokens": {"4,128": 17}}` as `{(4, 128): 17}`; the counts are checked with the rest."""
    if not isinstance(data, dict) or len(data) > 1 or not all(isinstance(rows, dict) for rows in data.values()):
        raise _damaged(name, f"{prefix}sizes", data, 'such as {"tokens": {"384": 17}}')
    rows: dict[str, Any] = next(iter(data.values()), {})
    found = {}
    for key, count in rows.items():
        parts = key.split(",")
        if not all(part.isascii() and part.isdecimal() and len(part) < 11 for part in parts):
            raise _damaged(name, f"{prefix}sizes", repr(key), "whole numbers")
        found[tuple(map(int, parts))] = count
    return found


def _damaged(name: str, where: str, given: object, expected: str) -> ConfigError:
    return ConfigError(f"{name}: damaged statistics: {where}", given=str(given)[:80], expected=expected)
