"""The fit finds coefficients that are known, and the comparison counts what it says."""

from dataclasses import replace

import numpy as np
import pytest

from lrmoe.bench import calibrate
from lrmoe.bench.calibrate import Calibration, Case, fitting_cases, predict
from lrmoe.cluster.hardware import load_hardware

SETTINGS = Calibration(hidden=16, ffn=8)
KNOWN = replace(
    calibrate._unit(""), forward_flops=3e10, backward_flops=2e10, weight_bytes_per_s=4e9,
    row_bytes_per_s=5e9, intra_bytes_per_s=1e9, group_s=1e-5, select_s=2e-8, pair_s=0.0,
    collective_s=1e-4,
)  # fmt: skip


def times_of(hardware, case, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    busy_W2 = np.stack([of_pass.busy() for of_pass in predict(hardware, SETTINGS, case)], axis=1)
    return busy_W2 * (1 + noise * rng.standard_normal((5, *busy_W2.shape)))


def test_coefficients_are_found_from_the_times_they_make():
    cases = [replace(case, tokens=case.tokens // 8) for case in fitting_cases()]
    times = [times_of(KNOWN, case) for case in cases]
    found = calibrate.fit(SETTINGS, cases, times)
    other = Case(
        ranks=4, tokens=100, experts=16, top_k=2, workload="W6", imbalance=1.5, policy="ultraep",
        rate=0.5, slots=2,
    )  # fmt: skip
    for case in (*cases, other):
        for a, b in zip(predict(found, SETTINGS, case), predict(KNOWN, SETTINGS, case),
                        strict=True):  # fmt: skip
            assert a.busy() == pytest.approx(b.busy(), rel=1e-4)
    assert found.intra_bytes_per_s == pytest.approx(1e9, rel=1e-2)
    assert found.select_s == pytest.approx(2e-8, rel=1e-2)


def test_cases_are_the_workloads_they_name():
    case = Case(ranks=2, tokens=64, experts=8, top_k=2, workload="W6", imbalance=1.6,
                policy="symi", rate=0.0, slots=1)  # fmt: skip
    past, now = (case.counts(routing).sum(0).reshape(2, 4).sum(1) for routing in case.routings(0))
    assert past.argmax() == 1
    assert now.argmax() == 0
    spread = replace(case, workload="W3", experts=32)
    loads = spread.counts(spread.routings(0)[1]).sum(0)
    assert loads.reshape(2, 16).sum(1).max() < 0.55 * loads.sum()
    assert np.sort(loads)[-4:].sum() > 0.45 * loads.sum()
    ragged = replace(case, workload="W4")
    assert [len(ids) for ids in ragged.routings(0)[1]] == [96, 32]


def test_the_comparison_by_hand():
    case = Case(ranks=2, tokens=32, experts=8, top_k=2, workload="W0", imbalance=1.0,
                policy="fixed", rate=0.0, slots=0)  # fmt: skip
    rows = calibrate.compare(KNOWN, SETTINGS, [case], [1.25 * times_of(KNOWN, case)])
    assert len(rows) == 4
    for row in rows:
        assert row["error"] == pytest.approx(0.8 - 1)
        assert row["measured_p20_ms"] == pytest.approx(row["measured_ms"])


def row_of(policy, repeat, rank, predicted, measured):
    return {
        "ranks": 2, "workload": "W0", "rate": 0.0, "phase": "fwd", "policy": policy,
        "repeat": repeat, "rank": rank, "predicted_ms": predicted, "measured_ms": measured,
    }  # fmt: skip


def test_only_gaps_above_the_noise_count_as_orders():
    rows = [
        row_of("fixed", 0, 0, 10, 10.0), row_of("fixed", 0, 1, 9, 8.0),
        row_of("fixed", 1, 0, 10, 10.5), row_of("fixed", 1, 1, 9, 8.0),
        row_of("symi", 0, 0, 11, 10.2), row_of("symi", 0, 1, 9, 8.0),  # within the noise of 5 %
        row_of("llep", 0, 0, 8, 8.0), row_of("llep", 0, 1, 7, 7.0),  # right of both
        row_of("eplb", 0, 0, 9, 12.0), row_of("eplb", 0, 1, 7, 7.0),  # wrong of two, right of one
    ]  # fmt: skip
    found = calibrate.orders(rows)
    assert found["noise"] == pytest.approx(1 - 10 / 10.5)
    assert (found["clear_pairs"], found["right_pairs"]) == (5, 3)
    assert {tuple(wrong[4:6]) for wrong in found["wrong"]} == {("fixed", "eplb"), ("symi", "eplb")}


def test_the_file_is_one_that_replay_reads(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(calibrate.to_file(replace(KNOWN, name="mine"), SETTINGS))
    assert load_hardware(str(path)) == replace(KNOWN, name="mine")


@pytest.mark.dist
def test_a_small_calibration_runs(tmp_path, monkeypatch, capsys):
    few = [replace(case, tokens=32) for case in fitting_cases()[:6]]
    monkeypatch.setattr(calibrate, "fitting_cases", lambda: few)
    arguments = ["--rounds", "2", "--hidden", "16", "--ffn", "8", "--validate", "false"]
    assert calibrate.main([*arguments, "--out", str(tmp_path / "mine.json")]) == 0
    assert "forward_flops" in capsys.readouterr().out
    found = load_hardware(str(tmp_path / "mine.json"))
    times = calibrate.predict(found, Calibration(hidden=16, ffn=8), few[0])
    assert all((of_pass.busy() > 0).all() for of_pass in times)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="ranks=3: allowed is >= 2"):
        Calibration(ranks=(3,))
    with pytest.raises(ValueError, match="policies='best'"):
        Calibration(policies=("best",))
