"""A run's own layer calls again, from the ids and scores of its pairs: exact, not expected.

The ranks are threads of this process. Planner, selection, rerouting and row lists are the functions
that training calls; only the rows themselves are left out.

Shape letters: W = ranks, T = tokens, K = top-k, N = a rank's pairs, E = experts, V = instances.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrmoe.cluster.trace import Calls, RankPairs, Trace, TraceInfo
from lrmoe.config import Recalibration
from lrmoe.dispatch import Announced, Splits, announce_kept
from lrmoe.exchange import Exchange
from lrmoe.pairs import PairTable, count_token_rows, forward_instances, message_order, sort_pairs
from lrmoe.planner import Plan, PlanProblem, plan
from lrmoe.planner.memory import LayerShape
from lrmoe.planner.problem import Int
from lrmoe.recalibrate import choose_pairs
from lrmoe.report import imbalance
from lrmoe.score import code_of
from lrmoe.select import Selection
from lrmoe.state import CallRecord, LayerSizes, LayerState, pairs_by_rank

# Rules whose scores a trace holds, or that need none.
RULES = ("top", "sampled", "random", "random_unbiased")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReplay:
    """One layer call of an expert-parallel group."""

    layer: int
    group: int
    step: int
    micro_batch: int
    plan: Plan
    kept_W: list[torch.Tensor]
    """Bool [T, K] of every rank."""
    weight_W: list[torch.Tensor]
    rows_2WW: Int
    """Token rows from each source to each computing rank, in both passes."""
    kept_WV: Int
    moved_W: Int
    """Kept pairs of each source that leave the instance of their forward pass."""
    bytes_2W: Int
    """Sent by each rank to others, in both passes."""


def traced_config(info: TraceInfo) -> Recalibration:
    """The settings of the traced run; those from before there were strata had none."""
    return Recalibration.from_dict({"strata": "none"} | info.settings)


def traced_shape(info: TraceInfo, state: LayerState, counts_WE: Int) -> LayerShape:
    """The sizes of a traced call."""
    sizes = LayerSizes(
        hidden=max(info.hidden, 1),
        ffn=max(info.ffn, 1),
        experts=info.experts,
        dtype_bytes=max(info.dtype_bytes, 1),
    )
    num_tokens = int(counts_WE.sum(1).max()) // info.top_k
    return state.shape(sizes, info.ep_size, num_tokens, info.top_k)


def planned_problem(
    info: TraceInfo, state: LayerState, counts_WE: Int, group_key: int
) -> PlanProblem:
    """What the traced call was planned from."""
    shape = traced_shape(info, state, counts_WE)
    return state.problem(counts_WE, shape, group_key, info.device)


class ThreadExchange(Exchange):
    """The collectives of ranks that are threads of this process."""

    def __init__(self, shared: Shared, rank: int, first_rank: int) -> None:
        super().__init__(None)
        self.num_ranks, self.rank = shared.num_ranks, rank
        self.keeps_rows = shared.num_ranks == 1
        self.global_rank, self.group_key = first_rank + rank, first_rank
        self._shared = shared

    def all_gather_counts(self, counts: torch.Tensor) -> Int:
        """int64 [n] on every rank -> [W, n]."""
        return np.stack([part.numpy() for part in self._shared.swap(self.rank, counts)])

    def all_to_all(
        self, rows: torch.Tensor, send_W: Sequence[int], receive_W: Sequence[int]
    ) -> torch.Tensor:
        """Rows laid out by destination -> rows laid out by source."""
        parts = self._shared.swap(self.rank, torch.split(rows, list(send_W)))
        return torch.cat([of_source[self.rank] for of_source in parts])


class Shared:
    """Where the threads of a group leave what the others read."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._values: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks)

    def swap(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, once all have called this."""
        self._values[rank] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()  # nobody overwrites what another has yet to read
        return values


def replay_pairs(trace: Trace, config: Recalibration | None = None) -> Iterator[PairReplay]:
    """Every layer call of the trace under the run's own settings, or under others.

    Raises:
        ValueError: if the trace has no pairs, or not the scores or the directions that the settings
            select by.
    """
    if not trace.info.has_pairs:
        raise ValueError(
            "the trace has counts alone: record it with 'lrmoe train --trace FILE --trace-pairs'"
        )
    if not (trace.info.hidden and trace.info.ffn and trace.info.dtype_bytes):
        raise ValueError("the trace does not say hidden, ffn and dtype_bytes, which size its rows")
    if config is None:
        config = traced_config(trace.info)
    if config.selection not in RULES or config.draw == "forward":
        raise ValueError(
            f"selection={config.selection!r}, draw={config.draw!r}: a trace holds the LRM alone; "
            f"allowed are {', '.join(map(repr, RULES))} with draw='backward'"
        )
    if config.is_stratified and config.strata == "text":
        raise ValueError(
            "strata='text': a trace does not have the text; replay it with strata='gradient' or "
            "'none', or its counts alone"
        )
    if config.is_auto:
        raise ValueError(
            "rate='auto': a trace does not say what rates the layers chose; only counts can be "
            "replayed, at rates that are given"
        )
    if config.budget.memory is not None:
        raise ValueError(
            f"budget.memory={config.budget.memory}: a trace does not say what other layers held "
            "meanwhile, which such a run's plans depend on; only counts can be replayed"
        )
    W = trace.info.ep_size
    last = max(calls.layer for calls in trace.calls)
    with ThreadPoolExecutor(W) as pool:
        for calls in trace.calls:
            state = LayerState(config, calls.layer)
            for c in range(len(calls.counts_CWE)):
                yield _replay_call(trace.info, state, calls, c, pool, calls.layer == last)


def _replay_call(
    info: TraceInfo,
    state: LayerState,
    calls: Calls,
    c: int,
    pool: ThreadPoolExecutor,
    is_last_layer: bool,
) -> PairReplay:
    assert calls.pairs_CW is not None
    W, first_rank = info.ep_size, calls.group * info.ep_size
    state.step, state.micro_batch = int(calls.step_C[c]), int(calls.micro_batch_C[c])
    counts_WE, pairs_W = calls.counts_CWE[c], calls.pairs_CW[c]
    made = plan(planned_problem(info, state, counts_WE, first_rank))
    is_drawn = state.config.is_stratified and not made.keeps_all
    if is_drawn and any(pairs.direction_T is None for pairs in pairs_W):
        raise ValueError(
            f"strata={state.config.strata!r}: the trace does not have the directions of its "
            "gradients; record it again, or replay it with strata='none'"
        )
    if state.config.placement != "fixed":
        state.past_counts.append(counts_WE)
    shared = Shared(W)

    def on_rank(rank: int) -> _RankOutcome:
        try:
            exchange = ThreadExchange(shared, rank, first_rank)
            return _rank_call(info, pairs_W[rank], made, counts_WE, state, exchange)
        except BaseException:
            shared.barrier.abort()  # the others would wait for this rank
            raise

    outcomes = list(pool.map(on_rank, range(W)))
    rows_2WW = np.stack(
        [
            np.stack([outcome.forward_rows_W for outcome in outcomes]),
            np.stack([outcome.announced.splits.send_rows_W for outcome in outcomes]),
        ]
    )
    kept_WV = outcomes[0].announced.kept_WV
    weights = [outcome.weight_TK for outcome in outcomes]
    return PairReplay(
        layer=calls.layer,
        group=calls.group,
        step=state.step,
        micro_batch=state.micro_batch,
        plan=made,
        kept_W=[weight_TK > 0 for weight_TK in weights],
        weight_W=weights,
        rows_2WW=rows_2WW,
        kept_WV=kept_WV,
        moved_W=np.array([outcome.announced.num_moved for outcome in outcomes]),
        bytes_2W=_sent_bytes(
            info,
            state.config,
            made,
            counts_WE,
            rows_2WW,
            kept_WV,
            np.array([outcome.moved_rows for outcome in outcomes]),
            is_last_layer,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankOutcome:
    forward_rows_W: Int
    announced: Announced
    moved_rows: int
    weight_TK: torch.Tensor


def _rank_call(
    info: TraceInfo,
    mine: RankPairs,
    made: Plan,
    counts_WE: Int,
    state: LayerState,
    exchange: ThreadExchange,
) -> _RankOutcome:
    """What one rank does in the call, up to the row lists."""
    expert_TK = torch.from_numpy(mine.expert_TK.astype(np.int64))
    T, rank = len(expert_TK), exchange.rank
    if state.config.budget.memory is not None:  # as in the layer
        exchange.keeps_rows = False
    pairs, pairs_V = sort_pairs(expert_TK, counts_WE.shape[1]), made.forward_WV[rank]
    rows_W = torch.tensor([T])
    if not exchange.keeps_rows:
        order = message_order(made, forward_instances(made, pairs_V, _CPU), pairs_V, _CPU)
        token_M = order.to_message(pairs.token_N)
        _, rows_W = count_token_rows(token_M, order.rank_M, T, exchange.num_ranks)
    rows_WW = exchange.all_gather_counts(rows_W)
    call = CallRecord(
        id=0,
        config=state.config,
        step=state.step,
        micro_batch=state.micro_batch,
        version=0,
        top_k_index_TK=expert_TK,
        counts_WE=counts_WE,
        plan=made,
        shape=traced_shape(info, state, counts_WE),
        rows_WW=rows_WW,
        top_k=info.top_k,
        number=0,
        may_be_recomputed=False,
    )
    score_N = torch.from_numpy(mine.score_TK.reshape(-1).copy())[pairs.flat_N]
    ones_N = torch.ones_like(score_N)
    code_T = None
    if state.config.is_stratified and not made.keeps_all:
        assert mine.direction_T is not None
        code_T = code_of(torch.from_numpy(mine.direction_T.copy()), state.config.strata)
    selection = choose_pairs(ones_N, score_N, None, pairs, call, state, exchange, code_T)
    splits = Splits.of(rank, pairs_by_rank(made, made.forward_WV), rows_WW)
    announced = announce_kept(
        selection, torch.ones(T, 1), ones_N, pairs, made, splits, T, state.config.rows, exchange
    )
    return _RankOutcome(
        forward_rows_W=rows_WW[rank],
        announced=announced,
        moved_rows=_moved_rows(selection, pairs, made, T, rank),
        weight_TK=_weights(selection, pairs.flat_N, expert_TK),
    )


def _weights(selection: Selection, flat_N: torch.Tensor, like_TK: torch.Tensor) -> torch.Tensor:
    weight = torch.zeros(like_TK.numel(), dtype=selection.weight_P.dtype)
    weight[flat_N[selection.kept_P]] = selection.weight_P
    return weight.view(like_TK.shape)


def _moved_rows(selection: Selection, pairs: PairTable, made: Plan, tokens: int, rank: int) -> int:
    """Token rows that this rank sends to others with pairs that leave their forward instance."""
    if selection.instance_P is None:
        return 0
    forward_N = forward_instances(made, made.forward_WV[rank], _CPU)
    assert forward_N is not None
    is_moved_P = selection.instance_P != forward_N[selection.kept_P]
    rank_V = torch.from_numpy(made.instance_rank_V)
    _, rows_W = count_token_rows(
        pairs.token_N[selection.kept_P[is_moved_P]],
        rank_V[selection.instance_P[is_moved_P]],
        tokens,
        len(made.forward_WV),
    )
    return int(rows_W.sum() - rows_W[rank])


def _sent_bytes(
    info: TraceInfo,
    config: Recalibration,
    made: Plan,
    counts_WE: Int,
    rows_2WW: Int,
    kept_WV: Int,
    moved_rows_W: Int,
    is_last_layer: bool,
) -> Int:
    """Bytes that each rank hands to its collectives for other ranks, as the layer counts them."""
    W, E = counts_WE.shape
    row = info.hidden * info.dtype_bytes
    expert = 3 * info.hidden * info.ffn * info.dtype_bytes
    home_V = made.instance_expert_V // (E // W)

    def others(matrix_WW: Int) -> tuple[Int, Int]:
        """Sent by sources, and arriving at computing ranks."""
        away_WW = matrix_WW * ~np.eye(W, dtype=bool)
        return away_WW.sum(1), away_WW.sum(0)

    def replicas(needed_V: Int) -> tuple[Int, Int]:
        """Copies that leave home, and that arrive."""
        is_away_V = (home_V != made.instance_rank_V) & (needed_V > 0)
        return (
            np.bincount(home_V[is_away_V], minlength=W),
            np.bincount(made.instance_rank_V[is_away_V], minlength=W),
        )

    result = np.zeros((2, W), np.int64)
    rows_out, rows_back = others(rows_2WW[0])
    pairs_out, pairs_back = others(pairs_by_rank(made, made.forward_WV))
    returned = pairs_back if config.router_grad == "exact" else rows_back
    copies_out, _ = replicas(made.forward_WV.sum(0))
    result[0] = row * (rows_out + returned) + 8 * pairs_out + 4 * pairs_back + expert * copies_out

    rows_out, rows_back = others(rows_2WW[1])
    pairs_out, pairs_back = others(pairs_by_rank(made, kept_WV))
    needed_V = kept_WV.sum(0)
    again_out, again_in = replicas(needed_V)
    # Slots that no other layer used since the forward pass still hold the weights.
    holds = is_last_layer and np.array_equal(needed_V > 0, made.forward_WV.sum(0) > 0)
    result[1] = row * (rows_out + rows_back) + 12 * pairs_out + 4 * pairs_back
    result[1] += expert * (again_in + (0 if holds else again_out)) + row * moved_rows_W
    if config.effective_scope == "global" and not (made.keeps_all and made.backward_is_forward):
        pairs_out, pairs_back = others(counts_WE.reshape(W, W, -1).sum(2))
        # The score in 4 bytes, and the direction in 8 where the draw needs it.
        there = 12 if config.is_stratified and not made.keeps_all else 4
        result[1] += there * pairs_out + (4 if made.is_home_only else 16) * pairs_back
    return result


def totals(replays: Sequence[PairReplay]) -> dict[str, Any]:
    """What a run reports of itself, summed over its calls."""
    pairs = sum(int(r.plan.forward_WV.sum()) for r in replays)
    kept = sum(int(r.kept_WV.sum()) for r in replays)
    away = ~np.eye(len(replays[0].kept_WV), dtype=bool)
    return {
        "calls": len(replays),
        "pairs": pairs,
        "kept_pairs": kept,
        "backward_fraction": kept / max(pairs, 1),
        "imbalance_fwd": float(
            np.mean([imbalance(pairs_by_rank(r.plan, r.plan.forward_WV).sum(0)) for r in replays])
        ),
        "imbalance_bwd": float(
            np.mean([imbalance(pairs_by_rank(r.plan, r.kept_WV).sum(0)) for r in replays])
        ),
        "payload_rows_fwd": sum(int(r.rows_2WW[0][away].sum()) for r in replays),
        "payload_rows_bwd": sum(int(r.rows_2WW[1][away].sum()) for r in replays),
        "bytes_fwd": sum(int(r.bytes_2W[0].sum()) for r in replays),
        "bytes_bwd": sum(int(r.bytes_2W[1].sum()) for r in replays),
        "moved_rows": sum(int(r.moved_W.sum()) for r in replays),
        "replicas": sum(r.plan.num_replicas for r in replays),
    }
