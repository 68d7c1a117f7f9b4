"""Lines of the user's code: where an operation was asked for, or where an error came from.

Rules: the innermost frame outside torch, Triton, Python's own library, this package, our kernels and what runs a
capture; of those, one outside installed packages if there is one: a library's line tells its user less than their own.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

_OWN = Path(__file__).parent
_KERNELS = _OWN.parent / "kernels"
_TWINS = str(_KERNELS / "reference.py")
_PLUMBING = tuple(f"{path}/" for path in (Path(torch.__file__).parent, _OWN, _OWN.parent / "executables", _KERNELS))
_INSTALLED = ("/site-packages/", "/dist-packages/")
_LIBRARY = f"{sysconfig.get_path('stdlib')}/"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str
    code: str  # the line itself, without its indentation

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} (in {self.function}: {self.code})"

    @property
    def is_twin(self) -> bool:
        """Whether it belongs to the plain-torch twins of our kernels, which run only where there is no GPU."""
        return self.file == _TWINS


def here() -> Place | None:
    """The user's line that is being executed now."""
    return _chosen(_stack(sys._getframe(1)))


def of_error(error: BaseException) -> Place | None:
    """The user's line that an error came from."""
    walked = traceback.walk_tb(error.__traceback__)
    return _chosen(reversed([(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]))


def _stack(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _chosen(frames: Iterable[tuple[str, int, str]]) -> Place | None:
    """Of frames, the innermost first."""
    library: tuple[str, int, str] | None = None
    for frame in frames:
        kind = _kind(frame[0])
        if kind == "own":
            return _place(*frame)
        if kind == "end":
            break
        if kind == "installed" and library is None:
            library = frame
    return None if library is None else _place(*library)


@lru_cache(maxsize=4096)
def _kind(file: str) -> str:
    if file == str(_OWN / "examine.py"):  # who calls the doctor is not what it looks at
        return "end"
    if file == _TWINS:
        return "own"
    if file.startswith("<") or file.startswith(_PLUMBING) or "/triton/" in file:
        return "plumbing"
    if any(part in file for part in _INSTALLED):
        return "installed"
    return "plumbing" if file.startswith(_LIBRARY) else "own"


def _place(file: str, line: int, function: str) -> Place:
    return Place(file, line, function, linecache.getline(file, line).strip())
