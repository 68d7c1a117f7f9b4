"""What an executable was last told about one node: our own bytes, and how to set them.

The driver copies arguments during the call; the bytes live here anyway, since the next update changes a few of them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace

from bucketgraph.cuda.driver import Driver, KernelParams
from bucketgraph.cuda.memory import word
from bucketgraph.cuda.nodes import KernelNode, MemcpyNode, MemsetNode, Node

_pack = struct.Struct("<Q").pack_into


class Shadow:
    """One node's block, to be edited and set in one executable. `node` must be a kernel, a copy or a memset."""

    def __init__(self, node: Node, driver: Driver, executable: int) -> None:
        self._block = bytearray(node.block)
        self.set: Callable[[], None] = self._setter(node, driver, executable)
        """Give the block to the executable. Raises DriverError."""

    def write(self, offset: int, address: int) -> None:
        """Put an address into the block; nothing is set yet."""
        _pack(self._block, offset, address)

    def _setter(self, node: Node, driver: Driver, executable: int) -> Callable[[], None]:
        if isinstance(node, KernelNode):
            return driver.kernel_setter(executable, node.handle, self._kernel(node))
        if isinstance(node, MemcpyNode):
            copy = node.params

            def set_copy() -> None:
                ends = replace(copy, source=word(self._block, 0), destination=word(self._block, 8))
                driver.set_memcpy_params(executable, node.handle, ends)

            return set_copy
        assert isinstance(node, MemsetNode), "no other node has sites"
        fill = node.params

        def set_fill() -> None:
            driver.set_memset_params(executable, node.handle, replace(fill, destination=word(self._block, 0)))

        return set_fill

    def _kernel(self, node: KernelNode) -> KernelParams:
        # One buffer with every parameter at its own offset, and a pointer to each: what `kernelParams` is.
        buffer = (ctypes.c_ubyte * len(self._block)).from_buffer(self._block)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(node.parameters))(*(start + each.offset for each in node.parameters))
        self._kept = buffer, pointers
        return replace(node.params, arguments=ctypes.addressof(pointers), extra=0)
