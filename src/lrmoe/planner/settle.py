"""From a placement to a plan: quotas, backward split, prediction, and whether the budgets hold.

The same for every policy, so that each works with every quota mode.

Shape letters: W = ranks, E = experts, V = instances (rank-major), C = link classes (inside a node,
between nodes), Q = quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from lrmoe.planner import kernels
from lrmoe.planner.problem import (
    Bool,
    Budgets,
    Costs,
    Float,
    InfeasiblePlan,
    Int,
    MemoryCosts,
    Plan,
    PlanProblem,
    Prediction,
)
from lrmoe.planner.quotas import rate_quotas

NO_LIMIT = kernels.NO_LIMIT
_NO_BUDGETS, _NO_COSTS, _NO_MEMORY = Budgets(), Costs(), MemoryCosts()
_NO_SCORES = np.empty((0, 0))
_LINK_ROUNDS = 8

# Policies that move home experts. Their moved experts are modelled as replicas, so they need more
# slots than their own redundant ones (see peers.slots_per_rank).
MOVING = ("symi", "eplb", "flexmoe", "smartmoe", "laer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which instances exist in a layer call, and which pairs each computes in the forward pass."""

    instance_expert_V: Int
    instance_rank_V: Int
    instance_slot_V: Int
    total_V: Int
    """Pairs of each instance, over all sources."""
    is_sent_V: Bool
    forward_WV: Int | None
    """Pairs of each source at each instance; ``None``: sources are laid out as intervals."""
    load_E: Int
    begin_W: Int
    """First instance of each rank, and V."""
    start_E: Int
    """Where each expert's part of ``of_V`` starts, and V."""
    of_V: Int
    """Every expert's instances in ascending order."""
    relaxed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A budget that a plan does not keep to."""

    budget: str
    rank: int
    needed: int
    allowed: int

    @property
    def excess(self) -> float:
        """How far it is off, relative to what is allowed."""
        return (self.needed - self.allowed) / max(self.allowed, 1)


def settle(problem: PlanProblem, placement: Placement) -> tuple[Plan, list[Violation]]:
    """The plan of a placement, and the budgets it breaks (none: the plan is good)."""
    p = placement
    forward_WV = p.forward_WV
    total = int(p.load_E.sum())
    memory_cap_W: Int | None = None
    if problem.budgets.memory_bytes is not None:
        if forward_WV is None:
            forward_WV = _split(problem, p, None, None).forward_WV
        memory_cap_W = kept_caps(problem, p, forward_WV)
    cap_W = memory_cap_W
    for _ in range(_LINK_ROUNDS):
        kept_V, relaxed = _kept(problem, p, cap_W)
        split = _split(problem, p, forward_WV, kept_V)
        forward_WV = split.forward_WV
        predicted = _predict(problem, p, forward_WV, kept_V, split.backward_WV)
        violations = _broken_budgets(problem, p, total, kept_V, predicted)
        share = _link_share(problem, violations, total, kept_V) if violations else None
        if share is None:
            break
        # A row joins two ranks, so where a link is over its budget all ranks give up pairs alike.
        cap_W = (predicted.backward_pairs_W * share).astype(np.int64)
        if memory_cap_W is not None:
            cap_W = np.minimum(cap_W, memory_cap_W)

    capacity_V = kept_V
    if problem.scope == "global":
        level = int(predicted.backward_pairs_W.max(initial=0) * (1 + problem.slack))
        limit_W = np.full(len(p.begin_W) - 1, level)
        if memory_cap_W is not None:
            limit_W = np.minimum(limit_W, memory_cap_W)
        capacity_V = kernels.with_headroom(
            kept_V, limit_W, p.begin_W, p.start_E, p.instance_expert_V
        )
    is_local = problem.scope == "local"
    return (
        Plan(
            instance_expert_V=p.instance_expert_V,
            instance_rank_V=p.instance_rank_V,
            instance_slot_V=p.instance_slot_V,
            is_sent_V=p.is_sent_V,
            forward_WV=split.forward_WV,
            quota_E=(
                p.load_E if kept_V is p.total_V else kernels.expert_sums(kept_V, p.start_E, p.of_V)
            ),
            capacity_V=capacity_V,
            backward_V=kept_V,
            quota_WE=split.quota_WE if is_local else None,
            backward_WV=split.backward_WV if is_local else None,
            share_probability_WE=split.reached_WE,
            predicted=predicted,
            relaxed=p.relaxed + relaxed,
        ),
        violations,
    )


def kept_caps(problem: PlanProblem, p: Placement, forward_WV: Int) -> Int:
    """Kept pairs that the memory budget leaves room for on each rank."""
    budget = problem.budgets.memory_bytes
    assert budget is not None
    tokens_W = tokens_of(problem)
    rows_2W, _ = kernels.count_rows(forward_WV, forward_WV, tokens_W, p.begin_W, problem.node_size)
    pairs_W = kernels.rank_sums(p.total_V, p.begin_W)
    is_replica_V = p.instance_slot_V >= 0
    replicas_W = kernels.rank_sums(is_replica_V.astype(np.int64), p.begin_W)
    out_2CW, in_2CW = _copies(problem, p, is_replica_V)
    staging_W = _staging(problem.costs, out_2CW, in_2CW)
    caps_W = np.full(len(pairs_W), NO_LIMIT)
    for cost, reserved_W in zip(problem.memory_moments, problem.reserved, strict=True):
        left_W = budget - (
            reserved_W
            + cost.fixed
            + cost.staged * staging_W
            + cost.replica * replicas_W
            + cost.forward_row * rows_2W[0]
            + cost.forward_pair * pairs_W
        )
        caps_W = np.minimum(caps_W, _most_kept(left_W, cost, rows_2W[0]))
    return caps_W


def _most_kept(left_W: Int, cost: MemoryCosts, rows_W: Int) -> Int:
    """Kept pairs, with their rows, that so many bytes are enough for; -1 if for none."""
    # A kept pair brings at most one row, and all of them at most those of the forward pass. The
    # rounding of shares may add a pair per instance.
    if cost.kept_pair + cost.kept_row == 0:
        return np.where(left_W >= 0, NO_LIMIT, -1)
    each = left_W // (cost.kept_pair + cost.kept_row)
    if cost.kept_pair == 0:
        together = np.where(left_W >= cost.kept_row * rows_W, NO_LIMIT, -1)
    else:
        together = (left_W - cost.kept_row * rows_W) // cost.kept_pair
    most_W: Int = np.where(left_W < 0, -1, np.maximum(each, together))
    return most_W


def _copies(problem: PlanProblem, p: Placement, is_again_V: Bool) -> tuple[Int, Int]:
    """Copies of weights sent and received by each rank, by pass and class of link."""
    W, E = problem.counts_WE.shape
    out_2CW, in_2CW = kernels.count_copies(
        p.instance_expert_V, p.instance_rank_V, p.is_sent_V, is_again_V, E, W, problem.node_size
    )
    return out_2CW, in_2CW


def _staging(costs: Costs, out_2CW: Int, in_2CW: Int) -> Int:
    """Bytes of weights arriving for replicas, or of their gradients coming home: the larger."""
    weights_W = in_2CW.sum(1).max(0) * costs.expert_bytes
    staging_W: Int = np.maximum(weights_W, out_2CW[1].sum(0) * costs.gradient_bytes)
    return staging_W


def _predict(
    problem: PlanProblem, p: Placement, forward_WV: Int, kept_V: Int, backward_WV: Int
) -> Prediction:
    """What a plan costs. Slots are taken to be reused between the passes."""
    W = len(problem.counts_WE)
    costs, node_size = problem.costs, problem.node_size
    forward_W, backward_W, forward, backward, _ = kernels.rank_work(p.total_V, kept_V, p.begin_W)
    if costs == _NO_COSTS and problem.memory == _NO_MEMORY and problem.reserved_W is None:
        nothing_W = np.zeros(W, np.int64)
        nothing_CW = np.zeros((2, W), np.int64)
        return Prediction(
            forward=costs.forward_pair * forward,
            backward=costs.backward_pair * backward,
            forward_pairs_W=forward_W,
            backward_pairs_W=backward_W,
            sent_CW=nothing_CW,
            received_CW=nothing_CW,
            memory_W=nothing_W,
            staging_W=nothing_W,
        )
    rows_2W, crossing_2CW = kernels.count_rows(
        forward_WV, backward_WV, tokens_of(problem), p.begin_W, node_size
    )
    is_replica_V = p.instance_slot_V >= 0
    replicas_W = kernels.rank_sums(is_replica_V.astype(np.int64), p.begin_W)
    out_2CW, in_2CW = _copies(problem, p, is_replica_V & (kept_V > 0))
    staging_W = _staging(costs, out_2CW, in_2CW)
    moments_W = [
        reserved_W
        + cost.fixed
        + cost.staged * staging_W
        + cost.replica * replicas_W
        + cost.forward_row * rows_2W[0]
        + cost.forward_pair * forward_W
        + cost.kept_row * rows_2W[1]
        + cost.kept_pair * backward_W
        for cost, reserved_W in zip(problem.memory_moments, problem.reserved, strict=True)
    ]
    weights, gradient = costs.expert_bytes, costs.gradient_bytes
    sent_2CW = costs.row_bytes * crossing_2CW + weights * out_2CW
    received_2CW = costs.row_bytes * crossing_2CW + weights * in_2CW
    sent_2CW[1] += gradient * in_2CW[1]
    received_2CW[1] += gradient * out_2CW[1]
    per_byte_C1 = np.array([[costs.intra_byte], [costs.inter_byte]])
    link_2W = (np.maximum(sent_2CW, received_2CW) * per_byte_C1).sum(1)
    return Prediction(
        forward=float((costs.forward_pair * forward_W + link_2W[0]).max()),
        backward=float((costs.backward_pair * backward_W + link_2W[1]).max()),
        forward_pairs_W=forward_W,
        backward_pairs_W=backward_W,
        sent_CW=sent_2CW.sum(0),
        received_CW=received_2CW.sum(0),
        memory_W=np.maximum.reduce(moments_W),
        staging_W=staging_W,
    )


def tokens_of(problem: PlanProblem) -> Int:
    """Tokens of each rank."""
    tokens_W: Int = -(-problem.counts_WE.sum(1) // problem.top_k)
    return tokens_W


def _kept(problem: PlanProblem, p: Placement, cap_W: Int | None) -> tuple[Int, tuple[str, ...]]:
    """Kept pairs of every instance in the problem's quota mode, within the ranks' caps."""
    mode, rate = problem.quotas, problem.rate
    extra = 0
    kept_V = p.total_V
    if mode != "planned" and rate > 0:
        quota_E = rate_quotas(p.load_E, rate)
        if mode == "rate":
            kept_V = kernels.share_quotas(quota_E, p.load_E, p.total_V, p.start_E, p.of_V)
        else:
            extra = int(p.load_E.sum() - quota_E.sum())
    if not extra and cap_W is None:
        return kept_V, ()
    if cap_W is None:
        cap_W = np.full(len(p.begin_W) - 1, NO_LIMIT)
    largest = max(rate, problem.c_max or Fraction(0))
    floor = min(problem.min_kept, (1 - largest) / 2)
    least_V = kernels.least_kept(
        p.total_V, p.load_E, p.start_E, p.of_V, floor.numerator, floor.denominator
    )
    before = int(kept_V.sum()) - extra
    kept_V = kept_V.copy()
    least_V = np.minimum(least_V, kept_V)
    scores_EQ = problem.score_quantiles_EQ
    kernels.drop_pairs(
        extra, cap_W, p.begin_W, p.instance_expert_V, p.total_V, kept_V, least_V,
        _NO_SCORES if scores_EQ is None else scores_EQ,
    )  # fmt: skip
    after = int(kept_V.sum())
    relaxed: tuple[str, ...] = ()
    if after < before:
        relaxed = (f"budgets: {before - after} more pairs dropped than the quota mode asks for",)
    elif after > before:
        relaxed = (f"min_kept: {after - before} fewer pairs dropped than rate={rate} asks for",)
    return kept_V, relaxed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """What each source gives to each instance, and keeps there."""

    forward_WV: Int
    backward_WV: Int
    quota_WE: Int
    reached_WE: Float | None
    """P(quota >= 1) where shares are rounded at random."""


def _split(
    problem: PlanProblem, p: Placement, forward_WV: Int | None, kept_V: Int | None
) -> _Split:
    """The sources' part of the forward and the backward pass.

    Args:
        forward_WV: ``None``: laid out here, as intervals.
        kept_V: ``None``: only the forward split is wanted.
    """
    counts_WE = problem.counts_WE
    # In global scope the shares only stand in for what the draw will decide.
    seed = problem.share_seed if problem.scope == "local" else None
    keeps_all = kept_V is None or kept_V is p.total_V
    if kept_V is None:
        kept_V = p.total_V
    if keeps_all and forward_WV is not None:
        return _Split(
            forward_WV=forward_WV, backward_WV=forward_WV, quota_WE=counts_WE, reached_WE=None
        )
    W, E = counts_WE.shape
    V = len(p.total_V)
    is_random = seed is not None and not keeps_all
    # One block for all matrices: freed and allocated again as a whole, it stays with the process,
    # and at a thousand ranks the page faults of fresh memory would take as long as the plan.
    end = W * V * (forward_WV is None)
    split_end = end if keeps_all else end + W * V
    quota_end = end if keeps_all else split_end + W * E
    block = np.empty(quota_end + W * E * is_random, np.int64)
    made_WV = block[:end].reshape(W, V) if forward_WV is None else forward_WV
    backward_WV = made_WV if keeps_all else block[end:split_end].reshape(W, V)
    quota_WE = counts_WE if keeps_all else block[split_end:quota_end].reshape(W, E)
    reached_WE = block[quota_end:].view(np.float64).reshape(-1, E)
    shares = (seed or 0, is_random, backward_WV, quota_WE, reached_WE)
    if forward_WV is None and problem.num_nodes == 1:
        kernels.split_and_share(
            counts_WE, p.instance_expert_V, p.instance_rank_V, p.total_V, p.begin_W, p.start_E,
            p.of_V, made_WV, not keeps_all, kept_V, *shares,
        )  # fmt: skip
    else:
        if forward_WV is None:
            kernels.split_in_nodes(
                counts_WE, p.instance_rank_V, p.total_V, p.start_E, p.of_V, problem.node_size,
                made_WV,
            )  # fmt: skip
        if not keeps_all:
            kernels.share_sources(made_WV, p.total_V, kept_V, p.instance_expert_V, *shares)
    return _Split(
        forward_WV=made_WV,
        backward_WV=backward_WV,
        quota_WE=quota_WE,
        reached_WE=reached_WE if is_random else None,
    )


def _broken_budgets(
    problem: PlanProblem, p: Placement, total: int, kept_V: Int, predicted: Prediction
) -> list[Violation]:
    """Every budget that is exceeded, with the rank where it is worst."""
    budgets = problem.budgets
    found: list[Violation] = []

    def test(name: str, used_W: Int, allowed: int | None) -> None:
        if allowed is not None and len(used_W) and used_W.max() > allowed:
            r = int(used_W.argmax())
            found.append(Violation(budget=name, rank=r, needed=int(used_W[r]), allowed=allowed))

    if budgets != _NO_BUDGETS:
        if budgets.slots is not None and problem.placement not in (*MOVING, "recalibrated"):
            replicas_W = kernels.rank_sums((p.instance_slot_V >= 0).astype(np.int64), p.begin_W)
            test("slots", replicas_W, budgets.slots)
        test("memory_bytes", predicted.memory_W, budgets.memory_bytes)
        test("staging_bytes", predicted.staging_W, budgets.staging_bytes)
        test("forward_pairs", predicted.forward_pairs_W, budgets.forward_pairs)
        moved_CW = np.maximum(predicted.sent_CW, predicted.received_CW)
        test("intra_bytes", moved_CW[0], budgets.intra_bytes)
        test("inter_bytes", moved_CW[1], budgets.inter_bytes)
    if kept_V is not p.total_V:
        dropped, allowed = total - int(kept_V.sum()), problem.largest_drop_of(total)
        if dropped > allowed:
            dropped_W = predicted.forward_pairs_W - predicted.backward_pairs_W
            r = int(dropped_W.argmax())
            found.append(Violation(budget="c_max", rank=r, needed=dropped, allowed=allowed))
    return found


def _link_share(
    problem: PlanProblem, violations: list[Violation], total: int, kept_V: Int
) -> float | None:
    """Share of the kept pairs to keep on, where a link is over its budget and drops are allowed."""
    over = [v for v in violations if v.budget in ("intra_bytes", "inter_bytes")]
    if not over or total - int(kept_V.sum()) >= problem.largest_drop_of(total):
        return None
    worst = max(over, key=lambda v: v.excess)
    # About half of the bytes are the backward pass's.
    return max(0.25, 1 - 2 * (worst.needed - worst.allowed) / worst.needed)


def infeasible(
    problem: PlanProblem, load_E: Int, attempts: list[list[Violation]]
) -> InfeasiblePlan:
    """The error for a problem no attempt fits, told from the attempt that came closest."""
    closest = min(attempts, key=lambda found: max(v.excess for v in found))
    worst = max(closest, key=lambda v: v.excess)
    W, total = len(problem.counts_WE), int(load_E.sum())
    budget, needed, allowed = worst.budget, worst.needed, worst.allowed
    largest = problem.largest_drop_of(total)
    home_E = np.arange(len(load_E)) * W // len(load_E)
    heaviest = int(np.where(home_E == worst.rank, load_E, -1).argmax())
    its_heaviest = f"its heaviest expert, {heaviest}, has {int(load_E[heaviest])} pairs"
    least_memory = _least_memory(problem, total, largest)
    memory = problem.budgets.memory_bytes
    if budget == "c_max":
        share = np.ceil(1e4 * needed / total) / 1e4  # up, so that the number works as printed
        text = (
            f"the budgets force {needed} of {total} pairs to be dropped, but {largest} are allowed "
            f"({needed - allowed} fewer); rank {worst.rank} drops the most ({its_heaviest})"
        )
        if memory is not None and least_memory > memory:
            return InfeasiblePlan(
                "overload",
                f"{text}. Even spread perfectly over {W} ranks, they need {least_memory} bytes "
                f"of memory_bytes={memory} on each. It would fit with c_max >= {share:.4f} or "
                f"memory_bytes >= {least_memory}",
            )
        return InfeasiblePlan(
            "spatial",
            f"{text}. Spread perfectly they would fit, but no assignment was found with "
            f"{_slots(problem)}. It would fit with c_max >= {share:.4f}, more slots, or more of "
            f"the budget",
        )
    least = {"memory_bytes": least_memory, "forward_pairs": -(-total // W)}.get(budget, 0)
    unit = {"forward_pairs": "pairs", "slots": "replicas"}.get(budget, "bytes")
    text = (
        f"rank {worst.rank} needs {needed} {unit}, {needed - allowed} more than {budget}={allowed} "
        f"({its_heaviest}; {largest} of {total} pairs may be dropped)"
    )
    if least > allowed:
        drops = " or a larger c_max" if budget == "memory_bytes" else ""
        return InfeasiblePlan(
            "overload",
            f"{text}. Even spread perfectly over {W} ranks it would be {least} on each. It would "
            f"fit with {budget} >= {least}, fewer tokens{drops}",
        )
    slots = " or more slots" if budget in ("memory_bytes", "forward_pairs") else ""
    return InfeasiblePlan(
        "spatial",
        f"{text}. Spread perfectly it would fit, but no assignment was found with "
        f"{_slots(problem)}. It would fit with {budget} >= {needed}{slots}",
    )


def _least_memory(problem: PlanProblem, total: int, largest_drop: int) -> int:
    """Bytes of a rank if pairs, rows at their fewest, and what is reserved were spread evenly."""
    W = len(problem.counts_WE)
    pairs, kept = -(-total // W), -(-(total - largest_drop) // W)
    moments = [
        -(-int(reserved_W.sum()) // W)
        + cost.fixed
        + cost.forward_pair * pairs
        + cost.kept_pair * kept
        + cost.forward_row * -(-pairs // problem.top_k)
        + cost.kept_row * -(-kept // problem.top_k)
        for cost, reserved_W in zip(problem.memory_moments, problem.reserved, strict=True)
    ]
    return max(moments)


def _slots(problem: PlanProblem) -> str:
    slots = problem.budgets.slots
    return "any number of replicas" if slots is None else f"slots={slots} per rank"
