"""Every peer against what its own source publishes, or an example worked by hand.

Shape letters: W = ranks, E = experts, V = instances.
"""

from fractions import Fraction

import numpy as np
import pytest

from lrmoe.planner import Budgets, Costs, PlanProblem, peers, plan
from lrmoe.planner.workloads import inclusion


def placed(loads, placement, W=None, slots=1, past=None, **changes):
    """Forward pairs of every (expert, rank), for counts that are the same on all sources."""
    loads = np.array(loads)
    W = W or changes.pop("ranks", len(loads))
    assert (loads % W == 0).all()
    problem = PlanProblem(
        counts_WE=np.tile(loads // W, (W, 1)),
        rate=Fraction(0),
        placement=placement,
        budgets=Budgets(slots=slots),
        past_counts_SWE=None if past is None else np.array(past)[:, None, :].repeat(W, 1) // W,
        **changes,
    )
    made = plan(problem)
    made.check(problem)
    total_V = made.forward_WV.sum(0)
    return {
        (int(e), int(r)): int(n)
        for e, r, n in zip(made.instance_expert_V, made.instance_rank_V, total_V, strict=True)
    }


def rank_loads(pairs, W):
    load_W = np.zeros(W, np.int64)
    for (_, r), n in pairs.items():
        load_W[r] += n
    return load_W.tolist()


def zipf_counts(ratio, W, E, top_k, tokens, seed):
    """UltraEP's own benchmark: Zipf weights in random order whose rank max / mean is the ratio."""
    rng = np.random.default_rng(seed)
    order_E = rng.permutation(E)
    low, high = 0.0, 4.0
    for _ in range(40):
        exponent = (low + high) / 2
        weight_E = np.empty(E)
        weight_E[order_E] = np.arange(1, E + 1) ** -exponent
        pi_E = inclusion(weight_E, top_k)
        reached = pi_E.reshape(W, -1).sum(1).max() * W / top_k
        low, high = (exponent, high) if reached < ratio else (low, exponent)
    return rng.binomial(tokens, pi_E, size=(W, E))


def test_eplb_reproduces_the_plan_of_its_readme():
    """https://github.com/deepseek-ai/EPLB, "Interface and Example": two layers, 2 nodes, 8 GPUs."""
    layers = {
        (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86): [
            5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1,
        ],
        (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27): [
            7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1,
        ],
    }  # fmt: skip
    for load, published in layers.items():
        assert peers.eplb_slots(np.array(load), 16, 4, 2, 8).tolist() == published


def test_eplb_merges_two_copies_on_a_rank_and_empties_moved_homes():
    # Two ranks, three slots each. One copy more of expert 0 (60), then of it again (30 each):
    # three copies of 20, beside 20, 10, 10. Heaviest first to the lighter rank: 0 1 0 1 0 1.
    past = [[60, 20, 10, 10]]
    pairs = placed([60, 20, 10, 10], "eplb", W=2, past=past)
    assert pairs[0, 0] == 40  # two copies in one instance: two thirds
    assert pairs[0, 1] == 20
    assert rank_loads(pairs, 2) == [50, 50]
    assert pairs[1, 0] == 0  # expert 1's home copy: it has moved to rank 1
    assert pairs[1, 1] == 20
    assert sum(pairs.values()) == 100


def test_policies_that_need_history_stay_at_home_without():
    for placement in ("eplb", "flexmoe", "smartmoe", "laer"):
        assert placed([60, 20, 10, 10], placement, W=2) == {
            (0, 0): 60, (1, 0): 20, (2, 1): 10, (3, 1): 10,
        }  # fmt: skip


@pytest.mark.parametrize(("ratio", "replicas"), [(1.5, 38), (2.0, 46), (3.0, 51)])
def test_ultraep_reaches_its_published_imbalance_and_replica_counts(ratio, replicas):
    """64 ranks, 256 experts, 8k tokens a rank, two slots (README, arXiv 2606.04101)."""
    made, imbalances = [], []
    for seed in range(6):
        load_E = zipf_counts(ratio, 64, 256, 8, 8192, seed).sum(0)
        expert_X, rank_X, pairs_X = peers.ultraep_quotas(load_E, 64, 64, 2, 1024, 0.01, 1)
        load_W = load_E.reshape(64, -1).sum(1)
        np.subtract.at(load_W, expert_X // 4, pairs_X)
        np.add.at(load_W, rank_X, pairs_X)
        made.append(len(expert_X))
        imbalances.append(load_W.max() / load_W.mean())
    assert np.median(imbalances) == pytest.approx(1.01, rel=0.05)
    assert max(imbalances) <= 1.05
    # The published counts are of one draw each; ours scatter by about five around the median.
    assert abs(np.median(made) - replicas) <= 5


def test_ultraep_by_hand():
    # Mean 100, threshold 101. Rank 0 has 99 too many, all of expert 0: 41 to rank 2, which has the
    # most slack, then 33 to rank 1, then the last 25 to rank 3.
    loads = [160, 40, 40, 28, 32, 28, 32, 40]
    pairs = placed(loads, "ultraep", W=4, options={"min_tokens": 10})
    assert pairs[0, 2] == 41
    assert pairs[0, 1] == 33
    assert pairs[0, 3] == 25
    assert pairs[0, 0] == 61
    assert rank_loads(pairs, 4) == [101, 101, 101, 97]


def test_ultraep_keeps_replicas_in_the_node_and_a_pair_at_home():
    pairs = placed([400, 0, 0, 0], "ultraep", ranks_per_node=2, slots=2, options={"min_tokens": 1})
    assert set(pairs) == {(0, 0), (1, 1), (2, 2), (3, 3), (0, 1)}
    assert pairs[0, 1] == 198  # down to 1.01 times the node's mean of 200


def test_symi_copies_by_hand():
    # Goals 4, 2.4, 1.2, 0.4 of eight slots: floors and the minimum of one already fill them.
    assert peers.symi_copies(np.array([50, 30, 15, 5]), 8).tolist() == [4, 2, 1, 1]
    # 7.76 and 0.08: ten with the minimum; the only class with more than one gives two back.
    assert peers.symi_copies(np.array([97, 1, 1, 1]), 8).tolist() == [5, 1, 1, 1]
    # 2.67 each: two are missing, and go to the lowest count below goal.
    assert peers.symi_copies(np.array([1, 1, 1]), 8).tolist() == [3, 3, 2]


def test_symi_fills_slots_class_by_class_from_the_last_counts():
    past = [[1, 1, 1, 97], [50, 30, 15, 5]]  # only the last step counts
    pairs = placed([48, 32, 16, 8], "symi", past=past)
    # slots: 0 0 | 0 0 | 1 1 | 2 3
    assert pairs[0, 0] == 24
    assert pairs[0, 1] == 24
    assert pairs[1, 2] == 32
    assert (pairs[2, 3], pairs[3, 3]) == (16, 8)
    assert (pairs[1, 1], pairs[2, 2]) == (0, 0)


def test_fastermoe_shadows_with_its_published_constants():
    """FMOE defaults (50 Gb/s, 11.5 TFLOPS, d 2048, alpha 2): a shadow costs 767 tokens."""
    per_token = 3 * 4 * 2 * 2048**2 / 11.5e12 + 4 * 2048 * 4 / 6.25e9
    per_model = 2 * 2 * 2048**2 * 4 / 6.25e9
    assert per_model / per_token == pytest.approx(767, rel=0.01)
    loads = np.array([10_000, 5_000, 4_900, 100])
    assert peers.fastermoe_shadows(loads, per_token, per_model).tolist() == [0]
    loads = np.array([100, 10_000, 9_000, 8_000])
    # 140.0 -> 136.7 -> 133.4 -> 33.6 ms: each falls, though the first two by little
    assert peers.fastermoe_shadows(loads, per_token, per_model).tolist() == [1, 2, 3]
    assert peers.fastermoe_shadows(np.array([800, 790, 10, 10]), per_token, per_model).size == 0


def test_fastermoe_computes_shadowed_experts_where_the_tokens_are():
    counts_WE = np.array([[4000, 3, 2, 1], [3000, 3, 2, 1], [2000, 3, 2, 1], [1000, 3, 2, 1]])
    problem = PlanProblem(counts_WE=counts_WE, rate=Fraction(0), placement="fastermoe")
    made = plan(problem)
    made.check(problem)
    of_hot = made.instance_expert_V == 0
    assert made.instance_rank_V[of_hot].tolist() == [0, 1, 2, 3]
    assert np.array_equal(made.forward_WV[:, of_hot], np.diag([4000, 3000, 2000, 1000]))
    assert made.num_replicas == 3


def test_fastermoe_uses_the_problem_s_prices():
    costs = Costs(
        forward_pair=1.0, backward_pair=2.0, intra_byte=1.0, row_bytes=1, expert_bytes=10_000
    )
    loads = [8000, 4000, 4000, 400]  # a pair 3 + 4, a model 10,000: 56,000 -> 38,000 -> 48,000
    pairs = placed(loads, "fastermoe", slots=None, costs=costs)
    assert {e for e, r in pairs if e != r} == {0}


def test_flexmoe_by_hand():
    # 90 : 10, above 1.2. Expand expert 0 to rank 1: 45 : 55, within 1.2 of the mean.
    pairs = placed([90, 10], "flexmoe", past=[[90, 10]])
    assert pairs == {(0, 0): 45, (0, 1): 45, (1, 1): 10}
    # 1.1 is below the threshold.
    assert placed([220, 180], "flexmoe", past=[[220, 180]]) == {(0, 0): 220, (1, 1): 180}


def test_smartmoe_by_hand():
    # Home 90 : 10. Heaviest first: 60 to rank 0, 30 and 8 to rank 1, 2 to rank 0, which has room.
    pairs = placed([60, 30, 8, 2], "smartmoe", W=2, past=[[60, 30, 8, 2]])
    assert rank_loads(pairs, 2) == [62, 38]
    assert (pairs[0, 0], pairs[1, 1], pairs[2, 1], pairs[3, 0]) == (60, 30, 8, 2)
    assert (pairs[1, 0], pairs[3, 1]) == (0, 0)  # moved home copies
    # 54 : 46 becomes 52 : 48, which is not 5 % less.
    at_home = placed([50, 4, 44, 2], "smartmoe", W=2, past=[[50, 4, 44, 2]])
    assert set(at_home) == {(0, 0), (1, 0), (2, 1), (3, 1)}


def test_laer_copies_and_places_by_hand():
    # One node, six slots: expert 0 (60) twice more, so four copies carry 20 each.
    load_E = np.array([60, 20, 10, 10])
    copies_E = peers.laer_copies(load_E, 6, 1)
    assert copies_E.tolist() == [3, 1, 1, 1]
    # Heaviest copy first to the less loaded rank: 0 1 0 | 1 0 1, expert 0 twice on rank 0.
    copies_EW = peers.laer_places(load_E, copies_E, 2, 3, 2)
    assert copies_EW.tolist() == [[2, 1], [0, 1], [1, 0], [0, 1]]
    # Two nodes: everyone gets a copy per node if that fits, then whole rounds.
    assert peers.laer_copies(np.array([70, 10]), 8, 2).tolist() == [6, 2]


def test_laer_sources_stay_in_their_node():
    past = [[80, 40, 20, 20]]
    costs = Costs(row_bytes=1, intra_byte=1e-3, inter_byte=1.0)
    counts_WE = np.tile([20, 10, 5, 5], (4, 1))
    problem = PlanProblem(
        counts_WE=counts_WE, rate=Fraction(0), placement="laer",
        costs=costs, ranks_per_node=2, budgets=Budgets(slots=1),
        past_counts_SWE=np.array(past)[:, None, :].repeat(4, 1) // 4,
    )  # fmt: skip
    made = plan(problem)
    made.check(problem)
    node_of = made.instance_rank_V // 2
    for expert in range(4):
        mine = made.instance_expert_V == expert
        for source in range(4):
            near = made.forward_WV[source, mine & (node_of == source // 2)].sum()
            assert near == counts_WE[source, expert]  # eight slots: a copy in each node


def test_llep_by_hand():
    # Cap 3000. Rank 0 keeps 3000 of its 6000; the rest fits into two others, 1500 each.
    pairs = placed([6000, 1500, 1500], "llep")
    assert rank_loads(pairs, 3) == [3000, 3000, 3000]
    # Others have room for 500 only, less than min_tokens: all 1002 go to the least loaded, whole.
    pairs = placed([4002, 2499, 2499], "llep")
    assert pairs[0, 0] == 3000
    assert pairs[0, 1] == 1002
    # Below max / mean 1.3 nothing moves.
    assert rank_loads(placed([3600, 2700, 2700], "llep"), 3) == [3600, 2700, 2700]


def test_llep_home_rank_may_keep_nothing():
    # Cap 2000. Expert 0: its rank has expert 1 still to come, so it keeps 500; rank 1 has room for
    # 500, too few, so it gets the other 2500 whole. Expert 1 stays. Experts 2 and 3 find their rank
    # full and go to rank 0, whole and against its cap as well.
    pairs = placed([3000, 1500, 1000, 500], "llep", W=2, slots=None, options={"alpha": 2 / 3})
    assert (pairs[0, 0], pairs[0, 1], pairs[1, 0]) == (500, 2500, 1500)
    assert (pairs[2, 0], pairs[2, 1]) == (1000, 0)
    assert (pairs[3, 0], pairs[3, 1]) == (500, 0)


def test_topology_prefers_the_near_rank():
    # Rank 0 has 60 too many, rank 1 in its node and rank 2 in the other have room for 60 each.
    flow_WW = peers.transport_flow(
        np.array([60, 0, 0, 0]), np.array([0, 60, 60, 0]), 2, 4.0, 0.5, 50
    )
    assert flow_WW[0].sum() == pytest.approx(60)
    assert flow_WW[0, 1] == pytest.approx(flow_WW[0, 2])  # marginals leave no choice here
    # Two hot ranks, one in each node: the flows stay inside.
    flow_WW = peers.transport_flow(
        np.array([60, 0, 60, 0]), np.array([0, 60, 0, 60]), 2, 4.0, 0.5, 50
    )
    assert flow_WW[0, 1] == pytest.approx(60, rel=0.01)
    assert flow_WW[2, 3] == pytest.approx(60, rel=0.01)
    loads = [160, 40, 160, 40]
    pairs = placed(loads, "topology", ranks_per_node=2)
    assert rank_loads(pairs, 4) == [100, 100, 100, 100]
    assert (pairs[0, 1], pairs[2, 3]) == (60, 60)


@pytest.mark.parametrize("placement", sorted(peers.POLICIES))
def test_slots_are_enough_for_what_a_policy_does(placement):
    rng = np.random.default_rng(3)
    for W, E in ((8, 32), (16, 8)):
        counts_WE = rng.poisson(np.tile(rng.lognormal(0, 1.5, E) * 300, (W, 1)))
        problem = PlanProblem(
            counts_WE=counts_WE, rate=Fraction(0), placement=placement,
            past_counts_SWE=counts_WE[None], budgets=Budgets(slots=2),
        )  # fmt: skip
        made = plan(problem)
        if placement == "fixed" or made.instance_slot_V is None:
            continue
        assert made.instance_slot_V.max() < peers.slots_per_rank(placement, W, E, 2)


def test_every_policy_balances_a_steady_skew_better_than_home():
    """No straw men: with last step's counts equal to this one's, each lowers the imbalance."""
    rng = np.random.default_rng(0)
    counts_WE = rng.poisson(np.tile(rng.lognormal(0, 1.0, 64) * 2000, (8, 1)))
    home_W = counts_WE.sum(0).reshape(8, -1).sum(1)
    home = home_W.max() / home_W.mean()
    reached = {}
    for placement in peers.POLICIES:
        if placement == "fixed":
            continue
        problem = PlanProblem(
            counts_WE=counts_WE, rate=Fraction(0), placement=placement,
            past_counts_SWE=counts_WE[None],
        )  # fmt: skip
        load_W = plan(problem).predicted.forward_pairs_W
        reached[placement] = load_W.max() / load_W.mean()
    assert home > 1.4
    assert max(reached.values()) < home
    assert reached["ultraep"] < 1.05
    assert reached["llep"] < 1.1
