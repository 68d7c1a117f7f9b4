#!/usr/bin/env python3
"""Prefill: our attention against cuDNN and flash SDPA, and whole prompts through graph, eager and `LLM.generate`.

    scripts/bench_prefill.py [--what attention,model,matmul] [--tokens 64,128,...] [--shapes llama-3.2-1b,...]
                             [--peers none|quick|all] [--plot FILE.png] [--out DIR]

Attention: one sequence, causal, bfloat16, pages of several sizes in random order; SDPA gets dense K and V, repeated to
the query heads outside the timing. Calls over four sets of inputs lie in one graph. Model: the GPU time of a bucket's
graph, of the same kernels launched eagerly, and the time to first token of one prompt, host included. Gates: attention
against float32 within 1e-2, float32 logits against transformers, replay against eager bit for bit.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import bench_common as bench
import torch
import torch.nn.functional as F
from bench_common import Gate, Rates, Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bucketgraph import LLM, SamplingParams, kernels
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.request import Request
from bucketgraph.llm.weights import random_weights

SETS = 4  # of attention inputs, taken in turn
ATTENTION_TOLERANCE = 1e-2  # of the largest magnitude
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


# -- attention ---------------------------------------------------------------------------------------------------------


def dense(tokens: int, args: Namespace, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q `[T, Hq, D]`, and k, v `[Hk, T, D]`."""
    draw = torch.Generator(device=device).manual_seed(seed)
    shapes = (tokens, args.heads, args.dim), (args.kv_heads, tokens, args.dim), (args.kv_heads, tokens, args.dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=draw) for shape in shapes)
    return q, k, v


