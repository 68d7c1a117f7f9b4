"""The whole path of a call: plan, fill, replay, read.

    call ──plan──▶ bucket ──fill──▶ static slots ──replay──▶ static outputs ──read──▶ the caller's tensors

`plan` sees sizes only. `fill` writes the padded range of every slot. `replay` is one launch. `read` slices the padding
off and hands out memory that is the caller's. Everything a call needs was made by `warmup`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from bucketgraph import binding, executables, monitor
from bucketgraph.buckets import MAX_PLANS, Bucket, Lattice, Plan
from bucketgraph.config import BucketSet, Memory, PhaseSpec, Warmup, load
from bucketgraph.contract import Contract
from bucketgraph.dispatch import Cheapest, Prices
from bucketgraph.errors import ConfigError, InputError, NoBucketError, NotQuietError, NotWarmError, StaleError
from bucketgraph.executables import Executable, Family
from bucketgraph.layouts import Layout
from bucketgraph.saved import Saved
from bucketgraph.slots import Arena, InputCheck, Outputs, Slot, StaticInputs, check_inputs, into, longest, pack, unpad
from bucketgraph.stats import Recorder, Stats, log
from bucketgraph.warmup import Progress, WarmupReport, warm_up

Example = Callable[[Mapping[str, int], torch.Generator], Mapping[str, Tensor]]
PART_MS = 0.05  # of the host for one more part of a split call: fill, launch, clone and concatenation
_Ended = tuple[dict[str, Tensor], str, str | None, str | None]  # result, outcome, and code and reason of a way out


@dataclass
class Captured:
    """One bucket, ready to run; filled by warm-up."""

    bucket: Bucket
    inputs: StaticInputs
    executable: Executable
    fn: Callable[..., Any]  # what the executable runs: the manager's function, or the variant that was the fastest
    variants: dict[str, tuple[Callable[..., Any], Executable]] = field(default_factory=dict)  # till one is chosen
    variant: str | None = None  # the name of the one chosen
    tried: dict[str, float | str] = field(default_factory=dict)  # ms of a replay of each variant, or how it failed
    replay_ms: float | None = None  # of one replay
    eager_ms: float | None = None  # of the function at the bucket's size, where the set's dispatch goes by cost
    seconds: float = 0.0  # warm, capture and check together
    mib: float = 0.0  # device memory that the capture took
    check: float | None = None  # largest relative error of padded replay against unpadded eager
    error: str | None = None  # why this bucket is not used; its calls run eagerly
    binding: binding.Binding | None = None  # what of its calls the graph uses where the caller has it; None: nothing

    @property
    def serves(self) -> str:
        """The kind of executable that this bucket's calls run on."""
        return self.executable.kind if self.error is None else "eager"


