"""YAML read without surprises: what a scalar looks like is what it is.

PyYAML follows YAML 1.1: `yes` is True, `1:30` is 90, `0100` is 64, the last of two equal keys wins. This loader keeps
YAML 1.2's core rules instead, and refuses duplicate keys, several documents, deep nesting and alias bombs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bucketgraph.errors import ConfigError

MAX_BYTES = 1 << 20  # a bucket set is a page of text
MAX_NODES = 20_000  # counted after aliases are followed
MAX_DEPTH = 24


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars; PyYAML shares resolvers by class, so this class holds its own."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's protocol)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice, on lines {seen[key.value]} and {line}", None
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep=deep)

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MAX_DEPTH:  # now, since the scanner's time grows with the square of the depth
            raise RecursionError
        super().fetch_flow_collection_start(token)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|\.inf|\.nan)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


def read(text: str, source: str) -> dict[str, Any]:
    """The one mapping in `text`. `source` names it in errors.

    Raises:
        ConfigError: not YAML, not exactly one mapping, duplicate keys, unknown tags, or larger than any bucket set is.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: too large for a bucket set", given=f"{len(text)} characters", expected=MAX_BYTES)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _measure(node, source, loader)
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply", expected=f"at most {MAX_DEPTH} levels") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}: cannot be read as YAML: {_one_line(error)}") from error
    if not isinstance(data, dict):
        kind = "an empty file" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{source}: not a bucket set", given=kind, expected="a mapping with version, name, axes ...")
    return data


def read_file(path: Path) -> dict[str, Any]:
    """`read` on a file's text. Raises ConfigError also when the file is missing or not UTF-8."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: too large for a bucket set", given=f"{path.stat().st_size} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return read(text, str(path))


def _measure(root: yaml.Node, source: str, loader: _Loader) -> None:
    """Refuse cycles, depth, alias bombs and tags on the node graph, before anything is built from it."""
    measured: dict[int, tuple[int, int]] = {}  # by node: how many values it stands for, and how many levels deep
    open_nodes: set[int] = set()
    implied_tag: Callable[..., str] = loader.resolve

    def measure(node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) in open_nodes:
            raise ConfigError(f"{source}: line {node.start_mark.line + 1}: an alias contains itself")
        # What an alias stands for counts where it is used: short texts can nest deeply through aliases alone.
        if depth + measured.get(id(node), (1, 1))[1] - 1 > MAX_DEPTH:
            raise ConfigError(f"{source}: nested too deeply", expected=f"at most {MAX_DEPTH} levels")
        if id(node) in measured:
            return measured[id(node)]
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if node.tag != implied_tag(type(node), node.value, (plain, not plain)):
            raise ConfigError(f"{source}: line {node.start_mark.line + 1}: tags are not used here", given=node.tag)
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = list(node.value)
        open_nodes.add(id(node))
        parts = [measure(child, depth + 1) for child in children]
        open_nodes.discard(id(node))
        total = 1 + sum(count for count, _ in parts)
        if total > MAX_NODES:
            raise ConfigError(f"{source}: too many values", expected=f"at most {MAX_NODES} after aliases are followed")
        measured[id(node)] = total, 1 + max((levels for _, levels in parts), default=0)
        return measured[id(node)]

    measure(root, 1)


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return where + (", ".join(part for part in (error.context, error.problem) if part) or "malformed")
    return " ".join(str(error).split())
