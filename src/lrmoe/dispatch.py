"""Rows and scalars between the ranks that own tokens and the ranks that own experts.

Shape letters: T = tokens, N = this rank's pairs by instance, P = the kept ones, U = token rows,
R = pairs received, D = model dim, W = ranks, V = instances, e = instances on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrmoe.exchange import Exchange, as_list
from lrmoe.kernels.ops import define
from lrmoe.kernels.rows import gather_rows, sum_rows
from lrmoe.pairs import (
    ArrivalOrder,
    MessageOrder,
    PairTable,
    arrival_order,
    count,
    count_token_rows,
    counting_sort,
    forward_instances,
    message_order,
    to_expert_major,
    token_rows,
)
from lrmoe.planner.problem import Int, Plan
from lrmoe.select import Selection, spread
from lrmoe.state import pairs_by_rank
from lrmoe.upload import upload

_SAVED = ("token_U", "pair_M", "row_P", "coef_P", "rows_slack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Row counts of one exchange, as seen by this rank (host)."""

    send_pairs_W: list[int]
    receive_pairs_W: list[int]
    send_rows_W: Int
    receive_rows_W: Int

    @classmethod
    def of(cls, rank: int, pairs_WW: Int, rows_WW: Int) -> Splits:
        """The counts of this rank from those of all sources (first) and destinations."""
        return cls(
            send_pairs_W=as_list(pairs_WW[rank]),
            receive_pairs_W=as_list(pairs_WW[:, rank]),
            send_rows_W=np.ascontiguousarray(rows_WW[rank]),
            receive_rows_W=np.ascontiguousarray(rows_WW[:, rank]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Token rows and pairs that this rank's experts work on."""

    x_UD: torch.Tensor
    row_R: torch.Tensor  # int32, expert-major
    p_R: torch.Tensor
    order: ArrivalOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The kept pairs as both ends see them, once the sources have told the experts' ranks."""

    token_U: torch.Tensor | None  # source: token of each payload row; None: every token
    pair_M: torch.Tensor | None  # source: order of sending, places among the kept pairs
    row_P: torch.Tensor  # experts: int32 payload row, instance-major
    forward_P: torch.Tensor  # experts: int32 place among the forward pass's pairs; < 0: moved here
    coef_P: torch.Tensor  # experts: routing weight times selection weight
    rows_slack: torch.Tensor | None  # padding rows this rank sends to others; None: none
    num_moved: int  # source: kept pairs that left the instance of their forward pass
    moved_x_UD: torch.Tensor | None  # experts: inputs of the moved pairs' tokens; None: none moved
    moved_row_P: torch.Tensor | None  # experts: int32 row of it, where moved
    kept_WV: Int  # kept pairs of each source at each instance
    splits: Splits
    order: ArrivalOrder  # how the experts' rank reads what it receives for the kept pairs

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the backward pass of a draw in the forward pass still needs, by name."""
        values = {name: getattr(self, name) for name in _SAVED}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def restore(
        cls,
        tensors: dict[str, torch.Tensor],
        kept_WV: Int,
        splits: Splits,
        num_moved: int,
        *,
        here: slice,
    ) -> Announced:
        """The inverse of :meth:`tensors`; the saved state is that of the kept pairs alone.

        Args:
            here: the instances on this rank.
        """
        saved: dict[str, Any] = {name: tensors.get(name) for name in _SAVED}
        order = arrival_order(kept_WV[:, here], splits.receive_rows_W, saved["row_P"].device)
        return cls(
            **saved,
            forward_P=saved["row_P"].new_empty(0),
            num_moved=num_moved,
            moved_x_UD=None,
            moved_row_P=None,
            kept_WV=kept_WV,
            splits=splits,
            order=order,
        )

    def to_kept_order(self, values_M: torch.Tensor) -> torch.Tensor:
        """The order of sending -> the order of the selection."""
        return to_expert_major(values_M, self.pair_M)


def local_instances(plan: Plan, rank: int) -> slice:
    """The run of instances on a rank."""
    first, end = np.searchsorted(plan.instance_rank_V, [rank, rank + 1])
    return slice(int(first), int(end))


def keep_tokens(x_TD: torch.Tensor, p_N: torch.Tensor, pairs: PairTable) -> tuple[Arrived, Splits]:
    """Of one rank, whose tokens are the rows: nothing travels, and nothing is read on the host."""
    order = ArrivalOrder(message_R=None, row_shift_R=None, offsets_e=pairs.ends_E)
    row_R = pairs.token_N.to(torch.int32)
    splits = Splits.of(0, np.array([[len(p_N)]]), np.array([[len(x_TD)]]))
    return Arrived(x_UD=x_TD, row_R=row_R, p_R=p_N, order=order), splits


def send_tokens(
    x_TD: torch.Tensor,
    p_N: torch.Tensor,
    pairs: PairTable,
    sending: MessageOrder,
    plan: Plan,
    splits: Splits,
    exchange: Exchange,
    needed_WT: torch.Tensor | None = None,
) -> tuple[Arrived, torch.Tensor]:
    """Dispatch: a token's row once per rank that computes it, a few bytes for each of its pairs.

    Also returns the token of each row this rank sent, for the way back.

    Args:
        needed_WT: bool, which token goes to which rank, where that is known.
    """
    token_M, p_M = sending.to_message(pairs.token_N), sending.to_message(p_N)
    if needed_WT is None:
        needed_WT, _ = count_token_rows(token_M, sending.rank_M, len(x_TD), exchange.num_ranks)
    rows = token_rows(needed_WT, token_M, sending.rank_M, splits.send_rows_W)
    x_UD = send_rows(x_TD, rows.token_U, splits, exchange)
    notes = exchange.all_to_all(_pack(rows.row_P, p_M), splits.send_pairs_W, splits.receive_pairs_W)
    # Launched while the rows travel.
    here = local_instances(plan, exchange.rank)
    order = arrival_order(plan.forward_WV[:, here], splits.receive_rows_W, x_TD.device)
    row_R, p_R = _unpack(order.to_expert_major(notes), p_N.dtype)
    return Arrived(x_UD=x_UD, row_R=_shifted(row_R, order), p_R=p_R, order=order), rows.token_U


def send_rows(
    rows_TD: torch.Tensor,
    token_U: torch.Tensor | None,
    splits: Splits,
    exchange: Exchange,
) -> torch.Tensor:
    """The tokens' rows to the ranks that need them. With one rank they stay where they are."""
    if token_U is None:
        return rows_TD
    if exchange.num_ranks == 1:  # what is received must not lie in scratch
        return rows_TD[token_U]
    return exchange.all_to_all(
        gather_rows(rows_TD, token_U, "payload"),
        as_list(splits.send_rows_W),
        as_list(splits.receive_rows_W),
    )


def collect_rows(
    rows_UD: torch.Tensor,
    token_U: torch.Tensor | None,
    num_tokens: int,
    splits: Splits,
    exchange: Exchange,
) -> torch.Tensor:
    """Send one row per token back to its source and add up those of every rank -> [T, D]."""
    if token_U is None:
        return rows_UD
    returned_UD = exchange.all_to_all(
        rows_UD, as_list(splits.receive_rows_W), as_list(splits.send_rows_W)
    )
    return sum_rows(returned_UD, token_U, num_tokens, exchange.num_ranks)


def return_pairs(
    values_R: torch.Tensor, order: ArrivalOrder, splits: Splits, exchange: Exchange
) -> torch.Tensor:
    """Send one value (or row) per pair back to its source, in its order of sending."""
    return exchange.all_to_all(
        order.to_message(values_R), splits.receive_pairs_W, splits.send_pairs_W
    )


def announce_kept(
    selection: Selection,
    x_TD: torch.Tensor | None,
    p_N: torch.Tensor,
    pairs: PairTable,
    plan: Plan,
    forward_splits: Splits,
    num_tokens: int,
    rows: str,
    exchange: Exchange,
) -> Announced:
    """Tell the experts' ranks which pairs are kept, with which coefficient, and from which row.

    A pair that leaves the instance of its forward pass takes its token's input along.

    Args:
        x_TD: this rank's tokens; needed where pairs may move.
    """
    if exchange.keeps_rows:
        return _kept_here(selection, p_N, pairs, plan, forward_splits)
    device, rank, num_ranks = p_N.device, exchange.rank, exchange.num_ranks
    pairs_V = plan.forward_WV[rank]
    forward_N = forward_instances(plan, pairs_V, device)
    kept_P = selection.kept_P
    pair_M, is_moved_M, first_pair_M = None, None, None
    if forward_N is None:
        kept_M, instance_M = kept_P, pairs.expert_N[kept_P]
        rank_M = instance_M // (len(plan.quota_E) // num_ranks)
    else:
        first_pair_M = message_order(plan, forward_N, pairs_V, device).pair_M
        instance_P = forward_N[kept_P] if selection.instance_P is None else selection.instance_P
        pair_M = counting_sort(instance_P, len(plan.instance_rank_V))[0]
        kept_M, instance_M = kept_P[pair_M], instance_P[pair_M]
        rank_M = upload(plan.instance_rank_V, device)[instance_M]
        if selection.instance_P is not None:
            is_moved_M = instance_M != forward_N[kept_M]
    token_M = pairs.token_N[kept_M]
    needed_WT, rows_W = count_token_rows(token_M, rank_M, num_tokens, num_ranks)
    moved_M = None if is_moved_M is None else is_moved_M.nonzero().squeeze(1)  # device sync
    moved_WT, moved_rows_W = None, None
    if not plan.is_home_only:
        of = slice(0, 0) if moved_M is None else moved_M
        moved_WT, moved_rows_W = count_token_rows(token_M[of], rank_M[of], num_tokens, num_ranks)
    kept_WV, splits, moved_splits = _backward_splits(
        plan, forward_splits, rows_W, moved_rows_W, instance_M, rows, exchange
    )
    sent = token_rows(needed_WT, token_M, rank_M, splits.send_rows_W)

    message_start_W = upload(np.cumsum([0, *forward_splits.send_pairs_W[:-1]]), device)
    place_M = _places(first_pair_M, kept_M) - message_start_W[rank_M]
    moved_x_UD = None
    if moved_splits is not None:  # on every rank, if a pair moves on any
        assert x_TD is not None
        assert moved_WT is not None
        moved_M = kept_M[:0] if moved_M is None else moved_M
        moved = token_rows(moved_WT, token_M[moved_M], rank_M[moved_M], moved_splits.send_rows_W)
        place_M[moved_M] = -1 - moved.row_P.long()
        moved_x_UD = send_rows(x_TD, moved.token_U, moved_splits, exchange)
    weight_M = selection.weight_P if pair_M is None else selection.weight_P[pair_M]
    notes = exchange.all_to_all(
        _pack(place_M, sent.row_P, p_N[kept_M] * weight_M),
        splits.send_pairs_W,
        splits.receive_pairs_W,
    )
    here = local_instances(plan, rank)
    order = arrival_order(kept_WV[:, here], splits.receive_rows_W, device)
    place_P, row_P, coef_P = _unpack(order.to_expert_major(notes), p_N.dtype)
    forward_P = place_P + _forward_shift(plan.forward_WV[:, here], kept_WV[:, here], device)
    moved_row_P = None
    if moved_splits is not None:
        moved_order = arrival_order(kept_WV[:, here], moved_splits.receive_rows_W, device)
        moved_row_P = _shifted(-1 - place_P, moved_order)
        forward_P = torch.where(place_P < 0, -1, forward_P)
    return Announced(
        token_U=sent.token_U,
        pair_M=pair_M,
        row_P=_shifted(row_P, order),
        forward_P=forward_P,
        coef_P=coef_P,
        splits=splits,
        order=order,
        kept_WV=kept_WV,
        num_moved=0 if moved_M is None else len(moved_M),
        moved_x_UD=moved_x_UD,
        moved_row_P=moved_row_P,
        # Stays on the device: nothing waits for it before the report does.
        rows_slack=int(rows_to_others(splits.send_rows_W, rank)) - rows_to_others(rows_W, rank),
    )


def _kept_here(
    selection: Selection,
    p_N: torch.Tensor,
    pairs: PairTable,
    plan: Plan,
    forward_splits: Splits,
) -> Announced:
    """Of one rank, whose tokens are the rows: nothing travels."""
    assert plan.is_home_only
    kept_WV, all_rows = plan.quota_E[None], forward_splits.send_rows_W
    row_P, place_P, coef_P = pack_kept(selection.kept_P, selection.weight_P, p_N, pairs.token_N)
    return Announced(
        token_U=None,
        pair_M=None,
        row_P=row_P,
        forward_P=place_P,
        coef_P=coef_P,
        splits=_splits(0, pairs_by_rank(plan, kept_WV), all_rows, all_rows),
        order=arrival_order(kept_WV, all_rows, p_N.device),
        kept_WV=kept_WV,
        num_moved=0,
        moved_x_UD=None,
        moved_row_P=None,
        rows_slack=None,
    )


@define(
    "pairs_triton",
    fake=lambda kept_P, weight_P, p_N, token_N: (
        *(kept_P.new_empty(kept_P.shape, dtype=torch.int32) for _ in range(2)),
        p_N.new_empty(kept_P.shape),
    ),
)
def pack_kept(
    kept_P: torch.Tensor, weight_P: torch.Tensor, p_N: torch.Tensor, token_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token of each kept pair and its place among all, int32 [P], and its coefficient.

    The coefficient has the dtype of ``p``, which no weight is wider than.
    """
    row_P, place_P = token_N[kept_P].to(torch.int32), kept_P.to(torch.int32)
    return row_P, place_P, p_N[kept_P] * weight_P


def rows_to_others(rows_W: Any, rank: int) -> Any:
    """Rows that go to other ranks, of an array or a tensor."""
    return rows_W.sum() - rows_W[rank]


def _places(first_pair_M: torch.Tensor | None, pair_M: torch.Tensor) -> torch.Tensor:
    """Where pairs (places in expert-major order) stood among all that were sent.

    Args:
        first_pair_M: the order of that sending; ``None``: expert-major.
    """
    if first_pair_M is None:
        return pair_M
    place_N = torch.empty_like(first_pair_M)
    place_N[first_pair_M] = torch.arange(len(place_N), device=place_N.device)
    return place_N[pair_M]


def _backward_splits(
    plan: Plan,
    forward_splits: Splits,
    rows_W: torch.Tensor,
    moved_rows_W: torch.Tensor | None,
    instance_M: torch.Tensor,
    rows: str,
    exchange: Exchange,
) -> tuple[Int, Splits, Splits | None]:
    """Kept pairs per source and instance, and the row counts of the backward payloads.

    ``rows="exact"`` gathers the row counts (one collective and host sync); ``"static"`` pads the
    payload to ``min(kept pairs, forward rows)`` instead. In global scope the kept pairs per rank
    are not in the plan either, and travel with the row counts; so do the rows of moved pairs, whose
    splits are ``None`` if no rank moves any.
    """
    rank, W, V = exchange.rank, exchange.num_ranks, len(plan.instance_rank_V)
    if rows == "static":
        assert plan.backward_WV is not None
        kept_WV = plan.backward_WV
        pairs_WW = pairs_by_rank(plan, kept_WV)
        send_rows_W = np.minimum(forward_splits.send_rows_W, pairs_WW[rank])
        receive_rows_W = np.minimum(forward_splits.receive_rows_W, pairs_WW[:, rank])
        return kept_WV, _splits(rank, pairs_WW, send_rows_W, receive_rows_W), None
    counts = [rows_W]
    if moved_rows_W is not None:
        counts.append(moved_rows_W)
    if plan.backward_WV is None:
        counts.append(count(instance_M, V))
    gathered = exchange.all_gather_counts(torch.cat(counts))
    kept_WV = gathered[:, -V:] if plan.backward_WV is None else plan.backward_WV
    pairs_WW = pairs_by_rank(plan, kept_WV)
    splits = _splits(rank, pairs_WW, gathered[rank, :W], gathered[:, rank])
    moved_splits = None
    if moved_rows_W is not None and gathered[:, W : 2 * W].any():
        moved_splits = _splits(rank, pairs_WW, gathered[rank, W : 2 * W], gathered[:, W + rank])
    return kept_WV, splits, moved_splits


def _splits(rank: int, pairs_WW: Int, send_rows_W: Int, receive_rows_W: Int) -> Splits:
    return Splits(
        send_pairs_W=as_list(pairs_WW[rank]),
        receive_pairs_W=as_list(pairs_WW[:, rank]),
        send_rows_W=np.ascontiguousarray(send_rows_W),
        receive_rows_W=np.ascontiguousarray(receive_rows_W),
    )


def _forward_shift(forward_We: Int, kept_We: Int, device: torch.device) -> torch.Tensor:
    """For each kept pair (expert-major), from its place in the message to that among all pairs."""
    in_message_We = forward_We.cumsum(1) - forward_We
    by_expert = forward_We.T.reshape(-1)
    expert_major_eW = (by_expert.cumsum() - by_expert).reshape(forward_We.T.shape)
    shift_b = (expert_major_eW - in_message_We.T).reshape(-1).astype(np.int32)
    length_b = np.ascontiguousarray(kept_We.T).reshape(-1)
    return spread(shift_b, length_b, device)


def _shifted(row_R: torch.Tensor, order: ArrivalOrder) -> torch.Tensor:
    """Rows inside a source's message -> rows of the received buffer."""
    return row_R if order.row_shift_R is None else row_R + order.row_shift_R


def _pack(*columns: torch.Tensor) -> torch.Tensor:
    """int32 columns and a floating last one, side by side as int32 [n, columns]."""
    *integers, real = columns
    bits = real[:, None].contiguous().view(torch.int32)
    return torch.cat([*(c.to(torch.int32)[:, None] for c in integers), bits], dim=1)


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The columns of :func:`_pack`."""
    width = dtype.itemsize // 4
    # clone: contiguous() of no rows keeps an offset that a float64 view cannot have
    real = packed[:, -width:].clone(memory_format=torch.contiguous_format).view(dtype)[:, 0]
    return [*(packed[:, i].contiguous() for i in range(packed.shape[1] - width)), real]
