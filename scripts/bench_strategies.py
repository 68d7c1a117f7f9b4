#!/usr/bin/env python3
"""One model at batch 1, every strategy in one run: eager, segmented, bucketed, and transformers beside them.

    scripts/bench_strategies.py [--model M] [--prompt 64] [--tokens 128] [--rounds 5] [--out DIR]

Time to first token and time per token are taken on the host, as a caller sees them: a token counts when it is there as
a Python int. Each is measured on an idle CPU and with every core busy. Before anything is timed, the float32 tokens of
all strategies must equal transformers'; otherwise no ratio is printed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_common as bench
import torch

from bucketgraph import LLM, SamplingParams
from bucketgraph.config import parse
from bucketgraph.llm.model_config import DEFAULT_MODEL, load_config, resolve_model
from bucketgraph.llm.weights import ModelWeights, load_weights, to_hf_state_dict

# Executables of prefill and decode, and numerics.
STRATEGIES = {
    "eager": ("eager", "eager", "fast"),
    "segmented": ("eager", "cudagraph", "fast"),
    "bucketed": ("cudagraph", "cudagraph", "fast"),
    "bucketed, invariant": ("cudagraph", "cudagraph", "invariant"),
}
Times = tuple[float, list[float]]  # seconds to the first token, seconds between the others


def bucket_set(prefill: str, decode: str, numerics: str) -> Any:
    return parse(
        {
            "version": 1,
            "name": f"{prefill}-{decode}",
            "numerics": numerics,
            "phases": {
                "prefill": {
                    "executable": prefill,
                    "axes": {"tokens": [64, 128, 256, 512, 1024, 2048], "requests": [8]},
                },
                "decode": {"executable": decode, "axes": {"batch": [1, 2, 4, 8, 16, 32, 64]}},
            },
            "kv_cache": {"memory": "2GiB"},
        }
    )


def ours(llm: LLM, ids: list[int], tokens: int) -> tuple[Times, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    marks, out = [time.perf_counter()], []
    for delta in llm.generate(ids, params, stream=True):
        marks.append(time.perf_counter())
        out.extend(delta.token_ids)
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    return (gaps[0], gaps[1:]), out


def transformers_loop(model: Any, ids: list[int], tokens: int) -> tuple[Times, list[int]]:
    """transformers' own cache and forward in the plainest loop, which is quicker than its `generate`."""
    from transformers import DynamicCache

    cache = DynamicCache()
    step = torch.tensor([ids], device="cuda")
    marks, out = [time.perf_counter()], []
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1].argmax(dim=-1, keepdim=True)
            out.append(int(step))
            marks.append(time.perf_counter())
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    return (gaps[0], gaps[1:]), out


def transformers_model(weights: ModelWeights, model: str, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = load_config(model)
    if config.architecture != "llama" or config.rope.scaling is not None:
        raise SystemExit("this benchmark compares a plain Llama architecture, such as SmolLM2")
    made = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )
    peer = LlamaForCausalLM(made).to(dtype=dtype, device="cuda").eval()
    peer.load_state_dict(to_hf_state_dict(weights, config), strict=False)
    return peer


def _spin(stop: Any) -> None:
    while not stop.is_set():
        for _ in range(100_000):
            pass


