#!/usr/bin/env python3
"""One model at batch 1, every strategy in one run: eager, segmented, bucketed, device loop, and transformers beside.

    scripts/bench_strategies.py [--model M] [--strategies eager bucketed ...] [--peers none|quick] [--batches 1,2,...]
                                [--prompt 64] [--tokens 128] [--rounds 5] [--out DIR]

`--model random:llama-3.2-1b` takes random weights of that shape. Time to first token and time per token are taken on
the host, as a caller sees them: a token counts when it is there as a Python int. Each is measured on an idle CPU and
with every core busy. Gate: the float32 tokens of each strategy equal transformers', up to the first near tie of two
logits; a strategy that is red, or whose loop did not run where it should, has no ratio.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench_common as bench
import torch

from bucketgraph import LLM, SamplingParams
from bucketgraph.config import parse
from bucketgraph.llm.model_config import DEFAULT_MODEL, ModelConfig, load_config, resolve_model
from bucketgraph.llm.presets import preset
from bucketgraph.llm.request import LoopKind
from bucketgraph.llm.weights import ModelWeights, load_weights, random_weights


@dataclass(frozen=True)
class Strategy:
    prefill: str  # executable
    decode: str
    numerics: str = "fast"
    loop: LoopKind = "host"


STRATEGIES = {
    "eager": Strategy("eager", "eager"),
    "segmented": Strategy("eager", "cudagraph"),
    "bucketed": Strategy("cudagraph", "cudagraph"),
    "bucketed, invariant": Strategy("cudagraph", "cudagraph", "invariant"),
    "device loop": Strategy("cudagraph", "cudagraph", loop="device"),
}
TOKENS = (64, 128, 256, 512, 1024, 2048)
CONTEXT = 8192
Times = tuple[float, list[float]]  # seconds to the first token, seconds between the others


def served(
    config: ModelConfig, weights: ModelWeights, how: Strategy, tokens: Sequence[int], batches: Sequence[int]
) -> LLM:
    made = parse(
        {
            "version": 1,
            "name": f"{how.prefill}-{how.decode}",
            "numerics": how.numerics,
            "phases": {
                "prefill": {"executable": how.prefill, "axes": {"tokens": list(tokens), "requests": [8]}},
                "decode": {"executable": how.decode, "axes": {"batch": list(batches)}},
            },
            "kv_cache": {"memory": "2GiB"},
        }
    )
    length = min(config.max_position_embeddings, CONTEXT)
    return LLM.from_weights(config, weights, made, max_model_len=length, loop=how.loop)


def ours(llm: LLM, ids: list[int], tokens: int) -> tuple[Times, list[int]]:
    """Tokens that come together share the time since the last ones."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    gaps, out, last = list[float](), list[int](), time.perf_counter()
    for delta in llm.generate(ids, params, stream=True):
        now, count = time.perf_counter(), len(delta.token_ids)
        gaps += [(now - last) / count] * count
        out += delta.token_ids
        last = now
    return (gaps[0], gaps[1:]), out


def transformers_loop(model: Any, ids: list[int], tokens: int) -> tuple[Times, list[int]]:
    """transformers' own cache and forward in the plainest loop, which is quicker than its `generate`."""
    from transformers import DynamicCache

    cache, name = DynamicCache(), bench.cache_argument(model)
    step = torch.tensor([ids], device="cuda")
    marks, out = [time.perf_counter()], list[int]()
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(input_ids=step, **{name: cache}, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1].argmax(dim=-1, keepdim=True)
            out.append(int(step))
            marks.append(time.perf_counter())
    gaps = [b - a for a, b in pairwise(marks)]
    return (gaps[0], gaps[1:]), out


def measure(run: Callable[[], tuple[Times, list[int]]], rounds: int) -> dict[str, Any]:
    run()
    first: list[float] = []
    gaps: list[float] = []
    for _ in range(rounds):
        (ttft, rest), _ = run()
        first.append(1e3 * ttft)
        gaps.extend(1e3 * gap for gap in rest)
    return {"ttft_ms": bench.spread(first), "token_ms": bench.spread(gaps)}


