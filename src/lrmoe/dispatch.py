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
from lrmoe.kernels.rows import gather_rows, sum_rows
from lrmoe.pairs import (
    ArrivalOrder,
    PairTable,
    arrival_order,
    count_token_rows,
    token_rows,
)
from lrmoe.planner.problem import Int, Plan
from lrmoe.select import Selection, spread
from lrmoe.state import pairs_by_rank


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

    token_U: torch.Tensor  # source: token of each payload row
    row_P: torch.Tensor  # experts: int32, expert-major
    forward_P: torch.Tensor  # experts: int32 place among the pairs of the forward pass
    coef_P: torch.Tensor  # experts: routing weight times selection weight
    rows_slack: torch.Tensor  # padding rows this rank sends to others
    kept_WV: Int  # kept pairs of each source at each instance
    splits: Splits

    def order(self, plan: Plan, rank: int) -> ArrivalOrder:
        """How the experts' rank reads what it receives for the kept pairs."""
        here = local_instances(plan, rank)
        return arrival_order(self.kept_WV[:, here], self.splits.receive_rows_W, self.row_P.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The part that autograd must save, by name."""
        names = ("token_U", "row_P", "forward_P", "coef_P", "rows_slack")
        return {name: getattr(self, name) for name in names}

    def host(self) -> tuple[Int, Splits]:
        """The part that needs no memory of the device."""
        return self.kept_WV, self.splits

    @classmethod
    def restore(cls, tensors: dict[str, torch.Tensor], host: tuple[Int, Splits]) -> Announced:
        """The inverse of :meth:`tensors` and :meth:`host`."""
        names = ("token_U", "row_P", "forward_P", "coef_P", "rows_slack")
        kept_WV, splits = host
        return cls(**{name: tensors[name] for name in names}, kept_WV=kept_WV, splits=splits)


def instance_ranks(plan: Plan, pairs_V: Int, device: torch.device) -> torch.Tensor:
    """The computing rank of each of this rank's pairs, laid out by instance; int64 [N]."""
    return spread(plan.instance_rank_V, pairs_V, device)


def local_instances(plan: Plan, rank: int) -> slice:
    """The run of instances on a rank."""
    first, end = np.searchsorted(plan.instance_rank_V, [rank, rank + 1])
    return slice(int(first), int(end))


def send_tokens(
    x_TD: torch.Tensor,
    p_N: torch.Tensor,
    pairs: PairTable,
    plan: Plan,
    splits: Splits,
    exchange: Exchange,
) -> tuple[Arrived, torch.Tensor]:
    """Dispatch: a token's row once per rank that computes it, a few bytes for each of its pairs.

    Also returns the token of each row this rank sent, for the way back.
    """
    device = x_TD.device
    rank_N = instance_ranks(plan, plan.forward_WV[exchange.rank], device)
    needed_WT, _ = count_token_rows(pairs.token_N, rank_N, x_TD.shape[0], exchange.num_ranks)
    rows = token_rows(needed_WT, pairs.token_N, rank_N, splits.send_rows_W)
    x_UD = send_rows(x_TD, rows.token_U, splits, exchange, is_kept=True)
    notes = exchange.all_to_all(_pack(rows.row_P, p_N), splits.send_pairs_W, splits.receive_pairs_W)
    here = local_instances(plan, exchange.rank)
    order = arrival_order(plan.forward_WV[:, here], splits.receive_rows_W, device)
    row_R, p_R = _unpack(order.to_expert_major(notes), p_N.dtype)
    return Arrived(x_UD=x_UD, row_R=_shifted(row_R, order), p_R=p_R, order=order), rows.token_U


def send_rows(
    rows_TD: torch.Tensor,
    token_U: torch.Tensor,
    splits: Splits,
    exchange: Exchange,
    *,
    is_kept: bool,
) -> torch.Tensor:
    """The tokens' rows to the ranks that need them.

    Args:
        is_kept: the result is saved for the backward pass, so it must not be scratch memory.
    """
    if exchange.num_ranks == 1 and is_kept:
        return rows_TD[token_U]
    return exchange.all_to_all(
        gather_rows(rows_TD, token_U, "payload"),
        as_list(splits.send_rows_W),
        as_list(splits.receive_rows_W),
    )


def return_sums(
    output_RD: torch.Tensor,
    row_R: torch.Tensor,
    token_U: torch.Tensor,
    num_tokens: int,
    splits: Splits,
    exchange: Exchange,
) -> torch.Tensor:
    """Combine: outputs are summed per token row where the experts are, then per token here."""
    sums_UD = sum_rows(output_RD, row_R, int(splits.receive_rows_W.sum()))
    return collect_rows(sums_UD, token_U, num_tokens, splits, exchange)


def collect_rows(
    rows_UD: torch.Tensor,
    token_U: torch.Tensor,
    num_tokens: int,
    splits: Splits,
    exchange: Exchange,
) -> torch.Tensor:
    """Send one row per token back to its source and add up those of every rank -> [T, D]."""
    returned_UD = exchange.all_to_all(
        rows_UD, as_list(splits.receive_rows_W), as_list(splits.send_rows_W)
    )
    return sum_rows(returned_UD, token_U, num_tokens)


def return_pairs(
    values_R: torch.Tensor, order: ArrivalOrder, splits: Splits, exchange: Exchange
) -> torch.Tensor:
    """Send one value (or row) per pair back to its source, in the source's order."""
    return exchange.all_to_all(
        order.to_message(values_R), splits.receive_pairs_W, splits.send_pairs_W
    )


def send_pairs(
    values_N: torch.Tensor, order: ArrivalOrder, splits: Splits, exchange: Exchange
) -> torch.Tensor:
    """Send one value per pair to the rank of its expert, expert-major there."""
    received = exchange.all_to_all(values_N, splits.send_pairs_W, splits.receive_pairs_W)
    return order.to_expert_major(received)


def announce_kept(
    selection: Selection,
    p_N: torch.Tensor,
    pairs: PairTable,
    plan: Plan,
    forward_splits: Splits,
    num_tokens: int,
    rows: str,
    exchange: Exchange,
) -> Announced:
    """Tell the experts' ranks which pairs are kept, with which coefficient, and from which row."""
    device, rank = p_N.device, exchange.rank
    kept_P = selection.kept_P
    rank_P = instance_ranks(plan, plan.forward_WV[rank], device)[kept_P]
    token_P = pairs.token_N[kept_P]
    needed_WT, rows_W = count_token_rows(token_P, rank_P, num_tokens, exchange.num_ranks)
    kept_WV, splits = _backward_splits(
        plan, forward_splits, rows_W, pairs.expert_N[kept_P], rows, exchange
    )
    sent = token_rows(needed_WT, token_P, rank_P, splits.send_rows_W)

    message_start_W = np.cumsum([0, *forward_splits.send_pairs_W[:-1]])
    place_P = kept_P - torch.from_numpy(message_start_W).to(device)[rank_P]
    coef_P = p_N[kept_P] * selection.weight_P
    notes = exchange.all_to_all(
        _pack(place_P, sent.row_P, coef_P), splits.send_pairs_W, splits.receive_pairs_W
    )
    here = local_instances(plan, rank)
    order = arrival_order(kept_WV[:, here], splits.receive_rows_W, device)
    place_P, row_P, coef_P = _unpack(order.to_expert_major(notes), p_N.dtype)
    return Announced(
        token_U=sent.token_U,
        row_P=_shifted(row_P, order),
        forward_P=place_P + _forward_shift(plan.forward_WV[:, here], kept_WV[:, here], device),
        coef_P=coef_P,
        splits=splits,
        kept_WV=kept_WV,
        # Stays on the device: nothing waits for it before the report does.
        rows_slack=int(rows_to_others(splits.send_rows_W, rank)) - rows_to_others(rows_W, rank),
    )


def rows_to_others(rows_W: Any, rank: int) -> Any:
    """Rows that go to other ranks, of an array or a tensor."""
    return rows_W.sum() - rows_W[rank]


def _backward_splits(
    plan: Plan,
    forward_splits: Splits,
    rows_W: torch.Tensor,
    expert_P: torch.Tensor,
    rows: str,
    exchange: Exchange,
) -> tuple[Int, Splits]:
    """Kept pairs per source and instance, and the row counts of the backward payload.

    ``rows="exact"`` gathers the row counts (one collective and host sync); ``"static"`` pads the
    payload to ``min(kept pairs, forward rows)`` instead. In global scope the kept pairs per rank
    are not in the plan either, and travel with the row counts.
    """
    rank, W, V = exchange.rank, exchange.num_ranks, len(plan.instance_rank_V)
    if rows == "static":
        assert plan.backward_WV is not None
        kept_WV = plan.backward_WV
        pairs_WW = pairs_by_rank(plan, kept_WV)
        send_rows_W = np.minimum(forward_splits.send_rows_W, pairs_WW[rank])
        receive_rows_W = np.minimum(forward_splits.receive_rows_W, pairs_WW[:, rank])
    else:
        counts = rows_W
        if plan.backward_WV is None:
            counts = torch.cat([rows_W, torch.bincount(expert_P, minlength=V)])
        gathered = exchange.all_gather_counts(counts)
        kept_WV = gathered[:, W:] if plan.backward_WV is None else plan.backward_WV
        pairs_WW = pairs_by_rank(plan, kept_WV)
        send_rows_W, receive_rows_W = gathered[rank, :W], gathered[:, rank]
    return kept_WV, Splits(
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
