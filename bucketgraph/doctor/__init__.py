"""`bucketgraph doctor`: what a workload does before any graph, what graphs would gain, and what stands in their way.

    workload ──watch──▶ findings ─┐
        │   ──time────▶ times ────┼──predict──▶ verdict ──capture──▶ what came ──▶ table, JSON, page
        └─────profile─▶ trace ────┘

Rules: analysis works on plain records (`trace.py`), so it is tested without a GPU; nothing is captured before the
prediction stands; a machine without a GPU times nothing and still names blockers and wrong padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketgraph.doctor.examine import diagnose
    from bucketgraph.doctor.record import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]


def __getattr__(name: str) -> Any:  # the command line imports this package for its options, and must not wait for torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bucketgraph.doctor import examine, record

    return examine.diagnose if name == "diagnose" else getattr(record, name)
