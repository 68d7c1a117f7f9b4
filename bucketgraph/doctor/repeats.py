"""Repeated sequences: the same few launches many times in a row, such as the layers of a model.

All maximal repetitions are found by Main and Lorentz's division in O(n log n): a repetition that crosses the middle has
one period on one side, so how far it reaches is two common extensions, which Z-functions give in linear time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeat:
    """`period` items, `count` times in a row."""

    start: int  # place of the first item
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def repeats(items: Sequence[Hashable], most: int = 5) -> tuple[Repeat, ...]:
    """Repetitions that do not overlap: the one that covers most first, the shortest period of those that cover alike.

    A period is the shortest one: 16 layers of 7 launches are 16 times 7, and not 8 times 14.
    """
    numbers: dict[Hashable, int] = {}
    coded = [numbers.setdefault(item, len(numbers)) for item in items]
    whole = sorted({_whole(*run) for run in _runs(coded)}, key=lambda r: (r.start - r.end, r.period, r.start))
    chosen: list[Repeat] = []
    for found in whole:
        if len(chosen) < most and all(found.end <= other.start or other.end <= found.start for other in chosen):
            chosen.append(found)
    return tuple(sorted(chosen, key=lambda r: r.start))


def _whole(start: int, end: int, period: int) -> Repeat:
    return Repeat(start, period, (end - start) // period)


def _runs(items: list[int]) -> Iterator[tuple[int, int, int]]:
    """Start, end and period of every maximal stretch that repeats at least twice; multiples of a period, too."""
    segments = [(0, len(items))]
    while segments:
        low, high = segments.pop()
        if high - low < 2:
            continue
        middle = (low + high) // 2
        segments += [(low, middle), (middle, high)]
        left, right = items[low:middle], items[middle:high]
        for start, end, period in _across(left, right):
            yield middle - start, middle + end, period


def _across(left: list[int], right: list[int]) -> Iterator[tuple[int, int, int]]:
    """Repetitions across the border: how far they reach to its left and right, and their period."""
    for before, after, period in _one_sided(left, right):
        yield before + period, after, period
    for before, after, period in _one_sided(right[::-1], left[::-1]):
        yield after, before + period, period


def _one_sided(left: list[int], right: list[int]) -> Iterator[tuple[int, int, int]]:
    """Those with a whole period on the left: how far they go on beyond it to the left, and to the right."""
    size = len(left)
    backward = _z(left[::-1])
    joined = _z([*right, -1, *left])  # how much of `right` stands at each place of `left`
    forward = _z(right)
    for period in range(1, size + 1):
        before = backward[period] if period < size else 0
        after = joined[len(right) + 1 + size - period]
        if after == period and period < len(right):  # the whole period stands in `right`, which may go on with itself
            after += forward[period]
        if before + after >= period:
            yield before, after, period


def _z(items: list[int]) -> list[int]:
    """For each place, how many items from it on equal those from the start on."""
    size = len(items)
    found = [0] * size
    if size:
        found[0] = size
    low = high = 0
    for place in range(1, size):
        if place < high:
            found[place] = min(high - place, found[place - low])
        while place + found[place] < size and items[found[place]] == items[place + found[place]]:
            found[place] += 1
        if place + found[place] > high:
            low, high = place, place + found[place]
    return found
