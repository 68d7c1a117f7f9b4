"""Sampling against its twin, in the interpreter: noise bit for bit, greedy ties, top-k and top-p sets, distribution."""

import pytest
import torch
import triton
import triton.language as tl

from bucketgraph.kernels import ops, reference, sampling

triton_ops = ops("cuda")


@triton.jit
def _draw(seed, position, out, V: tl.constexpr):
    token = tl.arange(0, V)
    tl.store(out + token, sampling._uniform(tl.load(seed), token, tl.load(position)))


def params(rows, temperature=1.0, top_k=0, top_p=1.0, first_seed=0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.arange(rows) + first_seed,
        torch.full((rows,), 3, dtype=torch.int32),
    )


def test_philox_matches_the_published_known_answers():
    """The vectors of Random123 for philox4x32-10 whose upper counter words are zero."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert reference.philox(zero, zero, zero).item() == 0x6627E8D5


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("position", [0, 131071])
def test_uniform_noise_is_bit_equal_to_the_twin(seed, position):
    out = torch.empty(256)
    seeds, positions = torch.tensor([seed]), torch.tensor([position], dtype=torch.int32)
    _draw[(1,)](seeds, positions, out, V=256)
    ref = reference.uniform(seeds, positions, 256)[0]
    assert torch.equal(out, ref)
    assert ref.min() > 0 and ref.max() < 1


def test_uniform_noise_stays_inside_the_open_interval_at_both_ends():
    words = torch.tensor([0, 0xFFFFFFFF])
    u = ((words >> 9).float() + 0.5) * 2.0**-23
    assert u[0] > 0 and u[1] < 1 and torch.isfinite(-torch.log(-torch.log(u))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_takes_the_first_of_ties_across_tiles(dtype, nan_memory):
    logits = torch.randn(6, 2500).clamp(-2, 2).to(dtype)
    logits[0, [7, 1500]] = 9.0
    logits[1, [1024, 2499]] = 9.0
    logits[2] = 0.0
    logits[3] = -1.0
    logits[3, 5], logits[3, 9] = -0.0, 0.0
    logits[4, 2000] = float("nan")
    logits[5] = float("-inf")
    out, ref = (m.sample(logits, *params(6, temperature=0.0, top_k=3, top_p=0.5)) for m in (triton_ops, reference))
    assert out.tolist() == ref.tolist()
    assert out[:4].tolist() == [7, 1024, 0, 5] and out.dtype == torch.int64


def test_mixed_rows_agree_with_the_twin(nan_memory):
    logits = torch.randn(6, 1300) * 3
    temperature = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0, 1e-6])
    top_k = torch.tensor([0, 0, 7, 0, 1300, 5], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.6, 0.5, 0.9])
    seeds = torch.tensor([5, 5, -7, 2**40, 9, 1])
    positions = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    out, ref = (m.sample(logits, temperature, top_k, top_p, seeds, positions) for m in (triton_ops, reference))
    assert out.tolist() == ref.tolist()


def support(logits, draws, **kwargs):
    """The set of tokens that `draws` seeds draw from the kernel; the twin must draw the same tokens."""
    many = logits[None].expand(draws, -1).contiguous()
    out, ref = (m.sample(many, *params(draws, **kwargs)).tolist() for m in (triton_ops, reference))
    assert out == ref
    return set(out)


def test_top_k_keeps_ties_of_the_kth_value():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, -5.0])
    assert support(logits, 30, top_k=2) == {1, 2, 3, 4}


def test_top_p_keeps_a_token_while_the_mass_strictly_above_is_below_p():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for p, expected in ((0.0, {0}), (0.49, {0}), (0.51, {0, 1}), (0.74, {0, 1}), (0.76, {0, 1, 2, 3})):
        assert support(logits, 6 if len(expected) == 1 else 24, top_p=p) == expected, p


def test_top_p_acts_on_what_top_k_left():
    # After top-k 2 the masses are 2/3 and 1/3: p = 0.6 leaves one token, though 0.5 of the whole is below 0.6.
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    assert support(logits, 10, top_k=2, top_p=0.6) == {1}


def test_draws_follow_the_distribution():
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    draws = 1000
    many = (p.log() * 0.7)[None].expand(draws, -1).contiguous()
    for module in (triton_ops, reference):
        counts = torch.bincount(module.sample(many, *params(draws, temperature=0.7)), minlength=5)
        chi2 = ((counts - draws * p) ** 2 / (draws * p)).sum()
        assert chi2 < 18.5, counts  # 4 degrees of freedom: exceeded once in a thousand


def test_a_row_does_not_depend_on_its_place_or_its_neighbours():
    logits = torch.randn(4, 300)
    args = params(4, top_p=0.9)
    all_rows = triton_ops.sample(logits, *args)
    alone = [triton_ops.sample(logits[i : i + 1], *(a[i : i + 1] for a in args)).item() for i in (3, 1)]
    assert alone == [all_rows[3].item(), all_rows[1].item()]


def test_another_position_draws_anew_and_the_same_one_draws_the_same():
    logits = torch.zeros(1, 300)
    t, k, p, seeds, _ = params(1)
    tokens = [triton_ops.sample(logits, t, k, p, seeds, torch.tensor([i], dtype=torch.int32)).item() for i in range(6)]
    assert len(set(tokens)) > 3
    assert triton_ops.sample(logits, t, k, p, seeds, torch.tensor([2], dtype=torch.int32)).item() == tokens[2]
