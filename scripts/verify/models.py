"""Small language models behind many bucket sets: what the checks of prefill and decode run.

A `World` is one bucket set over weights and prompts that all worlds share. Its requests lie on shuffled pages, and the
`exact` world, with a bucket for every length and nobody else in it, says what is right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bucketgraph.config import BucketSet, parse
from bucketgraph.llm.kv_cache import PagedKVCache
from bucketgraph.llm.model import LanguageModel
from bucketgraph.llm.model_config import ModelConfig, RopeConfig
from bucketgraph.llm.request import Request
from bucketgraph.llm.runner import Runner
from bucketgraph.llm.sampling import SamplingParams
from bucketgraph.llm.weights import ModelWeights, random_weights

from .core import Setting, require

VOCAB, CONTEXT, PAGES = 500, 192, 400
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 95, 96, 97, 127, 128, 129, 150)
SMALL_LENGTHS = (1, 15, 17, 33, 64, 70)
# Of `fast` matmuls on a GPU, for the sets below in their order; where a bucket does not offer its own, the library's.
MIXES = ("streamed, fused gate_up", "fused", "streamed", "tiled gate_up")
STEPS = 4  # decodes that are known for each prompt

# name -> tokens, requests, batch: one wide bucket; chunks and parts; a ladder; odd sizes
SETS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "wide": ([512], [8], [16]),
    "chunks": ([16, 32], [2], [1, 2]),
    "ladder": ([64, 128, 512], [4], [1, 4, 8]),
    "odd": ([48, 100, 192], [1, 8], [3, 5, 12]),
}


def model_config() -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        max_position_embeddings=256,
        eos_token_ids=(),
        bos_token_id=None,
        torch_dtype="float32",
    )


def weights(setting: Setting, dtype: torch.dtype) -> ModelWeights:
    """Random, and loud enough that every layer and every token matters."""

    def make() -> ModelWeights:
        made = random_weights(model_config(), dtype, setting.device)
        for name, tensor in made.tensors().items():
            if not name.endswith("norm"):
                tensor.mul_(8.0)
        return made

    return setting.once(("weights", dtype), make)


def llm_set(name: str, numerics: str, executable: str = "auto", **more: object) -> BucketSet:
    tokens, requests, batch = SETS[name]
    phases = {
        "prefill": {"executable": executable, "axes": {"tokens": tokens, "requests": requests}},
        "decode": {"executable": executable, "axes": {"batch": batch}},
    }
    return parse({"version": 1, "name": name, "numerics": numerics, "phases": phases, **more})


@dataclass(frozen=True)
class Prompt:
    """A prompt, what is forced after it, and how its next token is chosen."""

    tokens: tuple[int, ...]
    forced: tuple[int, ...]  # [STEPS]
    params: SamplingParams
    seed: int


def prompts(setting: Setting) -> list[Prompt]:
    generator = random.Random(0)
    made = []
    for index, length in enumerate(SMALL_LENGTHS if setting.small else LENGTHS):
        draw = [generator.randrange(VOCAB) for _ in range(length + STEPS)]
        drawn = SamplingParams(temperature=0.8, top_k=(0, 20)[index % 2], top_p=(1.0, 0.9)[index // 2 % 2])
        params = drawn if index % 3 else SamplingParams(temperature=0.0)
        made.append(Prompt(tuple(draw[:length]), tuple(draw[length:]), params, generator.getrandbits(62)))
    return made


class World:
    """One bucket set, warm."""

    def __init__(
        self, setting: Setting, bucket_set: BucketSet, dtype: torch.dtype | None = None, mix: str | None = None
    ) -> None:
        dtype = dtype or (torch.bfloat16 if setting.on_gpu else torch.float32)
        config = model_config()
        self.cache = PagedKVCache(config, PAGES, 16, dtype, setting.device)
        model = LanguageModel(config, weights(setting, dtype), self.cache, CONTEXT, bucket_set.numerics)
        if mix is not None:  # else warm-up chooses by time, and two worlds may differ
            every = model.mixes
            model.mixes = lambda *asked: {  # type: ignore[method-assign]
                name: made for name, made in every(*asked).items() if name == mix
            }
        self.runner = Runner(model, bucket_set, CONTEXT)
        self.report = self.runner.warmup()
        require(self.report.ok, f"warm-up: {[bucket.error for bucket in self.report.failed]}")
        kinds = {row.executable for row in self.report.buckets}
        self.executable = kinds.pop() if len(kinds) == 1 else "mixed"

    def open(self, prompt: Prompt, order: random.Random, extra: int = STEPS) -> Request:
        """A request with pages for `extra` more tokens, anywhere in the cache."""
        request = Request(list(prompt.tokens), prompt.params, prompt.seed)
        self.cache._free.sort()  # so that the pages depend on `order` alone
        order.shuffle(self.cache._free)
        pages = self.cache.allocate(self.cache.pages_for(len(prompt.tokens) + extra))
        request.hold(pages, self.runner.table_width)
        return request

    def close(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.cache.release(request.pages)

    def prefill(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """All pending tokens, in as many runs as the buckets need; tokens `[R]` and logits `[R, vocab]`."""
        found: dict[Request, tuple[Tensor, Tensor]] = {}
        waiting = list(requests)
        while waiting:
            chunks = self.runner.pack(waiting)
            tokens, logits = self.runner.prefill(chunks)
            tokens, logits = tokens.clone(), logits.clone()
            found |= {r: (tokens[i], logits[i]) for i, (r, _) in enumerate(chunks) if r.pending == 0}
            waiting = [request for request in waiting if request.pending]
        return torch.stack([found[r][0] for r in requests]), torch.stack([found[r][1] for r in requests])

    def decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        chosen, logits = self.runner.decode(requests)
        return chosen.clone(), logits.clone()


@dataclass(frozen=True)
class Right:
    """What the exact world gives, alone, for every prompt."""

    tokens: list[Tensor]  # per prompt [1 + STEPS]
    logits: list[Tensor]  # per prompt [1 + STEPS, vocab]


def exact_world(setting: Setting) -> World:
    def make() -> World:
        SETS["exact"] = (sorted({len(p.tokens) for p in prompts(setting)}), [1], [1])
        return World(setting, llm_set("exact", "invariant"))

    return setting.once("exact world", make)


def right(setting: Setting) -> Right:
    """Each prompt in a bucket of its own length, and each decode in a bucket of one."""

    def make() -> Right:
        world, order = exact_world(setting), random.Random(1)
        tokens, logits = [], []
        for prompt in prompts(setting):
            request = world.open(prompt, order)
            steps = [world.prefill([request])]
            steps += [world.decode([request], [token]) for token in prompt.forced]
            world.close([request])
            tokens.append(torch.cat([step[0] for step in steps]))
            logits.append(torch.cat([step[1] for step in steps]))
        spread = torch.stack([row[0] for row in logits]).float().std(dim=0).mean()
        require(bool(spread > 0.01), "the logits say nothing about the prompts")
        return Right(tokens, logits)

    return setting.once("right", make)


def worlds(setting: Setting, numerics: str = "invariant", executable: str = "auto") -> list[World]:
    def make() -> list[World]:
        names = ("wide", "chunks", "odd") if setting.small else ("wide", "chunks", "ladder", "odd")
        return [
            World(setting, llm_set(name, numerics, executable), mix=mix)
            for name, mix in zip(names, MIXES, strict=False)
        ]

    return setting.once(("worlds", numerics, executable), make)
