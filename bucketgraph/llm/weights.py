"""Weights in the one layout that the model reads, from safetensors, GGUF or a random generator.

Rules: every name, shape and dtype of every file is checked before a byte is allocated; each tensor is copied once, into
its rows of a fused tensor on the target device; a value that is NaN or infinite after the cast is an error naming
tensor and file; a load that fails hands back nothing. A tied `lm_head.weight` in a file must equal the embedding.
Projections that read the same input are fused by rows: q, k, v into `qkv`; gate, up into `gate_up`.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketgraph.errors import ConfigError, ModelError
from bucketgraph.llm import gguf_file
from bucketgraph.llm.model_config import DEFAULT_MODEL, ModelConfig, load_config, read_json, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "LayerWeights",
    "ModelWeights",
    "Progress",
    "load_config",
    "load_weights",
    "random_weights",
    "resolve_model",
    "to_hf_state_dict",
]

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]  # tensors done, tensors in all, name of the last one

_FLOATS = {"F64", "F32", "F16", "BF16"}
_BUFFER = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class LayerWeights:
    """One layer; H hidden, D head size, F intermediate. None where the architecture has no such tensor."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 * kv_heads) * D, H]: q rows, then k, then v
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, heads * D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2F, H]: gate rows, then up
    down: Tensor  # [H, F]


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. `lm_head` is the same object as `embed` where the two are tied."""

    embed: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]
    final_norm: Tensor  # [H]
    layers: tuple[LayerWeights, ...]
    note: str = ""  # what a reader should know about where the values came from

    def tensors(self) -> dict[str, Tensor]:
        """Every distinct tensor by dotted name, such as `layers.0.qkv`; `lm_head` only where it is not tied."""
        named = {"embed": self.embed, "final_norm": self.final_norm}
        if self.lm_head is not self.embed:
            named["lm_head"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                if (tensor := getattr(layer, field.name)) is not None:
                    named[f"layers.{index}.{field.name}"] = tensor
        return named


@dataclass(frozen=True)
class _Piece:
    """One checkpoint tensor and the rows of the fused tensor that it fills."""

    hf_name: str
    target: str
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, not read yet."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def load_weights(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    on_progress: Progress | None = None,
) -> ModelWeights:
    """Load a folder of safetensors or a .gguf file as `dtype` on `device`; peak memory is one copy and one tensor.

    Raises ModelError for a missing, unexpected, reshaped, integer-typed, truncated or non-finite tensor, ConfigError
    for a dtype that is not floating.
    """
    _check_dtype(dtype)
    resolved = resolve_model(path)
    stored, note = _open_gguf(resolved) if resolved.is_file() else (_open_folder(resolved), "")
    pieces = _pieces(config)
    _check_stored(stored, pieces, config, resolved)
    tensors = _allocate(pieces, dtype, device)
    for done, piece in enumerate(pieces, start=1):
        source = stored[piece.hf_name]
        rows = tensors[piece.target].narrow(0, piece.row, piece.shape[0])
        rows.copy_(_read(source))
        _check_finite(rows, source)
        if on_progress is not None:
            on_progress(done, len(pieces), piece.hf_name)
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    if note:
        log.info("%s: %s", resolved.name, note)
    return _assemble(tensors, config, note)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> ModelWeights:
    """Normal(0, 0.02) matrices and biases, norms near 1, made on the device; the same seed there gives the same bits.

    CPU and GPU generators differ, so a comparison across devices copies the tensors. Raises ConfigError.
    """
    _check_dtype(dtype)
    tensors = _allocate(_pieces(config), dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, tensor in tensors.items():
        tensor.normal_(1.0 if name.endswith("norm") else 0.0, 0.02, generator=generator)
    return _assemble(tensors, config, f"random, seed {seed}")


def to_hf_state_dict(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """The same values under Hugging Face names and shapes, as views of the fused tensors (nothing is copied)."""
    tensors = weights.tensors()
    state = {p.hf_name: tensors[p.target].narrow(0, p.row, p.shape[0]) for p in _pieces(config)}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _pieces(config: ModelConfig) -> list[_Piece]:
    """Every checkpoint tensor that this config has, in file order, with its place in the fused layout."""
    vocab, hidden = config.vocab_size, config.hidden_size
    pieces = [
        _Piece("model.embed_tokens.weight", "embed", 0, (vocab, hidden)),
        _Piece("model.norm.weight", "final_norm", 0, (hidden,)),
    ]
    if not config.tie_word_embeddings:
        pieces.append(_Piece("lm_head.weight", "lm_head", 0, (vocab, hidden)))
    for index in range(config.num_layers):
        pieces.extend(_layer_pieces(config, f"model.layers.{index}", f"layers.{index}"))
    return pieces


def _layer_pieces(config: ModelConfig, source: str, target: str) -> Iterator[_Piece]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield _Piece(f"{source}.input_layernorm.weight", f"{target}.input_norm", 0, (hidden,))
    for name, row, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
        yield _Piece(f"{source}.self_attn.{name}_proj.weight", f"{target}.qkv", row, (rows, hidden))
        if config.qkv_bias:
            yield _Piece(f"{source}.self_attn.{name}_proj.bias", f"{target}.qkv_bias", row, (rows,))
        if config.qk_norm and name != "v":
            yield _Piece(f"{source}.self_attn.{name}_norm.weight", f"{target}.{name}_norm", 0, (config.head_dim,))
    yield _Piece(f"{source}.self_attn.o_proj.weight", f"{target}.o", 0, (hidden, q))
    yield _Piece(f"{source}.post_attention_layernorm.weight", f"{target}.post_norm", 0, (hidden,))
    yield _Piece(f"{source}.mlp.gate_proj.weight", f"{target}.gate_up", 0, (inner, hidden))
    yield _Piece(f"{source}.mlp.up_proj.weight", f"{target}.gate_up", inner, (inner, hidden))
    yield _Piece(f"{source}.mlp.down_proj.weight", f"{target}.down", 0, (hidden, inner))


def _allocate(pieces: list[_Piece], dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        rows = max(piece.row + piece.shape[0], shapes.get(piece.target, (0,))[0])
        shapes[piece.target] = (rows, *piece.shape[1:])
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def _assemble(tensors: dict[str, Tensor], config: ModelConfig, note: str) -> ModelWeights:
    names = [field.name for field in fields(LayerWeights)]
    layers: list[dict[str, Any]] = [
        {name: tensors.get(f"layers.{index}.{name}") for name in names} for index in range(config.num_layers)
    ]
    embed = tensors["embed"]
    head = embed if config.tie_word_embeddings else tensors["lm_head"]
    return ModelWeights(embed, head, tensors["final_norm"], tuple(LayerWeights(**layer) for layer in layers), note)


def _open_folder(folder: Path) -> dict[str, _Stored]:
    """The tensors of `model.safetensors`, or of every shard that `model.safetensors.index.json` lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _open_shard(single)
    if not index.is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise ModelError(
            f"no safetensors weights in {folder}",
            given=f"pickle files, which can run code when read: {', '.join(pickles[:3])}" if pickles else "neither",
            expected="model.safetensors or model.safetensors.index.json",
            hint="load it with transformers and save_pretrained() it as safetensors" if pickles else None,
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"weight_map in {index}", given=repr(weight_map), expected="tensor names to file names")
    stored: dict[str, _Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            count = sum(1 for value in weight_map.values() if value == shard)
            raise ModelError(f"shard {shard} is missing in {folder}", given=f"an index that puts {count} tensors there")
        for name, tensor in _open_shard(folder / shard).items():
            if name in stored:
                raise ModelError(f"{name} is in two shards", given=f"{stored[name].file.name} and {shard}")
            stored[name] = tensor
    return stored


def _open_shard(path: Path) -> dict[str, _Stored]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ModelError(f"reading {path.name} needs the safetensors package", hint=gguf_file.EXTRA) from error
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        stored = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            read = functools.partial(file.get_tensor, name)  # keeps the file mapped until it is dropped
            stored[name] = _Stored(name, path, tuple(part.get_shape()), part.get_dtype(), read)
        return stored
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"cannot read {path}", given=str(error), expected="a complete safetensors file", hint="it may be cut short"
        ) from error


