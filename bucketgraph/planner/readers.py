"""Files to columns: CSV, JSON Lines and saved statistics, plain or gzip.

Rules: the kind is told by the content, not by the name; a value that is no whole number is an error that names file,
row and value; nothing is guessed about a value, only about which column is meant (`traces.py`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bucketgraph.errors import ConfigError

Integers = NDArray[np.int64]
MAX_BYTES = 1 << 31  # of text, after decompression
MAX_COUNT = 10**12  # of requests of one size
MAX_LENGTH = 10_000_000  # no request is longer: a larger number is another column, such as a time stamp
_WHOLE = re.compile(r"[+-]?[0-9]+")


class Table(Protocol):
    """Named columns of one file."""

    name: str
    columns: tuple[str, ...]

    def values(self, column: str) -> Sequence[object]:
        """What stands in the column, row by row, as read."""
        ...


class CsvTable:
    """Comma-, semicolon- or tab-separated values; without a header the columns are named 1, 2, ..."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        first = text[: text.find("\n") + 1 or len(text)]
        delimiter = max(",;\t", key=first.count)
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
        except csv.Error as error:
            raise ConfigError(f"{name}: cannot be read as CSV: {error}") from error
        if not rows:
            raise ConfigError(f"{name}: the trace is empty", expected="a column of request lengths")
        header = [field.strip() for field in rows[0]]
        if all(_is_number(field) for field in header):
            header = [str(number + 1) for number in range(len(header))]
        else:
            rows = rows[1:]
        if len(set(header)) < len(header):
            twice = next(column for column in header if header.count(column) > 1)
            raise ConfigError(f"{name}: column {twice!r} is there twice", given=", ".join(header))
        self.columns = tuple(header)
        self._rows = rows

    def values(self, column: str) -> Sequence[object]:
        at = self.columns.index(column)
        try:
            return [row[at] for row in self._rows]
        except IndexError:
            short = next(number for number, row in enumerate(self._rows, start=1) if len(row) <= at)
            given = f"{len(self._rows[short - 1])} fields"
            raise ConfigError(
                f"{self.name}: row {short} has no {column}", given=given, expected=len(self.columns)
            ) from None


