"""The options of `bucketgraph doctor`. Imports nothing heavy: the command line builds them for every command."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor` to its parser."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODULE:FUNC",
        help="called without arguments: one call of the workload, or it returns (fn, inputs) and fn(inputs) is one;"
        " with --set a function of the set's inputs by keyword, as BucketManager takes it",
    )
    parser.add_argument("--model", help="a local folder, a .gguf file, package:NAME/file, or random:PRESET[:LAYERS]")
    parser.add_argument("--set", metavar="SET", help="a bucket set of one function: its inputs, and padding is checked")
    parser.add_argument("--bucket", help="of --set: 8,128 or batch=8,tokens=128 (default: the largest)")

    work = parser.add_argument_group("what a language model runs (default: decode, batch 1, context 512)")
    work.add_argument("--prefill", type=int, metavar="N", help="one prompt of N tokens")
    work.add_argument("--batch", type=int, metavar="N", help="decode: a token for each of N requests")
    work.add_argument("--context", type=int, metavar="N", help="decode: tokens that each request has in the KV cache")

    parser.add_argument("--device", help="cuda, cuda:1, cpu; a GPU if there is one")
    parser.add_argument("--dtype", default="auto", help="of a language model: auto, float32, float16 or bfloat16")
    parser.add_argument("--no-capture", action="store_true", help="predict only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the diagnosis as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as one HTML page with a timeline")
