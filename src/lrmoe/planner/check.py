"""What every plan must satisfy, computed a second time in plain numpy.

Shape letters: W = ranks, E = experts, V = instances (rank-major), C = link classes (inside a node,
between nodes).
"""

from __future__ import annotations

import numpy as np

from lrmoe.planner.problem import Int, Plan, PlanProblem, Prediction, home_ranks
from lrmoe.planner.settle import MOVING


def check_plan(plan: Plan, problem: PlanProblem) -> None:
    """Assert every invariant and budget."""
    counts_WE = problem.counts_WE
    E = counts_WE.shape[1]
    expert_V, rank_V = plan.instance_expert_V, plan.instance_rank_V
    assert np.array_equal(_by(expert_V, E, plan.forward_WV), counts_WE), "a pair is lost"
    assert np.all(plan.forward_WV >= 0), "negative pairs"
    counts_E = counts_WE.sum(0)
    assert np.all((plan.quota_E >= (counts_E > 0)) & (plan.quota_E <= counts_E)), "quota"
    assert np.all(np.diff(rank_V) >= 0), "instances are not rank-major"
    places = set(zip(expert_V.tolist(), rank_V.tolist(), strict=True))
    assert len(places) == len(expert_V), "an expert twice on one rank"
    _check_slots(plan, problem)

    if plan.backward_V is not None:
        assert np.array_equal(_by(expert_V, E, plan.backward_V), plan.quota_E), "instances' quotas"
        assert np.all((plan.backward_V >= 0) & (plan.backward_V <= plan.forward_WV.sum(0))), (
            "an instance keeps more pairs than it computes"
        )
        assert np.all(plan.backward_V <= plan.capacity_V), "capacity below the plan"
    if plan.quota_WE is not None:
        assert plan.backward_WV is not None
        assert np.array_equal(plan.quota_WE.sum(0), plan.quota_E), "shares do not add up"
        assert np.all((plan.quota_WE >= 0) & (plan.quota_WE <= counts_WE)), "share"
        assert np.array_equal(_by(expert_V, E, plan.backward_WV), plan.quota_WE), "kept pair lost"
        assert np.all(plan.backward_WV.sum(0) <= plan.capacity_V), "capacity exceeded"
        assert np.all(plan.backward_WV >= 0), "negative kept pairs"
        # What these planners make never moves a pair in local scope; other plans may.
        assert plan.predicted is None or np.all(plan.backward_WV <= plan.forward_WV), (
            "a kept pair must move"
        )
    dropped = int(counts_E.sum() - plan.quota_E.sum())
    assert dropped <= problem.largest_drop_of(int(counts_E.sum())), f"{dropped} pairs dropped"
    if plan.predicted is None:
        return
    assert plan.backward_V is not None
    expected = predict(plan, problem)
    for name in ("forward_pairs_W", "backward_pairs_W", "memory_W", "staging_W"):
        assert np.array_equal(getattr(plan.predicted, name), getattr(expected, name)), name
    for name in ("sent_CW", "received_CW"):
        assert np.array_equal(getattr(plan.predicted, name), getattr(expected, name)), name
    assert np.isclose(plan.predicted.forward, expected.forward), "forward makespan"
    assert np.isclose(plan.predicted.backward, expected.backward), "backward makespan"
    _check_budgets(plan, problem, expected)


def _by(group_V: Int, groups: int, values_V: Int) -> Int:
    """Sums of the last axis by group."""
    sums = np.zeros((groups, *values_V.shape[:-1]), np.int64)
    np.add.at(sums, group_V, values_V.T)
    return sums.T


def _check_slots(plan: Plan, problem: PlanProblem) -> None:
    W, E = problem.counts_WE.shape
    expert_V, rank_V, slot_V = plan.instance_expert_V, plan.instance_rank_V, plan.instance_slot_V
    is_home_V = rank_V == home_ranks(W, E)[expert_V]
    assert np.array_equal(np.sort(expert_V[is_home_V]), np.arange(E)), "a home expert is missing"
    if slot_V is None:
        return
    assert np.array_equal(is_home_V, slot_V < 0), "home experts have no slot, replicas have one"
    used = list(zip(rank_V[~is_home_V].tolist(), slot_V[~is_home_V].tolist(), strict=True))
    assert used == sorted(set(used)), "a slot is used twice, or slots are not in order"
    for r in range(W):
        here = slot_V[rank_V == r]
        assert np.all(np.diff(here >= 0) >= 0), "replicas before home experts"
    assert plan.is_sent_V is not None
    held_WL = problem.held_WL
    for v in np.flatnonzero(~is_home_V):
        r, s = int(rank_V[v]), int(slot_V[v])
        is_held = held_WL is not None and s < held_WL.shape[1] and held_WL[r, s] == expert_V[v]
        assert plan.is_sent_V[v] != is_held, "weights travel exactly to slots without them"
    assert not plan.is_sent_V[is_home_V].any(), "weights travel to a home expert"


