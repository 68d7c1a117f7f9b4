"""Where a graph holds a tensor's address, proved by two captures that differ in nothing but that tensor's place.

Rules: a site is an aligned eight-byte word that was A+k and became B+k, where the tensor lay at A and then at B, with k
inside the tensor. Every other difference refuses all tensors of the pair, and an encoding that is the driver's own is
never edited. What is refused has a reason, so that it can be copied instead.

One kind of difference is only a doubt: bytes of a struct in a kernel's parameters that changed and hold no address in
any form. C++ copies a functor with its padding and its unused fields (ATen's reductions and `relu` have such), and
those are what the stack held before. It stands until a run on poison has shown that nothing depends on them.

How to capture the pair: warm up; capture once and drop it, so that the pool has grown; capture with the tensor at A;
capture with it at B, on the same stream and into the same pool, with results kept outside it. Then temporaries fall on
the same addresses. `capture.alike` does that. Place B no better aligned than later addresses will be: the proof covers
none that is less aligned than both places were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bucketgraph.cuda.graph import Graph
from bucketgraph.cuda.memory import Region, word, words
from bucketgraph.cuda.nodes import WORD, Node
from bucketgraph.errors import InputError

TENSOR_MAP = 128  # bytes of a CUtensorMap, which is aligned to 64
_SCALARS = (2, 4, 8)  # bytes of parameters that have no padding
_FORMLESS = ("empty", "event_record", "wait_event")  # hold no address of a tensor
# Kernels are chosen by what their pointers are divisible by: Triton and ATen look at 16, cuBLAS is asked for up to 256.
_VECTOR, _LIBRARY = 16, 256
_CHOOSERS = ("cuBLAS", "cuDNN", "CUTLASS", "FlashAttention")


@dataclass(frozen=True, slots=True)
class Moved:
    """One tensor of the two captures: where it lay in each of them."""

    name: str
    first: Region
    second: Region

    @classmethod
    def of(cls, name: str, first: Tensor, second: Tensor) -> Moved:
        """Raises InputError unless both have the same shape, strides and dtype, and lie apart."""
        layouts = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in (first, second)]
        if layouts[0] != layouts[1]:
            raise InputError(f"{name} differs in more than its place", given=layouts[1], expected=layouts[0])
        moved = cls(name, Region.of(name, first), Region.of(name, second))
        if moved.first.overlaps(moved.second) or moved.first.size == 0:
            raise InputError(f"{name} must lie in two places that do not overlap", given=f"{moved.first.size} bytes")
        return moved


@dataclass(frozen=True, slots=True)
class Site:
    """One word of a node's block that holds an address in the tensor."""

    node: int  # index in the graph
    offset: int  # bytes from the start of the node's block
    parameter: int  # which parameter it is in; of a copy, 0 is the source and 1 the destination
    inside: int  # bytes from the tensor's start
    alignment: int  # a power of two: what the address is divisible by in both captures, as far as kernels look


@dataclass(frozen=True, slots=True)
class Proof:
    """What two captures say about one tensor: its sites, or why there are none that could be used."""

    moved: Moved
    sites: tuple[Site, ...] = ()
    refusal: str | None = None
    doubt: str | None = None  # what has to be shown harmless by a run on poison


def prove(first: Graph, second: Graph, *moved: Moved) -> tuple[Proof, ...]:
    """Compare two captures of one function, between which these tensors moved and nothing else did.

    Returns:
        a proof for each tensor, in their order. Tensors that move together share the fate of the pair: move them one at
        a time, in a pair each, where one may be refused and the others not.
    """
    refusal = _overlap(moved) or _difference(first, second)
    if refusal is not None:
        return tuple(Proof(each, refusal=refusal) for each in moved)
    sites: dict[str, list[Site]] = {each.name: [] for each in moved}
    doubt = None
    for before, after in zip(first.nodes, second.nodes, strict=True):
        changed = {offset for offset in range(0, len(before.block), 8) if _at(before, offset) != _at(after, offset)}
        rest = [bytearray(node.block) for node in (before, after)]  # without what is a site
        for name, site in _matched(before, after, changed, moved):
            changed.discard(site.offset)
            sites[name].append(site)
            for block in rest:
                block[site.offset : site.offset + WORD] = bytes(WORD)
        for offset in sorted(changed):
            if (refusal := _hidden(before, after, offset, moved, rest)) is not None:
                return tuple(Proof(each, refusal=refusal) for each in moved)
            doubt = doubt or _stray(before, after, offset)
    return tuple(_judged(first, Proof(each, tuple(sites[each.name]), doubt=doubt)) for each in moved)


