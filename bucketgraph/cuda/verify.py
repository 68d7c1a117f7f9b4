"""The third run: a proof from bytes is believed only when a replay on new memory needs nothing of the old.

Bytes do not show an address that a kernel finds in device memory, or one that a descriptor hides. So the old memory is
poisoned, the graph runs on the new one, and its results must be those of a run that never saw the old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Check(Generic[T]):
    """What the third run of one tensor does; each step is the caller's. Steps wait for the GPU where they must.

    For a tensor that the graph reads, `poison` fills both of the captures' places with what ruins results, such as NaN.
    For one that it writes, `intact` says whether that poison is still there, bit by bit.
    """

    expected: Callable[[], T]  # the right results on the new memory, by a fresh capture or eagerly
    poison: Callable[[], None]  # overwrite the old places
    replay: Callable[[], T]  # launch the rebound graph, and its results, copied to where nothing overwrites them
    same: Callable[[T, T], bool]  # whether two results agree, bit by bit
    intact: Callable[[], bool] = lambda: True  # whether the poison was left alone
    restore: Callable[[], None] = lambda: None  # undo the poison; called whatever happened


def on_poison(check: Check[T], rebind: Callable[[], None], bind_back: Callable[[], None]) -> str | None:
    """Run the check. Returns None if all is right, else the reason; what a step raises is passed on, bound back."""
    expected = check.expected()
    rebind()
    try:
        check.poison()
        got = check.replay()
        same, intact = check.same(got, expected), check.intact()
    finally:
        try:
            check.restore()
        finally:
            bind_back()
    if not same:
        return "a replay on new memory gave other results: the old memory is still used, by a way that no site shows"
    return None if intact else "a replay on new memory wrote into the old, by a way that no site shows"
