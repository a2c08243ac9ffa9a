"""Quotas and shares against exact arithmetic, and what must hold for every plan.

Shape letters: W = ranks, E = experts, V = instances.
"""

from collections import Counter
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe import Plan, PlanProblem, plan
from lrmoe.planner.quotas import apportion, apportion_randomly, rate_quotas
from tests import oracle

RATES = ("0", "0.2", "0.35", "0.5", "0.7", "0.9", "0.99")


@st.composite
def counts_and_rate(draw):
    num_ranks = draw(st.integers(1, 5))
    num_experts = num_ranks * draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 40), min_size=num_experts, max_size=num_experts)
    counts_WE = np.array(draw(st.lists(row, min_size=num_ranks, max_size=num_ranks)))
    return counts_WE, draw(st.sampled_from(RATES))


@given(counts_and_rate())
def test_rate_quotas_equal_the_oracle(case):
    counts_WE, rate = case
    quota_E = rate_quotas(counts_WE.sum(0), Fraction(rate))
    assert quota_E.tolist() == oracle.rate_quotas(counts_WE.tolist(), float(rate))


def test_rate_quotas_are_exact_where_floats_are_not():
    assert rate_quotas(np.array([10]), Fraction("0.7")).tolist() == [3]
    assert rate_quotas(np.array([1, 0, 10**7]), Fraction("0.9")).tolist() == [1, 0, 10**6]


@given(counts_and_rate())
def test_apportion_equals_the_oracle(case):
    counts_WE, rate = case
    quota_E = rate_quotas(counts_WE.sum(0), Fraction(rate))
    shares_WE = apportion(counts_WE, quota_E)
    for e, quota in enumerate(quota_E.tolist()):
        assert shares_WE[:, e].tolist() == oracle.apportion(counts_WE[:, e].tolist(), quota)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.data())
def test_apportion_takes_any_quota(n_W, data):
    quota = data.draw(st.integers(0, sum(n_W)))
    shares_WE = apportion(np.array(n_W)[:, None], np.array([quota]))
    assert shares_WE[:, 0].tolist() == oracle.apportion(n_W, quota)


class _Start:
    """A generator whose "random" start is chosen, to go through all of them."""

    def __init__(self, start):
        self.start = start

    def integers(self, low, high):
        assert low == 0
        return np.minimum(self.start, high - 1)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), st.data())
def test_random_shares_have_the_exact_share_as_their_mean(n_W, data):
    # The fractional parts are laid end to end; whole shares shift nothing, so all starts agree with
    # rounding the shares themselves up to a rotation of the start.
    quota, total = data.draw(st.integers(1, sum(n_W))), sum(n_W)
    counts_WE, quota_E = np.array(n_W)[:, None], np.array([quota])
    drawn, reached = [], np.zeros(len(n_W), np.int64)
    with pytest.MonkeyPatch.context() as patch:
        for start in range(total):
            patch.setattr(np.random, "Generator", lambda _, start=start: _Start(np.array([start])))
            shares_WE, probability_WE = apportion_randomly(counts_WE, quota_E, 0)
            drawn.append(shares_WE[:, 0])
            reached += shares_WE[:, 0] >= 1
    for shares_W in drawn:
        assert shares_W.sum() == quota
        for n, share in zip(n_W, shares_W.tolist(), strict=True):
            assert share in (quota * n // total, -(-quota * n // total))  # so never above n
    assert Counter(map(tuple, np.array(drawn).tolist())) == Counter(
        tuple(oracle.systematic_apportion(n_W, quota, start)) for start in range(total)
    )
    for n, shares, often, p in zip(
        n_W, np.transpose(drawn).tolist(), reached.tolist(), probability_WE[:, 0], strict=True
    ):
        assert Fraction(sum(shares), total) == Fraction(quota * n, total)
        assert p == (often / total if n else 1)


def test_random_starts_are_uniform_and_independent_between_experts():
    counts_WE, quota_E = np.full((3, 400), 1), np.full(400, 1)
    shares_WE, _ = apportion_randomly(counts_WE, quota_E, 5)
    chosen_E = shares_WE.argmax(0)
    # 400 experts, one of three ranks each: 133 +- 9.4, six standard deviations
    assert np.abs(np.bincount(chosen_E, minlength=3) - 400 / 3).max() < 57
    assert (np.diff(chosen_E) != 0).any()
    other_WE, _ = apportion_randomly(counts_WE, quota_E, 6)
    assert (other_WE != shares_WE).any()


# ---- plans -------------------------------------------------------------------------------------


@given(counts_and_rate(), st.sampled_from(["local", "global"]), st.none() | st.integers(0, 99))
def test_every_plan_keeps_its_invariants_and_is_the_same_for_the_same_problem(case, scope, seed):
    counts_WE, rate = case
    problem = PlanProblem(counts_WE=counts_WE, rate=Fraction(rate), scope=scope, share_seed=seed)
    before = counts_WE.copy()
    made = plan(problem)
    made.check(problem)
    assert np.array_equal(counts_WE, before)
    again = plan(replace(problem, counts_WE=before))
    for f in fields(Plan):
        assert np.array_equal(getattr(made, f.name), getattr(again, f.name)), f.name
    assert made.keeps_all == bool((made.quota_E == counts_WE.sum(0)).all())
    assert (made.quota_WE is None) == (scope == "global")
    # home placement: expert e on rank e // (E / W)
    W, E = counts_WE.shape
    assert made.instance_rank_V.tolist() == [e // (E // W) for e in range(E)]
    assert np.array_equal(made.forward_WV, counts_WE)


def test_a_plan_that_breaks_an_invariant_is_caught():
    problem = PlanProblem(counts_WE=np.array([[4, 2], [0, 3]]), rate=Fraction("0.5"))
    good = plan(problem)
    broken = {
        "a pair is lost": {"forward_WV": good.forward_WV - 1},
        "quota": {"quota_E": np.array([0, 3])},
        "shares do not add up": {"quota_WE": good.quota_WE[::-1] * 0},
        "not rank-major": {"instance_rank_V": np.array([1, 0])},
        "capacity": {"capacity_V": good.capacity_V - 1},
        "twice": {
            "instance_expert_V": np.array([0, 1, 1]),
            "instance_rank_V": np.array([0, 1, 1]),
            "forward_WV": np.array([[4, 2, 0], [0, 3, 0]]),
        },
    }
    for message, change in broken.items():
        with pytest.raises(AssertionError, match=message):
            replace(good, **change).check(problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts_WE": np.array([[1, 2, 3], [1, 2, 3]])}, "3 experts do not divide"),
        ({"counts_WE": np.array([[1, -2], [1, 2]])}, "negative pair count -2"),
        ({"rate": Fraction(1)}, "rate=1: allowed is 0 <= rate < 1"),
        ({"scope": "world"}, "scope='world': allowed are 'local', 'global'"),
        ({"placement": "moved"}, "placement='moved': allowed are 'fixed'"),
        ({"quotas": "all"}, "quotas='all': allowed are 'rate'"),
    ],
)
def test_bad_problems_are_refused(change, message):
    problem = {"counts_WE": np.array([[1, 2], [3, 4]]), "rate": Fraction(0)}
    with pytest.raises(ValueError, match=message):
        plan(PlanProblem(**(problem | change)))
