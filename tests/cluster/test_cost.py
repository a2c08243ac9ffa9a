"""The cost model against a slow second version, and against tokens drawn one by one."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lrmoe.cluster.cost import Rows, backward_pairs, layer_times, planner_costs
from lrmoe.cluster.hardware import Hardware
from lrmoe.planner import Budgets, PlanProblem, plan
from lrmoe.planner.memory import LayerShape
from lrmoe.planner.workloads import routed_counts

GPU = Hardware(
    name="test", clock="gpu", memory_bytes=1e9, peak_flops=1e12, forward_flops=3e11,
    backward_flops=2e11, weight_bytes_per_s=5e9, group_s=3e-6, row_bytes_per_s=7e9, pair_s=2e-9,
    select_s=4e-9, intra_bytes_per_s=2e9, inter_bytes_per_s=3e8, collective_s=1e-5,
)  # fmt: skip
SHAPE = LayerShape(hidden=32, ffn=16, experts=16, top_k=2, ranks=4, tokens=200)
NODE = 2


def problem_of(placement="recalibrated", rate="0.3", **changes):
    counts_WE = routed_counts("clustered", 4, 16, 2.0, tokens=200, top_k=2)
    values = {
        "rate": Fraction(rate), "placement": placement, "top_k": 2, "ranks_per_node": NODE,
        "budgets": Budgets(slots=3) if placement != "fixed" else Budgets(),
        "past_counts_SWE": counts_WE[None],
    }  # fmt: skip
    return PlanProblem(counts_WE=counts_WE, **(values | changes))


def known_rows(made, rng):
    """Some rows and pairs between ranks that fit the plan."""
    W = SHAPE.ranks
    rows, pairs = np.zeros((2, W, W), int), np.zeros((2, W, W), int)
    for b, pairs_WV in enumerate((made.forward_WV, made.backward_WV)):
        for s in range(W):
            for v, r in enumerate(made.instance_rank_V):
                pairs[b, s, r] += pairs_WV[s, v]
        rows[b] = np.minimum(rng.integers(1, 150, (W, W)), pairs[b])
    return rows, pairs


def slow_times(hardware, made, rows, pairs, score_bytes, saves_inputs, selects):
    """Seconds of every rank and part, with loops over ranks and instances."""
    W, E, size = SHAPE.ranks, SHAPE.experts, SHAPE.expert_bytes
    kept_V = made.backward_V if made.backward_V is not None else made.quota_E
    result = []
    for b, pairs_V in enumerate((made.forward_WV.sum(0), kept_V)):
        parts = {n: [0.0] * W for n in ("local", "rows_in", "weights", "home", "replicas",
                                        "rows_out", "gradients")}  # fmt: skip
        sent = {d: np.zeros((2, W)) for d in ("in", "out", "weights", "gradients")}
        received = {d: np.zeros((2, W)) for d in sent}
        copies = np.zeros(W)
        for s in range(W):
            for r in range(W):
                if s == r:
                    continue
                c = int(s // NODE != r // NODE)
                there = 12 + score_bytes if b else 8
                bytes_in = rows[b, s, r] * SHAPE.row_bytes + there * pairs[b, s, r]
                bytes_out = rows[b, s, r] * SHAPE.row_bytes + 4 * pairs[b, s, r]
                sent["in"][c, s] += bytes_in
                received["in"][c, r] += bytes_in
                sent["out"][c, r] += bytes_out
                received["out"][c, s] += bytes_out
        for v, (e, r) in enumerate(zip(made.instance_expert_V, made.instance_rank_V, strict=True)):
            home = e * W // E
            if home != r and (made.is_sent_V[v] if b == 0 else kept_V[v] > 0):
                c = int(home // NODE != r // NODE)
                for name, source, target in (("weights", home, r), ("gradients", r, home)):
                    if name == "weights" or b:
                        sent[name][c, source] += size
                        received[name][c, target] += size
                copies[home] += 2 * size / hardware.row_bytes_per_s
                copies[r] += 2 * size / hardware.row_bytes_per_s
            if pairs_V[v] == 0:
                continue
            flops = (6, 12 + 4 * saves_inputs)[b] * SHAPE.hidden * SHAPE.ffn * pairs_V[v]
            rate = (hardware.forward_flops, hardware.backward_flops)[b]
            seconds = hardware.group_s + (1 + b) * size / hardware.weight_bytes_per_s
            seconds += flops / rate + hardware.pair_s * pairs_V[v]
            parts["home" if home == r else "replicas"][r] += seconds
        for r in range(W):
            moved = 3 * rows[b, r].sum() + 2 * rows[b, :, r].sum() + SHAPE.tokens
            parts["local"][r] = moved * SHAPE.row_bytes / hardware.row_bytes_per_s
            if b and selects:
                parts["local"][r] += SHAPE.tokens * SHAPE.row_bytes / hardware.row_bytes_per_s
                parts["local"][r] += SHAPE.tokens * SHAPE.top_k * hardware.select_s
            per_byte = (1 / hardware.intra_bytes_per_s, 1 / hardware.inter_bytes_per_s)
            for part, name in (("rows_in", "in"), ("rows_out", "out"), ("weights", "weights"),
                               ("gradients", "gradients")):  # fmt: skip
                of_class = [
                    (sent[name][c, r] + received[name][c, r]) * per_byte[c]
                    if hardware.clock == "cpu"
                    else max(sent[name][c, r], received[name][c, r]) * per_byte[c]
                    for c in range(2)
                ]
                parts[part][r] = sum(of_class) if hardware.clock == "cpu" else max(of_class)
            if copies.any():
                parts["weights"][r] += copies[r]
                parts["gradients"][r] += copies[r] * b
        collectives = 5 + (copies.any() * (3 + b))
        result.append((parts, collectives * hardware.collective_s))
    return result


def slow_total(parts, fixed, clock):
    W = SHAPE.ranks
    if clock == "cpu":
        return fixed + max(sum(of_W[r] for of_W in parts.values()) for r in range(W))
    gemm = max(max(parts["home"][r], parts["weights"][r]) + parts["replicas"][r] for r in range(W))
    stages = sum(max(parts[name]) for name in ("local", "rows_in", "rows_out", "gradients"))
    return fixed + stages + gemm


@pytest.mark.parametrize("clock", ["gpu", "cpu"])
@pytest.mark.parametrize("placement", ["fixed", "recalibrated", "symi", "fastermoe"])
@pytest.mark.parametrize("variant", ["plain", "global", "stratified", "inputs"])
def test_times_are_those_of_a_slow_second_version(clock, placement, variant):
    hardware = replace(GPU, clock=clock)
    made = plan(problem_of(placement, costs=planner_costs(hardware, SHAPE)))
    rows, pairs = known_rows(made, np.random.default_rng(0))
    shape = replace(SHAPE, save="inputs" if variant == "inputs" else "activations")
    times = layer_times(
        hardware, shape, made, Rows.known(rows, pairs, NODE), np.full(4, 200), node_size=NODE,
        selects=variant != "inputs", is_global=variant in ("global", "stratified"),
        is_stratified=variant == "stratified",
    )  # fmt: skip
    slow = slow_times(
        hardware, made, rows, pairs, {"global": 8, "stratified": 16}.get(variant, 0),
        variant == "inputs", variant != "inputs",
    )  # fmt: skip
    if placement not in ("fixed",):
        assert made.num_replicas > 0
    for of_pass, (parts, fixed) in zip(times, slow, strict=True):
        for name, of_W in parts.items():
            assert getattr(of_pass, f"{name}_W") == pytest.approx(of_W), name
        assert of_pass.fixed == pytest.approx(fixed)
        assert of_pass.total == pytest.approx(slow_total(parts, fixed, clock))
        assert sum(of_pass.parts().values()) == pytest.approx(of_pass.total)
        assert of_pass.busy() == pytest.approx(fixed + np.sum(list(parts.values()), axis=0))


def test_many_small_groups_are_slower_than_few_large_ones():
    def gemm(counts_E):
        problem = PlanProblem(counts_WE=np.array([counts_E]), rate=Fraction(0))
        made, shape = plan(problem), replace(SHAPE, ranks=1)
        rows = Rows.expected(made, np.array([80]), 2, 1)
        forward, backward = layer_times(
            GPU, shape, made, rows, np.array([80]), node_size=1, selects=False, is_global=False,
            is_stratified=False,
        )  # fmt: skip
        return forward.home_W[0], backward.home_W[0]

    few, many = [80, 80] + [0] * 14, [10] * 16
    for less, more, passes in zip(gemm(few), gemm(many), (1, 2), strict=True):
        per_group = GPU.group_s + passes * SHAPE.expert_bytes / GPU.weight_bytes_per_s
        assert more - less == pytest.approx(14 * per_group)


def sampled_tokens(pi_E, K, T, rng):
    """Experts of every token: K different ones, drawn one after the other by weight."""
    weight_E = -np.log1p(-np.minimum(pi_E, 1 - 1e-9))
    keys_TE = rng.exponential(size=(T, len(pi_E))) / weight_E
    return np.argsort(keys_TE, axis=1)[:, :K]


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_expected_rows_are_those_of_drawn_tokens(skew, rate):
    W, E, K, T = 4, 32, 4, 4000
    rng = np.random.default_rng(int(10 * skew))
    weight_E = np.exp(skew * rng.standard_normal(E))
    pi_E = np.minimum(1.0, weight_E / weight_E.sum() * K)
    ids_WTK = np.stack([sampled_tokens(pi_E, K, T, rng) for _ in range(W)])
    counts_WE = np.stack([np.bincount(ids.ravel(), minlength=E) for ids in ids_WTK])
    made = plan(PlanProblem(counts_WE=counts_WE, rate=Fraction(str(rate)), top_k=K))
    rows = Rows.expected(made, np.full(W, T), K, W)
    for b in range(2):
        drawn_W = np.zeros(W)
        for s in range(W):
            kept = np.ones((T, K), bool)
            if b and rate:
                for e in range(E):
                    mine = np.flatnonzero(ids_WTK[s].ravel() == e)
                    drop = rng.permutation(mine)[made.quota_WE[s, e] :]
                    kept.ravel()[drop] = False
            for r in range(W):
                here = (ids_WTK[s] // (E // W) == r) & kept
                drawn_W[r] += here.any(1).sum()
        assert rows.received_2W[b] == pytest.approx(drawn_W, rel=0.04)


def test_expected_rows_at_the_edges():
    # All pairs of a token on one rank; a source without tokens; one pair each.
    counts_WE = np.array([[10, 10, 0, 0], [0, 0, 0, 0]])
    made = plan(PlanProblem(counts_WE=counts_WE, rate=Fraction(0), top_k=2))
    rows = Rows.expected(made, np.array([10, 0]), 2, 2)
    assert rows.received_2W.tolist() == [[10, 0], [10, 0]]
    assert rows.source_2W.tolist() == [[10, 0], [10, 0]]
    assert not rows.sent_22CW.any()
    single = plan(PlanProblem(counts_WE=np.array([[6, 0, 4, 0]] * 2), rate=Fraction(0), top_k=1))
    rows = Rows.expected(single, np.array([10, 10]), 1, 2)
    assert rows.received_2W[0].tolist() == [12, 8]
    assert rows.sent_22CW[0, 0, 0].tolist() == [4, 6]
    assert rows.arrived_22CW[1, 0, 0].tolist() == [6, 4]


def test_link_classes_and_bounds():
    made = plan(problem_of())
    rows = Rows.expected(made, np.full(4, 200), 2, NODE)
    inside, between = rows.sent_22CW[0, 0].sum(1)
    assert inside > 0 < between
    assert rows.sent_22CW[0, 0].sum() == pytest.approx(rows.arrived_22CW[0, 0].sum())
    pairs_W = [made.forward_WV[:, made.instance_rank_V == r].sum() for r in range(4)]
    assert (rows.received_2W[0] <= pairs_W).all()
    assert (rows.received_2W[1] <= rows.received_2W[0] + 1e-9).all()
    assert (backward_pairs(made) <= made.forward_WV.sum(0)).all()
    flat = Rows.expected(made, np.full(4, 200), 2, 4)
    assert flat.sent_22CW[:, :, 1].sum() == 0
    assert flat.sent_22CW.sum() == pytest.approx(rows.sent_22CW.sum())


def test_the_planner_weighs_moves_by_the_same_coefficients():
    costs = planner_costs(GPU, SHAPE)
    assert costs.forward_pair == pytest.approx(6 * 32 * 16 / 3e11 + 2e-9)
    assert costs.backward_pair == pytest.approx(12 * 32 * 16 / 2e11 + 2e-9)
    assert (costs.intra_byte, costs.inter_byte) == (1 / 2e9, 1 / 3e8)
    assert (costs.row_bytes, costs.expert_bytes) == (64, 3072)