@contextmanager
def busy_cpu() -> Iterator[None]:
    """Every core runs a spinning process."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    spinners = [context.Process(target=_spin, args=(stop,), daemon=True) for _ in range(multiprocessing.cpu_count())]
    for spinner in spinners:
        spinner.start()
    time.sleep(2.0)
    try:
        yield
    finally:
        stop.set()
        for spinner in spinners:
            spinner.join(timeout=10)


def measure(run: Callable[[], tuple[Times, list[int]]], rounds: int) -> dict[str, Any]:
    run()
    first: list[float] = []
    gaps: list[float] = []
    for _ in range(rounds):
        (ttft, rest), _ = run()
        first.append(1e3 * ttft)
        gaps.extend(1e3 * gap for gap in rest)
    return {"ttft_ms": bench.spread(first), "token_ms": bench.spread(gaps)}


def gate(model: str, ids: list[int], tokens: int) -> dict[str, list[int]]:
    """float32 tokens of every strategy and of transformers."""
    config = load_config(model)
    weights = load_weights(model, config, torch.float32, "cuda")
    peer = transformers_model(weights, model, torch.float32)
    found = {"transformers": transformers_loop(peer, ids, tokens)[1]}
    del peer
    for name, kinds in STRATEGIES.items():
        with LLM.from_weights(config, weights, bucket_set(*kinds)) as llm:
            found[name] = ours(llm, ids, tokens)[1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    model = str(resolve_model(args.model))
    config = load_config(model)
    ids = torch.randint(100, config.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()

    tokens = gate(model, ids, min(args.tokens, 64))
    red = [name for name, found in tokens.items() if found != tokens["transformers"]]
    if red:
        print(f"gate RED: float32 tokens of {', '.join(red)} differ from transformers'; nothing is timed")
        return 1
    print(f"gate green: {len(tokens['transformers'])} float32 tokens equal transformers' in every strategy")

    weights = load_weights(model, config, torch.bfloat16, "cuda")
    rows: dict[str, dict[str, Any]] = {}
    for name, kinds in STRATEGIES.items():
        llm = LLM.from_weights(config, weights, bucket_set(*kinds))
        assert llm.report is not None, "from_weights warms up"

        def run(llm: LLM = llm) -> tuple[Times, list[int]]:
            return ours(llm, ids, args.tokens)

        rows[name] = measure(run, args.rounds)
        with busy_cpu():
            rows[name]["busy"] = measure(run, args.rounds)
        rows[name] |= {"warmup_s": round(llm.report.seconds, 2), "graph_mib": round(llm.report.mib, 1)}
        rows[name]["buckets_failed"] = len(llm.report.failed)
        llm.release()
        del llm
        torch.cuda.empty_cache()
    peer = transformers_model(weights, model, torch.bfloat16)
    for name, cudnn in (("transformers", True), ("transformers, cuDNN attention off", False)):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)

        def run_peer() -> tuple[Times, list[int]]:
            return transformers_loop(peer, ids, args.tokens)

        rows[name] = measure(run_peer, max(1, args.rounds // 2))
        with busy_cpu():
            rows[name]["busy"] = measure(run_peer, 1)
    torch.backends.cuda.enable_cudnn_sdp(True)

    # What one token must read: every weight once (a tied embedding is read as the head).
    bytes_read = sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors().values())
    rate = bench.copy_rate()
    limit = 1e3 * bytes_read / rate
    best = rows["bucketed"]["token_ms"]["p50"]
    ratios = {f"{name} / bucketed": row["token_ms"]["p50"] / best for name, row in rows.items() if name != "bucketed"}
    result = {
        "what": f"{Path(model).name}, bfloat16, batch 1, prompt {args.prompt}, {args.tokens} tokens, greedy",
        "gate": "float32 tokens equal transformers' in every strategy",
        "copy_rate_tb_s": round(rate / 1e12, 3),
        "limit_ms": round(limit, 4),
        "limit_formula": f"{bytes_read} weight bytes / measured copy rate",
        "share_of_limit": round(limit / best, 4),
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "strategies": rows,
    }
    path = bench.save("strategies_smollm2", result, args.out)
    heads = ("TTFT", "token", "p99", "max", "busy", "p99", "max")
    print(f"{'ms':36} {' '.join(f'{head:>8}' for head in heads)}  MiB  warm-up s")
    for name, row in rows.items():
        tokens_ms = [part["token_ms"][q] for part in (row, row["busy"]) for q in ("p50", "p99", "max")]
        cells = " ".join(f"{number:8.3f}" for number in (row["ttft_ms"]["p50"], *tokens_ms))
        print(f"{name:36} {cells}  {row.get('graph_mib', '-')}  {row.get('warmup_s', '-')}")
    print(f"limit {limit:.4f} ms a token; ratios: {result['ratios']}; written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
