"""Whose a kernel is, by its name: demangled, shortened, and assigned to a library.

`PATTERNS` is a table, read from the top: a FlashAttention kernel is a CUTLASS kernel too, and cuDNN generates kernels
called flash. Names are no interface: a library may rename its kernels at any time, and then they show as `other`.
"""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

OWN, TRITON, OTHER = "bucketgraph", "Triton", "other"

# Library, pattern in the demangled name, where the names come from.
PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("NCCL", r"^nccl(Dev)?Kernel", "NCCL src/device: ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    ("cuDNN", r"cudnn", "generated engines: cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_..."),
    ("cuDNN", r"xmma_(fprop|dgrad|wgrad)|implicit_convolve|winograd", "cuDNN's precompiled convolutions"),
    (
        "FlashAttention",
        r"\bflash::|flash_fwd|flash_bwd|FlashAttn",
        "FlashAttention 2 and 3: flash_fwd_kernel",
    ),
    ("FlashAttention", r"pytorch_flash", "ATen's copy: pytorch_flash::flash_fwd_kernel"),
    ("ATen", r"fmha_cutlass|PyTorchMemEffAttention", "ATen, transformers/cuda/mem_eff_attention"),
    ("ATen", r"\bat::|\bat_cuda_detail::|\bc10::", "C++ namespaces of PyTorch, its copy of CUB among them"),
    ("cuBLAS", r"^nvjet_", "cuBLAS 12.6 and later on Hopper and Blackwell: nvjet_tst_..., nvjet_sm90_hss_..."),
    (
        "cuBLAS",
        r"cublas|splitK?_?reduce|gemv(x|2T|2N|NSP|_)|gemmk1|gemmSN",
        "splitKreduce_kernel, gemvx::kernel",
    ),
    ("cuBLAS", r"(volta|turing|ampere|hopper|blackwell|sm\d+)_(xmma_)?\w*gemm", "cuBLAS: ampere_bf16_s16816gemm_..."),
    (
        "cuBLAS",
        r"cutlass_?\d+_(wmma_)?tensorop|cutlass_?\d+_simt",
        "its CUTLASS: cutlass_80_tensorop_s1688gemm_...",
    ),
    ("cuBLAS", r"^(dot|reduce_1Block|asum|nrm2|scal|axpy)_kernel", "cuBLAS level 1: dot_kernel, reduce_1Block_kernel"),
    ("CUTLASS", r"\bcutlass::|\bcute::|^cutlass_", "CUTLASS and CuTe, used by an extension"),
    ("CUB", r"\bcub::|\bthrust::", "CCCL: cub::DeviceReduceKernel, thrust::cuda_cub::core"),
    (TRITON, r"^triton_(poi|red|per|tem|for|mm|spl|unk)_", "TorchInductor, torch/_inductor/codegen/triton.py"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern, _ in PATTERNS)
_SCRATCH = (8, 8)  # sizes of the two pointers that Triton appends: global and profile scratch
_PLAIN = re.compile(r"[A-Za-z_]\w*")


def library(symbol: str, sizes: Sequence[int] = ()) -> str:
    """Whose kernel it is: `bucketgraph` for the project's own, a name out of `PATTERNS`, `Triton`, or `other`.

    Args:
        symbol: the kernel's name, mangled or not.
        sizes: bytes of each of its parameters. A plain C name with the two hidden pointers of Triton at the end, and in
            none of the libraries above, is taken for a Triton kernel.
    """
    if _base(symbol) in own_kernels():
        return OWN
    name = demangle(symbol)
    for owner, pattern in _COMPILED:
        if pattern.search(name):
            return owner
    is_c = _PLAIN.fullmatch(symbol) is not None and not symbol.startswith("_Z")
    return TRITON if is_c and tuple(sizes[-2:]) == _SCRATCH else OTHER


def _base(symbol: str) -> str:
    """A Triton kernel's function name: some versions append how its arguments are specialised, `_0d1d2de`."""
    return re.sub(r"(_(\d+(de|d|c)?)+)$", "", symbol) if symbol not in own_kernels() else symbol


@lru_cache(maxsize=1)
def own_kernels() -> frozenset[str]:
    """Names of the project's own Triton and Gluon kernels, read from their source: importing them needs Triton."""
    spec = find_spec("bucketgraph.kernels")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = set()
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.py"))):
        for item in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(item, ast.FunctionDef) and any(_is_jit(each) for each in item.decorator_list):
                found.add(item.name)
    return frozenset(found)


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "jit"


@lru_cache(maxsize=4096)
def demangle(symbol: str) -> str:
    """A C++ name for a mangled one, by the C++ library of this process; the symbol itself where that cannot be."""
    run = _demangler()
    if run is None or not symbol.startswith("_Z"):
        return symbol
    status = ctypes.c_int(-1)
    text = run(symbol.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return symbol
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        _free()(text)


@lru_cache(maxsize=1)
def _demangler() -> ctypes._NamedFuncPointer | None:
    try:
        run = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):
        return None
    run.restype = ctypes.c_void_p
    run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return run


@lru_cache(maxsize=1)
def _free() -> ctypes._NamedFuncPointer:
    free = ctypes.CDLL(None)["free"]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    return free


def short(name: str) -> str:
    """A demangled name without return type, template arguments and parameters: `at::native::reduce_kernel`."""
    kept, depth = [], 0
    for character in name.replace("(anonymous namespace)", "{anonymous}").replace("->", ""):
        if character in "<(":
            if character == "(" and depth == 0:
                break
            depth += 1
        elif character in ">)":
            depth -= 1
        elif depth == 0:
            kept.append(character)
    words = "".join(kept).split()
    return words[-1] if words else name
