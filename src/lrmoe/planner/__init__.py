"""Pure planning on integers: quotas, placement and splits of one layer call."""

from __future__ import annotations

from lrmoe.planner import peers, quotas
from lrmoe.planner.problem import InfeasiblePlan, Plan, PlanProblem

__all__ = ["InfeasiblePlan", "Plan", "PlanProblem", "plan"]

_PLACEMENTS = {"fixed": peers.fixed}


def plan(problem: PlanProblem) -> Plan:
    """The plan of one layer call: pure and deterministic, so every rank makes the same one.

    Raises:
        ValueError: for a placement or quota mode this version does not have.
    """
    if problem.placement not in _PLACEMENTS:
        raise ValueError(
            f"placement={problem.placement!r}: allowed are {', '.join(map(repr, _PLACEMENTS))}"
        )
    if problem.quotas != "rate":
        raise ValueError(f"quotas={problem.quotas!r}: allowed is 'rate'")
    counts_WE = problem.counts_WE
    placement = _PLACEMENTS[problem.placement](counts_WE)
    quota_E = quotas.rate_quotas(counts_WE.sum(0), problem.rate)

    quota_WE = backward_WV = probability_WE = None
    if problem.scope == "local":
        if problem.share_seed is None:
            quota_WE = quotas.apportion(counts_WE, quota_E)
        else:
            quota_WE, probability_WE = quotas.apportion_randomly(
                counts_WE, quota_E, problem.share_seed
            )
        backward_WV = quota_WE[:, placement.instance_expert_V]
    return Plan(
        instance_expert_V=placement.instance_expert_V,
        instance_rank_V=placement.instance_rank_V,
        forward_WV=placement.forward_WV,
        quota_E=quota_E,
        capacity_V=quota_E[placement.instance_expert_V],
        quota_WE=quota_WE,
        backward_WV=backward_WV,
        share_probability_WE=probability_WE,
    )
