"""What a layer remembers between calls: settings, counters, the calls that may be recomputed.

Shape letters: T = tokens, K = top-k, W = ranks, E = experts, V = instances.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from lrmoe.auto import NUM_SUMS, NoiseMeter, choose_rate
from lrmoe.config import Recalibration
from lrmoe.exchange import Exchange, PendingCounts
from lrmoe.pairs import PairTable, count_token_rows, forward_instances, message_order
from lrmoe.planner import Budgets, Costs, MemoryCosts, Plan, PlanProblem, plan
from lrmoe.planner.costs import link_costs
from lrmoe.planner.memory import LayerShape, even_share, memory_costs, saved_costs
from lrmoe.planner.problem import Int
from lrmoe.report import LayerReport, PairRecord, Tally
from lrmoe.select import Selection
from lrmoe.step_memory import StepMemory
from lrmoe.upload import upload

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
    shape: LayerShape
    rows_WW: Int
    """Unique token rows from each source (first) to each destination rank in the forward pass."""
    top_k: int
    """Experts of a token, the most of any rank."""
    number: int
    """Of this layer's differentiable calls, counted alike on every rank."""
    may_be_recomputed: bool
    selection: Selection | None = None
    """Made in the forward pass (``draw="forward"``); replayed, never drawn again."""
    kept_host: tuple[Any, ...] | None = None
    """Counts of the kept pairs (``draw="forward"``)."""
    was_replayed: bool = False
    text_T: torch.Tensor | None = None
    """Of its tokens (``strata="text"``)."""
    casts_weights: bool = False
    """Whether the weights of the call are copies in another dtype, which the call keeps."""
    forward_moment: tuple[dict[str, int], int] | None = None
    """Bytes of this call at its forward peak, and of the other layers then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """What a call's arguments say of the layer."""

    hidden: int
    ffn: int
    experts: int
    dtype_bytes: int
    cast_bytes: int = 0
    """Of the weights in another dtype, from which those of the call are made (autocast)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeRows:
    """Where tokens go if every expert is computed at home; made before the counts are known."""

    rank_N: torch.Tensor  # int64, of each pair's expert
    needed_WT: torch.Tensor  # bool, which token goes to which rank


class PendingCall:
    """A layer call whose counts may still be on their way to the host.

    Args:
        config: the call's settings.
        plan_call: waits for the counts and plans.
        home_rows: ``None`` where nothing travels, and in a call that is made again.
    """

    def __init__(
        self,
        config: Recalibration,
        plan_call: Callable[[], CallRecord],
        home_rows: HomeRows | None = None,
    ) -> None:
        self.config = config
        self._home_rows = home_rows
        self._plan_call: Callable[[], CallRecord] | None = plan_call
        self._record: CallRecord | None = None

    @property
    def may_keep_scratch(self) -> bool:
        """Whether temporaries may keep their memory: not where a budget counts every byte."""
        return self.config.budget.memory is None

    def record(self) -> CallRecord:
        """The call with its plan (the first time one host sync, with replicas two).

        Raises:
            ValueError: on every rank, if some rank's expert ids are out of range, or the ranks
                disagree on what needs a gradient.
        """
        if self._plan_call is not None:
            self._record, self._plan_call = self._plan_call(), None  # and with it the pairs
        assert self._record is not None
        return self._record

    def take_home_rows(self) -> HomeRows | None:
        """Those of the call, once: they are not held until the backward pass."""
        taken, self._home_rows = self._home_rows, None
        return taken


class CallRecorder(Protocol):
    """Who wants to know of every differentiable call (:mod:`lrmoe.cluster.trace`)."""

    def add_call(self, layer: int, call: CallRecord, rank_in_group: int) -> None:
        """A call was planned."""

    def add_pairs(
        self, layer: int, call: CallRecord, score_TK: torch.Tensor, grad_TD: torch.Tensor
    ) -> None:
        """The LRM of its pairs and the gradients of its outputs are known."""


class LayerState:
    """Settings and memory of one MoE layer; framework-free programs keep one per layer.

    Args:
        config: the settings; ``None`` is exact training (rate 0).
        layer: number of the layer, part of its random stream's key.
    """

    def __init__(self, config: Recalibration | None = None, layer: int = 0) -> None:
        self.config = config if config is not None else Recalibration(rate=0.0)
        self.layer = layer
        self.is_timed = False
        """Whether calls measure ``fwd_ms`` and ``bwd_ms`` of the report."""
        self.text_T: torch.Tensor | None = None
        """int64 [T] of the coming call's tokens, for ``strata="text"``; ``configure`` has it set
        from the model's ``input_ids``."""
        self.step = 0
        self.micro_batch = 0
        self.version = 0
        self.step_memory = StepMemory()
        """Shared by the layers of one model, so that a memory budget covers the step."""
        self.past_counts: deque[Int] = deque(maxlen=_HISTORY)
        """Counts of the latest calls, oldest first, for policies that look at history."""
        self.noise = NoiseMeter()
        """What dropping would add to the gradient (``rate="auto"``)."""
        self.tally = Tally(layer)
        self.finished: Tally | None = None
        self.captured: list[PairRecord] | None = None
        self.recorder: CallRecorder | None = None
        self._calls: weakref.WeakValueDictionary[int, CallRecord] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    @property
    def num_noise(self) -> int:
        """Numbers that travel with the counts of a call so that all ranks choose one rate."""
        return NUM_SUMS if self.config.is_auto else 0

    @property
    def is_recomputing(self) -> bool:
        """Whether a call made now is one of this layer's that checkpointing makes again."""
        is_candidate = any(call.may_be_recomputed for call in self._calls.values())
        return is_candidate and _is_hooked() and _is_in_backward()

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
        sizes: LayerSizes,
        *,
        is_differentiable: bool,
        needs_grad: Sequence[bool] = (),
    ) -> PendingCall:
        """Count and agree (one collective), or replay the plan made before.

        Args:
            needs_grad: of hidden states, routing weights and the two projections.

        Raises:
            RuntimeError: on every rank, if a recomputation under activation checkpointing does not
                route as the first forward did.
        """
        is_hooked, is_in_backward = _is_hooked(), _is_in_backward()
        # Only non-reentrant checkpointing recomputes a call that has a graph; it sets hooks.
        if is_differentiable and is_hooked and is_in_backward:
            replayed = self._replay(exchange, top_k_index_TK)
            if replayed is not None:
                return PendingCall(replayed.config, lambda: replayed)
        # Frozen experts of one rank are its own business, unless their replicas are elsewhere.
        agreed = needs_grad[:2] if self.config.placement == "fixed" else needs_grad
        needs = sum(1 << i for i, need in enumerate((is_differentiable, *agreed)) if need)
        shape = self.shape(sizes, exchange.num_ranks, *top_k_index_TK.shape)
        held = [self.step_memory.of_others(self.layer) + shape.source_bytes + sizes.cast_bytes]
        # Nothing stays for a backward pass that is yet to come: what goes through hooks is kept
        # elsewhere, and a call inside a backward pass (reentrant checkpointing) comes last.
        is_alone = is_hooked or is_in_backward
        held += (0, 0) if is_alone else self.step_memory.of_later(self.layer)
        device = top_k_index_TK.device
        noise = [self.noise.bits(device)] if self.config.is_auto else []
        counts, home_rows = _start_gather_counts(
            exchange, top_k_index_TK, pairs, sizes.experts, noise, needs, held
        )

        plan_call = partial(
            self._plan_call,
            exchange,
            counts,
            top_k_index_TK,
            pairs,
            shape,
            is_differentiable=is_differentiable,
            may_be_recomputed=is_hooked,
            casts_weights=sizes.cast_bytes > 0,
        )
        return PendingCall(self.config, plan_call, home_rows)

    def _plan_call(
        self,
        exchange: Exchange,
        counts: PendingCounts,
        top_k_index_TK: torch.Tensor,
        pairs: PairTable,
        shape: LayerShape,
        *,
        is_differentiable: bool,
        may_be_recomputed: bool,
        casts_weights: bool,
    ) -> CallRecord:
        read = _read_counts(counts.wait(), shape.experts)
        counts_WE, rows_WW, held_3W, node_W, top_k_W, noise_WB = read
        started = time.perf_counter()
        if is_differentiable:
            rate = None
            if self.config.is_auto:
                rate = choose_rate(noise_WB, self.step, self.config.auto)
            problem = self.problem(
                counts_WE,
                shape,
                exchange.group_key,
                top_k_index_TK.device.type,
                held_3W,
                node_W,
                rate,
            )
        else:  # nothing to drop, nothing saved
            problem = PlanProblem(counts_WE=counts_WE, rate=Fraction(0))
        plan_ = plan(problem)
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
            shape=shape,
            rows_WW=rows_WW,
            top_k=int(top_k_W.max()),
            number=next(self._numbers) if is_differentiable else -1,
            may_be_recomputed=may_be_recomputed,
            text_T=self.text_T if self.config.strata == "text" else None,
            casts_weights=casts_weights,
        )
        if is_differentiable:
            self.tally.add(plan_us=plan_us)
            self.tally.rate = float(problem.rate)
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
        noise = self.noise.state_dict()
        if noise:
            values["noise"] = noise
        return values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.step, self.micro_batch = int(values["step"]), int(values["micro_batch"])
        past = [np.array(counts, dtype=np.int64) for counts in values.get("past_counts", ())]
        self.past_counts = deque(past, maxlen=_HISTORY)
        self.noise.load_state_dict(values.get("noise", {}))

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

    def shape(self, sizes: LayerSizes, num_ranks: int, num_tokens: int, top_k: int) -> LayerShape:
        """The next call's sizes, as the planner and the memory model take them."""
        config = self.config
        has_replicas = config.placement != "fixed"
        return LayerShape(
            hidden=sizes.hidden,
            ffn=sizes.ffn,
            experts=sizes.experts,
            top_k=max(top_k, 1),
            ranks=num_ranks,
            tokens=num_tokens,
            dtype_bytes=sizes.dtype_bytes,
            has_replicas=has_replicas,
            moves_pairs=has_replicas and config.effective_scope == "global",
            has_gradients=self.micro_batch > 0,
            save=config.save,
            draw=config.draw,
            router_grad=config.router_grad,
        )

    def problem(
        self,
        counts_WE: Int,
        shape: LayerShape,
        group_key: int,
        device_type: str = "cpu",
        held_3W: Int | None = None,
        node_W: Int | None = None,
        rate: Fraction | None = None,
    ) -> PlanProblem:
        """What the next call plans from: counts, settings and history.

        Args:
            group_key: first global rank of the expert-parallel group.
            device_type: whose links are meant.
            held_3W: bytes of each rank that other layers and calls hold, those that later layers
                are expected to save, and how many later layers nothing is known of; ``None``:
                nothing.
            node_W: node of each rank; ``None``: all on one.
            rate: ``None``: that of the settings.

        Raises:
            ValueError: for ``rate="auto"`` without the rate that was chosen.
        """
        config = self.config
        costs, reserved_W = Costs(), None
        memory: MemoryCosts | tuple[MemoryCosts, ...] = MemoryCosts()
        if config.budget.memory is not None:
            # The rank's own routing is among what it holds, since ranks differ in their tokens.
            alone = replace(shape, tokens=0)
            memory = (*memory_costs(alone), saved_costs(alone))
            if held_3W is None:
                held_3W = np.zeros((3, len(counts_WE)), np.int64)
            reserved_W = self._reserved(shape, held_3W, int(counts_WE.sum()), len(memory))
        if config.placement != "fixed" or config.budget.needs_costs:
            costs = link_costs(shape, device_type)
        rate = config.rate_at(self.step) if rate is None else rate
        needs_random_shares = config.is_unbiased and config.effective_scope == "local"
        budget = config.budget
        # Counts from before a change of layout say nothing about this one's ranks.
        past = [counts for counts in self.past_counts if counts.shape == counts_WE.shape]
        return PlanProblem(
            counts_WE=counts_WE,
            rate=rate,
            placement=config.placement,
            quotas=config.quotas,
            budgets=Budgets(
                memory_bytes=budget.memory,
                slots=budget.slots,
                staging_bytes=budget.staging,
                intra_bytes=budget.link_bytes,
                inter_bytes=budget.link_bytes,
                forward_pairs=budget.forward_pairs,
            ),
            costs=costs,
            memory=memory,
            reserved_W=reserved_W,
            top_k=shape.top_k,
            ranks_per_node=None if node_W is None else _ranks_per_node(node_W),
            c_max=None if config.c_max is None else Fraction(str(config.c_max)),
            past_counts_SWE=np.stack(past) if past else None,
            scope=config.effective_scope,
            share_seed=(
                self._key(config, "share", self.step, self.micro_batch, group_key)
                if needs_random_shares
                else None
            ),
        )

    def _reserved(self, shape: LayerShape, held_3W: Int, pairs: int, moments: int) -> Int:
        """Bytes of each rank that others have at every moment; last: while later layers run.

        What this layer saves must leave room for what later ones save and for the last one's call
        at its smallest. While it runs itself, backward pass included, they hold nothing.
        """
        held_W, expected_W, unknown_W = held_3W
        config = self.config
        rate = config.auto.high if config.is_auto else float(config.rate_at(self.step))
        least = 1 - max(rate, config.c_max or 0.0)
        saved, work = even_share(shape, pairs, least)
        has_later_W = (expected_W > 0) | (unknown_W > 0)
        reserved_AW = np.tile(held_W, (moments, 1))
        reserved_AW[-1] += expected_W + unknown_W * saved + has_later_W * work
        return reserved_AW

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
        outcome = upload(np.array([sum(bits), len(calls)]), top_k_index_TK.device)
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


