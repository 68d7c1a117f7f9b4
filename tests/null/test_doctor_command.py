"""`bucketgraph doctor`: its command line is checked before anything is loaded; files appear whole, or not at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bucketgraph.cli import main

WORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x):
        return self.norm(x)

net = Net().eval()
x = torch.ones(3, device="cpu")

def plain():
    return x + 1

def reads():
    return x * x.sum().item()

def fails():
    raise RuntimeError("on purpose")

constant = 3
"""
SET = """
version: 1
name: rows
axes: {batch: [2, 4, 8]}
inputs: {x: {shape: [batch, 8], dtype: float32}}
outputs: {y: {shape: [batch, 8]}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of the user's and a bucket set."""
    (tmp_path / "users_work.py").write_text(WORK)
    (tmp_path / "broken_work.py").write_text("1 / 0\n")
    (tmp_path / "rows.yaml").write_text(SET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("users_work", None)
    return tmp_path


def test_a_verdict_is_status_0_whatever_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, verdict in (("plain", "not timed"), ("reads", "cannot be captured")):
        assert main(["doctor", f"users_work:{name}", "--device", "cpu"]) == 0
        assert f"users_work:{name} on cpu: {verdict}" in capsys.readouterr().out


def test_the_item_is_named_with_its_line_in_every_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", "out.json", "--html", "out.html"]
    assert main(["doctor", "users_work:reads", "--device", "cpu", *files]) == 0
    place = next(number for number, line in enumerate(WORK.splitlines(), start=1) if ".item()" in line)
    said = f".item() at users_work.py:{place} (in reads: return x * x.sum().item())"
    assert said in capsys.readouterr().out and said in (folder / "out.html").read_text()
    made = json.loads((folder / "out.json").read_text())
    (finding,) = made["findings"]
    assert finding["place"]["line"] == place and finding["op"] == ".item()" and made["format"] == "bucketgraph doctor"


def test_a_set_brings_inputs_and_a_check_of_padding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "users_work:net", "--set", "rows.yaml", "--bucket", "4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "users_work:net in rows batch=4" in out
    assert re.search(r"batch norm at users_work.py:\d+ \(in forward: return self.norm\(x\)\)", out)


def test_a_language_model_is_watched_without_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, what in (
        (["--prefill", "20"], "prefill of 20 tokens"),
        (["--batch", "2", "--context", "9"], "batch 2, 9"),
    ):
        assert main(["doctor", "--model", "random:smollm2-135m:1", "--device", "cpu", *options]) == 0
        out = capsys.readouterr().out
        assert what in out and "not timed" in out and "twins ran" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "what to diagnose: given nothing"),
        (["users_work:plain", "--model", "random:smollm2-135m"], "what to diagnose: given both"),
        (["users_work"], "no function is named: given users_work, expected MODULE:FUNC"),
        (["users_work:nowhere"], "cannot import users_work:nowhere"),
        (["nowhere:plain"], "cannot import nowhere:plain"),
        (["broken_work:plain"], "cannot import broken_work:plain: given ZeroDivisionError"),
        (["users_work:constant"], "users_work:constant is no workload: given a int"),
        (["users_work:Net"], "users_work:Net is no workload: given the class Net"),
        (["users_work:fails"], "users_work:fails() fails: given RuntimeError: on purpose (users_work.py:"),
        (["users_work:plain", "--prefill", "8"], "--prefill belongs to --model"),
        (["users_work:plain", "--dtype", "float16"], "--dtype belongs to --model"),
        (["users_work:plain", "--bucket", "8"], "--bucket belongs to --set"),
        (["users_work:net", "--set", "rows.yaml", "--bucket", "3"], "the set has no such bucket"),
        (["users_work:net", "--set", "rows.yaml", "--bucket", "x"], "is no bucket"),
        (["users_work:net", "--set", "llm"], "an LLM set has phases"),
        (["users_work:net", "--set", "nowhere.yaml"], "no such bucket set"),
        (["--model", "random:smollm2-135m:1", "--prefill", "8", "--batch", "2"], "--prefill runs one prompt"),
        (["--model", "random:smollm2-135m:1", "--batch", "0"], "batch is out of range: given 0"),
        (["--model", "random:smollm2-135m:1", "--context", "9000"], "max_model_len is out of range"),
        (["--model", "random:nothing"], "unknown model preset"),
        (["users_work:plain", "--json", "none/x.json"], "no such folder"),
        (["users_work:plain", "--json", "x", "--html", "x"], "a file is named twice"),
    ],
)
def test_bad_input_is_one_line_and_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["doctor", "--device", "cpu", "--html", "out.html", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("bucketgraph: ") and err.count("\n") == 1
    assert not list(folder.glob("out.*")) and not list(folder.glob("x*"))


def test_the_options_import_nothing_heavy() -> None:
    code = "import sys; from bucketgraph.doctor import options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
