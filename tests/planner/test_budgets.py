"""Budgets that bind, and the errors where they cannot be kept to.

Shape letters: W = ranks, E = experts.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lrmoe.planner import Budgets, Costs, InfeasiblePlan, MemoryCosts, PlanProblem, plan
from lrmoe.planner.workloads import routed_counts

TWO_RANKS = np.array([[40, 20, 10, 5], [40, 20, 10, 5]])  # 120 pairs on rank 0, 30 on rank 1
PAIRS = MemoryCosts(fixed=100, forward_pair=1, kept_pair=3)


def problem_of(counts_WE=TWO_RANKS, **changes):
    values = {"placement": "recalibrated", "rate": Fraction(0), "quotas": "planned"}
    return PlanProblem(counts_WE=counts_WE, **(values | changes))


def infeasible(problem):
    with pytest.raises(InfeasiblePlan) as raised:
        plan(problem)
    return raised.value


def test_more_pairs_than_all_ranks_may_compute_is_an_overload():
    error = infeasible(problem_of(budgets=Budgets(forward_pairs=60)))
    assert error.kind == "overload"
    for part in ("rank", "forward_pairs=60", "even spread perfectly over 2 ranks it would be 75"):
        assert part.lower() in str(error).lower()
    assert "fit with forward_pairs >= 75" in str(error)


def test_pairs_that_would_fit_but_cannot_move_are_spatially_infeasible():
    error = infeasible(problem_of(budgets=Budgets(forward_pairs=80, slots=0)))
    assert error.kind == "spatial"
    assert "rank 0 needs 120 pairs, 40 more than forward_pairs=80" in str(error)
    assert "its heaviest expert, 0, has 80 pairs" in str(error)
    assert "slots=0 per rank" in str(error)
    assert "fit with forward_pairs >= 120 or more slots" in str(error)
    made = plan(problem_of(budgets=Budgets(forward_pairs=80, slots=1)))  # what the error says works
    assert made.predicted.forward_pairs_W.max() <= 80
    plan(problem_of(budgets=Budgets(forward_pairs=120, slots=0)))


def test_too_little_memory_for_any_spread_is_an_overload():
    # 75 pairs on each rank, all kept: 100 + 75 * 4 = 400 bytes; with 15 of 150 dropped 377.5.
    problem = problem_of(memory=PAIRS, budgets=Budgets(memory_bytes=350), c_max=Fraction(1, 10))
    error = infeasible(problem)
    assert error.kind == "overload"
    assert "memory_bytes=350" in str(error)
    assert "memory_bytes >= 379" in str(error)  # 68 of a rank's 75 pairs are kept
    assert "15 are allowed" in str(error)
    # The number that the error names works, and a little less does not.
    share = Fraction(str(error).split("c_max >= ")[1].split(" ")[0])
    plan(replace(problem, c_max=share)).check(replace(problem, c_max=share))
    assert infeasible(replace(problem, c_max=share - Fraction(1, 50))).kind == "overload"


def test_memory_that_would_be_enough_if_pairs_could_move_is_spatially_infeasible():
    problem = problem_of(
        memory=PAIRS, budgets=Budgets(memory_bytes=420, slots=0), c_max=Fraction(1, 10)
    )
    error = infeasible(problem)
    assert error.kind == "spatial"
    assert "rank 0 drops the most" in str(error)
    made = plan(replace(problem, budgets=Budgets(memory_bytes=420, slots=1)))
    assert made.num_replicas == 1
    assert made.keeps_all
    made = plan(replace(problem, c_max=Fraction(1, 2)))
    assert made.num_replicas == 0
    # 100 + 120 + 3 kept <= 420
    assert made.predicted.memory_W.tolist() == [418, 220]
    assert made.quota_E.sum() == 66 + 30
    assert made.relaxed == ("budgets: 54 more pairs dropped than the quota mode asks for",)


def test_a_policy_that_does_not_plan_for_a_budget_fails_on_it():
    error = infeasible(problem_of(placement="fixed", budgets=Budgets(forward_pairs=100)))
    assert error.kind == "spatial"
    counts_WE = routed_counts("zipf", 8, 32, 2.0, tokens=256)
    error = infeasible(
        problem_of(
            counts_WE, placement="ultraep", budgets=Budgets(slots=2, intra_bytes=10),
            costs=Costs(row_bytes=4, expert_bytes=100),
        )
    )  # fmt: skip
    assert error.kind == "spatial"
    assert "intra_bytes=10" in str(error)


@pytest.mark.parametrize("budget", [360, 340, 320, 300])
def test_planned_quotas_drop_no_more_than_a_memory_budget_needs(budget):
    """With replicas free, both ranks fill up: 2 * 100 + 150 + 3 kept <= 2 * budget."""
    problem = problem_of(
        memory=PAIRS, budgets=Budgets(memory_bytes=budget, slots=2), c_max=Fraction(9, 10)
    )
    made = plan(problem)
    made.check(problem)
    most = (2 * budget - 350) // 3
    assert most - 2 <= made.quota_E.sum() <= most


def test_planned_quotas_keep_everything_where_it_fits():
    made = plan(problem_of(memory=PAIRS, budgets=Budgets(memory_bytes=401), c_max=Fraction(1, 2)))
    assert made.keeps_all
    assert made.relaxed == ()


def test_uniform_rates_are_planned_down_within_c_max():
    problem = problem_of(
        quotas="rate", rate=Fraction(1, 5), memory=PAIRS,
        budgets=Budgets(memory_bytes=330, slots=1), c_max=Fraction(1, 2),
    )  # fmt: skip
    made = plan(problem)
    made.check(problem)
    assert made.quota_E.sum() < 120
    assert "more pairs dropped" in made.relaxed[0]
    assert infeasible(replace(problem, c_max=None)).kind == "overload"


def test_staging_limits_copies_in_and_out():
    counts_WE = routed_counts("log_normal", 8, 64, 4.0, tokens=512)
    costs = Costs(expert_bytes=100, gradient_bytes=200)
    wide = plan(problem_of(counts_WE, costs=costs))
    problem = problem_of(counts_WE, costs=costs, budgets=Budgets(staging_bytes=200))
    tight = plan(problem)
    tight.check(problem)
    assert wide.predicted.staging_W.max() > 200 >= tight.predicted.staging_W.max()
    assert 0 < tight.num_replicas < wide.num_replicas


def test_a_budget_between_nodes_keeps_replicas_inside_them():
    counts_WE = routed_counts("clustered", 8, 64, 2.0, tokens=512)
    costs = Costs(row_bytes=2, expert_bytes=4000)
    common = problem_of(counts_WE, costs=costs, ranks_per_node=4, top_k=8)
    free = plan(common)
    at_home = plan(replace(common, placement="fixed"))
    # Replicas in the node move rows between its ranks, which the bound on rows counts again.
    budget = int(1.1 * at_home.predicted.sent_CW[1].max())
    assert free.predicted.sent_CW[1].max() > budget
    problem = replace(common, budgets=Budgets(inter_bytes=budget))
    made = plan(problem)
    made.check(problem)
    home = made.instance_expert_V * 8 // 64
    assert made.num_replicas > 0
    assert (home // 4 == made.instance_rank_V // 4).all()
    assert made.predicted.makespan < at_home.predicted.makespan


def test_link_budgets_are_met_by_dropping_within_c_max():
    counts_WE = routed_counts("log_normal", 4, 16, 1.3, tokens=256, top_k=4)
    costs = Costs(row_bytes=2)
    common = problem_of(counts_WE, costs=costs, top_k=4, c_max=Fraction(3, 4))
    used = int(plan(common).predicted.sent_CW[0].max())
    problem = replace(common, budgets=Budgets(intra_bytes=int(0.9 * used), slots=0))
    made = plan(problem)
    made.check(problem)
    assert 0.25 < made.quota_E.sum() / counts_WE.sum() < 1
    assert infeasible(replace(problem, c_max=None)).kind == "spatial"


def test_a_memory_budget_makes_no_more_replicas_than_it_has_room_for():
    counts_WE = routed_counts("clustered", 8, 64, 3.0, tokens=512)
    memory = MemoryCosts(fixed=0, replica=1500, forward_pair=1, kept_pair=1)
    mean = counts_WE.sum() // 8
    problem = problem_of(
        counts_WE, memory=memory, budgets=Budgets(memory_bytes=int(2 * 1.15 * mean) + 1500)
    )
    made = plan(problem)
    made.check(problem)
    assert made.num_replicas > 0
    assert made.keeps_all


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placement": "nearest"}, "placement='nearest': allowed are 'fixed'"),
        ({"quotas": "even"}, "quotas='even': allowed are 'rate', 'planned', 'makespan'"),
        ({"c_max": Fraction(1)}, "c_max=1: allowed is 0 <= c_max < 1"),
        ({"min_kept": Fraction(2)}, "min_kept=2: allowed is"),
        ({"slack": Fraction(-1)}, "slack=-1: allowed is >= 0"),
        ({"top_k": 0}, "top_k=0: allowed is >= 1"),
        ({"ranks_per_node": 3}, "ranks_per_node=3: must divide 2 ranks"),
        ({"past_counts_SWE": np.zeros((1, 2, 3))}, "past_counts_SWE has shape"),
        ({"held_WL": np.zeros((3, 1))}, "held_WL has 3 rows, expected 2"),
        ({"score_quantiles_EQ": np.zeros((3, 1))}, "score_quantiles_EQ has 3 rows, expected 4"),
        ({"score_quantiles_EQ": np.full((4, 1), np.nan)}, "score_quantiles_EQ: must be finite"),
        ({"memory": ()}, "memory=\\(\\): needs at least one moment"),
        ({"reserved_W": np.zeros(3, int)}, "reserved_W has shape"),
        ({"placement": "ultraep", "options": {"alpha": 1.0}}, "'alpha' is not a constant of"),
    ],
)
def test_bad_problems_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan(problem_of(**change))


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="slots=-1: allowed are None and integers >= 0"):
        Budgets(slots=-1)
