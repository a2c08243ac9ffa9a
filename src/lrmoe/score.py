"""How much a token-expert pair matters: the load recalibration metric and the control scores.

All scores are float32 (float64 for float64 gradients), never negative, and only compared inside one
expert. Shape letters: T = tokens, D = model dim, N = pairs in expert-major order.
"""

from __future__ import annotations

import torch


def lrm(p_N: torch.Tensor, grad_norm_sq_N: torch.Tensor, h_norm_sq_N: torch.Tensor) -> torch.Tensor:
    """``p^2 |G|^2 |h|^2``: the squared Frobenius norm of the pair's own term in dL/dW_down.

    LRMoE (arXiv 2610.37720), section 3.2 and appendix 7.1. Exact for one pair and this projection.
    """
    return p_N.square() * grad_norm_sq_N * h_norm_sq_N


def control_score(
    rule: str,
    p_N: torch.Tensor,
    grad_norm_sq_N: torch.Tensor,
    h_norm_sq_N: torch.Tensor,
    token_loss_N: torch.Tensor | None,
    generator: torch.Generator,
) -> torch.Tensor:
    """What the rule ranks pairs by, higher is kept; ``sampled`` draws by the LRM too."""
    if rule in ("top", "sampled"):
        return lrm(p_N, grad_norm_sq_N, h_norm_sq_N)
    if rule == "random":
        return torch.rand(p_N.shape, generator=generator, device=p_N.device, dtype=torch.float32)
    if rule == "random_unbiased":
        return torch.zeros_like(p_N)
    if rule == "gradient":
        return grad_norm_sq_N.sqrt()
    if rule == "weighted_gradient":
        return p_N.abs() * grad_norm_sq_N.sqrt()
    if rule == "router":
        return p_N.abs()
    assert rule == "token_loss", rule
    assert token_loss_N is not None
    return token_loss_N
