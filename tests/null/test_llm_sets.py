"""Every ready LLM set is read from its own YAML, fits a model of its shape, warms up with its self-check and serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from llm_cases import is_idle, padded_greedy

from bucketgraph import LLM, SamplingParams, config, yaml_strict
from bucketgraph.config import BucketSet, load, parse
from bucketgraph.llm.model_config import ModelConfig
from bucketgraph.llm.presets import PRESETS, preset, shrink
from bucketgraph.llm.weights import random_weights

FILES = sorted((Path(config.__file__).parent / "configs").glob("*.yaml"))
LLM_SETS = [path.stem for path in FILES if load(path).is_llm]
SHAPES = {"llm": "qwen2.5-0.5b", "smollm2": "smollm2-135m"}  # the others are named after their model


def shape_of(name: str) -> ModelConfig:
    """The heads, RoPE and context of the model that the set is for, in one narrow layer with few tokens."""
    small = shrink(preset(SHAPES.get(name, name)), num_layers=1, vocab_size=512)
    return dataclasses.replace(small, hidden_size=128, intermediate_size=256)


def few(name: str) -> BucketSet:
    """The shipped file with each axis cut to its smallest sizes and a small cache; everything else as it is."""
    source = load(name).source
    data = yaml_strict.read_file(Path(source))
    phases = load(name).phases
    assert phases is not None
    for phase, spec in phases.items():
        data["phases"][phase]["axes"] = {axis: list(sizes[:2]) for axis, sizes in spec.axes.items()}
    return parse({**data, "kv_cache": {**data["kv_cache"], "memory": "64MiB"}}, source)


def test_there_are_ready_llm_sets_for_the_published_shapes() -> None:
    assert {"llm", "smollm2", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b"} <= set(LLM_SETS)
    assert {SHAPES.get(name, name) for name in LLM_SETS} <= set(PRESETS)


@pytest.mark.parametrize("name", LLM_SETS)
def test_a_ready_set_as_shipped_fits_its_model(name: str) -> None:
    """All of its buckets, and the context it names, within what the ready cache holds."""
    shape = shape_of(name)
    llm = LLM.from_weights(shape, random_weights(shape, torch.float32, "cpu"), name, warmup=False)
    phases = load(name).phases
    assert phases is not None
    assert llm._runner.max_tokens == phases["prefill"].axes["tokens"][-1]
    assert llm.max_model_len == (load(name).max_model_len or shape.max_position_embeddings)


@pytest.mark.parametrize("name", LLM_SETS)
def test_a_ready_set_warms_up_and_serves(name: str) -> None:
    shape = shape_of(name)
    llm = LLM.from_weights(shape, random_weights(shape, torch.float32, "cpu"), few(name), max_model_len=512)
    assert llm.report is not None and llm.report.ok, llm.report
    assert all(row.check is not None and row.check < 1e-4 for row in llm.report.buckets)
    rows = [list(range(1, 1 + length)) for length in (1, 60, 200)]
    results = llm.generate(rows, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert [result.outputs[0].token_ids for result in results] == padded_greedy(llm, rows, 4, "left")
    stats = llm.stats()
    assert stats["prefill"].outcomes == {"replayed": stats["prefill"].calls}
    assert not stats["decode"].outcomes.get("eager") and is_idle(llm)
