"""Every plan of every policy is legal, or the error says why there is none.

Shape letters: W = ranks, E = experts, L = slots, S = steps, Q = quantiles.
"""

from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrmoe.planner import PLACEMENTS, Budgets, Costs, InfeasiblePlan, MemoryCosts, PlanProblem, plan
from lrmoe.planner.problem import Plan, Prediction

RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
RATES = ("0", "0.2", "0.5", "0.9")
COSTS = (
    Costs(),
    Costs(forward_pair=0.0),
    Costs(intra_byte=1e-3, row_bytes=4, expert_bytes=3000, gradient_bytes=6000),
    Costs(intra_byte=1e-4, inter_byte=1e-2, row_bytes=8, expert_bytes=2000, gradient_bytes=2000),
)
MEMORY = MemoryCosts(
    fixed=50_000, replica=9_000, forward_row=64, forward_pair=40, kept_row=128, kept_pair=200
)
MOMENTS = (
    MemoryCosts(fixed=50_000, replica=4_500, forward_row=128, forward_pair=160),
    MemoryCosts(fixed=60_000, replica=4_500, forward_pair=40, kept_pair=210),
    MemoryCosts(fixed=60_000, replica=13_500, staged=3, forward_pair=40),
    MEMORY,
)


def draw_counts(rng, W, E, kind, scale):
    """Pairs of one kind of skew, some of them zero."""
    if kind == "nothing":
        return np.zeros((W, E), np.int64)
    weight_E = rng.lognormal(0, {"even": 0.1, "skewed": 1.0, "extreme": 3.0}.get(kind, 1.0), E)
    if kind == "one expert":
        weight_E = np.eye(E)[rng.integers(E)]
    if kind == "one rank":
        per = max(E // W, 1)
        weight_E *= np.arange(E) // per == rng.integers(max(E // per, 1))
    source_W = rng.lognormal(0, 1.0, W) if kind == "ragged" else np.ones(W)
    if kind == "one source":
        source_W = np.eye(W)[rng.integers(W)]
    mean_WE = np.outer(source_W / source_W.sum(), weight_E / weight_E.sum()) * scale * W
    counts_WE = rng.poisson(mean_WE)
    if kind == "sparse":
        counts_WE *= rng.random((W, E)) < 0.1
    return counts_WE.astype(np.int64)


KINDS = (
    "even", "skewed", "extreme", "one expert", "one rank", "one source", "ragged", "sparse",
    "nothing",
)  # fmt: skip


@st.composite
def problems(draw):
    W = draw(st.sampled_from(RANKS))
    if draw(st.integers(0, 9)) == 0 and W >= 16:
        E = W // 2  # more ranks than experts
    else:
        E = W * draw(st.integers(-(-8 // W), max(512 // W, 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([3, 100, 5000, 40_000]))
    counts_WE = draw_counts(rng, W, E, draw(st.sampled_from(KINDS)), scale)
    divisors = [n for n in (1, 2, 4, 8) if W % n == 0]
    slots = draw(st.sampled_from([None, 0, 1, 2, 2, 5]))
    problem = PlanProblem(
        counts_WE=counts_WE,
        rate=Fraction(draw(st.sampled_from(RATES))),
        placement=draw(st.sampled_from(("recalibrated",) * 8 + PLACEMENTS)),
        quotas=draw(st.sampled_from(["rate", "planned", "makespan"])),
        scope=draw(st.sampled_from(["local", "global"])),
        share_seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        c_max=draw(st.sampled_from([None, None, Fraction(1, 2), Fraction(95, 100)])),
        budgets=Budgets(slots=slots),
        costs=draw(st.sampled_from(COSTS)),
        ranks_per_node=draw(st.sampled_from([None, None, *divisors])),
        top_k=draw(st.sampled_from([1, 2, 8])),
    )
    if draw(st.booleans()):
        past = [draw_counts(rng, W, E, "skewed", scale) for _ in range(draw(st.integers(1, 3)))]
        problem = replace(problem, past_counts_SWE=np.stack(past))
    if draw(st.booleans()):
        problem = replace(problem, held_WL=held_slots(rng, W, E, draw(st.integers(1, 3))))
    if draw(st.integers(0, 2)) == 0:
        problem = replace(problem, score_quantiles_EQ=np.sort(rng.lognormal(0, 1, (E, 7)), 1))
    if draw(st.integers(0, 2)) == 0:
        problem = replace(problem, memory=draw(st.sampled_from([MEMORY, MOMENTS])))
        if draw(st.booleans()):
            problem = replace(problem, reserved_W=rng.integers(0, 30_000, W))
        problem = replace(problem, budgets=some_budgets(draw, problem))
    return problem


def held_slots(rng, W, E, L):
    """Slots with some experts of other ranks in them, never one twice."""
    held_WL = np.full((W, L), -1)
    for r in range(W):
        others = np.flatnonzero(np.arange(E) * W // E != r)
        chosen = rng.permutation(others)[:L]
        held_WL[r, : len(chosen)] = np.where(rng.random(len(chosen)) < 0.7, chosen, -1)
    return held_WL


def some_budgets(draw, problem):
    """Budgets around what home placement needs, so that some bind and some cannot be kept to."""
    home = plan(replace(problem, placement="fixed", budgets=Budgets()))
    assert home.predicted is not None
    used = {
        "memory_bytes": int(home.predicted.memory_W.max()),
        "forward_pairs": int(home.predicted.forward_pairs_W.max()),
        "intra_bytes": int(home.predicted.sent_CW[0].max()),
        "inter_bytes": int(home.predicted.sent_CW[1].max()),
        "staging_bytes": 4 * problem.costs.expert_bytes,
    }
    chosen = draw(st.lists(st.sampled_from(sorted(used)), min_size=1, max_size=2, unique=True))
    factors = st.sampled_from([0.4, 0.6, 0.8, 0.95, 1.0, 1.5])
    return replace(problem.budgets, **{name: int(used[name] * draw(factors)) for name in chosen})


def check(problem):
    before = problem.counts_WE.copy()
    made = plan_or_error(problem)
    if isinstance(made, InfeasiblePlan):
        assert made.kind in ("overload", "spatial")
        assert str(made).startswith(made.kind)
        assert "would fit with" in str(made)
        if problem.placement == "recalibrated":  # home placement is among what it tries
            assert isinstance(plan_or_error(replace(problem, placement="fixed")), InfeasiblePlan)
        return
    assert np.array_equal(problem.counts_WE, before)
    made.check(problem)
    assert_same(made, plan(replace(problem, counts_WE=before)))
    if problem.placement == "recalibrated":
        assert_not_worse_than_home(problem, made)


def plan_or_error(problem):
    try:
        return plan(problem)
    except InfeasiblePlan as error:
        return error


def assert_same(one, other):
    for f in fields(Plan):
        a, b = getattr(one, f.name), getattr(other, f.name)
        if isinstance(a, Prediction):
            for g in fields(Prediction):
                assert np.array_equal(getattr(a, g.name), getattr(b, g.name)), g.name
        else:
            assert np.array_equal(a, b), f.name


def assert_not_worse_than_home(problem, made):
    home = plan_or_error(replace(problem, placement="fixed"))
    if isinstance(home, InfeasiblePlan):
        return
    if home.predicted is None:
        home = plan(replace(problem, placement="fixed", memory=MEMORY))
    kept, at_home = made.quota_E.sum(), home.quota_E.sum()
    assert kept >= at_home or problem.quotas != "planned"
    if kept == at_home:
        assert made.predicted.makespan <= home.predicted.makespan + 1e-9


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_plans_are_legal_and_never_worse_than_home(problem):
    check(problem)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_ten_thousand_plans_are_legal_and_never_worse_than_home(problem):
    check(problem)
