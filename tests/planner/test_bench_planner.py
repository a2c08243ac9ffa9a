"""``lrmoe bench planner``: its rows, its bound, and the files it writes."""

import json

import numpy as np
import pytest

from lrmoe.bench import planner
from lrmoe.planner.workloads import routed_counts
from tests.planner.bounds import least_rank_load

SMALL = planner.PlannerBench(
    sizes=((4, 16),), placements=("fixed", "ultraep", "recalibrated"), tokens=64, top_k=4
)


def test_rows_have_what_a_reader_needs():
    rows = planner.run(SMALL)
    assert [row["placement"] for row in rows] == list(SMALL.placements)
    for row in rows:
        assert (row["ranks"], row["experts"], row["bound"]) == (4, 16, "lp")
        assert 0 < row["plan_us"] <= row["plan_p95_us"]
        assert 1 - 1e-9 <= row["makespan_over_bound"] <= row["makespan_over_bound_worst"]
    fixed, _, ours = rows
    assert ours["makespan_over_bound"] < fixed["makespan_over_bound"]


def test_the_bound_is_that_of_the_tests():
    for W, E in ((4, 16), (8, 64)):
        load_E = routed_counts("clustered", W, E, 3.0, tokens=128, top_k=4).sum(0)
        for slots in (0, 1, 2):
            assert planner.least_rank_load(load_E, W, slots) == pytest.approx(
                least_rank_load(load_E, W, slots)
            )
    assert planner.least_rank_load(np.array([30, 0, 0, 10]), 2, 0) == pytest.approx(30)


def test_command_line_writes_json_and_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner, "GROWTH_RANKS", (2, 4))
    monkeypatch.setattr(planner, "GROWTH_EXPERTS", (32, 64))
    target, image = tmp_path / "rows.json", tmp_path / "growth.png"
    arguments = ["--placements", "recalibrated", "--sizes", "4x16,8x32", "--tokens", "64"]
    assert planner.main([*arguments, "--json", str(target), "--plot", str(image)]) == 0
    assert "recalibrated" in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert written["command"] == "bench planner"
    assert [(row["ranks"], row["experts"]) for row in written["rows"]] == [(4, 16), (8, 32)]
    assert len(written["config"]["growth"]) == 4
    assert image.stat().st_size > 1000


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="placements='nearest': allowed are 'fixed'"):
        planner.main(["--placements", "nearest"])
