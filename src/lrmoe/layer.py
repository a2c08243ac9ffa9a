"""START HERE: a Mixture-of-Experts layer whose backward pass does the planned part of the work.

The forward story and the backward story, one line per stage; LRMoE (arXiv 2610.37720), section 3,
with the choices of ``docs/method.md``.

Shape letters: T = tokens on this rank, D = model dim, F = expert width, K = top-k, N = T * K routed
pairs, P = kept pairs, U = token rows, R = pairs computed here, W = ranks, E = experts,
e = experts on this rank.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from lrmoe import compute, dispatch
from lrmoe.account import account_backward, account_forward, pair_record, scatter_pairs
from lrmoe.config import Budget, Recalibration
from lrmoe.exchange import Exchange
from lrmoe.instances import (
    check_version,
    gradients_home,
    groups,
    kept_pairs,
    local_experts,
    with_kept_pairs,
)
from lrmoe.kernels.gated import Activation
from lrmoe.kernels.grouped_gemm import is_padded
from lrmoe.kernels.rows import poison_rows, row_norm_sq
from lrmoe.kernels.scratch import scratch_reuse
from lrmoe.pairs import (
    MessageOrder,
    PairTable,
    forward_instances,
    message_order,
    restore_pairs,
    sort_pairs,
    to_expert_major,
)
from lrmoe.recalibrate import choose_pairs, completed_router_gradient, measure_noise
from lrmoe.report import Span
from lrmoe.score import lrm, norms_and_codes, pair_lrm
from lrmoe.select import STRATUM_BITS, Selection
from lrmoe.state import (
    CallRecord,
    LayerSizes,
    LayerState,
    PendingCall,
    pairs_by_rank,
    refuse_call,
)

_ACTIVATIONS: dict[str, Activation | None] = {
    "silu": None,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
}
_P = ParamSpec("_P")
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _eager(function: Callable[_P, torch.Tensor]) -> Callable[_P, torch.Tensor]:
    """Leave a function to Python where the model around it is compiled: one graph break per call.

    Collectives, plans and sizes that depend on the routing have no place in a graph. As
    ``torch.compiler.disable``, whose import of the compiler takes a second, on the first call.
    """
    disabled: list[Callable[_P, torch.Tensor]] = []

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> torch.Tensor:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return run


@_eager
def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    act: str | Activation = "silu",
    group: dist.ProcessGroup | None = None,
    state: LayerState | None = None,
) -> torch.Tensor:
    """``sum_j w_tj * down_e(act(gate_e x_t) * up_e x_t)``; its backward pass as configured.

    With a group, expert ``e`` lives on rank ``e // (E / W)`` and every rank calls this with its own
    tokens, as many as it has. All ranks must agree on what requires a gradient.

    Args:
        hidden_states: [T, D]; T may be 0 and differ between ranks.
        top_k_index: integer [T, K], expert ids over all ranks.
        top_k_weights: [T, K], any floating dtype; used in float32.
        gate_up_proj: [E / W, 2F, D], this rank's experts, gate rows first. Its dtype is that of the
            computation (under autocast: autocast's).
        down_proj: [E / W, D, F].
        act: ``"silu"``, ``"gelu"``, ``"relu"`` or a function of the gate.
        group: expert-parallel group; ``None`` is one rank.
        state: settings and counters of this layer; ``None`` is exact training.

    Returns:
        [T, D] in the dtype of ``hidden_states``.

    Raises:
        ValueError: naming the argument, its value and what is allowed; before the first collective,
            and on every rank where only one is at fault.
    """
    exchange = Exchange(group)
    try:
        _check(hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, act)
        device_type = hidden_states.device.type
        dtype = gate_up_proj.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        _check_budget(state, dtype, gate_up_proj.shape[2], down_proj.shape[2])
        _check_text(state, hidden_states.shape[0])
    except ValueError:
        refuse_call(exchange, gate_up_proj, state)
        raise
    state = state if state is not None else LayerState()
    # Budgets count the rows of the pairs alone.
    exchange.keeps_rows &= state.config.budget.memory is None
    span = Span(hidden_states.device, exchange.num_ranks, is_timed=state.is_timed)
    needs_grad = [
        torch.is_grad_enabled() and t.requires_grad
        for t in (hidden_states, top_k_weights, gate_up_proj, down_proj)
    ]
    is_differentiable = any(needs_grad)
    pairs = sort_pairs(top_k_index, gate_up_proj.shape[0] * exchange.num_ranks)
    pending = state.begin_call(
        exchange,
        top_k_index,
        pairs,
        LayerSizes(
            hidden=gate_up_proj.shape[2],
            ffn=down_proj.shape[2],
            experts=gate_up_proj.shape[0] * exchange.num_ranks,
            dtype_bytes=dtype.itemsize,
            cast_bytes=(
                0 if dtype == gate_up_proj.dtype else gate_up_proj.nbytes + down_proj.nbytes
            ),
        ),
        is_differentiable=is_differentiable,
        needs_grad=needs_grad,
    )
    # A recomputed call keeps the settings it was made with.
    exchange.keeps_rows = exchange.num_ranks == 1 and pending.config.budget.memory is None
    call = _Call(
        state=state,
        exchange=exchange,
        pending=pending,
        act=_ACTIVATIONS[act] if isinstance(act, str) else act,
        is_differentiable=is_differentiable,
        span=span,
    )
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(device_type, enabled=False), scratch_reuse(pending.may_keep_scratch):
        output_TD: torch.Tensor = _RecalibratedExperts.apply(  # type: ignore[no-untyped-call]
            hidden_states.to(dtype),
            top_k_weights.to(wide),
            gate_up_proj.to(dtype),
            down_proj.to(dtype),
            top_k_index,
            pairs,
            call,
        )
    return output_TD.to(hidden_states.dtype)


@dataclass(eq=False, slots=True, kw_only=True)
class _Call:
    """What the stages of one layer call share besides tensors."""

    state: LayerState
    exchange: Exchange
    pending: PendingCall
    act: Activation | None
    is_differentiable: bool
    span: Span


def _as_in_forward(backward: Callable[..., Any]) -> Any:
    """Scores and sums keep their dtype where the backward pass is started under autocast, and
    temporaries give their memory back if those of the forward pass did."""

    @wraps(backward)
    def run(ctx: Any, grad_TD: torch.Tensor) -> Any:
        may_keep_scratch = ctx.call.pending.may_keep_scratch
        with (
            torch.autocast(grad_TD.device.type, enabled=False),
            scratch_reuse(may_keep_scratch),
        ):
            return backward(ctx, grad_TD)

    return run


class _RecalibratedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        p_TK: torch.Tensor,
        gate_up_e2FD: torch.Tensor,
        down_eDF: torch.Tensor,
        top_k_index_TK: torch.Tensor,
        pairs: PairTable,
        call: _Call,
    ) -> torch.Tensor:
        state, exchange, config = call.state, call.exchange, call.pending.config
        T = x_TD.shape[0]
        home = compute.Weights(gate_up_e2FD=gate_up_e2FD, down_eDF=down_eDF)
        p_N = p_TK.reshape(-1)[pairs.flat_N]
        returns_pairs = config.router_grad == "exact" and call.is_differentiable

        sent = _dispatch(call, home, x_TD, p_N, pairs)
        arrived, token_U, splits = sent.arrived, sent.token_U, sent.splits
        scale_R = torch.ones_like(arrived.p_R) if returns_pairs else arrived.p_R
        work = compute.forward_experts(
            arrived.x_UD,
            arrived.row_R,
            scale_R,
            sent.groups,
            sent.local,
            returns_pairs=returns_pairs,
            keeps_gate_up=config.save == "activations" and call.is_differentiable,
        )
        gate_up_R2F = work.gate_up_R2F
        y_TKD = None
        if returns_pairs:
            y_MD = dispatch.return_pairs(work.output, arrived.order, splits, exchange)
            y_ND = to_expert_major(y_MD, sent.pair_M)
            y_TKD = torch.empty_like(y_ND).index_copy_(0, pairs.flat_N, y_ND)
            y_TKD = y_TKD.view(*p_TK.shape, x_TD.shape[1])
            output_TD = (y_TKD * p_TK[:, :, None]).sum(1).to(x_TD.dtype)
        else:
            output_TD = dispatch.collect_rows(work.output, token_U, T, splits, exchange)
        record = call.pending.record()
        plan, local = record.plan, sent.local
        if not call.is_differentiable:
            return output_TD

        h_norm_sq_M = dispatch.return_pairs(work.h_norm_sq_R, arrived.order, splits, exchange)
        h_norm_sq_N = to_expert_major(h_norm_sq_M, sent.pair_M)
        saved = {
            "call_id": torch.tensor(record.id),
            "p_TK": p_TK,
            "h_norm_sq_N": h_norm_sq_N,
            "top_k_index_TK": top_k_index_TK,
            "gate_up_e2FD": gate_up_e2FD,
            "down_eDF": down_eDF,
        }
        x_UD: torch.Tensor = arrived.x_UD
        if config.draw == "forward":
            if record.selection is None:
                # Of the LRM what is known here.
                known_N = lrm(p_N, torch.ones_like(p_N), h_norm_sq_N)
                record.selection = choose_pairs(
                    p_N, known_N, None, pairs, record, state, exchange, _text_codes(record)
                )
            announced = dispatch.announce_kept(
                record.selection, x_TD, p_N, pairs, plan, splits, T, config.rows, exchange
            )
            if not (plan.keeps_all and plan.backward_is_forward):
                # With one rank the rows are the layer's own input, which costs nothing to keep.
                num_rows = (
                    None if exchange.keeps_rows else int(announced.splits.receive_rows_W.sum())
                )
                local = with_kept_pairs(local, record, exchange, announced.kept_WV)
                kept, x_UD, gate_up_R2F = kept_pairs(
                    announced, arrived.row_R, x_UD, gate_up_R2F, record, exchange, local
                )
                x_UD, gate_up_R2F = compute.compact_saved(x_UD, gate_up_R2F, kept, num_rows)
            saved |= announced.tensors()
            record.kept_host = (announced.kept_WV, announced.splits, announced.num_moved)
        else:
            if exchange.keeps_rows:  # the order of the pairs, from which their rows follow
                saved["flat_N"] = pairs.flat_N.to(torch.int32)
            else:
                saved["row_R"] = arrived.row_R
            if not plan.backward_is_forward:
                saved["x_TD"] = x_TD  # the inputs of pairs that move travel in the backward pass
        saved["x_UD"] = x_UD
        if config.save == "activations":
            assert gate_up_R2F is not None
            saved["gate_up_R2F"] = gate_up_R2F
        if config.router_grad == "completed":
            saved["output_TD"] = output_TD
        if y_TKD is not None:
            saved["y_TKD"] = y_TKD
        ctx.call, ctx.splits, ctx.saved_names = call, splits, list(saved)
        ctx.save_for_backward(*saved.values())
        call.span.stop()
        account_forward(
            state,
            exchange,
            record,
            splits,
            arrived.row_R.shape[0],
            saved,
            work.peak_bytes,
            call.span,
        )
        return output_TD

    @staticmethod
    @_as_in_forward
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        state, exchange, act = ctx.call.state, ctx.call.exchange, ctx.call.act
        needs_x, needs_p, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        record = state.find_call(int(saved["call_id"]))
        config, plan, T = record.config, record.plan, grad_TD.shape[0]
        span = Span(grad_TD.device, exchange.num_ranks, is_timed=state.is_timed)
        home = compute.Weights(gate_up_e2FD=saved["gate_up_e2FD"], down_eDF=saved["down_eDF"])
        if "flat_N" in saved:
            pairs = restore_pairs(saved["flat_N"], saved["top_k_index_TK"])
            row_R: torch.Tensor | None = pairs.token_N
        else:
            pairs = sort_pairs(saved["top_k_index_TK"], len(plan.quota_E))
            row_R = saved.get("row_R")
        p_N = saved["p_TK"].reshape(-1)[pairs.flat_N]
        code_T = None
        if "row_P" not in saved and _draws_by_gradient(record):
            grad_norm_sq_T, is_bad_T, code_T = norms_and_codes(grad_TD, config.strata)
        else:
            grad_norm_sq_T, is_bad_T = row_norm_sq(grad_TD)
        lrm_N = pair_lrm(p_N, grad_norm_sq_T, pairs.token_N, saved["h_norm_sq_N"])

        if "row_P" in saved:  # drawn in the forward pass
            assert record.selection is not None
            assert record.kept_host is not None
            selection = record.selection
            here = dispatch.local_instances(plan, exchange.rank)
            announced = dispatch.Announced.restore(saved, *record.kept_host, here=here)
        else:
            selection = choose_pairs(
                p_N,
                lrm_N,
                grad_norm_sq_T,
                pairs,
                record,
                state,
                exchange,
                _text_codes(record) if code_T is None else code_T,
            )
            announced = dispatch.announce_kept(
                selection, saved.get("x_TD"), p_N, pairs, plan, ctx.splits, T, config.rows, exchange
            )
        check_version(state, record)
        local = local_experts(record, exchange, home, act, announced.kept_WV)
        kept, x_UD, gate_up_R2F = kept_pairs(
            announced,
            row_R,
            saved["x_UD"],
            saved.get("gate_up_R2F"),
            record,
            exchange,
            local,
        )
        grads = compute.backward_experts(
            dispatch.send_rows(grad_TD, announced.token_U, announced.splits, exchange),
            x_UD,
            gate_up_R2F,
            kept,
            local,
            needs_x=needs_x,
            needs_gate_up=needs_gate_up,
            needs_down=needs_down,
        )
        grad_x_TD = grad_p_TK = None
        if needs_x:
            assert grads.x_UD is not None
            grad_x_TD = dispatch.collect_rows(
                grads.x_UD, announced.token_U, T, announced.splits, exchange
            )
            # Dropping pairs must not hide an overflow from the layers before.
            poison_rows(grad_x_TD, is_bad_T)
        if needs_p:
            inner_M = dispatch.return_pairs(grads.p_P, announced.order, announced.splits, exchange)
            inner_P = announced.to_kept_order(inner_M)
            grad_p_TK = _router_gradient(config, saved, grad_TD, pairs, selection, inner_P)
        grad_gate_up, grad_down = gradients_home(grads, plan, announced.kept_WV, exchange)
        span.stop()
        if config.is_auto:
            noise_B = measure_noise(p_N, lrm_N, saved["h_norm_sq_N"], record, exchange.rank)
            state.noise.add(record.step, noise_B)
        account_backward(
            state,
            exchange,
            record,
            announced,
            selection,
            lrm_N,
            is_bad_T,
            grads,
            saved,
            gate_up_R2F,
            local,
            span,
        )
        state.step_memory.release(record)
        if state.captured is not None:
            captured = pair_record(saved, record, exchange, pairs, selection, lrm_N)
            insort(state.captured, captured, key=lambda pair_record: pair_record.call)
        if state.recorder is not None:
            lrm_TK = torch.empty_like(lrm_N).index_copy_(0, pairs.flat_N, lrm_N)
            lrm_TK = lrm_TK.view(saved["p_TK"].shape)
            state.recorder.add_pairs(state.layer, record, lrm_TK, grad_TD)
        return grad_x_TD, grad_p_TK, grad_gate_up, grad_down, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The tokens of a forward pass at their experts."""

    arrived: dispatch.Arrived
    token_U: torch.Tensor | None  # of each row this rank sent; None: every token
    pair_M: torch.Tensor | None  # the order of sending; None: expert-major
    splits: dispatch.Splits
    groups: compute.Groups
    local: compute.Experts


def _dispatch(
    call: _Call,
    home: compute.Weights,
    x_TD: torch.Tensor,
    p_N: torch.Tensor,
    pairs: PairTable,
) -> _Sent:
    """Where nothing travels, the plan is not waited for: it is made while the device works."""
    exchange = call.exchange
    if exchange.keeps_rows:
        if call.pending.config.budget != Budget():
            call.pending.record()  # a limit that cannot be kept is one before anything is allocated
        arrived, splits = dispatch.keep_tokens(x_TD, p_N, pairs)
        return _Sent(
            arrived=arrived,
            token_U=None,
            pair_M=None,
            splits=splits,
            groups=compute.Groups(
                offsets_e=arrived.order.offsets_e,
                home_rows=len(p_N),
                top_k=pairs.top_k_index_TK.shape[1],
            ),
            local=compute.Experts(home=home, replicas=None, act=call.act),
        )
    record = call.pending.record()
    plan, pairs_V = record.plan, record.plan.forward_WV[exchange.rank]
    local = local_experts(record, exchange, home, call.act, plan.forward_WV)
    at_home = call.pending.take_home_rows()
    if at_home is not None and plan.is_home_only:
        sending, needed_WT = MessageOrder(pair_M=None, rank_M=at_home.rank_N), at_home.needed_WT
    else:
        instance_N = forward_instances(plan, pairs_V, x_TD.device)
        sending, needed_WT = message_order(plan, instance_N, pairs_V, x_TD.device), None
    splits = dispatch.Splits.of(exchange.rank, pairs_by_rank(plan, plan.forward_WV), record.rows_WW)
    arrived, token_U = dispatch.send_tokens(
        x_TD, p_N, pairs, sending, plan, splits, exchange, needed_WT
    )
    return _Sent(
        arrived=arrived,
        token_U=token_U,
        pair_M=sending.pair_M,
        splits=splits,
        groups=groups(arrived.order, plan.forward_WV, record, exchange),
        local=local,
    )


def _draws_by_gradient(record: CallRecord) -> bool:
    """Whether the call's sample is laid out by where the tokens' gradients point."""
    config = record.config
    return config.is_stratified and config.strata != "text" and not record.plan.keeps_all


def _text_codes(record: CallRecord) -> torch.Tensor | None:
    """What the call's sample is laid out by where that is the text."""
    config = record.config
    if not config.is_stratified or config.strata != "text" or record.plan.keeps_all:
        return None
    assert record.text_T is not None
    # Bits beyond those of a text_code would be taken for the expert's.
    return record.text_T.to(record.top_k_index_TK.device) & ((1 << STRATUM_BITS) - 1)


def _router_gradient(
    config: Recalibration,
    saved: dict[str, torch.Tensor],
    grad_TD: torch.Tensor,
    pairs: PairTable,
    selection: Selection,
    inner_P: torch.Tensor,
) -> torch.Tensor:
    """The kept pairs' ``<G, y>`` in pair order -> dL/dp [T, K] in the configured mode."""
    p_TK = saved["p_TK"]
    if config.router_grad == "kept":
        return scatter_pairs(selection.weight_P * inner_P, pairs, selection, p_TK)
    wide_TD = grad_TD.to(p_TK.dtype)
    if config.router_grad == "exact":
        return torch.einsum("td,tkd->tk", wide_TD, saved["y_TKD"].to(p_TK.dtype))
    return completed_router_gradient(
        config.is_unbiased,
        p_TK,
        scatter_pairs(selection.weight_P, pairs, selection, p_TK),
        scatter_pairs(inner_P, pairs, selection, p_TK),
        torch.linalg.vecdot(wide_TD, saved["output_TD"].to(p_TK.dtype)),
    )


def _check_budget(state: LayerState | None, dtype: torch.dtype, *widths: int) -> None:
    budget = None if state is None else state.config.budget.memory
    if budget is not None and is_padded(dtype, *widths):
        raise ValueError(
            f"budget.memory={budget}: the experts' products are padded with dtype={dtype}, widths "
            f"{widths}, which the memory model does not count; allowed are float32, bfloat16 and "
            "float16 with widths of a multiple of 16 bytes"
        )


def _check_text(state: LayerState | None, num_tokens: int) -> None:
    if state is None or not state.config.is_stratified or state.config.strata != "text":
        return
    if state.config.rate == 0:
        return
    if not torch.is_grad_enabled() or state.is_recomputing:  # which has the text of the first call
        return
    text_T = state.text_T
    if isinstance(text_T, torch.Tensor) and text_T.dtype == torch.int64 and text_T.ndim == 1:
        found = None if len(text_T) == num_tokens else f"the text of {len(text_T)} tokens is"
    else:
        found = "no text is" if text_T is None else "what is no text_code is"
    if found is not None:
        raise ValueError(
            f"strata='text': {found} known for a call of {num_tokens} tokens; give the configured "
            "model input_ids, or set LayerState.text_T = lrmoe.text_code(input_ids) before the call"
        )


def _check(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    act: str | Activation,
) -> None:
    def fail(name: str, value: object, allowed: str) -> None:
        raise ValueError(f"{name}={value}: {allowed}")

    floats = {
        "hidden_states": (hidden_states, 2),
        "top_k_weights": (top_k_weights, 2),
        "gate_up_proj": (gate_up_proj, 3),
        "down_proj": (down_proj, 3),
    }
    for name, (t, ndim) in floats.items():
        if t.ndim != ndim:
            fail(f"{name}.shape", tuple(t.shape), f"must have {ndim} dimensions")
        if not t.is_floating_point():
            fail(f"{name}.dtype", t.dtype, "must be a floating dtype")
        if t.device != hidden_states.device:
            fail(
                f"{name}.device", t.device, f"must be that of hidden_states, {hidden_states.device}"
            )
    if top_k_index.dtype not in _INDEX_DTYPES:
        fail("top_k_index.dtype", top_k_index.dtype, "must be an integer dtype")
    if top_k_index.device != hidden_states.device:
        fail("top_k_index.device", top_k_index.device, f"must be {hidden_states.device}")
    T, D = hidden_states.shape
    if top_k_index.ndim != 2 or top_k_index.shape[0] != T or top_k_index.shape[1] < 1:
        fail("top_k_index.shape", tuple(top_k_index.shape), f"must be [{T} tokens, K >= 1]")
    if top_k_weights.shape != top_k_index.shape:
        fail(
            "top_k_weights.shape", tuple(top_k_weights.shape), f"must be {tuple(top_k_index.shape)}"
        )
    e, F2, D_in = gate_up_proj.shape
    if e < 1 or F2 % 2 or D_in != D:
        fail("gate_up_proj.shape", tuple(gate_up_proj.shape), f"must be [experts, 2 * F, {D}]")
    if down_proj.shape != (e, D, F2 // 2):
        fail("down_proj.shape", tuple(down_proj.shape), f"must be {(e, D, F2 // 2)}")
    if down_proj.dtype != gate_up_proj.dtype:
        fail(
            "down_proj.dtype",
            down_proj.dtype,
            f"must be that of gate_up_proj, {gate_up_proj.dtype}",
        )
    if act not in _ACTIVATIONS if isinstance(act, str) else not callable(act):
        fail("act", repr(act), f"allowed are {', '.join(map(repr, _ACTIVATIONS))}, or a function")
