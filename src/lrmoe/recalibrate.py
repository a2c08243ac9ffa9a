"""Score the pairs, choose which get a backward pass, and what the router learns from the others.

Shape letters: T = tokens, K = top-k, N = this rank's pairs by expert, R = pairs of this rank's
experts, P = kept pairs, E = experts, e = experts on this rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lrmoe.auto import RATES
from lrmoe.config import Recalibration
from lrmoe.exchange import Exchange, as_list
from lrmoe.pairs import PairTable, arrival_order, counting_sort, forward_instances
from lrmoe.planner.problem import Float, Int, Plan
from lrmoe.planner.quotas import rate_quotas
from lrmoe.reroute import reroute
from lrmoe.score import control_score, lrm
from lrmoe.select import (
    Segments,
    Selection,
    keep_everything,
    sampling_noise,
    sampling_sizes,
    select_sampled,
    select_top,
    spread,
)
from lrmoe.state import CallRecord, LayerState, current_token_losses
from lrmoe.upload import upload


def choose_pairs(
    p_N: torch.Tensor,
    lrm_N: torch.Tensor,
    grad_norm_sq_T: torch.Tensor | None,
    pairs: PairTable,
    call: CallRecord,
    state: LayerState,
    exchange: Exchange,
    code_T: torch.Tensor | None = None,
) -> Selection:
    """The kept pairs of this rank, within the plan's quotas.

    Args:
        lrm_N: in the forward pass without what is not known yet: ``p^2 |h|^2``.
        grad_norm_sq_T: ``None`` in the forward pass.
        code_T: int64, what the sample is laid out by (:func:`lrmoe.score.code_of` or
            :func:`lrmoe.score.text_code`), if by anything.
    """
    plan, config, rank = call.plan, call.config, exchange.rank
    if plan.keeps_all and plan.backward_is_forward:
        return keep_everything(p_N.shape[0], p_N)
    generator = state.generator("select", exchange, call, p_N.device)
    loss_N = grad_norm_sq_N = None
    if config.selection in ("gradient", "weighted_gradient"):
        assert grad_norm_sq_T is not None
        grad_norm_sq_N = grad_norm_sq_T[pairs.token_N]
    if config.selection == "token_loss":
        assert grad_norm_sq_T is not None
        loss_T = current_token_losses(grad_norm_sq_T.shape[0])
        loss_N = loss_T.to(p_N.device, p_N.dtype)[pairs.token_N]
    score_N = control_score(config.selection, p_N, lrm_N, grad_norm_sq_N, loss_N, generator)
    code_N = None if code_T is None else code_T[pairs.token_N]
    if plan.quota_WE is None:
        return _choose_at_home(score_N, code_N, call, exchange, generator)
    assert plan.backward_WV is not None
    forward_N = forward_instances(plan, plan.forward_WV[rank], p_N.device)
    if forward_N is not None and plan.draws_in_place:
        # Drawn from the pairs at each instance, so that none moves.
        pair_M = counting_sort(forward_N, len(plan.instance_rank_V))[0]
        chosen = _select(
            score_N[pair_M],
            plan.forward_WV[rank],
            plan.backward_WV[rank],
            plan.share_probability(rank),
            config,
            generator,
            None if code_N is None else code_N[pair_M],
        )
        kept_P, order_P = pair_M[chosen.kept_P].sort()
        return Selection(kept_P=kept_P, weight_P=chosen.weight_P[order_P])
    share_WE = plan.share_probability_WE
    share_E = None if share_WE is None else share_WE[rank]
    counts_E, quota_E = call.counts_WE[rank], plan.quota_WE[rank]
    chosen = _select(score_N, counts_E, quota_E, share_E, config, generator, code_N)
    if forward_N is None:
        return chosen
    return _rerouted(
        chosen, forward_N, pairs.expert_N, plan.backward_WV[rank], plan.instance_expert_V
    )


def _select(
    score_N: torch.Tensor,
    count_e: Int,
    quota_e: Int,
    share_e: Float | None,
    config: Recalibration,
    generator: torch.Generator,
    code_N: torch.Tensor | None = None,
) -> Selection:
    """The rule, inside each run of pairs."""
    segments = Segments(count_e, score_N.device)
    if not config.is_unbiased:
        return select_top(score_N, segments, quota_e)
    size_N = sampling_sizes(score_N, segments, config.min_inclusion)
    strata = strata_of(code_N, config.strata)
    return select_sampled(size_N, segments, quota_e, generator, share_e, *strata)


def strata_of(
    code_N: torch.Tensor | None, strata: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``stratum_N`` and ``direction_N`` of :func:`lrmoe.select.select_sampled`."""
    return (None, code_N) if strata == "neighbors" else (code_N, None)


