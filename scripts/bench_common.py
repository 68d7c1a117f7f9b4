"""What every benchmark shares: where it ran, what the hardware allows, the gates, and how results are kept.

Rules: a figure is kept with GPU, versions and commit; limits are measured in the same run as what is compared with
them; times are medians with the spread beside them. A row whose gate is red carries times and no share or ratio.
On a CPU everything runs, small and on the host's clock, to try a script: such figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.metadata
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import gpu_clock
from torch import Tensor

import bucketgraph
from bucketgraph import LLM, BucketManager, kernels
from bucketgraph.config import BucketSet, KVCacheSpec, parse
from bucketgraph.llm.kv_cache import PagedKVCache
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.presets import shrink
from bucketgraph.llm.request import LoopKind, Request
from bucketgraph.llm.sampling import SamplingParams
from bucketgraph.llm.weights import ModelWeights, random_weights
from bucketgraph.manager import Captured

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NUMERICS = ("fast", "invariant")
PAGE_SIZE = KVCacheSpec().page_size  # a service's, unless its bucket set says otherwise
FLOAT32_TOLERANCE = 1e-4  # of the largest logit, absolute where that is below 1
PEER_TOLERANCE = 0.1  # bfloat16 logits of two implementations: their difference over ours, root mean squares
Run = Callable[[], object]
Row = dict[str, Any]


@functools.cache
def environment() -> dict[str, Any]:
    """GPU, driver, versions and commit."""
    versions: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bucketgraph": bucketgraph.__version__,
        "commit": commit(),
    }
    for package in ("triton", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        versions["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    else:
        versions["cpu_cores"] = os.cpu_count()
    return versions


def commit() -> str:
    """The commit that ran: of the checkout, or named by BUCKETGRAPH_COMMIT where a copy without history runs."""
    if named := os.environ.get("BUCKETGRAPH_COMMIT"):
        return named
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, text=True)
    return (asked.stdout.strip() or "unknown") + (" with changes" if dirty.stdout.strip() else "")


# -- clocks ------------------------------------------------------------------------------------------------------------


def milliseconds(
    run: Run, device: torch.device, repeats: int = 100, warm: int = 3, seconds: float = 1.0
) -> list[float]:
    """Time between events around each of up to `repeats` runs, and of no more than about `seconds` of them.

    All are queued before the device is waited for, so a run shorter than its own launch shows that launch: put several
    into one graph with `together`.
    """
    for _ in range(warm):
        run()
    once = max(_elapsed(run, device, 1)[0], 1e-3)
    return _elapsed(run, device, max(5, min(repeats, int(1e3 * seconds / once))))


def timed(run: Run, device: torch.device, repeats: int = 100, warm: int = 3, seconds: float = 1.0) -> dict[str, float]:
    """The spread of `milliseconds`, and the clock meanwhile where it is known."""
    clock = gpu_clock(device)
    with clock.meanwhile() if clock is not None else nullcontext({}) as known:
        times = milliseconds(run, device, repeats, warm, seconds)
    return {**spread(times), **known}


def _elapsed(run: Run, device: torch.device, count: int) -> list[float]:
    if device.type != "cuda":
        times = []
        for _ in range(count):
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize(device)
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, p99, largest and count."""
    ordered = sorted(milliseconds)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
        "max": round(ordered[-1], 4),
        "n": len(ordered),
    }


def together(calls: Sequence[Run], device: torch.device) -> Run:
    """One run of all the calls: on a GPU a single graph, so that short kernels are timed without their launches."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    gc.collect()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()

    def replay(_keep: Sequence[Run] = calls) -> None:
        graph.replay()

    return replay


def stepped(step: Callable[[], tuple[Tensor, Tensor]], device: torch.device, warm: int, repeats: int) -> Row:
    """Steps that return tokens and logits, one after another: time on the GPU, and until the tokens are in a list."""
    gpu: list[float] = []
    wall: list[float] = []
    for turn in range(warm + repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        began = time.perf_counter()
        if events:
            events[0].record()
        tokens = step()[0]
        if events:
            events[1].record()
        tokens.tolist()
        del tokens  # a compiled step may own its memory
        if turn >= warm:
            wall.append(1e3 * (time.perf_counter() - began))
            gpu.append(events[0].elapsed_time(events[1]) if events else wall[-1])
    return {"gpu_ms": spread(gpu), "wall_ms": spread(wall)}


@contextmanager
def busy_cpu() -> Iterator[None]:
    """Every core that this process may use has another one that spins on it."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