def _ranks_per_node(node_W: Int) -> int | None:
    """Ranks of every node, if nodes are runs of equally many; else ``None``: as on one node."""
    starts = np.flatnonzero(np.diff(node_W, prepend=node_W[0] - 1))
    sizes = np.diff([*starts, len(node_W)])
    is_even = len(set(sizes.tolist())) == 1 and len(set(node_W.tolist())) == len(starts)
    return int(sizes[0]) if is_even and len(starts) > 1 else None


def _start_gather_counts(
    exchange: Exchange,
    top_k_index_TK: torch.Tensor,
    pairs: PairTable,
    num_experts: int,
    noise: list[torch.Tensor],
    needs: int,
    held: list[int],
) -> tuple[PendingCounts, HomeRows | None]:
    """Send what :func:`_read_counts` takes apart."""
    W, T, device = exchange.num_ranks, len(top_k_index_TK), top_k_index_TK.device
    if exchange.keeps_rows:
        home_rows, rows_W = None, pairs.flat_N.new_full((1,), T)
    else:
        rank_N = pairs.expert_N.clamp(0, num_experts - 1) // (num_experts // W)
        needed_WT, rows_W = count_token_rows(pairs.token_N, rank_N, T, W)
        home_rows = HomeRows(rank_N=rank_N, needed_WT=needed_WT)
    top_k = top_k_index_TK.shape[1]
    said = upload(np.array([*held, _node(), top_k, needs], np.int64), device)
    assert pairs.count_B is not None
    counts = exchange.start_all_gather_counts(torch.cat([pairs.count_B, rows_W, *noise, said]))
    return counts, home_rows


