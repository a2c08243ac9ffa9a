"""LRMoE's planner: quotas and placement together.

**What is minimised.** With F_r and B_r the pairs rank r computes in the two passes, a layer call
takes ``max_r (c_f F_r + links) + max_r (c_b B_r + links)``. All pairs are computed in the forward
pass, so only moving them levels F; dropping pairs also lowers B. A replica of an expert on another
rank lets pairs move, for the price of its weights on the wire: once in the forward pass, and if it
takes part in the backward pass, again there, with its gradient back.

**In pairs.** Under a common kept share k, ``B = k F``, so a pair is worth ``c = c_f + k c_b``, and
a replica costs the rank that sends and the rank that receives

    setup = (bytes of weights, once or twice, and of the gradient) * (cost of a byte) / c    pairs.

A chunk of q pairs lowers one rank by ``q - setup`` and raises the other by ``q + setup``: it pays
only for ``q > setup``, which is the ratio of compute rate and link rate, whatever the expert's
size. So one number per rank, its pairs and set-ups, is to be levelled.

**Levelling** (:mod:`lrmoe.planner.levelling`). For a threshold T, every rank above T exports
``load - T`` pairs to ranks below it; the least T that works is bounded by the mean. Each replica
takes a slot, so few large chunks are wanted: a fixed-charge transportation problem, which is hard
in general. Greedy chunks (each exhausts a need, a room or an expert) solve it at once where slots
are plentiful, and an exchange search where they are not. Because all pairs of one replica may move
freely, its ranks are then levelled further at no cost.

**Quotas** (:mod:`lrmoe.planner.settle`). ``rate`` keeps ``k = 1 - C`` of every expert. ``planned``
keeps all, less what the budgets' caps on B force. ``makespan`` drops as many pairs as ``rate``, but
lowers the busiest ranks first, to the one level at which the drops are used up (water-filling: any
other choice leaves a higher maximum). On a rank it drops where the scores lost are least: the
experts' score quantiles, lowest first, down to a floor for every expert.

**Budgets** on memory and pairs are caps on F, with ``k`` between 1 and ``1 - c_max``: a placement
is tried at full retention first and at less only if that breaks a budget. Links have budgets too;
if rows or weights exceed them, placements with replicas inside the home's node, and without any,
are tried. The first that fits wins; in ``planned`` the one that keeps most.

**Splits.** Sources are laid out over an expert's instances as intervals (own rank first, then the
node, then the rest). Shares by largest remainder would give every source a few pairs on every
instance: more, smaller strata to sample from, and kept pairs that have to move. With intervals,
nearly every stratum (source, instance) is a whole (source, expert) stratum.

Shape letters: W = ranks, E = experts, L = replica slots of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lrmoe.planner import kernels, levelling
from lrmoe.planner.problem import Int, Plan, PlanProblem
from lrmoe.planner.settle import MOVING, NO_LIMIT, Placement, Violation, infeasible, settle

_NO_EXPORTS = np.empty(0, np.int64)
_RETENTION_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """How to place: the expected kept share, and where replicas may go."""

    kept_share: float
    intra_only: bool = False
    has_replicas: bool = True


def recalibrated(problem: PlanProblem) -> Plan:
    """The plan with the least makespan that the budgets allow, and few replicas.

    Raises:
        InfeasiblePlan: if no attempt keeps to the budgets.
    """
    load_E = kernels.sums(problem.counts_WE)
    failed: list[list[Violation]] = []
    best: Plan | None = None
    for attempt in _attempts(problem):
        plan, violations = settle(problem, _place(problem, load_E, attempt))
        if violations:
            failed.append(violations)
            continue
        if best is None or _is_better(plan, best):
            best = plan
        if not any(note.startswith("budgets") for note in plan.relaxed):
            break  # it keeps all that the quota mode asks for
    if best is None:
        raise infeasible(problem, load_E, failed)
    return _never_worse_than_home(problem, load_E, best)


def place_at_home(problem: PlanProblem, load_E: Int) -> Placement:
    """Every pair on its expert's home rank."""
    return lay_out(problem, load_E, _NO_EXPORTS, _NO_EXPORTS, _NO_EXPORTS)


def lay_out(
    problem: PlanProblem, load_E: Int, expert_X: Int, rank_X: Int, pairs_X: Int
) -> Placement:
    """The placement in which these pairs leave home, and sources are split as intervals."""
    W = len(problem.counts_WE)
    held_WL = _held(problem)
    # Slots filled by home rank take weights as they arrive.
    order_X = np.argsort(expert_X, kind="stable")
    expert_X, rank_X, pairs_X = expert_X[order_X], rank_X[order_X], pairs_X[order_X]
    expert_V, rank_V, slot_V, total_V, is_sent_V, begin_W, start_E, of_V = kernels.lay_out(
        load_E, W, expert_X, rank_X, pairs_X, held_WL
    )
    return Placement(
        instance_expert_V=expert_V,
        instance_rank_V=rank_V,
        instance_slot_V=slot_V,
        total_V=total_V,
        is_sent_V=is_sent_V,
        forward_WV=None if len(expert_X) else problem.counts_WE,
        load_E=load_E,
        begin_W=begin_W,
        start_E=start_E,
        of_V=of_V,
    )


def _held(problem: PlanProblem) -> Int:
    """What the slots hold, as far as the plan may use them."""
    held_WL = problem.held_WL
    if held_WL is None:
        return np.empty((len(problem.counts_WE), 0), np.int64)
    slots = problem.budgets.slots
    if slots is None or problem.placement in MOVING:
        return np.ascontiguousarray(held_WL)
    return np.ascontiguousarray(held_WL[:, :slots])


