"""What blocks a capture and what padding changes, by operation and line, on a CPU: as if every tensor were on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bucketgraph.config import BucketSet, parse
from bucketgraph.doctor import Diagnosis, Finding, blockers, diagnose, padding
from bucketgraph.doctor.places import Place
from bucketgraph.errors import ConfigError, InputError

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(2, 3)


def line_of(fn: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    (place,) = [number for number, line in enumerate(lines) if text in line]
    return first + place


def found(call: Callable[[], object], kind: str | None = None) -> list[Finding]:
    findings = blockers.watch(call, CPU).findings()
    return [finding for finding in findings if kind is None or finding.kind == kind]


class Halved(nn.Module):
    """Reads a value in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()  # the line to find
        return x / scale


# -- blockers ----------------------------------------------------------------------------------------------------------


def test_an_item_in_a_forward_is_named_with_its_line() -> None:
    module = Halved()
    (finding,) = found(lambda: module(X))
    assert (finding.kind, finding.severity, finding.op) == ("read", "blocks", ".item()")
    assert isinstance(finding.place, Place) and finding.place.file == __file__ and finding.place.function == "forward"
    assert finding.place.line == line_of(Halved, "the line to find") and "x.abs().max().item()" in finding.place.code


def test_a_branch_on_a_value_is_told_from_a_read() -> None:
    def statement() -> Tensor:
        if X.sum() > 0:
            return X + 1
        return X

    def expression() -> Tensor:
        return X + 1 if bool((X > 0).any()) else X

    for fn in (statement, expression):
        (finding,) = found(fn)
        assert finding.kind == "branch" and finding.place is not None and " if " in f" {finding.place.code}"


@pytest.mark.parametrize(
    ("kind", "op", "call"),
    [
        ("shape", "torch.nonzero", lambda: torch.nonzero(X)),
        ("shape", "torch.nonzero", lambda: torch.where(X > 0)),
        ("shape", "torch.unique", lambda: torch.unique(X)),
        ("shape", "torch.masked_select", lambda: torch.masked_select(X, X > 1)),
        ("shape", "indexing with a mask", lambda: X[X > 1]),
        ("shape", "torch.repeat_interleave without output_size", lambda: X.repeat_interleave(X[0].long() + 1, 1)),
        ("read", "torch.equal", lambda: torch.equal(X, X + 1)),
        ("read", "error check of torch.linalg", lambda: torch.linalg.inv(torch.eye(3, device="cpu") + X[:1].T)),
        ("read", ".item()", lambda: X[:, : X[0, 2].long()]),
        ("fetch", ".cpu()", lambda: X.cpu()),
        ("fetch", ".tolist()", lambda: X.tolist()),
        ("fetch", ".numpy()", lambda: X.numpy()),
        ("fetch", '.to("cpu")', lambda: X.to("cpu")),
        ("host_data", "torch.tensor", lambda: X + torch.tensor([1.0, 2.0, 3.0])),
        ("host_data", ".new_tensor", lambda: X + X.new_tensor([1.0, 2.0, 3.0])),
        ("host_data", "torch.as_tensor", lambda: X + torch.as_tensor([1.0, 2.0, 3.0])),
        ("host_tensor", "torch.arange", lambda: X + torch.arange(3)),
    ],
)
def test_what_would_wait_or_copy_on_a_gpu_is_seen(kind: str, op: str, call: Callable[[], object]) -> None:
    assert [finding.op for finding in found(call, kind)] == [op]


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None]),
        lambda: torch.where(X > 1, X, -X),
        lambda: X.clone().masked_fill_(X > 1, 0.0),
        lambda: X.clone().__setitem__(X > 1, 0.0),
        lambda: X + torch.arange(3, device=X.device),
        lambda: X.to(torch.float16).to(X.device).sort(dim=-1),
        lambda: torch.as_tensor(X) + torch.zeros_like(X) + X.new_zeros(3),
        lambda: X.repeat_interleave(torch.ones_like(X[0]).long(), 1, output_size=3),
        lambda: X[X.long().clamp(max=1)[0]],
    ],
)
def test_what_a_graph_can_hold_is_not_flagged(call: Callable[[], object]) -> None:
    assert found(call) == []


