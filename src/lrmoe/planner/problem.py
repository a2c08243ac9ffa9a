"""What a plan is made from, what it is, and what must hold for it.

Pure integers on the host: no process group, no device.

Shape letters: W = expert-parallel ranks, E = experts (logical), V = physical experts (instances:
home experts and replicas), ordered by rank and, inside a rank, by slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Float = NDArray[np.float64]


class InfeasiblePlan(ValueError):  # noqa: N818 - the name is public
    """No plan satisfies the budgets; the message says which one fails, where, and by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """One layer call: who sends how many pairs to which expert, and what is asked for.

    Raises:
        ValueError: if the counts are negative or the experts do not divide over the ranks.
    """

    counts_WE: Int
    """Routed pairs of each source rank and expert."""
    rate: Fraction
    """Requested share of pairs without a backward pass."""
    placement: str = "fixed"
    quotas: str = "rate"
    scope: str = "local"
    share_seed: int | None = None
    """``None``: the ranks' shares of a quota are rounded by largest remainder. A seed: at random,
    with the exact share as mean, which unbiased rules need (see ``Plan.share_probability_WE``)."""

    def __post_init__(self) -> None:
        W, E = self.counts_WE.shape
        if E % W:
            raise ValueError(f"{E} experts do not divide evenly over {W} ranks")
        if self.counts_WE.min(initial=0) < 0:
            raise ValueError(f"negative pair count {self.counts_WE.min()} in counts_WE")
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate}: allowed is 0 <= rate < 1")
        if self.scope not in ("local", "global"):
            raise ValueError(f"scope={self.scope!r}: allowed are 'local', 'global'")


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
    the factor 1 / f, or the estimate would be too short by exactly these pairs."""

    @property
    def backward_is_forward(self) -> bool:
        """Whether no kept pair can be planned away from where its forward pass was."""
        return self.is_home_only or (
            self.backward_WV is not None and np.array_equal(self.backward_WV, self.forward_WV)
        )

    @property
    def is_home_only(self) -> bool:
        """Whether every expert has one instance, on its home rank, in expert order."""
        return len(self.instance_expert_V) == len(self.quota_E)

    @property
    def keeps_all(self) -> bool:
        """Whether every routed pair gets a backward pass."""
        return bool(self.quota_E.sum() == self.forward_WV.sum())

    def check(self, problem: PlanProblem) -> None:
        """Assert the invariants every plan keeps, whatever made it."""
        counts_WE, E = problem.counts_WE, problem.counts_WE.shape[1]
        of_expert_EV = self.instance_expert_V[None, :] == np.arange(E)[:, None]
        assert np.array_equal(self.forward_WV @ of_expert_EV.T, counts_WE), "a pair is lost"
        counts_E = counts_WE.sum(0)
        assert np.all((self.quota_E >= (counts_E > 0)) & (self.quota_E <= counts_E)), "quota"
        assert np.all(np.diff(self.instance_rank_V) >= 0), "instances are not rank-major"
        places = set(zip(self.instance_expert_V, self.instance_rank_V, strict=True))
        assert len(places) == len(self.instance_expert_V), "an expert twice on one rank"
        if self.quota_WE is not None:
            assert self.backward_WV is not None
            assert np.array_equal(self.quota_WE.sum(0), self.quota_E), "shares do not add up"
            assert np.all((self.quota_WE >= 0) & (self.quota_WE <= counts_WE)), "share"
            assert np.array_equal(self.backward_WV @ of_expert_EV.T, self.quota_WE), (
                "kept pair lost"
            )
            assert np.all(self.backward_WV.sum(0) <= self.capacity_V), "capacity exceeded"
