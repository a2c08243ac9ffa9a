"""The clock of a layer call: rows, pairs and bytes of a plan to seconds of every rank.

What is modelled, one rule each:

1. **Grouped GEMMs.** An instance with pairs costs its weights once at memory speed (in the backward
   pass its gradient as well), a constant, and FLOPs per pair: many small groups are slower than
   few large ones. Instances without pairs cost nothing.
2. **All-to-all.** From rows and pairs between every two ranks: rows (one per token and rank) plus
   the bytes of each pair that travel beside them (8 there and 4 back, 12 there and 4 back in the
   backward pass; where pairs are selected in global scope 8 more, and another 8 with strata). A
   rank's time is that of its busiest class of link, the larger of what it sends and receives: both
   directions of a link, and both classes, run at once.
3. **Ranks meet at every collective**, so a stage takes its slowest rank's time and the stages add
   up: local work, rows in, GEMMs, rows out, gradients.
4. **Replicas' weights** leave before the rows do and arrive while the home experts compute: what is
   longer counts, then the replicas' GEMMs run. They are sent again before the backward pass of the
   layer, whose slots other layers have used in between.
5. **Replicas' gradients** go home after the rows, overlapped with nothing: the layer's backward
   pass returns complete gradients.
6. **Planning** is not in here; :mod:`lrmoe.cluster.replay` measures it. It hides nothing and is
   hidden by nothing for policies that need the counts of the call, and is hidden for those that
   place by history.
7. Every collective costs a constant besides its bytes.
8. On the ``cpu`` clock nothing overlaps and nobody waits: a rank's time is the sum of its own work,
   sent and received bytes both count, and a pass takes its slowest rank's time.

No system of a peer is modelled beyond its placement: all run these kernels, with de-duplicated
rows, and without overlap between layers.

Shape letters: W = ranks, V = instances (rank-major), C = link classes (inside a node, between).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.cluster import kernels
from lrmoe.cluster.hardware import Hardware
from lrmoe.planner import kernels as planner_kernels
from lrmoe.planner.memory import LayerShape
from lrmoe.planner.problem import Costs, Float, Int, Plan

_NOTES = ((8, 4), (12, 4))  # bytes of a pair there and back, in each pass
_SCORES = 8  # a pair's score and verdict, in global scope
_DIRECTION = 8  # beside a score, where the draw is stratified
# Collectives of a pass, and how many more where there are replicas.
_COLLECTIVES = ((5, 3), (5, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Token rows and pairs of a layer call by rank, in both passes (forward, backward)."""

    received_2W: Float
    source_2W: Float
    """Sent by each source, its own included."""
    sent_22CW: Float
    """Rows, then pairs, that sources send to other ranks."""
    arrived_22CW: Float

    @classmethod
    def expected(cls, plan: Plan, tokens_W: Int, top_k: int, node_size: int) -> Rows:
        """From counts alone (:func:`lrmoe.cluster.kernels.expected_rows`)."""
        kept_WV = plan.backward_WV
        if kept_WV is None:
            # Global scope: the draw decides which source's pairs are kept.
            kept_V = backward_pairs(plan)
            share_V = kept_V / np.maximum(plan.forward_WV.sum(0), 1)
            kept_WV = np.rint(plan.forward_WV * share_V).astype(np.int64)
        begin_W = _begin(plan, len(tokens_W))
        forward_WV = np.ascontiguousarray(plan.forward_WV)
        return cls._of(
            kernels.expected_rows(
                forward_WV, np.ascontiguousarray(kept_WV), tokens_W, begin_W, top_k, node_size
            )
        )

    @classmethod
    def known(cls, rows_2WW: Int, pairs_2WW: Int, node_size: int) -> Rows:
        """From the rows and pairs between every source (first) and computing rank."""
        return cls._of(kernels.count_rows(rows_2WW, pairs_2WW, node_size))

    @classmethod
    def _of(cls, counted: tuple[Float, Float, Float, Float]) -> Rows:
        received_2W, source_2W, sent, arrived = counted
        return cls(
            received_2W=received_2W, source_2W=source_2W, sent_22CW=sent, arrived_22CW=arrived
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of every rank in one pass, by what it does."""

    clock: str
    fixed: float
    """Constants of the collectives."""
    local_W: Float
    """Scoring, selecting, and rows moved in a rank's own memory."""
    rows_in_W: Float
    weights_W: Float
    home_W: Float
    replicas_W: Float
    rows_out_W: Float
    gradients_W: Float

    def busy(self) -> Float:
        """All work of each rank, whether it overlaps or not."""
        return (
            self.fixed
            + self.local_W
            + self.rows_in_W
            + self.weights_W
            + self.home_W
            + self.replicas_W
            + self.rows_out_W
            + self.gradients_W
        )

    @property
    def total(self) -> float:
        """The pass, by the rules above."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """What the pass is made of; adds up to it."""
        if self.clock == "cpu":
            slowest = int(self.busy().argmax())
            at = {
                "local": self.local_W,
                "gemm": self.home_W + self.replicas_W,
                "rows": self.rows_in_W + self.rows_out_W,
                "weights": self.weights_W,
                "gradients": self.gradients_W,
            }
            return {name: float(of_W[slowest]) for name, of_W in at.items()} | {"fixed": self.fixed}
        gemm = float((self.home_W + self.replicas_W).max())
        with_weights = float((np.maximum(self.home_W, self.weights_W) + self.replicas_W).max())
        return {
            "local": float(self.local_W.max()),
            "gemm": gemm,
            "rows": float(self.rows_in_W.max() + self.rows_out_W.max()),
            "weights": with_weights - gemm,
            "gradients": float(self.gradients_W.max()),
            "fixed": self.fixed,
        }


COMMUNICATION = ("rows", "weights", "gradients", "fixed")


def layer_times(
    hardware: Hardware,
    shape: LayerShape,
    plan: Plan,
    rows: Rows,
    tokens_W: Int,
    *,
    node_size: int,
    selects: bool,
    is_global: bool,
    is_stratified: bool,
) -> tuple[PassTimes, PassTimes]:
    """The forward and the backward pass of one layer call.

    Args:
        selects: whether pairs are scored and selected.
        is_global: whether scores travel to the experts' home ranks.
        is_stratified: whether the directions of the pairs' gradients go with them.
    """
    W, E = shape.ranks, shape.experts
    is_replica_V, kept_V = plan.is_replica, backward_pairs(plan)
    is_sent_V = is_replica_V if plan.is_sent_V is None else plan.is_sent_V
    out_2CW, in_2CW = planner_kernels.count_copies(
        plan.instance_expert_V, plan.instance_rank_V, is_sent_V, is_replica_V & (kept_V > 0), E, W,
        node_size,
    )  # fmt: skip
    per_class_C1 = np.array([[1 / hardware.intra_bytes_per_s], [1 / hardware.inter_bytes_per_s]])
    nothing_W = np.zeros(W)

    def link(sent_CW: Float, received_CW: Float) -> Float:
        if hardware.clock == "cpu":
            both_W: Float = ((sent_CW + received_CW) * per_class_C1).sum(0)
            return both_W
        busiest_W: Float = (np.maximum(sent_CW, received_CW) * per_class_C1).max(0)
        return busiest_W

    result = []
    for b, pairs_V in enumerate((plan.forward_WV.sum(0), kept_V)):
        there, back = _NOTES[b]
        if b and is_global and selects:
            there += _SCORES + (_DIRECTION if is_stratified else 0)
        sent, arrived = rows.sent_22CW[:, b], rows.arrived_22CW[:, b]
        bytes_in = shape.row_bytes * sent[0] + there * sent[1]
        bytes_in_arrived = shape.row_bytes * arrived[0] + there * arrived[1]
        bytes_out = shape.row_bytes * sent[0] + back * sent[1]
        bytes_out_arrived = shape.row_bytes * arrived[0] + back * arrived[1]
        # In the forward pass x is gathered, outputs are summed; in the backward pass G and dx.
        moved_W = 3 * rows.source_2W[b] + 2 * rows.received_2W[b] + tokens_W
        local_W = moved_W * (shape.row_bytes / hardware.row_bytes_per_s)
        if b and selects:
            norm_s = shape.row_bytes / hardware.row_bytes_per_s
            local_W = local_W + tokens_W * (norm_s + shape.top_k * hardware.select_s)
        flops, rate = ((6, hardware.forward_flops), (12, hardware.backward_flops))[b]
        if b and shape.save == "inputs":
            flops += 4  # gate and up again
        home_W, replicas_W = kernels.group_times(
            pairs_V, is_replica_V, plan.instance_rank_V, W,
            hardware.group_s + (1 + b) * shape.expert_bytes / hardware.weight_bytes_per_s,
            hardware.pair_s + flops * shape.hidden * shape.ffn / rate,
        )  # fmt: skip
        weights_W = gradients_W = nothing_W
        has_replicas = bool(out_2CW[b].any())
        if has_replicas:
            size = shape.expert_bytes
            copied_W = 2 * size * (out_2CW[b] + in_2CW[b]).sum(0) / hardware.row_bytes_per_s
            weights_W = link(size * out_2CW[b], size * in_2CW[b]) + copied_W
            if b:
                gradients_W = link(size * in_2CW[b], size * out_2CW[b]) + copied_W
        always, more = _COLLECTIVES[b]
        result.append(
            PassTimes(
                clock=hardware.clock,
                fixed=(always + more * has_replicas) * hardware.collective_s * (W > 1),
                local_W=local_W,
                rows_in_W=link(bytes_in, bytes_in_arrived),
                weights_W=weights_W,
                home_W=home_W,
                replicas_W=replicas_W,
                rows_out_W=link(bytes_out_arrived, bytes_out),
                gradients_W=gradients_W,
            )
        )
    forward, backward = result
    return forward, backward


def planner_costs(hardware: Hardware, shape: LayerShape) -> Costs:
    """The same coefficients as the planner takes them, in seconds."""
    work = shape.hidden * shape.ffn
    return Costs(
        forward_pair=6 * work / hardware.forward_flops + hardware.pair_s,
        backward_pair=12 * work / hardware.backward_flops + hardware.pair_s,
        intra_byte=1 / hardware.intra_bytes_per_s,
        inter_byte=1 / hardware.inter_bytes_per_s,
        row_bytes=shape.row_bytes,
        expert_bytes=shape.expert_bytes,
        gradient_bytes=shape.expert_bytes,
    )


def backward_pairs(plan: Plan) -> Int:
    """Planned kept pairs of each instance."""
    return plan.quota_E if plan.backward_V is None else plan.backward_V


def _begin(plan: Plan, W: int) -> Int:
    return np.searchsorted(plan.instance_rank_V, np.arange(W + 1))
