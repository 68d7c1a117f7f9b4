"""`inspect --graph`: what it is asked for is checked before anything is loaded, and a machine without a GPU says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bucketgraph.buckets import Bucket
from bucketgraph.cli import main
from bucketgraph.config import load
from bucketgraph.cuda.command import find, parse
from bucketgraph.errors import ConfigError

BUCKETS = [Bucket(("batch", "tokens"), sizes) for sizes in ((1, 16), (1, 32), (8, 128))]


@pytest.mark.parametrize(
    ("set_name", "text", "expected"),
    [
        ("minilm", "8,128", (None, (8, 128))),
        ("minilm", "8 128", (None, (8, 128))),
        ("minilm", "tokens=128, batch=8", (None, {"batch": 8, "tokens": 128})),
        ("llm", "decode:8", ("decode", (8,))),
        ("llm", "prefill:tokens=64", ("prefill", {"tokens": 64})),
    ],
)
def test_buckets_are_written_as_they_are_printed(set_name: str, text: str, expected: Any) -> None:
    assert parse(text, load(set_name)) == expected


@pytest.mark.parametrize(
    ("set_name", "text", "message"),
    [
        ("minilm", "", "--graph is no bucket"),
        ("minilm", "eight", "--graph is no bucket"),
        ("minilm", "8,tokens=16", "--graph is no bucket"),
        ("minilm", "batch=8,batch=8", "--graph is no bucket"),
        ("minilm", "-8", "--graph is no bucket"),
        ("minilm", "decode:8", "this set has no phases"),
        ("llm", "8", "needs a phase of the set: given 8, expected one of prefill, decode"),
        ("llm", "encode:8", "needs a phase of the set"),
    ],
)
def test_what_is_no_bucket_is_refused(set_name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, load(set_name))


def test_a_bucket_is_found_by_position_or_name() -> None:
    assert find((8, 128), BUCKETS) == find({"tokens": 128, "batch": 8}, BUCKETS) == BUCKETS[2]
    with pytest.raises(ConfigError, match="no such bucket: given batch=8, expected one of batch=1 tokens=16; "):
        find({"batch": 8}, BUCKETS)


def test_without_a_gpu_it_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["inspect", "minilm", "--graph", "8,128"]) == 2
    err = capsys.readouterr().err
    assert err == "bucketgraph: --graph shows a CUDA graph, which needs a CUDA device: given cpu\n"
    assert main(["inspect", "minilm", "--graph", "8,128", "--device", "cuda"]) == 2
    assert "no CUDA device is available" in capsys.readouterr().err


def test_options_of_a_graph_need_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", "minilm", "--dot", str(tmp_path / "x.dot")]) == 2
    assert "--dot and the options of a model belong to --graph" in capsys.readouterr().err
    assert main(["inspect", "minilm", "--graph", "8,128", "--dot", str(tmp_path / "none" / "x.dot")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
