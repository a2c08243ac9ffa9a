"""Expert parallelism over eight ranks, one rank after the other on one card.

Each rank works on its own rows: its experts, and the pairs that they get from all eight ranks'
tokens. The time of a pass is the slowest rank's. Nothing travels: dispatch, combine, and weights
and gradients of replicas are left out, and every row says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.gpu.expert_work import (
    IMBALANCE,
    SLOTS,
    Buffers,
    make_plan,
    make_routing,
    rank_work,
)
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.problems import LayerSize, layer_sizes
from benchmarks.gpu.timing import ratio, summary, time_in_turn
from lrmoe.report import imbalance

RANKS = 8
RATES = ("0", "0.2", "0.5")
# Fixed first: the first plan of another policy compiles the planner.
PLACEMENTS = ("fixed", "recalibrated")
_WORKLOADS = ("W0", "W2")


def measure(part: Part, size: LayerSize, workload: str) -> None:
    """A row for every policy and rate."""
    routing = make_routing(size, RANKS, workload)
    buffers = Buffers.make(size, RANKS, part.device)
    # Plans with replicas are compiled by numba.
    placements = [p for p in PLACEMENTS if p == "fixed" or find_spec("numba")]
    settings = [(placement, rate) for placement in placements for rate in RATES]
    plans = {setting: make_plan(size, routing, *setting) for setting in settings}
    work = {
        (*setting, rank): rank_work(routing, made, rank, buffers)
        for setting, made in plans.items()
        for rank in range(RANKS)
    }
    arms = {f"{p} C{c} rank {r}": of_rank.run for (p, c, r), of_rank in work.items()}
    times = time_in_turn(part.device, arms, max(part.rounds // 2, 1), lead=1)
    slowest = {
        (p, c): np.stack([times[f"{p} C{c} rank {r}"] for r in range(RANKS)]).max(0)
        for p, c in settings
    }
    for (placement, rate), made in plans.items():
        of_arm = slowest[placement, rate]
        pairs_2W = np.array([work[placement, rate, r].pairs_2 for r in range(RANKS)]).T
        row: dict[str, Any] = {"impl": "lrmoe_experts", "placement": placement, **size.dims()}
        row |= {"selection": "sampled", "rate": float(rate), "workload": workload}
        row |= {"dtype": "bf16", "ranks": RANKS, "communication": False}
        row |= {"slots": SLOTS if placement != "fixed" else None, "imbalance_asked": IMBALANCE}
        row |= {
            "backward_fraction": float(pairs_2W[1].sum() / pairs_2W[0].sum()),
            "imbalance_home": imbalance(routing.counts_WE.sum(0).reshape(RANKS, -1).sum(1)),
            "imbalance_fwd": imbalance(pairs_2W[0]),
            "imbalance_bwd": imbalance(pairs_2W[1]),
            "replicas": made.num_replicas,
        }
        row |= summary(of_arm)
        row["bwd_ratio_to_c0"] = ratio(of_arm[:, 1], slowest[placement, RATES[0]][:, 1])
        row["ratio_to_fixed"] = ratio(of_arm.sum(1), slowest["fixed", rate].sum(1))
        part.write("ep8", **row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Both models, even routing and a hot rank."""
    part = start("Expert parallelism over eight ranks, in turn.", arguments)
    for size in layer_sizes(part):
        for workload in _WORKLOADS:
            measure(part, size, workload)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
