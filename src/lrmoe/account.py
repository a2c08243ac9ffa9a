"""What a layer call leaves behind: counters for the report, and the record of every pair.

Shape letters: T = tokens, K = top-k, N = this rank's pairs by expert, P = kept pairs, U = token
rows, D = model dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from lrmoe.compute import Experts, Gradients
from lrmoe.dispatch import Announced, Splits, rows_to_others
from lrmoe.exchange import Exchange
from lrmoe.instances import has_new_instances
from lrmoe.pairs import PairTable, forward_instances
from lrmoe.planner.memory import LayerShape, memory_items
from lrmoe.planner.problem import Int, Plan
from lrmoe.replicas import num_local_replicas
from lrmoe.report import PairRecord, Span
from lrmoe.score import pair_sums
from lrmoe.select import Selection
from lrmoe.state import CallRecord, LayerState, pairs_by_rank
from lrmoe.upload import upload

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
    rank_V = upload(plan.instance_rank_V, p_TK.device)
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
    state: LayerState,
    exchange: Exchange,
    record: CallRecord,
    splits: Splits,
    gemm_rows: int,
    saved: dict[str, torch.Tensor],
    peak_bytes: int,
    span: Span,
) -> None:
    """Count the work of a forward pass, and the bytes it needed and saved.

    Args:
        peak_bytes: of the pairs' results and temporaries, at their largest.
    """
    tally, num_saved = state.tally, _saved_bytes(saved)
    if record.casts_weights:
        num_saved += sum(saved[name].nbytes for name in _PARAMETERS)
    if record.was_replayed:  # counters count once; what the recomputation cost stands apart
        state.step_memory.hold(state.layer, record, num_saved)
        tally.add(bytes_recompute=exchange.take_sent_bytes())
        tally.spans.append(("recompute_ms", span))
        return
    tally.spans.append(("fwd_ms", span))
    plan = record.plan
    num_sent = int((plan.is_replica & (plan.forward_WV.sum(0) > 0)).sum())
    kept_WV = record.kept_host[0] if record.kept_host is not None else plan.forward_WV
    if has_new_instances(plan, kept_WV):  # the draw sent weights to those of the kept pairs
        num_sent += int((plan.is_replica & (kept_WV.sum(0) > 0)).sum())
    tally.add(
        gemm_rows_fwd=gemm_rows,
        payload_rows_fwd=int(rows_to_others(splits.send_rows_W, exchange.rank)),
        bytes_fwd=exchange.take_sent_bytes(),
        replicas=plan.num_replicas,
        moved_weights=num_sent,
    )
    if record.config.draw == "forward":  # what is saved does not exist yet at the peak
        row_bytes = saved["x_UD"].shape[1] * saved["x_UD"].element_size()
        pairs = {"work": peak_bytes + int(splits.receive_rows_W.sum()) * row_bytes}
    else:
        made = _nbytes(saved.get("gate_up_R2F"))  # among the results, and saved
        pairs = {"saved": _saved_bytes(saved), "work": peak_bytes - made}
    moment = _weights(saved, record, exchange) | pairs
    record.forward_moment = moment, state.step_memory.of_others(state.layer, record)
    state.step_memory.hold(state.layer, record, 0 if record.may_be_recomputed else num_saved)


def account_backward(
    state: LayerState,
    exchange: Exchange,
    record: CallRecord,
    announced: Announced,
    selection: Selection,
    lrm_N: torch.Tensor,
    is_bad_T: torch.Tensor,
    grads: Gradients,
    saved: dict[str, torch.Tensor],
    gate_up_R2F: torch.Tensor | None,
    local: Experts,
    span: Span,
) -> None:
    """Count the work of a backward pass, and the bytes of the layer call at its peak.

    Args:
        gate_up_R2F: saved, or a copy with that of pairs that moved here.
    """
    tally, plan = state.tally, record.plan
    tally.spans.append(("bwd_ms", span))
    tally.kept(pairs_by_rank(plan, announced.kept_WV).sum(0))
    tally.sums.append(pair_sums(lrm_N, selection.kept_P, is_bad_T))
    is_sent_V = plan.is_replica & (announced.kept_WV.sum(0) > 0)
    is_sent_again = local.replicas is not None and local.replicas.was_sent
    tally.add(
        gemm_rows_bwd=announced.row_P.shape[0],
        payload_rows_bwd=int(rows_to_others(announced.splits.send_rows_W, exchange.rank)),
        rows_slack=0 if announced.rows_slack is None else announced.rows_slack,
        moved_rows=announced.num_moved,
        bytes_bwd=exchange.take_sent_bytes(),
        moved_weights=int(is_sent_V.sum()) if is_sent_again else 0,
        makespan=_makespan(plan, announced),
    )
    made = 0 if saved.get("gate_up_R2F") is gate_up_R2F else _nbytes(gate_up_R2F)
    if announced.moved_x_UD is not None:  # inputs as they came, and copied beside the others'
        row_bytes = saved["x_UD"].shape[1] * saved["x_UD"].element_size()
        made += announced.moved_x_UD.nbytes
        made += int(announced.splits.receive_rows_W.sum()) * row_bytes
    weights = _weights(saved, record, exchange) | {"saved": _saved_bytes(saved)}
    early = weights | {"work": grads.temporary_bytes + made}
    late = weights | {
        "gradients": weights["gradients"] + _nbytes(grads.gate_up_e2FD, grads.down_eDF),
        "replica_gradients": _nbytes(grads.replica_gate_up_s2FD, grads.replica_down_sDF),
        "work": grads.late_bytes + made,
    }
    others = state.step_memory.of_others(state.layer, record)
    assert record.forward_moment is not None
    rows_2W = np.broadcast_to(
        [[record.rows_WW[:, exchange.rank].sum()], [announced.splits.receive_rows_W.sum()]],
        (2, exchange.num_ranks),
    )
    # What only may happen when a plan is made is known now.
    moves_pairs = announced.moved_x_UD is not None
    has_replicas = not plan.is_home_only
    shape = replace(record.shape, moves_pairs=moves_pairs, has_replicas=has_replicas)
    model = partial(model_of, shape, plan, rows_2W, exchange.rank)
    tally.hold([record.forward_moment, (early, others), (late, others)], model)


def model_of(shape: LayerShape, plan: Plan, rows_2W: Int, rank: int) -> dict[str, int]:
    """What the memory model says of a call, in the categories that are measured."""
    items = memory_items(shape, plan, rows_2W)
    of_rank = {
        "home_weights": items.home_weights_W,
        "replica_weights": items.replica_weights_W,
        "gradients": items.gradients_W,
        "replica_gradients": items.replica_gradients_W,
        "saved": items.dispatch_rows_W + items.saved_state_W,
        "work": items.payload_rows_W + items.workspace_W + items.staging_W,
    }
    return {name: int(values_W[rank]) for name, values_W in of_rank.items()}


def _makespan(plan: Plan, announced: Announced) -> float:
    """The plan's own figure; without one, the busiest rank's pairs, a kept one counted twice."""
    if plan.predicted is not None:
        return plan.predicted.makespan
    forward_W = pairs_by_rank(plan, plan.forward_WV).sum(0)
    return float(forward_W.max() + 2 * pairs_by_rank(plan, announced.kept_WV).sum(0).max())


def _weights(
    saved: dict[str, torch.Tensor], record: CallRecord, exchange: Exchange
) -> dict[str, int]:
    """Bytes of the weights on this rank, and of the gradients that earlier micro-batches left."""
    home = sum(saved[name].nbytes for name in _PARAMETERS)
    per_expert = home // len(saved["down_eDF"])
    return {
        "home_weights": home,
        "replica_weights": num_local_replicas(record.plan, exchange) * per_expert,
        "gradients": home if record.shape.has_gradients else 0,
    }


def _saved_bytes(saved: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for name, t in saved.items() if name not in _PARAMETERS)


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)
