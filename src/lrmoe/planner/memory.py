"""The memory model: bytes of every rank by category, from a layer's shapes and a plan.

What is counted is what is alive at the backward peak of one layer call: inside the backward pass of
the experts, after the last gradient is formed and before anything is freed. Sizes follow the
tensors of ``compute.py`` and ``dispatch.py`` one by one:

    received in the forward pass    x rows, row ids; gate_up outputs unless save="inputs"
    on the source of the tokens     routing weights, ids, |h|^2; outputs by router mode
    backward payload                gradient rows in, dx rows out
    temporaries of the kept pairs   gathered rows, dh, d(gate_up), scaled h, dx; gate_up again if it
                                    is recomputed
    weight gradients                of home experts and of replicas

With ``draw="forward"`` dropped pairs leave nothing behind, so x rows and gate_up outputs count as
kept ones. Everything is linear in rows and pairs (:class:`~lrmoe.planner.problem.MemoryCosts`),
which is what lets the planner treat a memory budget as a cap on pairs.

Shape letters: W = ranks, E = experts, D = model dim, F = expert width, T = tokens of a rank, K =
top-k, N = T * K.
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
        if self.draw == "forward":  # row, place among the forward pairs, coefficient
            return gate_up + 2 * _INT32 + _FLOAT32
        return gate_up + _INT32

    @property
    def work_pair_bytes(self) -> int:
        """Temporaries of one kept pair: gathered row, dh, d(gate_up), scaled h, dx; a note."""
        values = 2 * self.hidden + 4 * self.ffn
        if self.save == "inputs":
            values += 2 * self.ffn
        notes = 0 if self.draw == "forward" else 2 * _INT32 + _FLOAT32
        return values * self.dtype_bytes + notes + _FLOAT32  # <G, y>


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
    """Gradient rows in, dx rows out."""
    workspace_W: Int
    """Temporaries of the experts' backward pass."""
    gradients_W: Int
    """Of this layer's home experts."""
    optimizer_W: Int
    other_W: Int
    layers: int

    @property
    def layer_call(self) -> Int:
        """One layer call at its backward peak."""
        return (
            self.home_weights_W
            + self.replica_weights_W
            + self.replica_gradients_W
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
        """All layers' weights, gradients, optimizer state and saved state; one layer's backward."""
        return (
            self.layers
            * (
                self.home_weights_W
                + self.gradients_W
                + self.optimizer_W
                + self.dispatch_rows_W
                + self.saved_state_W
            )
            + self.replica_weights_W
            + self.replica_gradients_W
            + self.staging_W
            + self.payload_rows_W
            + self.workspace_W
            + self.other_W
        )


def memory_costs(shape: LayerShape) -> MemoryCosts:
    """The coefficients of the planner for one layer call at its backward peak."""
    home = -(-shape.experts // shape.ranks)
    saves_kept = shape.draw == "forward"
    return MemoryCosts(
        fixed=2 * home * shape.expert_bytes + shape.source_bytes,
        replica=2 * shape.expert_bytes,
        forward_row=0 if saves_kept else shape.row_bytes,
        forward_pair=0 if saves_kept else shape.saved_pair_bytes,
        kept_row=2 * shape.row_bytes + (shape.row_bytes if saves_kept else 0),
        kept_pair=shape.work_pair_bytes + (shape.saved_pair_bytes if saves_kept else 0),
    )


def memory_items(
    shape: LayerShape, plan: Plan, rows_2W: Int | None = None, staging_W: Int | None = None
) -> MemoryItems:
    """Bytes of every rank by category.

    Args:
        rows_2W: token rows received by each rank in the forward and the backward pass, as counted
            in a layer call. ``None``: the planner's bound, at most one row per pair, and per token.
    """
    W = shape.ranks
    kept_V = plan.backward_V
    if kept_V is None:
        kept_V = plan.quota_E[plan.instance_expert_V]

    def by_rank(values_V: Int) -> Int:
        summed_W: Int = np.bincount(plan.instance_rank_V, values_V, W).astype(np.int64)
        return summed_W

    pairs_W, kept_W = by_rank(plan.forward_WV.sum(0)), by_rank(kept_V)
    if rows_2W is None:
        rows_2W = _row_bounds(shape, plan, kept_V)
    home_W = np.diff((np.arange(W + 1) * shape.experts + W - 1) // W)
    replicas_W = by_rank(plan.is_replica.astype(np.int64))
    saved_rows_W = rows_2W[1] if shape.draw == "forward" else rows_2W[0]
    saved_pairs_W = kept_W if shape.draw == "forward" else pairs_W
    if staging_W is None:
        staging_W = np.zeros(W, np.int64) if plan.predicted is None else plan.predicted.staging_W
    parameters = 3 * shape.hidden * shape.ffn
    return MemoryItems(
        home_weights_W=home_W * shape.expert_bytes,
        replica_weights_W=replicas_W * shape.expert_bytes,
        replica_gradients_W=replicas_W * shape.expert_bytes,
        staging_W=staging_W,
        dispatch_rows_W=saved_rows_W * shape.row_bytes,
        saved_state_W=saved_pairs_W * shape.saved_pair_bytes + shape.source_bytes,
        payload_rows_W=2 * rows_2W[1] * shape.row_bytes,
        workspace_W=kept_W * shape.work_pair_bytes,
        gradients_W=home_W * shape.expert_bytes,
        optimizer_W=home_W * parameters * shape.optimizer_bytes,
        other_W=np.full(W, shape.other_bytes),
        layers=shape.layers,
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
