#!/usr/bin/env python3
"""One decode step, from embedding to sampled token: random weights of a released shape, requests deep in their context.

    scripts/bench_decode.py [--shapes llama-3.2-1b,...] [--batches 1,8,64] [--context 512] [--also 64x2048]
                            [--peers none|quick|all] [--what step,matmul] [--plot FILE.png] [--out DIR]

Two times a row: of the graph on the GPU (filled once, replayed many times between events) and of a token as the caller
of `Runner.decode` sees it, fetched to the host; `computed` is taken back each time, so the context stays. The limit is
what weights and KV cost at the measured copy rate, or the operations at the measured matmul rate. Gates: float32 logits
against transformers, replay against eager bit for bit, and every peer's logits against ours on the same weights and KV.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import bench_common as bench
import torch
from bench_common import Gate, Rates, Row
from torch import Tensor

from bucketgraph import LLM, SamplingParams
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.projections import Library, Projections
from bucketgraph.llm.request import Request
from bucketgraph.llm.weights import random_weights

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
}
Step = Callable[[], tuple[Tensor, Tensor]]  # tokens and logits on the device
# Compiled steps write at most this many tokens behind the context: four to compile and record, and those timed.
WARM, STEPS = 4, 32


def ours(llm: LLM, requests: list[Request], repeats: int) -> Row:
    """GPU time of a replay, and wall time of a token through the runner."""
    runner, times = llm._runner, []
    manager, first = runner.decode_manager, [request.tokens[-1] for request in requests]
    captured = bench.captured_of(manager, batch=len(requests))
    with manager.family.turn():
        captured.inputs.fill(runner.decode_arrays(requests))
        gpu = bench.timed(captured.executable.replay, llm.device, repeats, warm=10)
    for turn in range(repeats + 10):
        began = time.perf_counter()
        tokens, _ = runner.decode(requests)
        ids = tokens.tolist()
        if turn >= 10:
            times.append(1e3 * (time.perf_counter() - began))
        for request, token in zip(requests, ids, strict=True):
            request.tokens[-1] = token
            request.computed -= 1
    for request, token in zip(requests, first, strict=True):
        request.tokens[-1] = token
    chosen = {"variant": captured.variant, "variants_ms": captured.tried}
    return {"executable": captured.serves, **chosen, "gpu_ms": gpu, "wall_ms": bench.spread(times)}


def first_step(llm: LLM, requests: list[Request]) -> tuple[bool, Tensor]:
    """Whether replay equals eager bit for bit, and the logits."""
    manager = llm._runner.decode_manager
    captured = bench.captured_of(manager, batch=len(requests))
    with manager.family.turn():
        captured.inputs.fill(llm._runner.decode_arrays(requests))
        equal = bench.graph_equals_eager(manager, captured)
        return equal, manager.check_outputs(captured)["logits"].clone()


# -- peers -------------------------------------------------------------------------------------------------------------


def keys_values(llm: LLM, requests: list[Request]) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V of each layer as `[batch, kv_heads, context, D]`: what our pages hold."""
    cache, context = llm._runner.cache, requests[0].computed
    pages = torch.tensor([request.pages for request in requests], device=llm.device)
    for layer in range(llm.config.num_layers):
        k, v = (part[pages].transpose(1, 2).flatten(2, 3)[:, :, :context] for part in cache.layer(layer))
        yield k, v


def pending(llm: LLM, requests: list[Request]) -> Tensor:
    return torch.tensor([request.tokens[-1:] for request in requests], device=llm.device)


def transformers_eager(model: Any, llm: LLM, requests: list[Request]) -> Step:
    """Its own growing cache and forward in the plainest loop."""
    from transformers import DynamicCache

    cache, token = DynamicCache(), pending(llm, requests)
    for layer, (k, v) in enumerate(keys_values(llm, requests)):
        cache.update(k, v, layer)
    return _loop(model, model, {bench.cache_argument(model): cache}, token)


def transformers_compiled(model: Any, llm: LLM, requests: list[Request]) -> Step:
    """Its static cache, and its forward compiled as its documentation does."""
    from transformers import StaticCache

    torch._dynamo.reset()
    token, config, context = pending(llm, requests), llm.config, requests[0].computed
    cache = StaticCache(config=model.config, max_cache_len=context + WARM + STEPS + 4)
    cache.early_initialization(len(requests), config.num_kv_heads, config.head_dim, llm.dtype, llm.device)
    for layer, (k, v) in zip(cache.layers, keys_values(llm, requests), strict=True):
        layer.keys[:, :, :context], layer.values[:, :, :context] = k, v
        layer.cumulative_length.fill_(context)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    return _loop(model, forward, {bench.cache_argument(model): cache}, token)


