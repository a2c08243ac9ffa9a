"""One rank of a training run whose routing is forced onto the experts of the first rank.

Nine tokens of ten choose among the lower half of the experts, the others among the upper half: on
two ranks the busier one has 1.8 times the mean load in every layer and step, whatever the router
learns. The forcing is the same in training and in evaluation.

Shape letters: T = tokens, E = experts, K = top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from lrmoe.training import job, worker

_COLD_PERIOD = 10  # every tenth token goes to the colder half


def force(router: Any, arguments: Any, output: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """A forward hook for Qwen3-MoE's router: choice and weights within the token's half."""
    logits_TE = output[0]
    T, E = logits_TE.shape
    is_cold_T1 = (torch.arange(T, device=logits_TE.device) % _COLD_PERIOD == 0)[:, None]
    is_upper_E = torch.arange(E, device=logits_TE.device) >= E // 2
    closed_TE = is_cold_T1 != is_upper_E
    probabilities_TE = logits_TE.float().masked_fill(closed_TE, float("-inf")).softmax(dim=-1)
    weights_TK, experts_TK = probabilities_TE.topk(router.top_k, dim=-1)
    if router.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return logits_TE, weights_TK.to(logits_TE.dtype), experts_TK


def skew(model: torch.nn.Module) -> None:
    """Forces the routing of every MoE layer of a Qwen3-MoE model.

    Raises:
        ValueError: for another family of models.
    """
    routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
    if not routers:
        raise ValueError(f"{type(model).__name__}: skew is forced on Qwen3-MoE models only")
    for router in routers:
        router.register_forward_hook(force)


@record
def main() -> None:
    """Trains as ``lrmoe.training.worker`` does, with every model loaded skewed."""
    load_model = job.load_model

    def load_skewed(*arguments: Any) -> torch.nn.Module:
        model = load_model(*arguments)
        skew(model)
        return model

    setattr(job, "load_model", load_skewed)  # noqa: B010 (a type checker refuses the assignment)
    worker.main()


if __name__ == "__main__":
    main()
