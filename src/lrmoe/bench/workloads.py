"""Routing results whose load is uneven in one known way each; no processes, same on every rank.

The families and their names are those of NVIDIA/Megatron-LM's pull request 7488, so that numbers
can be laid side by side. Shape letters: T = tokens of all ranks, E = experts, K = top-k, W = ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# W1: an eighth of the experts takes half of the pairs.
_HOT_EXPERTS = 1 / 8
_HOT_SHARE = 1 / 2
# W4: every rank has this many times the tokens of the next one.
_RAGGED = 3
# A shift of a logit beyond which every token picks the shifted experts first.
_LARGEST_SHIFT = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a workload depends on besides its seed."""

    ranks: int
    tokens: int  # per rank, on average
    experts: int
    top_k: int
    imbalance: float
    empty_source: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of every rank go."""

    expert_TK: torch.Tensor  # int64
    weight_TK: torch.Tensor  # float32, sums to 1 per token
    tokens_W: list[int]

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights of one rank's tokens."""
        start = sum(self.tokens_W[:rank])
        mine = slice(start, start + self.tokens_W[rank])
        return self.expert_TK[mine].clone(), self.weight_TK[mine].clone()

    def home_pairs(self, num_experts: int) -> torch.Tensor:
        """Pairs by the rank that holds their expert, int64 [W]."""
        counts_E = torch.bincount(self.expert_TK.flatten(), minlength=num_experts)
        return counts_E.view(len(self.tokens_W), -1).sum(1)


def balanced(logits_TE: torch.Tensor, shape: Shape) -> torch.Tensor:
    """W0: every expert is equally likely."""
    return logits_TE


def hot_experts(logits_TE: torch.Tensor, shape: Shape) -> torch.Tensor:
    """W1: the first eighth of the experts takes half of the pairs."""
    num_hot = max(shape.top_k, int(shape.experts * _HOT_EXPERTS))
    return _heated(logits_TE, num_hot, _HOT_SHARE, shape.top_k)


def hot_rank(logits_TE: torch.Tensor, shape: Shape) -> torch.Tensor:
    """W2: rank 0's experts, all alike, take ``imbalance`` times the mean of the ranks."""
    return _heated(
        logits_TE, shape.experts // shape.ranks, shape.imbalance / shape.ranks, shape.top_k
    )


def idle_experts(logits_TE: torch.Tensor, shape: Shape) -> torch.Tensor:
    """W5: every second expert gets no pair, and neither does the last of several ranks."""
    per_rank = shape.experts // shape.ranks
    idle_E = torch.arange(shape.experts) % 2 == 1
    if shape.ranks > 1:
        idle_E[-per_rank:] = True
    return logits_TE.masked_fill(idle_E, float("-inf"))


# W4 is balanced over the experts; what differs is who holds the tokens.
WORKLOADS: dict[str, Callable[[torch.Tensor, Shape], torch.Tensor]] = {
    "W0": balanced,
    "W1": hot_experts,
    "W2": hot_rank,
    "W4": balanced,
    "W5": idle_experts,
}


def route(workload: str, shape: Shape, seed: int) -> Routing:
    """The routing of all ranks: a function of its arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = shape.ranks * shape.tokens
    logits_TE = torch.randn(num_tokens, shape.experts, generator=generator)
    logits_TE = WORKLOADS[workload](logits_TE, shape)
    top_TK, expert_TK = logits_TE.topk(shape.top_k)
    is_ragged = workload == "W4"
    return Routing(
        expert_TK=expert_TK,
        weight_TK=top_TK.softmax(1),
        tokens_W=_ragged(shape) if is_ragged else [shape.tokens] * shape.ranks,
    )


def largest_imbalance(ranks: int, experts: int, top_k: int) -> float:
    """The imbalance when every token goes to as many experts of one rank as it can."""
    return ranks * min(1.0, experts // ranks / top_k)


def least_experts(ranks: int, top_k: int) -> int:
    """Experts that W5 needs: half of those on all ranks but the last must be ``top_k``."""
    busy_ranks = max(ranks - 1, 1)
    per_rank = -(-2 * top_k // busy_ranks)
    return ranks * (per_rank + per_rank % 2)


def _heated(logits_TE: torch.Tensor, num_hot: int, share: float, top_k: int) -> torch.Tensor:
    """Raise the first experts' logits until they take that share of the pairs.

    The share grows with the shift, so bisection finds it; the logits stay the same throughout.
    """

    def heated(shift: float) -> torch.Tensor:
        return torch.cat([logits_TE[:, :num_hot] + shift, logits_TE[:, num_hot:]], dim=1)

    def realised(shift: float) -> float:
        return float((heated(shift).topk(top_k).indices < num_hot).float().mean())

    low, high = 0.0, _LARGEST_SHIFT
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if realised(middle) < share else (low, middle)
    return heated(high)


def _ragged(shape: Shape) -> list[int]:
    """Very different numbers of tokens per rank, in total as many as elsewhere."""
    total, sources = shape.ranks * shape.tokens, shape.ranks
    if shape.empty_source and sources > 1:
        sources -= 1
    weights = [_RAGGED ** (sources - 1 - rank) for rank in range(sources)]
    tokens = [total * weight // sum(weights) for weight in weights]
    tokens[0] += total - sum(tokens)
    return tokens + [0] * (shape.ranks - sources)
