"""``lrmoe bench planner``: how long a plan takes, and how far its makespan is from a lower bound.

Timed is what a layer call does once the counts are on the host: build the problem, plan. Every
sample is the fastest of a few repeats of one problem, which leaves out what other processes of the
machine do in between; the median and 95th percentile are over problems.

Shape letters: W = ranks, E = experts, S = steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from lrmoe.planner import PLACEMENTS, Budgets, Plan, PlanProblem, plan
from lrmoe.planner.problem import Float, Int, home_ranks
from lrmoe.planner.workloads import FAMILIES, IMBALANCES, routed_counts

SIZES = ((8, 128), (64, 256), (1024, 512))
# What else is timed at a thousand ranks; the others take seconds there.
LARGE = ("fixed", "ultraep", "recalibrated")
GROWTH_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GROWTH_EXPERTS = (32, 64, 128, 256, 512, 1024)
_REPEATS = 5
_LARGEST_LP = 64
# Options that make the peers' thresholds fit fewer tokens than they were published for.
_OPTIONS = {"ultraep": {"min_tokens": 128}, "llep": {"min_tokens": 128}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerBench:
    """What is planned.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    rate: float = 0.2
    quotas: str = "rate"
    slots: int = 2
    tokens: int = 512
    """Per rank, each drawing ``top_k`` experts."""
    top_k: int = 8
    placements: tuple[str, ...] = PLACEMENTS
    sizes: tuple[tuple[int, int], ...] = SIZES

    def __post_init__(self) -> None:
        for name in self.placements:
            if name not in PLACEMENTS:
                allowed = ", ".join(map(repr, PLACEMENTS))
                raise ValueError(f"placements={name!r}: allowed are {allowed}")
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate}: allowed is 0 <= rate < 1")

    def problem(self, placement: str, counts_WE: Int, past_SWE: Int, seed: int) -> PlanProblem:
        """As a layer with the default rule builds it."""
        return PlanProblem(
            counts_WE=counts_WE,
            rate=Fraction(str(self.rate)),
            placement=placement,
            quotas=self.quotas,
            budgets=Budgets() if placement in ("fixed", "fastermoe") else Budgets(slots=self.slots),
            share_seed=seed,
            past_counts_SWE=past_SWE,
            options=_OPTIONS.get(placement, {}),
        )


def run(bench: PlannerBench) -> list[dict[str, Any]]:
    """One row for every policy and size."""
    rows = []
    for W, E in bench.sizes:
        samples = list(_samples(bench, W, E, 12 if W < 1024 else 2))
        for placement in bench.placements:
            if W > _LARGEST_LP and placement not in LARGE:
                continue
            times, ratios = [], []
            for i, (counts_WE, past_SWE) in enumerate(samples):
                made, seconds = timed(bench, placement, counts_WE, past_SWE, i)
                times.append(seconds * 1e6)
                ratios.append(over_bound(made, counts_WE, bench.slots))
            rows.append(
                {
                    "placement": placement,
                    "ranks": W,
                    "experts": E,
                    "plan_us": float(np.median(times)),
                    "plan_p95_us": float(np.percentile(times, 95)),
                    "makespan_over_bound": float(np.mean(ratios)),
                    "makespan_over_bound_worst": float(np.max(ratios)),
                    "bound": "lp" if W <= _LARGEST_LP else "mean",
                }
            )
    return rows


def growth(bench: PlannerBench, placement: str = "recalibrated") -> list[dict[str, Any]]:
    """Plan time against ranks (512 experts) and against experts (32 ranks)."""
    sizes = [("ranks", W, 512) for W in GROWTH_RANKS] + [("experts", 32, E) for E in GROWTH_EXPERTS]
    rows = []
    for axis, W, E in sizes:
        times = [
            timed(bench, placement, counts_WE, past_SWE, i)[1] * 1e6
            for i, (counts_WE, past_SWE) in enumerate(_samples(bench, W, E, 4 if W < 512 else 1))
        ]
        rows.append({"axis": axis, "ranks": W, "experts": E, "plan_us": float(np.median(times))})
    return rows


def timed(
    bench: PlannerBench, placement: str, counts_WE: Int, past_SWE: Int, seed: int
) -> tuple[Plan, float]:
    """A plan, and the seconds that building the problem and planning take."""
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first may compile
        start = time.perf_counter()
        made = plan(bench.problem(placement, counts_WE, past_SWE, seed))
        best = min(best, time.perf_counter() - start)
    return made, best


def over_bound(made: Plan, counts_WE: Int, slots: int) -> float:
    """Makespan in pairs (a backward pass costs two) over the bound for the plan's own quotas.

    The bound is the LP relaxation: fractional splits, the given slots per rank, weight moves free;
    for large groups the mean load, which is below it.
    """
    W = len(counts_WE)
    load_E = counts_WE.sum(0)
    if made.predicted is not None:
        reached = made.predicted.makespan
    else:
        home_E = home_ranks(*counts_WE.shape)
        forward, backward = (
            np.bincount(home_E, weights=n, minlength=W).max() for n in (load_E, made.quota_E)
        )
        reached = forward + 2 * backward
    if not load_E.sum():
        return 1.0
    if W > _LARGEST_LP:
        least = (load_E.sum() + 2 * made.quota_E.sum()) / W
    else:
        # Quotas are nearly proportional to the loads, so one LP serves both passes.
        share = least_rank_load(load_E, W, slots) * W / load_E.sum()
        least = share * (load_E.sum() + 2 * made.quota_E.sum()) / W
        if made.quota_E.sum() < load_E.sum():
            least = least_rank_load(load_E, W, slots) + 2 * least_rank_load(made.quota_E, W, slots)
    return float(reached / least)


