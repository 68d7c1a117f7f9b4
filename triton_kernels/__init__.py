"""Kernels of the forward pass, each with a twin in plain torch (`reference.py`) of the same name and signature.

Rules: importing this package imports no triton, and neither does `reference`. Nothing here knows of bucketgraph.
Lengths, tables and slots are device data; a wrapper reads only shapes and dtypes on the host.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def ops(device: torch.device | str) -> ModuleType:
    """The module that runs the ops on `device`: the Triton kernels on CUDA, the plain-torch twins anywhere else."""
    kind = device if isinstance(device, str) else device.type
    return importlib.import_module(f"{__name__}.{'triton_ops' if kind.split(':')[0] == 'cuda' else 'reference'}")
