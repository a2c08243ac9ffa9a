"""Which pairs the modes drop, how they are shared out, and what stays with every source.

Shape letters: W = ranks, E = experts, V = instances, Q = quantiles.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lrmoe.planner import Budgets, PlanProblem, plan
from lrmoe.planner.quotas import rate_quotas
from lrmoe.planner.workloads import routed_counts

TWO_RANKS = np.array([[40, 20, 10, 5], [40, 20, 10, 5]])  # 120 pairs on rank 0, 30 on rank 1


def problem_of(counts_WE=TWO_RANKS, **changes):
    values = {
        "placement": "recalibrated", "rate": Fraction(1, 5), "quotas": "makespan",
        "budgets": Budgets(slots=0),
    }  # fmt: skip
    return PlanProblem(counts_WE=counts_WE, **(values | changes))


def test_makespan_drops_what_rate_would_but_from_the_busiest_rank():
    made = plan(problem_of())
    assert made.predicted.backward_pairs_W.tolist() == [90, 30]  # 30 of 150 dropped
    assert made.quota_E.tolist() == [60, 30, 20, 10]  # rank 0's experts lose the same share
    uniform = plan(problem_of(quotas="rate"))
    assert uniform.predicted.backward_pairs_W.tolist() == [96, 24]


def test_makespan_levels_ranks_once_the_busiest_has_come_down():
    made = plan(problem_of(rate=Fraction(4, 5)))
    # 120 of 150: 30 are left, 15 on each rank; the floor of an eighth of an expert does not bind.
    assert made.predicted.backward_pairs_W.tolist() == [15, 15]


def test_makespan_takes_the_pairs_whose_scores_are_lowest():
    flat = np.linspace(0.5, 1.5, 8)
    scores_EQ = np.array([flat, 10 * flat, flat, flat])
    made = plan(problem_of(score_quantiles_EQ=scores_EQ))
    assert made.quota_E.tolist() == [50, 40, 20, 10]  # all 30 from expert 0
    # Expert 0's pairs are alike, half of expert 1's are worth less.
    scores_EQ = np.array([np.ones(8), np.r_[np.zeros(4), np.full(4, 9.0)], flat, flat])
    made = plan(problem_of(score_quantiles_EQ=scores_EQ))
    assert made.quota_E.tolist() == [70, 20, 20, 10]


def test_makespan_keeps_a_floor_of_every_expert():
    scores_EQ = np.array([np.zeros(4), np.full(4, 9.0), np.ones(4), np.ones(4)])
    problem = problem_of(
        np.array([[400, 200, 1, 0], [0, 0, 0, 0]]),
        rate=Fraction(3, 5),
        score_quantiles_EQ=scores_EQ,
    )
    made = plan(problem)
    made.check(problem)
    # 240 + 120 drops: 350 of expert 0, down to an eighth of it, and 10 of expert 1.
    assert made.quota_E.tolist() == [50, 190, 1, 0]
    lower = plan(replace(problem, min_kept=Fraction(0)))
    assert lower.quota_E.tolist() == [40, 200, 1, 0]


@pytest.mark.parametrize("family", ["log_normal", "zipf", "clustered"])
def test_chosen_drops_lose_less_score_than_the_same_drops_spread_evenly(family):
    rng = np.random.default_rng(1)
    counts_WE = routed_counts(family, 8, 64, 2.0, tokens=512)
    scores_EQ = np.sort(rng.lognormal(0, 1, (64, 16)) * rng.lognormal(0, 1.5, (64, 1)), 1)
    problem = problem_of(counts_WE, score_quantiles_EQ=scores_EQ)
    chosen = plan(problem)
    blind = plan(replace(problem, score_quantiles_EQ=None))
    assert chosen.quota_E.sum() == blind.quota_E.sum()
    assert np.array_equal(chosen.predicted.backward_pairs_W, blind.predicted.backward_pairs_W)

    def lost(made):
        dropped_E = counts_WE.sum(0) - made.quota_E
        total = 0.0
        for e in range(64):
            n = counts_WE[:, e].sum()
            pairs = np.repeat(scores_EQ[e], np.diff(np.arange(17) * n // 16))
            total += pairs[: dropped_E[e]].sum()
        return total

    assert lost(chosen) < 0.8 * lost(blind)


@pytest.mark.parametrize("mode", ["rate", "makespan"])
@pytest.mark.parametrize("rate", ["0.1", "0.5", "0.9"])
def test_modes_drop_the_same_number_of_pairs_with_replicas_too(mode, rate):
    counts_WE = routed_counts("clustered", 8, 64, 3.0, tokens=512)
    made = plan(problem_of(counts_WE, rate=Fraction(rate), quotas=mode, budgets=Budgets(slots=2)))
    assert made.num_replicas > 0
    expected = rate_quotas(counts_WE.sum(0), Fraction(rate)).sum()
    assert made.quota_E.sum() == expected
    mean = expected / 8
    assert made.predicted.backward_pairs_W.max() <= 1.02 * mean + 16


def test_every_expert_with_pairs_keeps_one():
    counts_WE = np.zeros((4, 16), np.int64)
    counts_WE[2, ::3] = 1
    for mode in ("rate", "makespan"):
        made = plan(problem_of(counts_WE, rate=Fraction(99, 100), quotas=mode))
        assert made.quota_E.tolist() == counts_WE.sum(0).tolist()


# ---- shares of sources -------------------------------------------------------------------------


def with_replicas(**changes):
    counts_WE = routed_counts("log_normal", 8, 32, 3.0, tokens=512)
    return problem_of(counts_WE, budgets=Budgets(slots=2), quotas="rate", **changes)


def test_sources_are_intervals_so_that_strata_stay_whole():
    problem = with_replicas()
    made = plan(problem)
    counts_WE = problem.counts_WE
    parts = (made.forward_WV > 0).sum(1) - (counts_WE > 0).sum(1)
    # Beyond one stratum per (source, expert): one where an instance fills up, or for an own one.
    assert parts.sum() <= 2 * made.num_replicas
    of_instance = {}
    for v, (e, r) in enumerate(zip(made.instance_expert_V, made.instance_rank_V, strict=True)):
        of_instance.setdefault(int(e), []).append((v, int(r)))
    for e, instances in of_instance.items():
        for v, r in instances:  # a rank fills its own instance before anyone else
            total = made.forward_WV[:, v].sum()
            assert made.forward_WV[r, v] == min(counts_WE[r, e], total)


def test_sources_fill_instances_in_their_node_before_others():
    problem = replace(with_replicas(), ranks_per_node=2)
    made = plan(problem)
    made.check(problem)
    for e in range(32):
        mine = np.flatnonzero(made.instance_expert_V == e)
        node_of = made.instance_rank_V[mine] // 2
        for node in range(4):
            pairs = problem.counts_WE[2 * node : 2 * node + 2, e].sum()
            room = made.forward_WV[:, mine[node_of == node]].sum()
            inside = made.forward_WV[2 * node : 2 * node + 2][:, mine[node_of == node]].sum()
            assert inside == min(pairs, room)


def test_shares_are_their_exact_value_rounded():
    made = plan(with_replicas())
    exact_WV = made.forward_WV * made.backward_V / np.maximum(made.forward_WV.sum(0), 1)
    assert np.all(np.abs(made.backward_WV - exact_WV) < 1)
    assert np.array_equal(made.backward_WV.sum(0), made.backward_V)


def test_random_shares_have_the_exact_share_as_their_mean():
    problem = with_replicas(rate=Fraction(9, 10))
    seeds = 400
    total_WV, reached_WV, reached_WE = 0, 0, 0
    for seed in range(seeds):
        made = plan(replace(problem, share_seed=seed))
        total_WV = total_WV + made.backward_WV
        reached_WV = reached_WV + (made.backward_WV >= 1)
        reached_WE = reached_WE + (made.quota_WE >= 1)
        assert np.array_equal(made.backward_WV.sum(0), made.backward_V)
    exact_WV = made.forward_WV * made.backward_V / np.maximum(made.forward_WV.sum(0), 1)
    # Of a mean of 400 draws of a 0/1 variable: at most 0.025; six of those.
    assert np.abs(total_WV / seeds - exact_WV).max() < 0.15
    for r in range(8):
        probability_V = made.share_probability(r)
        with_pairs = made.forward_WV[r] > 0
        assert np.abs(reached_WV[r] / seeds - probability_V)[with_pairs].max() < 0.15
        assert (probability_V[~with_pairs] == 1).all()
    has_pairs = problem.counts_WE > 0
    assert np.abs(reached_WE / seeds - made.share_probability_WE)[has_pairs].max() < 0.15
    assert (made.share_probability_WE[~has_pairs] == 1).all()
    assert ((exact_WV > 0) & (exact_WV < 1)).sum() > 20


def test_share_probability_agrees_with_the_matrix_of_home_placement():
    problem = replace(with_replicas(share_seed=3), placement="fixed", budgets=Budgets())
    made = plan(problem)
    for r in range(8):
        assert np.allclose(made.share_probability(r), made.share_probability_WE[r])


def test_without_drops_the_backward_pass_is_the_forward_pass():
    made = plan(with_replicas(rate=Fraction(0), share_seed=1))
    assert np.array_equal(made.backward_WV, made.forward_WV)
    assert made.keeps_all
    assert made.is_sent_again.sum() == made.num_replicas


def test_replicas_without_kept_pairs_are_not_sent_again():
    # 64 pairs of one expert over 8 ranks, one of 64 kept.
    counts_WE = np.zeros((8, 8), np.int64)
    counts_WE[:, 0] = 8
    made = plan(
        problem_of(counts_WE, rate=Fraction(99, 100), quotas="rate", budgets=Budgets(slots=1))
    )
    assert made.quota_E[0] == 1
    assert made.num_replicas == 7
    assert made.is_sent_again.sum() <= 1
    assert made.is_sent_V.sum() == 7


def test_global_scope_leaves_room_on_replicated_experts_only():
    problem = replace(with_replicas(), scope="global")
    made = plan(problem)
    made.check(problem)
    assert made.backward_WV is None
    copies_E = np.bincount(made.instance_expert_V)
    alone = copies_E[made.instance_expert_V] == 1
    assert np.array_equal(made.capacity_V[alone], made.quota_E[made.instance_expert_V][alone])
    assert (made.capacity_V[~alone] > made.backward_V[~alone]).any()
    per_rank = np.bincount(made.instance_rank_V, weights=made.capacity_V)
    assert per_rank.max() <= 1.01 * made.predicted.backward_pairs_W.max() + 1


@pytest.mark.parametrize("placement", ["recalibrated", "ultraep", "eplb"])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_probabilities_of_a_share_agree_with_those_of_its_parts(placement, ranks_per_node):
    """P(no share) is a product over an expert's instances, whose starts are independent."""
    problem = with_replicas(
        rate=Fraction(97, 100), share_seed=5, placement=placement, ranks_per_node=ranks_per_node,
        options={"min_tokens": 1} if placement == "ultraep" else {},
    )  # fmt: skip
    problem = replace(problem, past_counts_SWE=problem.counts_WE[None])
    made = plan(problem)
    assert made.num_replicas > 0
    for r in range(8):
        missed_E = np.ones(32)
        probability_V = made.share_probability(r)
        for v, e in enumerate(made.instance_expert_V):
            if made.forward_WV[r, v] > 0:
                missed_E[e] *= 1 - probability_V[v]
        expected_E = np.where(problem.counts_WE[r] > 0, 1 - missed_E, 1)
        assert np.allclose(made.share_probability_WE[r], expected_E)


def test_shares_that_are_not_random_have_no_probability():
    for changes in ({}, {"rate": Fraction(0), "share_seed": 1}):
        assert plan(with_replicas(**changes)).share_probability_WE is None
    made = plan(replace(with_replicas(share_seed=1), scope="global"))
    assert made.share_probability_WE is None