def _read_counts(gathered: Int, num_experts: int) -> tuple[Int, Int, Int, Int, Int, Int]:
    """Routed pairs [W, E] and unique token rows [W, W] of all ranks; raises on all or on none.

    Beside them what the ranks say of their memory, [3, W], their nodes, [W], the experts of a
    token, [W], and their noise, [W, B], measured in earlier calls.
    """
    # Ids of no expert, below and above, come first and last of the counts.
    W, first = len(gathered), num_experts + 2
    counts_WE = gathered[:, 1 : first - 1]
    outside_W, needs_W = gathered[:, 0] + gathered[:, first - 1], gathered[:, -1]
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
            f"hidden_states, 4 for top_k_weights, 8 for gate_up_proj, 16 for down_proj: "
            f"{needs_W.tolist()}); all ranks must do the same"
        )
    rows_WW, noise_WB = gathered[:, first : first + W], gathered[:, first + W : -6]
    held_3W, node_W, top_k_W = gathered[:, -6:-3].T, gathered[:, -3], gathered[:, -2]
    return counts_WE, rows_WW, held_3W, node_W, top_k_W, noise_WB


def _is_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _node() -> int:
    """The node of this process, as torchrun numbers them."""
    return int(os.environ.get("GROUP_RANK", "0"))


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


def refuse_call(exchange: Exchange, gate_up_proj: torch.Tensor, state: LayerState | None) -> None:
    """Stand in for a call whose arguments are bad, so that the other ranks do not wait for it."""
    size = gate_up_proj.shape[0] * exchange.num_ranks + exchange.num_ranks + 8
    size += 0 if state is None else state.num_noise
    exchange.all_gather_counts(torch.full((size,), -1, device=gate_up_proj.device))


def pairs_by_rank(plan_: Plan, pairs_WV: Int) -> Int:
    """Pairs per source and instance -> per source and computing rank, [W, W]."""
    ranks_W = np.arange(len(pairs_WV))
    first_W = np.searchsorted(plan_.instance_rank_V, ranks_W)
    # Every rank has instances, those of its home experts: else it would get another's pairs.
    assert len(plan_.instance_rank_V) > first_W[-1]
    assert (plan_.instance_rank_V[first_W] == ranks_W).all()
    return np.add.reduceat(pairs_WV, first_W, axis=1)


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
