"""The seeded faults: each a small patch of running code, with what it simulates and the check that must turn red.

An edit replaces a piece of a function's source and compiles it anew; if the piece is not there any more, the fault
itself is out of date and says so.
"""

from __future__ import annotations
import __future__ as future

import contextlib
import inspect
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from bucketgraph import buckets, config, contract, manager, monitor, slots, stats, yaml_strict
from bucketgraph.executables import family
from bucketgraph.kernels import reference
from bucketgraph.llm import api, kv_cache, model, runner, weights

from . import graphs

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """One fault. `cases` is how many cases of the guard must suffice."""

    id: str
    simulates: str
    guard: str
    patch: Patch
    cases: int = 6


def edit(owner: Any, name: str, old: str, new: str) -> Patch:
    """Replace `old` by `new` in the source of `owner.name`, a function or a method."""

    def patch() -> AbstractContextManager[Any]:
        return mock.patch.object(owner, name, edited(owner, name, old, new))

    return patch


def edited(owner: Any, name: str, old: str, new: str) -> Any:
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) < 1:
        raise LookupError(f"the fault is out of date: {name} has no {old!r}")
    code = compile(source.replace(old, new), f"<{name} with a fault>", "exec", future.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    return made[name]


def swap(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Replace `owner.name` by `make(the original)`."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def _only_corners(fill: Any) -> Any:
    def leaves_the_tail(self: slots.StaticInputs, inputs: Any) -> None:
        for slot in self.slots:
            view, source = self.views[slot.name], inputs[slot.name]
            for dim, size in enumerate(source.shape):
                view = view.narrow(dim, 0, size)
            view.copy_(source)

    return leaves_the_tail


def _forgets(name: str) -> Callable[[Any], Any]:
    """Fill the slot when it is first filled, and never again."""

    def make(fill: Any) -> Any:
        def stale(self: slots.StaticInputs, inputs: Any) -> None:
            held = self.views[name].clone() if name in self.views and getattr(self, "_filled", False) else None
            fill(self, inputs)
            if held is not None:
                self.views[name].copy_(held)
            self._filled = True  # type: ignore[attr-defined]

        return stale

    return make


def _swaps_executables(adopt: Any) -> Any:
    def swapped(self: manager.BucketManager, captured: Any, contract: Any) -> None:
        adopt(self, captured, contract)
        if len(captured) > 1:
            one, other = captured[0], captured[1]
            one.executable, other.executable = other.executable, one.executable

    return swapped


def _spreads(adopt: Any) -> Any:
    def spread(self: manager.BucketManager, captured: Any, contract: Any) -> None:
        for item in captured:
            item.error = next((other.error for other in captured if other.error), None)
        adopt(self, captured, contract)

    return spread


def _recompiles(replay: Any) -> Any:
    def compiles_now_and_then(self: graphs.StandIn) -> Any:
        monitor._triton_compiles += 1
        return replay(self)

    return compiles_now_and_then


def _neighbours_token(sample: Any) -> Any:
    def spills(logits: Any, temperature: Any, top_k: Any, top_p: Any, seeds: Any, positions: Any, **how: Any) -> Any:
        tokens = sample(logits, temperature, top_k, top_p, seeds, positions, **how)
        padded = torch.nonzero(positions == 0).flatten()
        if len(padded) and int(padded[0]) > 0:
            tokens[padded[0] - 1] = tokens[padded[0]]
        return tokens

    return spills


def _uncounted(kind: str, instead: str | None) -> Callable[[Any], Any]:
    def make(call: Any) -> Any:
        def counts(self: stats.Recorder, outcome: str, code: Any = None, reason: Any = None) -> None:
            if outcome == kind and instead is not None:
                call(self, instead)
            elif outcome != kind:
                call(self, outcome, code, reason)

        return counts

    return make


@contextlib.contextmanager
def _skip_is_zero() -> Any:
    with mock.patch.object(slots, "SKIP", 0):
        yield


_gathered = "_gather(k_cache, table, {0}), _gather(v_cache, table, {0})"
_now = _gathered.format("kv_len")


def _gather_other(length: str) -> Patch:
    return edit(reference, "_attend_decode", _now, _gathered.format(length))


FAULTS: tuple[Fault, ...] = (
    # padding and lengths
    Fault("causal-excludes-self", "causal mask `<` for `<=`", "prefill_decode",
          edit(reference, "_causal_blocks", ".tril(base)", ".tril(base - 1)")),
    Fault("causal-sees-next", "causal mask one position too wide", "prefill_decode",
          edit(reference, "_causal_blocks", ".tril(base)", ".tril(base + 1)")),
    Fault("decode-reads-stale", "decode length one too long: a stale entry is read", "warm_up",
          _gather_other("kv_len + 1"), 1),
    Fault("decode-drops-newest", "decode length one too short: its own token is not seen", "prefill_decode",
          _gather_other("max(kv_len - 1, 1)")),
    Fault("write-minus-one", "slot -1 taken as an index: the last slot of the cache is overwritten", "warm_up",
          edit(reference, "rope_and_write", "slot_mapping >= 0", "slot_mapping >= -1"), 1),
    Fault("skip-pads-zero", "`skip` pads with 0: padded rows write slot 0 of page 0", "warm_up", _skip_is_zero, 1),
    Fault("tail-not-reset", "`fill` leaves the padding as it was", "warm_up",
          swap(slots.StaticInputs, "fill", _only_corners), 1),
    Fault("repeat-last-pads-zero", "`repeat_last` pads with 0: cumulative ends fall back", "pad_rules",
          edit(slots, "repeat_last", "= view[(*rows, slice(size - 1, size))]", "= 0"), 40),
    Fault("stale-lengths", "`kv_lens` is filled once and never again", "decode_exact",
          swap(slots.StaticInputs, "fill", _forgets("kv_lens"))),
    Fault("stale-tables", "`block_tables` is filled once and never again", "decode_exact",
          swap(slots.StaticInputs, "fill", _forgets("block_tables"))),
    Fault("padded-row-samples", "a padded row's token lands in the real row before it", "decode_exact",
          swap(reference, "sample", _neighbours_token), 12),
    # graphs and memory
    Fault("swapped-graphs", "two buckets have each other's graphs", "outcomes",
          swap(manager.BucketManager, "adopt", _swaps_executables)),
    Fault("uncloned-output", "`cloned` hands out the graph's own memory", "ownership",
          edit(slots.Outputs, "read", "real = real.clone(memory_format=torch.contiguous_format)", "pass"), 2),
    Fault("ring-too-short", "a ring has one buffer too few", "ownership",
          edit(slots.Outputs, "__init__", "ownership.ring if", "ownership.ring - 1 if"), 2),
    Fault("no-lock", "two callers fill and replay at once", "threads",
          edit(family.Family, "turn", "_Turn(self, self.lock)", "_Turn(self, threading.RLock())"), 2),
    Fault("wrong-phase", "shape picks the graph: a prompt of one token runs as decode", "pages",
          edit(runner.Runner, "prefill", "result = self.prefill_manager(**self.prefill_arrays(chunks))",
               "result = self.prefill_manager(**self.prefill_arrays(chunks)) if any(n > 1 for _, n in chunks)"
               " else self.decode_manager(**self.decode_arrays([r for r, _ in chunks]))")),
    Fault("capture-failure-spreads", "one failed capture takes the other buckets along", "capture_failure",
          swap(manager.BucketManager, "adopt", _spreads), 1),
    Fault("contract-removed", "nothing is compared before a launch", "tampered",
          swap(manager.BucketManager, "require_fresh", _nothing), 1),
    Fault("contract-skips-buffers", "the contract looks at parameters only", "tampered",
          edit(contract, "_links", "(item._parameters, item._buffers, item._modules)",
               "(item._parameters, item._modules)"), 8),
    Fault("contract-skips-addresses", "the contract compares objects and shapes, not addresses", "tampered",
          edit(contract.Contract, "check", "list(map(_address, self._tensors)) != self._addresses", "False"), 9),
    Fault("compile-after-warm-up", "a replay compiles", "quiet", swap(graphs.StandIn, "replay", _recompiles), 1),
    # the choice of a bucket, and what is counted
    Fault("bisect-right", "an exact fit takes the next bucket", "bucket_choice",
          swap(buckets, "_index", lambda index: lambda steps, axis, size: min(
              index(steps, axis, size) + (size in axis.sizes), len(axis.sizes) - 1))),
    Fault("maximum-missing", "the configured maximum is no bucket", "bucket_choice",
          swap(config, "ladder", lambda ladder: lambda *args: ladder(*args)[:-1] or ladder(*args))),
    Fault("overflow-truncated", "a request over the largest bucket is cut to it", "bucket_choice",
          edit(buckets.Lattice, "_covering", "return None", "size = axis.largest")),
    Fault("max-padding-ignored", "`max_padding` is not looked at", "outcomes",
          edit(buckets.Lattice, "_plan", "self.max_padding is not None and", "False and"), 12),
    Fault("split-loses-the-rest", "a split call loses the part that fills no bucket", "outcomes",
          edit(buckets.Lattice, "_split", "((rest,) if rest else ())", "()")),
    Fault("fallback-not-counted", "an eager call is not counted", "outcomes",
          swap(stats.Recorder, "call", _uncounted("eager", None))),
    Fault("fallback-as-hit", "an eager call is counted as a replay", "outcomes",
          swap(stats.Recorder, "call", _uncounted("eager", "replayed"))),
    Fault("reason-lost", "a fallback's reason is not counted", "outcomes",
          swap(stats.Recorder, "fallback", _nothing)),
    # requests
    Fault("page-released-twice", "a batch that is closed twice gives its pages back twice", "pages",
          edit(kv_cache, "give_back", "pages.clear()", "pass"), 12),
    Fault("page-leaked", "one page of each request does not come back", "pages",
          edit(kv_cache, "give_back", "reversed(pages)", "reversed(pages[1:])")),
    Fault("position-after-chunk", "positions are off by one after a chunk", "prefill_exact",
          edit(runner.Runner, "prefill_arrays", "positions.append(at)", "positions.append(at + (start > 0))"), 12),
    Fault("rope-restarts", "the second chunk's positions start at 0", "prefill_exact",
          edit(runner.Runner, "prefill_arrays", "positions.append(at)", "positions.append(at - start)"), 12),
    Fault("logits-of-another", "a request gets the logits of the row beside it", "prefill_exact",
          edit(runner.Runner, "prefill", 'return result["tokens"], result["logits"]',
               'return result["tokens"], result["logits"].roll(1, 0)')),
    Fault("chunk-gives-logits", "a row of a padded batch keeps the logits of its first chunk", "pages",
          edit(api.LLM, "_prefill_all", "if request.pending == 0:", "if request not in tokens:"), 30),
    Fault("seed-by-row", "the noise depends on the row in the batch", "decode_exact",
          edit(runner.Runner, "_row_arrays", "[request.seed for request in requests]",
               "[request.seed + row for row, request in enumerate(requests)]"), 12),
    Fault("library-matmul", "`numerics: invariant` uses the library's matmul", "prefill_exact",
          edit(model.LanguageModel, "__init__", 'if numerics == "invariant":', "if False:"), 40),
    # what is read from files
    Fault("duplicate-key", "of two equal keys in YAML the last wins", "yaml_fuzz",
          lambda: mock.patch.object(yaml_strict._Loader, "construct_mapping",
                                    yaml_strict.yaml.SafeLoader.construct_mapping), 2),
    Fault("nan-weight", "a NaN in a weight file is loaded", "weights", swap(weights, "_check_finite", _nothing), 9),
    Fault("reshaped-weight", "a tensor of another shape is loaded", "weights",
          edit(weights, "_check_stored", "tensor.shape != piece.shape", "False"), 9),
    Fault("retyped-weight", "a tensor of integers is loaded", "weights",
          edit(weights, "_check_stored", "tensor.dtype not in _FLOATS", "False"), 9),
    Fault("missing-weight", "a missing tensor is not noticed", "weights",
          edit(weights, "_check_stored", "if name not in stored]", "if False]"), 9),
)  # fmt: skip


@dataclass(frozen=True)
class KernelFault:
    """An edit of a Triton kernel's own source, run in the interpreter; guarded by `interp_exact`."""

    id: str
    simulates: str
    file: str  # of triton_kernels
    old: str
    new: str
    kernel: str  # of KERNELS


KERNEL_FAULTS: tuple[KernelFault, ...] = (
    KernelFault("kernel-causal", "the prefill kernel's causal mask is `<`", "prefill_attention",
                "column[None, :] <= position[:, None]", "column[None, :] < position[:, None]", "prefill_attention"),
    KernelFault("kernel-prefill-load", "the prefill kernel loads what lies behind a request, where 0 times NaN is NaN",
                "prefill_attention", "mask=(column < end)[:, None] & in_dim[None, :]", "mask=in_dim[None, :]",
                "prefill_attention"),
    KernelFault("kernel-decode-mask", "the decode kernel reads one cached entry too many", "decode_attention",
                "tl.arange(0, BLOCK_N) < stop", "tl.arange(0, BLOCK_N) <= stop", "decode_attention"),
    KernelFault("kernel-pad-row", "the decode kernel leaves a padded row as it was", "decode_attention",
                "tl.zeros([BLOCK_M, D_PAD], out.dtype.element_ty), in_tile)",
                "tl.full([BLOCK_M, D_PAD], 7.0, out.dtype.element_ty), in_tile)", "decode_attention"),
    KernelFault("kernel-decode-slot", "the decode kernel writes slot -1", "decode_attention",
                "owner & (slot >= 0)", "owner & (slot >= -1)", "decode_attention"),
    KernelFault("kernel-merge", "the last split is not merged", "decode_attention",
                "inside = (split < used)", "inside = (split < used - 1)", "decode_attention"),
    KernelFault("kernel-slot", "the RoPE kernel writes slot -1", "rope", "slot >= 0", "slot >= -1", "rope_and_write"),
    KernelFault("kernel-width", "the matmul kernel reads past the end of a row, into the next one's NaN", "matmul",
                "mask=in_rows & inside[None, :], other=0.0", "mask=in_rows, other=0.0", "linear"),
    KernelFault("fused-norm-width", "the norm before a fused matmul divides by the padded width", "skinny",
                "tl.sum(v * v, 0) / K", "tl.sum(v * v, 0) / BK", "norm_linear"),
)  # fmt: skip