def _loop(model: Any, forward: Callable[..., Any], cache: dict[str, Any], token: Tensor) -> Step:
    def step() -> tuple[Tensor, Tensor]:
        nonlocal token
        logits = forward(input_ids=token, **cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        token = logits.argmax(dim=-1, keepdim=True)
        return token, logits

    return step


@functools.cache
def opaque(ops: ModuleType) -> SimpleNamespace:
    """The ops of a decode step as custom ops: torch.compile cannot take kernels with launch rules of their own."""

    def op(name: str, shape: Callable[..., Tensor], mutates: Sequence[str] = ()) -> Any:
        made = torch.library.custom_op(f"bucketgraph_bench::{name}", getattr(ops, name), mutates_args=mutates)
        made.register_fake(shape)
        return made

    def attended(qkv: Tensor, *others: Any, **_: Any) -> Tensor:
        k_cache, num_heads = others[2], others[7]
        return qkv.new_empty(len(qkv), num_heads * k_cache.shape[-1])

    return SimpleNamespace(
        rms_norm=op("rms_norm", lambda x, *_, **how: torch.empty_like(x)),
        swiglu=op("swiglu", lambda gate_up, **how: gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)),
        decode_attention=op("decode_attention", attended, ("k_cache", "v_cache", "counters")),
        sample=op("sample", lambda logits, *_, **how: logits.new_empty(len(logits), dtype=torch.int64)),
    )


def own_compiled(llm: LLM, requests: list[Request]) -> Step:
    """Our model's decode function under torch.compile, which captures its own graph of it."""
    torch._dynamo.reset()
    model = copy.copy(llm._runner.model)
    model._ops, model._pdl = opaque(model._ops), False  # type: ignore[assignment]
    by = Projections.all(Library(model._ops))
    # Or they would be copied into each replay, as inputs are.
    for tensor in (*model.weights.tensors().values(), model.cache.data, model._cos_sin):
        torch._dynamo.mark_static_address(tensor)
    arrays = {name: tensor.to(llm.device) for name, tensor in llm._runner.decode_arrays(requests).items()}
    compiled = torch.compile(functools.partial(model.decode, projections=by), mode="reduce-overhead", fullgraph=True)

    def step() -> tuple[Tensor, Tensor]:
        tokens, logits = compiled(**arrays)
        return tokens, logits

    return step


def measure_peer(make: Callable[[], Step], want: Tensor, device: torch.device, steps: int) -> Row:
    """Times, and how far its first logits are from ours. A peer that cannot run says so and costs nothing else."""
    began = time.perf_counter()
    try:
        with torch.no_grad():
            step = make()
            error = bench.rms_error(step()[1], want)
            row = bench.stepped(step, device, WARM - 1, steps)
    except Exception as problem:
        return {"failed": bench.failure(problem)}
    return {**row, "rms_error": error, "set_up_s": round(time.perf_counter() - began, 1)}


