"""Pairs sorted by expert, the unique token rows that feed them, and the two orders a rank sees.

Shape letters: T = tokens, K = top-k, N = T * K pairs, P = a subset of them, U = unique token rows,
W = ranks, V = instances (rank-major), e = instances on this rank, R = rows after dispatch.

A source sends its pairs by instance; instances are rank-major, so each destination's pairs are one
run (the *message*). The receiver sees messages from every source, each ordered by instance, and
reads them instance-major, which is what a grouped GEMM takes:

    message order:         (rank 0: i0 i0 i1) (rank 1: i0 i1 i1)
    instance-major order:  (i0: r0 r0 r1)     (i1: r0 r1 r1)

With home experts only, instances are experts, and expert-major order is the message order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lrmoe.kernels.ops import define
from lrmoe.planner.problem import Int, Plan
from lrmoe.select import blocks, spread
from lrmoe.upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTable:
    """This rank's pairs in expert-major order, pairs of one expert in ascending (token, slot)."""

    flat_N: torch.Tensor  # int64 position of the pair in the flattened [T, K]
    token_N: torch.Tensor  # int64
    top_k_index_TK: torch.Tensor
    sorted_N: torch.Tensor | None = None  # the experts, where they were just sorted
    count_B: torch.Tensor | None = None  # int64 [E + 2], pairs by ``expert + 1``; likewise

    @property
    def expert_N(self) -> torch.Tensor:
        """int64; -1 for an id below those of the experts, E for one above."""
        if self.sorted_N is not None:
            return self.sorted_N
        return self.top_k_index_TK.reshape(-1)[self.flat_N].long()

    @property
    def ends_E(self) -> torch.Tensor:
        """Inclusive ends of the experts' runs, int32."""
        assert self.count_B is not None
        return self.count_B[1:-1].cumsum(0, dtype=torch.int32)


def sort_pairs(top_k_index_TK: torch.Tensor, num_experts: int) -> PairTable:
    """The pairs of a routing result, sorted by expert; first and last those of no expert."""
    flat_N, sorted_N, count_B = counting_sort(top_k_index_TK.reshape(-1), num_experts)
    return PairTable(
        flat_N=flat_N,
        token_N=_tokens(flat_N, top_k_index_TK),
        top_k_index_TK=top_k_index_TK,
        sorted_N=sorted_N,
        count_B=count_B,
    )


def restore_pairs(flat_N: torch.Tensor, top_k_index_TK: torch.Tensor) -> PairTable:
    """The table whose order, all ids being valid, was kept."""
    flat_N = flat_N.long()
    token_N = _tokens(flat_N, top_k_index_TK)
    return PairTable(flat_N=flat_N, token_N=token_N, top_k_index_TK=top_k_index_TK)


def _tokens(flat_N: torch.Tensor, top_k_index_TK: torch.Tensor) -> torch.Tensor:
    return flat_N // max(top_k_index_TK.shape[1], 1)


