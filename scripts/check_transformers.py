#!/usr/bin/env python3
"""Greedy tokens against transformers' float32, token for token: `scripts/check_transformers.py [--json OUT]`.

Every prompt is continued in five ways: all in one batch, one by one, with buckets so small that prompts are chunked and
decode batches split, and as padded batches, left and right. Exit status 1 names the first difference: the prompt, the
position, and how far apart the two largest logits are on both sides. Differences that are float ties are counted apart
from others, and count.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from llm_cases import TIE, buckets, padded_greedy, prompts, transformers_greedy, transformers_model  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bucketgraph import LLM, SamplingParams  # noqa: E402
from bucketgraph.config import load  # noqa: E402
from bucketgraph.llm.model_config import DEFAULT_MODEL, load_config  # noqa: E402
from bucketgraph.llm.tokenizer import Tokenizer  # noqa: E402
from bucketgraph.llm.weights import load_weights  # noqa: E402

Ids = list[list[int]]


def main() -> int:
    args, commit = _arguments(), _commit()
    console = Console(width=None if sys.stdout.isatty() else 160)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer = Tokenizer.from_path(args.model)
    rows = prompts(tokenizer, args.prompts)

    started = time.perf_counter()
    model = transformers_model(args.model, str(device), attn_implementation="eager")
    want, gaps = transformers_greedy(model, rows, args.tokens)
    alone = range(0, len(rows), max(1, len(rows) // 8))  # the reference's own batching is checked on these
    single, _ = transformers_greedy(model, [rows[row] for row in alone], args.tokens, batch=1)
    batched = [want[row] for row in alone]
    del model
    console.print(
        f"transformers: {len(rows)} prompts of {min(map(len, rows))} to {max(map(len, rows))} tokens,"
        f" {args.tokens} tokens each, {time.perf_counter() - started:.0f} s; {len(single)} of them alone: "
        + ("the same" if single == batched else "DIFFERENT, so its batches are no reference"),
        highlight=False,
    )

    config = load_config(args.model)
    weights = load_weights(args.model, config, torch.float32, device)
    ready = LLM.from_weights(config, weights, load("smollm2"), tokenizer=tokenizer, max_model_len=1024)
    small_set = buckets(tokens=[16, 32], batch=[1, 3, 8], requests=[3])
    small = LLM.from_weights(config, weights, small_set, tokenizer=tokenizer, max_model_len=1024)
    results = {
        name: _compare(ready, rows, want, gaps, run) for name, run in _ways(ready, small, rows, args.tokens).items()
    }
    console.print(_table(results))
    report = {
        "ok": single == batched and all(result["equal_prompts"] == len(rows) for result in results.values()),
        "model": args.model,
        "prompts": len(rows),
        "tokens": args.tokens,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "reference": f"transformers, float32, eager attention, {len(single)} prompts also unbatched",
        "reference_batched_equals_unbatched": single == batched,
        "smallest_gap": min(min(line) for line in gaps),
        "versions": _versions(),
        "commit": commit,
        "ways": results,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, result in results.items():
        for first in result["mismatches"][:1]:
            console.print(f"first difference, {name}: {first}", highlight=False)
    return 0 if report["ok"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare greedy tokens with transformers.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, a .gguf file or package:NAME/file")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", help="cuda or cpu; a GPU if there is one")
    parser.add_argument("--dtype", default="float32", choices=["float32"], help="the dtype that the claim is about")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


def _ways(ready: LLM, small: LLM, rows: Ids, count: int) -> dict[str, Callable[[], Ids]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)

    def generate(llm: LLM, some: Ids) -> Ids:
        return [result.outputs[0].token_ids for result in llm.generate(some, greedy)]

    return {
        "one batch": lambda: generate(ready, rows),
        "one by one": lambda: [generate(ready, [row])[0] for row in rows],
        "small buckets": lambda: generate(small, rows),
        "padded left": lambda: padded_greedy(ready, rows, count, "left"),
        "padded right": lambda: padded_greedy(ready, rows, count, "right"),
    }


def _compare(llm: LLM, rows: Ids, want: Ids, gaps: list[list[float]], run: Callable[[], Ids]) -> dict[str, Any]:
    """Each prompt's first difference, if any; what follows it follows from it."""
    started = time.perf_counter()
    got = run()
    seconds = time.perf_counter() - started
    mismatches = []
    for index, (row, ours, theirs) in enumerate(zip(rows, got, want, strict=True)):
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        with llm.prefill(torch.tensor([[*row, *theirs[:at]]])) as batch:
            own = batch.logits[0].float().topk(2).values.tolist()
        gap = {"ours": own[0] - own[1], "transformers": gaps[index][at]}
        tokens = {"ours": ours[at], "transformers": theirs[at]}
        tie = min(gap.values()) < TIE
        mismatches.append(
            {"prompt": index, "length": len(row), "position": at, "token": tokens, "gap": gap, "tie": tie}
        )
    return {
        "equal_prompts": len(rows) - len(mismatches),
        "ties": sum(item["tie"] for item in mismatches),
        "seconds": round(seconds, 1),
        "mismatches": mismatches,
    }


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Greedy tokens equal to transformers'", title_justify="left", header_style="bold")
    for column in ("way", "equal prompts", "different", "of these float ties", "seconds"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, result in results.items():
        different = len(result["mismatches"])
        table.add_row(
            name, str(result["equal_prompts"]), str(different), str(result["ties"]), f"{result['seconds']:.1f}"
        )
    return table


def _versions() -> dict[str, str]:
    import transformers

    import bucketgraph

    return {
        "bucketgraph": bucketgraph.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "bucketgraph", "triton_kernels")
    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
