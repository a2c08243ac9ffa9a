"""The gradient study against values that are known, and against plain loops."""

import json
import math

import pytest
import torch
import yaml

from lrmoe.studies import gradient, loop
from lrmoe.studies.gradient import GROUPS, GradientStudy, _Sums
from lrmoe.studies.settings import Arm
from lrmoe.studies.texts import study_text
from tests.studies.grids import PROTOCOL, lines, protocol, run

ARMS = [{"rate": 0.5, "selection": "top"}, {"rate": 0.5}, {"rate": 0.5, "draw": "forward"}]


def vectors(tensor):
    return dict.fromkeys(GROUPS, tensor)


def summed(exact, errors):
    sums = _Sums()
    for g, error in zip(exact, errors, strict=True):
        sums.add(vectors(g), vectors(g + error), {"kept": torch.tensor([0.25, 0.75])})
    return sums


def test_a_constant_error_is_bias_and_no_noise():
    exact = list(torch.randn(16, 50, dtype=torch.float64))
    bias = 0.1 * torch.randn(50, dtype=torch.float64)
    found = summed(exact, [bias] * 16).result("all")
    mean = torch.stack(exact).mean(0).norm()
    assert found["bias"] == pytest.approx(float(bias.norm() / mean))
    assert found["noise_one"] == pytest.approx(0, abs=1e-6)
    assert found["error_mean"] == pytest.approx(found["bias"])
    scale = torch.stack(exact).square().mean(0)
    assert found["bias_scaled"] == pytest.approx(float((bias**2 / scale).mean().sqrt()))
    assert found["error_scaled"] == pytest.approx(found["bias_scaled"])


def test_independent_errors_are_noise_and_average_out():
    torch.manual_seed(1)
    g = torch.ones(2000, dtype=torch.float64)
    errors = list(torch.randn(64, 2000, dtype=torch.float64))
    found = summed([g] * 64, errors).result("all")
    assert found["noise_one"] == pytest.approx(1, rel=0.02)
    assert found["error_one"] == pytest.approx(1, rel=0.02)
    assert found["error_mean"] == pytest.approx(1 / 8, rel=0.05)
    assert found["bias"] < 0.03
    assert found["error_scaled"] == pytest.approx(1, rel=0.02)
    assert found["bias_scaled"] < 0.03
    counts = [n for n, _ in found["error_mean_by_batches"]]
    assert counts == [1, 2, 4, 8, 16, 32, 64]


def test_progress_is_what_a_step_gains_along_a_direction():
    exact = [torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0])]
    errors = [torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, 0.0])]
    sums = summed(exact, errors)
    assert sums.progress("all", vectors(torch.tensor([1.0, 0.0]))) == pytest.approx(0.5)
    assert sums.progress("all", vectors(torch.tensor([0.0, 1.0]))) == pytest.approx(1.0)
    assert sums.shares() == {"kept": [0.25, 0.75]}
    assert sums.result("all")["length_one"] == pytest.approx(1 - (1 + 3) / (2 + 10))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    its = run()
    made = loop.initial_model(its, study_text(its.protocol), tmp_path_factory.mktemp("cache"))
    made.train()
    return made


def batch():
    text = study_text(protocol())
    return loop.block_ids(text.validation, [0, 1])


def test_exact_gradients_are_those_of_plain_autograd(model):
    found, kept = gradient.gradient(model, Arm(), 0, batch())
    model.zero_grad()
    model.set_experts_implementation("eager")
    model(input_ids=batch(), labels=batch(), output_router_logits=True).loss.backward()
    names = {"down": "down_proj", "gate_up": "gate_up_proj", "router": "mlp.gate.weight"}
    for group, part in names.items():
        parameters = [p for name, p in model.named_parameters() if part in name]
        plain = torch.cat([p.grad.reshape(-1) for p in parameters])
        assert torch.allclose(found[group], plain, atol=1e-6), group
    assert sum(found[g].numel() for g in GROUPS if g != "all") == found["all"].numel()
    assert found["all"].numel() == sum(p.numel() for p in model.parameters())
    assert kept == {}


def test_draws_differ_and_a_number_repeats_one(model):
    arm = Arm.from_dict({"rate": 0.5})
    first, second, again = (gradient.gradient(model, arm, n, batch())[0] for n in (1, 2, 1))
    assert not torch.equal(first["down"], second["down"])
    assert torch.equal(first["down"], again["down"])


def test_the_study_writes_a_row_per_step_and_arm_and_continues(tmp_path, capsys):
    path, grid = tmp_path / "rows.jsonl", tmp_path / "grid.yaml"
    study = {
        "name": "tiny",
        "protocol": {**PROTOCOL, "validation_blocks": 16},
        "at_steps": [0, 4],
        "batches": 4,
        "draws": 4,
        "arms": ARMS,
    }
    grid.write_text(yaml.safe_dump({"arm_defaults": {}, "gradient": [study]}))
    arguments = ["--grid", str(grid), "--rows", str(path), "--cache", str(tmp_path)]
    assert gradient.main(arguments) == 0
    found = lines(path)
    places = [(r["step"], r["arm"]) for r in found]
    arms = ("top C50", "sampled C50", "sampled C50 draw=forward")
    assert places == [(step, arm) for step in (0, 4) for arm in arms]
    for row in found:
        for values in row["groups"].values():
            numbers = [v for v in values.values() if isinstance(v, float)]
            assert all(map(math.isfinite, numbers))
        assert len(row["kept_by_token_loss"]) == 4
    top, sampled = found[0]["groups"]["down"], found[1]["groups"]["down"]
    # `top` draws nothing: the mean of its draws is no better than one.
    assert top["error_mean_draw"] == pytest.approx(top["error_draw"])
    assert sampled["error_mean_draw"] < 0.8 * sampled["error_draw"]
    assert top["bias"] > 2 * sampled["bias"]

    path.write_text("".join(json.dumps(row) + "\n" for row in found[:4]))
    assert gradient.main(arguments) == 0
    assert [(r["step"], r["arm"]) for r in lines(path)] == places
    assert lines(path)[4]["groups"] == found[4]["groups"]
    capsys.readouterr()


def test_batches_are_held_out_and_disjoint():
    study = GradientStudy(
        name="g", protocol=protocol(), at_steps=(0,), batches=4, arms=(Arm.from_dict(ARMS[1]),)
    )
    text = study_text(study.protocol)
    batches = gradient._held_out(study, text)
    rows = [tuple(block.tolist()) for ids in batches for block in ids]
    assert len(rows) == 8
    held_out = {tuple(text.validation[i]["input_ids"].tolist()) for i in range(16)}
    assert set(rows) <= held_out
    few = GradientStudy(
        name="g", protocol=protocol(), at_steps=(0,), batches=32, arms=(Arm.from_dict(ARMS[1]),)
    )
    with pytest.raises(ValueError, match="batches=32: needs 64 blocks"):
        gradient._held_out(few, text)
