"""Figures and tables come from the rows alone, the same from the same rows."""

import hashlib
import json

import pytest

from lrmoe.config import SCORED_RULES, UNBIASED_RULES
from lrmoe.studies import figures, shown, tables
from lrmoe.studies.experiments import EXPERIMENTS
from lrmoe.studies.settings import Arm
from tests.studies.grids import row


def group(value):
    return {
        "error_one": value,
        "cosine_one": 0.9,
        "length_one": 1.0,
        "error_mean": value / 2,
        "error_mean_by_batches": [[1, value], [2, value / 1.4]],
        "bias": value / 3,
        "noise_one": value,
        "error_scaled": value,
        "bias_scaled": value / 5,
        "error_draw": value,
        "error_mean_draw": value / 4,
        "progress_easy": 0.9,
        "progress_hard": 1.0,
    }


def gradient_rows():
    return [
        row(0, {"rate": rate, "selection": rule})
        | {
            "study": "tiny",
            "step": step,
            "selection": rule,
            "settings_arm": {"rate": rate, "selection": rule},
            "groups": {g: group(0.1) for g in ("down", "all")},
        }
        for step in (50, 200)
        for rule in ("top", "sampled")
        for rate in (0.2, 0.5)
    ]


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    arms = [None, {"rate": 0.2}, {"rate": 0.5}, {"rate": 0.5, "selection": "top"}]
    odd = {"rate": 0.5, "router_grad": "exact", "exact_layers": [0]}
    runs = [row(seed, arm, 2 + 0.01 * i) for seed in (0, 1) for i, arm in enumerate([*arms, odd])]
    for name, rows in {"convergence": runs, "gradient": gradient_rows()}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_gradients_are_set_against_the_loss_of_runs_that_start_there():
    continued = {"regime": "continued"}
    arm = {"rate": 0.5}
    runs = [row(0), row(0, arm, 2.1)]
    for one in runs:
        one["settings"]["protocol"] |= continued
    gradient = gradient_rows()[1] | {"step": 0, "settings_arm": arm}
    gradient["settings"]["protocol"] |= continued
    names = figures.figures(runs, [gradient])
    assert "gradient_explains" in names
    gradient["step"] = 50
    assert "gradient_explains" not in figures.figures(runs, [gradient])


def test_the_factor_is_that_of_the_unbiased_rules():
    sampled, top = Arm.from_dict({"rate": 0.5}), Arm.from_dict({"rate": 0.5, "selection": "top"})
    explained = [(sampled, 3 * x * x, {"error_one": x}) for x in (0.1, 0.4)]
    assert figures.quadratic_factor([*explained, (top, 9.0, {"error_one": 0.1})]) == pytest.approx(
        3
    )
    assert figures.quadratic_factor([(top, 9.0, {"error_one": 0.1})]) is None


def draw(results, out):
    arguments = ["--results", results, "--images", out, "--tables", out / "tables.md"]
    assert figures.main([str(a) for a in arguments]) == 0
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir())}


def test_everything_regenerates_from_the_rows(results, tmp_path, capsys):
    first, second = draw(results, tmp_path / "a"), draw(results, tmp_path / "b")
    assert first == second
    assert set(first) == {
        "convergence_rates.png",
        "convergence_arms.png",
        "convergence_where.png",
        "gradient_averaging.png",
        "gradient_bias.png",
        "tables.md",
    }
    table = (tmp_path / "a" / "tables.md").read_text()
    assert "| top C50 | 2 | 1.000 | 1.000 | 2.0300 | +1.50 | 0.00 | +1.50 |" in table
    assert "sampled C50 router_grad=exact exact_layers=[0]" in table
    capsys.readouterr()


def test_pairs_of_all_protocols_and_strata_have_tables_of_their_own():
    strata, none = ({"rate": 0.5, "strata": s} for s in ("gradient", "none"))
    runs = [
        row(seed, arm, loss + 0.01 * seed)
        for arm, loss in ((None, 2.0), (none, 2.2), (strata, 2.1))
        for seed in range(shown.FINAL_SEEDS)
    ]
    for one in runs:
        one["settings"]["protocol"]["steps"] = shown.FINAL_STEPS
    text = tables.tables(runs, [])
    _, together, minus = text.split("\n## ")[-3:]
    assert "all protocols together" in together
    assert f"| sampled C50 strata=gradient | {len(runs) // 3} | +4.9" in together
    assert "With strata, minus the same without" in minus
    assert f"sampled C50 strata=gradient | {len(runs) // 3} | -4.5" in minus
    one["val_loss"] = None
    assert "convergence_finalists" in figures.figures(runs, [])
    text = tables.tables(runs, [])
    assert f"| sampled C50 strata=gradient | {len(runs) // 3} | +inf |  |  |" in text
    assert f"sampled C50 strata=gradient | {len(runs) // 3} | +nan |  |  |" in text


def test_what_has_no_rows_is_left_out(results, tmp_path, capsys):
    (results / "gradient.jsonl").unlink()
    assert "gradient_bias.png" not in draw(results, tmp_path / "a")
    (results / "convergence.jsonl").unlink()
    with pytest.raises(ValueError, match="holds no rows of these studies"):
        draw(results, tmp_path / "b")
    capsys.readouterr()


def race_row(arm, target, ms, seed=0):
    return {
        "race": "r",
        "arm": arm,
        "seed": seed,
        "target_loss": target,
        "ms_to_target": ms,
        "steps_to_target": None if ms is None else ms / 10,
        "clock": "cpu",
        "rate": 0.0 if arm == "symi C0" else 0.2,
        "imbalance_fwd": 1.8,
        "imbalance_bwd": 1.0,
        "backward_fraction": 0.8,
    }


def test_races_are_measured_against_symi_seed_by_seed(tmp_path):
    races = [
        *(race_row("symi C0", 3.0, 100.0 * (1 + s), s) for s in (0, 1)),
        *(race_row("ours C20", 3.0, 60.0 * (1 + s), s) for s in (0, 1)),
        race_row("symi C0", 2.0, None),
        race_row("ours C20", 2.0, 90.0),
    ]
    (tmp_path / "time-to-loss.jsonl").write_text("".join(json.dumps(r) + "\n" for r in races))
    assert set(draw(tmp_path, tmp_path / "out")) == {"time_to_loss.png", "tables.md"}
    table = (tmp_path / "out" / "tables.md").read_text()
    assert "| ours C20 | 1 | 3 | 12 | 120 | 0.60 | 1.80 | 1.00 | 0.80 |" in table
    assert "| ours C20 | 0 | 2 | 9 | 90 | - |" in table  # symi did not get there
    assert "| ours C20 | 3 | 40.0 | 0.00 | - |  | 2 |" in table  # over the seeds; no ultraep here
    assert "| ours C20 | 2 | - |  | - |  | 2 |" in table


def test_one_run_without_a_partner_draws_nothing(tmp_path):
    assert figures.figures([row(0, {"rate": 0.5})], []) == {}


def test_arms_of_other_strata_are_other_rules():
    names = {
        shown.rule_name(Arm.from_dict({"rate": 0.5, "strata": strata}))
        for strata in ("none", "gradient", "neighbors", "text")
    }
    assert len(names) == 4
    assert names <= set(figures._COLORS)


def test_every_rule_has_a_color():
    strata = {f"{rule}, strata" for rule in UNBIASED_RULES}
    assert {*SCORED_RULES, *UNBIASED_RULES, *EXPERIMENTS, *strata} <= set(figures._COLORS)
