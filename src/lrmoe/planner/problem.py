"""What a plan is made from, what it is, and what must hold for it.

Pure integers on the host: no process group, no device.

Shape letters: W = expert-parallel ranks, E = experts (logical), V = physical experts (instances:
home experts and replicas), ordered by rank and, inside a rank, home experts first, then by slot;
S = steps of history, Q = quantiles, L = replica slots of a rank, C = link classes (0 inside a node,
1 between nodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

QUOTA_MODES = ("rate", "planned", "makespan")


class InfeasiblePlan(ValueError):  # noqa: N818 - the name is public
    """No plan satisfies the budgets; the message says which one fails, where, and by how much.

    ``kind`` is ``"overload"`` if even a perfectly even spread of the pairs would not fit, and
    ``"spatial"`` if the total fits but no legal assignment of pairs to ranks was found.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self._message = message

    def __reduce__(self) -> tuple[type[InfeasiblePlan], tuple[str, str]]:
        return type(self), (self.kind, self._message)  # exceptions pickle by their arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of every rank in one layer call; ``None`` is unlimited."""

    memory_bytes: int | None = None
    """Of the memory model (:class:`MemoryCosts`), with what ``PlanProblem.reserved_W`` holds."""
    slots: int | None = None
    """Replica slots."""
    staging_bytes: int | None = None
    """Weights arriving for, or gradients coming home from, replicas: the larger of the two."""
    intra_bytes: int | None = None
    """Bytes sent, and bytes received, inside the node, forward and backward pass together."""
    inter_bytes: int | None = None
    """The same between nodes."""
    forward_pairs: int | None = None
    """Pairs computed in the forward pass."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value < 0:
                raise ValueError(f"{f.name}={value}: allowed are None and integers >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What work costs, in any one unit (seconds, or the cost of a pair).

    By default only pairs cost anything: a pair's backward pass twice its forward pass.
    """

    forward_pair: float = 1.0
    backward_pair: float = 2.0
    intra_byte: float = 0.0
    """A byte over a rank's link inside the node, sending or receiving."""
    inter_byte: float = 0.0
    row_bytes: int = 0
    """One token row on the wire."""
    expert_bytes: int = 0
    """The weights of one expert on the wire."""
    gradient_bytes: int = 0
    """The weight gradient of one replica on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCosts:
    """Bytes of one rank at one moment of a layer call, linear in what a plan gives it.

    :func:`lrmoe.planner.memory.memory_costs` derives the moments that can be the peak from a
    layer's shapes.
    """

    fixed: int = 0
    """Whatever the plan: home experts, and the rank's own tokens."""
    replica: int = 0
    """A replica held in this call: weights and gradient."""
    forward_row: int = 0
    """A token row received in the forward pass."""
    forward_pair: int = 0
    """A pair computed in the forward pass."""
    kept_row: int = 0
    """A token row received in the backward pass."""
    kept_pair: int = 0
    """A pair computed in the backward pass."""
    staged: int = 0
    """Times the bytes of staging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """One layer call: who sends how many pairs to which expert, and what is asked for.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    counts_WE: Int
    """Routed pairs of each source rank and expert."""
    rate: Fraction
    """Requested share of pairs without a backward pass."""
    placement: str = "fixed"
    quotas: str = "rate"
    """``rate``: every expert keeps ``ceil((1 - rate) n)``. ``planned``: all pairs, less what the
    budgets do not allow. ``makespan``: as many in total as ``rate``, dropped where the ranks are
    busiest."""
    scope: str = "local"
    share_seed: int | None = None
    """``None``: the ranks' shares of a quota are rounded by largest remainder. A seed: at random,
    with the exact share as mean, which unbiased rules need (see ``Plan.share_probability_WE``)."""
    c_max: Fraction | None = None
    """Largest share of pairs that budgets may drop; ``None`` is ``rate``."""
    min_kept: Fraction = Fraction(1, 8)
    """No expert keeps less than this share of its pairs where a mode chooses among experts."""
    slack: Fraction = Fraction(1, 100)
    """Distance from the best makespan within which fewer replicas win. The specification allows
    1/50; half of it is left to what the search does not see."""
    budgets: Budgets = Budgets()
    costs: Costs = Costs()
    memory: MemoryCosts | tuple[MemoryCosts, ...] = MemoryCosts()
    """Several: moments of a layer call, of which the largest counts on each rank."""
    reserved_W: Int | None = None
    """Bytes of each rank that other layers hold while this one runs, part of its memory: [W], or
    for every moment, [moments, W]."""
    ranks_per_node: int | None = None
    """``None``: all ranks in one node."""
    top_k: int = 1
    """Pairs of a token, which bounds the number of rows; 1 counts a row for every pair."""
    past_counts_SWE: Int | None = None
    """Counts of earlier steps, oldest first, for policies that look at history."""
    held_WL: Int | None = None
    """Expert whose current weights each replica slot still holds, -1 for none."""
    score_quantiles_EQ: Float | None = None
    """Ascending quantiles of each expert's scores, at the middles of Q equal parts; ``makespan``
    chooses by them. ``None``: all experts alike."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Constants of a peer's policy that differ from its published ones."""

    def __post_init__(self) -> None:
        W, E = self.counts_WE.shape
        if E % W and W % E:
            raise ValueError(f"{E} experts do not divide evenly over {W} ranks")
        if self.counts_WE.min(initial=0) < 0:
            raise ValueError(f"negative pair count {self.counts_WE.min()} in counts_WE")
        if not 0 <= self.rate.numerator < self.rate.denominator:
            raise ValueError(f"rate={self.rate}: allowed is 0 <= rate < 1")
        if self.scope not in ("local", "global"):
            raise ValueError(f"scope={self.scope!r}: allowed are 'local', 'global'")
        if self.c_max is not None and not 0 <= self.c_max < 1:
            raise ValueError(f"c_max={self.c_max}: allowed is 0 <= c_max < 1")
        if not 0 <= self.min_kept.numerator <= self.min_kept.denominator:
            raise ValueError(f"min_kept={self.min_kept}: allowed is 0 <= min_kept <= 1")
        if self.slack.numerator < 0:
            raise ValueError(f"slack={self.slack}: allowed is >= 0")
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: allowed is >= 1")
        if self.ranks_per_node is not None and W % self.ranks_per_node:
            raise ValueError(f"ranks_per_node={self.ranks_per_node}: must divide {W} ranks")
        if self.past_counts_SWE is not None and self.past_counts_SWE.shape[1:] != (W, E):
            raise ValueError(
                f"past_counts_SWE has shape {self.past_counts_SWE.shape}, expected (S, {W}, {E})"
            )
        if not self.memory_moments:
            raise ValueError("memory=(): needs at least one moment")
        moments = len(self.memory_moments)
        if self.reserved_W is not None and self.reserved_W.shape not in ((W,), (moments, W)):
            raise ValueError(
                f"reserved_W has shape {self.reserved_W.shape}, expected ({W},) or ({moments}, {W})"
            )
        if self.held_WL is not None and len(self.held_WL) != W:
            raise ValueError(f"held_WL has {len(self.held_WL)} rows, expected {W}")
        scores_EQ = self.score_quantiles_EQ
        if scores_EQ is not None and not np.isfinite(scores_EQ).all():
            raise ValueError("score_quantiles_EQ: must be finite")
        if self.score_quantiles_EQ is not None and len(self.score_quantiles_EQ) != E:
            raise ValueError(
                f"score_quantiles_EQ has {len(self.score_quantiles_EQ)} rows, expected {E}"
            )

    @property
    def memory_moments(self) -> tuple[MemoryCosts, ...]:
        """``memory`` as a tuple."""
        return self.memory if isinstance(self.memory, tuple) else (self.memory,)

    @property
    def reserved(self) -> Int:
        """``reserved_W`` of every moment, zeros where there is none, [moments, W]."""
        shape = len(self.memory_moments), len(self.counts_WE)
        return np.broadcast_to(0 if self.reserved_W is None else self.reserved_W, shape)

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks are spread over."""
        return len(self.counts_WE) // self.node_size

    @property
    def node_size(self) -> int:
        """``ranks_per_node`` with its default filled in."""
        return self.ranks_per_node or len(self.counts_WE)

    def largest_drop_of(self, pairs: int) -> int:
        """How many of so many pairs may be dropped at most."""
        share = self.rate if self.c_max is None else max(self.rate, self.c_max)
        return pairs * share.numerator // share.denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan costs, by the problem's coefficients. Byte and row counts are upper bounds."""

    forward: float
    """Makespan of the forward pass: the slowest rank's pairs and bytes."""
    backward: float
    forward_pairs_W: Int
    backward_pairs_W: Int
    sent_CW: Int
    """Bytes sent by each rank over each class of link, both passes."""
    received_CW: Int
    memory_W: Int
    """At its peak: the largest moment, with what is reserved."""
    staging_W: Int
    """Copies of expert weights arriving or gradients coming home (the larger), in bytes."""

    @property
    def makespan(self) -> float:
        """Forward and backward pass together."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where pairs are computed, and how many of each expert get a backward pass."""

    instance_expert_V: Int
    instance_rank_V: Int
    forward_WV: Int
    """Pairs of each source rank computed by each instance; every pair exactly once."""
    quota_E: Int
    """Pairs of each expert, over all ranks, that get a backward pass."""
    capacity_V: Int
    """Kept pairs an instance may take in the backward pass."""
    quota_WE: Int | None
    """Each source rank's share of the quotas (local scope); ``None`` in global scope."""
    backward_WV: Int | None
    """Kept pairs of each source rank at each instance (local scope)."""
    share_probability_WE: Float | None
    """P(quota_WE >= 1) under random rounding; 1 where that is certain. A pair of a cell whose quota
    is rounded from a fraction f < 1 can only be kept with that probability, so its weight needs
    the factor 1 / f, or the estimate would be too short by exactly these pairs. ``None`` where
    nothing is rounded at random. With replicas, for draws from all of a source's pairs of an
    expert; :meth:`share_probability` is for draws by (source, instance)."""
    instance_slot_V: Int | None = None
    """Replica slot on the instance's rank, -1 for a home expert. ``None``: replicas, if any, take
    the slots in order."""
    backward_V: Int | None = None
    """Planned kept pairs of each instance, adding up to the quotas; ``None``: the quotas, at
    home."""
    is_sent_V: Bool | None = None
    """Weights travel to this instance's slot before the forward pass; ``None``: nothing does."""
    predicted: Prediction | None = None
    """``None`` for home placement without costs or budgets, where there is nothing to predict."""
    relaxed: tuple[str, ...] = ()
    """What was asked for and not kept to, in words."""

    @property
    def keeps_all(self) -> bool:
        """Whether every routed pair gets a backward pass."""
        return bool(self.quota_E.sum() == self.forward_WV.sum())

    @property
    def is_home_only(self) -> bool:
        """Whether every expert has one instance, on its home rank, in expert order."""
        return len(self.instance_expert_V) == len(self.quota_E)

    @property
    def draws_in_place(self) -> bool:
        """Whether sources can draw from their pairs at each instance, so that no pair moves."""
        return self.backward_WV is not None and bool((self.backward_WV <= self.forward_WV).all())

    @property
    def backward_is_forward(self) -> bool:
        """Whether no kept pair can be planned away from where its forward pass was."""
        return self.is_home_only or self.draws_in_place

    @property
    def is_replica(self) -> Bool:
        """Which instances are not at home."""
        home_E = home_ranks(len(self.forward_WV), len(self.quota_E))
        is_replica: Bool = home_E[self.instance_expert_V] != self.instance_rank_V
        return is_replica

    @property
    def is_sent_again(self) -> Bool:
        """Replicas that take part in the backward pass: weights in (where the slot was reused),
        gradient home. A replica without kept pairs does neither."""
        return self.is_replica & ((self.backward_V if self.backward_V is not None else 0) > 0)

    @property
    def num_replicas(self) -> int:
        """Instances beyond home, summed over ranks."""
        return len(self.instance_expert_V) - len(self.quota_E)

    def share_probability(self, rank: int) -> Float | None:
        """P(backward_WV[rank] >= 1) of each instance, 1 without pairs (random shares only).

        The share of a stratum (source, instance) is its exact value ``f b / F`` rounded at random,
        so this is ``min(1, f b / F)``: what ``share_probability_WE`` says, per instance.
        """
        if self.backward_WV is None:
            return None
        total_V = np.maximum(self.forward_WV.sum(0), 1)
        planned_V = self.backward_WV.sum(0)
        pairs_V = self.forward_WV[rank]
        exact_V = np.minimum(pairs_V * planned_V / total_V, 1.0)
        return np.where(pairs_V > 0, exact_V, 1.0)

    def check(self, problem: PlanProblem) -> None:
        """Assert the invariants and budgets every plan keeps, whatever made it."""
        from lrmoe.planner.check import check_plan

        check_plan(self, problem)


def home_ranks(W: int, E: int) -> Int:
    """Home rank of every expert: ``e // (E / W)``, which is also right for fewer experts than
    ranks."""
    return np.arange(E) * W // E
