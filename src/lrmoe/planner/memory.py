"""The memory model: bytes of every rank by category, from a layer's shapes and a plan.

A layer call peaks in one of a few moments, which follow ``compute.py`` and ``layer.py`` step by
step (what a step no longer needs is freed before the next):

    outputs    forward: gate_up outputs, scaled h and outputs of all pairs
    sums       forward: gate_up outputs and outputs of all pairs, their sums per token row
    payload    backward: gradient rows of the kept pairs' tokens, one row per pair gathered
    gated      backward: gathered rows, dh, d(gate_up), scaled h
    wgrad      backward: d(gate_up), gathered inputs; weight gradients, the replicas' included
    dgrad      backward: dx of every pair and its sums per token row; all weight gradients

Always there are the home experts' weights, one gradient of theirs (left by the micro-batch before,
or this one's own), the replicas' weights, what the forward pass saved, and the rank's own routing.

    saved      x rows received, row ids; gate_up outputs unless save="inputs"
    source     routing weights, ids, |h|^2; outputs by router mode

With ``draw="forward"`` dropped pairs leave nothing behind, so x rows and gate_up outputs count as
kept ones. Where there can be replicas, a product runs once per weight buffer and the two results
are joined, so its output counts twice for a moment. Everything is linear in rows and pairs
(:class:`~lrmoe.planner.problem.MemoryCosts`), which is what lets the planner treat a memory budget
as a cap on pairs.

Shape letters: W = ranks, E = experts, D = model dim, F = expert width, T = tokens of a rank, K =
top-k, N = T * K, A = moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planner.problem import Int, MemoryCosts, Plan

_FLOAT32, _INT32, _INT64 = 4, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What the memory of an MoE layer depends on besides the plan.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    hidden: int
    ffn: int
    experts: int
    top_k: int
    ranks: int
    tokens: int
    """Per rank."""
    dtype_bytes: int = 2
    """Of weights, activations and weight gradients."""
    has_replicas: bool = False
    """Whether plans may have replicas."""
    moves_pairs: bool = False
    """Whether kept pairs may leave the instance of their forward pass (global scope)."""
    has_gradients: bool = False
    """Whether an earlier micro-batch of the step has left weight gradients, to which those of this
    one are added."""
    save: str = "activations"
    draw: str = "backward"
    router_grad: str = "kept"
    layers: int = 1
    """MoE layers of the model, whose saved state is alive at the same time."""
    optimizer_bytes: int = 12
    """Of one parameter: two moments and a master copy in float32."""
    other_bytes: int = 0
    """The rest of the model, of a rank."""

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "experts", "top_k", "ranks", "dtype_bytes", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        choices = {
            "save": ("activations", "inputs"),
            "draw": ("backward", "forward"),
            "router_grad": ("kept", "completed", "exact"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}"
                )

    @property
    def expert_bytes(self) -> int:
        """Weights (or a weight gradient) of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.ffn * self.dtype_bytes

    @property
    def row_bytes(self) -> int:
        """One token row."""
        return self.hidden * self.dtype_bytes

    @property
    def source_bytes(self) -> int:
        """What a rank keeps for its own tokens."""
        T, N = self.tokens, self.tokens * self.top_k
        size = N * (2 * _FLOAT32 + _INT64)  # routing weights, |h|^2, expert ids
        if self.router_grad == "completed":
            size += T * self.row_bytes
        if self.router_grad == "exact":
            size += N * self.row_bytes
        return size

    @property
    def saved_pair_bytes(self) -> int:
        """Saved for one pair that the backward pass can still use, besides its token's row."""
        gate_up = 2 * self.ffn * self.dtype_bytes if self.save == "activations" else 0
        if self.draw == "forward":  # row, place in the message, coefficient
            return gate_up + _INT32 + _INT64 + _FLOAT32
        return gate_up + _INT32

    def moments(self) -> tuple[Moment, ...]:
        """The moments of a layer call that can be its peak."""
        D, F, b = self.hidden, self.ffn, self.dtype_bytes
        gate_up_is_new = self.save == "inputs" or self.draw == "forward"
        made = 0 if gate_up_is_new else -2 * F  # counted with what is saved
        joined = 2 if self.has_replicas else 1
        outputs = max(3 * F + joined * D, (D + 2 * joined * F) if self.has_replicas else 0)
        again = 2 * F if self.save == "inputs" or self.moves_pairs else 0
        x_rows = D if self.draw == "forward" else 0
        # Notes of a kept pair: row, place, coefficient; of both passes: <G, y> or |h|^2.
        notes = _FLOAT32 + (0 if self.draw == "forward" else 2 * _INT32 + _FLOAT32)
        fresh = int(self.has_gradients)
        moved_rows = D if self.moves_pairs else 0

        def forward(name: str, pair: int, row: int) -> Moment:
            return Moment(name=name, is_backward=False, pair=b * (pair + made), row=b * row)

        def backward(name: str, pair: int, row: int, replicas: int = 0) -> Moment:
            return Moment(
                name=name,
                is_backward=True,
                pair=b * pair + notes,
                row=b * (row + moved_rows),
                replica_gradients=replicas,
                fresh_gradients=fresh if replicas else 0,
            )

        found = [
            forward("outputs", outputs, x_rows),
            forward("sums", 2 * F + D, x_rows + D),
            backward("payload", D, D),
            backward("gated", D + 4 * F + again, 0),
            backward("wgrad", joined * D + 2 * F, 0, replicas=1),
            backward("dgrad", D, D, replicas=1),
        ]
        return tuple(m for m in found if not any(m.is_below(other) for other in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive at one moment of a layer call besides what is always there, in bytes."""

    name: str
    is_backward: bool
    pair: int
    """Of each pair of the pass (backward: kept ones)."""
    row: int
    """Of each token row received in the pass."""
    replica_gradients: int = 0
    fresh_gradients: int = 0
    """Weight gradients of the home experts that are not yet added to earlier ones."""

    def is_below(self, other: Moment) -> bool:
        """Whether the other moment never takes less. Rows are never more than pairs."""
        if self == other or self.is_backward != other.is_backward:
            return False
        mine = (self.pair, self.pair + self.row, self.replica_gradients, self.fresh_gradients)
        theirs = (
            *(other.pair, other.pair + other.row),
            *(other.replica_gradients, other.fresh_gradients),
        )
        return all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItems:
    """Bytes of every rank by category."""

    home_weights_W: Int
    replica_weights_W: Int
    replica_gradients_W: Int
    staging_W: Int
    dispatch_rows_W: Int
    """Token rows received in the forward pass and saved."""
    saved_state_W: Int
    """Everything else saved for the backward pass, on either side."""
    payload_rows_W: Int
    """Token rows that travel back: sums of outputs, gradients in, or dx out."""
    workspace_W: Int
    """Temporaries of the pairs."""
    gradients_W: Int
    """Of this layer's home experts."""
    optimizer_W: Int
    other_W: Int
    moment_W: tuple[str, ...]
    """The moment of each rank's peak, which the items are of."""
    layers: int

    @property
    def layer_call(self) -> Int:
        """One layer call at its peak."""
        return (
            self.home_weights_W
            + self.replica_weights_W
            + self.replica_gradients_W
            + self.staging_W
            + self.dispatch_rows_W
            + self.saved_state_W
            + self.payload_rows_W
            + self.workspace_W
            + self.gradients_W
        )

    @property
    def token_buffers(self) -> Int:
        """All that grows with tokens, in one layer call."""
        return self.dispatch_rows_W + self.saved_state_W + self.payload_rows_W + self.workspace_W

    @property
    def whole_step(self) -> Int:
        """All layers' weights, gradients, optimizer and saved state, and one layer at its peak."""
        resting_W = self.home_weights_W + self.gradients_W
        saved_W = self.dispatch_rows_W + self.saved_state_W
        others_W = (self.layers - 1) * (resting_W + saved_W)
        total_W: Int = self.layer_call + others_W + self.layers * self.optimizer_W + self.other_W
        return total_W


def memory_costs(shape: LayerShape) -> tuple[MemoryCosts, ...]:
    """The coefficients of the planner, one for each moment that can be the peak."""
    home = -(-shape.experts // shape.ranks)
    saves_kept = shape.draw == "forward"
    row, pair = shape.row_bytes, shape.saved_pair_bytes
    costs = []
    for moment in shape.moments():
        forward_row = forward_pair = kept_row = kept_pair = 0
        if moment.is_backward:
            kept_row, kept_pair = moment.row, moment.pair
        else:
            forward_row, forward_pair = moment.row, moment.pair
        if not saves_kept:
            forward_row, forward_pair = forward_row + row, forward_pair + pair
        elif moment.is_backward:
            kept_row, kept_pair = kept_row + row, kept_pair + pair
        costs.append(
            MemoryCosts(
                fixed=(2 + moment.fresh_gradients) * home * shape.expert_bytes + shape.source_bytes,
                replica=(1 + moment.replica_gradients) * shape.expert_bytes,
                forward_row=forward_row,
                forward_pair=forward_pair,
                kept_row=kept_row,
                kept_pair=kept_pair,
            )
        )
    return tuple(costs)


def memory_items(
    shape: LayerShape, plan: Plan, rows_2W: Int | None = None, staging_W: Int | None = None
) -> MemoryItems:
    """Bytes of every rank by category, at the moment of its peak.

    Args:
        rows_2W: token rows received by each rank in the forward and the backward pass, as counted
            in a layer call. ``None``: the planner's bound, at most one row per pair, and per token.
        staging_W: ``None``: what the plan predicts, zero where it predicts nothing.
    """
    W = shape.ranks
    on_rank_VW = (plan.instance_rank_V[:, None] == np.arange(W)[None, :]).astype(np.int64)
    kept_V = plan.backward_V
    if kept_V is None:
        kept_V = plan.quota_E[plan.instance_expert_V]
    pairs_2W = np.stack([plan.forward_WV.sum(0) @ on_rank_VW, kept_V @ on_rank_VW])
    if rows_2W is None:
        rows_2W = _row_bounds(shape, plan, on_rank_VW, kept_V)
    home_W = np.diff((np.arange(W + 1) * shape.experts + W - 1) // W)
    replicas_W = plan.is_replica.astype(np.int64) @ on_rank_VW
    if staging_W is None:
        staging_W = np.zeros(W, np.int64) if plan.predicted is None else plan.predicted.staging_W
    moments = shape.moments()
    is_backward_A = np.array([m.is_backward for m in moments], np.int64)
    saved_A = is_backward_A if shape.draw == "forward" else np.zeros_like(is_backward_A)
    is_saved_A1 = np.array([m.is_backward or shape.draw == "backward" for m in moments])[:, None]

    def of_moments(name: str) -> Int:
        return np.array([getattr(m, name) for m in moments], np.int64)[:, None]

    by_moment = {
        "replica_gradients": of_moments("replica_gradients") * replicas_W * shape.expert_bytes,
        "gradients": (1 + of_moments("fresh_gradients")) * home_W * shape.expert_bytes,
        "dispatch_rows": is_saved_A1 * rows_2W[saved_A] * shape.row_bytes,
        "saved_state": is_saved_A1 * pairs_2W[saved_A] * shape.saved_pair_bytes
        + shape.source_bytes,
        "payload_rows": of_moments("row") * rows_2W[is_backward_A],
        "workspace": of_moments("pair") * pairs_2W[is_backward_A],
    }
    peak_W = sum(by_moment.values(), np.zeros((len(moments), W), np.int64)).argmax(0)
    at_peak = {f"{name}_W": v_AW[peak_W, np.arange(W)] for name, v_AW in by_moment.items()}
    return MemoryItems(
        home_weights_W=home_W * shape.expert_bytes,
        replica_weights_W=replicas_W * shape.expert_bytes,
        staging_W=staging_W,
        optimizer_W=home_W * 3 * shape.hidden * shape.ffn * shape.optimizer_bytes,
        other_W=np.full(W, shape.other_bytes),
        moment_W=tuple(moments[a].name for a in peak_W),
        layers=shape.layers,
        **at_peak,
    )


def _row_bounds(shape: LayerShape, plan: Plan, on_rank_VW: Int, kept_V: Int) -> Int:
    """Rows received by each rank in both passes: at most one per pair, and one per token."""
    total_V = np.maximum(plan.forward_WV.sum(0), 1)
    kept_WV = plan.backward_WV
    if kept_WV is None:
        kept_WV = -(-plan.forward_WV * kept_V // total_V)
    forward_WW = np.minimum(plan.forward_WV @ on_rank_VW, shape.tokens)
    backward_WW = np.minimum(kept_WV @ on_rank_VW, forward_WW)
    return np.stack([forward_WW.sum(0), backward_WW.sum(0)])