def paged(q: Tensor, k: Tensor, v: Tensor, page: int) -> Callable[[], Tensor]:
    """A call of our kernel on these values in pages of random order."""
    device, tokens, (kv_heads, _, dim) = q.device, len(q), k.shape
    count = -(-tokens // page)
    table = (torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1).to(device)
    caches = []
    for x in (k, v):
        cache = torch.zeros(count + 1, kv_heads, page, dim, dtype=x.dtype, device=device)
        whole = F.pad(x, (0, 0, 0, count * page - tokens)).view(kv_heads, count, page, dim)
        cache[table] = whole.transpose(0, 1)
        caches.append(cache)
    wide = torch.cat([table, table.new_zeros(1)]).to(torch.int32)[None]  # one spare column, as the runner has
    length = torch.tensor([tokens], dtype=torch.int32, device=device)
    attend = kernels.ops(device).prefill_attention
    return partial(attend, q, *caches, wide, length, length, dim**-0.5)


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Callable[[], Tensor]:
    group = q.shape[1] // k.shape[0]
    heads = q.transpose(0, 1)[None].contiguous()
    keys, values = (x.repeat_interleave(group, dim=0)[None].contiguous() for x in (k, v))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(heads, keys, values, is_causal=True)

    return call


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Float32 attention `[T, Hq, D]`, one KV head at a time, since the scores of all would not fit."""
    group, parts = q.shape[1] // k.shape[0], []
    with sdpa_kernel(SDPBackend.MATH):
        for head in range(k.shape[0]):
            rows = q[:, head * group : (head + 1) * group].transpose(0, 1)[None].float()
            keys, values = (x[head].float().expand(1, group, -1, -1) for x in (k, v))
            parts.append(F.scaled_dot_product_attention(rows, keys, values, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts, dim=1)


def contenders(sets: Sequence[tuple[Tensor, Tensor, Tensor]], args: Namespace) -> dict[str, list[Any]]:
    """Calls over the sets by name: a maker each, so that one which cannot run fails alone."""
    found = {f"ours, page {page}": [partial(paged, *one, page) for one in sets] for page in args.pages}
    if args.peers != "none":
        found["cuDNN"] = [partial(sdpa, *one, SDPBackend.CUDNN_ATTENTION) for one in sets]
        found["flash"] = [partial(sdpa, *one, SDPBackend.FLASH_ATTENTION) for one in sets]
    return found


def measure_attention(tokens: int, rates: Rates, args: Namespace, gate: Gate) -> Row:
    device = torch.device(args.device)
    sets = [dense(tokens, args, device, seed) for seed in range(SETS)]
    want = exact(*sets[0])
    work = bench.attention_work(tokens, args.heads, args.kv_heads, args.dim)
    row: Row = {"tokens": tokens, **work.row(rates), "kernels": {}}
    for name, makers in contenders(sets, args).items():
        try:
            calls = [make() for make in makers]
            got = calls[0]()
            got = got[0].transpose(0, 1) if got.dim() == 4 else got
            error = bench.relative_error(got, want)
            times = bench.milliseconds(bench.together(calls, device), device, args.repeats, seconds=0.5)
        except Exception as problem:
            row["kernels"][name] = {"failed": bench.failure(problem)}
            gate.require(not name.startswith("ours"), f"attention, {tokens} tokens, {name}: {bench.failure(problem)}")
            continue
        found = {"gpu_ms": round(statistics.median(times) / SETS, 5), "error": error}
        row["kernels"][name] = found
        what = f"attention, {tokens} tokens, {name}: error {error:.1e} against float32"
        if gate.require(error <= ATTENTION_TOLERANCE, what):
            found["tflop_s"] = round(work.operations / found["gpu_ms"] / 1e9, 1)
            found["share_of_limit"] = round(work.limit_ms(rates) / found["gpu_ms"], 4)
        del calls, got
    compare(row["kernels"])
    return row


def compare(found: dict[str, Row]) -> None:
    """Speed of each of ours over each right peer's."""
    for name, ours in found.items():
        if name.startswith("ours") and "share_of_limit" in ours:
            ours["ratios"] = {
                peer: round(row["gpu_ms"] / ours["gpu_ms"], 3)
                for peer, row in found.items()
                if not peer.startswith("ours") and "share_of_limit" in row
            }


# -- model -------------------------------------------------------------------------------------------------------------


def measure_shape(
    shape: str,
    config: ModelConfig,
    green: Sequence[str],
    rates: Rates,
    args: Namespace,
    gate: Gate,
    keep: Callable[[list[Row]], None],
) -> None:
    device = torch.device(args.device)
    bench.release_memory(device)
    weights = random_weights(config, torch.bfloat16, device)
    model = bench.cases().transformers_twin(config, weights) if args.peers != "none" else None
    context = min(config.max_position_embeddings, max(args.tokens) + 128)
    rows: list[Row] = []
    for numerics in green:
        fitting = [tokens for tokens in args.tokens if tokens <= context]
        llm = bench.serve(config, weights, numerics, fitting, [1], context, args.page_size, live=context)
        with llm, gate.guard(f"{shape}, {numerics}"):
            gate.require(not bench.failed(llm), f"{shape}, {numerics}: {bench.failed(llm)}")
            for tokens in fitting:
                with gate.guard(f"{shape}, {tokens} tokens, {numerics}"):
                    row: Row = {"shape": shape, "tokens": tokens, "numerics": numerics}
                    row |= bench.prefill_work(config, tokens).row(rates)
                    row |= measure_prompt(llm, model if numerics == green[0] else None, tokens, args)
                    judge(row, gate)
                    rows.append(row)
                    print(
                        f"  {shape}, {tokens} tokens, {numerics}: {row['graph_ms']}, TTFT {row['ttft_ms']}", flush=True
                    )
                keep(rows)
        del llm
        bench.release_memory(device)


def measure_prompt(llm: LLM, model: Any, tokens: int, args: Namespace) -> Row:
    """A whole bucket as one prompt: graph, eager and to the first token, and transformers on the same ids."""
    manager, device = llm._runner.prefill_manager, llm.device
    slots = llm._runner.max_requests
    captured = bench.captured_of(manager, tokens=tokens, requests=slots)
    requests = bench.held(llm, 1, tokens, 0, GREEDY)
    try:
        with manager.family.turn():
            captured.inputs.fill(llm._runner.prefill_arrays([(requests[0], tokens)]))
            equal = bench.graph_equals_eager(manager, captured)
            logits = manager.check_outputs(captured)["logits"][:1].clone()
            graph = bench.timed(captured.executable.replay, device, args.repeats)
            eager = bench.milliseconds(lambda: captured.fn(**captured.inputs.views), device, args.repeats)
    finally:
        bench.let_go(llm, requests)
    # A model of no longer context than the bucket has no room for the new token: its prompt is one shorter.
    ids = requests[0].tokens[: llm.max_model_len - 1]
    row: Row = {"graph_equals_eager": equal, "executable": captured.serves, "graph_ms": graph}
    row |= {"variant": captured.variant, "variants_ms": captured.tried}
    row |= {"eager_ms": bench.spread(eager), "prompt": len(ids)}
    row["ttft_ms"] = bench.spread(first_tokens(llm, ids, min(args.repeats, 30)))
    row["peers"] = {} if model is None else {"transformers": measure_peer(model, requests[0], logits, device)}
    return row


def first_tokens(llm: LLM, ids: list[int], repeats: int) -> list[float]:
    """Milliseconds of `generate` for one token, host included."""
    times = []
    for turn in range(repeats + 3):
        began = time.perf_counter()
        llm.generate([ids], GREEDY)
        if turn >= 3:
            times.append(1e3 * (time.perf_counter() - began))
    return times


def measure_peer(model: Any, request: Request, want: Tensor, device: torch.device) -> Row:
    """transformers' forward over the same prompt with a new cache, to the token on the host."""
    from transformers import DynamicCache

    ids, cache = torch.tensor([request.tokens], device=device), bench.cache_argument(model)

    def step() -> tuple[Tensor, Tensor]:
        past = {cache: DynamicCache()}
        logits = model(input_ids=ids, **past, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits.argmax(dim=-1), logits

    try:
        with torch.no_grad():
            error = bench.rms_error(step()[1], want)
            return {**bench.stepped(step, device, 2, 10), "rms_error": error}
    except Exception as problem:
        return {"failed": bench.failure(problem)}


def judge(row: Row, gate: Gate) -> None:
    """Shares and ratios, for a row and peers that are right."""
    where = f"{row['shape']}, {row['tokens']} tokens, {row['numerics']}"
    if not gate.require(row["graph_equals_eager"], f"{where}: the graph's bits differ from eager's"):
        return
    row["share_of_limit"] = round(row["limit_ms"] / row["graph_ms"]["p50"], 4)
    row["share_of_limit_ttft"] = round(row["limit_ms"] / row["ttft_ms"]["p50"], 4)
    row["ratio_eager"] = round(row["eager_ms"]["p50"] / row["graph_ms"]["p50"], 3)
    for name, peer in row["peers"].items():
        if "failed" in peer:
            continue
        error = peer["rms_error"]
        if gate.require(error <= bench.PEER_TOLERANCE, f"{where}: {name}'s logits differ from ours by {error:.1e}"):
            peer["ratio_wall"] = round(peer["wall_ms"]["p50"] / row["ttft_ms"]["p50"], 3)
            peer["ratio_gpu"] = round(peer["gpu_ms"]["p50"] / row["graph_ms"]["p50"], 3)


# -- what is shown and kept --------------------------------------------------------------------------------------------


def show_attention(rows: Sequence[Row], args: Namespace) -> None:
    if not rows:
        return
    kinds = list(rows[0]["kernels"])
    print(
        f"\nattention, causal, {args.heads} query and {args.kv_heads} KV heads, D {args.dim}, TFLOP/s (share of limit)"
    )
    lines = []
    for row in rows:
        cells: list[object] = [row["tokens"], row["operations"] / row["limit_ms"] / 1e9]
        for kind in kinds:
            found = row["kernels"][kind]
            speed = f"{found['tflop_s']:.1f} ({found['share_of_limit']:.2f})" if "tflop_s" in found else None
            cells.append(speed)
        against = [row["kernels"][kind]["ratios"] for kind in kinds if row["kernels"][kind].get("ratios")]
        best = max((min(ratios.values()) for ratios in against), default=None)
        lines.append([*(bench.cell(cell, 1) for cell in cells), bench.cell(best)])
    bench.table(["tokens", "limit", *kinds, "our best / best peer"], lines)


def show_models(rows: Sequence[Row]) -> None:
    if not rows:
        return
    print("\nwhole prompts, ms")
    heads = ("shape", "tokens", "numerics", "limit", "graph", "share", "eager", "TTFT", "p99", "share", "transformers")
    lines = []
    for row in rows:
        peer = row["peers"].get("transformers", {})
        told = f"{peer['wall_ms']['p50']:.2f} (x{peer['ratio_wall']:.2f})" if "ratio_wall" in peer else None
        lines.append(
            [
                *(row[key] for key in ("shape", "tokens", "numerics", "limit_ms")),
                row["graph_ms"]["p50"],
                row.get("share_of_limit"),
                row["eager_ms"]["p50"],
                *(row["ttft_ms"][key] for key in ("p50", "p99")),
                row.get("share_of_limit_ttft"),
                told or peer.get("failed", "-")[:60],
            ]
        )
    bench.table(heads, lines)


def panels(attention: Sequence[Row], models: Sequence[Row]) -> list[bench.Panel]:
    """Latency over tokens: the attention kernels, then each shape."""
    found = []
    if attention:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in attention:
            for name, kernel in row["kernels"].items():
                if "share_of_limit" in kernel:
                    lines.setdefault(name, []).append((row["tokens"], kernel["gpu_ms"]))
        limit = [(float(row["tokens"]), row["limit_ms"]) for row in attention]
        found.append(bench.Panel("prefill attention", "tokens", lines, limit))
    models = [row for row in models if "share_of_limit" in row]
    for shape in dict.fromkeys(row["shape"] for row in models):
        mine, lines = [row for row in models if row["shape"] == shape], {}
        for row in mine:
            for label, key in (("graph", "graph_ms"), ("first token", "ttft_ms")):
                lines.setdefault(f"{row['numerics']}, {label}", []).append((row["tokens"], row[key]["p50"]))
            for name, peer in row["peers"].items():
                if "ratio_wall" in peer:
                    lines.setdefault(name, []).append((row["tokens"], peer["wall_ms"]["p50"]))
        limit = [(float(row["tokens"]), row["limit_ms"]) for row in mine if row["numerics"] == mine[0]["numerics"]]
        found.append(bench.Panel(f"{shape}, prefill", "tokens", lines, limit))
    return found


def arguments(argv: Sequence[str] | None) -> Namespace:
    parser = bench.parser(__doc__)
    parser.add_argument("--what", type=bench.names, default="attention,model", help="attention, model, matmul")
    parser.add_argument("--tokens", type=bench.numbers, default="64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--shapes", type=bench.names, default="llama-3.2-1b,llama-3.1-8b,qwen3-0.6b,smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--numerics", type=bench.names, default="fast,invariant")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--pages", type=bench.numbers, default="16,64,128", help="page sizes of the attention rows")
    parser.add_argument("--page-size", type=int, default=bench.PAGE_SIZE, help="of the model rows")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--plot", help="a PNG file; needs matplotlib")
    return parser.parse_args(argv)


def run_attention(rates: Rates, args: Namespace, gate: Gate) -> list[Row]:
    rows: list[Row] = []
    result: Row = {
        "what": f"causal attention of one sequence, {args.heads} query, {args.kv_heads} KV heads, D {args.dim}, bf16",
        "gate": "within 1e-2 of float32 attention, of the largest magnitude",
        "rates": rates.as_dict(),
        "limit_formula": f"{bench.LIMIT}; {bench.attention_work(1, 1, 1, 1).formula}",
    }
    print(f"attention: {result['limit_formula']}", flush=True)
    for tokens in args.tokens:
        with gate.guard(f"attention, {tokens} tokens"):
            rows.append(measure_attention(tokens, rates, args, gate))
            bench.save("prefill_attention", {**result, "rows": rows, "red": gate.red}, args)
        bench.release_memory(torch.device(args.device))
    return rows


def run_shape(shape: str, rates: Rates, args: Namespace, gate: Gate) -> tuple[list[Row], list[Row]]:
    """Rows of the whole model and of its matmuls, saved as they come."""
    device = torch.device(args.device)
    config = shrink(preset(shape), num_layers=args.layers or preset(shape).num_layers)
    rows: list[Row] = []
    matmuls: list[Row] = []
    result: Row = {
        "what": f"{shape}: one prompt through random bfloat16 weights",
        "gate": "float32 logits at 2 layers within 1e-4 of transformers'; replay equals eager bit for bit",
        "rates": rates.as_dict(),
        "limit_formula": f"{bench.LIMIT}; {bench.prefill_work(config, 1).formula}",
    }

    def keep(now: list[Row]) -> None:
        rows[:] = now
        bench.save(f"prefill_{shape}", {**result, "rows": rows, "matmuls": matmuls, "red": gate.red}, args)

    print(f"{shape}: {result['limit_formula']}", flush=True)
    with gate.guard(shape):
        result["float32_errors"] = bench.float32_gate(config, args.numerics, device, gate)
        green = bench.green_numerics(result["float32_errors"])
        if green and "model" in args.what:
            measure_shape(shape, config, green, rates, args, gate, keep)
    with gate.guard(f"{shape}, matmuls"):
        if "matmul" in args.what:
            found = bench.matmul_rows(config, args.tokens, "prefill", rates, device, gate)
            matmuls = [{"shape": shape, **row} for row in found]
    keep(list(rows))
    bench.release_memory(device)
    return rows, matmuls


def main(argv: Sequence[str] | None = None) -> int:
    args, gate = arguments(argv), Gate()
    rates = Rates.measure(torch.device(args.device))
    print(f"measured: {rates.as_dict()}", flush=True)
    attention = run_attention(rates, args, gate) if "attention" in args.what else []
    models: list[Row] = []
    matmuls: list[Row] = []
    for shape in args.shapes if {"model", "matmul"} & set(args.what) else []:
        rows, products = run_shape(shape, rates, args, gate)
        models += rows
        matmuls += products
    show_attention(attention, args)
    show_models(models)
    bench.show_matmuls(matmuls)
    if args.plot:
        bench.plot(args.plot, panels(attention, models))
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
