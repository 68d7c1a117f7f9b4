"""For every lane: steady property tests, and no lane run in a process that is wrong for it. The watchdog over each test
is pytest's own, set in pyproject.toml.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

try:
    from hypothesis import settings
except ImportError:  # then the tests that use it skip themselves
    pass
else:
    # Small or busy machines are slow at times: no deadline. The examples are the same in every run.
    settings.register_profile("steady", deadline=None, derandomize=True)
    settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In one process Triton is either interpreted or compiled: a lane in the wrong one is skipped, not run wrongly."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    cuda: bool | None = None
    for item in items:
        if TESTS / "interp" in item.path.parents and not interpreted:
            item.add_marker(pytest.mark.skip(reason="the interp lane needs TRITON_INTERPRET=1"))
        elif TESTS / "gpu" in item.path.parents or item.get_closest_marker("gpu"):
            if cuda is None:
                import torch  # here, so that lanes without a GPU test do not pay for it

                cuda = torch.cuda.is_available()
            if interpreted or not cuda:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and TRITON_INTERPRET unset"))
