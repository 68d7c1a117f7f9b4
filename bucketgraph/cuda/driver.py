"""The seam between this package and the CUDA driver: what is asked of it, in plain integers and frozen records.

Rules: handles and addresses are integers; a kernel's arguments stay where the driver keeps them, and whoever reads them
copies them out; nothing above this file imports `cuda.bindings`. `bindings.py` is the real driver, tests have a double.
Only calls of a CUDA 13.0 driver are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol

from bucketgraph.errors import BucketGraphError, ConfigError

Dim3 = tuple[int, int, int]
NodeKind = Literal[
    "kernel",
    "memcpy",
    "memset",
    "host",
    "graph",
    "empty",
    "wait_event",
    "event_record",
    "ext_semas_signal",
    "ext_semas_wait",
    "mem_alloc",
    "mem_free",
    "batch_mem_op",
    "conditional",
    "unknown",
]
MemoryType = Literal["host", "device", "array", "unified"]


class DriverError(BucketGraphError, RuntimeError):
    """A call of the CUDA driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed", given=f"{name} ({code})")
        self.code = code


@dataclass(frozen=True, slots=True)
class KernelParams:
    """CUDA_KERNEL_NODE_PARAMS."""

    function: int  # CUfunction; 0 where only `kernel` is set
    kernel: int  # CUkernel, looked at where `function` is 0
    context: int  # CUcontext
    grid: Dim3  # in blocks
    block: Dim3  # in threads
    shared_bytes: int  # dynamic shared memory of a block
    arguments: int  # address of a `void *[]`, one pointer for each parameter
    extra: int = 0  # address of the `extra` array of a launch with a packed buffer; 0 otherwise


@dataclass(frozen=True, slots=True)
class KernelAttributes:
    """Launch attributes that a kernel node has beside its parameters, and that no parameter update carries."""

    cooperative: bool = False
    cluster: Dim3 = (1, 1, 1)  # in blocks
    device_updatable: bool = False


@dataclass(frozen=True, slots=True)
class MemcpyParams:
    """CUDA_MEMCPY3D, without offsets and pitches. Of arrays only the type is known; their address is 0."""

    source: int
    destination: int
    source_type: MemoryType
    destination_type: MemoryType
    width: int  # bytes in a row
    height: int  # rows
    depth: int  # slices
    offset: bool = False  # whether it starts at another place than the addresses say


@dataclass(frozen=True, slots=True)
class MemsetParams:
    """CUDA_MEMSET_NODE_PARAMS."""

    destination: int
    value: int
    element_bytes: int  # 1, 2 or 4
    width: int  # elements in a row
    height: int  # rows
    pitch: int  # bytes from row to row


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` waits for `source`; programmatic where it may start before `source` has ended."""

    source: int
    target: int
    programmatic: bool = False


class Driver(Protocol):
    """The calls that graphs need. Every method raises DriverError where the CUDA driver refuses."""

    def nodes(self, graph: int) -> Sequence[int]:
        """Handles of a graph's nodes (CUgraphNode)."""
        ...

    def edges(self, graph: int) -> Sequence[Edge]:
        """Dependencies, between handles of nodes."""
        ...

    def node_kind(self, node: int) -> NodeKind: ...

    def kernel_params(self, node: int) -> KernelParams: ...

    def kernel_attributes(self, node: int) -> KernelAttributes: ...

    def parameter_layout(self, params: KernelParams) -> Sequence[tuple[int, int]]:
        """Offset and size in bytes of each parameter in the kernel's parameter block."""
        ...

    def kernel_name(self, params: KernelParams) -> str:
        """The kernel's symbol, mangled if it is C++."""
        ...

    def memcpy_params(self, node: int) -> MemcpyParams: ...

    def memset_params(self, node: int) -> MemsetParams: ...

    def kernel_setter(self, executable: int, node: int, params: KernelParams) -> Callable[[], None]:
        """What gives a node these parameters, for later launches of the executable (CUgraphExec).

        The arguments are read and copied by each call of it, and whatever it makes once is made here.
        """
        ...

    def set_memcpy_params(self, executable: int, node: int, params: MemcpyParams) -> None:
        """Addresses for later launches; everything else stays as the node has it."""
        ...

    def set_memset_params(self, executable: int, node: int, params: MemsetParams) -> None: ...

    def launch(self, executable: int, stream: int) -> None:
        """Enqueue one launch on a stream (CUstream). Torch's random generators are not advanced."""
        ...

    # -- graphs made by hand -----------------------------------------------------------------------------------------

    def create_graph(self) -> int: ...

    def clone_graph(self, graph: int) -> int: ...

    def destroy_graph(self, graph: int) -> None:
        """One that `create_graph` or `clone_graph` made; its executables live on."""
        ...

    def add_while(self, graph: int) -> tuple[int, int]:
        """Add a WHILE node that every launch enters: its condition (CUgraphConditionalHandle), and its empty body."""
        ...

    def add_child(self, graph: int, child: int) -> int:
        """Add a copy of a graph as one node."""
        ...

    def add_kernel(self, graph: int, params: KernelParams, after: Sequence[int] = ()) -> int: ...

    def require_ends(self, graph: int, edges: Sequence[Edge]) -> None:
        """Make programmatic edges ordinary ones."""
        ...

    def instantiate(self, graph: int) -> int:
        """An executable (CUgraphExec)."""
        ...

    def destroy_executable(self, executable: int) -> None: ...

    def load_module(self, source: str, architecture: str) -> int:
        """Compile CUDA C++ for an architecture such as sm_90, and load it for good (CUmodule)."""
        ...

    def function(self, module: int, name: str) -> int:
        """A kernel of a module (CUfunction)."""
        ...

    def device_address(self, host: int) -> int:
        """Where a kernel finds pinned host memory."""
        ...

    def set_enabled(self, executable: int, node: int, enabled: bool) -> None:
        """Whether later launches of the executable run a kernel, copy or memset, or pass over it."""
        ...


def load_driver() -> Driver:
    """The real driver. Raises ConfigError where `cuda.bindings` or a CUDA driver is missing."""
    hint = "pip install 'cuda-bindings>=13.3,<14'"
    try:
        module = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError("CUDA graphs as data need cuda-bindings", given=str(error), hint=hint) from error
    from bucketgraph.cuda.bindings import Bindings

    return Bindings(module)