def _attempts(problem: PlanProblem) -> Iterator[_Attempt]:
    """What to try, in the order of preference; more than one only matters where budgets bind."""
    at_least = 1.0 - float(max(problem.rate, problem.c_max or problem.rate))
    kept = 1.0 if problem.quotas == "planned" else 1.0 - float(problem.rate)
    variants = [(False, True), (False, False)]
    if problem.num_nodes > 1:
        variants.insert(1, (True, True))
    for intra_only, has_replicas in variants:
        yield _Attempt(kept_share=kept, intra_only=intra_only, has_replicas=has_replicas)
    if kept <= at_least:
        return
    for step in range(1, _RETENTION_STEPS + 1):
        share = kept + (at_least - kept) * step / _RETENTION_STEPS
        for intra_only, has_replicas in variants:
            if has_replicas:  # home placement is the same at every share
                yield _Attempt(kept_share=share, intra_only=intra_only)


def _place(problem: PlanProblem, load_E: Int, attempt: _Attempt) -> Placement:
    """A placement for an attempt; where the caps leave no legal one, the closest to it."""
    if not attempt.has_replicas:
        return place_at_home(problem, load_E)
    W, E = problem.counts_WE.shape
    costs, budgets = problem.costs, problem.budgets
    kept = attempt.kept_share
    pair = costs.forward_pair + kept * costs.backward_pair
    moved = 2 * costs.expert_bytes + costs.gradient_bytes
    cap_W, memory_pairs = _pair_caps(problem, load_E, kept)
    if budgets.forward_pairs is not None:
        cap_W = np.minimum(cap_W, budgets.forward_pairs)
    slots = E if budgets.slots is None else budgets.slots
    copies_out = NO_LIMIT
    if budgets.staging_bytes is not None:
        if costs.expert_bytes:
            slots = min(slots, budgets.staging_bytes // costs.expert_bytes)
        if costs.gradient_bytes:
            copies_out = budgets.staging_bytes // costs.gradient_bytes
    limit_2W = np.empty((2, W), np.int64)
    limit_2W[0], limit_2W[1] = cap_W, slots
    rules = levelling.Rules(
        memory_pairs,
        copies_out,
        _setup(moved * costs.intra_byte, pair),
        _setup(moved * costs.inter_byte, pair),
        problem.node_size,
        attempt.intra_only,
    )
    expert_X, rank_X, pairs_X, _, _ = levelling.place_replicas(
        load_E, W, float(problem.slack), limit_2W, rules, _held(problem)
    )
    return lay_out(problem, load_E, expert_X, rank_X, pairs_X)


def _pair_caps(problem: PlanProblem, load_E: Int, kept: float) -> tuple[Int, int]:
    """Pairs that the memory budget lets each rank compute, and the pairs a replica takes up."""
    W, budget = len(problem.counts_WE), problem.budgets.memory_bytes
    cap_W, memory_pairs = np.full(W, NO_LIMIT), 0
    if budget is None:
        return cap_W, memory_pairs
    tokens = -(-int(load_E.sum()) // problem.top_k)
    for memory, reserved_W in zip(problem.memory_moments, problem.reserved, strict=True):
        each = memory.forward_pair + kept * memory.kept_pair
        rows = memory.forward_row + kept * memory.kept_row
        if each + rows == 0:
            continue
        left_W = budget - memory.fixed - reserved_W
        # Rows are at most the pairs, and at most the tokens: the weaker cap is still right.
        by_pair_W = left_W / (each + rows)
        by_token_W = (left_W - rows * tokens) / each if each > 0 else np.full(W, -1.0)
        most_W = np.maximum(np.maximum(by_pair_W, by_token_W), 0.0)
        cap_W = np.minimum(cap_W, most_W.astype(np.int64))
        is_by_token = each > 0 and by_token_W.max() > by_pair_W.max()
        pair = each if is_by_token else each + rows
        memory_pairs = max(memory_pairs, int(np.ceil(memory.replica / pair)))
    return cap_W, memory_pairs


def _setup(cost: float, pair: float) -> int:
    """A cost in pairs, rounded up."""
    if cost == 0:
        return 0
    return int(np.ceil(cost / pair)) if pair > 0 else NO_LIMIT // 8


def _is_better(plan: Plan, best: Plan) -> bool:
    """Whether ``plan`` keeps more pairs, or as many in less time."""
    kept, most = int(plan.quota_E.sum()), int(best.quota_E.sum())
    assert plan.predicted is not None
    assert best.predicted is not None
    return (kept, -plan.predicted.makespan) > (most, -best.predicted.makespan)


def _never_worse_than_home(problem: PlanProblem, load_E: Int, plan: Plan) -> Plan:
    """``plan``, or the one without replicas if that is faster and keeps as many pairs.

    Rounding, and rows that replicas draw over slower links, can use up what levelling gains.
    """
    if plan.num_replicas == 0:
        return plan
    assert plan.predicted is not None
    W = len(problem.counts_WE)
    peak, kept = kernels.home_peak(load_E, W), int(plan.predicted.backward_pairs_W.sum())
    costs = problem.costs
    if plan.predicted.makespan <= costs.forward_pair * peak + costs.backward_pair * kept / W:
        return plan
    home, violations = settle(problem, place_at_home(problem, load_E))
    assert home.predicted is not None
    if not violations and (
        (home.quota_E.sum(), -home.predicted.makespan)
        > (plan.quota_E.sum(), -plan.predicted.makespan)
    ):
        return replace(home, relaxed=(*home.relaxed, "replicas: home placement is faster"))
    return plan