# -- limits ------------------------------------------------------------------------------------------------------------


# A rate is measured for as long as a row is: an H200 under its power limit computes slower after some milliseconds.
RATE_SECONDS = 0.5


def copy_rate(gib: int = 4) -> float:
    """Device-to-device copy, bytes read plus bytes written, in bytes a second: the limit of what streams weights."""
    source = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), torch.device("cuda"), 1000, seconds=RATE_SECONDS)
    return 2e3 * source.numel() / statistics.median(times)


def matmul_rate(size: int = 8192) -> float:
    """A bfloat16 matmul of `size` cubed on random data, in operations a second: the limit of what computes."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = milliseconds(lambda: a @ b, torch.device("cuda"), 1000, seconds=RATE_SECONDS)
    return 2e3 * size**3 / statistics.median(times)


@dataclass(frozen=True)
class Rates:
    """What this machine does, measured in this run."""

    copy: float  # bytes read plus bytes written a second
    matmul: float  # operations a second

    @classmethod
    def measure(cls, device: torch.device) -> Rates:
        if device.type == "cuda":
            rates = cls(copy_rate(), matmul_rate())
            release_memory(device)
            return rates
        source, a = torch.empty(1 << 26, dtype=torch.uint8), torch.randn(256, 256)
        target = torch.empty_like(source)
        copies, products = milliseconds(lambda: target.copy_(source), device), milliseconds(lambda: a @ a, device)
        return cls(2e3 * source.numel() / statistics.median(copies), 2e3 * 256**3 / statistics.median(products))

    def as_dict(self) -> Row:
        return {"copy_tb_s": round(self.copy / 1e12, 3), "matmul_tflop_s": round(self.matmul / 1e12, 1)}


@dataclass(frozen=True)
class Work:
    """What has to be moved and computed, whatever the kernels."""

    bytes: int
    operations: int
    formula: str

    def limit_ms(self, rates: Rates) -> float:
        """The larger of bytes over the copy rate and operations over the matmul rate."""
        return 1e3 * max(self.bytes / rates.copy, self.operations / rates.matmul)

    def row(self, rates: Rates) -> Row:
        by = "bytes" if self.bytes / rates.copy >= self.operations / rates.matmul else "operations"
        limit = round(self.limit_ms(rates), 5)
        return {"limit_ms": limit, "limit_by": by, "bytes": self.bytes, "operations": self.operations}


LIMIT = "limit = max(bytes / measured copy rate, operations / measured matmul rate)"


def matrices(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Rows, columns and count of each kind of matrix that a token is multiplied with."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, hidden, layers),
        "o": (hidden, q, layers),
        "gate_up": (2 * inner, hidden, layers),
        "down": (hidden, inner, layers),
        "head": (config.vocab_size, hidden, 1),
    }


def weight_count(config: ModelConfig) -> int:
    """Numbers that a step reads: every matrix, norm and bias once. A tied embedding is read as the head; else its
    rows are few.
    """
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    bias = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim if config.qkv_bias else 0
    held = config.num_layers * (norms + bias) + config.hidden_size
    return held + sum(rows * columns * count for rows, columns, count in matrices(config).values())


def decode_work(config: ModelConfig, batch: int, context: int, itemsize: int = 2) -> Work:
    """One token for each of `batch` requests that have `context` tokens in the cache; each attends to itself, too."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    seen = batch * (context + 1)
    matmuls = sum(2 * rows * columns * count for rows, columns, count in matrices(config).values()) * batch
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
    return Work(
        itemsize * (weight_count(config) + per_token * seen),
        matmuls + attention,
        "bytes: weights once (a tied head once) + K and V of batch x (context + 1) tokens; operations: 2 x matrix"
        " elements x batch + 4 x layers x query heads x head dim x batch x (context + 1)",
    )


