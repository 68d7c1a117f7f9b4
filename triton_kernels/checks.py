"""Host-side checks of the wrappers: shapes, dtypes and strides only, never a value, so they are free under capture."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def require(holds: bool, what: str) -> None:
    """Raise ValueError with `what` unless `holds`."""
    if not holds:
        raise ValueError(what)


def floats(**tensors: Tensor) -> None:
    """Each tensor is contiguous and all share one dtype that the kernels compute with."""
    dtypes = {name: t.dtype for name, t in tensors.items()}
    require(
        len(set(dtypes.values())) == 1 and next(iter(dtypes.values())) in FLOATS,
        f"kernels need one dtype of bfloat16, float16, float32 for all of their tensors: given {dtypes}",
    )
    contiguous(**tensors)


def contiguous(**tensors: Tensor) -> None:
    """Each tensor is contiguous: the kernels derive strides from shapes."""
    for name, t in tensors.items():
        require(
            t.is_contiguous(),
            f"{name}: given strides {t.stride()} for shape {tuple(t.shape)}, expected a contiguous tensor; "
            "call .contiguous() outside the captured path",
        )


def vector(name: str, t: Tensor, length: int, dtype: torch.dtype) -> None:
    """`t` is a contiguous vector of `length` elements of `dtype`."""
    require(
        tuple(t.shape) == (length,) and t.dtype == dtype and t.is_contiguous(),
        f"{name}: given {tuple(t.shape)} {t.dtype} strides {t.stride()}, expected a contiguous ({length},) {dtype}",
    )


def table(name: str, t: Tensor, rows: int) -> None:
    """`t` is a contiguous int32 block table with `rows` rows."""
    require(
        t.dim() == 2 and t.shape[0] == rows and t.dtype == torch.int32 and t.is_contiguous(),
        f"{name}: given {tuple(t.shape)} {t.dtype} strides {t.stride()}, expected a contiguous ({rows}, width) int32",
    )


def caches(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> None:
    """Both caches are `[pages, kv_heads, page_size, head_dim]`, the page size a power of two of at least 16."""
    require(
        k_cache.dim() == 4 and k_cache.shape == v_cache.shape and k_cache.shape[3] == head_dim,
        f"k_cache, v_cache: given {tuple(k_cache.shape)}, {tuple(v_cache.shape)}, "
        f"expected twice [pages, kv_heads, page_size, {head_dim}]",
    )
    page = k_cache.shape[2]
    require(page >= 16 and page & (page - 1) == 0, f"page_size {page}: expected a power of two of at least 16")


def head_dim(dim: int) -> int:
    """The power of two to which a head dimension is padded; ValueError for one that the kernels do not take."""
    require(
        16 <= dim <= 256 and dim % 8 == 0,
        f"head_dim {dim}: expected a multiple of 8 from 16 to 256 (padded to a power of two by masks)",
    )
    return 1 << (dim - 1).bit_length()


def group(heads: int, kv_heads: int) -> int:
    """Query heads per KV head."""
    require(heads % kv_heads == 0, f"given {heads} query heads and {kv_heads} KV heads, expected a whole multiple")
    return heads // kv_heads