def least_rank_load(load_E: Int, W: int, slots: int) -> float:
    """The LP bound on the largest rank load, by HiGHS.

    ``min T`` with ``sum_r x[e, r] = load[e]``, ``sum_e x[e, r] <= T``, and on every rank at most
    ``slots`` of ``x[e, r] / load[e]``, summed over the experts that are not at home there.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    experts = np.flatnonzero(load_E)
    n = len(experts)
    scale = load_E.sum() / W
    load, home = load_E[experts] / scale, home_ranks(W, len(load_E))[experts]
    e, r = np.repeat(np.arange(n), W), np.tile(np.arange(W), n)
    x = np.arange(n * W)
    away = home[e] != r
    shape = (W, n * W + 1)
    ones: Float = np.ones(n * W)
    rank_load = sparse.coo_matrix(
        (np.r_[ones, -np.ones(W)], (np.r_[r, np.arange(W)], np.r_[x, np.full(W, n * W)])), shape
    )
    used = sparse.coo_matrix((1 / load[e][away], (r[away], x[away])), shape)
    sums = sparse.coo_matrix((ones, (e, x)), (n, n * W + 1))
    result = linprog(
        np.r_[np.zeros(n * W), 1.0],
        A_ub=sparse.vstack([rank_load, used]).tocsr(),
        b_ub=np.r_[np.zeros(W), np.full(W, float(slots))],
        A_eq=sums.tocsr(),
        b_eq=load,
        method="highs",
    )
    return float(result.fun * scale)


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Plan time against ranks and experts, as an image."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for panel, axis, fixed in zip(
        axes, ("ranks", "experts"), ("512 experts", "32 ranks"), strict=True
    ):
        mine = [row for row in rows if row["axis"] == axis]
        panel.loglog([row[axis] for row in mine], [row["plan_us"] for row in mine], marker="o")
        panel.set_xlabel(axis)
        panel.set_title(fixed)
        panel.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("plan (microseconds)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe bench planner``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lrmoe bench planner", description=main.__doc__)
    parser.add_argument("--placements", type=_names, default=PLACEMENTS, help="comma-separated")
    parser.add_argument("--rate", type=float, default=0.2, help="share of pairs to drop")
    parser.add_argument("--quotas", default="rate", help="rate, planned or makespan")
    parser.add_argument("--slots", type=int, default=2, help="replica slots per rank")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="e.g. 8x128,64x256")
    parser.add_argument("--tokens", type=int, default=512, help="per rank")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--plot", help="image of plan time against ranks and experts")
    options = parser.parse_args(list(arguments))
    bench = PlannerBench(
        rate=options.rate,
        quotas=options.quotas,
        slots=options.slots,
        placements=tuple(options.placements),
        sizes=tuple(options.sizes),
        tokens=options.tokens,
    )
    rows = run(bench)
    sys.stdout.write(_table(rows))
    grown: list[dict[str, Any]] = []
    if options.plot is not None:
        grown = growth(bench)
        plot(grown, options.plot)
        sys.stdout.write("\n" + _growth_table(grown))
    if options.json is not None:
        from lrmoe.cli import write_json

        config = {"rate": bench.rate, "quotas": bench.quotas, "slots": bench.slots}
        write_json(options.json, "bench planner", config | {"growth": grown}, rows)
    return 0


def _names(text: str) -> list[str]:
    return text.split(",")


def _sizes(text: str) -> list[tuple[int, int]]:
    """``8x128,64x256``: ranks and experts."""
    sizes = []
    for size in text.split(","):
        ranks, _, experts = size.partition("x")
        sizes.append((int(ranks), int(experts)))
    return sizes


def _samples(bench: PlannerBench, W: int, E: int, count: int) -> Iterable[tuple[Int, Int]]:
    """Counts of this step and of the one before it, over families and imbalances."""
    kinds = [(family, imbalance) for family in FAMILIES for imbalance in IMBALANCES]
    top_k = min(bench.top_k, E // 2)
    # At a thousand ranks the sampling itself takes long, and the spread is the same with less.
    tokens = bench.tokens if W < 256 else 64
    draw: Callable[..., Int] = routed_counts
    for i in range(count):
        family, imbalance = kinds[i % len(kinds)]
        now, before = (
            draw(family, W, E, imbalance, tokens=tokens, top_k=top_k, layer=i, seed=seed)
            for seed in (1, 0)
        )
        yield now, before[None]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'placement':13}{'ranks':>6}{'experts':>8}{'plan_us':>9}{'p95_us':>9}"
        f"{'over bound':>12}{'worst':>8}"
    ]
    lines += [
        f"{row['placement']:13}{row['ranks']:6}{row['experts']:8}{row['plan_us']:9.0f}"
        f"{row['plan_p95_us']:9.0f}{row['makespan_over_bound']:12.3f}"
        f"{row['makespan_over_bound_worst']:8.3f}"
        for row in rows
    ]
    note = "Bound: LP with fractional splits, weight moves free; the mean load beyond 64 ranks."
    return "\n".join([*lines, note, ""])


def _growth_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'ranks':>6}{'experts':>8}{'plan_us':>9}"]
    lines += [f"{row['ranks']:6}{row['experts']:8}{row['plan_us']:9.0f}" for row in rows]
    return "\n".join([*lines, ""])
