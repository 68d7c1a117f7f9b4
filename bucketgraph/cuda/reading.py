"""A graph's nodes out of the driver.

Rules: arguments are copied out of the driver's memory and never written there, which CUDA does not allow; a node of a
kind that is not understood is kept, as an opaque one.
"""

from __future__ import annotations

import ctypes
import struct
from itertools import count

from bucketgraph.cuda.driver import Driver, DriverError, KernelParams
from bucketgraph.cuda.nodes import WORD, Dependency, KernelNode, MemcpyNode, MemsetNode, Node, Parameter

_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*, keys in the `extra` array of a launch


def read(driver: Driver, graph: int) -> tuple[Node, ...]:
    """All nodes of a graph (CUgraph), in the driver's order, which is that of the capture.

    Raises:
        DriverError: the driver refused, such as for a graph that is gone.
    """
    handles = list(driver.nodes(graph))
    places = {handle: index for index, handle in enumerate(handles)}
    after: list[list[Dependency]] = [[] for _ in handles]
    for edge in driver.edges(graph):
        after[places[edge.target]].append(Dependency(places[edge.source], edge.programmatic))
    order = [tuple(sorted(each, key=lambda dependency: dependency.node)) for each in after]
    return tuple(_node(driver, index, handle, order[index]) for index, handle in enumerate(handles))


def _node(driver: Driver, index: int, handle: int, after: tuple[Dependency, ...]) -> Node:
    kind = driver.node_kind(handle)
    if kind == "kernel":
        return _kernel(driver, index, handle, after)
    if kind == "memcpy":
        copy = driver.memcpy_params(handle)
        ends = struct.pack("<QQ", copy.source, copy.destination)
        return MemcpyNode(index, handle, kind, after, ends, (Parameter(0, WORD), Parameter(WORD, WORD)), params=copy)
    if kind == "memset":
        fill = driver.memset_params(handle)
        start = struct.pack("<Q", fill.destination)
        return MemsetNode(index, handle, kind, after, start, (Parameter(0, WORD),), params=fill)
    return Node(index, handle, kind, after)


def _kernel(driver: Driver, index: int, handle: int, after: tuple[Dependency, ...]) -> KernelNode:
    params = driver.kernel_params(handle)
    layout = tuple(Parameter(offset, size) for offset, size in driver.parameter_layout(params))
    try:
        symbol = driver.kernel_name(params)
    except DriverError:
        symbol = "unnamed_kernel"
    block = _arguments(params, layout)
    attributes = driver.kernel_attributes(handle)
    return KernelNode(
        index, handle, "kernel", after, block, layout, symbol=symbol, params=params, attributes=attributes
    )


def _arguments(params: KernelParams, layout: tuple[Parameter, ...]) -> bytes:
    """A kernel's parameter block, copied out of where its node keeps it."""
    block = bytearray(max((parameter.offset + parameter.size for parameter in layout), default=0))
    if params.arguments:
        pointers = (ctypes.c_uint64 * len(layout)).from_address(params.arguments)
        for address, parameter in zip(pointers, layout, strict=True):
            if address:
                block[parameter.offset : parameter.offset + parameter.size] = ctypes.string_at(address, parameter.size)
    elif params.extra:
        packed = _packed(params.extra)[: len(block)]
        block[: len(packed)] = packed
    return bytes(block)


def _packed(extra: int) -> bytes:
    """The buffer of a launch with CU_LAUNCH_PARAM_BUFFER_POINTER: pairs of key and value, ended by a zero."""
    found: dict[int, int] = {}
    for position in count(step=2):
        key = ctypes.c_uint64.from_address(extra + WORD * position).value
        if key not in (_BUFFER_POINTER, _BUFFER_SIZE):
            break
        found[key] = ctypes.c_uint64.from_address(extra + WORD * (position + 1)).value
    if len(found) < 2:
        return b""
    return ctypes.string_at(found[_BUFFER_POINTER], ctypes.c_size_t.from_address(found[_BUFFER_SIZE]).value)
