"""Other implementations of the same layer, where they can be imported.

The arms of the two packages were written from what these document; they have not run on a card yet:

- SonicMoE: sonic-moe 0.1.2.post1, which asks for Hopper or Blackwell, CUDA 12.9 and PyTorch 2.7.1
  to 2.9.1. Its first call of a shape tries many kernels (results stay on disk).
- ScatterMoE: scattermoe 0.3.0 (commit 2d15f31), Triton kernels, which names no versions.

Shape letters: T = tokens, D = model dim, F = expert width, E = experts, K = top-k, N = T * K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.problems import Problem
from benchmarks.gpu.reference import experts_loop

Forward = Callable[[], torch.Tensor]


def make_peers(problem: Problem) -> tuple[dict[str, Forward], dict[str, str]]:
    """Forward passes on the problem's own tensors by name, and why one is not measured."""
    found: dict[str, Forward] = {"loop": lambda: experts_loop(*problem.arguments())}
    missing = {}
    try:
        found["hf_grouped_mm"] = _transformers(problem)
    except Exception as error:  # whatever an older transformers raises, or its absence
        missing["hf_grouped_mm"] = f"{type(error).__name__}: {error}"
    return found, missing


def make_packages(problem: Problem) -> tuple[dict[str, tuple[Forward, Problem]], dict[str, str]]:
    """Packages' forward passes, each with the problem in its layout, and why others are missing."""
    found, missing = {}, {}
    for name, make in PACKAGES.items():
        try:
            found[name] = make(problem)
        except Exception as error:  # no package, one that does not load here, or another interface
            missing[name] = why_missing(name, error)
    return found, missing


def why_missing(name: str, error: Exception) -> str:
    """What a row says of a package that raised."""
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return "not importable"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
    _put(module, "gate_up_proj", problem.gate_up_e2FD)
    _put(module, "down_proj", problem.down_eDF)
    return lambda: module(problem.x_TD, problem.expert_TK, problem.p_TK)


def _put(module: torch.nn.Module, name: str, leaf: torch.Tensor) -> None:
    """The very tensor instead of a parameter, so that gradients are compared and cleared alike."""
    del module._parameters[name]
    setattr(module, name, leaf)


def _sonicmoe(problem: Problem) -> tuple[Forward, Problem]:
    """SonicMoE's layer for routing that is given; rows of gate and up take turns, gate first.

    Its path for a fixed number of experts per token routes by itself, so it cannot be had here.
    """
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    size = problem.size
    own = problem.with_rows(torch.arange(2 * size.ffn).view(2, size.ffn).t().reshape(-1))
    expert_N = own.expert_TK.reshape(-1).int()
    # Pairs by token, ascending, as its sums need them.
    token_N = torch.arange(size.tokens, device=expert_N.device, dtype=torch.int32)
    token_N = token_N.repeat_interleave(size.top_k)

    def forward() -> torch.Tensor:
        # Weights with the experts as the last dimension, in unchanged memory.
        output_TD, _ = moe_general_routing_inputs(
            x=own.x_TD,
            router_scores=own.p_TK.reshape(-1),
            token_indices=token_N,
            expert_indices=expert_N,
            w1=own.gate_up_e2FD.permute(1, 2, 0),
            b1=None,
            w2=own.down_eDF.permute(1, 2, 0),
            b2=None,
            E=size.experts,
            stream_id=None,  # read by no kernel of that version
            activation_type=ActivationType.SWIGLU,
        )
        return output_TD

    return forward, own


def _scattermoe(problem: Problem) -> tuple[Forward, Problem]:
    """ScatterMoE's gated experts, unchanged; its first F rows are up, the others gate."""
    from scattermoe import mlp

    size = problem.size
    own = problem.with_rows(torch.arange(2 * size.ffn).roll(size.ffn))
    with torch.device("meta"):
        module: Any = mlp.GLUMLP(size.hidden, size.ffn, size.experts, size.top_k)
    _put(module.experts, "weight", own.gate_up_e2FD)
    _put(module.output_experts, "weight", own.down_eDF)
    return lambda: module(own.x_TD, own.p_TK, own.expert_TK), own


PACKAGES: dict[str, Callable[[Problem], tuple[Forward, Problem]]] = {
    "sonicmoe": _sonicmoe,
    "scattermoe": _scattermoe,
}
