"""The fast decode path's kernels on a GPU: against float64 twins, as a chain in a graph, and what they compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Fused, Paged, decode, fused_case, relative_error

from bucketgraph.kernels import decode_attention, reference, rms_norm, skinny, triton_ops

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 2e-5}
PDL = triton_ops.pdl_supported(DEVICE)
ROWS = list(range(1, 17))
STREAMED = pytest.mark.skipif(not triton_ops.streamed_available(), reason="this Triton has no Gluon as it is used here")

# columns, K, dtype: of Llama 1B and 8B, Qwen3-0.6B and SmolLM2
SIZES = [
    (3072, 2048, BF16),
    (4096, 14336, BF16),
    (1024, 2048, BF16),
    (960, 576, BF16),
    (576, 1536, BF16),
    (2048, 2048, FP16),
    (2048, 8192, FP16),
    (2048, 2048, FP32),
    (2048, 8192, FP32),
]


def matrices(rows: int, columns: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, gain = torch.randn(rows, width, device=DEVICE), torch.rand(width, device=DEVICE) + 0.5
    weight = torch.randn(columns, width, device=DEVICE) / width**0.5
    residual, bias = torch.randn(rows, columns, device=DEVICE), torch.randn(columns, device=DEVICE)
    return tuple(t.to(dtype) for t in (x, gain, weight, residual, bias))


def compare(rows: int, columns: int, width: int, dtype: torch.dtype, pdl: bool, form: str = "auto") -> None:
    x, gain, weight, residual, bias = matrices(rows, columns, width, dtype)
    x64, gain64, weight64, residual64, bias64 = (t.double() for t in (x, gain, weight, residual, bias))
    out = triton_ops.norm_linear(x, gain, 1e-5, weight, bias, pdl=pdl, form=form)
    assert relative_error(out, reference.norm_linear(x64, gain64, 1e-5, weight64, bias64)) < TOLERANCE[dtype]
    out = triton_ops.linear_add(x, weight, residual, pdl=pdl, form=form)
    right = reference.linear_add(x64, weight64, residual64)
    assert relative_error(out, right) < TOLERANCE[dtype]
    assert triton_ops.linear_add(x, weight, residual, residual, pdl=pdl, form=form) is residual
    assert torch.equal(residual, out)
    even = columns // 2 * 2
    out = triton_ops.norm_gate_up(x, gain, 1e-5, weight[:even], pdl=pdl, form=form)
    assert relative_error(out, reference.norm_gate_up(x64, gain64, 1e-5, weight64[:even])) < TOLERANCE[dtype]


@pytest.mark.skipif(not PDL, reason="needs tensor descriptors")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("columns", "width"), [(1000, 1000), (1536, 576), (14336, 4096), (8192, 2048)])
def test_the_tiled_gate_up(columns, width, dtype, nan_memory):
    for rows in (1, 17, 64, 65, 128, 200, 256):
        x, gain, weight, _, _ = matrices(rows, 2 * columns, width, dtype)
        right = reference.norm_gate_up(x.double(), gain.double(), 1e-5, weight.double())
        found = [triton_ops.norm_gate_up(x, gain, 1e-5, weight, pdl=pdl, form="tiled") for pdl in (False, True)]
        assert torch.equal(*found) and relative_error(found[0], right) < TOLERANCE[dtype]
        half = triton_ops.norm_gate_up(x[: rows // 2 + 1], gain, 1e-5, weight, form="tiled")
        if (rows <= 64) == (len(half) <= 64):
            assert torch.equal(half, found[0][: len(half)]), "a row's bits depend on its tile alone"


@pytest.mark.parametrize("rows", ROWS)
def test_every_row_count_in_bfloat16(rows, nan_memory):
    compare(rows, 1000, 1000, BF16, PDL)


@pytest.mark.parametrize(("columns", "width", "dtype"), SIZES)
def test_matmuls_of_real_models(columns, width, dtype, nan_memory):
    for rows in (1, 4, 16):
        compare(rows, columns, width, dtype, PDL)


@STREAMED
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_count_streamed(rows, nan_memory):
    compare(rows, 1000, 1000, BF16, PDL, "streamed")


@STREAMED
@pytest.mark.parametrize(("columns", "width"), [(n, k) for n, k, dtype in SIZES if dtype == BF16] + [(33, 96), (8, 64)])
def test_streamed_matmuls_of_real_models_and_of_sizes_that_nothing_divides(columns, width, nan_memory):
    for rows in (1, 8, 9, 16):
        compare(rows, columns, width, BF16, PDL, "streamed")


@STREAMED
@pytest.mark.parametrize("width", [2048, 14336, 1000])
def test_a_streamed_row_is_bitwise_independent_of_the_others_and_of_how_many_of_8_or_16_there_are(width):
    x, gain, weight, residual, _ = matrices(16, 3072, width, BF16)
    calls = [
        lambda rows: triton_ops.norm_linear(x[rows].contiguous(), gain, 1e-5, weight, form="streamed"),
        lambda rows: triton_ops.linear_add(x[rows].contiguous(), weight, residual[rows], form="streamed"),
        lambda rows: triton_ops.norm_gate_up(x[rows].contiguous(), gain, 1e-5, weight, form="streamed"),
    ]
    together = [call(slice(0, 16)) for call in calls]
    for call, whole in zip(calls, together, strict=True):
        few = call(slice(3, 11))
        for first, last in ((3, 4), (5, 6), (4, 11)):
            assert torch.equal(call(slice(first, last)), few[first - 3 : last - 3]), (first, last)
        for first, last in ((0, 9), (3, 14), (7, 16)):
            assert torch.equal(call(slice(first, last)), whole[first:last]), (first, last)
    x[:5], x[6:] = float("nan"), float("inf")
    for call, whole in zip(calls, together, strict=True):
        assert torch.equal(call(slice(0, 16))[5], whole[5])


@STREAMED
def test_streaming_takes_bfloat16_and_few_rows_only():
    for rows, dtype in ((17, BF16), (1, FP16), (1, FP32)):
        x, gain, weight, _, _ = matrices(rows, 64, 64, dtype)
        with pytest.raises(ValueError, match="streamed"):
            triton_ops.norm_linear(x, gain, 1e-5, weight, form="streamed")


def test_lm_head_of_a_large_vocabulary(nan_memory):
    for rows in (1, 16):
        x, gain, weight, _, _ = matrices(rows, 151936, 1024, BF16)
        out = triton_ops.norm_linear(x, gain, 1e-6, weight, pdl=PDL)
        assert relative_error(out, reference.norm_linear(x.float(), gain.float(), 1e-6, weight.float())) < 1e-2


@pytest.mark.parametrize("rows", [8, 16])
def test_a_row_of_the_dot_form_is_bitwise_independent_of_the_others(rows):
    x, gain, weight, _, _ = matrices(rows, 3072, 2048, BF16)
    tile = skinny.skinny_tile(rows, 3072, 2048, BF16, False)
    assert tile[3] > 0
    together = triton_ops.norm_linear(x, gain, 1e-5, weight, tile=tile)
    alone = triton_ops.norm_linear(x[5:6].contiguous(), gain, 1e-5, weight, tile=tile)
    assert torch.equal(alone[0], together[5])
    x[:5], x[6:] = float("nan"), float("inf")
    assert torch.equal(triton_ops.norm_linear(x, gain, 1e-5, weight, tile=tile)[5], together[5])


def test_the_rounding_points_are_those_of_the_separate_kernels():
    # Not one rounding to bfloat16 more or less: nearly every element is the same, since only float32 sums differ.
    x, gain, weight, residual, _ = matrices(1, 4096, 2048, BF16)
    normed = triton_ops.rms_norm(x, gain, 1e-5)

    def linear(rows: torch.Tensor) -> torch.Tensor:
        return (rows.float() @ weight.float().T).to(BF16)

    pairs = [
        (triton_ops.norm_linear(x, gain, 1e-5, weight), linear(normed)),
        (triton_ops.linear_add(x, weight, residual), residual + linear(x)),
        (triton_ops.norm_gate_up(x, gain, 1e-5, weight), triton_ops.swiglu(linear(normed))),
    ]
    for fused, separate in pairs:
        assert (fused == separate).float().mean() > 0.9


# head_dim, query heads, KV heads, page size, QK norm, dtype
HEADS = [
    (64, 32, 8, 16, False, BF16),
    (128, 32, 8, 16, False, BF16),
    (128, 16, 8, 64, True, BF16),
    (64, 9, 3, 16, False, BF16),
    (96, 32, 32, 64, False, BF16),
    (64, 14, 2, 128, False, FP16),
    (128, 32, 1, 16, True, FP16),
    (64, 71, 1, 16, False, FP16),
    (128, 8, 2, 16, True, FP32),
    (96, 6, 2, 16, False, FP32),
]


def attend(module, case: Fused, **kwargs):
    """The result and the caches it leaves; the case's own caches stay as they are."""
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    args = (case.qkv, case.positions, case.cos_sin, k_cache, v_cache, case.slots, case.block_tables, case.kv_lens)
    scale = case.k_cache.shape[3] ** -0.5
    out = module.decode_attention(*args, case.heads, scale, case.q_norm, case.k_norm, 1e-6, **kwargs)
    return out, k_cache, v_cache