def _check_budgets(plan: Plan, problem: PlanProblem, expected: Prediction) -> None:
    budgets, W = problem.budgets, len(problem.counts_WE)
    moved_CW = np.maximum(expected.sent_CW, expected.received_CW)
    used = {
        "memory_bytes": expected.memory_W,
        "staging_bytes": expected.staging_W,
        "forward_pairs": expected.forward_pairs_W,
        "intra_bytes": moved_CW[0],
        "inter_bytes": moved_CW[1],
    }
    if problem.placement not in MOVING:
        used["slots"] = np.bincount(plan.instance_rank_V[plan.is_replica], minlength=W)
    for name, used_W in used.items():
        allowed = getattr(budgets, name)
        assert allowed is None or used_W.max() <= allowed, f"budget {name} exceeded"


def predict(plan: Plan, problem: PlanProblem) -> Prediction:
    """What the plan costs, from its own numbers alone."""
    W, E = problem.counts_WE.shape
    costs = problem.costs
    expert_V, rank_V = plan.instance_expert_V, plan.instance_rank_V
    kept_V = plan.backward_V
    assert kept_V is not None
    kept_WV = plan.backward_WV
    if kept_WV is None:  # in global scope the draw decides: shares in proportion stand in for it
        assert plan.predicted is not None
        kept_WV = _proportional(plan.forward_WV, kept_V)
    forward_W = _by(rank_V, W, plan.forward_WV.sum(0))
    backward_W = _by(rank_V, W, kept_V)
    tokens_W1 = -(-problem.counts_WE.sum(1, keepdims=True) // problem.top_k)
    forward_WW = np.minimum(_by(rank_V, W, plan.forward_WV), tokens_W1)
    backward_WW = np.minimum(_by(rank_V, W, kept_WV), forward_WW)

    node_W = np.arange(W) // problem.node_size
    is_near_WW = node_W[:, None] == node_W[None, :]
    others_WW = ~np.eye(W, dtype=bool)
    is_replica_V = plan.is_replica
    assert plan.is_sent_V is not None
    again_V = is_replica_V & (kept_V > 0)
    copies = []  # per pass, from home (first) to rank
    for sent_V in (plan.is_sent_V, again_V):
        copies_WW = np.zeros((W, W), np.int64)
        np.add.at(copies_WW, (home_ranks(W, E)[expert_V[sent_V]], rank_V[sent_V]), 1)
        copies.append(copies_WW)
    sent_2CW = np.zeros((2, 2, W), np.int64)
    received_2CW = np.zeros((2, 2, W), np.int64)
    for i, rows_WW in enumerate((forward_WW, backward_WW)):
        for c, is_class_WW in enumerate((is_near_WW, ~is_near_WW)):
            rows = np.where(is_class_WW & others_WW, rows_WW, 0)
            both = rows.sum(1) + rows.sum(0)
            moved = np.where(is_class_WW, copies[i], 0)
            sent_2CW[i, c] = costs.row_bytes * both + costs.expert_bytes * moved.sum(1)
            received_2CW[i, c] = costs.row_bytes * both + costs.expert_bytes * moved.sum(0)
            if i == 1:
                sent_2CW[i, c] += costs.gradient_bytes * moved.sum(0)
                received_2CW[i, c] += costs.gradient_bytes * moved.sum(1)
    per_byte_C1 = np.array([[costs.intra_byte], [costs.inter_byte]])
    link_2W = (np.maximum(sent_2CW, received_2CW) * per_byte_C1).sum(1)
    replicas_W = _by(rank_V, W, is_replica_V.astype(np.int64))
    arriving_W = np.maximum(copies[0].sum(0), copies[1].sum(0))
    staging_W = np.maximum(arriving_W * costs.expert_bytes, copies[1].sum(1) * costs.gradient_bytes)
    peak_W = np.zeros(W, np.int64)
    for memory, reserved_W in zip(problem.memory_moments, problem.reserved, strict=True):
        moment_W = (
            reserved_W + memory.fixed + memory.replica * replicas_W + memory.staged * staging_W
        )
        moment_W += memory.forward_row * forward_WW.sum(0) + memory.forward_pair * forward_W
        moment_W += memory.kept_row * backward_WW.sum(0) + memory.kept_pair * backward_W
        peak_W = np.maximum(peak_W, moment_W)
    return Prediction(
        forward=float((costs.forward_pair * forward_W + link_2W[0]).max()),
        backward=float((costs.backward_pair * backward_W + link_2W[1]).max()),
        forward_pairs_W=forward_W,
        backward_pairs_W=backward_W,
        sent_CW=sent_2CW.sum(0),
        received_CW=received_2CW.sum(0),
        memory_W=peak_W,
        staging_W=staging_W,
    )


def _proportional(forward_WV: Int, kept_V: Int) -> Int:
    """Shares of the instances' kept pairs, rounded systematically from the middle."""
    total_V = np.maximum(forward_WV.sum(0), 1)
    line_WV = (forward_WV * kept_V).cumsum(0) + total_V // 2
    shares_WV: Int = np.diff(line_WV // total_V, axis=0, prepend=0)
    return shares_WV
