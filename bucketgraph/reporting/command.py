"""`bucketgraph report`: its options to a report, and the report to a table and files.

Rules: all of the command line is checked before a file is read, all of the work is done before a file is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bucketgraph.errors import ConfigError
from bucketgraph.planner import document
from bucketgraph.reporting import table
from bucketgraph.reporting.build import report


def run(args: argparse.Namespace) -> int:
    """Report, write what was asked for, and print. Raises ConfigError with nothing written."""
    outputs = [path for path in (args.json, args.html, args.propose) if path is not None]
    for path in outputs:
        document.require_folder(path)
    places = [path.resolve() for path in (args.stats, args.trace, *outputs) if path is not None]
    if twice := [path for path in outputs if places.count(path.resolve()) > 1]:
        raise ConfigError("a file is named twice", given=str(twice[0]), expected="one file for each output")
    if args.column is not None and args.trace is None:
        raise ConfigError("--column belongs to --trace")
    columns = None if args.column is None else [name.strip() for name in args.column.split(",")]
    made = report(args.stats, args.trace, columns)
    files: list[tuple[Path, str]] = []
    if args.json is not None:
        files.append((args.json, made.json()))
    if args.html is not None:
        files.append((args.html, made.html()))
    if args.propose is not None:
        files.append((args.propose, made.proposed_set(args.propose.stem)))
    for path, whole in files:
        document.write(path, whole)
    # A pipe or a log has no width: tables must not be folded to 80 columns there.
    table.show(made, Console(width=None if sys.stdout.isatty() else 200))
    return 0
