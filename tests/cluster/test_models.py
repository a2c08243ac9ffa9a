"""Shapes of whole models against transformers' own."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

from lrmoe.cluster.models import GLM45_106B_A12B, PRESETS, QWEN3_30B_A3B, from_config, model_shape
from lrmoe.training.presets import PRESETS as SMALL

QWEN3_CONFIG = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
GLM_CONFIG = {
    "hidden_size": 4096, "num_hidden_layers": 46, "first_k_dense_replace": 1,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "intermediate_size": 10_944, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_552, "attention_bias": True,
    "use_qk_norm": False, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def counted(config):
    """Parameters of the experts, and of everything else."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    return experts, sum(p.numel() for p in model.parameters()) - experts


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        (QWEN3_30B_A3B, Qwen3MoeConfig(**QWEN3_CONFIG)),
        (GLM45_106B_A12B, Glm4MoeConfig(**GLM_CONFIG)),
    ],
    ids=["qwen3", "glm"],
)
def test_presets_have_the_parameters_of_the_real_models(preset, config):
    assert (preset.expert_parameters, preset.other_parameters) == counted(config)


@pytest.mark.parametrize("name", SMALL)
def test_saved_configs_are_read(tmp_path, name):
    config = SMALL[name]()
    config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert shape == model_shape(str(tmp_path / "config.json"))
    assert (shape.expert_parameters, shape.other_parameters) == counted(config)
    assert shape.name == tmp_path.name


def test_published_configs_are_the_presets(tmp_path):
    for kind, values, preset in (
        ("qwen3_moe", QWEN3_CONFIG, QWEN3_30B_A3B), ("glm4_moe", GLM_CONFIG, GLM45_106B_A12B),
    ):  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values | {"model_type": kind, "name": "x"}))
        read = model_shape(str(path))
        for name in preset.__slots__:
            if name != "name":
                assert getattr(read, name) == getattr(preset, name), name
    assert model_shape("GLM-4.5-Air") is PRESETS["glm4.5-106b-a12b"]
    # 30.5 and 106 billion, as the names say
    total = QWEN3_30B_A3B.expert_parameters + QWEN3_30B_A3B.other_parameters
    assert total == pytest.approx(30.5e9, rel=0.01)


def test_what_is_missing_or_foreign_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must hold settings by name"),
        ('{"model_type": "llama"}', "model_type='llama': allowed are 'qwen3_moe', 'glm4_moe'"),
        ('{"model_type": "qwen3_moe"}', "must be an integer"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            model_shape(str(path))
    with pytest.raises(ValueError, match="presets are 'qwen3-30b-a3b'"):
        model_shape("qwen9")
    for key in QWEN3_CONFIG:
        values = {"model_type": "qwen3_moe"} | QWEN3_CONFIG
        del values[key]
        if key in ("decoder_sparse_step", "mlp_only_layers", "tie_word_embeddings"):
            from_config(values, "x")
            continue
        with pytest.raises(ValueError, match=f"{key}=None must be an integer"):
            from_config(values, "x")
    with pytest.raises(ValueError, match="mlp_only_layers"):
        from_config({"model_type": "qwen3_moe"} | QWEN3_CONFIG | {"mlp_only_layers": [0]}, "x")
