"""The LLM on a GPU: transformers' logits, graphs that equal eager bit for bit, our kernels in them, no late compile.

`BUCKETGRAPH_SMOLLM2` names SmolLM2's .gguf file; without it that comparison runs on random weights of its shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from llm_cases import buckets, cast, is_idle, pad, padded_greedy, transformers_logits, transformers_twin
from torch import Tensor

from bucketgraph import LLM, SamplingParams
from bucketgraph.config import BucketSet
from bucketgraph.kernels import decode_attention, prefill_attention, rms_norm, rope, sampling, swiglu, triton_ops
from bucketgraph.llm import model
from bucketgraph.llm.model_config import ModelConfig, load_config
from bucketgraph.llm.presets import preset, shrink
from bucketgraph.llm.projections import mixes
from bucketgraph.llm.weights import ModelWeights, load_weights, random_weights

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 4
SAMPLING = {"_tile_best", "_candidates", "_row_best"}
KERNELS = {
    "prefill": SAMPLING | {"_rms_norm", "_rope_and_write", "_swiglu", "_prefill"},
    "decode": SAMPLING | {"_decode"},  # which kernels the matmuls are is measured
}


def ids(length: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def served(
    config: ModelConfig, weights: ModelWeights, bucket_set: BucketSet | None = None, executable: str = "cudagraph"
) -> LLM:
    """An LLM whose buckets all were captured, warmed up with its self-check on."""
    made = bucket_set or buckets(tokens=[64, 512], batch=[1, 4], requests=[4])
    assert made.phases is not None
    phases = {name: phase.model_copy(update={"executable": executable}) for name, phase in made.phases.items()}
    checked = made.model_copy(update={"phases": phases, "warmup": made.warmup.model_copy(update={"self_check": True})})
    llm = LLM.from_weights(config, weights, checked, max_model_len=1024)
    assert llm.report is not None and llm.report.ok, llm.report
    assert {row.executable for row in llm.report.buckets} == {executable}
    return llm


def only(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models made from here on run their matmuls by this mix where there is a choice."""
    monkeypatch.setattr(model, "mixes", lambda *asked: {k: m for k, m in mixes(*asked).items() if k == mix})


