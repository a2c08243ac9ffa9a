"""Routing through policies and rates: the layer state and planner of training, a modelled clock.

Every arm (policy, rate, ...) has a :class:`~lrmoe.state.LayerState` of its own, as a layer in
training has, which builds the problems it plans; added are the coefficients of the hardware, by
which the planner weighs moves.

Shape letters: C = layer calls, W = ranks, E = experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lrmoe.cluster.cost import COMMUNICATION, PassTimes, Rows, layer_times, planner_costs
from lrmoe.cluster.hardware import Hardware
from lrmoe.cluster.models import ModelShape
from lrmoe.cluster.trace import Trace
from lrmoe.cluster.workloads import Workload, layer_counts
from lrmoe.config import Budget, Recalibration
from lrmoe.planner import InfeasiblePlan, Plan, plan
from lrmoe.planner.memory import MemoryItems, memory_items
from lrmoe.planner.problem import Float, Int, home_ranks
from lrmoe.report import imbalance
from lrmoe.state import LayerState

# Policies that need no counts of the call they plan: their planning can be done before.
BY_HISTORY = ("fixed", "symi", "eplb", "flexmoe", "smartmoe", "laer")
DEFAULT_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated besides routing and policy.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    model: ModelShape
    hardware: Hardware
    ranks: int
    ranks_per_node: int = 8
    memory_bytes: int = 80 << 30
    """Of one rank."""
    state_bytes: int | None = None
    """Of it, what the rest of the model takes on a rank: everything but this layer's token buffers
    and replicas. ``None``: bf16 weights and gradients of all layers, experts over the ranks and the
    rest sharded over them; optimizer state elsewhere."""
    save: str = "activations"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"ranks={self.ranks}, ranks_per_node={self.ranks_per_node}: allowed is >= 1"
            )
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ValueError(f"ranks_per_node={self.ranks_per_node}: must divide {self.ranks}")

    @property
    def node_size(self) -> int:
        """Ranks of a node, at most all of them."""
        return min(self.ranks_per_node, self.ranks)

    @property
    def resolved_state_bytes(self) -> int:
        """``state_bytes`` with its default filled in."""
        if self.state_bytes is not None:
            return self.state_bytes
        model = self.model
        per_rank = (model.expert_parameters + model.other_parameters) / self.ranks
        return int(2 * 2 * per_rank)


def arm(
    policy: str,
    rate: float,
    *,
    selection: str = "sampled",
    quotas: str = "rate",
    draw: str = "backward",
    slots: int | None = DEFAULT_SLOTS,
    seed: int = 0,
) -> Recalibration:
    """The settings of a layer under a policy; a bound on slots only where the policy takes one."""
    has_slots = policy not in ("fixed", "fastermoe")
    return Recalibration(
        rate=rate,
        selection=selection,
        quotas=quotas,
        placement=policy,
        draw=draw,
        seed=seed,
        budget=Budget(slots=slots if has_slots else None),
    )


@dataclass(slots=True)
class _Sums:
    """Totals of one arm."""

    calls: int = 0
    infeasible: int = 0
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    busy_2W: Float | float = 0.0
    imbalance_3: Float = field(default_factory=lambda: np.zeros(3))
    kept: int = 0
    pairs: int = 0
    replicas: int = 0
    most_replicas: int = 0
    plan_s: list[float] = field(default_factory=list)
    subtotal_bytes: float = 0.0
    worst_bytes: int = 0
    items: dict[str, float] = field(default_factory=dict)
    fits: float = 0.0
    fits_least: float = 1.0
    fits_step: float = 0.0

    def add_pass(self, name: str, times: PassTimes) -> None:
        sums = getattr(self, name)
        for part, seconds in times.parts().items():
            sums[part] = sums.get(part, 0.0) + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """Calls of one layer, in order."""

    layer: int
    group: int
    step_C: Int
    micro_batch_C: Int
    counts_CWE: Int


def generated(
    workload: Workload,
    cluster: Cluster,
    *,
    tokens: int,
    layers: int,
    steps: int,
    micro_batches: int = 1,
    seed: int = 0,
) -> Iterator[LayerCalls]:
    """Synthetic calls, one layer in memory at a time."""
    C = steps * micro_batches
    for layer in range(layers):
        yield LayerCalls(
            layer=layer,
            group=0,
            step_C=np.arange(C) // micro_batches,
            micro_batch_C=np.arange(C) % micro_batches,
            counts_CWE=layer_counts(
                workload,
                cluster.ranks,
                cluster.model.experts,
                tokens=tokens,
                top_k=cluster.model.top_k,
                layer=layer,
                steps=steps,
                micro_batches=micro_batches,
                seed=seed,
            ),
        )


def recorded(trace: Trace) -> Iterator[LayerCalls]:
    """The calls of a trace."""
    for calls in trace.calls:
        yield LayerCalls(
            layer=calls.layer,
            group=calls.group,
            step_C=calls.step_C,
            micro_batch_C=calls.micro_batch_C,
            counts_CWE=calls.counts_CWE,
        )


def replay(
    cluster: Cluster, arms: Sequence[Recalibration], calls: Iterable[LayerCalls]
) -> list[dict[str, Any]]:
    """One row for every arm: means over the layer calls, in the units of the names. Simulated."""
    sums = [_Sums() for _ in arms]
    for of_layer in calls:
        states = [LayerState(config, of_layer.layer) for config in arms]
        for c, counts_WE in enumerate(of_layer.counts_CWE):
            for state, total in zip(states, sums, strict=True):
                state.step = int(of_layer.step_C[c])
                state.micro_batch = int(of_layer.micro_batch_C[c])
                _replay_call(cluster, state, counts_WE, of_layer.group, total)
    return [_row(cluster, config, total) for config, total in zip(arms, sums, strict=True)]


def _replay_call(
    cluster: Cluster, state: LayerState, counts_WE: Int, group: int, total: _Sums
) -> None:
    W, model, config = len(counts_WE), cluster.model, state.config
    tokens_W = -(-counts_WE.sum(1) // model.top_k)
    has_replicas = config.placement != "fixed"
    shape = model.layer_shape(
        W,
        int(tokens_W.max()),
        save=cluster.save,
        draw=config.draw,
        has_replicas=has_replicas,
        moves_pairs=has_replicas and config.effective_scope == "global",
    )
    started = time.process_time()
    problem = replace(
        state.problem(counts_WE, shape, group * W),
        costs=planner_costs(cluster.hardware, shape),
        ranks_per_node=cluster.node_size,
        top_k=model.top_k,
    )
    total.calls += 1
    try:
        made = plan(problem)
    except InfeasiblePlan:
        total.infeasible += 1
        return
    finally:
        total.plan_s.append(time.process_time() - started)
        if config.placement != "fixed":
            state.past_counts.append(counts_WE)
    rows = Rows.expected(made, tokens_W, model.top_k, cluster.node_size)
    forward, backward = layer_times(
        cluster.hardware,
        shape,
        made,
        rows,
        tokens_W,
        node_size=cluster.node_size,
        selects=not made.keeps_all,
        is_global=config.effective_scope == "global",
        is_stratified=config.is_stratified,
    )
    total.add_pass("forward", forward)
    total.add_pass("backward", backward)
    total.busy_2W = total.busy_2W + np.stack([forward.busy(), backward.busy()])
    _add_counts(total, made, counts_WE)
    items = memory_items(
        shape, made, np.ceil(rows.received_2W).astype(np.int64), has_home_gradients=False
    )
    _add_memory(total, cluster, items)


def _add_counts(total: _Sums, made: Plan, counts_WE: Int) -> None:
    W, E = counts_WE.shape
    kept_V = made.quota_E if made.backward_V is None else made.backward_V
    loads = (
        np.bincount(home_ranks(W, E), weights=counts_WE.sum(0), minlength=W),
        np.bincount(made.instance_rank_V, weights=made.forward_WV.sum(0), minlength=W),
        np.bincount(made.instance_rank_V, weights=kept_V, minlength=W),
    )
    total.imbalance_3 += [imbalance(load_W.astype(np.int64)) for load_W in loads]
    total.kept += int(kept_V.sum())
    total.pairs += int(counts_WE.sum())
    total.replicas += made.num_replicas
    total.most_replicas = max(total.most_replicas, made.num_replicas)


def _add_memory(total: _Sums, cluster: Cluster, items: MemoryItems) -> None:
    subtotal_W = subtotal(items)
    worst = int(subtotal_W.argmax())
    total.subtotal_bytes += float(subtotal_W[worst])
    total.worst_bytes = max(total.worst_bytes, int(subtotal_W[worst]))
    of_rank = {
        "home_weights": items.home_weights_W[worst],
        "replicas": items.replica_weights_W[worst] + items.replica_gradients_W[worst],
        "staging": items.staging_W[worst],
        "dispatch_rows": items.dispatch_rows_W[worst],
        "saved_state": items.saved_state_W[worst],
        "payload_rows": items.payload_rows_W[worst],
        "workspace": items.workspace_W[worst],
    }
    for name, size in of_rank.items():
        total.items[name] = total.items.get(name, 0.0) + float(size)
    budget = cluster.memory_bytes - cluster.resolved_state_bytes
    fits = fitting_share(budget, items, 1)
    total.fits += fits
    total.fits_least = min(total.fits_least, fits)
    total.fits_step += fitting_share(budget, items, items.layers)


def subtotal(items: MemoryItems) -> Int:
    """Placement, replicas and token buffers of a layer call, by rank."""
    return (
        items.home_weights_W
        + items.replica_weights_W
        + items.replica_gradients_W
        + items.staging_W
        + items.token_buffers
    )


def fitting_share(budget_bytes: int, items: MemoryItems, layers: int) -> float:
    """Share of the batch whose token buffers fit beside the replicas on every rank.

    Token buffers are proportional to the batch.

    Args:
        layers: whose saved state is alive at a time, all like this one: 1 where the others are
            recomputed.
    """
    left_W = budget_bytes - (items.replica_weights_W + items.replica_gradients_W + items.staging_W)
    needed_W = np.maximum((layers - 1) * items.held_W + items.token_buffers, 1)
    return float(np.clip((left_W / needed_W).min(), 0.0, 1.0))


def _row(cluster: Cluster, config: Recalibration, total: _Sums) -> dict[str, Any]:
    done = max(total.calls - total.infeasible, 1)
    forward = {name: 1e3 * s / done for name, s in total.forward.items()}
    backward = {name: 1e3 * s / done for name, s in total.backward.items()}
    fwd_ms, bwd_ms = sum(forward.values()), sum(backward.values())
    # The first plan of a process loads compiled code.
    timed = total.plan_s[1:] or total.plan_s
    host_ms = 1e3 * float(np.median(timed)) if timed else 0.0
    plan_ms = 0.0 if config.placement in BY_HISTORY else host_ms
    home, fwd, bwd = (float(v) for v in total.imbalance_3 / done)
    busy_2W = np.broadcast_to(total.busy_2W, (2, cluster.ranks)) * (1e3 / done)
    return {
        "simulated": True,
        "model": cluster.model.name,
        "hardware": cluster.hardware.name,
        "policy": config.placement,
        "rate": config.rate,
        "selection": config.selection,
        "quotas": config.quotas,
        "draw": config.draw,
        "slots": config.budget.slots,
        "ranks": cluster.ranks,
        "calls": total.calls,
        "infeasible_calls": total.infeasible,
        "backward_fraction": total.kept / max(total.pairs, 1),
        "imbalance_home": home,
        "imbalance_fwd": fwd,
        "imbalance_bwd": bwd,
        "fwd_ms": fwd_ms,
        "bwd_ms": bwd_ms,
        "comm_ms": sum(forward.get(n, 0.0) + backward.get(n, 0.0) for n in COMMUNICATION),
        "plan_ms": plan_ms,
        "plan_host_ms": host_ms,
        "makespan_ms": fwd_ms + bwd_ms + plan_ms,
        **{f"fwd_{name}_ms": ms for name, ms in forward.items()},
        **{f"bwd_{name}_ms": ms for name, ms in backward.items()},
        "fwd_rank_ms": busy_2W[0].tolist(),
        "bwd_rank_ms": busy_2W[1].tolist(),
        "replicas": total.replicas / done,
        "replicas_most": total.most_replicas,
        "memory_subtotal_bytes": total.subtotal_bytes / done,
        "memory_worst_bytes": total.worst_bytes,
        **{f"memory_{name}_bytes": size / done for name, size in total.items.items()},
        "effective_throughput": total.fits / done,
        "effective_throughput_step": total.fits_step / done,
        "effective_throughput_least": total.fits_least if total.calls else 0.0,
    }
