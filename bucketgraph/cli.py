"""The command line: `bucketgraph warmup | generate | embed | inspect | doctor | plan | report | schema | demo`.

Rules: results go to standard output, progress and errors to standard error; an error of ours is one line and exit
status 2; `warmup` exits 1 when a bucket failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketgraph.config import BucketSet, load, schema
from bucketgraph.doctor import options as doctor_options
from bucketgraph.errors import BucketGraphError, ConfigError
from bucketgraph.planner import options as planner_options
from bucketgraph.reporting import options as report_options

if TYPE_CHECKING:
    from rich.console import Console

    from bucketgraph.llm.api import LLM
    from bucketgraph.warmup import WarmupReport

PROMPTS = ["The capital of France is", "Write one sentence about the sea.", "What is 2 + 2?"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except BucketGraphError as error:
        print(f"bucketgraph: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bucketgraph", description="Static-shape buckets over CUDA graphs.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    def model_options(made: argparse.ArgumentParser, buckets: str | None) -> None:
        made.add_argument("--model", help="a local folder, a .gguf file, package:NAME/file, or random:PRESET")
        made.add_argument("--device", help="cuda, cuda:1, cpu; a GPU if there is one")
        if buckets is not None:
            made.add_argument("--buckets", default=buckets, help=f"a bucket set (default: {buckets})")

    def llm_options(made: argparse.ArgumentParser) -> None:
        made.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
        made.add_argument("--max-model-len", type=int, help="most tokens of prompt and output together")

    warm = command("warmup", _warmup, "Capture and check every bucket of a set; exit 0 only if all are good.")
    warm.add_argument("set", help="a YAML file, or the name of a ready set")
    model_options(warm, None)
    llm_options(warm)
    warm.add_argument("--report", type=Path, help="write seconds, MiB, executable and error of each bucket as JSON")
    warm.add_argument("--ready-file", type=Path, help="made when everything is warm; removed at the start")

    generate = command("generate", _generate, "Continue prompts with a language model.")
    generate.add_argument("prompts", nargs="+")
    model_options(generate, "llm")
    llm_options(generate)
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    generate.add_argument(
        "--loop", choices=["host", "device"], default="host", help="device: the GPU decodes without the CPU"
    )
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt")

    embed = command("embed", _embed, "Embed texts with a sentence encoder; one JSON list per line.")
    embed.add_argument("texts", nargs="+")
    model_options(embed, "minilm")

    inspect = command("inspect", _inspect, "Show what a bucket set holds, or the CUDA graph of one bucket.")
    inspect.add_argument("set", help="a YAML file, or the name of a ready set")
    inspect.add_argument(
        "--graph", metavar="BUCKET", help="8, batch=8,tokens=128 or decode:8: capture it, show its nodes"
    )
    inspect.add_argument("--dot", type=Path, help="write the graph for Graphviz")
    model_options(inspect, None)
    llm_options(inspect)

    doctor_options.add(
        command("doctor", _doctor, "Say whether CUDA graphs would help a workload, how much, and what is in the way.")
    )

    planner_options.add(command("plan", _plan, "Choose bucket sizes for traces of request lengths."))

    report_options.add(
        command("report", _report, "Show what buckets did for a service, and which sizes would do better.")
    )

    command("schema", _schema, "Print the JSON Schema of a bucket set.")

    demo = command("demo", _demo, "Generate with the embedded SmolLM2-135M on whatever this machine has.")
    demo.add_argument("--device", help="cuda or cpu; a GPU if there is one")
    demo.add_argument("--max-tokens", type=int, default=48)
    return parser


def _warmup(args: argparse.Namespace) -> int:
    from bucketgraph import tables

    if args.ready_file is not None:
        args.ready_file.unlink(missing_ok=True)
    for target in (args.report, args.ready_file):
        if target is not None and not target.absolute().parent.is_dir():
            raise ConfigError("no such folder", given=str(target.absolute().parent))
    bucket_set = load(args.set)
    model = args.model or bucket_set.model
    if model is None:
        raise ConfigError(f"{bucket_set.source} names no model", hint="give --model")
    console = _console(sys.stderr)
    with tables.progress(console) as on_progress:
        report = _warm(bucket_set, model, args, on_progress)
    _console(sys.stdout).print(tables.warmup_table(report))
    if args.report is not None:
        report.save(args.report)
    if not report.ok:
        names = "; ".join(f"{bucket.name} {bucket.bucket}: {bucket.error}" for bucket in report.failed)
        print(f"bucketgraph: {len(report.failed)} of {len(report.buckets)} buckets failed: {names}", file=sys.stderr)
        return 1
    if args.ready_file is not None:  # appears whole or not at all
        partial = args.ready_file.with_name(args.ready_file.name + ".partial")
        partial.write_text(json.dumps({"ready": True, "set": bucket_set.name, "buckets": len(report.buckets)}) + "\n")
        os.replace(partial, args.ready_file)
    return 0


def _warm(bucket_set: BucketSet, model: str, args: argparse.Namespace, on_progress: Any) -> WarmupReport:
    if bucket_set.is_llm:
        from bucketgraph.llm.api import LLM

        llm = LLM(
            model, bucket_set, dtype=args.dtype, device=args.device, max_model_len=args.max_model_len, warmup=False
        )
        return llm.warmup(on_progress)
    from bucketgraph.manager import BucketManager

    return BucketManager(_callable(model, args.device), bucket_set, device=args.device).warmup(on_progress)


def _callable(model: str, device: str | None) -> Any:
    """`MODULE:NAME` is imported; anything else is an encoder's folder."""
    module, colon, name = model.partition(":")
    if colon and module not in ("package", "random") and not Path(model).exists():
        sys.path.insert(0, os.getcwd())
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot import {model}", given=str(error), expected="MODULE:NAME") from error
    from bucketgraph.encoder import load_encoder
    from bucketgraph.llm.model_config import resolve_model

    return load_encoder(resolve_model(model), device)