def test_a_line_that_waits_often_is_one_finding_with_its_count() -> None:
    def call() -> float:
        total = 0.0
        for row in X:
            total += float(row[0])
        return total

    (finding,) = found(call)
    assert finding.count == 2 and "2 times a call" in str(finding)


def test_the_line_is_the_users_and_not_a_librarys() -> None:
    (finding,) = found(lambda: F.one_hot(X.long()), "read")[:1]
    assert finding.place is not None and finding.place.file == __file__


# -- padding -----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm between two layers."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16, **how), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = self.norm(hidden)  # the line to find
        return self.last(hidden)


ROWS = {
    "version": 1,
    "name": "rows",
    "axes": {"batch": [1, 2, 4, 8]},
    "inputs": {"x": {"shape": ["batch", 8], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["batch", 4]}},
}


def sequences(*shape: Any, axes: Any = None, **inputs: Any) -> BucketSet:
    """A set over batch and tokens; the output has this shape."""
    axes = axes or {"batch": [2, 4], "tokens": [16, 32]}
    given = {"x": {"shape": ["batch", "tokens", 8], "dtype": "float32"}, **inputs}
    return parse({"version": 1, "name": "seq", "axes": axes, "inputs": given, "outputs": {"y": {"shape": [*shape]}}})


def mixes(fn: Callable[..., Any], bucket_set: BucketSet) -> list[Finding]:
    return [finding for finding in padding.check(fn, bucket_set, CPU)[0] if finding.severity == "padding"]


@pytest.mark.parametrize("how", ["train", "no running statistics"])
def test_a_batch_norm_that_mixes_requests_is_named_with_its_line(how: str) -> None:
    torch.manual_seed(0)
    module = Normed(track_running_stats=how == "train").train(how == "train")
    (finding,) = mixes(module, parse(ROWS))
    assert (finding.kind, finding.op) == ("mixes", "batch norm")
    assert finding.place is not None and finding.place.file == __file__
    assert finding.place.line == line_of(Normed, "the line to find")
    assert "batch padded from 3 to 4, output y" in finding.detail


def test_training_mode_is_a_finding_of_its_own() -> None:
    kinds = [finding.kind for finding in padding.check(Normed().train(), parse(ROWS), CPU)[0]]
    assert kinds == ["training", "mixes"]


def test_looking_changes_no_buffer_of_the_module() -> None:
    module = Normed().train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    padding.check(module, parse(ROWS), CPU)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_a_batch_norm_with_running_statistics_is_clean() -> None:
    findings, notes = padding.check(Normed().eval(), parse(ROWS), CPU)
    assert findings == [] and notes == [
        "padding along batch changes nothing: batch padded from 3 to 4 gave the unpadded results"
    ]


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=1)


def _softmax(x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2)
    return scores.softmax(dim=-1) @ x


def _flat(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)  # [batch * tokens, 8]
    flat = flat - flat.abs().amin(dim=0)
    return flat.view_as(x)


