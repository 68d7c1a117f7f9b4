"""One .gguf file as metadata and float32 arrays under their Hugging Face names.

Rules: numpy only; the `gguf` package is imported when a file is opened; the file stays memory-mapped and a tensor is
dequantised when asked for, one at a time; a file that is cut short or of an unknown quantisation is a ModelError.
Llama files store Q and K rows interleaved for a different rotary convention, and are put back here; Qwen files are not.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bucketgraph.errors import ModelError

EXTRA = 'pip install "bucketgraph[llm]"'

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64"}


@dataclass(frozen=True)
class GGUFFile:
    """An opened file: metadata as plain Python values, and the reader's tensors by their GGUF names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]  # gguf.ReaderTensor; its data is a view of the mapped file

    @property
    def architecture(self) -> str:
        """The file's architecture, such as llama or qwen2."""
        return str(self.metadata.get("general.architecture"))

    @property
    def quantisation(self) -> str:
        """The most frequent type among the matrices, such as Q4_1 or F16."""
        kinds = Counter(t.tensor_type.name for t in self.tensors.values() if len(t.shape) > 1)
        return kinds.most_common(1)[0][0] if kinds else "F32"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in row-major order (the file lists the fastest dimension first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def dtype(self, name: str) -> str:
        """What `dequantised` hands back, F32, or the stored type (integer or F64) where it refuses to."""
        kind = str(self.tensors[name].tensor_type.name)
        return kind if kind in _NOT_WEIGHTS else "F32"

    def dequantised(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, [rows, columns] or [n]; Q and K rows in rotate-half order. Raises ModelError."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        kind = tensor.tensor_type.name
        if kind in _NOT_WEIGHTS:
            raise ModelError(f"{name} in {self.path}", given=f"type {kind}", expected="a float or quantised tensor")
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(self.shape(name))
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelError(f"cannot dequantise {name} in {self.path}", given=f"type {kind}: {error}") from error
        heads = self._permuted_heads(name)
        if heads:
            values = unpermute(values, heads)
        # A tensor stored as float32 is a read-only view of the file here; torch wants memory that may be written.
        return np.require(values, dtype=np.float32, requirements="W")

    def rope_factors(self) -> tuple[float, ...] | None:
        """The frequency divisors stored as `rope_freqs.weight` (Llama 3 scaling), or None."""
        if "rope_freqs.weight" not in self.tensors:
            return None
        return tuple(float(value) for value in self.dequantised("rope_freqs.weight").reshape(-1))

    def _permuted_heads(self, name: str) -> int:
        """How many heads this tensor's rows are interleaved by; 0 for a tensor stored as it is."""
        if self.architecture != "llama":
            return 0
        heads = int(self.metadata["llama.attention.head_count"])
        if name.endswith(".attn_q.weight"):
            return heads
        if name.endswith(".attn_k.weight"):
            return int(self.metadata.get("llama.attention.head_count_kv", heads))
        return 0


def open_gguf(path: Path) -> GGUFFile:
    """Map a .gguf file; the last one is kept, for config, weights and tokenizer read it in turn. Raises ModelError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}", given=str(error)) from error
    return _open(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open(path: Path, size: int, modified: int) -> GGUFFile:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"reading {path.name} needs the gguf package", hint=EXTRA) from error
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    # A cut or foreign file fails inside numpy or enum lookups, wherever the bytes run out.
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError, TypeError) as error:
        raise ModelError(
            f"cannot read {path}",
            given=f"{size} bytes: {error}",
            expected="a complete GGUF file",
            hint="it may be cut short: copy it again",
        ) from error
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for one that no supported model has."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[1].isdigit() and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    return None


def unpermute(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows (2i, 2i+1 of a head) back to rotate-half order (i, i + D/2): [heads * D, columns] -> the same shape."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
