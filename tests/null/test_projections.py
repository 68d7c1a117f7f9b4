"""The three ways to run a model's matmuls agree, and every mix of them is a whole one."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from bucketgraph.kernels import reference
from bucketgraph.llm.projections import Fused, Invariant, Library, Projection, Projections, mixes

WAYS: dict[str, Projection] = {
    "library": Library(reference),
    "fused": Fused(reference, pdl=False),
    "invariant, prefill": Invariant(reference, "prefill"),
    "invariant, decode": Invariant(reference, "decode"),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_each_way_computes_what_its_name_says(name: str, rows: int) -> None:
    torch.manual_seed(rows)
    way, x, norm = WAYS[name], torch.randn(rows, 24).double(), torch.randn(24).double()
    weight, bias, residual = (torch.randn(s).double() for s in ((10, 24), (10,), (rows, 10)))
    gate, up = torch.randn(2, 12, 24).double()
    normed = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm
    torch.testing.assert_close(way.norm_linear(x, norm, 1e-5, weight, bias), normed @ weight.T + bias)
    torch.testing.assert_close(way.norm_linear(x, norm, 1e-5, weight, None), normed @ weight.T)
    want = residual + x @ weight.T
    torch.testing.assert_close(way.linear_add(x, weight, residual), want)
    gated = torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)
    torch.testing.assert_close(way.norm_gate_up(x, norm, 1e-5, torch.cat([gate, up])), gated)


def test_mixes_name_what_they_hold() -> None:
    fused, library = WAYS["fused"], WAYS["library"]
    made = mixes(fused, library)
    assert next(iter(made)) == "fused" and made["library"] == Projections.all(library)
    held = [tuple(getattr(mix, field.name) is fused for field in fields(mix)) for mix in made.values()]
    assert len(set(held)) == len(made), "each is measured once"
    assert held[0] == (True,) * 5
