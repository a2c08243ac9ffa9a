"""The generated counts are what their names say.

Shape letters: W = ranks, E = experts.
"""

import numpy as np
import pytest

from lrmoe.planner.workloads import (
    CONCENTRATIONS,
    FAMILIES,
    IMBALANCES,
    clustered,
    concentrated_counts,
    inclusion,
    log_normal,
    routed_counts,
)


def imbalance(counts_WE):
    W = len(counts_WE)
    load_W = counts_WE.sum(0).reshape(W, -1).sum(1)
    return load_W.max() / load_W.mean()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("wanted", IMBALANCES)
def test_families_reach_the_wanted_rank_imbalance(family, wanted):
    counts_WE = routed_counts(family, 16, 256, wanted, tokens=1024, layer=1)
    assert imbalance(counts_WE) == pytest.approx(wanted, rel=0.1)


def test_every_token_draws_k_different_experts():
    counts_WE = routed_counts("zipf", 4, 16, 3.0, tokens=500, top_k=4)
    assert (counts_WE.sum(1) == 500 * 4).all()
    assert counts_WE.max() <= 500  # no token twice at one expert


def test_an_imbalance_out_of_reach_gives_the_largest_there_is():
    counts_WE = routed_counts("log_normal", 2, 16, 3.0, tokens=300, top_k=4)
    # at most two ranks' worth; the hottest experts need not share a rank
    assert 1.2 < imbalance(counts_WE) <= 2


def test_layers_keep_their_hot_experts_and_micro_batches_differ():
    first, second = (routed_counts("zipf", 8, 64, 2.0, layer=3, seed=s).sum(0) for s in (0, 1))
    other = routed_counts("zipf", 8, 64, 2.0, layer=4).sum(0)
    assert not np.array_equal(first, second)
    assert np.corrcoef(first, second)[0, 1] > 0.7 > np.corrcoef(first, other)[0, 1]


def test_the_same_arguments_give_the_same_counts():
    assert np.array_equal(*(routed_counts("clustered", 8, 64, 2.0, seed=5) for _ in range(2)))
    assert np.array_equal(*(concentrated_counts(0.8, 4, 8, 64, seed=5) for _ in range(2)))


def test_neighbours_correlate_only_in_the_clustered_family():
    def neighbours(family):
        log_E = np.log(family(20_000, np.random.default_rng(0)))
        return np.corrcoef(log_E[:-1], log_E[1:])[0, 1]

    assert neighbours(clustered) == pytest.approx(0.8, abs=0.03)
    assert neighbours(log_normal) == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize(("share", "k"), CONCENTRATIONS)
def test_llep_s_protocol_gives_a_share_of_the_pairs_to_k_experts(share, k):
    counts_WE = concentrated_counts(share, k, 8, 64)
    assert counts_WE[:, :k].sum() / counts_WE.sum() == pytest.approx(share, abs=0.01)


def test_inclusion_probabilities_add_up_and_stay_below_one():
    pi_E = inclusion(np.array([1e-30, 1.0, 1e3, 1e9]), 3)
    assert pi_E.sum() == pytest.approx(3)
    assert pi_E.max() <= 1 + 1e-9