def prefill_work(config: ModelConfig, tokens: int, itemsize: int = 2) -> Work:
    """A prompt of `tokens`, and the logits after its last one."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    kinds = matrices(config)
    matmuls = sum(2 * r * c * n * (1 if name == "head" else tokens) for name, (r, c, n) in kinds.items())
    attention = attention_work(tokens, config.num_heads, config.num_kv_heads, config.head_dim).operations
    return Work(
        itemsize * (weight_count(config) + per_token * tokens),
        matmuls + config.num_layers * attention,
        "bytes: weights once + K and V of the tokens written once; operations: 2 x matrix elements x tokens (the head"
        " for one row) + causal attention, layers x 2 x 2 x T x T / 2 x head dim x query heads",
    )


def attention_work(tokens: int, heads: int, kv_heads: int, dim: int, itemsize: int = 2) -> Work:
    """Causal attention of one sequence: half of the square counts."""
    return Work(
        itemsize * 2 * tokens * (heads + kv_heads) * dim,
        2 * 2 * tokens * tokens // 2 * dim * heads,
        "bytes: q, k, v and the result once; operations: 2 x 2 x T x T / 2 x head dim x query heads (causal)",
    )


def matmul_work(rows: int, columns: int, width: int, itemsize: int = 2) -> Work:
    return Work(
        itemsize * (columns * width + rows * (columns + width)),
        2 * rows * columns * width,
        "bytes: weight, input and result once; operations: 2 x rows x columns x width",
    )


# -- gates -------------------------------------------------------------------------------------------------------------


@dataclass
class Gate:
    """What was found wrong. Anything red ends the script with status 1, and its rows carry no share and no ratio."""

    red: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> bool:
        if not holds:
            self.red.append(what)
        return holds

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """An exception inside is red, and what comes after the block still runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.red.append(f"{what}: {failure(error)}")

    def conclude(self) -> int:
        """Print the verdict last; the exit status."""
        for what in self.red:
            print(f"gate RED: {what}; no share and no ratio where it applies")
        if not self.red:
            print("gates green")
        return 1 if self.red else 0


def failure(error: BaseException) -> str:
    said = " ".join(str(error).split())
    said = said if len(said) <= 500 else f"{said[:150]} ... {said[-350:]}"  # what happened in a child comes last
    return f"{type(error).__name__}: {said}"


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude; NaN is infinitely wrong."""
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


def rms_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`."""
    error = float((got.double() - want.double()).pow(2).mean().sqrt() / want.double().pow(2).mean().sqrt())
    return math.inf if math.isnan(error) else error


