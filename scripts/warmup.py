#!/usr/bin/env python3
"""Warm up a bucket set at service start: `scripts/warmup.py SET [--model P] [--report R.json] [--ready-file F]`.

Exit status 0 only after every bucket was captured, replayed and checked against unpadded eager; 1 names the buckets
that failed. What was compiled stays in Triton's cache for the service's own processes.
"""

import sys

from bucketgraph.cli import main

sys.exit(main(["warmup", *sys.argv[1:]]))
