"""Prompts, small bucket sets, tiny models and transformers' own greedy tokens, shared by the LLM tests of all lanes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bucketgraph.config import BucketSet, parse
from bucketgraph.llm.api import LLM
from bucketgraph.llm.model_config import ModelConfig, RopeConfig, resolve_model
from bucketgraph.llm.tokenizer import Tokenizer
from bucketgraph.llm.weights import ModelWeights, random_weights, to_hf_state_dict

TIE = 1e-4  # two float32 logits closer than this may swap places by rounding
_TEXTS = (
    "The harbour lay still in the early light, and the boats that had come in during the night were already empty. "
    "A man in a grey coat walked along the quay, counting the crates under his breath, and stopped at the last one. ",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n"
    "        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n\n",
    "Water boils at 100 degrees Celsius at sea level. At 3,000 metres the air pressure is lower, so it boils at about "
    "90 degrees, and pasta takes longer to cook. Question: why does it take longer? Answer: ",
    "Der Zug nach Hamburg fährt heute von Gleis sieben ab. Le train pour Paris partira à l'heure. "
    "El próximo tren sale a las nueve y media. Il treno per Roma è in ritardo di dieci minuti. ",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144. Each number is the sum of the two before it, and the ratio of "
    "neighbours comes closer and closer to the golden ratio, which is roughly 1.6180339887. ",
    "Dear Ms. Okafor,\n\nThank you for your letter of 12 March. We have checked the invoice and found that the second "
    "item was charged twice. The amount of $48.20 will be returned to your account within five days.\n\n"
    "Yours sincerely,\n",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker whose clocks all told "
    "different times. Nobody minded, because every one of them was right once a day, and that was considered enough. ",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "notes": null}\n',
)
# 1 to 150 tokens: the ends, page boundaries, bucket boundaries and lengths that are none of these.
_LENGTHS = (1, 16, 64, 5, 150, 33, 15, 97, 2, 17, 128, 65, 31, 120, 8, 48, 63, 3, 140, 32, 111, 21, 129, 12)


def cast(config: ModelConfig, weights: ModelWeights, dtype: torch.dtype, device: str | None = None) -> ModelWeights:
    """The same values in another dtype, on the same device or another one."""
    made, source = random_weights(config, dtype, device or weights.embed.device), weights.tensors()
    for name, tensor in made.tensors().items():
        tensor.copy_(source[name])
    return made


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Token ids of `count` different pieces of text, prose and code, of lengths from 1 to 150."""
    stream = tokenizer.encode("".join(_TEXTS))
    room = len(stream) - max(_LENGTHS)
    assert room > 100, "the texts are long enough"
    return [stream[i * 37 % room :][: _LENGTHS[i % len(_LENGTHS)]] for i in range(count)]


def buckets(
    tokens: Sequence[int] = (16, 64),
    batch: Sequence[int] = (1, 4),
    requests: Sequence[int] = (4,),
    memory: str | None = None,
    **top: Any,
) -> BucketSet:
    """A small LLM set. Its self-check is off: what it guards is tested by the core's tests."""
    data: dict[str, Any] = {
        "version": 1,
        "name": "small",
        "phases": {
            "prefill": {"axes": {"tokens": list(tokens), "requests": list(requests)}},
            "decode": {"axes": {"batch": list(batch)}},
        },
        "kv_cache": {"page_size": 16, "memory": memory},
        "warmup": {"self_check": False},
    }
    return parse({**data, **top})


def tiny(kind: str = "llama", **changes: Any) -> ModelConfig:
    """Two layers, 64 wide, 97 tokens."""
    config = ModelConfig(
        architecture=kind,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        tie_word_embeddings=False,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        max_position_embeddings=256,
        eos_token_ids=(),
        bos_token_id=None,
        torch_dtype="float32",
    )
    return dataclasses.replace(config, **changes)


