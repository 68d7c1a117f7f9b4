"""Sampling against its twin, in the interpreter: noise bit for bit, greedy ties, top-k and top-p sets, distribution."""

import pytest
import torch
import triton
import triton.language as tl

from bucketgraph.kernels import ops, reference, sampling, sampling_math

triton_ops = ops("cuda")


@triton.jit
def _draw(seed, position, out, V: tl.constexpr):
    token = tl.arange(0, V)
    tl.store(out + token, sampling_math.uniform(tl.load(seed), token, tl.load(position)))


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


def limits(rows, settings):
    """Temperature, top-k and top-p of `rows` rows, which take the settings in turn."""
    t, k, p = (torch.tensor(column).repeat(-(-rows // len(settings)))[:rows] for column in zip(*settings, strict=True))
    return t.float(), k.int(), p.float()


def draws(rows):
    return torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 9999, (rows,), dtype=torch.int32)


@pytest.fixture
def weighings(monkeypatch):
    """A list that grows by each pass over a whole row: what the fast paths are there to avoid."""
    made, weighed = [], sampling._weighed

    def counted(*args):
        made.append(args)
        return weighed(*args)

    monkeypatch.setattr(sampling, "_weighed", counted)
    return made


MIXED = [
    (0.0, 5, 0.5),
    (1.0, 0, 1.0),
    (0.7, 20, 1.0),
    (1.0, 0, 0.9),
    (0.6, 20, 0.8),
    (2.0, 0, 0.3),
    (1.0, 1, 1.0),
    (1.0, 1, 0.5),
    (1.5, 300, 0.95),
    (1.0, 0, 1e-6),
    (1.0, 0, 0.999999),
    (1.0, 40, 0.999999),
    (1.0, 99999, 0.5),
    (0.3, 7, 0.0),
    (1.0, 0, 0.0),
]


@pytest.mark.parametrize("vocab", [1, 9, 1025, 2600])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 8.0])
def test_limited_rows_of_flat_and_peaked_logits_agree_with_the_twin(vocab, spread, nan_memory):
    rows = len(MIXED)
    logits, args = torch.randn(rows, vocab) * spread, (*limits(rows, MIXED), *draws(rows))
    # In float64 the twin rounds nowhere near where these rows are decided.
    assert triton_ops.sample(logits, *args).tolist() == reference.sample(logits.double(), *args).tolist()


@pytest.mark.parametrize(("few", "many"), [(512, 4096), (16, 64), (2, 4)])
def test_ties_of_the_kth_value_agree_with_the_twin_however_few_candidates_fit(few, many, monkeypatch, nan_memory):
    monkeypatch.setattr(sampling, "FEW", few)
    monkeypatch.setattr(sampling, "MANY", many)
    settings = [(1.0, 3, 1.0), (1.0, 30, 1.0), (0.7, 3, 0.6), (1.0, 30, 0.9), (3.0, 900, 0.5), (1.0, 0, 0.5)]
    logits, args = (torch.randn(24, 1500) * 3).round(), (*limits(24, settings), *draws(24))
    assert triton_ops.sample(logits, *args).tolist() == reference.sample(logits.double(), *args).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_more_ties_than_candidates_fit_search_the_row(top_p, weighings, nan_memory):
    logits = torch.zeros(2, 4600)
    logits[1, :100], logits[1, 4300:] = 1.0, -1.0
    args = (*limits(2, [(1.0, 5, top_p), (1.0, 120, top_p)]), *draws(2))
    assert triton_ops.sample(logits, *args).tolist() == reference.sample(logits.double(), *args).tolist()
    assert weighings


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (20, 0.8), (300, 0.95)])
def test_top_k_of_flat_logits_never_passes_over_the_row(top_k, top_p, weighings):
    logits, args = torch.randn(4, 2000) * 1e-2, (*limits(4, [(1.0, top_k, top_p)]), *draws(4))
    assert triton_ops.sample(logits, *args).tolist() == reference.sample(logits.double(), *args).tolist()
    assert not weighings


def scores(logits, seeds, positions):
    return logits - torch.log(-torch.log(reference.uniform(seeds, positions, len(logits))[0]))


def winners(logits, score):
    """Tokens in the order in which top-p is asked: the best, the best of a larger logit, and so on to the largest."""
    asked, left = [], torch.ones(len(logits), dtype=torch.bool)
    while left.any():
        asked.append(score.masked_fill(~left, float("-inf")).argmax().item())
        left = logits > logits[asked[-1]]
    return asked


def masses_above(logits, tokens):
    mass = logits.double().softmax(0)
    return [mass[logits > logits[token]].sum().item() for token in tokens]


