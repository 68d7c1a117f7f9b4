"""The GPU lane, `pytest tests/gpu`: collected where CUDA works, and said to be left out where it does not. No skips."""

import os

import pytest
import torch
from kernel_cases import nan_memory  # noqa: F401

AVAILABLE = torch.cuda.is_available()
collect_ignore_glob = [] if AVAILABLE else ["test_*.py"]

if AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1":
    pytest.exit("tests/gpu compiles for the GPU, and TRITON_INTERPRET=1 is set: run it in a process of its own", 2)


def pytest_report_header() -> str:
    if not AVAILABLE:
        return "tests/gpu: NOT collected, torch.cuda.is_available() is False"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"tests/gpu: {name}, sm_{capability[0]}{capability[1]}, torch {torch.__version__}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not AVAILABLE:
        terminalreporter.write_line("tests/gpu was NOT run: no CUDA device", yellow=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
