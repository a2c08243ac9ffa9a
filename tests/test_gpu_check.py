"""The check of one GPU, end to end on the CPU with tiny shapes; and what it counts.

Shape letters: P = rows, T = tokens, D = model dim, F = expert width, W = ranks, E = experts.
"""

import enum
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gpu import (
    calibration,
    ep8,
    expert_work,
    kernels,
    layer,
    memory,
    parity,
    part,
    peers,
    problems,
    syncs,
    table,
    timing,
    training,
)
from benchmarks.gpu.reference import passes
from lrmoe.exchange import PendingCounts
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
    "layer": {*LAYER, *TIMES, "draw", "ratio_to_hf", "bwd_ratio_to_c0", "gradient_error",
              "host_fwd_ms", "host_bwd_ms"},
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
    moved = nbytes(rows, row_ids, sum_rows(rows, row_ids, T, P))
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


def run_check(tmp_path, *arguments, fails="no part", status=3):
    """The script with an interpreter that only says what it was asked for."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $*"\ncase "$*" in *"{fails}"*) exit {status};; esac\n')
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


@pytest.mark.parametrize(("device", "status"), [("cpu", 0), ("cuda", 1)])
def test_without_a_card_no_test_need_run(tmp_path, device, status):
    # pytest's own status where it collects none
    done = run_check(tmp_path, "--device", device, "tests", fails="-m pytest", status=5)
    assert done.returncode == status, done.stdout + done.stderr


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
    exact = passes(problem)
    none = passes(problem, torch.zeros_like(problem.p_TK))
    twice = passes(problem, torch.full_like(problem.p_TK, 2.0))
    assert torch.allclose(exact["output"], none["output"])
    for name in problem.leaves():
        assert not none[name].any()
        assert torch.allclose(2 * exact[name], twice[name])
    assert np.isinf(layer.worst_error({"x": torch.tensor([np.nan])}, {"x": torch.ones(1)})[0])


@pytest.mark.parametrize("lead", [0, 2])
def test_what_is_timed_runs_behind_what_is_not(lead):
    log = []

    def arm(mark):
        log.append(mark)
        mark()

    arms = {"one": arm, "two": arm}
    times = timing.time_in_turn(torch.device("cpu"), arms, 3, warmup=0, lead=lead)
    assert {name: of_arm.shape for name, of_arm in times.items()} == {"one": (3, 1), "two": (3, 1)}
    assert len(log) == 3 * 2 * (1 + lead)
    is_timed = [getattr(mark, "__name__", "") == "mark" for mark in log]
    assert is_timed == ([False] * lead + [True]) * 6


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "flush event run event"),
        ({"has_head_start": True}, "flush sleep event run event"),
        ({"lead": 2}, "run run flush event run event"),
        ({"is_host": True}, "flush wait run"),
    ],
)
def test_a_card_has_a_cold_cache_when_the_clock_starts(options, order, monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, _):
            return 1.0

    flushed = SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flushed)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("wait"))

    def arm(mark):
        log.append("run")
        mark()

    timing.time_in_turn(torch.device("cuda"), {"one": arm}, 1, warmup=0, **options)
    assert " ".join(log) == order


def test_waits_are_counted_that_pytorch_does_not_warn_of(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)

    def run():
        PendingCounts(torch.tensor([1])).wait()
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    found = syncs.count_syncs(torch.device("cuda"), run)
    assert found.total() == 2
    assert found["the counts"] == 1
    assert syncs.count_syncs(torch.device("cpu"), lambda: None).total() == 0


# Doubles of the packages' documented functions: pair by pair, in float32.
def sonicmoe_double(gate=0, fails="never"):
    """``moe_general_routing_inputs`` of sonic-moe 0.1.2; ``gate``: its first row of the pair."""

    class ActivationType(enum.Enum):
        SWIGLU = "swiglu"
        GEGLU = "geglu"

    def moe_general_routing_inputs(
        x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id,
        activation_type, is_inference_mode_enabled=False, concat_layout=False,
    ):  # fmt: skip
        T, D = x.shape
        F = w2.shape[1]
        assert activation_type is ActivationType.SWIGLU
        assert b1 is None
        assert b2 is None
        assert w1.shape == (2 * F, D, E)
        assert w2.shape == (D, F, E)
        assert w1.stride() == (D, 1, 2 * F * D)
        assert w2.stride() == (F, 1, D * F)
        assert token_indices.dtype == expert_indices.dtype == torch.int32
        assert len(token_indices) == len(expert_indices) == len(router_scores)
        assert bool((token_indices.diff() >= 0).all())
        assert w1._base.grad is None  # a round starts without the gradients of the last
        maybe_fail(fails, "forward")
        output_TD = torch.zeros(T, D)
        for t, e, score in zip(
            token_indices.tolist(), expert_indices.tolist(), router_scores.float(), strict=True
        ):
            h = w1[:, :, e].float() @ x[t].float()
            y = w2[:, :, e].float() @ (nn.functional.silu(h[gate::2]) * h[1 - gate :: 2])
            output_TD = output_TD.index_add(0, torch.tensor([t]), (score * y)[None])
        output_TD = output_TD.to(x.dtype)
        output_TD.register_hook(lambda _: maybe_fail(fails, "backward"))
        return output_TD, torch.bincount(expert_indices, minlength=E)

    enums = module("sonicmoe.enums", ActivationType=ActivationType)
    function = {"moe_general_routing_inputs": moe_general_routing_inputs}
    return [module("sonicmoe", enums=enums, **function), enums]


def scattermoe_double(gate=1, fails="never"):
    """``GLUMLP`` of scattermoe 0.3.0; ``gate``: its half of the rows."""

    class ParallelExperts(nn.Module):
        def __init__(self, num_experts, input_size, output_size):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))

    class GLUMLP(nn.Module):
        def __init__(self, input_size, hidden_size, num_experts, top_k, bias=False,
                     activation=None):  # fmt: skip
            super().__init__()
            self.experts = ParallelExperts(num_experts, input_size, 2 * hidden_size)
            self.output_experts = ParallelExperts(num_experts, hidden_size, input_size)
            self.activation = activation or nn.SiLU()

        def forward(self, x, expert_p, expert_idxs):
            assert self.experts.weight.grad is None
            maybe_fail(fails, "forward")
            rows = []
            for t in range(len(x)):
                row = torch.zeros(x.shape[1])
                for p, e in zip(expert_p[t].float(), expert_idxs[t].tolist(), strict=True):
                    halves = (self.experts.weight[e].float() @ x[t].float()).chunk(2)
                    h = self.activation(halves[gate]) * halves[1 - gate]
                    row = row + p * (self.output_experts.weight[e].float() @ h)
                rows.append(row)
            output_TD = torch.stack(rows).to(x.dtype)
            output_TD.register_hook(lambda _: maybe_fail(fails, "backward"))
            return output_TD

    mlp = module("scattermoe.mlp", GLUMLP=GLUMLP)
    return [module("scattermoe", mlp=mlp), mlp]


DOUBLES = {"sonicmoe": sonicmoe_double, "scattermoe": scattermoe_double}
WRONG_GATE = {"sonicmoe": 1, "scattermoe": 0}
ODD = problems.LayerSize(name="odd", hidden=24, ffn=16, experts=7, top_k=3, tokens=19)


def module(name, **members):
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


def maybe_fail(fails, phase):
    if fails == phase:
        raise RuntimeError("no kernel image is available\nfor execution on the device")


@pytest.fixture
def install(monkeypatch):
    """Puts a package's double in its place; before, neither package is there."""
    for name in DOUBLES:
        monkeypatch.setitem(sys.modules, name, None)

    def put(name, **options):
        for made in DOUBLES[name](**options):
            monkeypatch.setitem(sys.modules, made.__name__, made)

    return put


