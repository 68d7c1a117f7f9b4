"""Which tensor an address belongs to: named ranges of memory, and the addresses in a node's block that fall in them."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from bucketgraph.cuda.nodes import WORD, Node


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor's memory, from its first element to behind its last one."""

    name: str
    address: int
    size: int  # bytes

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Region:
        """What a tensor spans. A view spans its own elements and what lies between them, not its whole storage."""
        if tensor.numel() == 0:
            return cls(name, tensor.data_ptr(), 0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(name, tensor.data_ptr(), (last + 1) * tensor.element_size())

    @property
    def end(self) -> int:
        return self.address + self.size

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.end

    def overlaps(self, other: Region) -> bool:
        return self.address < other.end and other.address < self.end


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address in a node's block that points into a known tensor."""

    node: int  # index in the graph
    offset: int  # of its eight bytes in the node's block
    parameter: int  # which parameter they are in, or which end of a copy
    tensor: str
    inside: int  # bytes from the tensor's start


def words(node: Node) -> Iterator[tuple[int, int, int]]:
    """Offset, parameter and value of every aligned eight bytes that lie in one parameter of a node."""
    for offset in range(0, len(node.block) - WORD + 1, WORD):
        parameter = node.parameter_at(offset)
        if parameter is not None:
            yield offset, parameter, word(node.block, offset)


def word(block: bytes | bytearray, offset: int) -> int:
    value: int = struct.unpack_from("<Q", block, offset)[0]
    return value


class Regions:
    """Known tensors, looked up by address. Of those that overlap, the one that starts last is found."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._sorted = sorted((region for region in regions if region.size), key=lambda region: region.address)
        self._starts = [region.address for region in self._sorted]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Regions:
        return cls(Region.of(name, tensor) for name, tensor in tensors.items())

    def find(self, address: int) -> Region | None:
        for region in reversed(self._sorted[: bisect_right(self._starts, address)]):
            if address in region:
                return region
        return None

    def pointers(self, node: Node) -> tuple[Pointer, ...]:
        """Addresses in a node's block that fall in a known tensor, as they are found by value.

        An integer that looks like an address is taken for one; an address in an opaque encoding, such as that of a TMA
        descriptor, may not be found.
        """
        found = []
        for offset, parameter, value in words(node):
            region = self.find(value)
            if region is not None:
                found.append(Pointer(node.index, offset, parameter, region.name, value - region.address))
        return tuple(found)
