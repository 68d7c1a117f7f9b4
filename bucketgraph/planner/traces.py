"""A trace: the sizes that requests asked for, with the order of arrival where the file has it.

Rules: which column is meant is said, or guessed by a known name, or an error lists the columns; lengths of 0 are
dropped and counted; files that are read together are read by the same columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bucketgraph.errors import ConfigError
from bucketgraph.planner.readers import Integers, SizesTable, Table, read_table, whole_numbers

# How public traces and tools name the length of a request's input; compared in lower case, letters and digits only.
_LENGTHS = (
    "inputtokens",
    "prompttokens",
    "contexttokens",  # Azure LLM inference traces
    "requesttokens",  # BurstGPT
    "inputlength",  # Mooncake
    "promptlength",
    "promptlen",
    "inputlen",
    "numprefilltokens",  # Vidur
    "tokens",
    "numtokens",
    "length",
    "lengths",
    "seqlen",
    "seqlens",
    "sequencelength",
)


@dataclass(frozen=True)
class Trace:
    """Sizes that were asked for."""

    columns: tuple[str, ...]  # one for each axis, by its name in the files
    sizes: Integers  # [rows, axes], all at least 1
    counts: Integers | None  # [rows] of a histogram; None: one request each, in order of arrival
    sources: tuple[str, ...]  # file names
    dropped: int = 0  # requests with a size of 0

    @property
    def requests(self) -> int:
        return len(self.sizes) if self.counts is None else int(self.counts.sum())


def read(paths: Sequence[str | Path], columns: Sequence[str] | None = None) -> Trace:
    """Read trace files, one after the other, as one trace.

    Args:
        paths: CSV, JSON Lines or saved sizes (see `readers.SizesTable`), plain or gzip.
        columns: one column for lengths, two for batch and length; None guesses a column of lengths.

    Raises:
        ConfigError: a file is missing, broken or empty; the column is missing or ambiguous, in any of the files; a
            value is no whole number from 0 to 10 million; or all are 0.
    """
    if columns is not None and (len(columns) not in (1, 2) or len(set(columns)) < len(columns) or "" in columns):
        raise ConfigError("columns of a trace", given=",".join(columns), expected="one, or two different ones")
    names: tuple[str, ...] | None = None if columns is None else tuple(columns)
    sizes: list[Integers] = []
    counts: list[Integers | None] = []
    sources: list[str] = []
    for path in paths:
        table = read_table(Path(path))
        if names is None:
            names = (guess(table),)
        elif sources and columns is None:
            _same_columns(names, sources[0], table)
        rows, weights = _rows(table, names)
        sizes.append(rows)
        counts.append(weights)
        sources.append(table.name)
    assert names is not None, "there is at least one file"
    return made(np.concatenate(sizes), _joined(counts, sizes), names, tuple(sources))


def made(sizes: Integers, counts: Integers | None, columns: tuple[str, ...], sources: tuple[str, ...]) -> Trace:
    """A trace of `sizes [rows, axes]` without what is empty. Raises ConfigError if nothing is left."""
    whole = (sizes > 0).all(axis=1) if counts is None else (sizes > 0).all(axis=1) & (counts > 0)
    lost = ~whole
    dropped = int(lost.sum() if counts is None else counts[lost].sum())
    if not whole.any():
        given = f"{len(sizes)} rows, {dropped} of them of length 0" if len(sizes) else "no rows"
        raise ConfigError(f"{', '.join(sources)}: the trace is empty", given=given, expected="lengths of at least 1")
    return Trace(columns, sizes[whole], None if counts is None else counts[whole], sources, dropped)


def guess(table: Table) -> str:
    """The column of lengths: the only one, or the only one with a known name. Raises ConfigError listing them."""
    if len(table.columns) == 1:
        return table.columns[0]
    known = [name for name in table.columns if re.sub(r"[^a-z0-9]", "", name.lower()) in _LENGTHS]
    if len(known) == 1:
        return known[0]
    what = "several columns could be the lengths" if known else "no column is known as the lengths"
    raise ConfigError(f"{table.name}: {what}", given=_listed(table.columns), hint="name one with --column")


def _rows(table: Table, names: tuple[str, ...]) -> tuple[Integers, Integers | None]:
    if isinstance(table, SizesTable):
        column = _joint(table, names)
        return table.histogram(column, len(names))
    for name in names:
        if name not in table.columns:
            raise ConfigError(f"{table.name}: no column {name!r}", expected=f"one of {_listed(table.columns)}")
    columns = [whole_numbers(table.values(name), table.name, name) for name in names]
    return np.stack(columns, axis=1), None


def _joint(table: SizesTable, names: tuple[str, ...]) -> str:
    """Sizes that belong together are counted together, under both names."""
    joint = ",".join(names)
    if joint not in table.columns:
        raise ConfigError(f"{table.name}: no sizes of {joint!r}", expected=f"one of {_listed(table.columns)}")
    return joint


def _same_columns(names: tuple[str, ...], first: str, table: Table) -> None:
    if names[0] not in table.columns:
        raise ConfigError(
            f"{first} is read by its column {names[0]!r}, and {table.name} has none of that name",
            given=_listed(table.columns),
            hint="plan them apart, or rename the column",
        )


def _joined(counts: Sequence[Integers | None], sizes: Sequence[Integers]) -> Integers | None:
    if all(part is None for part in counts):
        return None
    pairs = zip(counts, sizes, strict=True)
    return np.concatenate([np.ones(len(rows), np.int64) if part is None else part for part, rows in pairs])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