def _choose_at_home(
    score_N: torch.Tensor,
    code_N: torch.Tensor | None,
    call: CallRecord,
    exchange: Exchange,
    generator: torch.Generator,
) -> Selection:
    """One choice per expert over all ranks: scores go to its home rank, verdicts come back.

    A verdict is the weight (0: dropped), and the instance where that is decided here too.
    """
    plan, config, device = call.plan, call.config, score_N.device
    E, W = call.counts_WE.shape[1], exchange.num_ranks
    if W == 1:
        chosen = _select(score_N, call.counts_WE[0], plan.quota_E, None, config, generator, code_N)
        return replace(chosen, weight_P=chosen.weight_P.to(score_N.dtype))
    home = slice(exchange.rank * (E // W), (exchange.rank + 1) * (E // W))
    counts_We = call.counts_WE[:, home]
    # Pairs are sorted by expert, so those of a home rank are one run.
    send_W = as_list(call.counts_WE[exchange.rank].reshape(W, -1).sum(1))
    receive_W = as_list(counts_We.sum(1))
    order = arrival_order(counts_We, np.zeros(W, np.int64), device)
    # Expert-major order has the lower rank first, then the lower pair: ties fall by global pair id.
    # What the sample is laid out by travels beside the scores, as the same bytes.
    sent_NC = score_N[:, None]
    if code_N is not None:
        sent_NC = torch.cat([sent_NC, code_N[:, None].view(score_N.dtype)], dim=1)
    arrived_RC = order.to_expert_major(exchange.all_to_all(sent_NC, send_W, receive_W))
    score_R = arrived_RC[:, 0].contiguous()
    code_R = None
    if code_N is not None:
        # clone: contiguous() of no rows keeps an offset that an int64 view cannot have
        code_RC = arrived_RC[:, 1:].clone(memory_format=torch.contiguous_format)
        code_R = code_RC.view(torch.int64).squeeze(1)
    chosen = _select(score_R, counts_We.sum(0), plan.quota_E[home], None, config, generator, code_R)
    verdict_R2 = torch.zeros(len(score_R), 2, dtype=torch.float64, device=device)
    verdict_R2[chosen.kept_P, 0] = chosen.weight_P.double()
    if not plan.is_home_only:
        forward_R = spread(*_arrived_instances(plan, home), device)
        chosen = _rerouted(
            chosen,
            forward_R,
            spread(np.arange(home.start, home.stop), counts_We.sum(0), device),
            plan.capacity_V,
            plan.instance_expert_V,
        )
        instance_P = chosen.instance_P
        if instance_P is None:
            instance_P = forward_R[chosen.kept_P]
        verdict_R2[chosen.kept_P, 1] = instance_P.double()
    if plan.is_home_only:
        verdict_R2 = verdict_R2[:, :1].to(score_R.dtype)
    verdict_N2 = exchange.all_to_all(order.to_message(verdict_R2), receive_W, send_W)
    kept_P = verdict_N2[:, 0].nonzero().squeeze(1)  # device sync: decided elsewhere
    kept = verdict_N2[kept_P]
    return Selection(
        kept_P=kept_P,
        weight_P=kept[:, 0].to(score_N.dtype),
        instance_P=None if plan.is_home_only else kept[:, 1].long(),
    )


def _arrived_instances(plan: Plan, home: slice) -> tuple[Int, Int]:
    """Runs of forward instances in the expert-major order of arrival: ids and lengths."""
    mine_v = np.flatnonzero(
        (plan.instance_expert_V >= home.start) & (plan.instance_expert_V < home.stop)
    )
    W = len(plan.forward_WV)
    instance_b = np.repeat(mine_v, W)
    source_b = np.tile(np.arange(W), len(mine_v))
    order_b = np.lexsort((instance_b, source_b, plan.instance_expert_V[instance_b]))
    instance_b, source_b = instance_b[order_b], source_b[order_b]
    return instance_b, plan.forward_WV[source_b, instance_b]


def _rerouted(
    chosen: Selection,
    forward_N: torch.Tensor,
    expert_N: torch.Tensor,
    capacity_V: Int,
    instance_expert_V: Int,
) -> Selection:
    """The same pairs, each at an instance with room."""
    device = forward_N.device
    instance_P = reroute(
        forward_N[chosen.kept_P],
        expert_N[chosen.kept_P],
        upload(capacity_V, device),
        upload(instance_expert_V, device),
    )
    return replace(chosen, instance_P=instance_P)


def measure_noise(
    p_N: torch.Tensor,
    lrm_N: torch.Tensor,
    h_norm_sq_N: torch.Tensor,
    call: CallRecord,
    rank: int,
) -> torch.Tensor:
    """What the call's rule would add to the gradient at each of ``RATES``, and the sum of the LRM;
    float64 [A + 1], this rank's part. No device sync.

    For draws by source, with the mean of a share that is rounded at random; a draw over all ranks
    adds a little less.
    """
    config = call.config
    if config.selection == "random_unbiased":
        drawn_by_N = torch.zeros_like(lrm_N)
    elif config.draw == "forward":
        drawn_by_N = lrm(p_N, torch.ones_like(p_N), h_norm_sq_N)
    else:
        drawn_by_N = lrm_N
    mine_E, total_E = call.counts_WE[rank], call.counts_WE.sum(0)
    quota_AE = np.stack([rate_quotas(total_E, rate) for rate in RATES])
    share_AE = mine_E * quota_AE / np.maximum(total_E, 1)
    segments = Segments(mine_E, lrm_N.device)
    size_N = sampling_sizes(drawn_by_N, segments, config.min_inclusion)
    noise_A = sampling_noise(size_N, lrm_N, segments, share_AE)
    return torch.cat([noise_A, lrm_N.double().sum()[None]])


def completed_router_gradient(
    is_unbiased: bool,
    p_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    inner_TK: torch.Tensor,
    grad_output_T: torch.Tensor,
) -> torch.Tensor:
    """dL/dp of every pair, [T, K], of ``router_grad="completed"`` (specification, section 8).

    Args:
        weight_TK: selection weight, 0 where dropped.
        inner_TK: ``<G_t, y_s>`` of the kept pairs, 0 where dropped.
        grad_output_T: ``<G_t, out_t>`` with the routed output.
    """
    is_kept_TK = weight_TK > 0
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
