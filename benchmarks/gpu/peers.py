"""Other implementations of the same layer, where they can be imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.problems import Problem
from benchmarks.gpu.reference import experts_loop

Forward = Callable[[], torch.Tensor]


def make_peers(problem: Problem) -> tuple[dict[str, Forward], dict[str, str]]:
    """Forward passes on the problem's own tensors by name, and why others are not measured."""
    found: dict[str, Forward] = {"loop": lambda: experts_loop(*problem.arguments())}
    missing = {}
    try:
        found["hf_grouped_mm"] = _transformers(problem)
    except Exception as error:  # whatever an older transformers raises, or its absence
        missing["hf_grouped_mm"] = f"{type(error).__name__}: {error}"
    for package in ("sonicmoe", "scattermoe"):
        is_there = find_spec(package) is not None
        missing[package] = f"{'importable' if is_there else 'not importable'}; no arm is written"
    return found, missing


def _transformers(problem: Problem) -> Forward:
    """Hugging Face's experts with their ``grouped_mm`` implementation, unchanged."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    size = problem.size
    config = Qwen3MoeConfig(
        hidden_size=size.hidden,
        moe_intermediate_size=size.ffn,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
    )
    config._experts_implementation = "grouped_mm"
    # On the meta device first: the module would initialise what is replaced here.
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)
    # The very same tensors, so that gradients are compared and cleared alike.
    for name, leaf in (("gate_up_proj", problem.gate_up_e2FD), ("down_proj", problem.down_eDF)):
        del module._parameters[name]
        setattr(module, name, leaf)
    return lambda: module(problem.x_TD, problem.expert_TK, problem.p_TK)