def cases() -> ModuleType:
    """The tests' helpers: the same twin in transformers that the tests compare with."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    import llm_cases

    return llm_cases


def float32_gate(config: ModelConfig, numerics: Iterable[str], device: torch.device, gate: Gate) -> dict[str, float]:
    """Largest error of float32 logits at two layers against transformers, prefill and decode, for each numerics."""
    helpers = cases()
    small = shrink(config, num_layers=min(2, config.num_layers))
    weights = random_weights(small, torch.float32, device)
    draw = torch.Generator().manual_seed(1)
    rows, forced = (
        [torch.randint(0, small.vocab_size, (n,), generator=draw).tolist() for n in lengths]
        for lengths in ((37, 1, 64), (3, 3, 3))
    )
    peer = helpers.transformers_twin(small, weights, attn_implementation="eager")
    want = list(helpers.transformers_logits(peer, rows, forced))
    del peer
    errors: dict[str, float] = {}
    for name in numerics:
        with serve(small, weights, name, tokens=[128], batches=[4], max_model_len=256) as llm:
            if not gate.require(not failed(llm), f"float32, {name}: {failed(llm)}"):
                errors[name] = math.inf
                continue
            with llm.prefill(*helpers.pad(rows, "left")) as batch:
                got = [batch.logits]
                for step in range(len(forced[0])):
                    got.append(llm.decode(batch, torch.tensor([line[step] for line in forced])).logits)
        worst = [
            float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
            for ours, theirs in zip(got, want, strict=True)
        ]
        errors[name] = max(math.inf if math.isnan(error) else error for error in worst)
        what = f"float32 logits at {small.num_layers} layers, {name}: error {errors[name]:.1e} against transformers"
        if gate.require(errors[name] <= FLOAT32_TOLERANCE, what):
            print(f"gate green: {what}", flush=True)
    return errors


def green_numerics(errors: dict[str, float]) -> list[str]:
    """Those that may be timed."""
    return [name for name, error in errors.items() if error <= FLOAT32_TOLERANCE]


def graph_equals_eager(manager: BucketManager, captured: Captured) -> bool:
    """Whether replay gives the bits that the function gives when it is called on the same static inputs."""
    with manager.family.turn():
        got = {name: tensor.clone() for name, tensor in manager.check_outputs(captured).items()}
        want = manager._outputs.select(captured.fn(**captured.inputs.views))
        return all(torch.equal(got[name], want[name]) for name in got)


# -- models and requests -----------------------------------------------------------------------------------------------


def serve(
    config: ModelConfig,
    weights: ModelWeights,
    numerics: str,
    tokens: Sequence[int],
    batches: Sequence[int],
    max_model_len: int,
    page_size: int = PAGE_SIZE,
    live: int = 0,
    loop: LoopKind = "host",
) -> LLM:
    """An LLM with these buckets, warmed up and checked; `live` is the tokens that requests hold at once."""
    dtype = weights.embed.dtype
    pages = max(-(-max_model_len // page_size), -(-live // page_size)) + max(batches) + 65
    made: BucketSet = parse(
        {
            "version": 1,
            "name": "benchmark",
            "numerics": numerics,
            "phases": {
                "prefill": {"axes": {"tokens": sorted(tokens), "requests": [8]}},
                "decode": {"axes": {"batch": sorted(batches)}},
            },
            "kv_cache": {
                "page_size": page_size,
                "memory": pages * PagedKVCache.page_bytes(config, page_size, dtype),
            },
        }
    )
    return LLM.from_weights(config, weights, made, max_model_len=max_model_len, loop=loop)


def failed(llm: LLM) -> str:
    """Buckets that warm-up's self-check turned down."""
    assert llm.report is not None, "serve warms up"
    return "; ".join(f"{bucket.name} {bucket.bucket}: {bucket.error}" for bucket in llm.report.failed)


def held(llm: LLM, batch: int, tokens: int, computed: int, params: SamplingParams) -> list[Request]:
    """Requests of random tokens that hold their pages, `computed` of the tokens in the cache already."""
    runner, draw = llm._runner, torch.Generator().manual_seed(2)
    requests = []
    for row in range(batch):
        ids = torch.randint(0, llm.config.vocab_size, (tokens,), generator=draw).tolist()
        request = Request(ids, params, seed=row, index=row, computed=computed)
        request.hold(runner.cache.allocate(runner.cache.pages_for(tokens)), runner.table_width)
        requests.append(request)
    return requests


def let_go(llm: LLM, requests: Iterable[Request]) -> None:
    for request in requests:
        llm._runner.cache.release(request.pages)


def fill_cache(llm: LLM) -> None:
    """Random K and V everywhere but in page 0, which stays zeros."""
    data = llm._runner.cache.data
    data.normal_(generator=torch.Generator(device=data.device).manual_seed(3))
    data[:, :, 0].zero_()


def captured_of(manager: BucketManager, **sizes: int) -> Captured:
    plan = manager.plan(**sizes)
    assert plan.bucket is not None and plan.bucket.as_dict() == sizes, f"{sizes} is a bucket"
    captured = manager.captured[plan.bucket]
    if captured.error is not None:
        raise RuntimeError(f"bucket {captured.bucket} is not used: {captured.error}")
    return captured


