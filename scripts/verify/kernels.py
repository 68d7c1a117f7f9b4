"""Kernels in Triton's interpreter: padded and exact give the same bits, and exact what the plain-torch twin gives.

Needs a process of its own, since Triton reads TRITON_INTERPRET when it is imported. A kernel written later is verified
by a line in `KERNELS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .core import Check, Setting, Trial, Wrong, require

NAN = float("nan")
Args = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """`draw` makes (exact, padded) arguments; `run` gives the results whose real part must not change."""

    name: str
    draw: Callable[[random.Random], tuple[Args, Args, int]]  # and the number of real rows
    run: Callable[[ModuleType, Args], list[Tensor]]
    tolerance: float = 1e-5


def _rows(x: Tensor, pad: int, fill: float = NAN) -> Tensor:
    return torch.cat([x, x.new_full((pad, *x.shape[1:]), fill)])


def _sizes(generator: random.Random) -> tuple[int, int]:
    return generator.randint(1, 33), generator.choice((0, 1, 7, 15))


def _norm(generator: random.Random) -> tuple[Args, Args, int]:
    rows, pad = _sizes(generator)
    x, weight = torch.randn(rows, 96), torch.randn(96)
    args = {"x": x, "weight": weight, "eps": 1e-6}
    return args, {**args, "x": _rows(x, pad)}, rows


def _swiglu(generator: random.Random) -> tuple[Args, Args, int]:
    rows, pad = _sizes(generator)
    x = torch.randn(rows, 128)
    return {"gate_up": x}, {"gate_up": _rows(x, pad)}, rows


def _linear(generator: random.Random) -> tuple[Args, Args, int]:
    rows, pad = _sizes(generator)
    x, weight, bias, residual = torch.randn(rows, 80), torch.randn(48, 80), torch.randn(48), torch.randn(rows, 48)
    args = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    args["phase"] = generator.choice(("prefill", "decode"))
    return args, {**args, "x": _rows(x, pad), "residual": _rows(residual, pad)}, rows


def _rope(generator: random.Random) -> tuple[Args, Args, int]:
    rows, pad = _sizes(generator)
    heads, kv_heads, dim = 2, 1, 64
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    slots = torch.randperm(5 * 16)[:rows]
    args = {
        "qkv": qkv,
        "positions": torch.randint(0, 32, (rows,), dtype=torch.int32),
        "cos_sin": torch.randn(32, dim),
        "slot_mapping": slots,
        "num_heads": heads,
    }
    more = {"qkv": _rows(qkv, pad), "positions": _rows(args["positions"], pad, 31)}
    return args, {**args, **more, "slot_mapping": _rows(slots, pad, -1)}, rows


def _run_rope(ops: ModuleType, args: Args) -> list[Tensor]:
    qkv = args["qkv"]
    whole = qkv.new_zeros(2, 7, 1, 16, 64)  # a page before and one behind that nothing may write
    q = ops.rope_and_write(k_cache=whole[0, 1:6], v_cache=whole[1, 1:6], **args)
    require(not bool(whole[:, (0, 6)].any()), "rope_and_write wrote outside the cache")
    return [q, whole.flatten()[None]]


def _paged(lens: list[int], width: int, page: int = 16, kv_heads: int = 1, dim: int = 64) -> Args:
    """Each row's tokens on shuffled pages, and NaN wherever no token is; page 0 is zeros."""
    counts = [-(-n // page) for n in lens]
    order = torch.randperm(sum(counts)) + 1
    tables = torch.zeros(len(lens), width, dtype=torch.int32)
    caches = [torch.full((sum(counts) + 3, kv_heads, page, dim), NAN) for _ in range(2)]
    used = 0
    for row, (n, count) in enumerate(zip(lens, counts, strict=True)):
        pages = order[used : used + count]
        tables[row, :count] = pages.int()
        for cache in caches:
            tokens = torch.randn(count * page, kv_heads, dim)
            tokens[n:] = NAN
            cache[pages] = tokens.view(count, page, kv_heads, dim).transpose(1, 2)
        used += count
    for cache in caches:
        cache[0] = 0
    return {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables,
        "kv_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": 0.125,
    }


def _more_rows(args: Args, pad: int) -> Args:
    tables, lens = _rows(args["block_tables"], pad, 0), _rows(args["kv_lens"], pad, 0)
    return {**args, "block_tables": tables.contiguous(), "kv_lens": lens}


def _prefill(generator: random.Random) -> tuple[Args, Args, int]:
    before = [generator.choice((0, 0, 5, 16)) for _ in range(generator.randint(1, 3))]
    runs = [generator.choice((1, 2, 15, 16, 17, 40)) for _ in before]
    args = _paged([b + n for b, n in zip(before, runs, strict=True)], 5)
    rows, pad = sum(runs), generator.choice((0, 1, 19))
    q = torch.randn(rows, 2, 64)
    ends = torch.tensor(runs, dtype=torch.int32).cumsum(0).int()
    slots = generator.randint(0, 3)
    more = {"q": _rows(q, pad), "query_ends": torch.cat([ends, ends[-1:].expand(slots)])}
    return {**args, "q": q, "query_ends": ends}, {**_more_rows(args, slots), **more}, rows


def _sample(generator: random.Random) -> tuple[Args, Args, int]:
    rows, pad = generator.randint(1, 4), generator.randint(0, 4)
    args = {
        "logits": torch.randn(rows, 300) * 3,
        "temperature": torch.tensor([generator.choice((0.0, 0.7, 1.0)) for _ in range(rows)]),
        "top_k": torch.tensor([generator.choice((0, 1, 20)) for _ in range(rows)], dtype=torch.int32),
        "top_p": torch.tensor([generator.choice((1.0, 0.9)) for _ in range(rows)]),
        "seeds": torch.tensor([generator.getrandbits(62) for _ in range(rows)]),
        "positions": torch.tensor([generator.randrange(1000) for _ in range(rows)], dtype=torch.int32),
    }
    fills = {"logits": 1e30, "temperature": 1.0, "top_k": 3, "top_p": 0.5, "seeds": 7, "positions": 0}
    return args, {name: _rows(tensor, pad, fills[name]) for name, tensor in args.items()}, rows


def _few(generator: random.Random) -> tuple[Tensor, Tensor, int]:
    """1 to 16 rows, exact and padded. A bucket has one kernel, which their number chooses: whole rows up to 4."""
    low, high = generator.choice(((1, 4), (5, 16)))
    rows = generator.randint(low, high)
    x = torch.randn(rows, 96)
    return x, _rows(x, generator.randint(0, high - rows)), rows


def _norm_linear(generator: random.Random) -> tuple[Args, Args, int]:
    exact, padded, rows = _few(generator)
    args = {"norm_weight": torch.randn(96), "eps": 1e-6, "weight": torch.randn(48, 96), "bias": torch.randn(48)}
    return {**args, "residual": exact}, {**args, "residual": padded}, rows


def _linear_add(generator: random.Random) -> tuple[Args, Args, int]:
    exact, padded, rows = _few(generator)
    args, residual = {"weight": torch.randn(48, 96)}, torch.randn(rows, 48)
    more = {"x": padded, "residual": _rows(residual, len(padded) - rows)}
    return {**args, "x": exact, "residual": residual}, {**args, **more}, rows


def _norm_gate_up(generator: random.Random) -> tuple[Args, Args, int]:
    exact, padded, rows = _few(generator)
    args = {"norm_weight": torch.randn(96), "eps": 1e-6, "gate_up": torch.randn(96, 96)}
    return {**args, "residual": exact}, {**args, "residual": padded}, rows


def _decode(generator: random.Random) -> tuple[Args, Args, int]:
    lens = [generator.choice((1, 15, 16, 17, 64, 65, 70, 90)) for _ in range(generator.randint(1, 3))]
    args = _paged(lens, 6)
    rows, pad, last = len(lens), generator.randint(0, 4), args["kv_lens"].long() - 1
    slots = args["block_tables"].gather(1, last[:, None] // 16)[:, 0].long() * 16 + last % 16
    if generator.random() < 0.3:
        slots[generator.randrange(rows)] = -1  # its token is attended, and not kept
    own = {"qkv": torch.randn(rows, 4 * 64), "positions": last.int(), "slot_mapping": slots}
    args |= {"cos_sin": torch.randn(96, 64), "num_heads": 2, "split_size": generator.choice((64, 64, 128))}
    fills = {"qkv": NAN, "positions": 95, "slot_mapping": -1}
    more = {name: _rows(tensor, pad, fills[name]) for name, tensor in own.items()}
    return {**args, **own}, {**_more_rows(args, pad), **more}, rows


def _run_decode(ops: ModuleType, args: Args) -> list[Tensor]:
    # A page before and one behind that nothing may write.
    wholes = {n: torch.nn.functional.pad(args[n], (0, 0, 0, 0, 0, 0, 1, 1)) for n in ("k_cache", "v_cache")}
    out = ops.decode_attention(**{**args, **{n: whole[1:-1] for n, whole in wholes.items()}})
    require(
        not any(bool(w[0].any() or w[-1].any()) for w in wholes.values()), "decode_attention wrote outside the cache"
    )
    return [out, *(whole.nan_to_num().flatten()[None] for whole in wholes.values())]


def _plain(name: str) -> Callable[[ModuleType, Args], list[Tensor]]:
    def run(ops: ModuleType, args: Args) -> list[Tensor]:
        made = getattr(ops, name)(**args)
        return [made] if isinstance(made, Tensor) else list(made)

    return run


KERNELS = (
    Kernel("rms_norm", _norm, _plain("rms_norm")),
    Kernel("rope_and_write", _rope, _run_rope),
    Kernel("swiglu", _swiglu, _plain("swiglu")),
    Kernel("linear", _linear, _plain("linear")),
    Kernel("prefill_attention", _prefill, _plain("prefill_attention")),
    Kernel("norm_linear", _norm_linear, _plain("norm_linear")),
    Kernel("linear_add", _linear_add, _plain("linear_add")),
    Kernel("norm_gate_up", _norm_gate_up, _plain("norm_gate_up")),
    Kernel("decode_attention", _decode, _run_decode),
    Kernel("sample", _sample, _plain("sample"), tolerance=0.0),
)


def no_interpreter(setting: Setting) -> str | None:
    """Why Triton's interpreter cannot run here: the one of 3.6 takes loop bounds as numpy 2.4 no longer gives them."""
    import numpy
    import triton

    old, new = triton.__version__.startswith("3.6."), tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)
    versions = f"triton {triton.__version__} with numpy {numpy.__version__}"
    return f"the interpreter of {versions} cannot loop" if old and new else None


def interp_exact(setting: Setting) -> Trial:
    from bucketgraph.kernels import reference, triton_ops

    def trial(seed: int) -> None:
        generator = random.Random(seed)
        torch.manual_seed(seed)
        kernel = KERNELS[seed % len(KERNELS)]
        exact, padded, rows = kernel.draw(generator)
        one, other = kernel.run(triton_ops, exact), kernel.run(triton_ops, padded)
        for got, want in zip(other, one, strict=True):
            if not torch.equal(got[: len(want)], want):
                raise Wrong(f"{kernel.name}: padding changes the result of {rows} rows")
        if "attention" in kernel.name:  # others may leave what they like in rows that nobody owns
            require(not bool(other[0][rows:].any()), f"{kernel.name}: a padded row is not zeros")
        for got, twin in zip(one, kernel.run(reference, exact), strict=True):
            apart = float((got.double() - twin.double()).norm() / twin.double().norm().clamp_min(1e-30))
            require(apart <= kernel.tolerance, f"{kernel.name}: {apart:.2e} from its twin")

    return trial


CHECKS = (
    Check(
        "interp_exact",
        "kernels in the interpreter: padding changes no bit, and the twin agrees",
        300,
        interp_exact,
        cpu=0.3,
        share=2,
        workers=3,
        environment={"TRITON_INTERPRET": "1"},
        unable=no_interpreter,
    ),
)