def _generate(args: argparse.Namespace) -> int:
    from bucketgraph.llm.sampling import SamplingParams
    from bucketgraph.llm.weights import DEFAULT_MODEL

    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed, max_tokens=args.max_tokens
    )
    model = args.model or DEFAULT_MODEL
    if model.startswith("random:"):
        raise ConfigError("generate takes text, and random weights have no tokenizer", given=model)
    llm = _load_llm(model, args.buckets, args)
    prompts: list[Any] = [_chat_ids(llm, text) if args.chat else text for text in args.prompts]
    results = llm.generate(prompts, params, loop=args.loop)
    for text, result in zip(args.prompts, results, strict=True):
        done = result.outputs[0]
        if args.json:
            row = {"prompt": text, "text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(("" if args.chat else text) + done.text)
    return 0


def _embed(args: argparse.Namespace) -> int:
    from bucketgraph import tables
    from bucketgraph.encoder import Encoder

    with tables.progress(_console(sys.stderr)) as on_progress:
        encoder = Encoder(args.model, args.buckets, device=args.device, on_progress=on_progress)
    for row in encoder.embed(args.texts).tolist():
        print(json.dumps([round(value, 7) for value in row]))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from bucketgraph import tables

    if args.graph is not None:
        from bucketgraph.cuda import command

        return command.run(args, _callable)
    if any(given is not None for given in (args.dot, args.model, args.device, args.max_model_len)):
        raise ConfigError("--dot and the options of a model belong to --graph")
    console = _console(sys.stdout)
    for table in tables.set_tables(load(args.set)):
        console.print(table)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from bucketgraph.doctor import command

    return command.run(args, _callable)


def _plan(args: argparse.Namespace) -> int:
    from bucketgraph.planner import command

    return command.run(args)


def _report(args: argparse.Namespace) -> int:
    from bucketgraph.reporting import command

    return command.run(args)


def _schema(args: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from bucketgraph import tables
    from bucketgraph.llm.sampling import SamplingParams
    from bucketgraph.llm.weights import DEFAULT_MODEL

    console = _console(sys.stdout)
    args.dtype, args.max_model_len = "auto", None
    started = time.perf_counter()
    llm = _load_llm(DEFAULT_MODEL, "smollm2", args)
    assert llm.report is not None, "loading warms up"
    ready = time.perf_counter() - started
    where = f"{llm.device} in {str(llm.dtype).removeprefix('torch.')}"
    console.print(f"SmolLM2-135M-Instruct on {where}, ready in {ready:.1f} s ({llm.note})")
    started = time.perf_counter()
    prompts: list[Any] = [PROMPTS[0], *(_chat_ids(llm, text) for text in PROMPTS[1:])]
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    seconds = time.perf_counter() - started
    for text, result in zip(PROMPTS, results, strict=True):
        console.print(f"[bold]{text}[/] {result.outputs[0].text.strip()}", highlight=False)
    count = sum(len(result.outputs[0].token_ids) for result in results)
    console.print(f"{count} tokens in {seconds:.2f} s")
    console.print(tables.stats_table(llm.stats().values()))
    return 0 if llm.report.ok else 1


def _load_llm(model: str, buckets: str, args: argparse.Namespace) -> LLM:
    from bucketgraph import tables
    from bucketgraph.llm.api import LLM

    with tables.progress(_console(sys.stderr)) as on_progress:
        return LLM(
            model,
            buckets,
            dtype=args.dtype,
            device=args.device,
            max_model_len=args.max_model_len,
            on_progress=on_progress,
        )


def _chat_ids(llm: LLM, text: str) -> dict[str, Any]:
    if llm.tokenizer is None:
        raise ConfigError("--chat needs a model with a tokenizer")
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return {"prompt": text, "prompt_token_ids": llm.tokenizer.encode(prompt, add_special_tokens=False)}


def _console(stream: Any) -> Console:
    from rich.console import Console

    # A pipe or a log has no width: tables must not be folded to 80 columns there.
    return Console(file=stream, width=None if stream.isatty() else 200, soft_wrap=False)


if __name__ == "__main__":
    sys.exit(main())
