"""The check of one GPU, end to end on the CPU with tiny shapes; and what it counts.

Shape letters: P = rows, F = expert width, W = ranks, E = experts.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import (
    calibration,
    ep8,
    expert_work,
    kernels,
    layer,
    memory,
    parity,
    part,
    problems,
    syncs,
    table,
    timing,
    training,
)
from lrmoe.kernels.gated import gated_backward
from lrmoe.kernels.rows import sum_rows
from lrmoe.planner import Costs

CHECK = Path(part.__file__).parent / "check.sh"
PARTS = (parity, syncs, kernels, layer, memory, ep8, calibration, training)
ABOUT = {"kind", "device", "small", "python", "torch", "triton", "transformers", "date", "commit"}
TIMES = {"fwd_ms", "bwd_ms", "total_ms", "total_p20_ms", "total_p80_ms"}
LAYER = {"impl", "placement", "selection", "rate", "backward_fraction", "workload", "dtype"}
KEYS = {
    "limit": {"name"},
    "kernel": {"name", "model", "tokens", "hidden", "ffn", "ms", "bytes", "flops", "of_limit"},
    "layer": {*LAYER, *TIMES, "draw", "ratio_to_hf", "bwd_ratio_to_c0", "gradient_error"},
    "ep8": {*LAYER, *TIMES, "ranks", "communication", "imbalance_home", "imbalance_fwd",
            "imbalance_bwd", "replicas", "bwd_ratio_to_c0", "ratio_to_fixed"},
    "expert_work": {"hidden", "ffn", "phase", "pairs", "groups", "rows", "ms"},
    "memory": {"impl", "rate", "draw", "save", "tensor_bytes", "model_bytes", "allocator_bytes"},
    "syncs": {"draw", "rows", "fwd_syncs", "bwd_syncs", "fwd_allowed", "bwd_allowed"},
    "parity": {"impl", "rate", "dtype", "gradient_error", "worst_tensor"},
    "training": {"rate", "steps", "losses", "last_loss_cpu", "largest_difference"},
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The rows of every part, and the file they are in."""
    path = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    for module in PARTS:
        assert module.main(["--device", "cpu", "--small", "--out", str(path)]) == 0, module
    return [json.loads(line) for line in path.read_text().splitlines()], path


def of_kind(rows, kind, **having):
    return [
        row
        for row in rows
        if row["kind"] == kind and all(row.get(k) == v for k, v in having.items())
    ]


@pytest.mark.slow
def test_every_part_writes_its_rows(outcome):
    rows, _ = outcome
    assert {row["kind"] for row in rows} == set(KEYS)
    for row in rows:
        assert set(row) >= ABOUT
        assert (row["device"], row["small"]) == ("cpu", True)
        if "missing" not in row:
            assert set(row) >= KEYS[row["kind"]], row["kind"]


@pytest.mark.slow
def test_the_layer_stands_beside_its_peers_at_every_setting(outcome):
    rows = of_kind(outcome[0], "layer", model="qwen3-30b-a3b", workload="W1")
    timed = {(row["impl"], row["rate"], row["draw"]) for row in rows if "missing" not in row}
    ours = {("lrmoe", *setting) for setting in layer.SETTINGS}
    assert timed == ours | {("loop", 0.0, None), ("hf_grouped_mm", 0.0, None)}
    (c20,) = of_kind(rows, "layer", impl="lrmoe", rate=0.2, draw="backward")
    assert 0.8 <= c20["backward_fraction"] < 0.85
    assert set(c20["stages_ms"]) == {name for _, name in layer.STAGES}
    assert c20["score_select_pack_ms"] == pytest.approx(sum(c20["stages_ms"].values()))
    assert all(ms > 0 for ms in c20["stages_ms"].values())


@pytest.mark.slow
def test_what_a_cpu_cannot_say_is_empty_and_what_it_can_is_right(outcome):
    rows, _ = outcome
    assert all(row["fwd_syncs"] is None for row in of_kind(rows, "syncs"))
    assert all(row["allocator_bytes"] is None for row in of_kind(rows, "memory"))
    assert all(row["communication"] is False for row in of_kind(rows, "ep8"))
    assert len(of_kind(rows, "parity", dtype="fp32")) == len(parity.SETTINGS)
    # The card is this CPU here, so the two runs are one.
    assert of_kind(rows, "training", rate=0.0)[0]["largest_difference"] == 0


@pytest.mark.slow
def test_the_table_shows_every_part_and_says_what_it_is_of(outcome, capsys):
    assert table.main([str(outcome[1])]) == 0
    shown = capsys.readouterr().out
    assert "tiny shapes: the figures and their bars mean nothing" in shown
    assert shown.count("\n== ") == len(table.SECTIONS)


def test_a_bar_has_two_sides():
    assert table.verdict(0.8, (">=", 0.8)) == ">= 0.8 ok"
    assert table.verdict(0.79, (">=", 0.8)) == ">= 0.8 MISSED"
    assert table.verdict(0.86, ("<=", 0.85)) == "<= 0.85 MISSED"
    assert table.verdict(None, ("<=", 1)) == "<= 1 not measured"


def nbytes(*tensors):
    return sum(t.nbytes for t in tensors)