def _flipped(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(dim=1)


@pytest.mark.parametrize(
    ("fn", "op", "shape"),
    [
        (_mean, "mean", ("batch", 8)),
        (_softmax, "softmax", ("batch", "tokens", 8)),
        (_flat, "amin", ("batch", "tokens", 8)),
        (_flipped, "flip", ("batch", "tokens", 8)),
    ],
)
def test_an_operation_over_the_padded_axis_is_named(fn: Callable[..., Any], op: str, shape: tuple[Any, ...]) -> None:
    made = mixes(fn, sequences(*shape))
    first = next(finding for finding in made if "tokens padded from 8 to 16" in finding.detail)
    assert first.op == op and first.place is not None and first.place.function == fn.__name__
    mixes_requests = fn is _flat  # it reduces over both axes in one dimension; the others keep requests apart
    assert any("batch padded from 3 to 4" in finding.detail for finding in made) == mixes_requests


def test_masked_operations_over_the_padded_axis_are_clean() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = x.view(batch, tokens, 2, width // 2).transpose(1, 2).flatten(0, 1)  # [batch * 2, tokens, 4]
        scores = (heads @ heads.transpose(1, 2)).view(batch, 2, tokens, tokens)
        scores = scores.masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1).flatten(0, 1)
        mixed = (scores @ heads).view(batch, 2, tokens, width // 2).transpose(1, 2).flatten(2)
        return (mixed * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    mask = {"shape": ["batch", "tokens"], "dtype": "int64", "pad": 0, "range": [1, 2]}
    assert mixes(masked, sequences("batch", 8, mask=mask)) == []
    unmasked = mixes(lambda x, mask: masked(x, torch.ones_like(mask)), sequences("batch", 8, mask=mask))
    assert [finding.op for finding in unmasked] == ["softmax", "sum"]  # the scores, and how many tokens there are


def test_a_dropout_is_not_taken_for_noise() -> None:
    """The same random numbers in both runs: rows of a batch that are dropped alike do not differ."""

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x.sum(dim=-1), 0.5, training=False)

    assert mixes(dropped, sequences("batch", "tokens")) == []


def test_a_padded_call_that_fails_is_said_and_ends_nothing() -> None:
    findings, notes = padding.check(lambda x: x @ x.new_ones(3, 3), sequences("batch", "tokens", 8), CPU)
    assert findings == [] and len(notes) == 2
    assert all("the call fails: RuntimeError" in note and __file__.split("/")[-1] in note for note in notes)


def test_rounding_that_adds_up_is_no_mixing() -> None:
    """No single operation differs by more than one rounding, and the result does."""

    def deep(x: Tensor) -> Tensor:
        noise = 4e-5 if x.shape[0] == 8 else 0.0  # what another tile shape does, step by step
        for _ in range(8):
            x = x * (1.0 + noise)
        return x[:, :4]

    (finding,) = padding.check(deep, parse({**ROWS, "axes": {"batch": [8]}}), CPU)[0]
    assert (finding.kind, finding.severity) == ("unfound", "suspect")


def test_torchs_own_modules_that_know_no_mode_are_not_said_to_be_in_training() -> None:
    assert padding.check(nn.Linear(8, 4).train(), parse(ROWS), CPU)[0] == []
    (finding,) = padding.check(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0)).train(), parse(ROWS), CPU)[0]
    assert finding.kind == "training" and finding.detail == "1 (Dropout)"


def test_code_that_goes_another_way_when_padded_is_named() -> None:
    def by_size(x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            return x.sin()
        return x.cos()

    (finding, *_) = mixes(by_size, sequences("batch", "tokens", 8))
    assert finding.kind == "path" and finding.place is not None and finding.place.code == "return x.sin()"


def test_an_axis_without_room_is_said_not_to_be_checked() -> None:
    one = sequences("batch", "tokens", 8, axes={"batch": [1], "tokens": [16]})
    assert "padding along batch was not checked: it has one size, 1" in padding.check(lambda x: x + 1, one, CPU)[1]


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_a_diagnosis_without_a_gpu_names_blockers_and_times_nothing() -> None:
    module = Halved()
    made = diagnose(lambda: (module, {"x": X}), name="halved", device="cpu")
    assert isinstance(made, Diagnosis) and made.verdict == "cannot be captured" and made.device == "cpu"
    assert made.prediction is made.capture is made.launches is made.measured_gain is None
    assert any("timing needs a GPU" in note for note in made.notes)
    assert made.as_dict()["findings"][0]["place"]["line"] == line_of(Halved, "the line to find")
    assert ".item()" in made.table() and ".item()" in made.html()
    with pytest.raises(AttributeError):
        made.verdict = "launch-bound"  # type: ignore[misc]


@pytest.mark.parametrize("inputs", [X, (X,), [X], {"x": X}])
def test_inputs_are_a_tensor_a_sequence_or_a_mapping(inputs: Any) -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append(x)
        return x + 1

    assert diagnose(lambda: (fn, inputs), device="cpu").verdict == "not timed"
    assert seen[0] is X and all(torch.equal(x[:2], X) for x in seen), "some of them padded"


@pytest.mark.parametrize("inputs", [X.expand(2, 3).repeat(1, 3)[:, :8], {"x": torch.randn(3, 8)}])
def test_rows_of_a_modules_inputs_are_padded_without_a_set(inputs: Any) -> None:
    made = diagnose(lambda: (Normed(track_running_stats=False).eval(), inputs), device="cpu")
    rows = len(inputs["x"] if isinstance(inputs, dict) else inputs)
    (finding,) = made.findings
    assert (finding.kind, finding.op) == ("mixes", "batch norm") and "Padding changes its results" in made.summary
    assert finding.place is not None and finding.place.line == line_of(Normed, "the line to find")
    assert f"with batch padded from {rows} to {2 * rows}, output 0" in finding.detail
    assert any("the first dimension of the inputs was taken as the batch" in note for note in made.notes)


def test_padding_without_a_set_keeps_what_is_no_tensor_and_the_modules_buffers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, ids: Tensor, x: Tensor, scale: float) -> dict[str, Any]:
            return {"y": self.norm(x) * scale + ids[:, None], "total": x.sum(), "name": "two"}

    module = Two().eval()
    made = diagnose(lambda: (module, {"ids": torch.tensor([3, 4]), "x": X, "scale": 2.0}), device="cpu")
    assert made.findings == () and any("changes nothing" in note for note in made.notes)
    module.train()
    made = diagnose(lambda: (module, {"ids": torch.tensor([3, 4]), "x": X, "scale": 2.0}), device="cpu")
    assert [finding.kind for finding in made.findings] == ["training", "mixes"]
    assert "output y" in made.findings[1].detail


