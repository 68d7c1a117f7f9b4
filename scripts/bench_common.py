"""What every benchmark shares: where it ran, what the hardware allows, and how results are kept.

Rules: a figure is kept with GPU, versions and commit; limits are measured in the same run as what is compared with
them; times are medians with the spread beside them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import bucketgraph

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """GPU, driver, versions and commit."""
    versions: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bucketgraph": bucketgraph.__version__,
        "commit": commit(),
    }
    try:
        import transformers

        versions["transformers"] = transformers.__version__
    except ImportError:
        pass
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


def copy_rate(gib: int = 4, repeats: int = 20) -> float:
    """Device-to-device copy, bytes read plus bytes written, in bytes a second: the limit of what streams weights."""
    source = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(2e3 * source.numel() / statistics.median(times))


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, p99, largest and count."""
    ordered = sorted(milliseconds)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
        "max": round(ordered[-1], 4),
        "n": len(ordered),
    }


def save(name: str, result: dict[str, Any], out: str | None) -> Path:
    """Write a result as JSON, into `benchmarks/results/` or the folder given."""
    folder = Path(out) if out else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **result}, indent=2) + "\n", encoding="utf-8")
    return path
