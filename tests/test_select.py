"""Selection against exact arithmetic: the kept set, the probabilities, the weights.

Shape letters: N = pairs in expert-major order, P = kept pairs, e = experts.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe import select
from lrmoe.select import (
    ONE,
    Segments,
    blocks,
    even_runs,
    inclusion_probabilities,
    keep_everything,
    sampling_sizes,
    select_sampled,
    select_top,
    spread,
)
from tests import oracle
from tests.layers import drawn_probabilities

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")

some_scores = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 1e-30, 1e30, 3e38, NAN, INF]),  # many ties
    st.floats(0, 1e6, width=32),
)


@st.composite
def experts_scores_quotas(draw, least_quota=0):
    """Scores of up to six experts, some empty, and a quota for each."""
    scores_e = draw(st.lists(st.lists(some_scores, max_size=9), min_size=1, max_size=6))
    quota_e = [draw(st.integers(min(least_quota, len(scores)), len(scores))) for scores in scores_e]
    return scores_e, quota_e


def _layout(scores_e, dtype=torch.float32):
    flat = [score for scores in scores_e for score in scores]
    segments = Segments(np.array([len(s) for s in scores_e]), CPU)
    return torch.tensor(flat, dtype=dtype), segments


def _by_expert(values_N, segments):
    return torch.split(values_N, segments.count_e.tolist())


# ---- top ---------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(experts_scores_quotas())
def test_select_top_equals_the_oracle(case):
    scores_e, quota_e = case
    score_N, segments = _layout(scores_e)
    selection = select_top(score_N, segments, np.array(quota_e))
    want_N = oracle.select_top(
        score_N.tolist(),
        segments.expert_N.tolist(),
        oracle.global_pair_ids(0, len(score_N), 1),
        quota_e,
    )
    assert selection.kept_P.tolist() == [i for i, kept in enumerate(want_N) if kept]
    assert selection.weight_P.tolist() == [1.0] * sum(quota_e)
    assert selection.weight_P.dtype == torch.float32


def test_select_top_orders_negative_scores_too():
    # a token's loss may be negative (preference losses): larger is still kept first
    score_N, segments = _layout([[-3.0, -0.5, 0.0, 2.0, -0.0, -INF]])
    kept = [select_top(score_N, segments, np.array([q])).kept_P.tolist() for q in range(1, 6)]
    assert kept == [[5], [3, 5], [2, 3, 5], [2, 3, 4, 5], [1, 2, 3, 4, 5]]


def test_select_top_breaks_ties_in_long_runs_by_position():
    score_N, segments = _layout([[1.0] * 5000, [0.0] * 3000])
    selection = select_top(score_N, segments, np.array([1234, 1]))
    assert selection.kept_P.tolist() == [*range(1234), 5000]


# ---- sizes and probabilities -------------------------------------------------------------------


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12)), min_size=1, max_size=9))
@pytest.mark.parametrize("rho", [0.0, 0.1, 1.0])
def test_sampling_sizes_equal_the_oracle(rho, scores):
    score_N, segments = _layout([[5.0, 1.0], scores, []], torch.float64)
    want = oracle.sampled_sizes(scores, rho)
    got = _by_expert(sampling_sizes(score_N, segments, rho), segments)[1]
    assert got.tolist() == pytest.approx(want, rel=1e-12)


def test_a_non_finite_score_has_nearly_all_of_the_size():
    score_N, segments = _layout([[NAN, 1.0, 0.0, 0.0], [INF, NAN, 1.0, 1.0]])
    first, second = _by_expert(sampling_sizes(score_N, segments, 0.1), segments)
    assert first.tolist() == pytest.approx([0.9 * 4 + 0.1, 0.1, 0.1, 0.1])
    assert second.tolist() == pytest.approx([0.9 * 2 + 0.1, 0.9 * 2 + 0.1, 0.1, 0.1])


def _units(size_N):
    """Sizes as the selection counts them: whole multiples of 2^-20, at least one."""
    return [max(round(size * 2**20), 1) for size in size_N.tolist()]


@settings(max_examples=150)
@given(experts_scores_quotas(least_quota=1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_inclusion_probabilities_equal_the_exact_ones(case, rho):
    scores_e, quota_e = case
    score_N, segments = _layout(scores_e)
    size_N = sampling_sizes(score_N, segments, rho)
    pi_N = inclusion_probabilities(size_N, segments, np.array(quota_e))
    assert pi_N.dtype == torch.int64
    parts = zip(_by_expert(pi_N, segments), _by_expert(size_N, segments), quota_e, strict=True)
    for pi_n, size_n, quota in parts:
        assert int(pi_n.sum()) == quota * ONE
        assert ((pi_n > 0) & (pi_n <= ONE)).all()
        want = oracle.inclusion_probabilities(_units(size_n), quota)
        for got, exact in zip(pi_n.tolist(), want, strict=True):
            # half a unit of 1 / ONE at either end of a pair's stretch, and the margin of the cap
            assert abs(got - exact * ONE) <= 2e-6 * exact * ONE + 1


def test_no_quota_is_no_probability():
    score_N, segments = _layout([[1.0, 2.0], [3.0, 4.0, 5.0]])
    size_N = sampling_sizes(score_N, segments, 0.1)
    pi_N = inclusion_probabilities(size_N, segments, np.array([0, 1]))
    assert pi_N[:2].tolist() == [0, 0]
    assert int(pi_N[2:].sum()) == ONE


@pytest.mark.parametrize("quota", [1, 200, 15_000, 19_999, 20_000])
def test_probabilities_of_a_large_skewed_expert_solve_their_equation(quota):
    # pi = min(1, c * size) for one c, which 20,000 exact fractions are too slow to say
    score_N = torch.randn(20_000).mul(4).exp()
    segments = Segments(np.array([20_000]), CPU)
    size_N = sampling_sizes(score_N, segments, 0.1)
    pi_N = inclusion_probabilities(size_N, segments, np.array([quota]))
    assert int(pi_N.sum()) == quota * ONE
    free_N = pi_N < ONE
    if free_N.any():
        ratio = pi_N.double() / torch.tensor(_units(size_N), dtype=torch.float64)
        c = ratio[free_N].mean()
        assert (ratio[free_N] / c - 1).abs().max() < 1e-6
        assert (ratio[~free_N] < c * (1 + 1e-6)).all()  # capped: c * size is at least 1


def test_too_many_kept_pairs_are_refused_before_any_sum_overflows():
    segments = Segments(np.array([2]), CPU)
    with pytest.raises(ValueError, match="4194305 kept pairs on one rank: allowed are 4194304"):
        inclusion_probabilities(torch.ones(2), segments, np.array([(1 << 22) + 1]))


# ---- the sample --------------------------------------------------------------------------------


@settings(max_examples=600)
@given(
    experts_scores_quotas(),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**32),
)
def test_a_sample_has_exactly_the_quota_of_every_expert(case, rho, dtype, seed):
    scores_e, quota_e = case
    score_N, segments = _layout(scores_e, dtype)
    size_N = sampling_sizes(score_N, segments, rho)
    quotas = np.array(quota_e)
    generator = torch.Generator().manual_seed(seed)
    selection = select_sampled(size_N, segments, quotas, generator)
    kept_P = selection.kept_P
    counts = torch.bincount(segments.expert_N[kept_P], minlength=len(quota_e))
    assert counts.tolist() == quota_e
    assert (kept_P.diff() > 0).all()
    pi_N = inclusion_probabilities(size_N, segments, quotas)
    # Rounded in another order; and of equal pairs that are all but certain, one more may be free.
    probability_P, want_P = ONE / selection.weight_P.double(), pi_N[kept_P]
    rounding = 2.5 + (1e-7 + 9 * 2**-20) * want_P
    assert ((probability_P - want_P).abs() <= rounding).all()
    # q = n is exact training: weight exactly 1
    for e, (scores, quota) in enumerate(zip(scores_e, quota_e, strict=True)):
        if quota == len(scores):
            assert (selection.weight_P[segments.expert_N[kept_P] == e] == 1).all()


def test_a_share_that_was_drawn_itself_divides_the_weight():
    score_N, segments = _layout([[1.0, 2.0, 3.0], [1.0]])
    size_N = sampling_sizes(score_N, segments, 0.1)
    draws = [
        select_sampled(size_N, segments, np.array([2, 1]), torch.Generator().manual_seed(3), p)
        for p in (None, np.array([1.0, 0.25]))
    ]
    assert torch.equal(draws[0].kept_P, draws[1].kept_P)
    assert draws[1].weight_P.tolist() == [*draws[0].weight_P[:2].tolist(), 4.0]


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.sampled_from([0.0, 1e30, 1.0]), st.floats(0, 9)), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_integrated_over_the_start_every_pair_is_kept_with_one_over_its_weight_exactly(
    scores, rho, random, data
):
    quota = data.draw(st.integers(1, len(scores)))
    score_N, segments = _layout([[1.0], scores, []])
    size_N, quotas = sampling_sizes(score_N, segments, rho), np.array([1, quota, 0])
    order = list(range(len(scores)))
    random.shuffle(order)
    order_N = torch.tensor([0, *(1 + i for i in order)])

    def draw(upper):
        """Kept pairs and the inverses of their weights, from the upper end of a stretch."""
        starts = torch.tensor([0, -int(upper * ONE) % ONE, 0])
        arguments = size_N, segments.device_count_e, torch.from_numpy(quotas), order_N, starts
        kept_P, weight_P = select.sample_pairs(*arguments, 1 + quota)
        assert kept_P[0] == 0
        assert weight_P[0] == 1
        return (kept_P[1:] - 1).tolist(), (ONE / weight_P[1:]).round().long().tolist()

    pi = {}
    arguments = size_N, segments.device_count_e, torch.from_numpy(quotas), order_N
    _, near, _ = drawn_probabilities(*arguments)  # for where to look; the weights say what they are
    near = [Fraction(near[order.index(i)], ONE) for i in range(len(scores))]
    upper = Fraction(0)
    for length, _ in oracle.integrate_over_start(near, order):
        pi |= dict(zip(*draw(upper + length / 2), strict=True)) if length else {}
        upper += length
    pi = [Fraction(pi.get(i, 0), ONE) for i in range(len(scores))]  # of next to no size: never
    assert sum(pi) == quota
    reached, upper = [Fraction(0)] * len(scores), Fraction(0)
    for length, picked in oracle.integrate_over_start(pi, order):
        upper += length
        if length:
            kept, inverse = draw(upper)
            assert kept == picked
            assert [Fraction(p, ONE) for p in inverse] == [pi[i] for i in picked]
            for i in picked:
                reached[i] += length
    assert reached == pi


@settings(max_examples=200)
@given(experts_scores_quotas(), st.integers(0, 2**32), st.integers(1, 1 << 16))
def test_any_run_of_strata_is_drawn_as_often_as_its_probabilities_say(case, seed, kinds):
    scores_e, quota_e = case
    score_N, segments = _layout(scores_e)
    generator = torch.Generator().manual_seed(seed)
    stratum_N = torch.randint(0, kinds, score_N.shape, generator=generator)
    size_N, quotas = sampling_sizes(score_N, segments, 0.1), np.array(quota_e)
    pi_N = inclusion_probabilities(size_N, segments, quotas)
    chosen = select_sampled(size_N, segments, quotas, generator, None, stratum_N)
    is_kept_N = torch.zeros(len(score_N), dtype=torch.int64)
    is_kept_N[chosen.kept_P] = 1
    counts = torch.bincount(segments.expert_N[chosen.kept_P], minlength=len(quota_e))
    assert counts.tolist() == quota_e
    for e in range(len(scores_e)):
        mine = segments.expert_N == e
        for last in stratum_N[mine].unique():
            first = mine & (stratum_N <= last)
            off = int(is_kept_N[first].sum()) * ONE - int(pi_N[first].sum())
            assert abs(off) < ONE


@pytest.mark.parametrize("kinds", [1, 3, 1 << 20])
def test_a_sample_by_directions_goes_from_each_pair_to_the_nearest(kinds, monkeypatch):
    """Any run of the slow reference's order is drawn as often as its probabilities say."""
    real, sorted_by = select.order_runs, []

    def recorded(*arguments):
        sorted_by.append(real(*arguments))
        return sorted_by[-1]

    monkeypatch.setattr(select, "order_runs", recorded)
    counts = [0, 7, 1, 40, 300, 0, 2, 512]
    segments, generator = Segments(np.array(counts), CPU), torch.Generator().manual_seed(kinds)
    score_N = torch.rand(sum(counts), generator=generator) ** 4
    seen_k = torch.randint(-(1 << 63), (1 << 63) - 1, (kinds,), generator=generator)
    direction_N = seen_k[torch.randint(0, kinds, score_N.shape, generator=generator)]
    size_N = sampling_sizes(score_N, segments, 0.1)
    quotas = np.array([n - n // 2 for n in counts])
    chosen = select_sampled(size_N, segments, quotas, generator, None, None, direction_N)
    pi_N = inclusion_probabilities(size_N, segments, quotas)
    is_kept_N = torch.zeros_like(pi_N)
    is_kept_N[chosen.kept_P] = 1
    first, sorted_N = 0, sorted_by[0]
    for count in counts:
        places = sorted_N[first : first + count] - first
        order = oracle.neighbors(direction_N[first : first + count].tolist(), places.tolist())
        off = is_kept_N[first:][order].cumsum(0) * ONE - pi_N[first:][order].cumsum(0)
        assert (off.abs() < ONE).all()
        first += count


@pytest.mark.parametrize("experts", [128, 2047, 2048, 32_767, 32_768, 40_000, 131_072])
@pytest.mark.parametrize("is_salted", [False, True])
def test_keys_of_many_experts_do_not_overflow(experts, is_salted):
    counts = np.zeros(experts, np.int64)
    counts[[0, experts // 2, -1]] = 2
    segments = Segments(counts, CPU)
    key_N = torch.tensor([1 << 15, 0] * 3)
    salt_e = torch.randint(0, ONE, (experts,)) if is_salted else None
    assert segments.sort(key_N, 16, salt_e).tolist() == [1, 0, 3, 2, 5, 4]


@pytest.mark.parametrize("experts", [1, 128, 3000])
def test_equal_keys_keep_their_order_or_are_shuffled(experts):
    counts = np.zeros(experts, np.int64)
    counts[-1] = 100
    segments, key_N = Segments(counts, CPU), torch.arange(100) // 50
    assert segments.sort(key_N, 16).tolist() == list(range(100))
    orders = {
        tuple(segments.sort(key_N, 16, torch.full((experts,), salt)).tolist())
        for salt in (0, 1, 5, ONE - 1)
    }
    assert len(orders) == 4
    for order in orders:
        assert sorted(order[:50]) == list(range(50))
        # A shuffle has 24.5 of 49 neighbours in ascending order, give or take 2.1.
        assert 12 < sum(a < b for a, b in pairwise(order[:50])) < 37


@pytest.mark.parametrize("strata", ["gradient", "neighbors"])
def test_a_sample_of_pairs_that_are_all_alike_does_not_follow_their_order(strata):
    """Where all gradients point one way, every other pair must not mean every other token."""
    counts, alike_N = np.array([3, 256, 40]), torch.full((299,), 77)
    segments = Segments(counts, CPU)
    evens = []
    for seed in range(40):
        code = (alike_N, None) if strata == "gradient" else (None, alike_N)
        generator = torch.Generator().manual_seed(seed)
        quotas = np.array([1, 128, 20])
        chosen = select_sampled(torch.ones(299), segments, quotas, generator, None, *code)
        mine = chosen.kept_P[(chosen.kept_P >= 3) & (chosen.kept_P < 259)]
        evens.append(int(((mine - 3) % 2 == 0).sum()))
    # 128 of 256 at random: 64 of the even places, give or take 4; 0 or 128 in the tokens' order
    assert 40 < min(evens) < 64 < max(evens) < 88


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 511, 513, 1000])
def test_runs_are_few_and_even(count):
    starts, lengths = even_runs(np.array([3, count, 0, 5]), 256)
    assert starts.tolist() == [0, *(lengths.cumsum()[:-1])]
    assert lengths.sum() == count + 8
    mine = lengths[1:-1]
    assert len(mine) == -(-count // 256)
    assert not count or mine.max() - mine.min() <= 1


def test_experts_are_drawn_independently_and_every_seed_differs():
    score_N, segments = _layout([[1.0] * 4] * 200)
    size_N = sampling_sizes(score_N, segments, 0.1)
    draws = [
        select_sampled(
            size_N, segments, np.ones(200, np.int64), torch.Generator().manual_seed(s)
        ).kept_P
        % 4
        for s in (1, 2, 1)
    ]
    assert torch.equal(draws[0], draws[2])
    # places 0..3 are uniform: 200 / 4 = 50 +- 6.1, six standard deviations
    assert (torch.bincount(draws[0], minlength=4) - 50).abs().max() < 37
    agree = (draws[0] == draws[1]).sum().item()
    assert abs(agree - 50) < 37


def test_experts_do_not_share_a_start():
    # One pair of two, sizes 9 : 1. From one start, all experts would keep the small pair together.
    score_N, segments = _layout([[81.0, 1.0]] * 1000)
    size_N = sampling_sizes(score_N, segments, 0.0)
    kept_P = select_sampled(
        size_N, segments, np.ones(1000, np.int64), torch.Generator().manual_seed(0)
    ).kept_P
    # 100 +- 9.5, six standard deviations
    assert abs((kept_P % 2).sum().item() - 100) < 57


def test_two_pairs_of_one_expert_are_not_always_together():
    # systematic sampling in a fixed order would never keep neighbours: the order must be random
    score_N, segments = _layout([[1.0] * 4])
    size_N = sampling_sizes(score_N, segments, 0.1)
    kept = {
        tuple(
            select_sampled(
                size_N, segments, np.array([2]), torch.Generator().manual_seed(seed)
            ).kept_P.tolist()
        )
        for seed in range(200)
    }
    assert len(kept) == 6


# ---- layout ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=8))
def test_blocks_and_spread_equal_a_loop(runs):
    starts, lengths = np.array(runs).T
    want = [i for start, length in runs for i in range(start, start + length)]
    assert blocks(starts, lengths, CPU).tolist() == want
    want = [start for start, length in runs for _ in range(length)]
    assert spread(starts, lengths, CPU).tolist() == want


def test_segments_of_experts_without_pairs():
    segments = Segments(np.array([0, 2, 0, 0, 1, 0]), CPU)
    assert segments.expert_N.tolist() == [1, 1, 4]
    assert segments.place_N.tolist() == [0, 1, 0]
    assert segments.start_N.tolist() == [0, 0, 2]
    assert segments.last_N.tolist() == [1, 1, 2]
    empty = Segments(np.array([0, 0]), CPU)
    nothing = torch.zeros(0)
    for selection in (
        select_top(nothing, empty, np.array([0, 0])),
        select_sampled(nothing, empty, np.array([0, 0]), torch.Generator()),
        keep_everything(0, nothing),
    ):
        assert selection.kept_P.tolist() == selection.weight_P.tolist() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sizes_may_have_any_dtype_and_need_a_gradient(dtype):
    segments = Segments(np.array([6, 0, 2]), CPU)
    score_N = torch.arange(8.0).to(dtype).requires_grad_()
    size_N = sampling_sizes(score_N, segments, 0.1)
    assert size_N.dtype == torch.promote_types(dtype, torch.float32)
    sizes = score_N + 1
    chosen = select_sampled(sizes, segments, np.array([3, 0, 2]), torch.Generator().manual_seed(0))
    assert len(chosen.kept_P) == 5
    assert chosen.weight_P.dtype == size_N.dtype
    assert chosen.weight_P[3:].tolist() == [1, 1]
