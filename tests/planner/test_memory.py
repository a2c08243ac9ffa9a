"""The memory model: against sums written out, and against the planner's linear one.

Shape letters: W = ranks, E = experts, D = model dim, F = expert width.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lrmoe.planner import Budgets, PlanProblem, plan
from lrmoe.planner.memory import LayerShape, memory_costs, memory_items
from lrmoe.planner.workloads import routed_counts

QWEN3_30B = LayerShape(hidden=2048, ffn=768, experts=128, top_k=8, ranks=8, tokens=8192, layers=48)


def problem_of(shape, rate="0.2", imbalance=2.0, **changes):
    counts_WE = routed_counts(
        "log_normal", shape.ranks, shape.experts, imbalance, tokens=shape.tokens, top_k=shape.top_k
    )
    values = {
        "placement": "recalibrated", "rate": Fraction(rate), "memory": memory_costs(shape),
        "top_k": shape.top_k, "budgets": Budgets(slots=2),
    }  # fmt: skip
    return PlanProblem(counts_WE=counts_WE, **(values | changes))


@pytest.mark.parametrize("draw", ["backward", "forward"])
@pytest.mark.parametrize("save", ["activations", "inputs"])
def test_the_planner_s_linear_model_is_the_layer_call_subtotal(draw, save):
    shape = LayerShape(
        hidden=64, ffn=32, experts=32, top_k=4, ranks=4, tokens=256, draw=draw, save=save
    )
    for placement in ("fixed", "ultraep", "recalibrated"):
        made = plan(problem_of(shape, placement=placement))
        call_W, bound_W = memory_items(shape, made).layer_call, made.predicted.memory_W
        is_plain_W = np.bincount(made.instance_rank_V[made.is_replica], minlength=4) == 0
        assert np.array_equal(call_W[is_plain_W], bound_W[is_plain_W]), placement
        # How a rank's pairs divide over home experts and replicas is not in a linear model.
        joining = replace(shape, has_replicas=True)
        made = plan(problem_of(joining, placement=placement))
        for of_shape in (shape, joining):
            assert (memory_items(of_shape, made).layer_call <= made.predicted.memory_W).all()


def test_items_by_hand():
    # D 4, F 2, float32: a row 16 bytes, an expert 3 * 4 * 2 * 4 = 96.
    shape = LayerShape(
        hidden=4, ffn=2, experts=2, top_k=1, ranks=2, tokens=5, dtype_bytes=4, layers=3,
        optimizer_bytes=8, other_bytes=1000,
    )  # fmt: skip
    counts_WE = np.array([[4, 1], [2, 3]])
    made = plan(PlanProblem(counts_WE=counts_WE, rate=Fraction(1, 4)))
    items = memory_items(shape, made)
    # 6 and 4 pairs, all in rows of their own; 5 and 3 kept.
    assert items.home_weights_W.tolist() == items.gradients_W.tolist() == [96, 96]
    assert items.dispatch_rows_W.tolist() == [6 * 16, 4 * 16]
    source = 5 * (4 + 4 + 8)  # routing weight, |h|^2, expert id
    saved = [6 * (2 * 2 * 4 + 4) + source, 4 * (2 * 2 * 4 + 4) + source]
    assert items.saved_state_W.tolist() == saved
    assert items.held_W.tolist() == [96 + saved[0], 64 + saved[1]]
    assert items.replica_weights_W.tolist() == items.replica_gradients_W.tolist() == [0, 0]
    # d(gate_up) 16, dx 16, notes 12, <G, y> 4; and dx by row 16.
    assert items.moment_W == ("dgrad", "dgrad")
    assert items.workspace_W.tolist() == [5 * 48, 3 * 48]
    assert items.payload_rows_W.tolist() == [5 * 16, 3 * 16]
    assert items.optimizer_W.tolist() == [24 * 8, 24 * 8]
    assert items.layer_call.tolist() == [192 + 96 + saved[0] + 320, 192 + 64 + saved[1] + 192]
    assert items.whole_step[0] == items.layer_call[0] + 2 * (192 + 96 + saved[0]) + 3 * 192 + 1000

    # With wide experts and many pairs, the moment before the weight gradients is the peak.
    wide = replace(shape, tokens=50, ffn=8)
    many = memory_items(wide, plan(PlanProblem(counts_WE=10 * counts_WE, rate=Fraction(1, 4))))
    # The gathered gradient 16, dh 32, d(gate_up) 64, scaled h 32, notes 12, <G, y> 4.
    assert many.moment_W == ("gated", "gated")
    assert many.workspace_W.tolist() == [45 * 160, 30 * 160]
    assert many.gradients_W.tolist() == many.payload_rows_W.tolist() == [0, 0]

    # With few pairs kept the forward pass is: scaled h 8, outputs 16, and their sums per row 16.
    made = plan(PlanProblem(counts_WE=counts_WE, rate=Fraction(3, 4)))
    items = memory_items(shape, made)
    assert items.moment_W == ("outputs", "outputs")
    assert items.workspace_W.tolist() == [6 * 24, 4 * 24]
    assert items.payload_rows_W.tolist() == [6 * 16, 4 * 16]


def test_replicas_and_earlier_micro_batches_count_at_the_weight_gradients():
    shape = LayerShape(
        hidden=8, ffn=2, experts=2, top_k=1, ranks=2, tokens=40, dtype_bytes=4, has_replicas=True
    )
    counts_WE = np.array([[40, 0], [40, 0]])
    problem = PlanProblem(counts_WE=counts_WE, rate=Fraction(0), placement="recalibrated")
    made = plan(problem)
    assert made.num_replicas == 1
    items = memory_items(shape, made)
    # 3 * 8 * 2 * 4 = 192 bytes an expert; d(gate_up) 16, dx 32, notes 16; dx by row 32, twice where
    # two products are summed.
    assert items.moment_W == ("dgrad", "dgrad")
    assert items.workspace_W.tolist() == [40 * 64, 40 * 64]
    assert items.payload_rows_W.tolist() == [40 * 32, 40 * 64]
    assert items.replica_weights_W.tolist() == items.replica_gradients_W.tolist() == [0, 192]
    assert items.gradients_W.tolist() == [192, 192]
    again = memory_items(replace(shape, has_gradients=True), made)
    assert again.gradients_W.tolist() == [384, 384]


def test_with_replicas_gate_up_outputs_are_joined_from_two_products():
    shape = LayerShape(
        hidden=8, ffn=64, experts=2, top_k=1, ranks=2, tokens=400, dtype_bytes=4,
        has_replicas=True, save="inputs",
    )  # fmt: skip
    counts_WE = np.array([[400, 0], [400, 0]])
    rate = Fraction(9, 10)
    problem = PlanProblem(counts_WE=counts_WE, rate=rate, placement="recalibrated")
    items = memory_items(shape, plan(problem))
    assert items.moment_W == ("h", "gate_up")  # rank 0 has no replica, and joins nothing
    assert items.workspace_W.tolist() == [400 * 4 * 3 * 64, 400 * 4 * (8 + 4 * 64)]


def test_measured_rows_replace_the_bound():
    shape = replace(QWEN3_30B, tokens=64, hidden=16, ffn=8)
    made = plan(problem_of(shape))
    bound = memory_items(shape, made)
    measured = memory_items(shape, made, rows_2W=np.full((2, 8), 10))
    assert (measured.dispatch_rows_W == 10 * 32).all()
    assert (measured.payload_rows_W <= 10 * 32).all()
    assert (measured.layer_call < bound.layer_call).all()


def test_what_shrinks_what():
    """Section 9 of the method: C shrinks one layer's backward; drawn early, the whole step."""
    shape = replace(QWEN3_30B, tokens=512)

    def worst(draw, rate, placement):
        drawn = replace(shape, draw=draw)
        made = plan(problem_of(drawn, rate=rate, placement=placement))
        items = memory_items(drawn, made)
        return items.layer_call.max(), (items.dispatch_rows_W + items.saved_state_W).max()

    exact, half = worst("backward", "0", "recalibrated"), worst("backward", "0.5", "recalibrated")
    assert half[0] < exact[0]
    assert half[1] == exact[1]
    early = worst("forward", "0.5", "recalibrated")
    assert early[1] < 0.6 * exact[1]
    assert worst("backward", "0", "fixed")[1] > 1.3 * exact[1]  # at rank imbalance 2


def test_a_memory_budget_of_the_model_binds():
    shape = replace(QWEN3_30B, tokens=2048)
    home = plan(problem_of(shape, rate="0", placement="fixed"))
    level = plan(problem_of(shape, rate="0"))
    assert level.predicted.memory_W.max() < home.predicted.memory_W.max()
    budget = int(0.95 * level.predicted.memory_W.max())
    problem = problem_of(
        shape, rate="0", quotas="planned", c_max=Fraction(1, 2),
        budgets=Budgets(slots=2, memory_bytes=budget),
    )  # fmt: skip
    made = plan(problem)
    made.check(problem)
    assert made.predicted.memory_W.max() <= budget
    assert not made.keeps_all


def test_home_weights_of_qwen3_are_what_the_method_says():
    made = plan(problem_of(replace(QWEN3_30B, tokens=64)))
    items = memory_items(QWEN3_30B, made)
    assert (48 * items.home_weights_W / 2**30).round(2).tolist() == [6.75] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden=0: allowed is >= 1"),
        ({"save": "all"}, "save='all': allowed are 'activations', 'inputs'"),
        ({"draw": "late"}, "draw='late': allowed are"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(QWEN3_30B, **change)