class Longest(nn.Module):
    """Takes inputs of other lengths."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize(
    ("fn", "inputs", "why"),
    [
        (torch.add, (X, X), "do not tell which of them are padded"),
        (Longest(), (X, X[:1]), "are no batch: given [1, 2]"),
        (torch.sum, X, "no result has its rows: given 2"),
        (lambda x: x @ x, torch.eye(2), "the call fails: RuntimeError"),
    ],
)
def test_what_cannot_be_padded_is_said_with_its_reason(fn: Any, inputs: Any, why: str) -> None:
    made = diagnose(lambda: (fn, inputs), device="cpu")
    assert made.findings == () and any("not checked" in note and why in note for note in made.notes), made.notes


def test_a_compile_in_a_warm_call_is_told_from_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = iter([0, 2, 2, 5])
    monkeypatch.setattr(blockers, "_compiled_frames", lambda: next(frames))
    made = diagnose(lambda: X + 1, device="cpu")
    assert [(f.kind, f.severity, f.op) for f in made.findings] == [
        ("compile", "suspect", "torch.compile of 2 graphs"),
        ("recompile", "blocks", "torch.compile of 3 graphs"),
    ]


def test_a_set_draws_its_largest_bucket() -> None:
    shapes = set()

    def fn(x: Tensor) -> Tensor:
        shapes.add(tuple(x.shape))
        return x[:, :4]

    made = diagnose(fn, parse(ROWS), device="cpu")
    assert "batch=8" in made.name and shapes == {(8, 8), (3, 8), (4, 8)}


def test_a_workload_that_fails_when_it_is_called_again_is_an_error_with_its_line() -> None:
    left = iter([X] * 7)

    def runs_out() -> Tensor:
        return next(left) + 1

    with pytest.raises(InputError, match=r"runs_out, called again, fails: given StopIteration \(test_doctor_findings"):
        diagnose(runs_out, name="runs_out", device="cpu")


def test_bad_input_is_an_error_and_no_diagnosis() -> None:
    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(
        InputError, match=r"fails: given ValueError: on purpose \(test_doctor_findings.py:\d+ \(in fails"
    ):
        diagnose(fails, device="cpu")
    with pytest.raises(ConfigError, match="given the class Normed"):
        diagnose(Normed, device="cpu")
    with pytest.raises(ConfigError, match="returns no inputs: given a int"):
        diagnose(lambda: (torch.sin, 3), device="cpu")
    with pytest.raises(ConfigError, match="no tensor for output y"):
        diagnose(lambda x: None, parse(ROWS), device="cpu")
