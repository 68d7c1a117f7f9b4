"""Compile every kernel variant ahead of time, without a GPU, and print its registers, spills and shared memory.

The registry is the wrappers themselves: each case below calls a wrapper on CPU tensors, and the launch that it would
make (kernel, argument types, constants, warps) is recorded in place of being run. Nothing to keep in step by hand.
Exits 1 if a variant does not compile, needs more shared memory than its target has, or spills on sm_90.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bucketgraph.kernels import triton_ops
from bucketgraph.kernels.matmul import Phase

PHASES: tuple[Phase, ...] = ("prefill", "decode")
SMEM_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes per block
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass
class Launch:
    """One launch that a wrapper made: what the JIT would have compiled for it."""

    case: str
    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    def key(self) -> str:
        return repr((self.kernel.fn.__name__, self.signature, self.constants, self.attrs, self.options))


@dataclass
class Report:
    kernel: str
    case: str
    target: int
    registers: int
    stack: int  # bytes of local memory: spills
    shared: int
    error: str | None = None


def describe(case: str, kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """The signature that the JIT derives: aligned pointers, 32-bit counts, everything else a constant."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for i, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, int):
            assert parameter.do_not_specialize, (
                f"{kernel.fn.__name__}: {parameter.name} would compile anew for each class"
            )
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = "fp32"
    options = {k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages", "launch_pdl")}
    return Launch(case, kernel, signature, constants, attrs, options)


def attention(op: str, dim: int, page: int, dtype: torch.dtype, heads: int, kv_heads: int, rows: int) -> None:
    q = torch.empty(rows, heads, dim, dtype=dtype)
    cache = torch.empty(2, kv_heads, page, dim, dtype=dtype)
    requests = rows if op == "decode" else 2
    table = torch.zeros(requests, 4096 // page, dtype=torch.int32)
    lens = torch.zeros(requests, dtype=torch.int32)
    if op == "decode":
        qkv, slots = torch.empty(rows, (heads + 2 * kv_heads) * dim, dtype=dtype), lens.long()
        args = (qkv, lens, torch.empty(4, dim), cache, cache, slots, table, lens, heads, 1.0)
        for norm, pdl in ((None, False), (torch.empty(dim, dtype=dtype), True)):
            triton_ops.decode_attention(*args, norm, norm, pdl=pdl)
    else:
        whole_tiles = page % 64 == 0 and dim in (64, 128) and dtype != torch.float32
        for tma, pdl in ((False, False), (True, True) if whole_tiles else (False, True)):
            triton_ops.prefill_attention(q, cache, cache, table, lens, lens, 1.0, tma=tma, pdl=pdl)


def rope(dim: int, page: int, dtype: torch.dtype, norm: bool) -> None:
    cache = torch.empty(2, 8, page, dim, dtype=dtype)
    index, slots = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    weight = torch.ones(dim, dtype=dtype) if norm else None
    qkv = torch.empty(1, (32 + 16) * dim, dtype=dtype)
    for pdl in (False, True):
        triton_ops.rope_and_write(qkv, index, torch.empty(4, dim), cache, cache, slots, 32, weight, weight, pdl=pdl)


def norms(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.empty(2, width, dtype=dtype), torch.empty(width, dtype=dtype)
    triton_ops.rms_norm(x, weight, 1e-6)
    triton_ops.rms_norm(x, weight, 1e-6, pdl=True)


def matmul(columns: int, width: int, dtype: torch.dtype, phase: Phase) -> None:
    x, weight = torch.empty(1, width, dtype=dtype), torch.empty(columns, width, dtype=dtype)
    triton_ops.linear(x, weight, phase=phase)
    triton_ops.linear(x, weight, torch.empty(columns, dtype=dtype), phase=phase)


def sampling(vocab: int, dtype: torch.dtype) -> None:
    f, i = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    for pdl in (False, True):
        triton_ops.sample(torch.empty(1, vocab, dtype=dtype), f, i, f, i.long(), i, pdl=pdl)


def advance(page: int) -> None:
    i, f = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    table = torch.zeros(1, 4, dtype=torch.int32)
    state, flags = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    triton_ops.advance(i.long(), i.long(), i, i.long(), i, f, table, i, i, table.T, state, flags, table.T, page)


def skinny(rows: int, sizes: tuple[int, int, int, int], vocab: int, dtype: torch.dtype, pdl: bool) -> None:
    """The matmuls of a decode layer (hidden, gated, QKV and attention widths), and the LM head."""
    for form in ("auto", *(rows <= 16 and dtype == torch.bfloat16) * ("streamed",)):
        skinny_form(rows, sizes, vocab, dtype, {"pdl": pdl, "form": form})


def skinny_form(
    rows: int, sizes: tuple[int, int, int, int], vocab: int, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    hidden, gated, qkv, attended = sizes

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    x, gain = new(rows, hidden), new(hidden)
    triton_ops.norm_linear(x, gain, 1e-5, new(qkv, hidden), **how)
    triton_ops.norm_linear(x, gain, 1e-5, new(qkv, hidden), new(qkv), **how)
    triton_ops.linear_add(new(rows, attended), new(hidden, attended), x, **how)
    triton_ops.norm_gate_up(x, gain, 1e-5, new(2 * gated, hidden), **how)
    triton_ops.linear_add(new(rows, gated), new(hidden, gated), x, **how)
    triton_ops.norm_linear(x, gain, 1e-5, new(vocab, hidden), **how)


def tiled_gate_up(rows: int, hidden: int, gated: int, dtype: torch.dtype) -> None:
    x, gain, weight = (torch.empty(shape, dtype=dtype) for shape in ((rows, hidden), (hidden,), (2 * gated, hidden)))
    triton_ops.norm_gate_up(x, gain, 1e-5, weight, pdl=True, form="tiled")


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every family over the head dims, page sizes and dtypes that models use; the thunks call the wrappers."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dim, page in ((64, 16), (64, 64), (96, 16), (96, 64), (128, 16), (128, 64), (128, 128), (256, 64)):
        name = f"bf16 D={dim} page={page}"
        yield f"prefill {name} large", lambda d=dim, p=page: attention("prefill", d, p, bf16, 32, 8, 1024)
        yield f"prefill {name} small", lambda d=dim, p=page: attention("prefill", d, p, bf16, 32, 8, 64)
        yield f"decode {name} split", lambda d=dim, p=page: attention("decode", d, p, bf16, 32, 8, 1)
        yield f"decode {name} direct", lambda d=dim, p=page: attention("decode", d, p, bf16, 32, 8, 64)
    for dim, page in ((64, 16), (128, 64)):
        name = f"fp32 D={dim} page={page}"
        yield f"prefill {name}", lambda d=dim, p=page: attention("prefill", d, p, fp32, 32, 8, 64)
        yield f"decode {name} split", lambda d=dim, p=page: attention("decode", d, p, fp32, 32, 8, 1)
    for heads, kv_heads in ((9, 3), (14, 2), (16, 8), (32, 1), (71, 1)):
        name = f"bf16 D=64 heads={heads}/{kv_heads}"
        yield f"prefill {name}", lambda h=heads, k=kv_heads: attention("prefill", 64, 16, bf16, h, k, 4096)
        yield f"decode {name}", lambda h=heads, k=kv_heads: attention("decode", 64, 16, bf16, h, k, 1)
    for dim in (64, 96, 128):
        yield f"rope bf16 D={dim}", lambda d=dim: rope(d, 16, bf16, False)
        yield f"rope bf16 D={dim} norm", lambda d=dim: rope(d, 16, bf16, True)
    yield "rope fp32 D=128 norm", lambda: rope(128, 16, fp32, True)
    for width in (576, 2048, 4096, 8192):
        yield f"rms_norm bf16 H={width}", lambda w=width: norms(w, bf16)
    yield "rms_norm fp32 H=2048", lambda: norms(2048, fp32)
    for columns, width, dtype in ((6144, 4096, bf16), (576, 1536, bf16), (960, 576, bf16), (2048, 2048, fp32)):
        for phase in PHASES:
            name = f"linear {dtype} {columns}x{width} {phase}"
            yield name, lambda n=columns, k=width, t=dtype, p=phase: matmul(n, k, t, p)
    for model, sizes, vocab, counts in (
        ("1B", (2048, 8192, 3072, 2048), 128256, (1, 2, 8, 64)),
        ("8B", (4096, 14336, 6144, 4096), 128256, (1, 4, 16, 64)),
        ("0.6B", (1024, 3072, 4096, 2048), 151936, (1, 8)),
        ("135M", (576, 1536, 960, 576), 49152, (1, 8)),
    ):
        for rows in counts:
            yield (
                f"skinny bf16 {model} B={rows} pdl",
                lambda b=rows, s=sizes, v=vocab: skinny(b, s, v, bf16, True),
            )
    for rows, dtype, pdl in ((1, bf16, False), (4, bf16, False), (8, bf16, False), (1, fp32, True), (8, fp32, True)):
        yield (
            f"skinny {dtype} 1B B={rows}{' pdl' if pdl else ''}",
            lambda b=rows, t=dtype, p=pdl: skinny(b, (2048, 8192, 3072, 2048), 128256, t, p),
        )
    for hidden, width in ((2048, 8192), (4096, 14336), (576, 1536)):
        for rows in (64, 256):
            yield (
                f"tiled bf16 gate_up {width}x{hidden} B={rows} pdl",
                lambda b=rows, h=hidden, w=width: tiled_gate_up(b, h, w, bf16),
            )
    for width, dtype in ((8192, bf16), (1536, bf16), (8192, fp32)):
        for pdl in (False, True):
            yield (
                f"swiglu {dtype} F={width}{' pdl' if pdl else ''}",
                lambda w=width, t=dtype, p=pdl: triton_ops.swiglu(torch.empty(1, 2 * w, dtype=t), pdl=p),
            )
    for vocab, dtype in ((49152, bf16), (128256, bf16), (151936, bf16), (128256, fp32)):
        yield f"sample {dtype} V={vocab}", lambda v=vocab, t=dtype: sampling(v, t)
    for page in (16, 64):
        yield f"advance page={page}", lambda p=page: advance(p)


def record() -> list[Launch]:
    """Run every case with launches recorded in place of being run; equal launches are kept once."""
    found: dict[str, Launch] = {}
    case = ""

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = describe(case, self, args, kwargs)
        found.setdefault(launch.key(), launch)

    original, JITFunction.run = JITFunction.run, run
    try:
        for name, call in cases():
            case = name  # read by `run`
            call()
    finally:
        JITFunction.run = original
    return list(found.values())


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a cubin, as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage printed no REG and STACK: {text!r}")
    return int(found[1]), int(found[2])


def pdl_launch(launch: Launch) -> bool:
    return bool(launch.options.get("launch_pdl"))


def check_wait(ptx: str) -> None:
    """One wait, dependents launched before it, and nothing written or pipelined before it."""
    before, *after = ptx.split("griddepcontrol.wait")
    early = re.findall(r"\b(?:st\.global|cp\.async\.c|atom\.|red\.)", before)
    if len(after) != 1 or early or "griddepcontrol.launch_dependents" not in before:
        raise RuntimeError(f"{len(after)} waits, before the first of them {early}")


def build(job: tuple[int, int]) -> Report:
    """Compile launch `job[0]` for target `job[1]`; a failure is a report, so that the table stays whole."""
    launch, cc = LAUNCHES[job[0]], job[1]
    name = launch.kernel.fn.__name__
    try:
        kind = GluonASTSource if getattr(launch.kernel, "is_gluon", bool)() else ASTSource
        source = kind(launch.kernel, launch.signature, launch.constants, launch.attrs)
        compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=launch.options)
        registers, stack = resources(compiled.asm["cubin"])
        if pdl_launch(launch):
            check_wait(compiled.asm["ptx"])
    except Exception as error:  # the compiler raises many types; each is reported with its text
        return Report(name, launch.case, cc, 0, 0, 0, f"{type(error).__name__}: {str(error)[:300]}")
    report = Report(name, launch.case, cc, registers, stack, int(compiled.metadata.shared))
    if cc in SMEM_LIMIT and report.shared > SMEM_LIMIT[cc]:
        report.error = f"{report.shared} bytes of shared memory, sm_{cc} has {SMEM_LIMIT[cc]}"
    elif cc == 90 and stack > 0:
        report.error = f"spills: {stack} bytes of stack"
    return report


LAUNCHES: list[Launch] = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="80,90,100", help="compute capabilities, comma separated")
    parser.add_argument("--only", default="", help="compile only cases that contain this text")
    parser.add_argument("--json", type=Path, help="write the table here too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    begin = time.perf_counter()
    LAUNCHES.extend(launch for launch in record() if args.only in launch.case)
    targets = [int(t) for t in args.targets.split(",")]
    # fork: workers inherit the recorded launches, which hold functions that do not pickle.
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        # Programmatic dependent launch exists from compute capability 9 on.
        jobs = [(i, cc) for cc in targets for i, launch in enumerate(LAUNCHES) if cc >= 90 or not pdl_launch(launch)]
        reports = pool.map(build, jobs, chunksize=1)
    print(f"{'kernel':<16} {'case':<44} {'target':>6} {'regs':>5} {'stack':>6} {'smem':>7}")
    for r in reports:
        flag = f"  FAIL {r.error}" if r.error else ""
        print(f"{r.kernel:<16} {r.case:<44} {r.target:>6} {r.registers:>5} {r.stack:>6} {r.shared:>7}{flag}")
    failures = sum(r.error is not None for r in reports)
    seconds = time.perf_counter() - begin
    print(f"triton {triton.__version__}: {len(reports)} variants, {failures} failures, {seconds:.0f} s")
    if args.json:
        table = {"triton": triton.__version__, "seconds": round(seconds, 1), "variants": [asdict(r) for r in reports]}
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