def peers(llm: LLM, model: Any, requests: list[Request], want: Tensor, args: Namespace) -> dict[str, Row]:
    if model is None:
        return {}
    makers: dict[str, Callable[[], Step]] = {
        "transformers": lambda: transformers_eager(model, llm, requests),
        "transformers, cuDNN attention off": lambda: transformers_eager(model, llm, requests),
    }
    if args.peers == "all" and len(requests) in args.compiled_batches:
        makers["transformers, static cache, compiled"] = lambda: transformers_compiled(model, llm, requests)
        makers["ours, torch.compile"] = lambda: own_compiled(llm, requests)
    found = {}
    for name, make in makers.items():
        torch.backends.cuda.enable_cudnn_sdp("cuDNN attention off" not in name)
        found[name] = measure_peer(make, want, llm.device, STEPS if "compile" in name else 12)
        if "compile" in name:
            torch._dynamo.reset()  # it would keep the model's memory
        bench.release_memory(llm.device)
        print(f"  {name}: {found[name].get('wall_ms', found[name])}", flush=True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return found


# -- rows --------------------------------------------------------------------------------------------------------------


def judge(row: Row, gate: Gate) -> None:
    """Share of the limit and ratios, for a row and peers that are right."""
    where = f"{row['shape']}, batch {row['batch']}, {row['numerics']}, {row['sampling']}"
    if not gate.require(row["graph_equals_eager"], f"{where}: the graph's bits differ from eager's"):
        return
    row["share_of_limit"] = round(row["limit_ms"] / row["gpu_ms"]["p50"], 4)
    row["share_of_limit_wall"] = round(row["limit_ms"] / row["wall_ms"]["p50"], 4)
    for name, peer in row["peers"].items():
        if "failed" in peer:
            continue
        error = peer["rms_error"]
        if gate.require(error <= bench.PEER_TOLERANCE, f"{where}: {name}'s logits differ from ours by {error:.1e}"):
            peer["ratio_wall"] = round(peer["wall_ms"]["p50"] / row["wall_ms"]["p50"], 3)
            peer["ratio_gpu"] = round(peer["gpu_ms"]["p50"] / row["gpu_ms"]["p50"], 3)


def measure_shape(
    shape: str,
    config: ModelConfig,
    green: Sequence[str],
    rates: Rates,
    args: Namespace,
    gate: Gate,
    keep: Callable[[list[Row]], None],
) -> None:
    """Every row of a shape; what is measured so far is kept after each batch."""
    device = torch.device(args.device)
    bench.release_memory(device)
    weights = random_weights(config, torch.bfloat16, device)
    model = bench.cases().transformers_twin(config, weights) if args.peers != "none" else None
    rows: list[Row] = []
    points = [*((batch, args.context) for batch in args.batches), *args.also]
    for numerics in green:
        llm = bench.serve(
            config,
            weights,
            numerics,
            tokens=[64],
            batches=list(dict(points)),
            max_model_len=min(args.max_model_len, config.max_position_embeddings),
            page_size=args.page_size,
            live=max(batch * (context + 1 + args.page_size) for batch, context in points),
        )
        with llm, gate.guard(f"{shape}, {numerics}"):
            gate.require(not bench.failed(llm), f"{shape}, {numerics}: {bench.failed(llm)}")
            bench.fill_cache(llm)
            for batch, context in points:
                with gate.guard(f"{shape}, batch {batch} x {context}, {numerics}"):
                    twin = model if numerics == green[0] and (batch, context) not in args.also else None
                    rows += measure_batch(shape, llm, twin, numerics, batch, context, rates, args, gate)
                keep(rows)
        del llm
        bench.release_memory(device)


def measure_batch(
    shape: str,
    llm: LLM,
    model: Any,
    numerics: str,
    batch: int,
    context: int,
    rates: Rates,
    args: Namespace,
    gate: Gate,
) -> list[Row]:
    work, rows = bench.decode_work(llm.config, batch, context), []
    for sampling in args.sampling:
        row: Row = {"shape": shape, "batch": batch, "context": context, "sampling": sampling, "numerics": numerics}
        requests = bench.held(llm, batch, context + 1, context, SAMPLING[sampling])
        try:
            equal, logits = first_step(llm, requests)
            row |= {"graph_equals_eager": equal, **work.row(rates), **ours(llm, requests, args.repeats)}
            row["peers"] = peers(llm, model, requests, logits, args) if sampling == args.sampling[0] else {}
        finally:
            bench.let_go(llm, requests)
        judge(row, gate)
        rows.append(row)
        name = f"{shape}, batch {batch} x {context}, {numerics}, {sampling}"
        print(f"  {name}: {row['gpu_ms']}, wall {row['wall_ms']}, {row['variants_ms']}", flush=True)
    return rows


def show(rows: Sequence[Row], matmuls: Sequence[Row]) -> None:
    heads = (
        "shape",
        "batch",
        "context",
        "numerics",
        "sampling",
        "limit ms",
        "GPU ms",
        "share",
        "wall ms",
        "p99",
        "wall share",
    )
    bench.table(
        heads,
        [
            (
                *(row[key] for key in ("shape", "batch", "context", "numerics", "sampling", "limit_ms")),
                row["gpu_ms"]["p50"],
                row.get("share_of_limit"),
                row["wall_ms"]["p50"],
                row["wall_ms"]["p99"],
                row.get("share_of_limit_wall"),
            )
            for row in rows
        ],
    )
    told = [(row["shape"], row["batch"], name, peer) for row in rows for name, peer in row["peers"].items()]
    if told:
        print("\npeers, greedy; ratios to the first of our rows above of that shape and batch")
        bench.table(
            ("shape", "batch", "peer", "wall ms", "GPU ms", "wall ratio", "GPU ratio", "note"),
            [
                (
                    *(shape, batch, name),
                    *(peer[key]["p50"] if key in peer else None for key in ("wall_ms", "gpu_ms")),
                    *(peer.get(key) for key in ("ratio_wall", "ratio_gpu")),
                    peer.get("failed", "")[:80],
                )
                for shape, batch, name, peer in told
            ],
        )
    bench.show_matmuls(matmuls)


def panels(rows: Sequence[Row]) -> list[bench.Panel]:
    """GPU time over batch for each shape, with the greedy rows and the peers."""
    found = []
    rows = [row for row in rows if "share_of_limit" in row]
    rows = [row for row in rows if (row["sampling"], row["context"]) == (rows[0]["sampling"], rows[0]["context"])]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in mine:
            lines.setdefault(f"{row['numerics']}, GPU", []).append((row["batch"], row["gpu_ms"]["p50"]))
            lines.setdefault(f"{row['numerics']}, caller", []).append((row["batch"], row["wall_ms"]["p50"]))
            for name, peer in row["peers"].items():
                if "ratio_wall" in peer:
                    lines.setdefault(name, []).append((row["batch"], peer["wall_ms"]["p50"]))
        limit = [(float(row["batch"]), row["limit_ms"]) for row in mine if row["numerics"] == mine[0]["numerics"]]
        found.append(bench.Panel(f"{shape}, decode at {mine[0]['context']} tokens", "batch", lines, limit))
    return found


def arguments(argv: Sequence[str] | None) -> Namespace:
    parser = bench.parser(__doc__)
    parser.add_argument("--shapes", type=bench.names, default="llama-3.2-1b,llama-3.1-8b,qwen3-0.6b,smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--batches", type=bench.numbers, default="1,8,64")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache before the step")
    parser.add_argument("--also", type=bench.pairs, default="64x2048", help="more batches, by context; without peers")
    parser.add_argument("--numerics", type=bench.names, default="fast,invariant")
    parser.add_argument("--sampling", type=bench.names, default="greedy,top-p")
    parser.add_argument("--what", type=bench.names, default="step", help="step, matmul")
    parser.add_argument("--max-model-len", type=int, default=8192, help="of the block tables, as a service has them")
    parser.add_argument("--page-size", type=int, default=bench.PAGE_SIZE)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--compiled-batches", type=bench.numbers, default="1", help="at which --peers all compiles")
    parser.add_argument("--plot", help="a PNG file; needs matplotlib")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, gate = arguments(argv), Gate()
    device = torch.device(args.device)
    rates = Rates.measure(device)
    print(f"measured: {rates.as_dict()}", flush=True)
    all_rows: list[Row] = []
    all_matmuls: list[Row] = []
    for shape in args.shapes:
        config = shrink(preset(shape), num_layers=args.layers or preset(shape).num_layers)
        result: Row = {
            "what": f"{shape}: a decode step of random bfloat16 weights, embedding to sampled token",
            "gate": "float32 logits at 2 layers within 1e-4 of transformers'; replay equals eager bit for bit",
            "peers": "same weights and KV, greedy; times of the caller until tokens are on the host",
            "rates": rates.as_dict(),
            "limit_formula": f"{bench.LIMIT}; {bench.decode_work(config, 1, args.context).formula}",
        }

        def keep(rows: list[Row], name: str = shape, result: Row = result) -> None:
            bench.save(f"decode_{name}", {**result, "rows": rows, "red": gate.red}, args)
            all_rows[:] = [row for row in all_rows if row["shape"] != name] + rows

        print(f"{shape}: {result['limit_formula']}", flush=True)
        with gate.guard(shape):
            result["float32_errors"] = bench.float32_gate(config, args.numerics, device, gate)
            green = bench.green_numerics(result["float32_errors"])
            if green and "step" in args.what:
                measure_shape(shape, config, green, rates, args, gate, keep)
        with gate.guard(f"{shape}, matmuls"):
            if "matmul" in args.what:
                rows = bench.matmul_rows(config, args.batches, "decode", rates, device, gate)
                result["matmuls"] = [{"shape": shape, **row} for row in rows]
                all_matmuls += result["matmuls"]
        keep([row for row in all_rows if row["shape"] == shape])
        bench.release_memory(device)
    show(all_rows, all_matmuls)
    if args.plot:
        bench.plot(args.plot, panels(all_rows))
    return gate.conclude()


if __name__ == "__main__":
    sys.exit(main())
