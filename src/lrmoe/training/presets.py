"""Small Mixture-of-Experts models, made from the real architectures' configs.

The sizes let the default job (two ranks on one thread each) finish in about two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Glm4MoeConfig, PreTrainedConfig, Qwen3MoeConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen3_moe_small() -> PreTrainedConfig:
    """Qwen3-MoE: 4 layers, hidden size 128, 32 experts of width 64, top-4, auxiliary loss on."""
    return Qwen3MoeConfig(
        **_COMMON,
        num_experts=32,
        intermediate_size=256,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.001,
        output_router_logits=True,
    )


def glm4_moe_small() -> PreTrainedConfig:
    """GLM-4-MoE: one dense layer and three MoE layers, 32 experts and a shared one, top-4."""
    return Glm4MoeConfig(
        **_COMMON,
        n_routed_experts=32,
        n_shared_experts=1,
        intermediate_size=256,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    )


PRESETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-moe-small": qwen3_moe_small,
    "glm4-moe-small": glm4_moe_small,
}


def preset_config(name: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """The config of a preset with some fields changed.

    Raises:
        ValueError: for an unknown preset or an override that the config does not have.
    """
    if name not in PRESETS:
        raise ValueError(f"model.preset={name!r}: allowed are {', '.join(map(repr, PRESETS))}")
    config = PRESETS[name]()
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise ValueError(
                f"model.overrides.{key}={value!r}: {type(config).__name__} has no such field"
            )
        setattr(config, key, value)
    return config
