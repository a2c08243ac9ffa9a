"""Steps of a race on the replay's clock."""

import pytest

from lrmoe.cluster.models import model_shape
from lrmoe.studies.simulated_race import simulated, simulated_table
from lrmoe.studies.systems import Systems

ARMS = {
    "fixed C0": {"rate": 0.0, "placement": "fixed"},
    "symi C0": {"rate": 0.0, "placement": "symi"},
    "ultraep C0": {"rate": 0.0, "placement": "ultraep"},
    "ours": {"rate": 0.5, "placement": "recalibrated", "quotas": "makespan"},
}


def race_rows(imbalance, steps):
    return [
        {
            "race": f"race {imbalance}", "arm": name, "arm_settings": arm, "seed": 3,
            "placement": arm["placement"], "rate": arm["rate"], "target_loss": loss,
            "steps_to_target": count, "imbalance_fwd": imbalance,
        }
        for name, arm in ARMS.items()
        for loss, count in steps[name].items()
    ]  # fmt: skip


def test_time_is_steps_times_layers_times_a_simulated_call():
    steps = {arm: {3.0: 10.0, 2.0: 40.0} for arm in ARMS} | {"ours": {3.0: 11.0, 2.0: None}}
    found = race_rows(1.8, steps) + race_rows(1.0, steps)
    settings = Systems(models=("qwen3-30b-a3b",), seeds=(0,), steps=2)
    made = list(simulated(found, settings))
    assert len(made) == len(found)
    by = {(r["race"], r["arm"], r["target_loss"]): r for r in made}
    for row in found:
        here = by[row["race"], row["arm"], row["target_loss"]]
        assert here["simulated"]
        assert here["imbalance"] == row["imbalance_fwd"]
        if row["steps_to_target"] is None:
            assert here["ms_to_target"] is None
            continue
        layers = model_shape("qwen3-30b-a3b").moe_layers
        expected = row["steps_to_target"] * layers * here["layer_ms"]
        assert here["ms_to_target"] == pytest.approx(expected)
    # The skew costs the home placement most, and half of the backward pass is a third of the work.
    skewed, even = (by[f"race {i}", "fixed C0", 3.0]["layer_ms"] for i in (1.8, 1.0))
    assert skewed > 1.3 * even
    assert (
        by["race 1.8", "ours", 3.0]["layer_ms"]
        < 0.8 * by["race 1.8", "ultraep C0", 3.0]["layer_ms"]
    )
    text = simulated_table(made)
    line = next(row for row in text.splitlines() if "race 1.8" in row and "ours" in row)
    below = 100 * (
        1
        - by["race 1.8", "ours", 3.0]["ms_to_target"]
        / by["race 1.8", "symi C0", 3.0]["ms_to_target"]
    )
    assert f"3: {below:.1f}, " in line
    assert "2: -, -" in line