class BucketManager:
    """Runs a function whose inputs have ragged sizes as if its sizes were fixed.

    Args:
        fn: a module or function that takes the set's inputs as keyword arguments and returns its outputs: a tensor, a
            mapping, a sequence in the set's order, or an object with attributes. A module must be in eval mode.
        bucket_set: a loaded set, one phase of it, or the path of a set.
        device: where it runs; None takes the module's device, else a GPU if there is one.
        family: what shares the graph pool; None makes a new one.
        example: makes legal inputs of given sizes for warm-up and self-check; None draws them by the set's `range`.
        variants: functions equal to `fn` but for rounding, by name, that may serve a bucket. As graphs all of them are
            captured and the fastest is kept; elsewhere the first one runs.
        around_step: entered around each step of warm-up, for what an example borrows.
        warmup, memory, quiet: policies where `bucket_set` is one phase and has none of its own.
        state: more tensors that the function reads, by name, where they cannot be found in the module, the attributes
            of the method's object, or the function's closure and globals.

    Raises:
        ConfigError: the set is an LLM's, the module is in training mode, or the executable does not fit the device.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        bucket_set: PhaseSpec | str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        family: Family | None = None,
        example: Example | None = None,
        variants: Callable[[Bucket], Mapping[str, Callable[..., Any]]] = lambda bucket: {},
        around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
        name: str | None = None,
        warmup: Warmup | None = None,
        memory: Memory | None = None,
        state: Mapping[str, Tensor] | None = None,
        quiet: str | None = None,
    ) -> None:
        spec = bucket_set if isinstance(bucket_set, PhaseSpec) else load(os.fspath(bucket_set))
        if isinstance(spec, BucketSet) and spec.is_llm:
            raise ConfigError(f"{spec.source}: an LLM set has phases", hint="use bucketgraph.LLM")
        for path, module in fn.named_modules() if isinstance(fn, torch.nn.Module) else ():
            if module.training:
                what = f"{path or 'the module'} is in training mode"
                raise ConfigError(what, hint="call .eval() first: dropout would make it random")
        self.fn = fn
        self.spec = spec
        self.name = name or (spec.name if isinstance(spec, BucketSet) else "buckets")
        self.policy = warmup or (spec.warmup if isinstance(spec, BucketSet) else Warmup())
        self.memory = memory or (spec.memory if isinstance(spec, BucketSet) else Memory())
        self.quiet = quiet or (spec.quiet if isinstance(spec, BucketSet) else "count")
        self.device = device_of(fn, device if device is not None or family is None else family.device)
        if family is not None and self.device != family.device:
            raise ConfigError("the family is on another device", given=family.device, expected=self.device)
        self.kind = executables.resolve(spec.executable, self.device)
        self.family = family or Family(self.device)
        self.lattice = spec.lattice()
        self._dispatch: Lattice | Cheapest = self.lattice
        self.slots = tuple(Slot.from_spec(name, item) for name, item in spec.inputs.items())
        self._check_inputs = InputCheck(self.slots, self.device)
        self._order = {axis: position for position, axis in enumerate(self.lattice.names)}
        self._push, self._pop = profiler_ranges(self.device)
        self._example = example
        self._variants = variants
        self.around_step = around_step
        self._outputs = Outputs(spec.outputs, spec.outputs_are)
        self._arena: Arena | None = None
        self._captured: dict[Bucket, Captured] = {}
        self._named: dict[tuple[int, ...], dict[str, int]] = {}  # sizes of calls by axis
        self.recorder = Recorder(self.name, spec)
        self._contract: Contract | None = None  # of what is captured; None where nothing is bound to addresses
        self._state_tensors = state
        self._since = (0, 0)  # compiles and memory segments when warm-up ended
        self._state = "lazy" if self.policy.lazy else "cold"
        self.fixed: dict[Bucket, dict[str, str]] = {}  # tensors that a bucket's graph cannot follow, with the reason

    # -- what a user calls -------------------------------------------------------------------------------------------

    def warmup(self, on_progress: Callable[[Progress], None] | None = None) -> WarmupReport:
        """Warm, capture and check every bucket, largest first. A bucket that fails costs that bucket alone."""
        self.fixed.clear()
        return warm_up([self], on_progress)

    def __call__(self, /, *, out: Mapping[str, Tensor] | Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """Run a batch that is padded already, of any size.

        Args:
            out: where results go, by output; a tensor of the result's real shape and dtype. A tensor alone is an input
                of that name.

        Returns:
            the outputs by name, with the axes' real sizes.

        Raises:
            InputError: the tensors do not fit the set's inputs.
            NoBucketError: no bucket covers the sizes and the set does not let it run otherwise.
            NotWarmError: `warmup()` was not called, or `release()` was.
        """
        self.require_warm()
        if isinstance(out, Tensor):
            inputs["out"], out = out, None
        sizes, layout = self._check_inputs(inputs)
        if out is not None:
            self._outputs.check_out(out, sizes, self.device)
        plan = self._dispatch.plan([sizes[name] for name in self.lattice.names])
        return self._run(plan, inputs, out=out, layout=layout)

    def run_batch(self, requests: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Pack ragged requests into one batch, run it, and give each its own unpadded result.

        Args:
            requests: one mapping per request; its tensors have the set's shapes without the leading request axis.

        Raises:
            InputError: no requests, a request does not fit, or the set has no axis that requests lie along.
            NoBucketError: no bucket covers a part of the batch; then nothing ran.
        """
        self.require_warm()
        axis = self.spec.request_axis
        if axis is None:
            raise InputError("this set has no axis that leads every input and output", hint="call the manager itself")
        if not requests:
            raise InputError("the batch is empty", expected="at least one request")
        slots = [dataclasses.replace(slot, dims=slot.dims[1:]) for slot in self.slots]
        each = [check_inputs(slots, request, self.device) for request in requests]
        limit = self.lattice.axes[self._order[axis]].largest if self.spec.overflow == "split" else len(each)
        parts = [slice(start, start + limit) for start in range(0, len(each), limit)]
        # Each part is padded to its own longest request, and all are planned before the first one runs.
        plans = [self.plan(**{axis: len(each[part])}, **longest(each[part])) for part in parts]
        self._refuse_any(plans)
        results: list[dict[str, Tensor]] = []
        for part, plan in zip(parts, plans, strict=True):
            batch = self._run(plan, pack(slots, requests[part], each[part]), keep=len(parts) > 1)
            for row, sizes in enumerate(each[part]):
                own = {n: unpad(batch[n][row], spec.shape[1:], sizes) for n, spec in self.spec.outputs.items()}
                results.append(own)
        return results

    def plan(self, /, **sizes: int) -> Plan:
        """What a call of these sizes would do; nothing runs and nothing is counted."""
        if set(sizes) != set(self.lattice.names):
            raise InputError("a plan needs every axis", given=", ".join(sizes), expected=", ".join(self.lattice.names))
        return self._dispatch.plan([sizes[name] for name in self.lattice.names])

    def stats(self) -> Stats:
        """Hits and padding per bucket, and every call that went another way, with its reason."""
        with self.family.lock:
            compiles, segments = monitor.compiles() - self._since[0], monitor.segments(self.device) - self._since[1]
            return self.recorder.snapshot(
                {"compiles": compiles, "segments": segments} if self._captured else {},
                ((bucket, self._captured.get(bucket)) for bucket in self.lattice.buckets),
            )

    def save_stats(self, path: str | os.PathLike[str]) -> None:
        """Write counters, sizes asked for and facts of warm-up as JSON, for `bucketgraph report` and `plan`.

        Raises:
            OSError: the file cannot be written; an older one is left as it was.
        """
        Saved.of({"": self.stats()}, self.spec).save(path)

    def rebind(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give tensors that the function reads other memory, without capturing anew where that can be proved right.

        Args:
            tensors: by name, as `StaleError` says it, such as `layers.0.weight`; of the same shape, strides and dtype.

        Returns:
            the memory that was there before, by name, to go back to it.

        Raises:
            InputError: there is no such tensor, or the new one does not fit; nothing moved.
            NotWarmError, StaleError: as for a call.
        """
        return binding.rebind([self], tensors)

    def explain(self) -> list[str]:
        """What each bucket's graph uses where it lies and where it holds addresses; what is copied instead, and why."""
        with self.family.lock:
            return binding.explain(self)

    def release(self) -> None:
        """Give graphs and static memory back. The manager cannot be called afterwards, unless warmed up again."""
        with self.family.lock:
            for bucket in list(self._captured):
                self._drop(bucket)
            self._arena = None
            self._state = "released"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # -- plan, fill, replay, read ------------------------------------------------------------------------------------

    def _run(
        self,
        plan: Plan,
        inputs: Mapping[str, Tensor],
        keep: bool = False,
        out: Mapping[str, Tensor] | None = None,
        layout: Layout | None = None,
    ) -> dict[str, Tensor]:
        with self.family.turn():
            self.require_warm()  # once more: it may have been released while this call waited
            if plan.kind == "refuse":
                self._refuse(plan)
            self.recorder.asked(plan.sizes)
            try:
                self.require_fresh()
                if self.quiet == "count":
                    result, outcome, code, reason = self._run_plan(plan, inputs, keep, out, layout)
                else:
                    with self.watched():
                        result, outcome, code, reason = self._run_plan(plan, inputs, keep, out, layout)
            except Exception as error:
                self.recorder.call("raised")
                self.family.examine(error)
                raise
            self.recorder.call(outcome, code, reason)
            return result

    def _refuse_any(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            if plan.kind == "refuse":
                self._refuse(plan)

    def _refuse(self, plan: Plan) -> NoReturn:
        with self.family.lock:
            self.recorder.asked(plan.sizes)
            self.recorder.call("refused", plan.code, plan.reason)
        what = "a larger bucket" if self.spec.overflow == "split" else "a larger bucket, or set overflow: eager"
        raise NoBucketError(plan.reason or "no bucket", hint=f"add {what}")

    def _run_plan(
        self,
        plan: Plan,
        inputs: Mapping[str, Tensor],
        keep: bool,
        out: Mapping[str, Tensor] | None = None,
        layout: Layout | None = None,
    ) -> _Ended:
        if plan.parts:
            return self._run_parts(plan, inputs, out)
        captured = self.serving(plan.bucket) if plan.bucket is not None else None
        sizes = self._by_axis(plan.sizes)
        if captured is not None and captured.error is None:
            result = self.replay(captured, inputs, sizes, keep=keep, out=out, layout=layout)
            self.recorder.hit(plan)
            return result, "replayed", None, None
        code, reason = ("bucket_failed", captured.error) if captured else (plan.code, plan.reason)
        return self._outputs.read(self.run_unpadded(inputs), sizes, keep=keep, into=out), "eager", code, reason

    def _run_parts(self, plan: Plan, inputs: Mapping[str, Tensor], out: Mapping[str, Tensor] | None) -> _Ended:
        """Run a call in pieces along the request axis. The result is new memory, whatever `outputs_are` says."""
        position = self._order[self.spec.request_axis or ""]
        results, start = [], 0
        for size in plan.parts:
            piece = self._dispatch.plan((*plan.sizes[:position], size, *plan.sizes[position + 1 :]))
            part = {name: tensor.narrow(0, start, size) for name, tensor in inputs.items()}
            result, outcome, code, reason = self._run_plan(piece, part, keep=True)
            if code is not None:
                self.recorder.fallback(outcome, code, reason)
            results.append(result)
            start += size
        whole = {name: torch.cat([result[name] for result in results]) for name in results[0]}
        return whole | into(out or {}, whole), "split", plan.code, plan.reason

    def replay(
        self,
        captured: Captured,
        inputs: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        *,
        keep: bool = False,
        out: Mapping[str, Tensor] | None = None,
        layout: Layout | None = None,
    ) -> dict[str, Tensor]:
        """Fill, replay and read one bucket. The family's turn must be held. `keep` as in `Outputs.read`, `layout` as in
        `StaticInputs.fill`.
        """
        push, pop, bound = self._push, self._pop, captured.binding
        written: Collection[str] = ()
        push("bucketgraph.fill" if bound is None else "bucketgraph.replay")
        try:
            if bound is None:
                captured.inputs.fill(inputs, layout=layout)
                pop()
                push("bucketgraph.replay")
                raw = captured.executable.replay()
            else:
                raw, written = bound.run(inputs, out or {}, layout)
            pop()
            push("bucketgraph.read")
            return self._outputs.read(self._outputs.select(raw), sizes, keep=keep, into=out, written=written)
        finally:
            pop()

    def run_unpadded(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The function itself, eagerly, on exactly these inputs."""
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return self._outputs.select(self.fn(**moved))

    # -- what warm-up and device loops use -----------------------------------------------------------------------------

    def require_fresh(self) -> None:
        """Nothing that a graph reads was rebound, resized, moved or freed; raises StaleError, or captures again."""
        if self._contract is None:
            return
        try:
            self._contract.check()
        except StaleError as error:
            if self.spec.on_stale == "error":
                raise
            self.recorder.fallback("recaptured", "stale", str(error))
            warm_up([self], None, list(self._captured))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hold a call to `quiet: warn` or `raise`."""
        if self.quiet == "count":
            yield
            return
        with monitor.watch(self.device) as seen:
            yield
        if seen.any:
            if self.quiet == "raise":
                raise NotQuietError(f"{self.name} was not quiet after warm-up", given=seen)
            log.warning("%s was not quiet after warm-up: %s", self.name, seen)

    def build(self, bucket: Bucket) -> Captured:
        """Static inputs and cold executables for one bucket."""
        if self._arena is None:
            self._arena = Arena(self.slots, self.lattice.buckets, self.device)
        inputs = StaticInputs(self.slots, bucket, self._arena)
        fns = dict(self._variants(bucket)) or {"": self.fn}
        if self.kind != "cudagraph":
            fns = dict([next(iter(fns.items()))])
        made = {n: (fn, binding.make(self, fn, inputs)) for n, fn in fns.items()}
        name, (fn, executable) = next(iter(made.items()))
        return Captured(bucket, inputs, executable, fn, made if len(made) > 1 else {}, name or None)

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Made-up legal inputs of these sizes, on the CPU."""
        if self._example is not None:
            return dict(self._example(sizes, generator))
        return {slot.name: slot.example(sizes, generator) for slot in self.slots}

    def outputs_of(self, raw: object) -> dict[str, Tensor]:
        """The declared outputs in what the function returned. Raises ConfigError if one is missing."""
        return self._outputs.select(raw)

    def check_outputs(self, captured: Captured) -> dict[str, Tensor]:
        """Replay once as filled; the static outputs, their shapes compared with the set. Raises ConfigError."""
        began = time.perf_counter()
        raw = captured.executable.replay()
        if self.device.type == "cpu":  # where a replay takes long, and is over when it returns
            took = 1e3 * (time.perf_counter() - began)
            captured.replay_ms = min(took, captured.replay_ms or took)
        outputs = self._outputs.select(raw)
        self._outputs.check(outputs, captured.bucket)
        return outputs

    def bind(self) -> Contract | None:
        """Where everything lies that the captures to come will read."""
        return Contract(self.fn, self._state_tensors) if self.kind == "cudagraph" else None

    def settle(self, captured: Captured) -> None:
        """Decide what of this bucket's calls the graph uses where the caller has it. The turn must be held."""
        binding.settle(self, captured)

    def fresh_contract(self) -> Contract:
        """What is read by address, nothing of it moved meanwhile. Raises NotWarmError and StaleError as a call does."""
        self.require_warm()
        self.require_fresh()
        return self._contract or Contract(self.fn, self._state_tensors)

    def note_recapture(self, reason: str) -> None:
        """A tensor moved, and a graph could not follow."""
        self.recorder.fallback("recaptured", "moved", reason)

    def adopt(self, captured: Sequence[Captured], contract: Contract | None) -> None:
        """Serve these buckets from now on, under the contract that they were captured under."""
        with self.family.lock:
            for new in captured:
                self._drop(new.bucket)
                self._captured[new.bucket] = new
            self._contract = contract
            if contract is not None:
                self.family.contracts.add(contract)
            self.family.changes += 1
            if self.spec.dispatch == "cheapest":
                self._dispatch = Cheapest(self.lattice, self._prices())

    def _prices(self) -> Prices:
        held = [(bucket, captured) for bucket, captured in self._captured.items() if captured.error is None]
        replay = {bucket: captured.replay_ms for bucket, captured in held if captured.replay_ms is not None}
        eager = {bucket: captured.eager_ms for bucket, captured in held if captured.eager_ms is not None}
        return Prices(replay, eager, PART_MS)

    def ready(self) -> None:
        self._state = "lazy" if self.policy.lazy else "warm"
        self._since = monitor.compiles(), monitor.segments(self.device)

    @property
    def captured(self) -> Mapping[Bucket, Captured]:
        return self._captured

    def _drop(self, bucket: Bucket) -> None:
        if (captured := self._captured.pop(bucket, None)) is not None:
            captured.executable.release()
            self.family.mib -= captured.mib

    def serving(self, bucket: Bucket) -> Captured:
        """What serves a bucket; a lazy set captures it now."""
        captured = self._captured.get(bucket)
        if captured is None:  # a lazy set: captured by its first call
            warm_up([self], None, [bucket])
            captured = self._captured[bucket]
        return captured

    def require_warm(self) -> None:
        """Raises NotWarmError."""
        if self._state in ("cold", "released"):
            hint = "call warmup() first" + ("" if self._state == "released" else ", or set warmup: {lazy: true}")
            raise NotWarmError(f"{self.name} is {self._state}", hint=hint)

    def _by_axis(self, sizes: tuple[int, ...]) -> dict[str, int]:
        named = self._named.get(sizes)
        if named is None:
            named = dict(zip(self.lattice.names, sizes, strict=True))
            if len(self._named) < MAX_PLANS:
                self._named[sizes] = named
        return named


def profiler_ranges(device: torch.device) -> tuple[Callable[[str], object], Callable[[], object]]:
    """What opens and closes a stretch of host time for a profiler; nothing where none listens, since that takes time.

    NVTX looks for a tool at a process's first range, and never again. A tool counts how deep ranges lie, from 0 on; one
    that does not record yet might not, but nsys leaves its library's name in the environment.
    """
    if device.type == "cuda":
        depth = torch.cuda.nvtx.range_push("bucketgraph")
        torch.cuda.nvtx.range_pop()
        if depth >= 0 or "NVTX_INJECTION64_PATH" in os.environ:
            return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    return (lambda name: None), (lambda: None)


def device_of(fn: object, device: torch.device | str | None) -> torch.device:
    own: torch.device | None = None
    if isinstance(fn, torch.nn.Module):
        tensor = next(fn.parameters(), next(fn.buffers(), None))
        own = tensor.device if tensor is not None else None
    device = own if device is None else device
    try:
        made = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as error:
        raise ConfigError("unknown device", given=device, expected="cpu, cuda or cuda:N") from error
    if made.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available", given=made, hint="use device cpu")
    if made == torch.device("cuda"):
        made = torch.device("cuda", torch.cuda.current_device())
    if own is not None and own != made:
        raise ConfigError("the module is on another device", given=own, expected=made, hint="move it with .to(device)")
    return made
