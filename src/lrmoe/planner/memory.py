"""The memory model: bytes of every rank by category, from a layer's shapes and a plan.

A layer call peaks in one of a few moments, which follow ``compute.py`` and ``layer.py`` step by
step (what a step no longer needs is freed before the next):

    gate_up    forward: gathered rows and gate_up outputs, with replicas these twice
    h          forward: gate_up outputs and scaled h
    outputs    forward: gate_up outputs unless save="inputs", scaled h and outputs of all pairs, and
               their sums per token row
    compact    forward, draw="forward": gate_up outputs and x rows of all pairs and of kept ones
    payload    backward: gradient rows of the kept pairs' tokens, one row per pair gathered
    gated      backward: gathered rows, dh, d(gate_up), scaled h
    wgrad      backward: d(gate_up), gathered inputs; weight gradients, the replicas' included
    dgrad      backward: d(gate_up), dx and its sums per token row; all weight gradients
    home       backward, last: replicas' gradients, and on the way home; their sums in float32

Always there are the home experts' weights and the gradients that earlier micro-batches of the step
left, the replicas' weights, what the forward pass saved, and the rank's own routing.

    saved      x rows received, row ids; gate_up outputs unless save="inputs"
    source     routing weights, ids, |h|^2; outputs by router mode

With ``draw="forward"`` dropped pairs leave nothing behind, so x rows and gate_up outputs count as
kept ones. A product runs once per weight buffer, so with replicas gate_up outputs are joined from
two. Everything is linear in rows and pairs
(:class:`~lrmoe.planner.problem.MemoryCosts`), which is what lets the planner treat a memory budget
as a cap on pairs.

Shape letters: W = ranks, E = experts, D = model dim, F = expert width, T = tokens of a rank, K =
top-k, N = T * K, A = moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lrmoe.planner.problem import Int, MemoryCosts, Plan

_FLOAT32, _INT32, _INT64 = 4, 4, 8
# Gradients that arrived, their sum in float32 and their copy in float32: five times 16 bits, of one
# projection at a time, gate_up being two thirds of an expert. Rounded up. Where no expert has two
# replicas it is only what arrived.
_GRADIENTS_HOME = 4


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
        if self.moves_pairs:  # the inputs of pairs that may move
            size += T * self.row_bytes
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
        return _moments(replace(self, tokens=0))  # the same for any number of tokens

    def _all_moments(self) -> tuple[Moment, ...]:
        D, F, b = self.hidden, self.ffn, self.dtype_bytes
        gate_up_is_new = self.save == "inputs" or self.draw == "forward"
        made = 0 if gate_up_is_new else -2 * F  # counted with what is saved
        again = 2 * F if self.save == "inputs" else 0
        is_joined = self.moves_pairs and self.save == "activations"  # with that of moved pairs
        joined_state = 2 * F if is_joined else 0
        is_early = self.draw == "forward"
        x_rows = D if is_early else 0
        sums = 2 * D if self.has_replicas else D  # of the first weight buffer, and of the second
        # Notes of a kept pair: row, place, coefficient; of both passes: <G, y> or |h|^2.
        notes = _FLOAT32 + (0 if self.draw == "forward" else 2 * _INT32 + _FLOAT32)
        earlier = int(self.has_gradients)
        moved_rows = 2 * D if self.moves_pairs else 0  # as they came, and among the others'

        def forward(
            name: str, pair: int, row: int, part: int = 0, has_saved: bool = not is_early
        ) -> Moment:
            return Moment(
                name=name,
                is_backward=False,
                has_saved=has_saved,
                pair=b * (pair + made),
                part=b * part,
                row=b * row,
                gradients=earlier,
            )

        def backward(
            name: str, pair: int, row: int, part: int = 0, replicas: int = 0, staged: int = 0
        ) -> Moment:
            return Moment(
                name=name,
                is_backward=True,
                has_saved=True,
                pair=b * (pair + joined_state) + notes,
                part=b * part,
                row=b * (row + moved_rows),
                gradients=earlier + int(replicas > 0),
                replica_gradients=replicas,
                staged=staged,
            )

        found = [
            forward("gate_up", D + (4 if self.has_replicas else 2) * F, x_rows),
            forward("h", 3 * F, x_rows),
            forward("outputs", F if self.save == "inputs" else 3 * F, x_rows + sums, part=D),
            backward("payload", D, D),
            backward("gated", D + 4 * F + again, 0),
            backward("wgrad", D + 2 * F, 0, replicas=1),
            backward("dgrad", 2 * F, sums, part=D, replicas=1),
        ]
        if is_early:
            gate_up = 0 if self.save == "inputs" else 2 * F
            found.append(forward("compact", gate_up, D, has_saved=True))
        if self.has_replicas:
            found.append(backward("home", 0, 0, replicas=2, staged=_GRADIENTS_HOME))
        return tuple(m for m in found if not any(m.is_below(other) for other in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive at one moment of a layer call besides what is always there, in bytes."""

    name: str
    is_backward: bool
    has_saved: bool
    """Whether what is saved is there already."""
    pair: int
    """Of each pair of the pass (backward: kept ones)."""
    part: int
    """Of each pair of one weight buffer at a time: home experts', then replicas'."""
    row: int
    """Of each token row received in the pass."""
    gradients: int = 0
    """Times the weight gradients of the home experts: earlier ones, and this call's."""
    replica_gradients: int = 0
    """Times those of the replicas."""
    staged: int = 0
    """Times the bytes of staging."""

    def is_below(self, other: Moment) -> bool:
        """Whether the other moment never takes less. Rows are never more than pairs."""
        passes = (self.is_backward, self.has_saved)
        if self == other or passes != (other.is_backward, other.has_saved):
            return False
        mine, theirs = ((m.pair, m.pair + m.part, m.pair + m.part + m.row) for m in (self, other))
        names = ("gradients", "replica_gradients", "staged")
        return all(a <= b for a, b in zip(mine, theirs, strict=True)) and all(
            getattr(self, name) <= getattr(other, name) for name in names
        )


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
    """Of this layer's home experts: what earlier micro-batches left, and this call's."""
    optimizer_W: Int
    other_W: Int
    held_W: Int
    """Saved between the two passes, whatever the moment of the peak."""
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
        resting_W = 2 * self.home_weights_W  # a gradient as large as the weights
        others_W = (self.layers - 1) * (resting_W + self.held_W)
        total_W: Int = self.layer_call + others_W + self.layers * self.optimizer_W + self.other_W
        return total_W