def loud_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Random weights, large enough that the logits differ from token to token and that every layer matters."""
    weights = random_weights(config, torch.float32, "cpu", seed)
    for name, tensor in weights.tensors().items():
        if not name.endswith("norm"):
            tensor.mul_(8.0)
    return weights


def tiny_llm(bucket_set: BucketSet | None = None, config: ModelConfig | None = None, **options: Any) -> LLM:
    config = config or tiny()
    return LLM.from_weights(config, loud_weights(config), bucket_set or buckets(), **options)


def free_pages(llm: LLM) -> int:
    return llm._runner.cache.free_pages


def is_idle(llm: LLM) -> bool:
    """Nothing waits, runs or holds a page."""
    engine = llm._engine
    return llm._runner.cache.is_idle and not engine._running and not engine._waiting and engine._run is None


def pad(rows: Sequence[Sequence[int]], side: str, fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask `[B, S]`, padded on one side."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), fill, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, line in enumerate(rows):
        at = slice(0, len(line)) if side == "right" else slice(width - len(line), width)
        ids[row, at], mask[row, at] = torch.tensor(line), 1
    return ids, mask


def padded_greedy(llm: LLM, rows: Sequence[Sequence[int]], count: int, side: str) -> list[list[int]]:
    """Greedy tokens through `LLM.prefill` and `LLM.decode`."""
    with llm.prefill(*pad(rows, side)) as batch:
        steps = [batch.tokens.tolist()]
        for _ in range(count - 1):
            steps.append(llm.decode(batch).tokens.tolist())
    return [list(line) for line in zip(*steps, strict=True)]


# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_model(reference: str, device: str = "cpu", **options: Any) -> Any:
    """transformers' float32 model from a folder, a .gguf file or a `package:` reference."""
    from transformers import AutoModelForCausalLM

    path = resolve_model(reference)
    where: tuple[Path, dict[str, str]] = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model = AutoModelForCausalLM.from_pretrained(where[0], **where[1], dtype=torch.float32, **options)
    return model.to(device).eval()


def transformers_twin(config: ModelConfig, weights: ModelWeights, **options: Any) -> Any:
    """transformers' model of the same shape over the same values, in their dtype and on their device."""
    import transformers

    made: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
    }
    if config.architecture == "qwen2":
        del made["attention_bias"]
    if (scaling := config.rope.scaling) is not None:
        made["rope_parameters"] = {
            "rope_type": scaling.kind,
            "rope_theta": config.rope.theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture]
    shape = getattr(transformers, f"{name}Config")(**made)
    with torch.device(weights.embed.device):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=weights.embed.dtype, **options)
    model.load_state_dict(to_hf_state_dict(weights, config))
    return model.eval()


@torch.no_grad()
def transformers_logits(
    model: Any, rows: Sequence[Sequence[int]], forced: Sequence[Sequence[int]] | int
) -> Iterator[torch.Tensor]:
    """Float32 logits `[B, vocab]` after the prompts and after each further token: the given ones, or the greedy ones.

    One left-padded batch with a KV cache. `forced` has one list for each row, or is the number of greedy steps.
    """
    device = model.device
    # Renamed in transformers 5.2x; the old name still works there, with a warning.
    kept = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, mask = (tensor.to(device) for tensor in pad(rows, "left"))
    cache = None
    steps = forced if isinstance(forced, int) else len(forced[0])
    for step in range(steps + 1):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        past = {kept: cache, "use_cache": True}
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **past)
        cache, logits = getattr(out, kept), out.logits[:, -1].float()
        yield logits
        if step < steps:
            given = logits.argmax(-1) if isinstance(forced, int) else [line[step] for line in forced]
            ids = torch.as_tensor(given, device=device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)


def transformers_greedy(
    model: Any, rows: Sequence[Sequence[int]], count: int, batch: int = 16
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens of each row and the gap between the two largest logits at each; rows of like length together."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    tokens: list[list[int]] = [[] for _ in rows]
    gaps: list[list[float]] = [[] for _ in rows]
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for logits in transformers_logits(model, [rows[row] for row in part], count - 1):
            top = logits.topk(2)
            for row, ids, values in zip(part, logits.argmax(-1).tolist(), top.values.tolist(), strict=True):
                tokens[row].append(ids)
                gaps[row].append(values[0] - values[1])
    return tokens, gaps
