"""Placement policies: counts in, instances and forward split out.

Shape letters: W = ranks, E = experts, V = instances (rank-major).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.planner.problem import Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which instances exist in a layer call, and which pairs each computes in the forward pass."""

    instance_expert_V: Int
    instance_rank_V: Int
    forward_WV: Int


def fixed(counts_WE: Int) -> Placement:
    """Every pair on its expert's home rank ``e // (E / W)``, as in Megatron-LM."""
    W, E = counts_WE.shape
    experts_E = np.arange(E)
    return Placement(
        instance_expert_V=experts_E,
        instance_rank_V=experts_E // (E // W),
        forward_WV=counts_WE,
    )
