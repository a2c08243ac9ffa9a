"""The small models and the settings around them."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from lrmoe.training import job
from lrmoe.training.data import load_text
from lrmoe.training.presets import PRESETS, preset_config
from lrmoe.training.run_dir import RunDirectory
from lrmoe.training.settings import ModelSettings, TrainingSettings, TrainSettings
from tests.train.runs import TINY, with_

GLM_TINY = {
    **{k: v for k, v in TINY.items() if k != "num_experts"},
    "n_routed_experts": 8,
}


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_trains(name):
    config = preset_config(name, TINY if name.startswith("qwen3") else GLM_TINY)
    model = AutoModelForCausalLM.from_config(config)
    assert config.model_type in job.MODEL_TYPES
    ids = torch.randint(0, 256, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_qwen3_has_its_auxiliary_loss():
    config = preset_config("qwen3-moe-small", TINY)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 256, (2, 16))
    assert model(input_ids=ids, labels=ids).aux_loss > 0


def test_mistakes_are_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r"model\.preset='gpt2': allowed are 'qwen3-moe-small'"):
        preset_config("gpt2", {})
    with pytest.raises(ValueError, match=r"model\.overrides\.hiden_size=3: Qwen3MoeConfig has no"):
        preset_config("qwen3-moe-small", {"hiden_size": 3})
    with pytest.raises(ValueError, match=r"model\.dtype='float8': allowed are 'float32'"):
        ModelSettings(dtype="float8")
    with pytest.raises(ValueError, match="set exactly one of the two"):
        TrainingSettings(max_steps=3, num_train_epochs=1)
    text = load_text(tiny.data)
    small = with_(tiny, model={"overrides": {**TINY, "vocab_size": 100}})
    with pytest.raises(ValueError, match="has 256 tokens, but the model's vocabulary is 100"):
        job.load_model_config(small, text)
    with pytest.raises(ValueError, match=r"parallel\.ep_size=3: must divide the model's 8 experts"):
        job.load_model_config(with_(tiny, parallel={"ep_size": 3}), text)
    with pytest.raises(ValueError, match=r"must be a directory with a config\.json"):
        job.load_model_config(with_(tiny, model={"path": "nowhere", "overrides": {}}), text)


def test_training_arguments_take_extra_fields_and_refuse_others(tiny, tmp_path):
    directory = RunDirectory(tmp_path)
    arguments = job.training_arguments(
        with_(tiny, training={"extra": {"adam_beta2": 0.95}}), directory
    )
    assert arguments.adam_beta2 == 0.95
    assert arguments.learning_rate == tiny.training.learning_rate
    with pytest.raises(ValueError, match=r"the nearest valid one is 'adam_beta2'"):
        job.training_arguments(with_(tiny, training={"extra": {"adam_betta2": 1}}), directory)
    with pytest.raises(ValueError, match="is set by the run itself"):
        job.training_arguments(with_(tiny, training={"extra": {"save_steps": 1}}), directory)


def test_settings_survive_the_way_through_a_file(tiny):
    schedule = dataclasses.replace(tiny.recalibration, rate=[(0, 0.0), (10, 0.5)])
    settings = dataclasses.replace(tiny, recalibration=schedule)
    assert TrainSettings.from_dict(settings.to_dict()) == settings
