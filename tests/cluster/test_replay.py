"""Replays of counts: what they report follows from the plans, and nothing is left to chance."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lrmoe.cluster import command
from lrmoe.cluster.hardware import load_hardware
from lrmoe.cluster.models import QWEN3_30B_A3B
from lrmoe.cluster.replay import (
    BY_HISTORY,
    Cluster,
    LayerCalls,
    arm,
    fitting_share,
    generated,
    replay,
)
from lrmoe.cluster.trace import Calls, Trace, TraceInfo, write_trace
from lrmoe.cluster.workloads import Workload, layer_counts
from lrmoe.planner import PLACEMENTS, PlanProblem, plan
from lrmoe.planner.memory import memory_items
from lrmoe.planner.quotas import rate_quotas
from lrmoe.report import imbalance

MODEL = replace(QWEN3_30B_A3B, name="small", experts=32, top_k=4, hidden=256, ffn=64)
CLUSTER = Cluster(model=MODEL, hardware=load_hardware("h100"), ranks=4)
KEYS = {
    "simulated", "model", "policy", "rate", "selection", "ranks", "imbalance_home",
    "imbalance_fwd", "imbalance_bwd", "fwd_ms", "bwd_ms", "comm_ms", "plan_ms", "makespan_ms",
    "replicas", "memory_subtotal_bytes", "effective_throughput",
}  # fmt: skip
MEASURED = ("plan_ms", "plan_host_ms", "makespan_ms")


def calls_of(counts_CWE):
    C = len(counts_CWE)
    return LayerCalls(
        layer=0, group=0, step_C=np.arange(C), micro_batch_C=np.zeros(C, int), counts_CWE=counts_CWE
    )


def simulate(arms, workload=None, steps=3, **changes):
    cluster = replace(CLUSTER, **changes)
    calls = generated(workload or Workload(), cluster, tokens=512, layers=2, steps=steps)
    return replay(cluster, arms, calls)


def test_every_policy_gives_a_row_with_the_agreed_keys():
    arms = [arm(policy, rate) for policy in PLACEMENTS for rate in (0.0, 0.2)]
    rows = simulate(arms)
    assert [(row["policy"], row["rate"]) for row in rows] == [
        (config.placement, config.rate) for config in arms
    ]
    for row in rows:
        assert set(row) >= KEYS
        assert row["simulated"] is True
        assert row["calls"] == 6
        assert row["infeasible_calls"] == 0
        for phase in ("fwd", "bwd"):
            parts = sum(row[f"{phase}_{part}_ms"] for part in command.PARTS)
            assert parts == pytest.approx(row[f"{phase}_ms"])
            assert len(row[f"{phase}_rank_ms"]) == 4
        assert row["makespan_ms"] == pytest.approx(row["fwd_ms"] + row["bwd_ms"] + row["plan_ms"])
        assert (row["plan_ms"] == 0) == (row["policy"] in BY_HISTORY)
        kept = 1.0 if row["rate"] == 0 else 0.8
        assert row["backward_fraction"] == pytest.approx(kept, abs=0.02)
        assert row["imbalance_home"] == pytest.approx(1.9, rel=0.05)


def test_rows_do_not_change_from_run_to_run():
    arms = [arm("recalibrated", 0.2), arm("symi", 0.0), arm("ultraep", 0.0)]
    first, second = (
        [{k: v for k, v in row.items() if k not in MEASURED} for row in simulate(arms)]
        for _ in range(2)
    )
    assert first == second


def test_home_placement_by_hand():
    counts_CWE = layer_counts(Workload(), 4, 32, tokens=512, top_k=4, layer=0, steps=2)
    (row,) = replay(CLUSTER, [arm("fixed", 0.5)], [calls_of(counts_CWE)])
    expected, kept = [], 0
    for counts_WE in counts_CWE:
        expected.append(imbalance(counts_WE.sum(0).reshape(4, 8).sum(1)))
        kept += rate_quotas(counts_WE.sum(0), Fraction(1, 2)).sum()
    assert row["imbalance_home"] == row["imbalance_fwd"] == pytest.approx(np.mean(expected))
    assert row["backward_fraction"] == pytest.approx(kept / counts_CWE.sum())
    assert row["replicas"] == row["bwd_gradients_ms"] == row["fwd_weights_ms"] == 0


def test_levelling_and_dropping_both_shorten_the_backward_pass():
    fixed, half, level, drop = simulate(
        [arm(policy, rate) for policy in ("fixed", "recalibrated") for rate in (0.0, 0.5)],
        Workload(imbalance=2.5),
    )
    assert level["imbalance_bwd"] < 0.6 * fixed["imbalance_bwd"]
    assert drop["bwd_gemm_ms"] < 0.9 * level["bwd_gemm_ms"] < 0.7 * fixed["bwd_gemm_ms"]
    assert half["fwd_ms"] == fixed["fwd_ms"]  # the forward pass is complete at every rate
    assert half["bwd_ms"] < fixed["bwd_ms"]
    assert half["memory_subtotal_bytes"] < fixed["memory_subtotal_bytes"]
    assert level["memory_subtotal_bytes"] < fixed["memory_subtotal_bytes"]


def test_policies_by_history_see_the_call_before():
    """A hot rank that moves in every step is where history is always wrong."""
    steady = Workload(kind="W2", imbalance=1.8)
    arms = [arm("symi", 0.0), arm("ultraep", 0.0)]
    symi, ultraep = simulate(arms, steady, steps=8)
    symi_moving, ultraep_moving = simulate(arms, replace(steady, kind="W6"), steps=8)
    assert symi_moving["imbalance_fwd"] > 1.1 * symi["imbalance_fwd"]
    assert ultraep_moving["imbalance_fwd"] == pytest.approx(ultraep["imbalance_fwd"], rel=0.1)


def test_the_fitting_share_is_the_largest_that_fits():
    counts_WE = layer_counts(Workload(), 4, 32, tokens=512, top_k=4, layer=0, steps=1)[0]
    made = plan(PlanProblem(counts_WE=counts_WE, rate=Fraction(0), top_k=4))
    items = memory_items(MODEL.layer_shape(4, 512), made)
    for layers in (1, 3):
        needed = ((layers - 1) * items.held_W + items.token_buffers).max()
        assert fitting_share(int(needed), items, layers) == 1.0
        assert fitting_share(int(needed / 2), items, layers) == pytest.approx(0.5, rel=1e-3)
        assert fitting_share(-5, items, layers) == 0.0


def test_a_smaller_budget_fits_a_smaller_share():
    state = replace(CLUSTER).resolved_state_bytes
    assert state == 4 * (MODEL.expert_parameters + MODEL.other_parameters) // 4
    shares = [
        simulate([arm("fixed", 0.0)], memory_bytes=state + room)[0]["effective_throughput"]
        for room in (1 << 30, 4 << 20, 2 << 20, 0)
    ]
    assert shares[0] == 1.0 > shares[1] > shares[2] > shares[3] == 0.0
    assert shares[1] == pytest.approx(2 * shares[2], rel=0.01)


def test_a_budget_no_plan_keeps_to_is_counted_not_hidden():
    (row,) = simulate([replace(arm("symi", 0.0), budget=replace(arm("symi", 0.0).budget,
                                                                forward_pairs=100))])  # fmt: skip
    assert row["infeasible_calls"] == row["calls"] == 6


def test_the_command_line_writes_table_json_and_plot(tmp_path, capsys):
    target, image = tmp_path / "rows.json", tmp_path / "bars.png"
    arguments = [
        "--layers", "1", "--steps", "2", "--tokens", "512", "--workloads", "clustered,W6",
        "--policies", "fixed,recalibrated", "--rates", "0,0.5", "--seeds", "0,1",
    ]  # fmt: skip
    assert command.main([*arguments, "--json", str(target), "--plot", str(image)]) == 0
    assert "simulated" in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert written["command"] == "replay"
    assert len(written["rows"]) == 2 * 2 * 3
    assert KEYS | {"workload", "seed"} <= set(written["rows"][0])
    assert image.stat().st_size > 1000


def test_a_trace_of_counts_can_be_replayed(tmp_path, capsys):
    counts_CWE = layer_counts(Workload(), 4, 32, tokens=512, top_k=4, layer=0, steps=2)
    calls = Calls(
        layer=0, group=0, step_C=np.arange(2), micro_batch_C=np.zeros(2, int),
        counts_CWE=counts_CWE, pairs_CW=None,
    )  # fmt: skip
    info = TraceInfo(ranks=4, ep_size=4, experts=32, top_k=4)
    write_trace(tmp_path / "t", Trace(info=info, calls=[calls]))
    settings = command.ReplaySettings(
        trace=str(tmp_path / "t"), policies=("fixed",), model="qwen3-30b-a3b"
    )
    (row,) = command.run(settings)
    model = replace(QWEN3_30B_A3B, experts=32, top_k=4)
    (direct,) = replay(replace(CLUSTER, model=model), [arm("fixed", 0.0)], [calls_of(counts_CWE)])
    assert row["ranks"] == 4
    for name in ("fwd_ms", "bwd_ms", "imbalance_home", "memory_subtotal_bytes"):
        assert row[name] == direct[name]


def test_mistakes_are_named():
    for changes, message in (
        ({"workloads": ("W9",)}, "workloads='W9': allowed are"),
        ({"policies": ("best",)}, "policies='best': allowed are 'fixed'"),
        ({"steps": 0}, "steps=0: allowed is >= 1"),
        ({"memory": "much"}, "memory='much': allowed are sizes such as 80GiB"),
        ({"rates": (1.5,)}, "rate=1.5: allowed is 0 <= rate < 1"),
    ):
        with pytest.raises(ValueError, match=message):
            command.ReplaySettings(**changes)
    with pytest.raises(ValueError, match="'polices' is not a setting; the nearest valid one is"):
        command.main(["--polices", "fixed"])
    with pytest.raises(ValueError, match="ranks_per_node=8: must divide 12"):
        replace(CLUSTER, ranks=12)


def test_sizes_are_read_with_their_units():
    for text, size in (("80GiB", 80 << 30), ("141GB", 141 * 10**9), ("5", 5), ("1.5 kib", 1536)):
        assert command.parse_bytes("memory", text) == size
