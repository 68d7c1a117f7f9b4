"""For every lane: steady property tests, and GPU tests only where they can run.

The watchdog over each test is pytest's own, set in pyproject.toml.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small tensors: sharing their work among threads costs more than it saves, and much where cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped where they cannot run: without CUDA, and in a process whose kernels are interpreted."""
    gpu = [item for item in items if TESTS / "gpu" in item.path.parents or item.get_closest_marker("gpu")]
    if not gpu:
        return  # and torch is not imported for nothing
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and TRITON_INTERPRET unset"))