def wide(case: Fused) -> Fused:
    norms = {name: None if t is None else t.double() for name, t in (("q_norm", case.q_norm), ("k_norm", case.k_norm))}
    caches = {"k_cache": case.k_cache.double(), "v_cache": case.v_cache.double(), "qkv": case.qkv.double()}
    return replace(case, **caches, **norms)


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "page", "norm", "dtype"), HEADS)
def test_attention_writes_one_token_a_row_and_never_reads_stale_nan(
    dim, heads, kv_heads, page, norm, dtype, nan_memory
):
    case = fused_case([4095, 0, 1, 64, 65, 700, 17], heads, kv_heads, dim, page, norm, dtype, DEVICE)
    case.qkv[1] = float("nan")
    ref, *expected = attend(reference, wide(case))
    for kwargs in ({}, {"num_splits": 1}, {"num_splits": 16}, {"split_size": 256}):
        out, *caches = attend(triton_ops, case, pdl=PDL, **kwargs)
        assert relative_error(out, ref) < TOLERANCE[dtype], kwargs
        assert (out[1] == 0).all()
        for cache, right in zip(caches, expected, strict=True):
            assert torch.equal(cache.isnan(), right.isnan())
            assert relative_error(cache.nan_to_num(), right.nan_to_num()) < TOLERANCE[dtype]


