"""What the trainer changes in Hugging Face's: loss, logs. One rank, in this process."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lrmoe.training import job
from lrmoe.training.presets import preset_config
from lrmoe.training.ranks import Ranks
from lrmoe.training.trainer import MoETrainer
from tests.train.runs import TINY, with_
from tests.train.test_presets import GLM_TINY

pytestmark = pytest.mark.usefixtures("_without_images")


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_auxiliary_loss_keeps_its_weight(accumulation, num_ranks, monkeypatch):
    config = preset_config("qwen3-moe-small", {**TINY, "router_aux_loss_coef": 0.5})
    model = AutoModelForCausalLM.from_config(config).train()
    trainer = MoETrainer.__new__(MoETrainer)
    trainer.model = model
    trainer.ranks = Ranks(1)
    trainer.ranks.world_size = num_ranks
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.args = type("Args", (), {"average_tokens_across_devices": True, "n_gpu": 0})()
    trainer.accelerator = type(
        "Accelerator", (), {"num_processes": num_ranks, "parallelism_config": None}
    )()
    trainer.label_smoother = trainer.compute_loss_func = None
    trainer.model_accepts_loss_kwargs = True
    monkeypatch.setattr(MoETrainer, "get_tp_size", lambda self: 1)
    ids = torch.randint(0, 256, (2, 16))
    num_items = torch.tensor(2 * 15 * accumulation * num_ranks)
    inputs = {"input_ids": ids, "labels": ids}

    loss, outputs = trainer.compute_loss(model, inputs, True, num_items)
    # Trainer scales the model's own loss in place.
    share = outputs.loss / num_ranks - 0.5 * outputs.aux_loss
    assert outputs.aux_loss > 0.1
    expected = num_ranks * share + 0.5 * outputs.aux_loss / accumulation
    torch.testing.assert_close(loss, expected)

    model.eval()
    with torch.no_grad():
        language_loss = trainer.compute_loss(model, inputs)
    torch.testing.assert_close(language_loss, share * accumulation * num_ranks)


def test_glm_trains_with_its_bias_and_activation_checkpointing(tiny, tmp_path):
    model = {"preset": "glm4-moe-small", "overrides": GLM_TINY, "correction_bias_rate": 0.25}
    training = {"max_steps": 3, "activation_checkpointing": True, "logging_steps": 1}
    settings = with_(replace(tiny, run_dir=str(tmp_path / "run")), model=model, training=training)
    summary = job.run(settings).summary
    assert math.isfinite(summary["val_loss"])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    (bias,) = (b for n, b in trained.named_buffers() if n.endswith("e_score_correction_bias"))
    # Three updates of a quarter: exact in float32, and odd multiples or zero moves.
    assert bias.abs().max() <= 0.75
    assert torch.equal(bias * 4, (bias * 4).round())
    assert bias.any()


def test_a_checkpoint_directory_is_trained_on(tiny, tmp_path):
    first = with_(replace(tiny, run_dir=str(tmp_path / "a")), training={"max_steps": 2})
    job.run(first)
    second = with_(
        replace(tiny, run_dir=str(tmp_path / "b")),
        model={"path": str(tmp_path / "a/final"), "overrides": {}},
        training={"max_steps": 1, "learning_rate": 0.0, "weight_decay": 0.0, "eval_steps": 1},
    )
    job.run(second)
    states = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "final").state_dict()
        for name in ("a", "b")
    ]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
