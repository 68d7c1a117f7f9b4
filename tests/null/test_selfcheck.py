"""The self-check catches functions that read their padding, fills that leave some, and writes beyond the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llm_cases import buckets, is_idle, tiny_llm
from torch import Tensor

from bucketgraph import BucketManager, slots
from bucketgraph.config import BucketSet, parse
from bucketgraph.kernels import reference
from bucketgraph.llm.examples import Examples
from bucketgraph.llm.request import Request
from bucketgraph.llm.sampling import SamplingParams
from bucketgraph.warmup import BucketReport


def bucket_set(**changed: Any) -> BucketSet:
    made: dict[str, Any] = {
        "version": 1,
        "name": "m",
        "axes": {"batch": [4], "tokens": [8]},
        "inputs": {
            "ids": {"shape": ["batch", "tokens"], "dtype": "int64", "range": [0, 50], "inert": True},
            "mask": {"shape": ["batch", "tokens"], "dtype": "int64", "range": [1, 2]},
        },
        "outputs": {"y": {"shape": ["batch"]}},
    }
    return parse({**made, **changed})


def checked(fn: Any, **changed: Any) -> BucketReport:
    return BucketManager(fn, bucket_set(**changed), device="cpu").warmup().buckets[0]


def masked(ids: Tensor, mask: Tensor) -> Tensor:
    return (ids * mask).sum(dim=1).float()


def test_a_masked_function_passes_both_levels() -> None:
    for level in ("quick", "full"):
        report = checked(masked, warmup={"self_check": level})
        assert report.error is None and report.check == 0.0


def test_a_missing_mask_hides_behind_zero_padding_and_is_caught_by_other_padding() -> None:
    def unmasked(ids: Tensor, mask: Tensor) -> Tensor:
        return ids.sum(dim=1).float()  # right as long as padding is 0

    inputs = bucket_set().model_dump(exclude_unset=True)["inputs"]
    inputs["ids"]["inert"] = False
    assert checked(unmasked, inputs=inputs).error is None, "the fault that the other padding is there for"
    report = checked(unmasked)
    assert report.error is not None and "output y depends on the padding of ids" in report.error


def test_an_off_by_one_mask_is_caught() -> None:
    def off_by_one(ids: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(dim=1, keepdim=True)
        return (ids * (torch.arange(ids.shape[1]) <= lengths)).sum(dim=1).float()

    error = checked(off_by_one).error
    assert error is not None and "depends on the padding" in error


def test_a_fill_that_leaves_the_tail_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_corner(self: slots._HostSlot, source: Tensor, padded: bool = False) -> None:
        self._view[tuple(slice(size) for size in source.shape)] = source.numpy()

    monkeypatch.setattr(slots._HostSlot, "write", only_the_corner)
    error = checked(masked).error
    assert error is not None and "still holds what was there before" in error


def test_a_pad_rule_that_is_written_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = bucket_set().model_dump(exclude_unset=True)["inputs"]
    inputs["ids"]["pad"] = "repeat_last"
    assert checked(masked, inputs=inputs).error is None
    monkeypatch.setattr(slots, "repeat_last", lambda view, real: None)
    error = checked(masked, inputs=inputs).error
    assert error is not None and "input ids still holds what was there before" in error


def test_a_slot_of_minus_one_taken_as_an_index_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.rope_and_write

    def follows_minus_one(qkv: Tensor, *args: Any, **how: Any) -> Tensor:
        k_cache, v_cache = args[2], args[3]
        rotated = right(qkv, *args, **how)
        if bool((args[4] < 0).any()):
            k_cache[-1, :, -1], v_cache[-1, :, -1] = 1.0, 1.0
        return rotated

    made = buckets(tokens=[64], batch=[4], warmup={"self_check": True})
    report = tiny_llm(made).report
    assert report is not None and report.ok
    monkeypatch.setattr(reference, "rope_and_write", follows_minus_one)
    llm = tiny_llm(made)
    assert llm.report is not None
    assert all("last page of the KV cache was written" in str(bucket.error) for bucket in llm.report.failed)
    assert len(llm.report.failed) == 2 and not bool(llm._runner.cache.data[:, :, -1].any())


def test_made_up_requests_go_on_behind_what_the_model_wrote_itself() -> None:
    llm = tiny_llm(buckets(tokens=[64], batch=[4], requests=[4]), warmup=False)
    runner, cache = llm._runner, llm._runner.cache
    examples = runner._examples
    with torch.no_grad(), examples.step():
        requests = examples._requests([5, 37, 0, 20, 5], [1, 2, 9, 1, 1], torch.Generator().manual_seed(3))
        made = cache.data[:, :, torch.tensor(examples._pages)].clone()
        assert requests[0].tokens[:5] == requests[4].tokens[:5] != requests[1].tokens[:5], "rows in turn"
    assert not bool(cache.data.any()) and is_idle(llm), "and nothing of it stays"
    first = 0
    for request, before in zip(requests, [5, 37, 0, 20, 5], strict=True):
        count = len(request.pages)
        held = made[:, :, first : first + count].transpose(2, 3).flatten(3, 4)  # [layers, 2, kv_heads, tokens, dim]
        first += count
        assert bool(held[..., before:, :].isnan().all())
        if not before:
            continue
        again = Request(request.tokens[:before], request.params, seed=0)
        again.hold(pages := cache.allocate(count), runner.table_width)
        with torch.no_grad():
            runner.model.prefill(**runner.prefill_arrays([(again, before)]))
        own = cache.data[:, :, torch.tensor(pages)].transpose(2, 3).flatten(3, 4)
        torch.testing.assert_close(held[..., :before, :], own[..., :before, :])
        cache.release(pages)


@pytest.mark.parametrize("lazy", [False, True])
def test_contexts_are_made_once_for_a_warm_up_and_kept_by_none(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    whole = Examples._make_contexts
    monkeypatch.setattr(Examples, "_make_contexts", lambda self: (made.append(1), whole(self))[1])
    llm = tiny_llm(buckets(tokens=[64], batch=[1, 4], requests=[4], warmup={"self_check": True, "lazy": lazy}))
    assert len(made) == (0 if lazy else 1)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=3))
    assert bool(made) and not llm._runner._examples._contexts


@pytest.mark.parametrize("why", ["full", "broken", "infinite"])
def test_without_a_context_of_the_models_made_up_requests_read_noise(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(buckets(tokens=[64], batch=[4], requests=[4]), warmup=False)
    runner, cache = llm._runner, llm._runner.cache
    if why == "full":
        cache.allocate(cache.free_pages - 2)
    if why == "infinite":
        runner.model.weights.layers[0].qkv[-1] = float("inf")

    def broken(*_: object) -> dict[str, Tensor]:
        raise RuntimeError("no kernel image")

    if why == "broken":
        monkeypatch.setattr(runner.prefill_manager, "run_unpadded", broken)
    with torch.no_grad(), runner._examples.step():
        (request,) = runner._examples._requests([5], [1], torch.Generator().manual_seed(3))
        held = cache.data[:, :, request.pages[0]]
        assert bool(held[..., :5, :].isfinite().all()) and bool(held[..., :5, :].any())
        assert bool(held[..., 5:, :].isnan().all())
    assert not bool(cache.data.any())


def test_a_write_beyond_an_input_is_caught() -> None:
    def writes_past(ids: Tensor, mask: Tensor) -> Tensor:
        if ids.untyped_storage().nbytes() > ids.nbytes:  # static memory, where a kernel's stray write would go unseen
            torch.as_strided(ids, (ids.numel() + 1,), (1,), ids.storage_offset())[-1] = 7
        return masked(ids, mask)

    # Two rows of seven leave room before the next slot, so the write hits a gap and not a neighbour.
    report = checked(writes_past, axes={"batch": [2], "tokens": [7]})
    assert report.error is not None and "wrote outside its inputs" in report.error


def test_a_function_that_mixes_rows_is_caught() -> None:
    def batch_norm(ids: Tensor, mask: Tensor) -> Tensor:
        rows = masked(ids, mask)
        return rows - rows.mean()

    error = checked(batch_norm).error
    assert error is not None and "differs from unpadded eager" in error


def test_levels_are_checked_at_load() -> None:
    with pytest.raises(ValueError, match=r"warmup\.self_check: expected true, false, quick or full, given 'deep'"):
        bucket_set(warmup={"self_check": "deep"})
