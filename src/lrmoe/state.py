"""What a layer remembers between calls: settings, counters, the calls that may be recomputed.

Shape letters: T = tokens, K = top-k, W = ranks, E = experts, V = instances.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch

from lrmoe.config import Recalibration
from lrmoe.exchange import Exchange
from lrmoe.pairs import PairTable, count_token_rows, forward_instances, message_order
from lrmoe.planner import Budgets, Plan, PlanProblem, plan
from lrmoe.planner.problem import Int
from lrmoe.report import LayerReport, PairRecord, Tally
from lrmoe.select import Selection

_call_ids = itertools.count()
_HISTORY = 5  # what LAER-MoE sums over, the longest of the policies
# Losses of the tokens of the running backward pass, innermost context last. Backward passes of CUDA
# run on other threads, which a context variable would not reach.
_token_losses: list[torch.Tensor] = []


@dataclass(eq=False, kw_only=True)
class CallRecord:
    """One differentiable layer call: all that a recomputation must not decide again."""

    id: int
    config: Recalibration
    """The settings when the call was made: a change in between takes effect with the next call."""
    step: int
    micro_batch: int
    version: int
    """Of the parameters: optimizer steps and loaded states so far."""
    top_k_index_TK: torch.Tensor
    counts_WE: Int
    plan: Plan
    rows_WW: Int
    """Unique token rows from each source (first) to each destination rank in the forward pass."""
    number: int
    """Of this layer's differentiable calls, counted alike on every rank."""
    may_be_recomputed: bool
    selection: Selection | None = None
    """Made in the forward pass (``draw="forward"``); replayed, never drawn again."""
    kept_host: tuple[Any, ...] | None = None
    """Counts of the kept pairs (``draw="forward"``)."""
    was_replayed: bool = False


class CallRecorder(Protocol):
    """Who wants to know of every differentiable call (:mod:`lrmoe.cluster.trace`)."""

    def add_call(self, layer: int, call: CallRecord, rank_in_group: int) -> None:
        """A call was planned."""

    def add_pairs(self, layer: int, call: CallRecord, score_TK: torch.Tensor) -> None:
        """The LRM of its pairs is known."""