def logits(llm: LLM, rows: Sequence[Sequence[int]], forced: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits `[B, vocab]` after the prompts and after each of the forced tokens."""
    with llm.prefill(*pad(rows, "left")) as batch:
        found = [batch.logits]
        for step in range(len(forced[0])):
            found.append(llm.decode(batch, torch.tensor([line[step] for line in forced])).logits)
    assert is_idle(llm)
    return found


@dataclass
class Case:
    config: ModelConfig
    weights: ModelWeights  # float32, on values that bfloat16 holds exactly
    rows: list[list[int]]
    forced: list[list[int]]
    want: list[Tensor]  # transformers' float32 logits


@pytest.fixture(scope="module", params=["llama-3.2-1b", "qwen3-0.6b"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A released shape with random weights."""
    pytest.importorskip("transformers")
    config = preset(request.param)
    weights = cast(config, random_weights(config, BF16, DEVICE), FP32)
    rows = [ids(length, config.vocab_size) for length in (300, 1, 65)]
    forced = [ids(STEPS, config.vocab_size, seed) for seed in (1, 2, 3)]
    twin = transformers_twin(config, weights, attn_implementation="eager")
    want = list(transformers_logits(twin, rows, forced))
    del twin
    torch.cuda.empty_cache()
    yield Case(config, weights, rows, forced, want)
    torch.cuda.empty_cache()


def test_float32_logits_equal_transformers_in_prefill_and_decode(case: Case) -> None:
    """Within 1e-4 of the largest logit, which for these weights is about 4; absolute where it is below 1."""
    with served(case.config, case.weights) as llm:
        got = logits(llm, case.rows, case.forced)
    assert len(got) == len(case.want) == 1 + STEPS
    for step, (ours, theirs) in enumerate(zip(got, case.want, strict=True)):
        close = 1e-4 * max(1.0, float(theirs.abs().max()))
        error = float((ours - theirs).abs().max())
        assert error <= close, f"step {step}: {error:.2e} over {close:.2e}"
        assert float(theirs.std()) > 0.1, "the logits say something"


def test_bfloat16_errs_no_more_than_twice_as_much_as_transformers(case: Case) -> None:
    """Root mean square error over prefill and decode, against float32 over the same values."""
    half = cast(case.config, case.weights, BF16)
    with served(case.config, half) as llm:
        ours = error_of(logits(llm, case.rows, case.forced), case.want)
    twin = transformers_twin(case.config, half, attn_implementation="eager")
    theirs = error_of(list(transformers_logits(twin, case.rows, case.forced)), case.want)
    assert 0 < ours <= 2 * theirs, f"ours {ours:.3e}, transformers {theirs:.3e}"


def error_of(got: list[Tensor], want: list[Tensor]) -> float:
    return float((torch.cat(got).float() - torch.cat(want)).pow(2).mean().sqrt())


@pytest.mark.parametrize("mix", ["fused", "library", "streamed", "tiled gate_up"])  # else each LLM chooses by time
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_a_graph_equals_eager_bit_for_bit_in_the_same_bucket(
    name: str, dtype: torch.dtype, mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(mix, monkeypatch)
    config = shrink(preset(name), num_layers=4)
    weights = random_weights(config, dtype, DEVICE)
    with served(config, weights) as graph, served(config, weights, executable="eager") as eager:
        for lengths in ([1], [63], [64], [65], [300], [512], [300, 1, 65], [16, 16, 16, 16], [600, 2], [9] * 7):
            rows = [ids(length, config.vocab_size, seed) for seed, length in enumerate(lengths)]
            forced = [ids(3, config.vocab_size, 50 + seed) for seed in range(len(lengths))]
            pairs = zip(logits(graph, rows, forced), logits(eager, rows, forced), strict=True)
            for step, (captured, plain) in enumerate(pairs):
                assert torch.equal(captured, plain), f"lengths {lengths}, step {step}"
        assert {row.executable for stats in graph.stats().values() for row in stats.buckets} == {"cudagraph"}


@pytest.mark.parametrize("mix", ["fused", "library", "streamed"])
def test_a_step_gives_the_same_bits_whenever_it_runs(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small kernels of many layers overlap the most: what one reads too early shows in the bits of some run."""
    only(mix, monkeypatch)
    config = preset("smollm2-135m")
    with served(config, random_weights(config, BF16, DEVICE), buckets(tokens=[64], batch=[1, 2, 4])) as llm:
        manager = llm._runner.decode_manager
        for rows in (1, 2, 3, 4):
            with manager.family.turn(), manager.around_step():
                arrays = manager.example({"batch": rows}, torch.Generator().manual_seed(rows))
                captured = manager._captured[manager.lattice.plan((rows,)).bucket]
                captured.inputs.fill(arrays)
                eager = [manager.run_unpadded(arrays)["logits"].clone() for _ in range(50)]
                graph = [manager.check_outputs(captured)["logits"][:rows].clone() for _ in range(50)]
            for name, found in (("eager", eager), ("graph", graph)):
                different = sum(not torch.equal(each, found[0]) for each in found)
                assert not different, f"{name}, {rows} rows: {different} of 50 differ from the first"


@pytest.mark.parametrize("mix", ["fused", "library", "tiled gate_up"])
def test_dependent_launches_change_no_bit(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both phases over several layers and buckets, the kernels overlapping at their ends and not."""
    only(mix, monkeypatch)
    config = shrink(preset("llama-3.2-1b"), num_layers=6)
    weights = random_weights(config, BF16, DEVICE)
    with served(config, weights) as chained:
        assert chained._runner.model._pdl == triton_ops.pdl_supported(DEVICE)
        monkeypatch.setattr(triton_ops, "pdl_supported", lambda device: False)
        with served(config, weights) as apart:
            assert not apart._runner.model._pdl
            for lengths in ([1], [64], [65], [512], [300, 1, 65], [16, 16, 16, 16]):
                rows = [ids(length, config.vocab_size, seed) for seed, length in enumerate(lengths)]
                forced = [ids(3, config.vocab_size, 50 + seed) for seed in range(len(lengths))]
                pairs = zip(logits(chained, rows, forced), logits(apart, rows, forced), strict=True)
                assert all(torch.equal(*pair) for pair in pairs), f"lengths {lengths}"


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    config = shrink(preset("llama-3.2-1b"), num_layers=2)
    with served(config, random_weights(config, BF16, DEVICE)) as llm:
        yield llm


def test_captured_graphs_hold_our_kernels(small: LLM) -> None:
    """Kernel names as the profiler sees them during a replay; nothing else runs kernels of these names then."""
    batch = small.prefill(torch.tensor([ids(140, 1000)]))
    seen = {
        "prefill": names_in(lambda: small.prefill(torch.tensor([ids(140, 1000)])).close()),
        "decode": names_in(lambda: small.decode(batch)),
    }
    batch.close()
    for phase, wanted in KERNELS.items():
        assert seen[phase], "the profiler reported no kernels at all"
        assert wanted <= seen[phase], f"{phase}: {sorted(wanted - seen[phase])} missing in {sorted(seen[phase])}"
        other = {"_prefill", "_decode"} - wanted
        assert not other & seen[phase], f"{phase} ran the other phase's attention"
        rows = small.stats()[phase].buckets
        assert all(row.executable == "cudagraph" for row in rows) and any(row.hits for row in rows)


def names_in(call: Any) -> set[str]:
    """Names of the kernels that ran on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as p:
        call()
        torch.cuda.synchronize()
    return {event.name for event in p.events() if event.device_type == torch.autograd.DeviceType.CUDA}


def compiled() -> dict[str, int]:
    """How many variants each kernel has compiled in this process."""
    kernels = (
        rms_norm._rms_norm,
        rope._rope_and_write,
        prefill_attention._prefill,
        decode_attention._decode,
        swiglu._swiglu,
        sampling._tile_best,
        sampling._candidates,
        sampling._row_best,
    )
    return {k.fn.__name__: sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels}


def test_the_report_says_which_matmuls_serve_a_small_bucket_and_how_fast_all_of_them_are(small: LLM) -> None:
    assert small.report is not None
    few = [(row, int(row.bucket.removeprefix("batch="))) for row in small.report.buckets if row.name == "decode"]
    (middle,) = (row for row in small.report.buckets if row.name == "prefill" and "tokens=64" in row.bucket)
    assert len(few) == 2
    heads = small._runner.max_requests
    for row, rows, head_rows in (*((row, rows, rows) for row, rows in few), (middle, 64, heads)):
        times = {name: ms for name, ms in row.variants.items() if isinstance(ms, float)}
        assert set(times) == set(row.variants), "none of them failed"
        assert set(row.variants) == set(small._runner.model.mixes(rows, head_rows))
        assert row.variant == min(times, key=times.__getitem__)
    (large,) = (row for row in small.report.buckets if row.name == "prefill" and "tokens=512" in row.bucket)
    assert large.variant == "fused head" and not large.variants, "more rows than there is a choice for"


def test_nothing_compiles_after_warm_up(small: LLM) -> None:
    before = compiled()
    assert all(before.values())
    for call in range(20):
        prompts = [ids(1 + (37 * call + 101 * row) % 700, 1000, row) for row in range(1 + call % 7)]
        params = SamplingParams(
            temperature=(0.0, 0.8)[call % 2],
            top_k=(0, 40)[call % 4 // 2],
            top_p=(1.0, 0.9)[call % 3 // 2],
            seed=call,
            max_tokens=1 + call % 5,
            logprobs=3 if call % 5 == 0 else None,
            ignore_eos=True,
        )
        if call % 6 == 5:
            padded_greedy(small, prompts, 3, "right")
        else:
            results = small.generate(prompts, params)
            assert all(len(result.outputs[0].token_ids) == params.max_tokens for result in results)
    assert compiled() == before
    assert is_idle(small)


def test_seeded_draws_are_the_same_in_any_bucket_and_batch() -> None:
    """In float32: the logits of two buckets may differ by rounding, which no draw here is close enough to notice."""
    config = shrink(preset("llama-3.2-1b"), num_layers=2, vocab_size=32000)
    weights = random_weights(config, FP32, DEVICE)
    rows = [ids(length, config.vocab_size) for length in (3, 40, 200)]
    params = [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in (7, -1, 2**63 - 1)
    ]
    found = []
    for made in (buckets(tokens=[64], batch=[1], requests=[1]), buckets(tokens=[512], batch=[8], requests=[8])):
        with served(config, weights, made) as llm:
            found.append([result.outputs[0].token_ids for result in llm.generate(rows, params)])
            alone = [llm.generate([row], one)[0].outputs[0].token_ids for row, one in zip(rows, params, strict=True)]
            assert alone == found[-1]
    assert found[0] == found[1]
    assert len({tuple(line) for line in found[0]}) == 3


def test_greedy_tokens_equal_the_cpu() -> None:
    """SmolLM2 in float32 where its file is given, else random weights of its shape."""
    file = os.environ.get("BUCKETGRAPH_SMOLLM2")
    config = load_config(file) if file else preset("smollm2-135m")
    on_cpu = load_weights(file, config, FP32, "cpu") if file else random_weights(config, FP32, "cpu")
    on_gpu = cast(config, on_cpu, FP32, DEVICE)
    rows = [ids(length, config.vocab_size) for length in (1, 20, 90, 150)]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    cpu = LLM.from_weights(config, on_cpu, buckets(tokens=[512], batch=[4], requests=[4]), max_model_len=1024)
    want = [result.outputs[0].token_ids for result in cpu.generate(rows, greedy)]
    with served(config, on_gpu) as gpu:
        assert [result.outputs[0].token_ids for result in gpu.generate(rows, greedy)] == want
        assert padded_greedy(gpu, rows, 16, "left") == want
        assert [gpu.generate([row], greedy)[0].outputs[0].token_ids for row in rows] == want


def test_eager_prefill_with_graphed_decode_equals_both_graphed(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    only("library", monkeypatch)  # else graphs choose by time
    made = buckets(tokens=[64, 512], batch=[1, 4], requests=[4])
    assert made.phases is not None
    phases = {**made.phases, "prefill": made.phases["prefill"].model_copy(update={"executable": "eager"})}
    segmented, graphed = (
        LLM.from_weights(small.config, small._runner.model.weights, bucket_set, max_model_len=1024)
        for bucket_set in (made.model_copy(update={"phases": phases}), made)
    )
    rows, forced = [ids(100, 1000), ids(7, 1000)], [ids(3, 1000, 1), ids(3, 1000, 2)]
    for one, other in zip(logits(segmented, rows, forced), logits(graphed, rows, forced), strict=True):
        assert torch.equal(one, other)
    kinds = {name: {row.executable for row in stats.buckets} for name, stats in segmented.stats().items()}
    assert kinds == {"prefill": {"eager"}, "decode": {"cudagraph"}}
    segmented.release()
    graphed.release()


def test_a_lazy_set_captures_between_requests_and_leaves_their_pages_alone(small: LLM) -> None:
    made = buckets(tokens=[64], batch=[1, 2, 4], requests=[4], warmup={"lazy": True, "self_check": True})
    rows = [ids(length, 1000) for length in (40, 20, 9)]
    params = [SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True) for limit in (20, 4, 9)]
    lazy = LLM.from_weights(small.config, small._runner.model.weights, made, max_model_len=1024)
    eager_set = made.model_copy(update={"warmup": replace_warmup(made)})
    ready = LLM.from_weights(small.config, small._runner.model.weights, eager_set, max_model_len=1024)
    got, want = ([result.outputs[0].token_ids for result in llm.generate(rows, params)] for llm in (lazy, ready))
    assert got == want
    assert all(row.executable in ("cudagraph", "none") for row in lazy.stats()["decode"].buckets)
    lazy.release(), ready.release()


def replace_warmup(bucket_set: BucketSet) -> Any:
    return bucket_set.warmup.model_copy(update={"lazy": False})
