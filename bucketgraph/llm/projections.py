"""How the model's matmuls run: by the library, by our matmul of fixed shape, or fused with what stands around them.

All three offer the same operations, so a layer reads the same whichever serves it, and each matmul of a layer can have
another: a fused one streams its weights for a few rows and saves launches, the library is better at more rows.
`linear_add` may write its sum over `residual`, which nobody needs afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Literal, Protocol

import torch.nn.functional as F
from torch import Tensor

FUSED_ROWS = 64  # what the fused kernels take
STREAMED_ROWS = 16  # and the ones among them that stream weights past shared memory, of 8 rows at once
TILED_ROWS = 256  # and the one with tensor descriptors: worth a look where nothing is streamed


class Projection(Protocol):
    """The matmuls of a layer; x and residual `[rows, K]`, weight `[N, K]`, gate_up `[2 F, K]`."""

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor: ...

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor: ...


class Library:
    """The library's matmuls, between our norm and activation; these start while what is before them ends if `pdl`."""

    def __init__(self, ops: ModuleType, pdl: bool = False) -> None:
        self._ops, self._pdl = ops, pdl

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(self._normed(x, norm, eps), weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return residual.addmm_(x, weight.t())

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        both = F.linear(self._normed(x, norm, eps), gate_up)
        activated: Tensor = self._ops.swiglu(both, pdl=self._pdl)
        return activated

    def _normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        # The library's matmul behind it asks for all the shared memory there is.
        normed: Tensor = self._ops.rms_norm(x, norm, eps, pdl=self._pdl, lean=False)
        return normed


class Invariant:
    """Our own matmul, whose rows do not depend on how many there are."""

    def __init__(self, ops: ModuleType, phase: Literal["prefill", "decode"]) -> None:
        self._ops, self._phase = ops, phase

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        made: Tensor = self._ops.linear(self._ops.rms_norm(x, norm, eps), weight, bias, phase=self._phase)
        return made

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        made: Tensor = self._ops.linear(x, weight, residual=residual, phase=self._phase)
        return made

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        made: Tensor = self._ops.swiglu(self.norm_linear(x, norm, eps, gate_up, None))
        return made


class Fused:
    """One kernel each, for up to `FUSED_ROWS` rows; in a chain of dependent launches where the device has them."""

    def __init__(self, ops: ModuleType, pdl: bool, form: Literal["auto", "streamed"] = "auto") -> None:
        self._ops, self._how = ops, {"pdl": pdl, "form": form}

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        made: Tensor = self._ops.norm_linear(x, norm, eps, weight, bias, **self._how)
        return made

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        made: Tensor = self._ops.linear_add(x, weight, residual, residual, **self._how)
        return made

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        made: Tensor = self._ops.norm_gate_up(x, norm, eps, gate_up, **self._how)
        return made


class Tiled(Fused):
    """`Fused`, with gate and up through tensor descriptors: those of up to `TILED_ROWS` rows."""

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        made: Tensor = self._ops.norm_gate_up(x, norm, eps, gate_up, **{**self._how, "form": "tiled"})
        return made


@dataclass(frozen=True)
class Projections:
    """Who runs each matmul of the model."""

    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection
    head: Projection

    @classmethod
    def all(cls, one: Projection) -> Projections:
        return cls(*(one for _ in fields(cls)))


@dataclass(frozen=True)
class Ways:
    """What mixes are made of; None: not here."""

    library: Projection
    fused: Projection
    streamed: Projection | None
    tiled: Projection | None


def mixes(ways: Ways, rows: int, head_rows: int) -> dict[str, Projections]:
    """What is worth measuring for so many rows, by name. Each costs a bucket a capture, so only what has won somewhere.

    `head_rows`: the LM head's, fewer in prefill. Where the head is all that differs, it is fused without a choice, so
    that long buckets are captured once. Empty where nothing but the library is worth it.
    """
    library, fused, tiled = ways.library, ways.fused, ways.tiled
    streamed = ways.streamed if rows <= STREAMED_ROWS else None
    head = fused if head_rows <= FUSED_ROWS else library
    made: dict[str, Projections] = {}
    if rows <= FUSED_ROWS:
        if rows == 1 or streamed is None:
            made["fused"] = Projections.all(fused)
        if rows == 1 and streamed is not None:
            made["fused, streamed down"] = Projections(fused, fused, fused, streamed, fused)
        if rows > 1 and streamed is not None:  # the head is faster fused
            made["streamed, fused gate_up"] = Projections(streamed, streamed, fused, streamed, fused)
            made["streamed"] = Projections(streamed, streamed, streamed, streamed, fused)
        if rows > 8:
            made["fused o, gate_up and head"] = Projections(library, fused, fused, library, fused)
        if rows > 1 and streamed is None:
            made["fused gate_up and head"] = Projections(library, library, fused, library, fused)
    if STREAMED_ROWS < rows <= TILED_ROWS and tiled is not None:
        made["tiled gate_up"] = Projections(library, library, tiled, library, head)
    if rows > FUSED_ROWS and head is fused:
        made["fused head"] = Projections(library, library, library, library, fused)
    if made and rows <= TILED_ROWS:
        made["library"] = Projections.all(library)
    return made