class LayerState:
    """Settings and memory of one MoE layer; framework-free programs keep one per layer.

    Args:
        config: the settings; ``None`` is exact training (rate 0).
        layer: number of the layer, part of its random stream's key.
    """

    def __init__(self, config: Recalibration | None = None, layer: int = 0) -> None:
        self.config = config if config is not None else Recalibration(rate=0.0)
        self.layer = layer
        self.step = 0
        self.micro_batch = 0
        self.version = 0
        self.past_counts: deque[Int] = deque(maxlen=_HISTORY)
        """Counts of the latest calls, oldest first, for policies that look at history."""
        self.tally = Tally(layer)
        self.finished: Tally | None = None
        self.captured: list[PairRecord] | None = None
        self.recorder: CallRecorder | None = None
        self._calls: weakref.WeakValueDictionary[int, CallRecord] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def finish_step(self) -> None:
        """An optimizer step ends here: the next call belongs to the next step."""
        self.step += 1
        self.version += 1
        self.micro_batch = 0
        self.finished, self.tally = self.tally, Tally(self.layer)

    def report(self) -> LayerReport:
        """Totals of the last finished step; of the running one if none is finished."""
        return (self.finished or self.tally).report()

    def generator(
        self, purpose: str, exchange: Exchange, call: CallRecord, device: torch.device
    ) -> torch.Generator:
        """The random stream of one purpose in one layer call on one rank.

        A stream shared between layers would correlate them: the output gradient of a layer already
        depends on what later layers drew.
        """
        seed = self._key(call.config, purpose, call.step, call.micro_batch, exchange.global_rank)
        return torch.Generator(device).manual_seed(seed)

    def find_call(self, call_id: int) -> CallRecord:
        """The record with this id, which lives as long as the autograd graph it belongs to."""
        return self._calls[call_id]

    def begin_call(
        self,
        exchange: Exchange,
        top_k_index_TK: torch.Tensor,
        pairs: PairTable,
        num_experts: int,
        *,
        is_differentiable: bool,
        needs_x: bool = False,
        needs_p: bool = False,
    ) -> CallRecord:
        """Count, agree and plan (one collective, one host sync), or replay the plan made before.

        Raises:
            ValueError: on every rank, if some rank's expert ids are out of range, or the ranks
                disagree on what needs a gradient.
            RuntimeError: on every rank, if a recomputation under activation checkpointing does not
                route as the first forward did.
        """
        # Only non-reentrant checkpointing recomputes a call that has a graph; it sets hooks.
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if is_differentiable and is_hooked and torch._C._current_graph_task_id() != -1:
            replayed = self._replay(exchange, top_k_index_TK)
            if replayed is not None:
                return replayed
        needs = is_differentiable + 2 * needs_x + 4 * needs_p
        counts_WE, rows_WW = _gather_counts(exchange, top_k_index_TK, pairs, num_experts, needs)
        started = time.perf_counter()
        plan_ = plan(self.problem(counts_WE, is_differentiable, exchange.group_key))
        plan_us = (time.perf_counter() - started) * 1e6
        if not plan_.is_home_only:
            rows_WW = _gather_rows(exchange, plan_, top_k_index_TK, pairs)
        record = CallRecord(
            id=next(_call_ids),
            config=self.config,
            step=self.step,
            micro_batch=self.micro_batch,
            version=self.version,
            top_k_index_TK=top_k_index_TK,
            counts_WE=counts_WE,
            plan=plan_,
            rows_WW=rows_WW,
            number=next(self._numbers) if is_differentiable else -1,
            may_be_recomputed=is_hooked,
        )
        if is_differentiable:
            self.tally.add(plan_us=plan_us)
            self.micro_batch += 1
            if self.config.placement != "fixed":
                self.past_counts.append(counts_WE)
            self._calls[record.id] = record
            self.tally.routed(counts_WE, pairs_by_rank(plan_, plan_.forward_WV).sum(0))
            if self.recorder is not None:
                self.recorder.add_call(self.layer, record, exchange.rank)
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw the samples the interrupted one would have drawn."""
        values: dict[str, Any] = {"step": self.step, "micro_batch": self.micro_batch}
        if self.past_counts:
            values["past_counts"] = [counts_WE.tolist() for counts_WE in self.past_counts]
        return values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.step, self.micro_batch = int(values["step"]), int(values["micro_batch"])
        past = [np.array(counts, dtype=np.int64) for counts in values.get("past_counts", ())]
        self.past_counts = deque(past, maxlen=_HISTORY)

    def __deepcopy__(self, memo: dict[int, object]) -> LayerState:
        """A copied model starts with the same settings and counters, and no pending calls."""
        copy = LayerState(self.config, self.layer)
        copy.load_state_dict(self.state_dict())
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "layer": self.layer, **self.state_dict()}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__init__(values["config"], values["layer"])  # type: ignore[misc]
        self.load_state_dict(values)

    def problem(self, counts_WE: Int, is_differentiable: bool, group_key: int) -> PlanProblem:
        """What the next call plans from: counts, settings and history.

        Args:
            group_key: first global rank of the expert-parallel group.
        """
        config = self.config
        rate = config.rate_at(self.step if is_differentiable else 0)
        needs_random_shares = config.is_unbiased and config.effective_scope == "local"
        budget = config.budget
        # Counts from before a change of layout say nothing about this one's ranks.
        past = [counts for counts in self.past_counts if counts.shape == counts_WE.shape]
        return PlanProblem(
            counts_WE=counts_WE,
            rate=rate,
            placement=config.placement if is_differentiable else "fixed",
            quotas=config.quotas if is_differentiable else "rate",
            budgets=Budgets(slots=budget.slots, forward_pairs=budget.forward_pairs),
            c_max=None if budget.c_max is None else Fraction(str(budget.c_max)),
            past_counts_SWE=np.stack(past) if past else None,
            scope=config.effective_scope,
            share_seed=(
                self._key(config, "share", self.step, self.micro_batch, group_key)
                if needs_random_shares
                else None
            ),
        )

    def _key(self, config: Recalibration, *parts: object) -> int:
        text = repr((config.seed, self.layer, *parts)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def _replay(self, exchange: Exchange, top_k_index_TK: torch.Tensor) -> CallRecord | None:
        """The call that the running backward pass recomputes; ``None`` if no call has a graph that
        could be recomputed."""
        # Of two calls with the same routing the latest, whose backward pass usually comes first;
        # one that was replayed already comes again only under retain_graph.
        calls = sorted(
            (call for call in self._calls.values() if call.may_be_recomputed),
            key=lambda call: (call.was_replayed, -call.id),
        )
        alike = [c for c in calls if torch.equal(c.top_k_index_TK, top_k_index_TK)]
        bits = {1 << call.number % 62 for call in alike}
        # One small collective and host sync: a mismatch ends every rank and hangs none, and all
        # replay the same call where some rank routed several alike (without tokens, say).
        outcome = torch.tensor([sum(bits), len(calls)], device=top_k_index_TK.device)
        bits_W, calls_W = exchange.all_gather_counts(outcome).T
        common = int(np.bitwise_and.reduce(bits_W))
        if not calls_W.any():
            return None
        if not common:
            raise RuntimeError(
                f"layer {self.layer}: the recomputation under activation checkpointing routes "
                "differently from the first forward (per rank, whether some call routed alike: "
                f"{(bits_W != 0).tolist()}). The router must be deterministic: check dropout, and "
                "state changed between forward and backward"
            )
        found = next(call for call in alike if common >> call.number % 62 & 1)
        found.was_replayed = True
        return found


def _gather_counts(
    exchange: Exchange,
    top_k_index_TK: torch.Tensor,
    pairs: PairTable,
    num_experts: int,
    needs: int,
) -> tuple[Int, Int]:
    """Routed pairs [W, E] and unique token rows [W, W] of all ranks; raises on all or on none."""
    W, device = exchange.num_ranks, top_k_index_TK.device
    is_outside_N = (pairs.expert_N < 0) | (pairs.expert_N >= num_experts)
    expert_N = pairs.expert_N.clamp(0, num_experts - 1)
    home_N = expert_N // (num_experts // W)
    _, rows_W = count_token_rows(pairs.token_N, home_N, top_k_index_TK.shape[0], W)
    flags = torch.stack([is_outside_N.sum(), torch.tensor(needs, device=device)])
    counts_E = torch.bincount(expert_N, minlength=num_experts)
    gathered = exchange.all_gather_counts(torch.cat([counts_E, rows_W, flags]))
    outside_W, needs_W = gathered[:, -2], gathered[:, -1]
    if outside_W.min() < 0:
        raise ValueError(
            "the arguments of another rank were refused, whose message says why; ranks: "
            f"{(outside_W < 0).nonzero()[0].tolist()}"
        )
    if outside_W.any():
        raise ValueError(
            f"top_k_index: allowed are expert ids 0 <= id < {num_experts}; ids outside per rank: "
            f"{outside_W.tolist()}"
        )
    if needs_W.min() != needs_W.max():
        raise ValueError(
            "the ranks disagree on what needs a gradient (per rank, 0: nothing; else 1, plus 2 for "
            f"hidden_states, plus 4 for top_k_weights: {needs_W.tolist()}); all ranks must do the "
            "same"
        )
    return gathered[:, :num_experts], gathered[:, num_experts : num_experts + W]


def _gather_rows(
    exchange: Exchange, plan_: Plan, top_k_index_TK: torch.Tensor, pairs: PairTable
) -> Int:
    """Unique token rows [W, W] where replicas decide the destinations (a second host sync)."""
    device, pairs_V = top_k_index_TK.device, plan_.forward_WV[exchange.rank]
    order = message_order(plan_, forward_instances(plan_, pairs_V, device), pairs_V, device)
    _, rows_W = count_token_rows(
        order.to_message(pairs.token_N), order.rank_M, len(top_k_index_TK), exchange.num_ranks
    )
    return exchange.all_gather_counts(rows_W)


def refuse_call(exchange: Exchange, gate_up_proj: torch.Tensor) -> None:
    """Stand in for a call whose arguments are bad, so that the other ranks do not wait for it."""
    size = gate_up_proj.shape[0] * exchange.num_ranks + exchange.num_ranks + 2
    exchange.all_gather_counts(torch.full((size,), -1, device=gate_up_proj.device))


def pairs_by_rank(plan_: Plan, pairs_WV: Int) -> Int:
    """Pairs per source and instance -> per source and computing rank, [W, W]."""
    W = len(pairs_WV)
    ends_W = np.searchsorted(plan_.instance_rank_V, np.arange(W), side="right")
    running = np.concatenate([np.zeros((W, 1), np.int64), pairs_WV.cumsum(1)], axis=1)
    return np.diff(running[:, np.concatenate([[0], ends_W])], axis=1)


@contextmanager
def token_losses(loss_T: torch.Tensor) -> Iterator[None]:
    """Hand the tokens' losses to ``selection="token_loss"``; wrap the backward pass in it.

    Args:
        loss_T: float, one per token in the order the layers see them, shape [T].
    """
    _token_losses.append(loss_T.detach())
    try:
        yield
    finally:
        _token_losses.pop()


def current_token_losses(num_tokens: int) -> torch.Tensor:
    """The losses of the innermost :func:`token_losses`.

    Raises:
        ValueError: if there are none, or not one per token.
    """
    if not _token_losses:
        raise ValueError(
            "selection='token_loss' needs the tokens' losses: run the backward pass inside "
            "'with lrmoe.token_losses(loss_T)'"
        )
    loss_T = _token_losses[-1].reshape(-1)
    if loss_T.shape[0] != num_tokens:
        raise ValueError(
            f"token_losses has {loss_T.shape[0]} losses, this layer {num_tokens} tokens"
        )
    return loss_T
