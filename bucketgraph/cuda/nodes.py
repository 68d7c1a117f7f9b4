"""Nodes of a graph as data: what runs, on what shape, with which bytes, after what.

Every node has a `block`: the bytes that may hold addresses (a kernel's parameters, a copy's two ends, a memset's
target), and a `form`: all the rest of it. Two captures of one function agree in every form, and their blocks
differ where memory moved. `reading.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bucketgraph.cuda.driver import (
    KernelAttributes,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
)
from bucketgraph.cuda.names import demangle, library, short

WORD = 8  # bytes of an address
MAX_BLOCK = 4096  # bytes


@dataclass(frozen=True, slots=True)
class Dependency:
    """One thing that a node waits for."""

    node: int  # its index in the graph
    programmatic: bool = False  # the node may start before that one has ended


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where one parameter lies in a node's block, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of any kind; kinds that have no class of their own are opaque: nothing of them is known but this."""

    index: int
    handle: int  # CUgraphNode
    kind: NodeKind
    after: tuple[Dependency, ...] = ()
    block: bytes = field(default=b"", repr=False)
    parameters: tuple[Parameter, ...] = ()

    @property
    def label(self) -> str:
        """What the node does, in a few words."""
        return self.kind

    @property
    def library(self) -> str:
        return self.kind

    @property
    def form(self) -> dict[str, object]:
        """All that must be equal in another capture of the same function, by what it is called."""
        return {}

    @property
    def why_fixed(self) -> str | None:
        """Why this node's addresses cannot be changed in an executable; None if they can."""
        return "it has no addresses that can be set"

    def parameter_at(self, offset: int) -> int | None:
        """Which parameter holds all eight bytes from `offset` on."""
        for number, parameter in enumerate(self.parameters):
            if parameter.offset <= offset and offset + WORD <= parameter.offset + parameter.size:
                return number
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNode(Node):
    """A kernel launch. `block` is its parameter block as the device sees it, gaps filled with zeros."""

    symbol: str  # as the driver has it, mangled if it is C++
    params: KernelParams = field(repr=False)
    attributes: KernelAttributes

    @property
    def name(self) -> str:
        """Demangled where possible."""
        return demangle(self.symbol)

    @property
    def label(self) -> str:
        return short(self.name)

    @property
    def library(self) -> str:
        return library(self.symbol, tuple(parameter.size for parameter in self.parameters))

    @property
    def form(self) -> dict[str, object]:
        params = self.params
        entry = (params.function, params.kernel, params.context)
        sizes = {"grid": params.grid, "block": params.block, "shared memory": params.shared_bytes}
        return {"kernel": self.symbol, "function": entry, **sizes, "attributes": self.attributes}

    @property
    def why_fixed(self) -> str | None:
        if self.attributes.cooperative:
            return "it is a cooperative launch, an attribute that updates do not carry"
        if self.attributes.cluster != (1, 1, 1):
            return f"it launches clusters of {self.attributes.cluster}, an attribute that updates do not carry"
        if self.attributes.device_updatable:
            return "it is updated from the device"
        if self.params.extra:
            return "its arguments are one packed buffer"
        if len(self.block) > MAX_BLOCK:
            return f"its parameters take {len(self.block)} bytes, and over {MAX_BLOCK} drivers have crashed"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemcpyNode(Node):
    """A copy. `block` is the address of the source, then of the destination."""

    params: MemcpyParams

    @property
    def size(self) -> int:
        """Bytes copied."""
        return self.params.width * max(self.params.height, 1) * max(self.params.depth, 1)

    @property
    def label(self) -> str:
        return f"memcpy {self.params.source_type} to {self.params.destination_type}"

    @property
    def form(self) -> dict[str, object]:
        params = self.params
        shape = (params.width, params.height, params.depth, params.offset)
        return {"size": shape, "memory types": (params.source_type, params.destination_type)}

    @property
    def why_fixed(self) -> str | None:
        if "array" in (self.params.source_type, self.params.destination_type):
            return "it copies a CUDA array"
        if self.params.height > 1 or self.params.depth > 1:
            return "it copies rows with a pitch, and only plain copies can be updated"
        return "it starts at an offset" if self.params.offset else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemsetNode(Node):
    """A fill. `block` is the address that it starts at."""

    params: MemsetParams

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.params.element_bytes * self.params.width * max(self.params.height, 1)

    @property
    def form(self) -> dict[str, object]:
        params = self.params
        shape = (params.element_bytes, params.width, params.height, params.pitch)
        return {"size": shape, "value": params.value}

    @property
    def why_fixed(self) -> str | None:
        return "it fills rows with a pitch" if self.params.height > 1 else None
