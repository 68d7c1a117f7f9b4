"""Checks of whole requests: whatever happens to them, their pages come back, once, and the phase fits the call."""

from __future__ import annotations

import random
from contextlib import suppress
from unittest import mock

import torch

from bucketgraph import LLM, SamplingParams
from bucketgraph.errors import InputError

from .core import Check, Setting, Trial, require
from .models import VOCAB, llm_set, model_config, weights


class _Lost(RuntimeError):
    """A run that fails on purpose."""


def pages(setting: Setting) -> Trial:
    """Generation, streams dropped half way, padded batches closed twice, refusals and failing runs, in any order."""
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    llm, wide = (
        LLM.from_weights(model_config(), weights(setting, dtype), llm_set(name, "invariant"), max_model_len=128)
        for name in ("chunks", "wide")
    )
    runner, cache = llm._runner, llm._runner.cache

    def ids(generator: random.Random) -> list[int]:
        return [generator.randrange(VOCAB) for _ in range(generator.choice((1, 3, 16, 17, 40)))]

    def generate(generator: random.Random, params: SamplingParams) -> None:
        prompts = [ids(generator) for _ in range(generator.randint(1, 4))]
        together = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        at = generator.randrange(len(prompts))
        alone = llm.generate([prompts[at]], params)[0].outputs[0].token_ids
        require(alone == together[at], f"prompt {at} of {len(prompts)} gives other tokens alone")

    def dropped(generator: random.Random, params: SamplingParams) -> None:
        stream = llm.generate([ids(generator), ids(generator)], params, stream=True)
        next(stream)
        stream.close()

    def batch(generator: random.Random, params: SamplingParams) -> None:
        lines = [ids(generator) for _ in range(generator.randint(1, 3))]
        width = max(map(len, lines))
        tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines])
        mask = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in lines])
        with wide.prefill(tokens, mask) as whole:
            want = whole.logits
        with llm.prefill(tokens, mask) as found:
            require(torch.equal(found.logits, want), "a padded batch gives other logits in chunks")
            for _ in range(generator.randint(0, 3)):
                llm.decode(found)
            held = [page for request in found.requests for page in request.pages]
            require(len(set(held)) == len(held) and not set(held) & set(cache._free), "a page is held twice")
            if generator.random() < 0.5:
                found.close()

    def refused(generator: random.Random, params: SamplingParams) -> None:
        for prompt in ([], [VOCAB], [0] * 129):
            with suppress(InputError):
                llm.generate([ids(generator), prompt], params)
                require(False, f"a prompt of {len(prompt)} tokens was accepted")

    def failing(generator: random.Random, params: SamplingParams) -> None:
        phase = generator.choice(("prefill", "decode"))
        with mock.patch.object(runner, phase, side_effect=_Lost), suppress(_Lost):
            llm.generate([ids(generator), ids(generator)], params)

    def one_token(generator: random.Random, params: SamplingParams) -> None:
        before = {name: stats.calls for name, stats in llm.stats().items()}
        llm.generate([[generator.randrange(VOCAB)]], SamplingParams(max_tokens=1))
        now = {name: stats.calls - before[name] for name, stats in llm.stats().items()}
        require(now == {"prefill": 1, "decode": 0}, f"a prompt of one token ran as {now}")

    kinds = (generate, dropped, batch, refused, failing, one_token)

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        for kind in generator.sample(kinds, 3):
            drawn = generator.random() < 0.5
            params = SamplingParams(temperature=0.9 if drawn else 0.0, seed=seed, max_tokens=generator.randint(2, 6))
            kind(generator, params)
            free = cache._free
            require(len(set(free)) == len(free), f"after {kind.__name__}: a page was given back twice")
            require(0 not in free, f"after {kind.__name__}: page 0 was handed out")
            require(cache.is_idle, f"after {kind.__name__}: {cache.pages - 1 - len(free)} pages did not come back")

    return trial


CHECKS = (Check("pages", "pages come back once, and a request's tokens are its own", 1_000, pages, cpu=0.05, share=2),)