def _open_gguf(path: Path) -> tuple[dict[str, _Stored], str]:
    """The file's tensors under Hugging Face names, read as float32, and the note that says so."""
    file = gguf_file.open_gguf(path)
    stored = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":  # part of the config: RopeScaling.factors
            continue
        read = functools.partial(_read_gguf, file, name)
        stored[gguf_file.hf_name(name) or name] = _Stored(name, path, file.shape(name), file.dtype(name), read)
    return stored, f"dequantised {file.quantisation} to float32 at load"


def _read_gguf(file: gguf_file.GGUFFile, name: str) -> Tensor:
    return torch.from_numpy(file.dequantised(name))


def _check_stored(stored: dict[str, _Stored], pieces: list[_Piece], config: ModelConfig, source: Path) -> None:
    wanted = {piece.hf_name: piece for piece in pieces}
    if missing := [name for name in wanted if name not in stored]:
        raise ModelError(
            f"{len(missing)} tensors are missing in {source}",
            given=f"no {', '.join(missing[:3])}",
            expected=f"the {len(wanted)} tensors of {config.num_layers} {config.architecture} layers",
        )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = [name for name in stored if name not in wanted and name not in tied and not _BUFFER.fullmatch(name)]
    if extra:
        first = stored[extra[0]]
        raise ModelError(
            f"{len(extra)} unexpected tensors, first {first.name} in {first.file}",
            given=f"shape {list(first.shape)}",
            expected=f"only what a {config.architecture} model with this config computes with",
        )
    for name, piece in wanted.items():
        tensor = stored[name]
        if tensor.shape != piece.shape:
            raise ModelError(f"{tensor.name} in {tensor.file}", given=list(tensor.shape), expected=list(piece.shape))
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{tensor.name} in {tensor.file}", given=tensor.dtype, expected="a floating type")


def _read(source: _Stored) -> Tensor:
    try:
        return source.read()
    except (OSError, RuntimeError) as error:
        raise ModelError(f"cannot read {source.name} in {source.file}", given=str(error)) from error


def _check_finite(rows: Tensor, source: _Stored) -> None:
    # aminmax carries NaN through and needs no temporary of the tensor's size, unlike isfinite().all().
    low, high = torch.aminmax(rows.detach())
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise ModelError(
            f"{source.name} in {source.file} holds NaN or infinite values as {rows.dtype}",
            given=f"minimum {low.item()}, maximum {high.item()}",
            expected="finite weights",
            hint="the file is damaged, or its values overflow this dtype: try bfloat16 or float32",
        )


def _check_tied(head: _Stored, embed: _Stored) -> None:
    if head.shape != embed.shape or not torch.equal(_read(head), _read(embed)):
        raise ModelError(
            f"lm_head.weight in {head.file} differs from the embedding",
            given="tie_word_embeddings: true",
            expected="equal tensors, or tie_word_embeddings: false",
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError("weight dtype", given=dtype, expected="float64, float32, bfloat16 or float16")
