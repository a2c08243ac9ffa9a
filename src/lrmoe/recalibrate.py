"""Score the pairs, choose which get a backward pass, and what the router learns from the others.

Shape letters: T = tokens, K = top-k, N = this rank's pairs by expert, R = pairs of this rank's
experts, P = kept pairs, E = experts, e = experts on this rank.
"""

from __future__ import annotations

import torch

from lrmoe.dispatch import Splits, local_instances, return_pairs, send_pairs
from lrmoe.exchange import Exchange
from lrmoe.pairs import PairTable, arrival_order
from lrmoe.score import control_score
from lrmoe.select import (
    Segments,
    Selection,
    keep_everything,
    sampling_sizes,
    select_sampled,
    select_top,
)
from lrmoe.state import CallRecord, LayerState, current_token_losses


def choose_pairs(
    p_N: torch.Tensor,
    grad_norm_sq_T: torch.Tensor | None,
    h_norm_sq_N: torch.Tensor,
    pairs: PairTable,
    call: CallRecord,
    state: LayerState,
    splits: Splits,
    exchange: Exchange,
) -> Selection:
    """The kept pairs of this rank, within the plan's quotas.

    Args:
        grad_norm_sq_T: ``None`` when drawn in the forward pass: the sizes are then ``p |h|``.
    """
    plan, config = call.plan, call.config
    if plan.keeps_all:
        return keep_everything(p_N.shape[0], p_N)
    generator = state.generator("select", exchange, call, p_N.device)
    grad_norm_sq_N = (
        torch.ones_like(p_N) if grad_norm_sq_T is None else grad_norm_sq_T[pairs.token_N]
    )
    loss_N = None
    if config.selection == "token_loss":
        assert grad_norm_sq_T is not None
        loss_T = current_token_losses(grad_norm_sq_T.shape[0])
        loss_N = loss_T.to(p_N.device, p_N.dtype)[pairs.token_N]
    score_N = control_score(config.selection, p_N, grad_norm_sq_N, h_norm_sq_N, loss_N, generator)
    if plan.quota_WE is not None:
        segments = Segments.of(call.counts_WE[exchange.rank], p_N.device)
        shares_E = plan.share_probability_WE
        if not config.is_unbiased:
            return select_top(score_N, segments, plan.quota_WE[exchange.rank])
        return select_sampled(
            sampling_sizes(score_N, segments, config.min_inclusion),
            segments,
            plan.quota_WE[exchange.rank],
            generator,
            None if shares_E is None else shares_E[exchange.rank],
        )
    return _choose_at_home(score_N, call, splits, exchange, generator)


def _choose_at_home(
    score_N: torch.Tensor,
    call: CallRecord,
    splits: Splits,
    exchange: Exchange,
    generator: torch.Generator,
) -> Selection:
    """One choice per expert over all ranks: scores go to its rank, weights (or 0) come back."""
    plan, config = call.plan, call.config
    here = local_instances(plan, exchange.rank)
    order = arrival_order(plan.forward_WV[:, here], splits.receive_rows_W, score_N.device)
    # Expert-major order has the lower rank first, then the lower pair: ties fall by global pair id.
    score_R = send_pairs(score_N, order, splits, exchange)
    segments = Segments.of(plan.forward_WV[:, here].sum(0), score_N.device)
    quota_e = plan.quota_E[plan.instance_expert_V[here]]
    if config.is_unbiased:
        size_R = sampling_sizes(score_R, segments, config.min_inclusion)
        chosen = select_sampled(size_R, segments, quota_e, generator)
    else:
        chosen = select_top(score_R, segments, quota_e)
    weight_R = torch.zeros_like(score_R).index_copy_(0, chosen.kept_P, chosen.weight_P)
    weight_N = return_pairs(weight_R, order, splits, exchange)
    kept_P = weight_N.nonzero().squeeze(1)  # device sync: how many are ours is decided elsewhere
    return Selection(kept_P=kept_P, weight_P=weight_N[kept_P])


def router_gradient(
    mode: str,
    is_unbiased: bool,
    p_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    inner_TK: torch.Tensor,
    grad_output_T: torch.Tensor | None,
) -> torch.Tensor:
    """dL/dp of every pair, [T, K] (specification, section 8).

    Args:
        weight_TK: selection weight, 0 where dropped.
        inner_TK: ``<G_t, y_s>``; only the kept pairs' are read unless the mode is ``exact``.
        grad_output_T: ``<G_t, out_t>`` with the routed output; only ``completed`` reads it.
    """
    if mode == "exact":
        return inner_TK
    is_kept_TK = weight_TK > 0
    inner_TK = torch.where(is_kept_TK, inner_TK, 0.0)
    if mode == "kept":
        return weight_TK * inner_TK
    assert mode == "completed", mode
    assert grad_output_T is not None
    if is_unbiased:
        # A control variate: the mean over the token's experts stands in for what was dropped.
        total_T = p_TK.sum(1)
        mean_T1 = torch.where(total_T != 0, grad_output_T / total_T, 0.0)[:, None]
        return torch.where(is_kept_TK, mean_T1 + weight_TK * (inner_TK - mean_T1), mean_T1)
    # The dropped pairs share what the kept ones leave of <G, out>.
    rest_T = grad_output_T - (p_TK * inner_TK).sum(1)
    dropped_p_T = torch.where(is_kept_TK, 0.0, p_TK).sum(1)
    share_T1 = torch.where(dropped_p_T != 0, rest_T / dropped_p_T, 0.0)[:, None]
    return torch.where(is_kept_TK, inner_TK, share_T1)
