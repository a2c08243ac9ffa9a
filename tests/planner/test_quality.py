"""How good the plans are: against the LP bound, UltraEP's planner, and uniform quotas.

Shape letters: W = ranks, E = experts.
"""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from lrmoe.planner import Budgets, Costs, PlanProblem, plan
from lrmoe.planner.workloads import (
    CONCENTRATIONS,
    FAMILIES,
    IMBALANCES,
    concentrated_counts,
    routed_counts,
)
from tests.planner.bounds import least_makespan

GROUPS = ((8, 128), (16, 128), (64, 256))
SLOTS = 2


counts_of = cache(routed_counts)  # the tests share them


def workloads(W, E, layers):
    """Name and counts of every family; tokens are fewer than in training, the shapes the same."""
    for family in FAMILIES:
        for imbalance in IMBALANCES:
            for layer in range(layers):
                counts_WE = counts_of(
                    family, W, E, imbalance, tokens=1024 if W < 64 else 256, layer=layer, seed=layer
                )
                yield f"{family} {imbalance} {layer}", counts_WE
    for share, k in CONCENTRATIONS:
        yield f"{share} to {k}", concentrated_counts(share, k, W, E, pairs=8192)


def problem_of(counts_WE, **changes):
    values = {"placement": "recalibrated", "rate": Fraction(0), "budgets": Budgets(slots=SLOTS)}
    return PlanProblem(counts_WE=counts_WE, **(values | changes))


@pytest.mark.parametrize(("W", "E"), GROUPS)
def test_makespan_is_within_two_percent_of_the_bound_on_average_and_six_at_worst(W, E):
    ratios = {}
    for name, counts_WE in workloads(W, E, layers=3 if W < 64 else 1):
        made = plan(problem_of(counts_WE))
        ratios[name] = made.predicted.makespan / least_makespan(counts_WE, made.quota_E, SLOTS)
    assert min(ratios.values()) > 1 - 1e-9  # else the bound is none
    assert np.mean(list(ratios.values())) <= 1.02
    assert max(ratios.values()) <= 1.06, max(ratios, key=ratios.get)


@pytest.mark.parametrize("mode", ["rate", "makespan"])
def test_makespan_with_dropped_pairs_is_near_the_bound_too(mode):
    W, E = 8, 128
    ratios = []
    for _, counts_WE in workloads(W, E, layers=1):
        made = plan(problem_of(counts_WE, rate=Fraction(1, 5), quotas=mode))
        bound = least_makespan(counts_WE, made.quota_E, SLOTS)
        ratios.append(made.predicted.makespan / bound)
    assert np.mean(ratios) <= 1.02
    assert max(ratios) <= 1.06


@pytest.mark.parametrize("min_tokens", [1, 1024])
@pytest.mark.parametrize(("W", "E"), GROUPS)
def test_hardly_ever_behind_ultraep_and_never_with_more_replicas_than_slots(W, E, min_tokens):
    behind, total, ours, theirs = [], 0, 0, 0
    for name, counts_WE in workloads(W, E, layers=8):
        counts_WE = counts_WE * 8  # as many pairs as in training: min_tokens is about those
        made = plan(problem_of(counts_WE))
        peer = plan(problem_of(counts_WE, placement="ultraep", options={"min_tokens": min_tokens}))
        total += 1
        if made.predicted.makespan > peer.predicted.makespan:
            behind.append((name, made.predicted.makespan / peer.predicted.makespan))
        if peer.predicted.makespan <= 1.011 * 3 * counts_WE.sum() / W:
            ours, theirs = ours + made.num_replicas, theirs + peer.num_replicas
    assert len(behind) <= 0.02 * total, behind
    # Where UltraEP reaches what it aims at, it does not do so with fewer replicas.
    assert ours <= theirs


@pytest.mark.parametrize(("W", "E"), GROUPS)
def test_makespan_quotas_beat_uniform_ones_at_equal_drops_without_replicas(W, E):
    for name, counts_WE in workloads(W, E, layers=2):
        common = problem_of(counts_WE, rate=Fraction(1, 5), budgets=Budgets(slots=0))
        uniform, chosen = plan(common), plan(replace(common, quotas="makespan"))
        assert uniform.quota_E.sum() == chosen.quota_E.sum(), name
        assert chosen.predicted.forward == uniform.predicted.forward
        home_W = counts_WE.sum(0).reshape(W, -1).sum(1)
        if home_W.max() > 1.05 * home_W.mean():
            assert chosen.predicted.backward < uniform.predicted.backward, name


def test_fewer_replicas_where_they_cost_more():
    counts_WE = routed_counts("clustered", 16, 128, 3.0, tokens=1024)
    mean = counts_WE.sum() / 16
    replicas, makespans = [], []
    for setup in (0.0, 0.01, 0.05, 0.2, 1.0):  # of the mean load of a rank, forward and backward
        costs = Costs(intra_byte=1.0, expert_bytes=int(setup * mean))
        made = plan(problem_of(counts_WE, costs=costs))
        made.check(problem_of(counts_WE, costs=costs))
        replicas.append(made.num_replicas)
        makespans.append(made.predicted.makespan)
    assert replicas[1:] == sorted(replicas[1:], reverse=True)
    assert replicas[0] > replicas[2] > replicas[-1]
    assert makespans == sorted(makespans)


def test_a_replica_must_move_more_pairs_than_its_weights_cost():
    # Two ranks, one expert each: 100 pairs against 0. Moving half of them saves 50 pairs.
    counts_WE = np.array([[100, 0], [0, 0]])
    for break_even, replicas in ((20, 1), (60, 0)):
        costs = Costs(forward_pair=1.0, backward_pair=0.0, intra_byte=1.0, expert_bytes=break_even)
        made = plan(problem_of(counts_WE, costs=costs, rate=Fraction(0)))
        assert made.num_replicas == replicas


def test_replicas_that_are_still_held_are_used_again_for_nothing():
    counts_WE = routed_counts("zipf", 8, 64, 2.0, tokens=1024)
    first = plan(problem_of(counts_WE))
    held_WL = np.full((8, SLOTS), -1)
    is_replica = first.is_replica
    held_WL[first.instance_rank_V[is_replica], first.instance_slot_V[is_replica]] = (
        first.instance_expert_V[is_replica]
    )
    again = plan(problem_of(counts_WE, held_WL=held_WL))
    again.check(problem_of(counts_WE, held_WL=held_WL))
    assert first.is_sent_V.sum() == first.num_replicas > 0
    assert again.is_sent_V.sum() < first.is_sent_V.sum()
    assert again.predicted.makespan <= 1.01 * first.predicted.makespan
