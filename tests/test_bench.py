"""``lrmoe bench layer``: workloads, the gate before any timing, the rows and their counts."""

import json
import math
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch

import lrmoe.state
from lrmoe import cli, compute
from lrmoe.bench import arms, layer, timing
from lrmoe.bench.arguments import parse
from lrmoe.bench.gate import relative_error
from lrmoe.bench.settings import LayerBench
from lrmoe.bench.workloads import Shape, largest_imbalance, least_experts, route
from lrmoe.planner import Costs
from tests.ranks import run_ranks

TINY = LayerBench(
    tokens=96,
    hidden=32,
    ffn=16,
    experts=16,
    top_k=4,
    ranks=2,
    dtypes=("bf16", "fp32"),
    rounds=2,
    imbalance=1.5,
)
SHAPE = Shape(ranks=2, tokens=2048, experts=64, top_k=8, imbalance=1.79, empty_source=False)
ARCHITECTURE_KEYS = {
    *("impl", "placement", "selection", "rate", "backward_fraction", "workload", "dtype"),
    *("imbalance_home", "imbalance_fwd", "imbalance_bwd", "fwd_ms", "bwd_ms", "total_ms"),
    *("total_p20_ms", "total_p80_ms", "bytes_fwd", "bytes_bwd", "payload_rows_fwd"),
    *("payload_rows_bwd", "gemm_rows_fwd", "gemm_rows_bwd", "score_select_pack_ms"),
    "gradient_error",
}


def home_imbalance(routing, num_experts=64):
    pairs_W = routing.home_pairs(num_experts).double()
    return float(pairs_W.max() / pairs_W.mean())