def cache_argument(model: Any) -> str:
    """The name of a transformers model's argument for the KV cache, which its versions spell differently."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def matmul_rows(
    config: ModelConfig, rows: Sequence[int], phase: str, rates: Rates, device: torch.device, gate: Gate
) -> list[Row]:
    """Each matrix of a model times so many rows: the linear of invariant numerics, and cuBLAS.

    Weights are taken in turn from copies that exceed the L2 cache together, all calls of a turn in one graph.
    """
    ops, found = kernels.ops(device), []
    for name, (columns, width, _) in matrices(config).items():
        if name == "head" and phase == "prefill":
            continue  # a few rows, as in decode
        copies = min(128, max(2, (160 << 20) // (2 * columns * width))) if device.type == "cuda" else 2
        weights = [torch.randn(columns, width, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        for count in rows:
            x = torch.randn(count, width, device=device, dtype=torch.bfloat16)
            turns = {
                "invariant": [lambda w=w, x=x: ops.linear(x, w, phase=phase) for w in weights],
                "cuBLAS": [lambda w=w, x=x: F.linear(x, w) for w in weights],
            }
            work = matmul_work(count, columns, width)
            row: Row = {"matrix": name, "columns": columns, "width": width, "rows": count, "phase": phase}
            row |= work.row(rates)
            want = x.float() @ weights[0].float().T
            green = True
            for kind, calls in turns.items():
                error = relative_error(torch.as_tensor(calls[0]()), want)
                green &= gate.require(error <= 1e-2, f"{kind} {name} x {count} rows: error {error:.1e}")
                times = milliseconds(together(calls, device), device, repeats=20, seconds=0.2)
                row[kind] = {"gpu_ms": round(statistics.median(times) / copies, 5), "error": error}
            if green:
                row["share_of_limit"] = round(row["limit_ms"] / row["invariant"]["gpu_ms"], 4)
                row["ratio_to_cublas"] = round(row["cuBLAS"]["gpu_ms"] / row["invariant"]["gpu_ms"], 3)
            found.append(row)
        del weights
    return found


# -- what is shown and kept --------------------------------------------------------------------------------------------


def parser(doc: str | None, peers: str = "quick") -> argparse.ArgumentParser:
    """The options that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--peers", choices=["none", "quick", "all"], default=peers, help="quick: those without a compile")
    made.add_argument("--device", default="cuda", help="cpu only tries the script; its figures mean nothing")
    made.add_argument("--out", help="folder of the JSON files; benchmarks/results/ if not given")
    return made


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]


def pairs(text: str) -> list[tuple[int, int]]:
    """`64x2048,...`"""
    return [(int(first), int(second)) for first, second in (part.split("x") for part in names(text))]


def cell(value: object, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns; None is a dash."""
    lines = [list(heads), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def show_matmuls(rows: Sequence[Row]) -> None:
    if rows:
        print("\nmatmuls, ms: the linear of invariant numerics, and cuBLAS")
        table(
            ("shape", "matrix", "rows", "limit", "invariant", "share", "cuBLAS", "cuBLAS / invariant"),
            [
                (
                    *(row[key] for key in ("shape", "matrix", "rows")),
                    cell(row["limit_ms"], 4),
                    cell(row["invariant"]["gpu_ms"], 4),
                    row.get("share_of_limit"),
                    cell(row["cuBLAS"]["gpu_ms"], 4),
                    row.get("ratio_to_cublas"),
                )
                for row in rows
            ],
        )


@dataclass
class Panel:
    """One picture: latency over batch or tokens, and the limit beside it."""

    title: str
    across: str
    lines: dict[str, list[tuple[float, float]]]
    limit: list[tuple[float, float]]


def plot(path: str, panels: Sequence[Panel]) -> None:
    """Draw the panels, two to a line, into a PNG file; none if nothing green was measured."""
    if not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(6.5 * across, 5 * down), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, points in panel.lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
        axis.plot(*zip(*sorted(panel.limit), strict=True), color="black", linestyle="--", label="limit")
        axis.set(title=panel.title, xlabel=panel.across, ylabel="ms", xscale="log", yscale="log")
        ticks = sorted({x for x, _ in panel.limit})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def release_memory(device: torch.device) -> None:
    """Give back what the last model used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options a result was measured with, peers and device too; of a path its last name."""
    return {name: _plain(value) for name, value in vars(args).items() if name not in ("out", "plot")}


def _plain(value: Any) -> Any:
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
        return Path(value).name
    return value


def save(name: str, result: dict[str, Any], args: argparse.Namespace) -> Path:
    """Write a result and the options it was measured with as JSON, into `benchmarks/results/` or the folder given."""
    folder = Path(args.out) if args.out else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    whole = {"environment": environment(), "arguments": settings(args), **result}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return path
