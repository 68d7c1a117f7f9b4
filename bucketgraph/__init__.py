"""bucketgraph: static-shape buckets over CUDA graphs for PyTorch inference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bucketgraph.config import BucketSet, load

if TYPE_CHECKING:
    from bucketgraph.llm.api import LLM
    from bucketgraph.llm.sampling import SamplingParams
    from bucketgraph.manager import BucketManager
    from bucketgraph.reporting.build import report

__all__ = ["LLM", "BucketManager", "BucketSet", "SamplingParams", "load", "report"]
__version__ = "0.1.0"

# What needs torch is imported when it is first asked for, so that reading a bucket set does not wait for it.
_LAZY = {
    "BucketManager": "bucketgraph.manager",
    "LLM": "bucketgraph.llm.api",
    "SamplingParams": "bucketgraph.llm.sampling",
    "report": "bucketgraph.reporting.build",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