def _overlap(moved: Sequence[Moved]) -> str | None:
    for position, one in enumerate(moved):
        for other in moved[:position]:
            if one.first.overlaps(other.first) or one.second.overlaps(other.second) or one.name == other.name:
                return f"{other.name} and {one.name} overlap, so an address may be of either"
    return None


def _difference(first: Graph, second: Graph) -> str | None:
    """How the captures differ in anything but addresses, or what in them cannot be compared."""
    if len(first.nodes) != len(second.nodes):
        return f"the topology changed: {len(first.nodes)} nodes, then {len(second.nodes)}"
    for before, after in zip(first.nodes, second.nodes, strict=True):
        where = described(before)
        if before.kind != after.kind:
            return f"the topology changed: {where} was {before.kind}, then {after.kind}"
        if before.after != after.after:
            return f"the topology changed: {where} waits for others than it did"
        if type(before) is Node and before.kind not in _FORMLESS:
            return f"{where} cannot be looked into"
        for what, was in before.form.items():
            now = after.form[what]
            if was != now:
                return f"{where}: its {what} changed from {was} to {now}"
        if before.parameters != after.parameters:
            return f"{where}: its parameters have other sizes"
    return None


def _at(node: Node, offset: int) -> bytes:
    return node.block[offset : offset + 8]


def _matched(before: Node, after: Node, changed: set[int], moved: Sequence[Moved]) -> Iterator[tuple[str, Site]]:
    limit = _LIBRARY if before.library in _CHOOSERS else _VECTOR
    for offset, parameter, was in words(before):
        if offset not in changed or _is_tensor_map(before, parameter):
            continue
        now = word(after.block, offset)
        for each in moved:
            inside = was - each.first.address
            if was in each.first and now == each.second.address + inside:
                yield each.name, Site(before.index, offset, parameter, inside, _alignment(was | now, limit))


def _alignment(bits: int, limit: int) -> int:
    return min(limit, bits & -bits)


def _is_tensor_map(node: Node, parameter: int) -> bool:
    found = node.parameters[parameter]
    return node.kind == "kernel" and found.size == TENSOR_MAP and found.offset % 64 == 0


def _hidden(before: Node, after: Node, offset: int, moved: Sequence[Moved], rest: Sequence[bytearray]) -> str | None:
    """Why bytes that changed may be an address that cannot be edited; None if they look like nothing of the kind."""
    holder = _holder(before, offset)
    where = f"{described(before)}, parameter {holder}"
    if before.kind != "kernel" or before.parameters[holder].size in _SCALARS:
        return _stray(before, after, offset)
    if _is_tensor_map(before, holder):
        return f"{where}: a TMA descriptor changed, which holds addresses in an encoding of the driver's"
    for each in moved:
        if any(_moves_along(rest, start, each) for start in range(max(offset - 7, 0), offset + 8)):
            return f"{where}: bytes at {offset} changed as the address of {each.name} did, in another form"
    return None


def _moves_along(blocks: Sequence[bytearray], start: int, moved: Moved) -> bool:
    """Whether eight or four bytes changed by what the address did, whole or in units of up to 4 KiB."""
    for size in (8, 4):
        was, now = (int.from_bytes(block[start : start + size], "little") for block in blocks)
        if was != now and any(
            (now - was - (moved.second.address >> unit) + (moved.first.address >> unit)) % (1 << 8 * size) == 0
            for unit in range(13)
        ):
            return True
    return False


def _stray(before: Node, after: Node, offset: int) -> str:
    where = f"{described(before)}, parameter {_holder(before, offset)}"
    was, now = _at(before, offset)[::-1].hex(), _at(after, offset)[::-1].hex()
    return f"{where}: other bytes changed, at {offset} from 0x{was} to 0x{now}, and no moved tensor explains them"


def _holder(node: Node, offset: int) -> int:
    return next((n for n, p in enumerate(node.parameters) if p.offset <= offset < p.offset + p.size), 0)


def _judged(graph: Graph, proof: Proof) -> Proof:
    """Refuse what is proved but cannot be used."""
    moved = proof.moved
    if not proof.sites:
        return replace(proof, refusal="no node holds its address: it is not used, or reached through other memory")
    for site in proof.sites:
        node = graph.nodes[site.node]
        if node.why_fixed is not None:
            return replace(proof, refusal=f"{described(node)}: {node.why_fixed}")
    held = {(site.node, site.offset) for site in proof.sites}
    for node in graph.nodes:
        for offset, parameter, value in words(node):
            if value in moved.first and (node.index, offset) not in held:
                reason = f"{described(node)}, parameter {parameter} points into its memory and stayed when it moved"
                return replace(proof, refusal=reason)
    return proof


def described(node: Node) -> str:
    """A node, named for a message."""
    return f"node {node.index} ({node.label})"
