"""Weights arrive whole and exact, or not at all: folders, shards and GGUF files against transformers and each other."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bucketgraph.errors import ConfigError, ModelError
from bucketgraph.llm.model_config import ModelConfig, RopeConfig, load_config
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.weights import ModelWeights, load_weights, random_weights, to_hf_state_dict

KINDS = ["llama", "qwen2", "qwen3"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny(kind: str = "llama", tied: bool = False) -> ModelConfig:
    """A config with every dimension different, so that a swapped one cannot fit."""
    return ModelConfig(
        architecture=kind,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if kind == "qwen3" else 8,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        tie_word_embeddings=tied,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        max_position_embeddings=256,
        eos_token_ids=(2,),
        bos_token_id=1,
        torch_dtype="float32",
    )


def saved_by_transformers(folder: Path, kind: str, tied: bool, **how: Any) -> dict[str, Tensor]:
    """Save a random model of transformers with every parameter random; returns its state dict."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    c = tiny(kind, tied)
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    config = kinds[kind](
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        **({"rope_parameters": LLAMA3} if kind == "llama" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms of one and biases of zero would hide a mix-up
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, **how)
    return dict(model.state_dict())


def folder_of(path: Path, change: Callable[[dict[str, Tensor]], None], tied: bool = False) -> tuple[Path, ModelConfig]:
    """A folder with one safetensors file of a tiny Llama, after `change` edited its tensors."""
    config = tiny(tied=tied)
    state = {k: v.clone() for k, v in to_hf_state_dict(random_weights(config, torch.float32, "cpu"), config).items()}
    if tied:
        del state["lm_head.weight"]
    change(state)
    save_file(state, path / "model.safetensors")
    return path, config


def load(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(path, config, dtype, "cpu")


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "sharded"])
def test_a_folder_saved_by_transformers_comes_back_bit_for_bit(
    tmp_path: Path, kind: str, tied: bool, shards: bool
) -> None:
    state = saved_by_transformers(tmp_path, kind, tied, max_shard_size="8KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    config = load_config(tmp_path)
    weights = load(tmp_path, config)
    assert_same(to_hf_state_dict(weights, config), state)
    assert (weights.lm_head is weights.embed) == tied
    assert ("lm_head" in weights.tensors()) == (not tied)


def test_rows_are_fused_q_k_v_and_gate_up_in_that_order(tmp_path: Path) -> None:
    state = saved_by_transformers(tmp_path, "qwen2", False)
    layer = load(tmp_path, load_config(tmp_path)).layers[1]
    name = "model.layers.1."
    qkv = [state[f"{name}self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(qkv))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([state[f"{name}self_attn.{x}_proj.bias"] for x in "qkv"]))
    assert torch.equal(
        layer.gate_up, torch.cat([state[f"{name}mlp.gate_proj.weight"], state[f"{name}mlp.up_proj.weight"]])
    )
    assert layer.q_norm is None and layer.k_norm is None


def test_progress_counts_every_tensor_and_values_are_cast(tmp_path: Path) -> None:
    path, config = folder_of(tmp_path, lambda state: None)
    seen: list[tuple[int, int, str]] = []
    weights = load_weights(path, config, torch.bfloat16, "cpu", on_progress=lambda *step: seen.append(step))
    total = len(load_file(path / "model.safetensors"))
    assert [step[:2] for step in seen] == [(n, total) for n in range(1, total + 1)]
    assert {tensor.dtype for tensor in weights.tensors().values()} == {torch.bfloat16}


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__setitem__(name, tensor)


def poke(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[name].view(-1)[-1] = value

    return change


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
BAD: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "missing tensor": (drop(DOWN), f"1 tensors are missing.*{DOWN}"),
    "missing lm_head though untied": (drop("lm_head.weight"), r"missing.*lm_head\.weight"),
    "a layer too many": (put("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32)), r"unexpected.*layers\.2\.mlp"),
    "a bias nobody adds": (put("model.layers.0.self_attn.o_proj.bias", torch.ones(32)), r"unexpected.*o_proj\.bias"),
    "transposed": (put(DOWN, torch.ones(48, 32)), rf"{DOWN}.*given \[48, 32\], expected \[32, 48\]"),
    "integer": (put(DOWN, torch.ones(32, 48, dtype=torch.int8)), rf"{DOWN}.*given I8"),
    "8-bit float": (put(NORM, torch.ones(32).to(torch.float8_e4m3fn)), rf"{NORM}.*given F8_E4M3"),
    "NaN": (poke(DOWN, float("nan")), rf"{DOWN} in .*model\.safetensors holds NaN"),
    "infinite": (poke("model.embed_tokens.weight", float("-inf")), r"embed_tokens\.weight in .* holds NaN or infinite"),
}


@pytest.mark.parametrize(("change", "named"), BAD.values(), ids=BAD.keys())
def test_a_bad_tensor_is_named_and_nothing_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], named: str
) -> None:
    path, config = folder_of(tmp_path, change)
    with pytest.raises(ModelError, match=named):
        load(path, config)


def test_a_value_that_overflows_the_asked_dtype_is_named(tmp_path: Path) -> None:
    path, config = folder_of(tmp_path, poke(DOWN, 1e30))
    load(path, config, torch.bfloat16)
    with pytest.raises(ModelError, match=rf"{DOWN}.*torch\.float16.*try bfloat16"):
        load(path, config, torch.float16)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path, config = folder_of(tmp_path, lambda state: None)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 300, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
            load(path, config)


def test_rotary_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    path, config = folder_of(tmp_path, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    assert load(path, config).layers[0].qkv.shape == (64, 32)


def test_a_tied_lm_head_in_the_file_must_equal_the_embedding(tmp_path: Path) -> None:
    path, config = folder_of(
        tmp_path, lambda s: s.__setitem__("lm_head.weight", s["model.embed_tokens.weight"].clone()), tied=True
    )
    weights = load(path, config)
    assert weights.lm_head is weights.embed
    folder_of(tmp_path, put("lm_head.weight", torch.ones(96, 32)), tied=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*differs from the embedding"):
        load(path, config)


def test_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no safetensors.*expected model\.safetensors or"):
        load(tmp_path, tiny())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*save_pretrained"):
        load(tmp_path, tiny())


def test_a_broken_index_or_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved_by_transformers(tmp_path, "llama", False, max_shard_size="8KB")
    config = load_config(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shard = sorted(set(json.loads(index.read_text())["weight_map"].values()))[1]
    content = (tmp_path / shard).read_bytes()
    (tmp_path / shard).unlink()
    with pytest.raises(ModelError, match=f"shard {shard} is missing"):
        load(tmp_path, config)
    (tmp_path / shard).write_bytes(content[:-8])
    with pytest.raises(ModelError, match=rf"cannot read .*{shard}"):
        load(tmp_path, config)
    (tmp_path / shard).write_bytes(content)
    weight_map = json.loads(index.read_text())["weight_map"]
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "again.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map | {"again": "again.safetensors"}}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in two shards"):
        load(tmp_path, config)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="weight_map"):
        load(tmp_path, config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_no_plain_float_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="weight dtype"):
        random_weights(tiny(), dtype, "cpu")
    with pytest.raises(ConfigError, match="weight dtype"):
        load(tmp_path, tiny(), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_repeat_by_seed_and_are_never_trivial(kind: str) -> None:
    config = tiny(kind)
    first, again, other = (random_weights(config, torch.bfloat16, "cpu", seed).tensors() for seed in (0, 0, 1))
    assert_same(first, again)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    for name, tensor in first.items():
        center = 1.0 if name.endswith("norm") else 0.0
        assert abs(tensor.float().mean().item() - center) < 0.02 and 0 < tensor.float().std().item() < 0.05, name


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_fit_transformers_own_model(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = tiny(kind)
    state = to_hf_state_dict(random_weights(config, torch.float32, "cpu"), config)
    theirs = transformers.AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    theirs.update({"num_key_value_heads": 2, "head_dim": config.head_dim})
    transformers.AutoModelForCausalLM.from_config(theirs).load_state_dict(state, strict=True)


def permute(rows: Tensor, heads: int) -> Tensor:
    """Rotate-half rows to GGUF's interleaved ones, as the published converter does for Llama."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, weights: ModelWeights, c: ModelConfig, extra: dict[str, Any] | None = None) -> None:
    """A small float32 GGUF file of these weights; `extra` adds or replaces tensors by their GGUF names."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, c.architecture)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_vocab_size(c.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    tensors: dict[str, Any] = {}
    for name, tensor in to_hf_state_dict(weights, c).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        part = next(gguf_name for hf, gguf_name in GGUF_NAMES.items() if f"{hf}." in name)
        layer = f"blk.{name.split('.')[2]}." if "layers." in name else ""
        if c.architecture == "llama" and part in ("attn_q", "attn_k"):
            tensor = permute(tensor, c.num_heads if part == "attn_q" else c.num_kv_heads)
        tensors[f"{layer}{part}.{name.rsplit('.', 1)[1]}"] = tensor.numpy()
    for name, array in (tensors | (extra or {})).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_comes_back_bit_for_bit_with_llama_rows_in_rotate_half_order(
    tmp_path: Path, kind: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(kind, tied)
    weights = random_weights(config, torch.float32, "cpu")
    write_gguf(tmp_path / "m.gguf", weights, config)
    loaded_config = load_config(tmp_path / "m.gguf")
    assert loaded_config == dataclasses.replace(config, torch_dtype=None)
    with caplog.at_level(logging.INFO, "bucketgraph"):
        loaded = load(tmp_path / "m.gguf", loaded_config)
    assert_same(loaded.tensors(), weights.tensors())
    assert loaded.note == "dequantised F32 to float32 at load"
    assert caplog.text.count(loaded.note) == 1


def test_gguf_llama3_divisors_go_to_the_config_and_not_to_the_weights(tmp_path: Path) -> None:
    config = tiny()
    divisors = np.array([1.0, 1.0, 4.0, 8.0], dtype=np.float32)
    extra = {"rope_freqs.weight": divisors}
    write_gguf(tmp_path / "m.gguf", random_weights(config, torch.float32, "cpu"), config, extra)
    loaded = load_config(tmp_path / "m.gguf")
    assert loaded.rope.scaling is not None and loaded.rope.scaling.factors == (1.0, 1.0, 4.0, 8.0)
    load(tmp_path / "m.gguf", loaded)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"blk.0.attn_output.bias": np.ones(32, np.float32)}, r"unexpected.*blk\.0\.attn_output\.bias"),
        ({"blk.0.ssm_a": np.ones(32, np.float32)}, r"unexpected.*blk\.0\.ssm_a"),
        ({"blk.1.ffn_norm.weight": np.ones(32, np.int32)}, r"blk\.1\.ffn_norm\.weight.*I32"),
        ({"blk.1.ffn_norm.weight": np.ones(31, np.float32)}, r"blk\.1\.ffn_norm\.weight.*given \[31\]"),
        ({"blk.1.ffn_norm.weight": np.full(32, np.nan, np.float32)}, r"ffn_norm\.weight in .*m\.gguf holds NaN"),
    ],
    ids=["bias", "foreign", "integer", "short", "NaN"],
)
def test_a_bad_gguf_tensor_is_named_as_the_file_names_it(tmp_path: Path, extra: dict[str, Any], named: str) -> None:
    config = tiny()
    write_gguf(tmp_path / "m.gguf", random_weights(config, torch.float32, "cpu"), config, extra)
    with pytest.raises(ModelError, match=named):
        load(tmp_path / "m.gguf", config)


def test_a_truncated_or_foreign_gguf_file_is_named(tmp_path: Path) -> None:
    config = tiny()
    write_gguf(tmp_path / "m.gguf", random_weights(config, torch.float32, "cpu"), config)
    whole = (tmp_path / "m.gguf").read_bytes()
    for content in (b"", whole[:3], whole[:40], whole[:700], whole[:-100], b"\x89PNG" + whole[4:]):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"cannot read .*m\.gguf"):
            load_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("package", ["gguf", "safetensors"])
def test_a_missing_package_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    folder, config = folder_of(tmp_path, lambda state: None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"{package} package.*pip install .bucketgraph\[llm\]"):
        load(tmp_path / "m.gguf" if package == "gguf" else folder, config)


def test_shrunk_presets_allocate_what_their_config_says() -> None:
    config = shrink(preset("qwen3-0.6b"), num_layers=1, vocab_size=64)
    shapes = {name: tuple(t.shape) for name, t in random_weights(config, torch.bfloat16, "cpu").tensors().items()}
    assert shapes == {
        "embed": (64, 1024),
        "final_norm": (1024,),
        "layers.0.input_norm": (1024,),
        "layers.0.qkv": (4096, 1024),
        "layers.0.q_norm": (128,),
        "layers.0.k_norm": (128,),
        "layers.0.o": (1024, 2048),
        "layers.0.post_norm": (1024,),
        "layers.0.gate_up": (6144, 1024),
        "layers.0.down": (1024, 3072),
    }
