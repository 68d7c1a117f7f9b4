"""The doctor on a GPU: opposite verdicts for opposite workloads, predictions that hold, blockers and mixers by line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bucketgraph.doctor import Diagnosis, blockers, diagnose
from bucketgraph.doctor.models import Step, of_model

CUDA = torch.device("cuda", 0)
SMALL = 60  # turns of `many`, each of several kernels


def line_of(fn: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    (place,) = [number for number, line in enumerate(lines) if text in line]
    return first + place


def many(x: Tensor, w: Tensor) -> Tensor:
    """Small kernels of several kinds: the GPU waits for the host."""
    for _ in range(SMALL):
        x = F.layer_norm(F.gelu(x @ w) + x, x.shape[1:])
    return x


def large(a: Tensor) -> Tensor:
    """Few kernels of about a millisecond: the host is ahead."""
    for _ in range(8):
        a = a @ a
    return a


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x * 1.01 + 0.1
        scale = x.abs().max().item()  # the line to find
        return x / scale


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.norm(hidden)  # the line to find


@pytest.fixture(scope="module")
def launch_bound() -> Diagnosis:
    x, w = torch.randn(32, 256, device=CUDA), torch.randn(256, 256, device=CUDA) / 16
    return diagnose(lambda: (many, (x, w)), name="many")


def test_many_small_kernels_are_launch_bound_and_the_gain_is_predicted(launch_bound: Diagnosis) -> None:
    made = launch_bound
    assert made.verdict == "launch-bound" and made.findings == (), made.table()
    assert made.prediction is not None and made.prediction.method == "queued" and made.measured_gain is not None
    assert made.measured_gain > 1.5 and made.prediction.gain == pytest.approx(made.measured_gain, rel=0.2), made.table()
    assert made.prediction.break_even is not None and made.prediction.break_even < 1000


def test_the_profile_shows_each_launch_and_what_repeats(launch_bound: Diagnosis) -> None:
    seen = launch_bound.launches
    assert seen is not None and seen.busy_share is not None and seen.gaps is not None
    assert seen.launches >= 4 * SMALL and seen.nodes >= 4 * SMALL and seen.streams == 1
    assert seen.launches <= seen.nodes, "no launch is counted twice"
    assert seen.busy_share < 0.8 and seen.launch_us > 0.5 and seen.gaps.p99 >= seen.gaps.p50 > 0
    assert max(layer.times for layer in seen.layers) >= SMALL - 2, seen.layers
    assert sum(cost.count for cost in seen.api if "Launch" in cost.name) == seen.launches
    page = launch_bound.html()
    assert "Timeline of a call" in page and page.count("<rect") > 50


def test_large_kernels_are_compute_bound_and_no_graph_is_recommended() -> None:
    a = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) / 90
    made = diagnose(lambda: large(a), name="large")
    assert made.verdict == "compute-bound" and "Graphs will not help" in made.summary, made.table()
    assert made.prediction is not None and made.measured_gain is not None
    assert made.prediction.gain == pytest.approx(made.measured_gain, rel=0.1) and made.prediction.gain < 1.1
    # A few profiled calls find the GPU at higher clocks than calls in a row, which run into its power limit.
    assert made.launches is not None and made.launches.busy_share is not None and made.launches.busy_share > 0.8


def test_an_item_in_a_forward_is_the_blocker_by_line() -> None:
    made = diagnose(lambda: (Reads(), torch.ones(4, 64, device=CUDA)), name="reads")
    assert made.verdict == "sync-bound", made.table()
    assert made.capture is not None and made.capture.error is not None
    (finding,) = [finding for finding in made.findings if finding.severity == "blocks"]
    assert finding.op == ".item()" and finding.place is not None and Path(finding.place.file) == Path(__file__)
    assert finding.place.line == line_of(Reads, "the line to find")
    assert made.prediction is not None and made.prediction.method == "profiled" and made.prediction.gain > 1.5
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0, "the failed capture broke nothing"


@pytest.mark.parametrize(
    ("kinds", "call"),
    [
        ({"fetch"}, lambda x: x.cpu()),
        ({"shape"}, lambda x: torch.nonzero(x)),
        ({"shape"}, lambda x: x[x > 0]),
        ({"branch"}, lambda x: x + 1 if bool(x.any()) else x),
        ({"host_data"}, lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=CUDA)),
        ({"upload"}, lambda x: x + torch.full((3,), 2.0, device="cpu").to(CUDA)),
        ({"upload_pinned"}, lambda x: x + torch.zeros(3, pin_memory=True).to(CUDA, non_blocking=True)),
        ({"sync"}, lambda x: torch.cuda.current_stream().synchronize()),
        (set(), lambda x: torch.where(x > 0, x, -x).softmax(-1) + torch.arange(3, device=CUDA)),
    ],
)
def test_waits_and_copies_are_seen_by_kind(kinds: set[str], call: Callable[[Tensor], object]) -> None:
    x = torch.tensor([1.0, -1.0, 2.0], device=CUDA)
    call(x)
    found = [finding for finding in blockers.watch(lambda: call(x), CUDA).findings() if finding.kind != "host_tensor"]
    assert {finding.kind for finding in found} == kinds, found
    assert all(finding.place is not None and Path(finding.place.file) == Path(__file__) for finding in found)


def test_batch_norm_is_named_by_line() -> None:
    module = Normed().eval().to(CUDA)
    made = diagnose(lambda: (module, torch.randn(6, 64, device=CUDA)), name="normed", with_capture=False)
    (finding,) = made.findings
    assert (finding.kind, finding.op) == ("mixes", "batch norm") and "from 6 to 12" in finding.detail
    assert finding.place is not None and finding.place.line == line_of(Normed, "the line to find")
    assert made.verdict == "launch-bound" and "Padding changes its results" in made.summary


def test_a_models_decode_step_has_no_blockers_and_is_captured() -> None:
    made = diagnose(of_model("random:smollm2-135m:2", Step(context=64), device=CUDA))
    assert made.verdict == "launch-bound" and made.capture is not None and made.capture.error is None, made.table()
    assert [finding for finding in made.findings if finding.severity != "suspect"] == []