def test_bytes_are_those_of_the_tensors_read_and_written():
    P, F, T, D = 24, 16, 6, 8
    gate_up, grad_h = (torch.randn(P, n).bfloat16() for n in (2 * F, F))
    ids, coef = torch.arange(P, dtype=torch.int32), torch.rand(P)
    results = gated_backward(gate_up, ids, grad_h, coef, None)
    moved = nbytes(gate_up, ids, grad_h, coef, *results)
    assert kernels.gated_backward_bytes(P, F, 2) == moved
    rows, row_ids = torch.randn(P, D).bfloat16(), torch.arange(P, dtype=torch.int32) % T
    moved = nbytes(rows, row_ids, sum_rows(rows, row_ids, T))
    assert kernels.sum_bytes(P, T, D, 2) == moved


def test_arms_run_in_turn_and_every_stage_is_timed():
    order = []

    def arm(name, stages):
        def run(mark):
            order.append(name)
            for _ in range(stages):
                mark()

        return run

    arms = {"a": arm("a", 1), "b": arm("b", 2), "c": arm("c", 1)}
    times = timing.time_in_turn(torch.device("cpu"), arms, 3, warmup=0)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: of_arm.shape for name, of_arm in times.items()} == {
        "a": (3, 1), "b": (3, 2), "c": (3, 1)
    }  # fmt: skip


@pytest.mark.parametrize("placement", ["fixed", "recalibrated"])
def test_the_ranks_in_turn_do_the_work_of_the_plan(placement, monkeypatch):
    # So few pairs would never pay for weights.
    monkeypatch.setattr(expert_work, "link_costs", lambda *_: Costs())
    size = problems.LayerSize(name="", hidden=16, ffn=8, experts=16, top_k=2, tokens=40)
    routing = expert_work.make_routing(size, 4, "W2")
    made = expert_work.make_plan(size, routing, placement, "0.5")
    assert (made.num_replicas > 0) == (placement == "recalibrated")
    buffers = expert_work.Buffers.make(size, 4, torch.device("cpu"))
    works = [expert_work.rank_work(routing, made, rank, buffers) for rank in range(4)]
    forward, kept = zip(*(work.pairs_2 for work in works), strict=True)
    assert sum(forward) == routing.counts_WE.sum()
    assert sum(kept) == made.quota_E.sum()
    by_rank = [int(made.forward_WV[:, made.instance_rank_V == r].sum()) for r in range(4)]
    assert list(forward) == by_rank
    for work in works:
        assert work.groups.offsets_e[-1] == work.pairs_2[0]
        assert work.kept.groups.offsets_e[-1] == work.pairs_2[1]
        # Every row that arrived is some pair's, and no row arrived twice.
        assert torch.equal(work.row_R.unique(), torch.arange(len(work.x_UD), dtype=torch.int32))
        assert len(work.grad_UD) <= len(work.x_UD)
        marks = []
        work.run(lambda m=marks: m.append(1))
        assert len(marks) == 2


def test_rows_of_a_cpu_stay_out_of_the_results():
    committed = Path(part.__file__).parents[1] / "results" / "gpu.jsonl"
    with pytest.raises(ValueError, match="rows of a CPU do not belong"):
        part.start("", ["--device", "cpu", "--out", str(committed)])


def run_check(tmp_path, *arguments, fails="no part"):
    """The script with an interpreter that only says what it was asked for."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $*"\ncase "$*" in *"{fails}"*) exit 3;; esac\n')
    python.chmod(0o755)
    return subprocess.run(
        [CHECK, *arguments],
        env=os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_script_runs_every_part_and_then_the_table(tmp_path):
    done = run_check(tmp_path, "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tmp_path / "out" / "gpu.jsonl"
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran -m benchmarks")]
    names = ["parity", "syncs", "kernels", "layer", "memory", "ep8", "calibration", "training"]
    assert ran[:-1] == [
        f"ran -m benchmarks.gpu.{name} --device cpu --small --out {rows}" for name in names
    ]
    assert ran[-1] == f"ran -m benchmarks.gpu.table {rows}"
    assert (tmp_path / "out" / "check.log").read_text() == done.stdout


def test_a_part_that_fails_stops_no_other_and_shows_in_the_status(tmp_path):
    done = run_check(tmp_path, "--device", "cpu", "memory", "ep8", fails="gpu.memory")
    assert done.returncode == 1
    assert "memory: 0 s, exit status 3" in done.stdout
    assert "ran -m benchmarks.gpu.ep8" in done.stdout
    assert done.stdout.rstrip().endswith("FAILED: memory")


def test_the_limits_of_the_parts_add_up_to_less_than_six_minutes():
    seconds = [int(n) for n in re.findall(r"\[[a-z0-9]+\]=(\d+)", CHECK.read_text())]
    assert len(seconds) == len(PARTS) + 1
    assert sum(seconds) + len(seconds) < 360  # and a second each for what must be killed


def test_an_unknown_part_is_refused(tmp_path):
    done = run_check(tmp_path, "kernals")
    assert done.returncode == 2
    assert "no part kernals" in done.stderr


def test_reference_weights_are_those_of_the_backward_pass_alone():
    size = problems.LayerSize(name="", hidden=8, ffn=8, experts=4, top_k=2, tokens=12)
    problem = problems.make_problem(size, torch.device("cpu"), torch.float64)
    from benchmarks.gpu.reference import passes

    exact = passes(problem)
    none = passes(problem, torch.zeros_like(problem.p_TK))
    twice = passes(problem, torch.full_like(problem.p_TK, 2.0))
    assert torch.allclose(exact["output"], none["output"])
    for name in problem.leaves():
        assert not none[name].any()
        assert torch.allclose(2 * exact[name], twice[name])
    assert np.isinf(layer.worst_error({"x": torch.tensor([np.nan])}, {"x": torch.ones(1)})[0])
