"""Pure planning on integers: quotas, placement and splits of one layer call."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from lrmoe.planner import quotas
from lrmoe.planner.problem import (
    QUOTA_MODES,
    Budgets,
    Costs,
    InfeasiblePlan,
    MemoryCosts,
    Plan,
    PlanProblem,
    Prediction,
    home_ranks,
)

__all__ = [
    "PLACEMENTS",
    "Budgets",
    "Costs",
    "InfeasiblePlan",
    "MemoryCosts",
    "Plan",
    "PlanProblem",
    "Prediction",
    "load_compiled",
    "plan",
]

PLACEMENTS = (
    "fixed",
    "symi",
    "ultraep",
    "eplb",
    "fastermoe",
    "flexmoe",
    "smartmoe",
    "laer",
    "llep",
    "topology",
    "recalibrated",
)
_NO_BUDGETS, _NO_COSTS, _NO_MEMORY = Budgets(), Costs(), MemoryCosts()


def plan(problem: PlanProblem) -> Plan:
    """The plan of one layer call: pure and deterministic, so every rank makes the same one.

    The first call in a process with a policy other than ``fixed`` loads compiled code, and on the
    first use on a machine compiles it.

    Raises:
        ValueError: for a placement or quota mode that does not exist.
        InfeasiblePlan: if no plan keeps to the budgets.
    """
    if problem.placement not in PLACEMENTS:
        raise ValueError(
            f"placement={problem.placement!r}: allowed are {', '.join(map(repr, PLACEMENTS))}"
        )
    if problem.quotas not in QUOTA_MODES:
        raise ValueError(
            f"quotas={problem.quotas!r}: allowed are {', '.join(map(repr, QUOTA_MODES))}"
        )
    if problem.placement == "fixed" and _is_plain(problem):
        return _plain(problem)
    # Numba takes a while to load, and home placement without budgets does not need it.
    if problem.placement == "recalibrated":
        from lrmoe.planner.recalibrated import recalibrated

        return recalibrated(problem)
    from lrmoe.planner import peers
    from lrmoe.planner.settle import infeasible, settle

    placement = peers.POLICIES[problem.placement](problem)
    made, violations = settle(problem, placement)
    if violations:
        raise infeasible(problem, placement.load_E, [violations])
    return made


def load_compiled(placement: str) -> None:
    """Load a policy's compiled code, or compile it where it never ran, before time matters."""
    counts_WE = np.array([[9, 3, 2, 2], [9, 3, 2, 2]])
    for scope, share_seed in (("local", 0), ("local", None), ("global", None)):
        for quota_mode in QUOTA_MODES:
            plan(
                PlanProblem(
                    counts_WE=counts_WE,
                    past_counts_SWE=counts_WE[None],
                    rate=Fraction(1, 2),
                    placement=placement,
                    quotas=quota_mode,
                    scope=scope,
                    share_seed=share_seed,
                    budgets=Budgets(slots=2, memory_bytes=1 << 50),
                    costs=Costs(intra_byte=1e-6, row_bytes=1, expert_bytes=1, gradient_bytes=1),
                )
            )


def _is_plain(problem: PlanProblem) -> bool:
    """Whether nothing but the rate shapes the quotas, and nobody asks what they cost."""
    return (
        problem.quotas == "rate"
        and problem.budgets == _NO_BUDGETS
        and problem.costs == _NO_COSTS
        and problem.memory == _NO_MEMORY
        and problem.reserved_W is None
    )


def _plain(problem: PlanProblem) -> Plan:
    """Every pair on its expert's home rank, as in Megatron-LM; every expert keeps its share."""
    counts_WE = problem.counts_WE
    W, E = counts_WE.shape
    quota_E = quotas.rate_quotas(counts_WE.sum(0), problem.rate)
    quota_WE = probability_WE = None
    if problem.scope == "local":
        if problem.rate == 0:
            quota_WE = counts_WE
        elif problem.share_seed is None:
            quota_WE = quotas.apportion(counts_WE, quota_E)
        else:
            quota_WE, probability_WE = quotas.apportion_randomly(
                counts_WE, quota_E, problem.share_seed
            )
    return Plan(
        instance_expert_V=np.arange(E),
        instance_rank_V=home_ranks(W, E),
        forward_WV=counts_WE,
        quota_E=quota_E,
        capacity_V=quota_E,
        quota_WE=quota_WE,
        backward_WV=quota_WE,
        share_probability_WE=probability_WE,
    )
