"""The layer in plain PyTorch, one dense product after the other: reference and baseline.

Shape letters: T = tokens, D = model dim, F = expert width, E = experts, K = top-k.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.gpu.problems import Problem


def experts_loop(
    x_TD: torch.Tensor,
    expert_TK: torch.Tensor,
    p_TK: torch.Tensor,
    gate_up_e2FD: torch.Tensor,
    down_eDF: torch.Tensor,
    weight_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Experts one by one over rows sorted once (one device sync), any dtype.

    Args:
        weight_TK: of each pair in the backward pass, 0 where it is dropped; ``None``: 1.
    """
    T, K = expert_TK.shape
    order = torch.sort(expert_TK.reshape(-1), stable=True).indices
    counts = torch.bincount(expert_TK.reshape(-1), minlength=len(down_eDF)).tolist()
    parts = []
    for e, rows in enumerate(torch.split(x_TD[order // K], counts)):
        gate, up = (rows @ gate_up_e2FD[e].t()).chunk(2, dim=1)
        parts.append((F.silu(gate) * up) @ down_eDF[e].t())
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(T * K, device=x_TD.device))
    y_TKD = torch.cat(parts)[place].view(T, K, -1) * p_TK[:, :, None]
    if weight_TK is not None:
        y_TKD = y_TKD.detach() + weight_TK[:, :, None] * (y_TKD - y_TKD.detach())
    return y_TKD.sum(1).to(x_TD.dtype)


def passes(problem: Problem, weight_TK: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients of the loop."""
    problem.clear()
    output_TD = experts_loop(*problem.arguments(), weight_TK)
    output_TD.backward(problem.grad_TD)
    found = {"output": output_TD.detach(), **problem.gradients()}
    problem.clear()
    return found


def worst_error(
    found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest ``|found - reference| / |reference|`` and whose it is; NaN is infinite."""
    errors = {}
    for name, want in reference.items():
        # One tensor at a time in float64, where the reference is.
        wide, got = want.double(), found[name].to(want.device).double()
        error = float((got - wide).norm() / wide.norm())
        errors[name] = error if math.isfinite(error) else math.inf
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name