def _fake_sort(
    ids_N: torch.Tensor, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order_N, sorted_N = (ids_N.new_empty(ids_N.shape, dtype=torch.int64) for _ in range(2))
    return order_N, sorted_N, order_N.new_empty(num_ids + 2)


@define("pairs_triton", fake=_fake_sort)
def counting_sort(
    ids_N: torch.Tensor, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions in ascending order of the ids, stable; the ids in that order; how many of each.

    Ids below 0 count as -1, those from ``num_ids`` on as ``num_ids``.

    Args:
        ids_N: of any integer dtype but the wide unsigned ones.

    Returns:
        int64 [N], int64 [N], and int64 ``[num_ids + 2]``, by ``id + 1``.
    """
    if ids_N.dtype != torch.int64:  # others may have no -1 or no num_ids
        ids_N = ids_N.to(torch.int32)
    # Clamped before the cast: an id beyond int32 must not become another one.
    found = torch.sort(ids_N.clamp(-1, num_ids).to(torch.int32), stable=True)
    sorted_N = found.values.long()
    return found.indices, sorted_N, count(sorted_N + 1, num_ids + 2)


def count(ids_N: torch.Tensor, num_ids: int) -> torch.Tensor:
    """How often each id occurs, int64 [num_ids]; ``bincount`` would sync the device."""
    return ids_N.new_zeros(num_ids).index_add_(0, ids_N, torch.ones_like(ids_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOrder:
    """The order in which this rank sends its pairs (or some of them): by instance."""

    pair_M: torch.Tensor | None  # int64 place in expert-major order; None: the same order
    rank_M: torch.Tensor  # int64 destination

    def to_message(self, values_N: torch.Tensor) -> torch.Tensor:
        """Expert-major order -> the order of sending."""
        return values_N if self.pair_M is None else values_N[self.pair_M]


def to_expert_major(values_M: torch.Tensor, pair_M: torch.Tensor | None) -> torch.Tensor:
    """The order of sending -> expert-major order, :attr:`MessageOrder.pair_M` being the first."""
    if pair_M is None:
        return values_M
    return torch.empty_like(values_M).index_copy_(0, pair_M, values_M)


def forward_instances(plan: Plan, pairs_V: Int, device: torch.device) -> torch.Tensor | None:
    """The instance of each of a rank's pairs in the forward pass, int64 [N]; ``None``: its expert.

    The pairs of an expert go to its instances in runs, in instance order.
    """
    if plan.is_home_only:
        return None
    by_expert_V = np.argsort(plan.instance_expert_V, kind="stable")
    return spread(by_expert_V, pairs_V[by_expert_V], device)


def message_order(
    plan: Plan, instance_N: torch.Tensor | None, pairs_V: Int, device: torch.device
) -> MessageOrder:
    """The order of sending for pairs with these instances, ``pairs_V`` of each (host)."""
    pair_M = None if instance_N is None else counting_sort(instance_N, len(plan.instance_rank_V))[0]
    if len(plan.forward_WV) == 1:
        rank_M = torch.zeros(int(pairs_V.sum()), dtype=torch.int64, device=device)
    else:
        rank_M = spread(plan.instance_rank_V, pairs_V, device)
    return MessageOrder(pair_M=pair_M, rank_M=rank_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """The rows a rank sends: every token once per destination that needs it."""

    token_U: torch.Tensor  # int64, destination-major, ascending inside a destination
    row_P: torch.Tensor  # int32, for each pair its row inside the message


def count_token_rows(
    token_P: torch.Tensor,
    rank_P: torch.Tensor,
    num_tokens: int,
    num_ranks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token goes to which rank: bool [W, T], and the number of rows per rank, int64 [W]."""
    needed_WT = torch.zeros(num_ranks, num_tokens, dtype=torch.bool, device=token_P.device)
    needed_WT[rank_P, token_P] = True
    return needed_WT, needed_WT.sum(1)


def token_rows(
    needed_WT: torch.Tensor, token_P: torch.Tensor, rank_P: torch.Tensor, rows_W: Int
) -> TokenRows:
    """Lay the needed rows out by destination.

    Args:
        rows_W: host row counts of the payload. Larger than the number of needed rows where they are
            a bound (at most the tokens): the rows beyond are padding that no pair names.
    """
    start_W = upload(rows_W.cumsum() - rows_W, token_P.device)
    token_U, row_P = list_rows(needed_WT, start_W, token_P, rank_P, int(rows_W.sum()))
    return TokenRows(token_U=token_U, row_P=row_P)


@define(
    "pairs_triton",
    fake=lambda needed_WT, start_W, token_P, rank_P, total: (
        token_P.new_empty(total),
        torch.empty_like(token_P, dtype=torch.int32),
    ),
)
def list_rows(
    needed_WT: torch.Tensor,
    start_W: torch.Tensor,
    token_P: torch.Tensor,
    rank_P: torch.Tensor,
    total: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row, int64 ``[total]``, and each pair's row in its message, int32 [P].

    Args:
        needed_WT: bool, whether a rank needs a token.
        start_W: int64, where the rows of each rank begin: no more than tokens. Rows that are not
            needed name tokens that are not, so that a rank has no token twice.
    """
    needed_W1 = needed_WT.sum(1, keepdim=True)
    row_WT = torch.where(needed_WT, needed_WT.cumsum(1), needed_W1 + (~needed_WT).cumsum(1)) - 1
    size_W = start_W.diff(append=start_W.new_full((1,), total))
    # Tokens without a row all write to one place past the end.
    place_WT = torch.where(row_WT < size_W[:, None], row_WT + start_W[:, None], total)
    token_WT = torch.arange(needed_WT.shape[1], device=token_P.device).expand_as(needed_WT)
    token_U = token_P.new_empty(total + 1)
    token_U[place_WT.reshape(-1)] = token_WT.reshape(-1)
    return token_U[:total].clone(), row_WT[rank_P, token_P].to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOrder:
    """How this rank reads the pairs it received: from message order to expert-major order."""

    message_R: torch.Tensor | None  # int64 place in message order; None: already expert-major
    row_shift_R: torch.Tensor | None  # int32, start of the source's rows; None: one source
    offsets_e: torch.Tensor  # int32, inclusive ends of the instances

    def to_expert_major(self, values_R: torch.Tensor) -> torch.Tensor:
        """Message order -> expert-major order."""
        return values_R if self.message_R is None else values_R[self.message_R]

    def to_message(self, values_R: torch.Tensor) -> torch.Tensor:
        """Expert-major order -> message order."""
        if self.message_R is None:
            return values_R
        return torch.empty_like(values_R).index_copy_(0, self.message_R, values_R)


def arrival_order(pairs_We: Int, rows_W: Int, device: torch.device) -> ArrivalOrder:
    """The order for ``pairs_We[source, instance]`` received pairs and ``rows_W`` received rows."""
    ends_e = upload(pairs_We.sum(0).cumsum().astype(np.int32), device)
    if len(pairs_We) == 1:
        return ArrivalOrder(message_R=None, row_shift_R=None, offsets_e=ends_e)
    flat = pairs_We.reshape(-1)
    start_We = (flat.cumsum() - flat).reshape(pairs_We.shape)
    length_b = np.ascontiguousarray(pairs_We.T).reshape(-1)  # blocks in expert-major order
    num_instances = pairs_We.shape[1]
    row_start_b = np.tile((rows_W.cumsum() - rows_W).astype(np.int32), num_instances)
    return ArrivalOrder(
        message_R=blocks(np.ascontiguousarray(start_We.T).reshape(-1), length_b, device),
        row_shift_R=spread(row_start_b, length_b, device),
        offsets_e=ends_e,
    )
