"""What an executable was last told about one node: our own bytes, and how to set them.

The driver copies arguments during the call; the bytes live here anyway, since the next update changes a few of them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace

from bucketgraph.cuda.driver import Driver
from bucketgraph.cuda.memory import word
from bucketgraph.cuda.nodes import KernelNode, MemcpyNode, MemsetNode, Node


class Shadow:
    """One node's block, to be edited and set. `node` must be a kernel, a copy or a memset."""

    def __init__(self, node: Node) -> None:
        self._block = bytearray(node.block)
        self.set: Callable[[Driver, int], None] = self._setter(node)

    def write(self, offset: int, address: int) -> None:
        """Put an address into the block; nothing is set yet."""
        struct.pack_into("<Q", self._block, offset, address)

    def _setter(self, node: Node) -> Callable[[Driver, int], None]:
        if isinstance(node, KernelNode):
            return self._kernel(node)
        if isinstance(node, MemcpyNode):
            copy = node.params

            def set_copy(driver: Driver, executable: int) -> None:
                ends = replace(copy, source=word(self._block, 0), destination=word(self._block, 8))
                driver.set_memcpy_params(executable, node.handle, ends)

            return set_copy
        assert isinstance(node, MemsetNode), "no other node has sites"
        fill = node.params

        def set_fill(driver: Driver, executable: int) -> None:
            driver.set_memset_params(executable, node.handle, replace(fill, destination=word(self._block, 0)))

        return set_fill

    def _kernel(self, node: KernelNode) -> Callable[[Driver, int], None]:
        # One buffer with every parameter at its own offset, and a pointer to each: what `kernelParams` is.
        buffer = (ctypes.c_ubyte * len(self._block)).from_buffer(self._block)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(node.parameters))(*(start + each.offset for each in node.parameters))
        params = replace(node.params, arguments=ctypes.addressof(pointers), extra=0)

        self._kept = buffer, pointers

        def set_kernel(driver: Driver, executable: int) -> None:
            driver.set_kernel_params(executable, node.handle, params)

        return set_kernel
