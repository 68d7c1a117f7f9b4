"""The options of `bucketgraph plan`. Imports nothing heavy: the command line builds them for every command."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` to its parser."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="CSV, JSON Lines or saved sizes; plain or gzip")
    parser.add_argument("--column", help="the column of lengths, or two: BATCH,LENGTH (default: a known name)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan as a bucket set")
    parser.add_argument(
        "--like", metavar="SET", help="the set that FILE is like (default: llm, or minilm for two axes)"
    )
    parser.add_argument("--axis", help="the axis, such as tokens, decode.batch or batch,tokens (default: by the set)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the trade-off (needs matplotlib)")

    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--align", help="sizes are multiples of this, or of two: 1,16 (default: 16, for a batch 1)")
    sizes.add_argument("--largest", type=int, metavar="N", help="no bucket is larger, and this is one")
    sizes.add_argument(
        "--over",
        choices=["pieces", "eager", "truncate"],
        help="requests over --largest run in pieces (default for prefill), eagerly (default), or are cut off",
    )
    sizes.add_argument(
        "--packed", type=int, metavar="TOKENS", help="plan for launches packed with prompts up to TOKENS"
    )
    sizes.add_argument("--slots", type=int, help="most prompts in a packed launch (default: 8)")
    sizes.add_argument("--uncut", action="store_true", help="a prompt that does not fit waits, and is not cut")

    costs = parser.add_argument_group("costs")
    costs.add_argument("--cost", choices=["linear", "roofline"], help="tokens (default), or a model's roofline in ms")
    costs.add_argument("--costs", type=Path, metavar="FILE", help='measured: {"64": {"ms": 1, "mib": 2, "seconds": 3}}')
    costs.add_argument("--calibrate", action="store_true", help="measure --model on this device")
    costs.add_argument("--save-costs", type=Path, metavar="FILE", help="keep what --calibrate measured, for --costs")
    costs.add_argument("--model", help="of the roofline: a preset or folder; of --calibrate: as for warmup")
    costs.add_argument("--device", help="of --calibrate: cuda, cpu; a GPU if there is one")
    costs.add_argument("--dtype", default="auto", help="of --calibrate: auto, float32, float16 or bfloat16")
    costs.add_argument("--bandwidth", type=float, metavar="GB/S", help="of the roofline (default: 4800, an H200)")
    costs.add_argument("--compute", type=float, metavar="TFLOP/S", help="of the roofline (default: 989, an H200)")
    costs.add_argument("--bucket-mib", type=float, metavar="MIB", help="memory of one bucket, where costs do not say")
    costs.add_argument("--bucket-seconds", type=float, metavar="S", help="start-up of one bucket, likewise")

    limits = parser.add_argument_group("limits and prices (unit: tokens or ms, as the cost, per 1,000 launches)")
    limits.add_argument("--buckets", type=int, metavar="K", help="at most so many (default: 16; 128 with other limits)")
    limits.add_argument("--memory", type=float, metavar="MIB", help="at most so much memory in all buckets")
    limits.add_argument("--startup-seconds", type=float, metavar="S", help="at most so long to start")
    limits.add_argument("--price-memory", type=float, default=0.0, metavar="P", help="what one MiB costs")
    limits.add_argument(
        "--price-startup", type=float, default=0.0, metavar="P", help="what one second of start-up costs"
    )