def check(
    config: ModelConfig, weights: ModelWeights, names: Sequence[str], ids: list[int], tokens: int, gate: bench.Gate
) -> dict[str, bool]:
    """Whether float32 tokens of each strategy are transformers', made by the loop that it names."""
    helpers, green = bench.cases(), dict[str, bool]()
    peer = helpers.transformers_twin(config, weights)
    (want,), (gaps,) = helpers.transformers_greedy(peer, [ids], tokens)
    del peer
    sure = next((n for n, gap in enumerate(gaps) if gap < helpers.TIE), tokens)
    gate.require(sure > 0, "the first token is a near tie: nothing was compared")
    for name in names:
        green[name] = False
        with gate.guard(name), served(config, weights, STRATEGIES[name], [max(64, len(ids))], [1]) as llm:
            right = ours(llm, ids, tokens)[1][:sure] == want[:sure]
            stats, failed = llm.stats()["decode"], bench.failed(llm)
            looped = stats.outcomes.get("looped", 0) == stats.calls
            green[name] = gate.require(right, f"{name}: float32 tokens differ from transformers'")
            green[name] &= gate.require(looped == (STRATEGIES[name].loop == "device"), f"{name}: {stats.reasons}")
            green[name] &= gate.require(not failed, f"{name}: {failed}")
    print(f"gate: {sure} of {tokens} float32 tokens compared with transformers', {green}", flush=True)
    return green


def main(argv: list[str] | None = None) -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--batches", type=bench.numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    device, gate, names = torch.device(args.device), bench.Gate(), args.strategies
    shape = args.model.removeprefix("random:") if args.model.startswith("random:") else None
    model = str(resolve_model(args.model)) if shape is None else ""
    config = load_config(model) if shape is None else preset(shape)

    def weights_of(dtype: torch.dtype) -> ModelWeights:
        if shape is None:
            return load_weights(model, config, dtype, device)
        return random_weights(config, dtype, device)

    ids = torch.randint(config.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    green = check(config, weights_of(torch.float32), names, ids, min(args.tokens, 64), gate)
    bench.release_memory(device)

    weights = weights_of(torch.bfloat16)
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name in names if green[name]):
        with gate.guard(name), served(config, weights, STRATEGIES[name], TOKENS, args.batches) as llm:
            assert llm.report is not None, "from_weights warms up"

            def run(llm: LLM = llm) -> tuple[Times, list[int]]:
                return ours(llm, ids, args.tokens)

            row = measure(run, args.rounds)
            with bench.busy_cpu():
                row["busy"] = measure(run, args.rounds)
            loops = llm.loops()
            row["warmup_s"] = round(llm.report.seconds + sum(loop.seconds for loop in loops), 2)
            row["graph_mib"] = round(llm.report.mib + sum(loop.mib for loop in loops), 1)
            row["buckets_failed"] = len(llm.report.failed)
            rows[name] = row
        bench.release_memory(device)
    if args.peers != "none":
        peer = bench.cases().transformers_twin(config, weights)

        def run_peer() -> tuple[Times, list[int]]:
            return transformers_loop(peer, ids, args.tokens)

        for name, cudnn in (("transformers", True), ("transformers, cuDNN attention off", False)):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            rows[name] = measure(run_peer, max(1, args.rounds // 2))
            with bench.busy_cpu():
                rows[name]["busy"] = measure(run_peer, 1)
        torch.backends.cuda.enable_cudnn_sdp(True)

    # What one token must read: every weight once (a tied embedding is read as the head).
    bytes_read = sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors().values())
    rate = bench.Rates.measure(device).copy
    limit = 1e3 * bytes_read / rate
    title = shape or Path(model).name
    result: dict[str, Any] = {
        "what": f"{title}, bfloat16, batch 1, prompt {args.prompt}, {args.tokens} tokens, greedy",
        "gate": "float32 tokens equal transformers', up to the first near tie, in every strategy that has a row",
        "red": gate.red,
        "copy_rate_tb_s": round(rate / 1e12, 3),
        "limit_ms": round(limit, 4),
        "limit_formula": f"{bytes_read} weight bytes / measured copy rate",
        "strategies": rows,
    }
    if "bucketed" in rows:
        best = rows["bucketed"]["token_ms"]["p50"]
        result["share_of_limit"] = round(limit / best, 4)
        result["ratios"] = {
            f"{name} / bucketed": round(row["token_ms"]["p50"] / best, 2)
            for name, row in rows.items()
            if name != "bucketed"
        }
    path = bench.save(f"strategies_{shape or 'smollm2'}", result, args)
    print("ms; time per token with an idle CPU, then with a busy one")
    heads = ("strategy", "TTFT", "token", "p99", "max", "token", "p99", "max", "MiB", "warm-up s")
    bench.table(heads, [(name, *cells(row)) for name, row in rows.items()])
    print(f"limit {limit:.4f} ms a token; ratios: {result.get('ratios')}; written to {path}")
    return gate.conclude()


def cells(row: dict[str, Any]) -> list[Any]:
    times = [part["token_ms"][q] for part in (row, row["busy"]) for q in ("p50", "p99", "max")]
    return [row["ttft_ms"]["p50"], *times, row.get("graph_mib"), row.get("warmup_s")]


if __name__ == "__main__":
    sys.exit(main())