def package_rows(tmp_path, workload="W0"):
    path = tmp_path / "gpu.jsonl"
    running = part.start("", ["--device", "cpu", "--small", "--out", str(path)])
    agree = layer.measure_packages(running, ODD, workload)
    return agree, {row["impl"]: row for row in map(json.loads, path.read_text().splitlines())}


# W5: every second expert gets no token.
@pytest.mark.parametrize("workload", ["W0", "W5"])
def test_packages_are_timed_where_they_agree(install, tmp_path, workload):
    for name in DOUBLES:
        install(name)
    agree, rows = package_rows(tmp_path, workload)
    assert agree
    assert set(rows) == set(DOUBLES)
    for row in rows.values():
        assert set(row) >= KEYS["layer"]
        assert 0 < row["gradient_error"] < 0.005
        assert row["ratio_to_hf"] > 0
        assert row["bwd_ratio_to_c0"] > 0
    assert len(table.layers(list(rows.values()))) == len(rows)


@pytest.mark.parametrize("name", DOUBLES)
def test_a_package_with_another_order_of_gate_and_up_is_not_timed(install, tmp_path, name):
    install(name, gate=WRONG_GATE[name])
    agree, rows = package_rows(tmp_path)
    assert not agree
    assert re.fullmatch(r"its .* is off by .*; not timed", rows[name]["missing"])
    assert "fwd_ms" not in rows[name]


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("name", DOUBLES)
def test_a_package_that_fails_leaves_the_other_and_a_reason(install, tmp_path, name, fails):
    (other,) = DOUBLES.keys() - {name}
    install(name, fails=fails)
    install(other)
    agree, rows = package_rows(tmp_path)
    assert agree
    assert rows[name]["missing"] == "RuntimeError: no kernel image is available"
    assert rows[other]["total_ms"] > 0


@pytest.mark.parametrize("name", DOUBLES)
def test_a_package_that_is_not_there_or_cannot_be_loaded_says_so(
    install, tmp_path, monkeypatch, name
):
    agree, rows = package_rows(tmp_path)
    assert agree
    assert [row["missing"] for row in rows.values()] == ["not importable"] * len(DOUBLES)
    assert table.layers(list(rows.values())) == []

    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}.py").write_text("import cutlass_of_no_version")
    _, rows = package_rows(tmp_path)
    reason = "ModuleNotFoundError: No module named 'cutlass_of_no_version'"
    assert rows[name]["missing"] == reason
    assert len(table.layers(list(rows.values()))) == 1


@pytest.mark.parametrize("name", DOUBLES)
def test_a_package_has_its_own_rows_of_gate_and_up_and_the_other_leaves(install, name):
    install(name)
    problem = problems.make_problem(ODD, torch.device("cpu"))
    (forward, own), = peers.make_packages(problem)[0].values()  # fmt: skip
    for leaf in ("x_TD", "expert_TK", "p_TK", "down_eDF", "grad_TD"):
        assert getattr(own, leaf) is getattr(problem, leaf)
    forward().backward(own.grad_TD)
    found = own.gradients()
    own.clear()
    assert problem.gate_up_e2FD.grad is None
    expected = passes(problem.to(torch.float32))
    assert layer.worst_error(found, {name: expected[name] for name in found})[0] < 0.005
