"""Every supported architecture and head shape: logits of prefill and of each decode step are those of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from llm_cases import buckets, cast, is_idle, loud_weights, pad, tiny, transformers_logits, transformers_twin

from bucketgraph import LLM, SamplingParams
from bucketgraph.errors import ConfigError, ModelError
from bucketgraph.llm.model_config import ModelConfig, RopeConfig, RopeScaling, load_config
from bucketgraph.llm.weights import load_weights

pytest.importorskip("transformers")

LLAMA3 = RopeConfig(5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=64))
# kind, tied, head_dim, heads, KV heads: head_dim * heads is the hidden size only by chance
MODELS = {
    "llama, llama3 RoPE, every head its own KV": tiny(rope=LLAMA3, head_dim=64, num_heads=2, num_kv_heads=2),
    "llama, tied, three heads on one KV": tiny(
        tie_word_embeddings=True, hidden_size=96, head_dim=96, num_heads=6, num_kv_heads=2
    ),
    "llama, one KV head for all": tiny(head_dim=128, num_heads=4, num_kv_heads=1),
    "llama, linear RoPE": tiny(rope=RopeConfig(1e4, RopeScaling("linear", 4.0)), head_dim=64),
    "qwen2, seven heads on one KV": tiny("qwen2", head_dim=64, num_heads=14, num_kv_heads=2),
    "qwen2, tied, one KV head for all": tiny("qwen2", tie_word_embeddings=True, head_dim=96, num_kv_heads=1),
    "qwen3, heads wider than the hidden size": tiny("qwen3", head_dim=128, num_heads=3, num_kv_heads=1),
    "qwen3, tied": tiny("qwen3", tie_word_embeddings=True, head_dim=64, num_heads=4, num_kv_heads=4),
}
LENGTHS = (1, 16, 41, 75)  # 75 is more than the largest bucket: prefilled in chunks
STEPS = 4


def saved(config: ModelConfig, folder: Path) -> None:
    """A folder as transformers writes it, with a tokenizer of one token per letter."""
    from tokenizers import Tokenizer, models

    transformers_twin(config, loud_weights(config)).save_pretrained(folder)
    vocab = {chr(0x4E00 + i): i for i in range(config.vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token=chr(0x4E00))).save(str(folder / "tokenizer.json"))


def rows(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_saved_model_equal_transformers(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    saved(config, tmp_path)
    loaded = load_config(tmp_path)
    assert dataclasses.replace(loaded, eos_token_ids=(), bos_token_id=None) == config
    twin = transformers_twin(config, load_weights(tmp_path, loaded, torch.float32, "cpu"))
    prompts = rows()
    forced = [row[:STEPS] for row in rows(1)[2:3] * len(prompts)]
    steps = list(transformers_logits(twin, prompts, forced))
    llm = LLM(tmp_path, buckets(tokens=[16, 64]), device="cpu", max_model_len=96)
    for side in ("left", "right"):
        with llm.prefill(*pad(prompts, side, fill=5)) as batch:
            for step, want in enumerate(steps):
                # Absolute, and relative to the largest logit where that is above 1.
                close = 1e-4 * max(1.0, float(want.abs().max()))
                torch.testing.assert_close(batch.logits, want, atol=close, rtol=0)
                assert float(want.std()) > 0.1, "the logits say something"
                assert torch.equal(batch.tokens, batch.logits.argmax(-1))
                if step < STEPS:
                    llm.decode(batch, torch.tensor([line[step] for line in forced]))
            assert batch.lengths == [length + STEPS for length in LENGTHS]
        assert is_idle(llm)


@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_stays_near_float32(dtype: str, close: float) -> None:
    config = tiny(rope=LLAMA3, head_dim=64)
    full = loud_weights(config)
    half = LLM.from_weights(config, cast(config, full, getattr(torch, dtype)), buckets(), max_model_len=96)
    single = LLM.from_weights(config, full, buckets(), max_model_len=96)
    with single.prefill(*pad(rows(), "right")) as want, half.prefill(*pad(rows(), "right")) as got:
        for _ in range(3):
            assert got.logits.dtype == getattr(torch, dtype)
            error = (got.logits.float() - want.logits).abs().max() / want.logits.abs().max()
            assert error < close
            chosen = want.tokens
            single.decode(want, chosen), half.decode(got, chosen)


def test_random_models_take_ids_only() -> None:
    llm = LLM("random:smollm2-135m:1", buckets(tokens=[16], batch=[1], requests=[1]), device="cpu", max_model_len=32)
    assert llm.config.num_layers == 1 and llm.tokenizer is None and "random" in llm.note
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 4 and result.outputs[0].text == "" and result.prompt is None
    with pytest.raises(ConfigError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("random:gpt-5", "unknown model preset"),
        ("random:smollm2-135m:0", "malformed model"),
        ("random:smollm2-135m:two", "malformed model"),
        ("no/such/folder", "no/such/folder"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("package:no_such_package/x.gguf", "no_such_package"),
    ],
)
def test_a_model_that_is_not_there_is_named(model: str, says: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=says):
        LLM(model, buckets(), device="cpu")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    saved(tiny(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle.*pytorch_model\.bin"):
        LLM(tmp_path, buckets(), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        LLM(tmp_path, buckets(), device="cuda")


@pytest.mark.parametrize("dtype", ["int8", "fp16", "", "float64"])
def test_an_unknown_dtype_lists_those_there_are(dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown dtype.*auto, float32, float16, bfloat16"):
        LLM("random:smollm2-135m:1", buckets(), device="cpu", dtype=dtype)
