"""The instances on this rank: home experts and replicas, and the state their kept pairs point into.

Shape letters: U = token rows, R = pairs of the forward pass, P = kept pairs, M = those that moved
here, F = expert width, W = ranks, V = instances, e = instances on this rank.
"""

from __future__ import annotations

import torch

from lrmoe import compute, dispatch
from lrmoe.exchange import Exchange
from lrmoe.kernels.gated import Activation
from lrmoe.pairs import ArrivalOrder
from lrmoe.planner.problem import Int, Plan
from lrmoe.replicas import (
    SLOTS,
    add_replica_gradients,
    num_local_replicas,
    replicas_needed,
)
from lrmoe.state import CallRecord, LayerState


def local_experts(
    record: CallRecord,
    exchange: Exchange,
    home: compute.Weights,
    act: Activation | None,
    pairs_WV: Int,
) -> compute.Experts:
    """The instances on this rank; starts sending the weights of replicas that have pairs."""
    plan = record.plan
    needed_V = pairs_WV.sum(0) > 0
    if record.config.budget.memory is not None:
        SLOTS.shrink(num_local_replicas(plan, exchange), record.id, exchange)
    if plan.is_home_only or not replicas_needed(plan, needed_V):
        return compute.Experts(home=home, replicas=None, act=act)
    arriving = SLOTS.send(plan, exchange, home, needed_V, call=record.id)
    return compute.Experts(home=home, replicas=arriving, act=act)


def has_new_instances(plan: Plan, pairs_WV: Int) -> bool:
    """Whether some instance has kept pairs and had none in the forward pass."""
    return bool(((pairs_WV.sum(0) > 0) & (plan.forward_WV.sum(0) == 0)).any())


def with_kept_pairs(
    local: compute.Experts,
    record: CallRecord,
    exchange: Exchange,
    pairs_WV: Int,
) -> compute.Experts:
    """The instances again, where some replica has kept pairs and had none in the forward pass.

    Its weights are sent now, since the gate_up outputs of those pairs are made from them, and are
    waited for: the backward pass counts on the slots to hold what was sent.
    """
    if not has_new_instances(record.plan, pairs_WV):  # as every rank finds
        return local
    local = local_experts(record, exchange, local.home, local.act, pairs_WV)
    if local.replicas is not None:
        local.replicas()
    return local


