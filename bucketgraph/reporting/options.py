"""The options of `bucketgraph report`. Imports nothing heavy: the command line builds them for every command."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report` to its parser."""
    parser.add_argument("stats", type=Path, metavar="STATS", help="what save_stats of a manager or an LLM wrote")
    parser.add_argument(
        "--trace", type=Path, help="what the buckets were planned for, or earlier STATS: to compare with"
    )
    parser.add_argument("--column", help="the trace's column of lengths, or two: BATCH,LENGTH (default: a known name)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page with plots")
    parser.add_argument("--propose", type=Path, metavar="FILE", help="write the bucket set with the proposed sizes")
