"""The three ways to run a model's matmuls agree, and every mix of them is a whole one."""

from __future__ import annotations

import pytest
import torch

from bucketgraph.kernels import reference
from bucketgraph.llm.projections import Fused, Invariant, Library, Projection, Projections, Tiled, Ways, mixes

WAYS: dict[str, Projection] = {
    "library": Library(reference),
    "fused": Fused(reference, pdl=False),
    "tiled": Tiled(reference, pdl=False),
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


@pytest.mark.parametrize(
    "rows, head_rows", [(r, h) for r in (1, 2, 8, 9, 16, 17, 64, 65, 256, 257) for h in {r, min(r, 8)}]
)
@pytest.mark.parametrize("left_out", [(), ("tiled",), ("streamed",), ("streamed", "tiled")])
def test_mixes_name_what_they_hold(rows: int, head_rows: int, left_out: tuple[str, ...]) -> None:
    names = {name: Fused(reference, pdl=False) for name in ("library", "fused", "streamed", "tiled")}
    made = mixes(Ways(**{name: None if name in left_out else way for name, way in names.items()}), rows, head_rows)
    used = {name: {key for key, way in names.items() if way in mix.__dict__.values()} for name, mix in made.items()}
    assert len(set(map(repr, made.values()))) == len(made), "each is measured once"
    whole = {name: mix for name, mix in made.items() if len(used[name]) == 1}
    assert all(mix == Projections.all(names[name]) for name, mix in whole.items())
    together = set().union(*used.values())
    assert ("fused" in together) == (head_rows <= 64)
    assert ("tiled" in together) == (16 < rows <= 256 and "tiled" not in left_out)
    assert ("streamed" in together) == (rows <= 16 and "streamed" not in left_out)
    assert bool(made) == (head_rows <= 64 or "tiled" in together)
    assert (not made or made.get("library") == Projections.all(names["library"])) if rows <= 256 else len(made) <= 1
    assert rows > 64 or next(iter(made)) != "library", "what is never captured runs the first one"
