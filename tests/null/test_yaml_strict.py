"""What a scalar looks like is what it is, and no text, however odd, does anything but load or be a ConfigError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bucketgraph import yaml_strict
from bucketgraph.errors import ConfigError


def read(text: str) -> dict[str, Any]:
    return yaml_strict.read(text, "set.yaml")


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("NO", "NO"),
        ("True", "True"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("0100", "0100"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("1_024", "1_024"),
        ("1e3", "1e3"),
        ("1.5e3", 1500.0),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        ("1.", 1.0),
        (".5", 0.5),
        (".inf", float("inf")),
        ("2026-12-01", "2026-12-01"),
        ("2026-12-01 10:00:00", "2026-12-01 10:00:00"),
        ("'1'", "1"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2_not_1_1(scalar: str, value: object) -> None:
    got = read(f"key: {scalar}")["key"]
    assert got == value and type(got) is type(value)


def test_nan_is_a_float() -> None:
    value = read("key: .nan")["key"]
    assert isinstance(value, float) and value != value


def test_anchors_and_merges_still_work() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\nsame: *base\n"
    assert read(text) == {"base": {"a": 1, "b": 2}, "other": {"a": 1, "b": 3}, "same": {"a": 1, "b": 2}}


def deep_by_aliases(levels: int) -> str:
    """Each line nests ten levels and holds the line before: a short text, thousands of levels."""
    lines = ["a0: &a0 x"]
    for i in range(1, levels // 10 + 1):
        lines.append(f"a{i}: &a{i} {'[' * 10}*a{i - 1}{']' * 10}")
    return "\n".join(lines)


def bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 12):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty file"),
        ("# only a comment\n", "an empty file"),
        ("- 1\n- 2\n", "a list"),
        ("just text", "a str"),
        ("a: 1\na: 2", "key 'a' is given twice, on lines 1 and 2"),
        ("a:\n  b: 1\n  c: 2\n  b: 3", "key 'b' is given twice, on lines 2 and 4"),
        ("a: {b: {c: 1, c: 2}}", "key 'c' is given twice"),
        ("1: a\n'1': b", "key '1' is given twice"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: !!python/object/apply:os.system [ls]", "tags are not used here"),
        ("a: !!int '7'", "tags are not used here"),
        ("a: !mine 7", "tags are not used here"),
        ("a: !!binary aGk=", "tags are not used here"),
        ("[1, 2]: 3", "a key must be plain text"),
        ("{a: 1}: 3", "a key must be plain text"),
        ("a: [1, 2", "line 1"),
        ("a:\n\t- 1", "line 2"),
        ("a: *nobody", "undefined alias"),
        ("a: &x [*x]", "an alias contains itself"),
        ("a: \x00", "cannot be read as YAML"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: " + "[" * 30 + "]" * 30, "nested too deeply"),
        ("a: " + "{b: " * 5000 + "}" * 5000, "nested too deeply"),
        (deep_by_aliases(2000), "nested too deeply"),
        (bomb(), "too many values"),
        ("a: [" + "1, " * 30_000 + "]", "too many values"),
        ("a: " + "x" * (yaml_strict.MAX_BYTES + 1), "too large"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_bad_text_is_one_clear_error_naming_the_file(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith("set.yaml: ") and says in message
    assert "\n" not in message and len(message) < 400


def test_twenty_levels_are_fine() -> None:
    assert read("a: " + "[" * 20 + "]" * 20)


@pytest.mark.parametrize("name", ["missing.yaml", "folder.yaml", "latin.yaml", "huge.yaml", "bom.yaml"])
def test_bad_files_are_config_errors_naming_the_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder.yaml":
        path.mkdir()
    elif name == "latin.yaml":
        path.write_bytes("name: café".encode("latin-1"))
    elif name == "huge.yaml":
        path.write_text("a: 1\n" + "# x\n" * (yaml_strict.MAX_BYTES // 4))
    elif name == "bom.yaml":  # the one that is well: editors write it
        path.write_bytes(b"\xef\xbb\xbfa: 1")
        assert yaml_strict.read_file(path) == {"a": 1}
        return
    with pytest.raises(ConfigError, match=name):
        yaml_strict.read_file(path)
