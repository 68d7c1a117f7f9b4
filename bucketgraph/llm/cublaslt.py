"""cuBLASLt's matmuls by measurement: of the algorithms that it names for a shape, the one that was the fastest here.

The library chooses by rules. On an H200 Llama-3.1-8B's down projection takes 37.0 us by them at 64 rows and 31.9 by
another of its algorithms. torch offers no choice, so this is ctypes over the library that torch has loaded.
The first call of a shape outside a capture measures, with weights that are not in L2.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# From cublasLt.h and library_types.h, which keep their values.
_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_TRANSPOSE_A, _TRANSPOSED, _MAX_WORKSPACE = 3, 1, 1
DTYPES = frozenset(_TYPES)
_ASKED = 32  # algorithms for each size of workspace
_WORKSPACES = (32 << 20, 4 << 20, 1 << 20, 0)  # bytes: with less room the library names others
_WRONG = 0.02  # of the largest magnitude: more is no rounding
_FINAL = 4  # algorithms that are measured a second time
_GAIN = 0.99  # of the time of the library's own choice, to be taken instead
_NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED


class _Result(ctypes.Structure):
    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The one that torch has loaded; None if there is none."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    except OSError:
        return None


def available(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and _library() is not None


@dataclass(frozen=True)
class _Plan:
    """What a call of one shape needs."""

    described: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]  # of weight, x and result
    algos: list[_Result]


class MeasuredMatmul:
    """`x @ weight.T` and its sum onto a residual, in bfloat16 and float16. Calls must be ordered, as a family's are.

    Raises RuntimeError if the library refuses, which it does for shapes that it cannot run.
    """

    def __init__(self, device: torch.device) -> None:
        library = _library()
        assert library is not None, "asked only where it is available"
        self._lib, self._device = library, device
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._chosen: dict[tuple[Any, ...], _Result] = {}
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self._call("Create", byref(self._handle))
        weakref.finalize(self, library.cublasLtDestroy, self._handle).atexit = False  # after CUDA's own end at exit
        self._workspace = torch.empty(_WORKSPACES[0], dtype=torch.uint8, device=device)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [T, K] @ weight [N, K].T` as `[T, N]`."""
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        self._run(x, weight, y, 0.0)
        return y

    def add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """`residual [T, N] += x [T, K] @ weight [N, K].T`, rounded once."""
        self._run(x, weight, residual, 1.0)
        return residual

    def _run(self, x: Tensor, weight: Tensor, y: Tensor, beta: float) -> None:
        key = (*x.shape, x.stride(0), *weight.shape, weight.stride(0), y.stride(0), x.dtype, beta)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(x, weight, y)
        algo = self._chosen.get(key)
        if algo is None and not torch.cuda.is_current_stream_capturing():
            algo = self._chosen[key] = self._measured(plan, x, weight, y, beta)
        self._launch(plan, algo or plan.algos[0], x, weight, y, beta)

    def _plan(self, x: Tensor, weight: Tensor, y: Tensor) -> _Plan:
        """The library's matrices are of columns: its result is y transposed, weight times x."""
        (rows, width), columns = x.shape, weight.shape[0]
        if x.dtype not in _TYPES or not x.stride(1) == weight.stride(1) == y.stride(1) == 1:
            raise RuntimeError(f"no plan for {x.dtype} with strides {x.stride()}, {weight.stride()}, {y.stride()}")
        described = c_void_p()
        self._call("MatmulDescCreate", byref(described), c_int(_COMPUTE_32F), c_int(_R_32F))
        self._call("MatmulDescSetAttribute", described, c_int(_TRANSPOSE_A), byref(c_int(_TRANSPOSED)), c_size_t(4))
        a = self._layout(x.dtype, width, columns, weight.stride(0))
        b = self._layout(x.dtype, width, rows, x.stride(0))
        c = self._layout(x.dtype, columns, rows, y.stride(0))
        algos: dict[tuple[int, ...], _Result] = {}
        for size in _WORKSPACES:
            wish, found, count = c_void_p(), (_Result * _ASKED)(), c_int()
            self._call("MatmulPreferenceCreate", byref(wish))
            self._call("MatmulPreferenceSetAttribute", wish, c_int(_MAX_WORKSPACE), byref(c_uint64(size)), c_size_t(8))
            asked = self._handle, described, a, b, c, c, wish, c_int(_ASKED), found, byref(count)
            self._call("MatmulAlgoGetHeuristic", *asked, refused=True)
            self._call("MatmulPreferenceDestroy", wish)
            for result in found[: count.value]:
                if result.state == 0:
                    algos.setdefault(tuple(result.algo), result)
        if not algos:
            raise RuntimeError(f"cuBLASLt has no algorithm for {tuple(x.shape)} times {tuple(weight.shape)}")
        return _Plan(described, (a, b, c), list(algos.values()))

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
        layout = c_void_p()
        sizes = c_uint64(rows), c_uint64(columns), c_int64(stride)
        self._call("MatrixLayoutCreate", byref(layout), c_int(_TYPES[dtype]), *sizes)
        return layout

    def _measured(self, plan: _Plan, x: Tensor, weight: Tensor, y: Tensor, beta: float) -> _Result:
        """The fastest of those that are right; the library's own choice unless another one gains."""
        want, scratch = torch.mm(x, weight.t()).float(), torch.empty_like(y)
        limit = _WRONG * float(want.abs().max()) + 1e-30
        right = []
        for algo in plan.algos:
            scratch.zero_()
            try:
                self._launch(plan, algo, x, weight, scratch, beta)
            except RuntimeError:
                continue
            if float((scratch.float() - want).abs().max()) <= limit:
                right.append(algo)
        if not right:
            raise RuntimeError(f"cuBLASLt is wrong for {tuple(x.shape)} times {tuple(weight.shape)}")
        cache = torch.cuda.get_device_properties(self._device).L2_cache_size
        cold = torch.empty(2 * cache, dtype=torch.uint8, device=self._device)

        def times(algos: list[_Result], rounds: int) -> list[float]:
            took = []
            for _ in range(rounds):
                for algo in algos:
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    cold.zero_()
                    start.record()
                    self._launch(plan, algo, x, weight, scratch, beta)
                    end.record()
                    took.append((start, end))
            torch.cuda.current_stream(self._device).synchronize()
            each = [start.elapsed_time(end) for start, end in took]
            return [min(each[place :: len(algos)]) for place in range(len(algos))]

        first = times(right, 3)
        order = sorted(range(1, len(right)), key=first.__getitem__)[:_FINAL]
        final = [right[0], *(right[place] for place in order)]
        again = times(final, 8)
        best = min(range(len(final)), key=again.__getitem__)
        return final[best] if again[best] < _GAIN * again[0] else final[0]

    def _launch(self, plan: _Plan, algo: _Result, x: Tensor, weight: Tensor, y: Tensor, beta: float) -> None:
        a, b, c = plan.layouts
        out = c_void_p(y.data_ptr())
        self._call(
            "Matmul",
            *(self._handle, plan.described, byref(c_float(1.0)), c_void_p(weight.data_ptr()), a),
            *(c_void_p(x.data_ptr()), b, byref(c_float(beta)), out, c, out, c, byref(algo, _Result.algo.offset)),
            *(c_void_p(self._workspace.data_ptr()), c_size_t(self._workspace.numel())),
            c_void_p(torch.cuda.current_stream(self._device).cuda_stream),
        )

    def _call(self, name: str, *args: Any, refused: bool = False) -> None:
        """`refused`: it may say that there is nothing for this."""
        status = getattr(self._lib, f"cublasLt{name}")(*args)
        if status and not (refused and status == _NOT_SUPPORTED):
            raise RuntimeError(f"cublasLt{name} failed with status {status}")
