import pytest
import torch
import yaml
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lrmoe.studies import skewed_worker, time_to_loss
from lrmoe.studies.grid import DEFAULT_GRID
from lrmoe.training.presets import preset_config
from tests.studies.grids import MODEL, lines


def evaluations(*losses):
    return [
        {"step": 10 * (i + 1), "val_loss": loss, "moe_ms_total": 5.0 * (i + 1), "train_s": i + 1.0}
        for i, loss in enumerate(losses)
    ]


def test_a_target_is_reached_on_the_line_between_two_smoothed_evaluations():
    # Smoothed: 4, 3.5, 3, 2.
    found = time_to_loss.reached(evaluations(4.0, 3.0, 2.0, 1.0), 2.75)
    assert found["steps_to_target"] == pytest.approx(32.5)
    assert found["ms_to_target"] == pytest.approx(16.25)
    assert found["s_to_target"] == pytest.approx(3.25)


def test_a_lucky_evaluation_does_not_count_alone():
    found = time_to_loss.reached(evaluations(4.0, 4.0, 1.9, 4.0), 2.0)
    assert found == {
        "target_loss": 2.0,
        "ms_to_target": None,
        "steps_to_target": None,
        "s_to_target": None,
    }


def test_a_target_below_the_first_evaluation_has_its_time():
    assert time_to_loss.reached(evaluations(2.0, 1.0), 3.0)["steps_to_target"] == 10


def test_the_forcing_is_1_8_on_two_ranks_and_differentiable():
    config = preset_config("qwen3-moe-small", MODEL)
    router = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    x_TD = torch.randn(200, 32)
    free = router(x_TD)
    router.register_forward_hook(skewed_worker.force)
    logits_TE, weights_TK, experts_TK = router(x_TD)
    assert torch.equal(logits_TE, free[0])
    load_W = torch.bincount(experts_TK.reshape(-1) // 4, minlength=2).double()
    assert float(load_W.max() / load_W.mean()) == pytest.approx(1.8)
    assert torch.allclose(weights_TK.sum(1), torch.ones(200))
    # Inside a token's half, the choice is the router's own.
    same = (free[2] // 4 == (torch.arange(200) % 10 == 0)[:, None]).all(1)
    assert same.any()
    assert torch.equal(experts_TK[same], free[2][same])
    weights_TK[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_another_family_is_refused():
    with pytest.raises(ValueError, match="Qwen3-MoE models only"):
        skewed_worker.skew(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": [2.0, 3.0]}, "must be losses in falling order"),
        ({"arms": [{"rate": 2.0}]}, "allowed is 0 <= rate < 1"),
        ({"text": "poems"}, "text='poems'"),
        ({"clock": "sun"}, "clock='sun'"),
        ({"target": 3}, "target"),
    ],
)
def test_a_wrong_race_is_named(tmp_path, changes, message):
    values = {"name": "r", "targets": [3.0], "arms": [{"rate": 0.0}], **changes}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"time-to-loss": [values]}))
    with pytest.raises(ValueError, match="race 'r'") as error:
        time_to_loss.read_races(path)
    assert message in str(error.value)


def test_the_committed_races_have_four_targets_and_the_peers():
    for race in time_to_loss.read_races(DEFAULT_GRID):
        assert len(race.targets) == 4
        placements = {arm["placement"] for arm in race.arms if arm["rate"] == 0}
        assert placements == {"fixed", "symi", "ultraep"}


@pytest.mark.dist
def test_a_race_on_two_ranks(tmp_path, capsys):
    race = {
        "name": "tiny",
        "is_skewed": True,
        "clock": "cpu",
        "overrides": MODEL,
        "steps": 6,
        "eval_steps": 2,
        "block_size": 32,
        "validation_blocks": 8,
        "targets": [9.0, 1.0],
        "arms": [{"rate": 0.5}],
    }
    grid, path = tmp_path / "grid.yaml", tmp_path / "rows.jsonl"
    grid.write_text(yaml.safe_dump({"time-to-loss": [race]}))
    arguments = ["--grid", str(grid), "--rows", str(path), "--cache", str(tmp_path)]
    assert time_to_loss.main(arguments) == 0
    first, second = lines(path)
    assert first["arm"] == "fixed rate sampled C50"
    assert first["clock"] == "cpu"
    assert first["ms_to_target"] > 0
    assert second["ms_to_target"] is None
    assert first["moe_ms"] < first["step_ms"]
    assert first["backward_fraction"] == pytest.approx(0.5, abs=0.1)
    before = path.read_text()
    assert time_to_loss.main(arguments) == 0
    assert path.read_text() == before
    assert "fixed rate sampled C50" in capsys.readouterr().out