def test_the_new_token_is_what_rope_and_write_writes():
    case = fused_case([513, 64, 1, 2000], 32, 8, 128, 16, True, BF16, DEVICE)
    out, k_cache, v_cache = attend(triton_ops, case, num_splits=8)
    k_two, v_two = case.k_cache.clone(), case.v_cache.clone()
    q = triton_ops.rope_and_write(
        case.qkv, case.positions, case.cos_sin, k_two, v_two, case.slots, 32, case.q_norm, case.k_norm, 1e-6
    )
    written = Paged(k_two, v_two, case.block_tables, case.kv_lens)
    assert relative_error(out, decode(triton_ops, written, q, num_splits=8).flatten(1)) < 4e-3
    assert torch.equal(v_cache.nan_to_num(), v_two.nan_to_num())
    assert relative_error(k_cache.nan_to_num(), k_two.nan_to_num()) < 1e-4


def test_attention_with_slot_minus_one_writes_nothing():
    case = fused_case([700, 33], 32, 8, 64, 16, False, BF16, DEVICE)
    written = attend(triton_ops, case)[0]
    case.slots.fill_(-1)
    out, k_cache, v_cache = attend(triton_ops, case)
    assert torch.equal(out, written)
    assert torch.equal(k_cache.nan_to_num(), case.k_cache.nan_to_num())
    assert torch.equal(v_cache.nan_to_num(), case.v_cache.nan_to_num())


class Chain:
    """Layers of decode over their own weights, with buffers that the next layers reuse, as a model captures them."""

    def __init__(self, rows: int, norm: bool, layers: int = 6) -> None:
        self.hidden, self.heads, self.kv_heads, self.dim, gated = 1024, 16, 8, 64, 3072
        lens = [(37 * r * r + 300) % 700 + 1 for r in range(rows)]
        self.cases = [
            fused_case(lens, self.heads, self.kv_heads, self.dim, 16, norm, BF16, DEVICE) for _ in range(layers)
        ]
        for case in self.cases[1:]:  # one set of tables, lengths and slots for all layers
            case.block_tables, case.kv_lens, case.slots = (
                self.cases[0].block_tables,
                self.cases[0].kv_lens,
                self.cases[0].slots,
            )
            case.k_cache, case.v_cache = self.cases[0].k_cache.clone(), self.cases[0].v_cache.clone()

        def weight(n: int, k: int) -> torch.Tensor:
            return (torch.randn(n, k, device=DEVICE) / k**0.5).to(BF16)

        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        self.layers = [
            (
                weight(qkv, self.hidden),
                weight(self.hidden, self.heads * self.dim),
                weight(2 * gated, self.hidden),
                weight(self.hidden, gated),
            )
            for _ in range(layers)
        ]
        self.gain = torch.ones(self.hidden, device=DEVICE, dtype=BF16)
        self.embed = torch.randn(1000, self.hidden, device=DEVICE, dtype=BF16)
        self.head = weight(32000, self.hidden)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def step(self, pdl: bool, form: str = "auto") -> torch.Tensor:
        ops, wide = triton_ops, {"pdl": pdl, "form": form}
        how = wide if form != "tiled" else {"pdl": pdl}  # gate and up alone
        x = torch.nn.functional.embedding(self.ids, self.embed)
        for (qkv, o, gate_up, down), case in zip(self.layers, self.cases, strict=True):
            projected = ops.norm_linear(x, self.gain, 1e-5, qkv, **how)
            attended = ops.decode_attention(
                projected,
                case.positions,
                case.cos_sin,
                case.k_cache,
                case.v_cache,
                case.slots,
                case.block_tables,
                case.kv_lens,
                self.heads,
                self.dim**-0.5,
                case.q_norm,
                case.k_norm,
                pdl=pdl,
            )
            x = ops.linear_add(attended, o, x, **how)
            x = ops.linear_add(ops.norm_gate_up(x, self.gain, 1e-5, gate_up, **wide), down, x, x, **how)
        return ops.norm_linear(x, self.gain, 1e-5, self.head, **how)


