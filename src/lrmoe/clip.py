"""Gradient clipping across parameters that live on different device meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(model: nn.Module | Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their total 2-norm is at most ``max_norm``; the norm before that.

    Experts are sharded over another mesh than the rest, which torch's own clipping cannot span. The
    norm is taken per mesh, reduced over it, and combined: the same factor on every rank. Call it on
    every rank.

    Raises:
        ValueError: if ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r}: must be greater than 0")
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    by_mesh: dict[object, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    if not by_mesh:
        return torch.zeros(())
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
