"""Runs the kernels in Triton's interpreter: a lane and a process of its own, `pytest tests/interp`.

Triton reads TRITON_INTERPRET when it is imported, its own library functions included; afterwards it is too late.
"""

import os
import sys
from pathlib import Path

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit("tests/interp needs its own process: triton was imported already; run `pytest tests/interp`", 2)
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kernel_cases import nan_memory  # noqa: F401

# Small matrices: worker threads cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