@pytest.mark.skipif(not PDL, reason="needs programmatic dependent launch")
@pytest.mark.parametrize("form", ["auto", pytest.param("streamed", marks=STREAMED), "tiled"])
@pytest.mark.parametrize(("rows", "norm"), [(1, True), (3, False), (16, False)])
def test_a_chain_in_a_graph_is_bit_for_bit_the_same_with_dependent_launch(rows, norm, form):
    chain = Chain(rows, norm)
    graphs = {}
    for pdl in (False, True):
        chain.step(pdl, form)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = chain.step(pdl, form)
            best = logits.argmax(-1)  # an ordinary kernel after the chain
        graphs[pdl] = graph, logits, best
    for _ in range(50):
        chain.ids.random_(0, 1000)
        results = []
        for graph, logits, best in graphs.values():
            for case in chain.cases:  # what the step before left must not help
                for cache in (case.k_cache, case.v_cache):
                    cache[case.slots // 16, :, case.slots % 16] = float("nan")
            graph.replay()
            results.append((logits.clone(), best.clone(), chain.cases[-1].k_cache.clone()))
        plain, chained = results
        assert not plain[0].isnan().any()
        assert torch.equal(plain[0], chained[0]) and torch.equal(plain[1], chained[1])
        assert torch.equal(plain[2].nan_to_num(), chained[2].nan_to_num())


def compiled() -> dict[str, int]:
    kernels = (skinny._skinny_whole, skinny._skinny_dot, decode_attention._decode, rms_norm._rms_norm)
    return {k.fn.__name__: sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels}


def test_no_row_count_and_no_metadata_alignment_compiles_anew():
    width, columns, heads, kv_heads, dim = 832, 416, 12, 6, 64
    before = compiled()
    for rows in ROWS:
        x, gain, weight, residual, _ = matrices(rows, columns, width, BF16)
        tile = (16, 128, 4, 3)  # one for all row counts: what is counted is the rows' doing
        triton_ops.norm_linear(x, gain, 1e-5, weight, tile=tile)
        triton_ops.linear_add(x, weight, residual, tile=tile)
        triton_ops.norm_gate_up(x, gain, 1e-5, weight, tile=tile)
        triton_ops.norm_linear(x[:1], gain, 1e-5, weight, tile=(1, 1024, 1, 0))
        for odd in (0, 1):
            case = fused_case([5 + rows] * (rows + odd), heads, kv_heads, dim, 16, False, BF16, DEVICE)
            for name in ("positions", "slots", "kv_lens"):
                setattr(case, name, getattr(case, name)[odd:])
            case.qkv, case.block_tables = case.qkv[odd:].contiguous(), case.block_tables[odd:].contiguous()
            for splits in (1, 2, 7):
                attend(triton_ops, case, num_splits=splits)
    new = {name: count - before[name] for name, count in compiled().items()}
    # Whole rows are for one row; three uses of dot; one split writes the result itself; each tile that rows get.
    device = torch.device(DEVICE)
    tiles = {decode_attention.decode_tile(rows * kv_heads, BF16, dim, False, device) for rows in ROWS}
    most = {"_skinny_whole": 1, "_skinny_dot": 3, "_decode": 2 * len(tiles), "_rms_norm": 1}
    # Fewer where a test before this one has compiled the same; one more would be a count that compiles anew.
    assert all(new[name] <= most[name] for name in most), new
