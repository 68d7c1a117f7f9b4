#!/usr/bin/env python3
"""Draw the committed results of `bench_decode.py` and `bench_prefill.py`, as the README shows them: no GPU needed.

    scripts/plot_results.py [--results DIR] [--out DIR]

Raises FileNotFoundError where a result is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_common as bench
import bench_decode
import bench_prefill
from bench_common import Row

DECODE = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "smollm2-135m")
PREFILL = ("llama-3.2-1b", "llama-3.1-8b")


def rows(folder: Path, what: str, names: Sequence[str]) -> list[Row]:
    texts = [(folder / f"{what}_{name}.json").read_text(encoding="utf-8") for name in names]
    return [row for text in texts for row in json.loads(text)["rows"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=bench.RESULTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "figures")
    args = parser.parse_args(argv)
    bench.plot(str(args.out / "decode.png"), bench_decode.panels(rows(args.results, "decode", DECODE)))
    prompts, attention = rows(args.results, "prefill", PREFILL), rows(args.results, "prefill", ["attention"])
    bench.plot(str(args.out / "prefill.png"), bench_prefill.panels(attention, prompts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