@pytest.mark.parametrize("workload", ["W0", "W1", "W2", "W4", "W5"])
def test_workloads_are_functions_of_the_seed_with_distinct_experts_per_token(workload):
    first, again, other = (route(workload, SHAPE, seed) for seed in (3, 3, 4))
    assert torch.equal(first.expert_TK, again.expert_TK)
    assert not torch.equal(first.expert_TK, other.expert_TK)
    ordered = first.expert_TK.sort(1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert ordered.min() >= 0
    assert ordered.max() < SHAPE.experts
    torch.testing.assert_close(first.weight_TK.sum(1), torch.ones(len(ordered)))
    assert sum(first.tokens_W) == len(ordered) == SHAPE.ranks * SHAPE.tokens


def test_ranks_take_disjoint_tokens_that_make_up_the_whole():
    routing = route("W4", SHAPE, 0)
    parts = [routing.of_rank(rank)[0] for rank in range(SHAPE.ranks)]
    assert [len(part) for part in parts] == routing.tokens_W
    assert torch.equal(torch.cat(parts), routing.expert_TK)


def test_w0_is_balanced():
    assert home_imbalance(route("W0", SHAPE, 0)) < 1.02


def test_w1_heats_an_eighth_of_the_experts():
    counts = torch.bincount(route("W1", SHAPE, 0).expert_TK.flatten(), minlength=64)
    assert counts[:8].sum() / counts.sum() == pytest.approx(0.5, rel=0.01)
    assert counts[:8].min() > 3 * counts[8:].max()


@pytest.mark.parametrize("target", [1.1, 1.5, 1.79, 1.99])
@pytest.mark.parametrize("ranks", [2, 4])
def test_w2_realises_its_imbalance(target, ranks):
    shape = replace(SHAPE, ranks=ranks, imbalance=target)
    assert home_imbalance(route("W2", shape, 0)) == pytest.approx(target, rel=0.01)


def test_w4_has_very_different_sources_and_optionally_an_empty_one():
    shape = replace(SHAPE, ranks=4)
    tokens = route("W4", shape, 0).tokens_W
    assert all(a > 2.5 * b for a, b in pairwise(tokens))
    assert route("W4", replace(shape, empty_source=True), 0).tokens_W[-1] == 0
    assert route("W4", replace(SHAPE, empty_source=True), 0).tokens_W == [4096, 0]


def test_w5_leaves_half_of_the_experts_and_the_last_rank_without_pairs():
    for ranks in (1, 2, 4):
        shape = replace(SHAPE, ranks=ranks)
        routing = route("W5", shape, 0)
        counts = torch.bincount(routing.expert_TK.flatten(), minlength=64)
        pairs_W = routing.home_pairs(64)
        assert counts[1::2].sum() == 0
        assert ranks == 1 or pairs_W[-1] == 0
        assert bool((pairs_W[: max(ranks - 1, 1)] > 0).all())


def test_limits_of_the_workloads_are_what_the_generators_reach():
    assert largest_imbalance(2, 64, 8) == 2.0
    assert largest_imbalance(4, 16, 8) == 2.0  # a token finds only 4 of its 8 experts on a rank
    for ranks, top_k in ((1, 3), (2, 4), (4, 8)):
        experts = least_experts(ranks, top_k)
        shape = replace(SHAPE, ranks=ranks, experts=experts, top_k=top_k)
        busy = torch.bincount(route("W5", shape, 0).expert_TK.flatten(), minlength=experts) > 0
        assert bool((~busy[1::2]).all())
        assert ranks == 1 or not bool(busy[-experts // ranks :].any())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("workloads", ("W9",), "workloads='W9': allowed are 'W0'"),
        ("workloads", (), "workloads=\\[\\]"),
        ("dtypes", ("fp16",), "dtypes='fp16'"),
        ("rates", (0.0, 1.0), "rate=1.0: allowed is 0 <= rate < 1"),
        ("rates", (0.2, 0.2), "different values"),
        ("placements", ("best",), "placement='best'"),
        ("slots", -1, "budget.slots=-1"),
        ("tokens", 0, "tokens=0: must be an integer >= 1"),
        ("ranks", 3, "experts=16 with ranks=3"),
        ("top_k", 17, "top_k=17: allowed is at most experts=16"),
        ("imbalance", 2.5, "imbalance=2.5: allowed is 1 <= imbalance <= 2"),
        ("clock", "sun", "clock='sun'"),
        ("selection", "best", "selection='best'"),
        ("experts", 8, "experts >= 16"),
    ],
)
def test_bad_settings_name_the_field_and_what_is_allowed(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **{field: value})


def test_clock_is_cpu_time_where_ranks_outnumber_cores():
    assert replace(TINY, ranks=16, experts=128).resolved_clock == "cpu"
    assert replace(TINY, ranks=1, workloads=("W0",)).resolved_clock == "wall"
    assert replace(TINY, clock="cpu").resolved_clock == "cpu"


def test_command_line_takes_comma_separated_lists_and_names_the_nearest_key(tmp_path):
    config = tmp_path / "bench.yaml"
    config.write_text("tokens: 128\nrates: [0.3]\n")
    given = [str(config), "--workloads", "W0,W2", "--dtypes=bf16", "--json", "out.json"]
    bench, json_file = parse(given)
    assert (bench.tokens, bench.rates, bench.workloads) == (128, (0.3,), ("W0", "W2"))
    assert (bench.dtypes, json_file) == (("bf16",), "out.json")
    with pytest.raises(
        ValueError, match="'rate' is not a setting; the nearest valid one is 'rates'"
    ):
        parse(["--rate", "0"])
    config.write_text("tokenz: 128\n")
    with pytest.raises(ValueError, match="nearest valid one is 'tokens'"):
        parse([str(config)])


def test_relative_error_is_never_small_for_what_is_not_a_number():
    ones, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert relative_error(ones, ones) == 0
    assert relative_error(1.5 * ones, ones) == pytest.approx(0.5)
    assert relative_error(nan, ones) == relative_error(ones, nan) == math.inf
    assert relative_error(ones, torch.zeros(3)) == math.inf
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0


def test_local_stages_leave_the_time_of_collectives_out():
    now = 0.0

    def passes(seconds):
        nonlocal now
        now += seconds

    watch = timing._Stopwatch(lambda: now)
    collective = watch.pausing(lambda: passes(5))

    def stage():
        passes(1)
        collective()
        passes(2)

    counted = watch.counting(stage)
    counted()
    collective()
    counted()
    assert watch.seconds == 6


def test_floor_does_the_flops_of_the_pairs():
    from torch.utils.flop_counter import FlopCounterMode

    bench = replace(TINY, hidden=32, ffn=16)
    for num_rows in (0, 5):
        arm = arms.floor_arm(num_rows, bench, "fp32")
        with FlopCounterMode(display=False) as counter:
            arm.forward()
            arm.backward(None)
        assert counter.get_total_flops() == 3 * 2 * num_rows * (32 * 2 * 16 + 16 * 32)


def command(*arguments):
    """Exit code and the two outputs of the command, run inside a rank as under torchrun."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(["bench", "layer", *arguments])
    return code, out.getvalue(), err.getvalue()


def arguments_of(bench):
    keys = ("tokens", "hidden", "ffn", "experts", "top_k", "rounds", "imbalance")
    given = [part for key in keys for part in (f"--{key}", str(getattr(bench, key)))]
    return [*given, "--dtypes", ",".join(bench.dtypes)]


def with_a_broken_gradient(*arguments):
    """The command with one weight gradient wrong on rank 1 only."""
    right = compute.backward_experts

    def wrong(*args, **kwargs):
        grads = right(*args, **kwargs)
        if os.environ["RANK"] == "1":
            grads.down_eDF[0] *= 1.5
        return grads

    with patch.object(compute, "backward_experts", wrong):
        return command(*arguments)


def with_free_links(bench):
    """The rows where replicas always pay, however few the pairs."""
    with patch.object(lrmoe.state, "link_costs", lambda *_: Costs()):
        return layer.run(bench)


def on_a_rank(rank, world_size, directory):
    file = f"{directory}/bench.json"
    arguments = arguments_of(TINY)
    return {
        "right": command(*arguments, "--json", file),
        "broken": [
            with_a_broken_gradient(
                *arguments, "--dtypes", dtype, "--workloads", "W0", "--json", f"{file}.{dtype}"
            )
            for dtype in ("fp32", "bf16")
        ],
        "empty": layer.run(
            replace(TINY, workloads=("W4",), dtypes=("fp32",), empty_source=True, selection="top")
        ),
        "forward": layer.run(
            replace(TINY, workloads=("W0",), dtypes=("fp32",), draw="forward", clock="cpu")
        ),
        "placements": with_free_links(
            replace(
                TINY,
                workloads=("W2",),
                dtypes=("fp32",),
                rates=(0.0, 0.5),
                placements=("fixed", "recalibrated"),
            )
        ),
        "wrong ranks": command("--ranks", "4"),
        "no kept memory": command("--keep_memory", "true"),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    return run_ranks(on_a_rank, 2, str(directory), timeout=240), directory


@pytest.mark.dist
def test_command_prints_a_table_on_the_first_rank_and_writes_rows_with_all_keys(results):
    (first, second), directory = results
    code, out, err = first["right"]
    assert code == 0, err
    assert "hf_all_to_all" in out
    assert "lrmoe C 0.5" in out
    assert second["right"][:2] == (0, "")
    written = json.loads((directory / "bench.json").read_text())
    assert written["command"] == "bench layer"
    assert written["config"]["tokens"] == TINY.tokens
    assert {"version", "machine"} <= set(written)
    rows = written["rows"]
    per_case = ["hf_all_to_all", "lrmoe", "lrmoe", "lrmoe", "gemm_floor"]
    assert [row["impl"] for row in rows] == per_case * 2 * len(TINY.workloads)
    for row in rows:
        assert set(row) >= ARCHITECTURE_KEYS
        assert row["total_p20_ms"] <= row["total_ms"] <= row["total_p80_ms"]
        assert min(row["fwd_ms"], row["bwd_ms"]) > 0
        if row["impl"] == "lrmoe":
            assert None not in row.values(), row
            assert 0 < row["score_select_pack_ms"] < row["total_ms"] + row["bwd_ms"]
            assert row["backward_fraction"] == pytest.approx(1 - row["rate"], abs=0.05)


@pytest.mark.dist
def test_both_layers_see_the_same_load_and_exact_gradients(results):
    _, directory = results
    rows = json.loads((directory / "bench.json").read_text())["rows"]
    for start in range(0, len(rows), 5):
        hf, exact, *dropping, floor = rows[start : start + 5]
        for row in (exact, *dropping, floor):
            for key in ("imbalance_home", "imbalance_fwd", "gemm_rows_fwd", "workload", "dtype"):
                assert row[key] == hf[key], key
        assert exact["imbalance_bwd"] == hf["imbalance_bwd"]
        assert exact["gemm_rows_bwd"] == hf["gemm_rows_bwd"]
        tolerance = {"fp32": 1e-5, "bf16": 1e-2}[hf["dtype"]]
        assert max(hf["gradient_error"], exact["gradient_error"]) <= tolerance
        assert dropping[0]["gradient_error"] < dropping[1]["gradient_error"]
        assert (
            hf["payload_rows_fwd"] >= exact["payload_rows_fwd"] >= dropping[1]["payload_rows_bwd"]
        )
        assert hf["ratio_to_hf"] == floor["ratio_to_floor"] == 1.0
        assert floor["bytes_fwd"] is floor["placement"] is None
    by_workload = {row["workload"]: row for row in rows if row["impl"] == "lrmoe"}
    assert by_workload["W2"]["imbalance_home"] == pytest.approx(TINY.imbalance, rel=0.01)
    assert by_workload["W5"]["imbalance_home"] == 2.0  # one of two ranks has no rows


@pytest.mark.dist
def test_wrong_gradient_prints_no_timing(results):
    ranks, directory = results
    for rank in ranks:
        for (code, out, err), dtype in zip(rank["broken"], ("fp32", "bf16"), strict=True):
            assert code == 1
            assert out == ""
            assert f"W0 {dtype}: the gradient of down of lrmoe (fixed) on rank 1" in err
            assert not (directory / f"bench.json.{dtype}").exists()
            error = float(err.split(" by ")[1].split()[0])
            assert 0.01 < error < 0.5


@pytest.mark.dist
def test_hf_counts_only_what_leaves_the_rank(results):
    _, directory = results
    rows = json.loads((directory / "bench.json").read_text())["rows"]
    itemsize = {"bf16": 2, "fp32": 4}
    for row in rows:
        if row["impl"] == "hf_all_to_all":
            # A row goes out and one comes back, in both passes.
            num_bytes = 2 * row["payload_rows_fwd"] * TINY.hidden * itemsize[row["dtype"]]
            assert row["bytes_fwd"] == row["bytes_bwd"] == num_bytes
            assert row["gemm_rows_fwd"] == 2 * TINY.tokens * TINY.top_k
        if row["workload"] == "W5" and row["impl"] == "hf_all_to_all":
            assert row["payload_rows_fwd"] == TINY.tokens * TINY.top_k


@pytest.mark.dist
def test_rank_without_tokens_and_draw_in_the_forward_pass(results):
    (first, second), _ = results
    hf, exact, *_ = first["empty"]
    assert exact["gradient_error"] < 1e-5
    assert hf["imbalance_home"] == exact["imbalance_home"]
    assert first["empty"][1]["selection"] == "top"
    assert first["empty"] == second["empty"]
    assert {row["clock"] for row in first["forward"]} == {"cpu"}
    dropping = first["forward"][2]
    assert np.isfinite(dropping["score_select_pack_ms"])
    assert dropping["score_select_pack_ms"] > 0


@pytest.mark.dist
def test_every_placement_is_measured_at_every_rate(results):
    (first, _), _ = results
    replicated = first["placements"]
    assert [(row["placement"], row["rate"]) for row in replicated[1:-1]] == [
        ("fixed", 0.0),
        ("fixed", 0.5),
        ("recalibrated", 0.0),
        ("recalibrated", 0.5),
    ]
    assert [row["replicas"] > 0 for row in replicated[1:-1]] == [False, False, True, True]
    for fixed, level in zip(replicated[1:3], replicated[3:5], strict=True):
        assert level["imbalance_fwd"] < fixed["imbalance_fwd"] == fixed["imbalance_home"]
        assert level["plan_us"] > 0
    assert replicated[3]["gradient_error"] < 1e-5


@pytest.mark.dist
def test_ranks_must_be_those_of_torchrun(results):
    (first, _), _ = results
    code, _, err = first["wrong ranks"]
    assert code == 2
    assert "ranks=4: torchrun has started 2" in err
    code, _, err = first["no kept memory"]
    assert code == 2
    assert "MALLOC_MMAP_MAX_=0" in err


@pytest.mark.dist
def test_command_starts_its_own_ranks(capfd, monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    bench = [*arguments_of(TINY), "--workloads", "W0", "--dtypes", "fp32", "--rates", "0.2"]
    bench += ["--keep_memory", "true"]
    assert cli.main(["bench", "layer", *bench, "--json", str(tmp_path / "rows.json")]) == 0
    out, err = capfd.readouterr()
    assert "lrmoe C 0.2" in out
    assert "freed memory kept" in out
    assert "MALLOC_MMAP_MAX_" not in os.environ
    assert "Traceback" not in err
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 3