@pytest.mark.parametrize("turn", [0, 1, 2, 3, 4])
def test_the_token_is_found_whether_the_winner_or_one_long_after_it_is_the_first_allowed(turn, weighings, nan_memory):
    """One of the winners is made the first allowed by p; the guesses are winners of tiles, so there are many tiles."""
    logits = torch.randperm(9 * 1024) / 9216
    seeds, positions = draws(1)
    asked = winners(logits, scores(logits, seeds, positions))
    assert len(asked) > 5
    above = [1.0, *masses_above(logits, asked)]
    args = (*limits(1, [(1.0, 0, (above[turn] + above[turn + 1]) / 2)]), seeds, positions)
    assert triton_ops.sample(logits[None], *args).tolist() == [asked[turn]]
    assert reference.sample(logits[None].double(), *args).tolist() == [asked[turn]]
    assert bool(weighings) == (turn > 2)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_guess_that_is_allowed_does_not_vouch_for_the_winner_that_a_better_one_of_its_tile_hid(turn, nan_memory):
    for _ in range(2000):
        logits, (seeds, positions) = torch.randn(3 * 1024), draws(1)
        score = scores(logits, seeds, positions)
        best = score.view(3, 1024).argmax(1) + torch.arange(3) * 1024
        asked = winners(logits, score)
        guessed = [best[tile].item() for tile in winners(logits[best], score[best])]
        if guessed[:turn] == asked[:turn] and (len(guessed) > turn and logits[guessed[turn]] > logits[asked[turn]]):
            break
    else:
        pytest.fail("no such logits in 2000 draws")
    above = masses_above(logits, (asked[turn], guessed[turn]))
    assert above[0] > above[1]
    args = (*limits(1, [(1.0, 0, sum(above) / 2)]), seeds, positions)
    assert triton_ops.sample(logits[None], *args).tolist() == [asked[turn + 1]]
    assert reference.sample(logits[None].double(), *args).tolist() == [asked[turn + 1]]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("settings", [(1.0, 0, 0.5), (1.0, 3, 1.0), (0.5, 3, 0.5)])
def test_limited_rows_take_nan_before_infinity_before_any_other_logit(settings, nan_memory):
    logits = torch.randn(7, 1500)
    logits[0, 1200] = NAN
    logits[1, [3, 900]] = INF
    logits[2, [5, 1100]], logits[2, 1300] = INF, NAN
    logits[3] = -INF
    logits[4, 1:] = -INF
    logits[5] = -INF
    logits[5, [1030, 1040]] = 2.0
    logits[6, :] = -3.0
    logits[6, 7], logits[6, 8] = -0.0, 0.0
    out = triton_ops.sample(logits, *limits(7, [settings]), *draws(7)).tolist()
    assert out[:5] == [1200, 3, 1300, 0, 0]
    assert out[5] in (1030, 1040)


def test_infinity_outweighs_noise_without_end():
    """At such a temperature the noise of a finite logit is infinite, too, and such tokens come first."""
    logits = torch.zeros(8, 20)
    logits[:, 19] = INF
    for settings in ((3e38, 0, 0.5), (3e38, 1, 1.0), (3e38, 1, 0.5)):
        assert triton_ops.sample(logits, *limits(8, [settings]), *draws(8)).tolist() == [19] * 8


def test_minus_zero_ties_with_zero_in_top_k_and_top_p():
    logits = torch.tensor([-0.0, 0.0, -9.0, -0.0])
    assert support(logits, 20, top_k=1) == {0, 1, 3}
    assert support(logits, 20, top_p=0.1) == {0, 1, 3}
    assert support(logits, 20, top_k=1, top_p=0.1) == {0, 1, 3}


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


def test_no_row_depends_on_the_batch_nor_on_how_many_programs_share_it(monkeypatch):
    rows = len(MIXED)
    logits, args = torch.randn(rows, 2600), (*limits(rows, MIXED), *draws(rows))
    together = triton_ops.sample(logits, *args).tolist()
    assert [triton_ops.sample(logits[i : i + 1], *(a[i : i + 1] for a in args)).item() for i in range(rows)] == together
    monkeypatch.setattr(sampling, "PROGRAMS", 1)
    assert triton_ops.sample(logits, *args).tolist() == together


def test_another_position_draws_anew_and_the_same_one_draws_the_same():
    logits = torch.zeros(1, 300)
    t, k, p, seeds, _ = params(1)
    tokens = [triton_ops.sample(logits, t, k, p, seeds, torch.tensor([i], dtype=torch.int32)).item() for i in range(6)]
    assert len(set(tokens)) > 3
    assert triton_ops.sample(logits, t, k, p, seeds, torch.tensor([2], dtype=torch.int32)).item() == tokens[2]