@lru_cache(maxsize=64)
def _moments(shape: LayerShape) -> tuple[Moment, ...]:
    return shape._all_moments()


def even_share(shape: LayerShape, total_pairs: int, kept_share: float) -> tuple[int, int]:
    """What a rank saves in a layer call, and needs besides, if pairs are spread evenly, at most."""
    pairs = -(-total_pairs // shape.ranks)
    tokens = -(-total_pairs // shape.top_k)
    kept = math.ceil(pairs * kept_share)
    saved = kept if shape.draw == "forward" else pairs
    work = 0
    for moment in shape.moments():
        of_pass = kept if moment.is_backward else pairs
        work = max(work, of_pass * (moment.pair + moment.part) + min(of_pass, tokens) * moment.row)
    return saved * shape.saved_pair_bytes + min(saved, tokens) * shape.row_bytes, work


@lru_cache(maxsize=64)
def memory_costs(shape: LayerShape) -> tuple[MemoryCosts, ...]:
    """The coefficients of the planner, one for each moment that can be the peak."""
    home = -(-shape.experts // shape.ranks)
    saves_kept = shape.draw == "forward"
    row, pair = shape.row_bytes, shape.saved_pair_bytes
    costs = []
    for moment in shape.moments():
        forward_row = forward_pair = kept_row = kept_pair = 0
        if moment.is_backward:
            kept_row, kept_pair = moment.row, moment.pair + moment.part
        else:
            forward_row, forward_pair = moment.row, moment.pair + moment.part
        if moment.has_saved and saves_kept:
            kept_row, kept_pair = kept_row + row, kept_pair + pair
        elif moment.has_saved:
            forward_row, forward_pair = forward_row + row, forward_pair + pair
        costs.append(
            MemoryCosts(
                fixed=(1 + moment.gradients) * home * shape.expert_bytes + shape.source_bytes,
                replica=(1 + moment.replica_gradients) * shape.expert_bytes,
                forward_row=forward_row,
                forward_pair=forward_pair,
                kept_row=kept_row,
                kept_pair=kept_pair,
                staged=moment.staged,
            )
        )
    return tuple(costs)


@lru_cache(maxsize=64)
def saved_costs(shape: LayerShape) -> MemoryCosts:
    """The coefficients of what a layer holds while later ones run: weights, and what it saved."""
    is_early = shape.draw == "forward"
    row, pair = shape.row_bytes, shape.saved_pair_bytes
    return MemoryCosts(
        fixed=memory_costs(shape)[0].fixed,
        forward_row=0 if is_early else row,
        forward_pair=0 if is_early else pair,
        kept_row=row if is_early else 0,
        kept_pair=pair if is_early else 0,
    )


def memory_items(
    shape: LayerShape,
    plan: Plan,
    rows_2W: Int | None = None,
    staging_W: Int | None = None,
    *,
    has_home_gradients: bool = True,
) -> MemoryItems:
    """Bytes of every rank by category, at the moment of its peak.

    Args:
        rows_2W: token rows received by each rank in the forward and the backward pass, as counted
            in a layer call. ``None``: the planner's bound, at most one row per pair, and per token.
        staging_W: ``None``: what the plan predicts, zero where it predicts nothing.
        has_home_gradients: ``False``: as if those took no memory.
    """
    W = shape.ranks
    kept_V = plan.backward_V
    if kept_V is None:
        kept_V = plan.quota_E[plan.instance_expert_V]

    def by_rank(values_V: Int) -> Int:
        summed_W: Int = np.bincount(plan.instance_rank_V, values_V, W).astype(np.int64)
        return summed_W

    of_pass_2V = (plan.forward_WV.sum(0), kept_V)
    pairs_2W = np.stack([by_rank(of_pass_V) for of_pass_V in of_pass_2V])
    away_2W = np.stack([by_rank(of_pass_V * plan.is_replica) for of_pass_V in of_pass_2V])
    part_2W = np.maximum(away_2W, pairs_2W - away_2W)
    if rows_2W is None:
        rows_2W = _row_bounds(shape, plan, kept_V)
    home_W = np.diff((np.arange(W + 1) * shape.experts + W - 1) // W)
    replicas_W = by_rank(plan.is_replica.astype(np.int64))
    if staging_W is None:
        staging_W = np.zeros(W, np.int64) if plan.predicted is None else plan.predicted.staging_W
    # A rank without replicas joins nothing; the planner's bound does not know which ones these are.
    plain = replace(shape, has_replicas=False).moments()
    joining = shape.moments() if shape.has_replicas else ()
    moments = plain + joining
    joins_A1 = (np.arange(len(moments)) >= len(plain))[:, None]
    may_be_AW = ((replicas_W > 0) & bool(joining)) == joins_A1
    may_be_AW |= np.array([m.staged > 0 for m in moments])[:, None]
    is_backward_A = np.array([m.is_backward for m in moments], np.int64)
    saved = 1 if shape.draw == "forward" else 0

    def of_moments(name: str) -> Int:
        return np.array([getattr(m, name) for m in moments], np.int64)[:, None]

    by_moment = {
        "replica_gradients": of_moments("replica_gradients") * replicas_W * shape.expert_bytes,
        "staging": of_moments("staged") * staging_W,
        "gradients": of_moments("gradients") * home_W * shape.expert_bytes * has_home_gradients,
        "dispatch_rows": of_moments("has_saved") * rows_2W[saved] * shape.row_bytes,
        "saved_state": of_moments("has_saved") * pairs_2W[saved] * shape.saved_pair_bytes
        + shape.source_bytes,
        "payload_rows": of_moments("row") * rows_2W[is_backward_A],
        "workspace": of_moments("pair") * pairs_2W[is_backward_A]
        + of_moments("part") * part_2W[is_backward_A],
    }
    total_AW = sum(by_moment.values(), np.zeros((len(moments), W), np.int64))
    peak_W = np.where(may_be_AW, total_AW, -1).argmax(0)
    at_peak = {f"{name}_W": v_AW[peak_W, np.arange(W)] for name, v_AW in by_moment.items()}
    return MemoryItems(
        home_weights_W=home_W * shape.expert_bytes,
        replica_weights_W=replicas_W * shape.expert_bytes,
        optimizer_W=home_W * 3 * shape.hidden * shape.ffn * shape.optimizer_bytes,
        other_W=np.full(W, shape.other_bytes),
        held_W=rows_2W[saved] * shape.row_bytes
        + pairs_2W[saved] * shape.saved_pair_bytes
        + shape.source_bytes,
        moment_W=tuple(moments[a].name for a in peak_W),
        layers=shape.layers,
        **at_peak,
    )


def _row_bounds(shape: LayerShape, plan: Plan, kept_V: Int) -> Int:
    """Rows received by each rank in both passes: at most one per pair, and one per token."""
    ranks_W = np.arange(shape.ranks)
    on_rank_VW = (plan.instance_rank_V[:, None] == ranks_W[None, :]).astype(np.int64)
    total_V = np.maximum(plan.forward_WV.sum(0), 1)
    kept_WV = plan.backward_WV
    if kept_WV is None:
        kept_WV = -(-plan.forward_WV * kept_V // total_V)
    forward_WW = np.minimum(plan.forward_WV @ on_rank_VW, shape.tokens)
    backward_WW = np.minimum(kept_WV @ on_rank_VW, forward_WW)
    return np.stack([forward_WW.sum(0), backward_WW.sum(0)])
