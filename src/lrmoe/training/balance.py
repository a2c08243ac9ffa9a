"""GLM's router correction bias, which transformers declares and never updates.

Letters: L = MoE layers, E = experts, T = tokens, K = top-k.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class CorrectionBias:
    """Moves ``e_score_correction_bias`` towards a balanced load, once per optimizer step.

    ``bias += rate * sign(mean load - load)``, where the load of an expert is the number of pairs
    routed to it on all data-parallel ranks and in all micro-batches of the step, padding left out.
    Evaluation, and the recomputation that activation checkpointing does inside the backward pass,
    are not counted.

    Args:
        model: any causal language model; routers without the bias are left alone.
        rate: step of the update; 0 counts nothing.
    """

    def __init__(self, model: nn.Module, rate: float):
        self.rate = rate
        self._routers: list[nn.Module] = []
        self._counts: list[torch.Tensor] = []
        self._kept_T: torch.Tensor | None = None
        if rate == 0:
            return
        for module in model.modules():
            bias = getattr(module, "e_score_correction_bias", None)
            if isinstance(bias, torch.Tensor):
                counts = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
                self._routers.append(module)
                self._counts.append(counts)
                module.register_forward_hook(self._counter(counts))
        if self._routers:
            model.register_forward_pre_hook(self._remember_padding, with_kwargs=True)

    def _remember_padding(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        mask = kwargs.get("attention_mask")
        self._kept_T = None
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._kept_T = mask.reshape(-1).bool()

    def _counter(self, counts_E: torch.Tensor) -> Any:
        def count(router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
            # A graph task is running exactly when this forward is a recomputation.
            if not router.training or torch._C._current_graph_task_id() != -1:
                return
            expert_ids_TK = output[2]
            if self._kept_T is not None:
                expert_ids_TK = expert_ids_TK[self._kept_T]
            ids = expert_ids_TK.reshape(-1)
            counts_E.scatter_add_(0, ids, torch.ones_like(ids))

        return count

    @torch.no_grad()
    def update(self) -> None:
        """Applies the counts since the last call. Collective: every rank calls it."""
        if not self._routers:
            return
        load_LE = torch.stack(self._counts)
        if dist.is_initialized():
            dist.all_reduce(load_LE)
        mean_L1 = load_LE.double().mean(dim=1, keepdim=True)
        moves_LE = (mean_L1 - load_LE).sign()
        for router, counts_E, move_E in zip(self._routers, self._counts, moves_LE, strict=True):
            bias_E = router.get_buffer("e_score_correction_bias")
            bias_E.add_(move_E.to(bias_E.dtype), alpha=self.rate)
            counts_E.zero_()
