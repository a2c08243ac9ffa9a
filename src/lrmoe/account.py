"""What a layer call leaves behind: counters for the report, and the record of every pair.

Shape letters: T = tokens, K = top-k, N = this rank's pairs by expert, P = kept pairs, U = token
rows, D = model dim.
"""

from __future__ import annotations

import torch

from lrmoe.compute import Gradients
from lrmoe.dispatch import Announced, Splits, rows_to_others
from lrmoe.exchange import Exchange
from lrmoe.kernels.scratch import scratch_bytes
from lrmoe.pairs import PairTable, forward_instances
from lrmoe.report import PairRecord, Span, Tally
from lrmoe.select import Selection
from lrmoe.state import CallRecord, pairs_by_rank

_PARAMETERS = ("gate_up_e2FD", "down_eDF")


def scatter_pairs(
    values_P: torch.Tensor, pairs: PairTable, selection: Selection, like_TK: torch.Tensor
) -> torch.Tensor:
    """Values of the kept pairs -> [T, K], zero where dropped."""
    flat = like_TK.new_zeros(like_TK.numel(), dtype=values_P.dtype)
    return flat.index_copy_(0, pairs.flat_N[selection.kept_P], values_P).view(like_TK.shape)


def pair_record(
    saved: dict[str, torch.Tensor],
    record: CallRecord,
    exchange: Exchange,
    pairs: PairTable,
    selection: Selection,
    lrm_N: torch.Tensor,
) -> PairRecord:
    """Every pair of a layer call, [T, K] each."""
    p_TK, plan = saved["p_TK"], record.plan
    instance_N = forward_instances(plan, plan.forward_WV[exchange.rank], p_TK.device)
    if instance_N is None:
        instance_N = pairs.expert_N
    rank_V = torch.from_numpy(plan.instance_rank_V).to(p_TK.device)
    forward_rank_TK = torch.empty_like(instance_N).index_copy_(0, pairs.flat_N, rank_V[instance_N])
    forward_rank_TK = forward_rank_TK.view(p_TK.shape)
    instance_P = selection.instance_P
    if instance_P is None:
        instance_P = instance_N[selection.kept_P]
    # One more than the rank, so that a dropped pair's zero becomes -1.
    backward_rank_TK = scatter_pairs(rank_V[instance_P] + 1, pairs, selection, p_TK) - 1
    weight_TK = scatter_pairs(selection.weight_P, pairs, selection, p_TK)
    return PairRecord(
        call=record.number,
        expert=saved["top_k_index_TK"].clone(),
        score=torch.empty_like(lrm_N).index_copy_(0, pairs.flat_N, lrm_N).view(p_TK.shape).float(),
        kept=weight_TK > 0,
        weight=weight_TK,
        forward_rank=forward_rank_TK,
        backward_rank=backward_rank_TK,
    )


def account_forward(
    tally: Tally,
    exchange: Exchange,
    record: CallRecord,
    splits: Splits,
    gemm_rows: int,
    saved: dict[str, torch.Tensor],
    span: Span,
) -> None:
    """Count the work of a forward pass, and the bytes it saved."""
    if record.was_replayed:  # counters count once; what the recomputation cost stands apart
        tally.add(bytes_recompute=exchange.take_sent_bytes())
        tally.spans.append(("recompute_ms", span))
        return
    tally.spans.append(("fwd_ms", span))
    tally.add(
        gemm_rows_fwd=gemm_rows,
        payload_rows_fwd=int(rows_to_others(splits.send_rows_W, exchange.rank)),
        bytes_fwd=exchange.take_sent_bytes(),
        replicas=len(record.plan.instance_expert_V) - len(record.plan.quota_E),
    )
    tally.hold(
        saved_forward=sum(t.nbytes for n, t in saved.items() if n not in _PARAMETERS),
        token_rows_fwd=int(splits.receive_rows_W.sum())
        * saved["x_UD"].shape[1]
        * saved["x_UD"].element_size(),
        workspace=scratch_bytes(),
    )


def account_backward(
    tally: Tally,
    exchange: Exchange,
    record: CallRecord,
    announced: Announced,
    selection: Selection,
    lrm_N: torch.Tensor,
    grads: Gradients,
    grad_UD: torch.Tensor,
    span: Span,
) -> None:
    """Count the work of a backward pass."""
    tally.spans.append(("bwd_ms", span))
    tally.kept(pairs_by_rank(record.plan, announced.kept_WV).sum(0))
    tally.score_mass.append((lrm_N[selection.kept_P].sum(), lrm_N.sum()))
    tally.add(
        gemm_rows_bwd=announced.row_P.shape[0],
        payload_rows_bwd=int(rows_to_others(announced.splits.send_rows_W, exchange.rank)),
        rows_slack=announced.rows_slack,
        moved_rows=announced.num_moved,
        bytes_bwd=exchange.take_sent_bytes(),
    )
    tally.hold(
        token_rows_bwd=grad_UD.nbytes + (0 if grads.x_UD is None else grads.x_UD.nbytes),
        weight_gradients=sum(
            g.nbytes for g in (grads.gate_up_e2FD, grads.down_eDF) if g is not None
        ),
        workspace=scratch_bytes(),
    )
