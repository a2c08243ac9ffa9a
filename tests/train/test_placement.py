"""Training with replicas, rerouted pairs and a memory budget that binds, beside its exact twins."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lrmoe import Budget, Recalibration
from lrmoe.training.presets import preset_config
from tests.train.runs import train, with_
from tests.train.test_presets import GLM_TINY

pytestmark = [pytest.mark.dist, pytest.mark.slow]
# Enough pairs that a replica pays for its weights.
TRAINING = {
    "max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
    "logging_steps": 1, "eval_steps": 4, "save_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Rows of each run's step log, and its final weights: exact training without and with
    replicas, and at C 0.3 with replicas under a budget."""
    root = tmp_path_factory.mktemp("placement")
    torch.manual_seed(0)
    wide = {"hidden_size": 64, "moe_intermediate_size": 128, "num_hidden_layers": 3}
    model = AutoModelForCausalLM.from_config(preset_config("glm4-moe-small", GLM_TINY | wide))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[:3] += 0.02  # the first rank's experts are chosen more often
    model.save_pretrained(root / "skewed")
    base = with_(
        tiny,
        model={"path": str(root / "skewed"), "overrides": {}},
        data={"block_size": 256, "validation_blocks": 2},
        training=TRAINING,
    )

    def run(name, **recalibration):
        settings = replace(
            base, run_dir=str(root / name), recalibration=Recalibration(**recalibration)
        )
        (root / f"{name}.txt").write_text(train(settings, 2))
        rows = [json.loads(line) for line in (root / name / "metrics.jsonl").open()]
        weights = AutoModelForCausalLM.from_pretrained(root / name / "final").state_dict()
        return rows, weights, json.loads((root / name / "summary.json").read_text()), root / name

    level = {"placement": "recalibrated", "selection": "top"}
    exact = run("exact", rate=0.0)
    moved = run("moved", rate=0.0, **level, budget=Budget(slots=2))
    limit = int(0.88 * max(row["memory_step"] for row in moved[0]))
    budget = Budget(slots=2, memory=limit, c_max=0.9)
    return exact, moved, run("budget", rate=0.1, **level, budget=budget), limit


def test_exact_training_with_replicas_is_exact_training(runs):
    (rows, weights, _, _), (moved_rows, moved_weights, _, _), *_ = runs
    assert all(row["replicas"] == 0 for row in rows)
    assert all(row["replicas"] > 0 for row in moved_rows)
    assert max(row["imbalance_fwd"] for row in moved_rows) < 1.1
    assert min(row["imbalance_fwd"] for row in rows) > 1.3
    for row, moved in zip(rows, moved_rows, strict=True):
        assert moved["backward_fraction"] == 1
        assert moved["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert moved["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(moved_weights[name], value, rtol=1e-3, atol=1e-4)


def test_a_binding_memory_budget_is_kept_to_with_replicas_and_moved_rows(runs):
    *_, (rows, _, summary, root), limit = runs
    assert sum(row["moved_rows"] for row in rows) > 0
    for row in rows:
        assert row["replicas"] > 0
        assert row["moved_weights"] >= row["replicas"]
        assert row["backward_fraction"] < 0.89  # more than the rate had to go
        assert row["memory_step"] <= limit
        assert row["memory_layer"] == pytest.approx(row["memory_layer_model"], rel=0.05)
        assert row["plan_us"] > 0
        assert row["makespan"] > 0
    assert 0 <= summary["makespan_error"] < 1
    printed = (root.with_name("budget.txt")).read_text()
    for label in ("replicas", "expert weights moved", "planning per step", "predicted makespan"):
        assert label in printed
