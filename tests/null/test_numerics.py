"""`numerics: invariant`: a request's logits are the same bits in any bucket, batch, place and chunking."""

from __future__ import annotations

import pytest
import torch
from llm_cases import buckets, loud_weights, tiny
from torch import Tensor

from bucketgraph import LLM
from bucketgraph.config import parse
from bucketgraph.errors import ConfigError
from bucketgraph.kernels import reference


def logits_of(llm: LLM, prompt: list[int], neighbours: list[list[int]], steps: list[int]) -> list[Tensor]:
    """The first row's logits after the prompt and after each of `steps`, in a batch with `neighbours`."""
    rows = [prompt, *neighbours]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    found = []
    with llm.prefill(ids, mask) as batch:
        found.append(batch.logits[0].clone())
        for step in steps:
            batch = llm.decode(batch, torch.full((len(rows),), step))
            found.append(batch.logits[0].clone())
    return found


def test_a_request_has_the_same_bits_whatever_surrounds_it() -> None:
    config = tiny("llama")
    weights = loud_weights(config)
    sets = [
        buckets(tokens=[128], requests=[8], batch=[8], numerics="invariant"),
        buckets(tokens=[16, 32], requests=[2], batch=[1, 2], numerics="invariant"),  # chunks and parts
    ]
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(1, config.vocab_size, (n,), generator=generator).tolist()  # noqa: E731
    prompt, steps = draw(45), draw(4)
    alone = logits_of(LLM.from_weights(config, weights, sets[0], max_model_len=256), prompt, [], steps)
    for bucket_set in sets:
        llm = LLM.from_weights(config, weights, bucket_set, max_model_len=256)
        for neighbours in ([], [draw(3)], [draw(30), draw(61), draw(1)]):
            for step, (got, want) in enumerate(zip(logits_of(llm, prompt, neighbours, steps), alone, strict=True)):
                assert torch.equal(got, want), f"step {step} with {len(neighbours)} neighbours in {bucket_set.name}"


def test_matmul_rows_do_not_depend_on_how_many_there_are() -> None:
    x, weight = torch.randn(130, 96), torch.randn(77, 96)
    whole = reference.linear(x, weight, phase="prefill")
    for rows in (slice(0, 1), slice(5, 70), slice(129, 130)):
        assert torch.equal(reference.linear(x[rows], weight, phase="decode"), whole[rows])
    torch.testing.assert_close(whole, x @ weight.T)


def test_invariant_numerics_of_any_callable_cannot_be_promised() -> None:
    with pytest.raises(ConfigError, match="numerics: invariant belongs to an LLM set"):
        parse(
            {
                "version": 1,
                "name": "m",
                "numerics": "invariant",
                "axes": {"batch": [1]},
                "inputs": {"x": {"shape": ["batch"], "dtype": "float32"}},
                "outputs": {"y": {"shape": ["batch"]}},
            }
        )
