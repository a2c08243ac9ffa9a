"""Generated counts against a token-by-token sampler, and the promises of each workload."""

from itertools import pairwise

import numpy as np
import pytest

from lrmoe.cluster import kernels
from lrmoe.cluster.workloads import KINDS, NAMED, Workload, _draw, layer_counts
from lrmoe.planner.problem import home_ranks
from lrmoe.planner.workloads import FAMILIES, rescaled

W, E, T, K = 4, 32, 500, 4


def counts_of(workload, steps=6, seed=0, layer=0, **changes):
    sizes = {"tokens": T, "top_k": K} | changes
    return layer_counts(workload, W, E, layer=layer, steps=steps, seed=seed, **sizes)


def rank_imbalance(counts_CWE):
    load_CW = counts_CWE.sum(1).reshape(len(counts_CWE), W, -1).sum(2)
    return load_CW.max(1) / load_CW.mean(1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_goes_to_k_different_experts(kind):
    counts_CWE = counts_of(Workload(kind=kind, imbalance=1.5), micro_batches=2)
    assert counts_CWE.shape == (12, W, E)
    tokens_CW = counts_CWE.sum(2) / K
    assert (tokens_CW == tokens_CW.astype(int)).all()
    assert (tokens_CW.sum(1) == W * T).all()
    assert (counts_CWE >= 0).all()
    assert (counts_CWE <= tokens_CW[:, :, None]).all()
    if kind != "W4":
        assert (tokens_CW == T).all()


@pytest.mark.parametrize("kind", [*FAMILIES, "W2", "W6"])
@pytest.mark.parametrize("imbalance", [1.3, 2.0, 3.0])
def test_the_wanted_rank_imbalance_is_reached_in_every_call(kind, imbalance):
    counts_CWE = counts_of(Workload(kind=kind, imbalance=imbalance), tokens=20_000)
    assert rank_imbalance(counts_CWE) == pytest.approx(imbalance, rel=0.03)


def test_counts_are_those_of_tokens_drawn_one_by_one():
    """Mean and variance of every expert's count, against starts drawn token by token."""
    rng = np.random.default_rng(3)
    pi_E = rng.random(8)
    pi_E = np.minimum(1.0, pi_E * 3 / pi_E.sum())
    pi_E[-1] += 3 - pi_E.sum()
    tokens, draws = 40, 4000
    fast = _draw(np.broadcast_to(pi_E, (draws, 8)), np.array([tokens]), 3, rng)[:, 0]
    slow = np.zeros((draws, 8))
    for i in range(draws):
        order = rng.permutation(8)
        ends = pi_E[order].cumsum()
        ends[-1] = 3
        for start in rng.random(tokens):
            for turn in range(3):
                slow[i, order[np.searchsorted(ends, start + turn, side="right")]] += 1
    assert fast.mean(0) == pytest.approx(tokens * pi_E, abs=0.25)
    assert slow.mean(0) == pytest.approx(tokens * pi_E, abs=0.25)
    assert fast.var(0) == pytest.approx(slow.var(0), rel=0.12, abs=0.1)


def test_batched_rescaling_is_that_of_the_planner_s_workloads():
    """Where a power of the weights gives the imbalance, and only one does."""
    log_CE = np.random.default_rng(0).standard_normal((3, E))
    log_CE += 2.0 * (home_ranks(W, E) == 1)  # one rank is the busiest at every power
    for imbalance in (1.2, 1.8, 2.2):
        fast = kernels.rescale(log_CE, W, float(K), imbalance)
        for c in range(3):
            slow = rescaled(np.exp(log_CE[c]), W, K, imbalance)
            assert fast[c] == pytest.approx(slow, abs=1e-3)


def test_weights_belong_to_the_layer_and_change_only_by_drift_and_jitter():
    still = Workload(jitter=0.0)
    a, b = (counts_of(still, seed=seed, tokens=50_000).sum((0, 1)) for seed in (0, 1))
    assert a == pytest.approx(b, rel=0.05, abs=200)
    other = counts_of(still, layer=1, tokens=50_000).sum((0, 1))
    assert np.abs(a - other).sum() > 0.3 * a.sum()

    def similarity(workload):
        counts_CE = counts_of(workload, steps=40, tokens=50_000).sum(1)
        log_CE = np.log(counts_CE + 1)
        return np.mean([np.corrcoef(x, y)[0, 1] for x, y in pairwise(log_CE)])

    calm, drifting, new = (similarity(Workload(jitter=0.0, drift=d)) for d in (0.0, 0.2, 1.0))
    assert calm > 0.99 > drifting > 0.7
    assert new < 0.5
    assert similarity(Workload(jitter=1.0)) < drifting


def test_a_burst_heats_one_rank_of_some_steps():
    calm = counts_of(Workload(jitter=0.0, imbalance=1.0), steps=30)
    assert rank_imbalance(calm).max() < 1.1
    # At imbalance 1 the power is 0 and no burst shows; rescaling keeps the order of the ranks.
    bursting = counts_of(Workload(kind="log_normal", jitter=0.0, burst=0.5), steps=60)
    busiest = bursting.sum(1).reshape(60, W, -1).sum(2).argmax(1)
    assert len(set(busiest.tolist())) > 1
    steady = counts_of(Workload(kind="log_normal", jitter=0.0), steps=60)
    assert len(set(steady.sum(1).reshape(60, W, -1).sum(2).argmax(1).tolist())) == 1


def test_named_workloads_are_what_their_names_say():
    def load(kind):
        counts_CWE = counts_of(Workload(kind=kind, imbalance=1.6), steps=16, tokens=4000)
        return counts_CWE, counts_CWE.sum(1)

    home_E = home_ranks(W, E)
    for kind in ("W1", "W3"):
        _, by_expert = load(kind)
        hottest = np.sort(by_expert, axis=1)[:, -max(K, E // 8) :].sum(1) / by_expert.sum(1)
        assert hottest == pytest.approx(0.5, abs=0.03)
        imbalance = rank_imbalance(load(kind)[0])
        assert (imbalance > 1.8).all() if kind == "W1" else (imbalance < 1.1).all()
    busiest = load("W6")[1].reshape(16, W, -1).sum(2).argmax(1)
    assert busiest.tolist() == [step % W for step in range(16)]
    assert (load("W2")[1].reshape(16, W, -1).sum(2).argmax(1) == 0).all()
    hot = rank_imbalance(load("W7")[0]) > 1.3
    assert hot.tolist() == [step % 8 == 7 for step in range(16)]
    sources = load("W4")[0].sum(2)
    assert (np.diff(sources[0]) < 0).all()
    assert sources[0, 0] == pytest.approx(3 * sources[0, 1], rel=0.01)
    idle = load("W5")[1] == 0
    assert (idle == ((np.arange(E) % 2 == 1) | (home_E == W - 1))).all()
    assert set(NAMED) == {f"W{i}" for i in range(8)}


def test_a_share_of_the_pairs_goes_to_k_experts():
    for share, k in ((0.3, 4), (0.5, 16), (0.95, 8)):
        counts_CWE = counts_of(Workload(kind="concentrated", hot_share=share, hot_experts=k))
        assert counts_CWE[:, :, :k].sum() / counts_CWE.sum() == pytest.approx(share, abs=0.02)
    # No token has more pairs than there are hot experts.
    with pytest.raises(ValueError, match=r"3\.8 pairs per token cannot go to 2 different experts"):
        counts_of(Workload(kind="concentrated", hot_share=0.95, hot_experts=2))


def test_mistakes_are_named():
    for changes, message in (
        ({"hot_experts": 0}, "hot_experts=0: allowed is >= 1"),
        ({"kind": "W9"}, "workload='W9': allowed are"),
        ({"imbalance": 0.5}, "imbalance=0.5: allowed is >= 1"),
        ({"drift": 2.0}, "drift=2.0: allowed is 0 <= drift <= 1"),
        ({"jitter": -1.0}, "jitter=-1.0: allowed is >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Workload(**changes)
    with pytest.raises(ValueError, match="pairs per token cannot go to 8 different experts"):
        counts_of(Workload(kind="W2", imbalance=4.0), top_k=9)
    with pytest.raises(ValueError, match="do not divide evenly over 5 ranks"):
        layer_counts(Workload(), 5, E, tokens=T, top_k=K, layer=0, steps=1)