def groups(
    order: ArrivalOrder, pairs_WV: Int, record: CallRecord, exchange: Exchange
) -> compute.Groups:
    """Where the rows of each instance on this rank end."""
    plan = record.plan
    here = dispatch.local_instances(plan, exchange.rank)
    home = slice(here.start, here.start + len(plan.quota_E) // exchange.num_ranks)
    return compute.Groups(
        offsets_e=order.offsets_e,
        home_rows=int(pairs_WV[:, home].sum()),
        top_k=record.top_k,
    )


def kept_pairs(
    announced: dispatch.Announced,
    row_R: torch.Tensor | None,
    x_UD: torch.Tensor,
    gate_up_R2F: torch.Tensor | None,
    record: CallRecord,
    exchange: Exchange,
    local: compute.Experts,
) -> tuple[compute.KeptPairs, torch.Tensor, torch.Tensor | None]:
    """The kept pairs on this rank, and the saved state they point into.

    The state of a pair that moved here is made now: its input arrived with the announcement, and
    its gate_up outputs are recomputed from it.

    Args:
        row_R: input row of each pair of the forward pass; ``None``: the state holds the kept pairs
            alone, in their order.
        gate_up_R2F: ``None`` where it is recomputed for all kept pairs.
    """
    rows = groups(announced.order, announced.kept_WV, record, exchange)
    num_rows = int(announced.splits.receive_rows_W.sum())
    gate_up_row_P: torch.Tensor | None = None  # None: in their own order
    if row_R is None:
        x_row_P = announced.row_P
    elif announced.moved_x_UD is None:
        # With one rank the tokens are the rows, in both passes.
        is_same = exchange.keeps_rows
        x_row_P = announced.row_P if is_same else row_R.index_select(0, announced.forward_P)
        gate_up_row_P = announced.forward_P
    else:
        assert announced.moved_row_P is not None
        moved_M = (announced.forward_P < 0).nonzero().squeeze(1)  # device sync
        # What moved here came with its input; the others' rows are copied beside it.
        x_row_P = announced.forward_P.clamp(min=0)
        x_row_P = row_R[x_row_P] if len(row_R) else torch.zeros_like(x_row_P)
        moved_row_M = announced.moved_row_P[moved_M]
        x_row_P = x_row_P.index_copy(0, moved_M, moved_row_M + len(x_UD))
        source_U = x_row_P.new_zeros(num_rows).index_copy_(0, announced.row_P.long(), x_row_P)
        x_UD = _from_both(x_UD, announced.moved_x_UD, source_U)
        x_row_P = announced.row_P
        if gate_up_R2F is not None:
            moved = compute.Groups(
                offsets_e=_count_through(moved_M, rows.offsets_e),
                home_rows=int((moved_M < rows.home_rows).sum()),  # device sync
                top_k=rows.top_k,
            )
            moved_gate_up = compute.recompute_gate_up(x_UD, x_row_P[moved_M], moved, local)
            source_P = announced.forward_P.index_copy(
                0, moved_M, len(gate_up_R2F) + _arange(moved_M)
            )
            gate_up_R2F = _from_both(gate_up_R2F, moved_gate_up, source_P)
    if gate_up_R2F is None or gate_up_row_P is None:
        gate_up_row_P = _arange(announced.row_P)
    kept = compute.KeptPairs(
        row_P=announced.row_P,
        x_row_P=x_row_P,
        gate_up_row_P=gate_up_row_P,
        coef_P=announced.coef_P,
        groups=rows,
    )
    return kept, x_UD, gate_up_R2F


def _from_both(
    first_RA: torch.Tensor, second_MA: torch.Tensor, row_P: torch.Tensor
) -> torch.Tensor:
    """Rows of two tensors laid end to end, without laying them end to end."""
    picked_PA = first_RA.new_empty(len(row_P), first_RA.shape[1])
    if len(first_RA):
        torch.index_select(first_RA, 0, row_P.clamp(max=len(first_RA) - 1), out=picked_PA)
    second_n = (row_P >= len(first_RA)).nonzero().squeeze(1)  # device sync
    picked_PA.index_copy_(0, second_n, second_MA[row_P[second_n] - len(first_RA)])
    return picked_PA


def _count_through(row_M: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
    """How many of the ascending rows lie before each end: inclusive ends of the subset, int32."""
    return torch.searchsorted(row_M, ends_e.long(), right=False).to(torch.int32)


def gradients_home(
    grads: compute.Gradients, plan: Plan, kept_WV: Int, exchange: Exchange
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight gradients of the home experts, their replicas' included."""
    needed_V = kept_WV.sum(0) > 0
    home = [grads.gate_up_e2FD, grads.down_eDF]
    if plan.is_home_only or not replicas_needed(plan, needed_V):
        return home[0], home[1]
    away = (grads.replica_gate_up_s2FD, grads.replica_down_sDF)
    for i, (grad, replica_grad) in enumerate(zip(home, away, strict=True)):
        if grad is not None:
            home[i] = add_replica_gradients(grad, replica_grad, plan, needed_V, exchange)
    return home[0], home[1]


def check_version(state: LayerState, record: CallRecord) -> None:
    """Replicas are copies of the parameters at the forward pass; refuse any other's gradient."""
    if state.version != record.version and not record.plan.is_home_only:
        raise RuntimeError(
            f"layer {state.layer}: the parameters changed between the forward and the backward "
            f"pass (version {record.version} -> {state.version}: an optimizer step or a loaded "
            "state); run the backward pass first"
        )


def _arange(like_P: torch.Tensor) -> torch.Tensor:
    return torch.arange(like_P.shape[0], device=like_P.device, dtype=torch.int32)