class JsonLinesTable:
    """One JSON object a line."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        lines = [line for line in text.splitlines() if line and not line.isspace()]
        self._rows: list[Any] = _json_rows(name, lines)
        columns: dict[str, None] = dict.fromkeys(self._rows[0])
        self.columns = tuple(columns)

    def values(self, column: str) -> Sequence[object]:
        try:
            return [row[column] for row in self._rows]
        except KeyError:
            missing = next(number for number, row in enumerate(self._rows, start=1) if column not in row)
            raise ConfigError(f"{self.name}: row {missing} has no {column}") from None


class SizesTable:
    """The sizes that a running service has seen: `{"sizes": {"tokens": {"384": 17, ...}}}`.

    Two axes are counted together as `{"sizes": {"batch,tokens": {"4,128": 17}}}`. Statistics of several phases, as
    `{"prefill": {"sizes": ...}, "decode": {"sizes": ...}}`, have the columns `prefill.tokens` and `decode.batch`.
    """

    def __init__(self, name: str, found: Mapping[str, Mapping[str, object]]) -> None:
        self.name = name
        self.columns = tuple(found)
        self._found = found

    def values(self, column: str) -> Sequence[object]:
        raise AssertionError("a histogram is read by `histogram`")

    def histogram(self, column: str, axes: int) -> tuple[Integers, Integers]:
        """Sizes `[n, axes]` and how often each was seen `[n]`. Raises ConfigError for anything but whole numbers."""
        entries = self._found[column]
        keys = [key.split(",") for key in entries]
        if wrong := [key for key in keys if len(key) != axes]:
            expected = "sizes such as 4,128" if axes > 1 else "one size"
            raise ConfigError(f"{self.name}: sizes of {column}", given=repr(",".join(wrong[0])), expected=expected)
        flat = whole_numbers([part for key in keys for part in key], self.name, column)
        return flat.reshape(-1, axes), whole_numbers(list(entries.values()), self.name, f"{column}: a count", MAX_COUNT)


def read_table(path: Path) -> Table:
    """The columns of a file, by its content. Raises ConfigError naming the file."""
    text = _text(path)
    start = text.lstrip()[:1]
    if not start:
        raise ConfigError(f"{path.name}: the trace is empty", expected="a column of request lengths")
    if start != "{":
        if start == "[":
            raise ConfigError(f"{path.name}: a JSON list", expected="one JSON object a line, CSV, or saved sizes")
        return CsvTable(path.name, text)
    return _saved_sizes(path.name, text) or JsonLinesTable(path.name, text)


def whole_numbers(values: Sequence[object], name: str, what: str, largest: int = MAX_LENGTH) -> Integers:
    """`values` as int64, each from 0 to `largest`. Raises ConfigError naming the first one that is not, and its row."""
    kinds = set(map(type, values))
    plain = kinds <= {int} or (kinds == {str} and not any("_" in value for value in values))  # type: ignore[operator]
    numbers: list[int]
    try:
        numbers = list(map(int, values)) if plain else []  # type: ignore[arg-type]
    except ValueError:
        plain = False
    if not plain:
        numbers = [_whole(value, f"{name}: row {row}, {what}") for row, value in enumerate(values, start=1)]
    try:
        made = np.array(numbers, dtype=np.int64)
    except OverflowError:
        made = np.array([min(max(number, -1), largest + 1) for number in numbers], dtype=np.int64)
    for wrong, says in ((made < 0, "is negative"), (made > largest, "is absurdly large")):
        if wrong.any():
            row = int(np.argmax(wrong))
            expected = f"0 to {largest:,}"
            hint = "is it another column?" if largest == MAX_LENGTH else None
            raise ConfigError(
                f"{name}: row {row + 1}, {what} {says}", given=str(numbers[row])[:40], expected=expected, hint=hint
            )
    return made


def _whole(value: object, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number: float | None = value if isinstance(value, float) else None
    if isinstance(value, str):
        text = value.strip()
        if _WHOLE.fullmatch(text):
            return int(text)
        number = float(text) if _is_number(text) else None
    if number is None or not number.is_integer():  # false for nan and inf
        raise ConfigError(where, given=repr(value)[:80], expected="a whole number")
    return int(number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            data = (gzip.GzipFile(fileobj=file) if packed else file).read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path.name}: broken gzip: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path.name}: too large for a trace", expected=f"at most {MAX_BYTES >> 20} MiB of text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not UTF-8 text (byte {error.start})") from error


def _json_rows(name: str, lines: Sequence[str]) -> list[Any]:
    try:  # one call for the whole file is four times as fast as one a line
        rows: list[Any] = json.loads("[" + ",".join(lines) + "]")
    except (ValueError, RecursionError):
        rows = []
    if len(rows) != len(lines):
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name}: row {number} is not JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ConfigError(f"{name}: row {number} is not an object", given=type(row).__name__)
    return rows


def _saved_sizes(name: str, text: str) -> SizesTable | None:
    """Saved statistics are one JSON object that holds others; a row of JSON Lines holds values."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    parts = {
        "": data,
        **{f"{key}.": value for key, value in data.items() if isinstance(value, dict) and key != "sizes"},
    }
    found = {
        prefix + axis: entries
        for prefix, part in parts.items()
        if isinstance(sizes := part.get("sizes"), dict)
        for axis, entries in sizes.items()
    }
    if found:
        if bad := [axis for axis, entries in found.items() if not isinstance(entries, dict)]:
            raise ConfigError(f"{name}: sizes of {bad[0]}", expected='a mapping such as {"384": 17}')
        return SizesTable(name, found)
    if any(isinstance(part.get("buckets"), list) for part in parts.values()):
        raise ConfigError(
            f"{name}: these statistics count hits of buckets, not the sizes that were asked for",
            expected='{"sizes": {"tokens": {"384": 17}}}',
        )
    return None
