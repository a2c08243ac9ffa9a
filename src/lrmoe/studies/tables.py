"""Every comparison of the studies as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lrmoe.studies.convergence import COLUMNS, cells, describe
from lrmoe.studies.rows import Row
from lrmoe.studies.shown import compared_protocols, is_final
from lrmoe.studies.statistics import (
    Estimate,
    estimate,
    paired,
    race_ratios,
    strata_differences,
)

PEERS = ("symi C0", "ultraep C0")  # what races are measured against; the first as in the paper
_GRADIENT_COLUMNS = {
    "error_one": "error of one batch",
    "cosine_one": "cosine",
    "length_one": "length",
    "bias": "bias",
    "noise_one": "noise of one batch",
    "error_draw": "error of one draw",
    "error_mean_draw": "of their mean",
    "progress_easy": "easy",
    "progress_hard": "hard",
}


def tables(runs: Sequence[Row], gradients: Sequence[Row], races: Sequence[Row] = ()) -> str:
    """The page."""
    parts = [
        "# Tables of the convergence study",
        "Written by `lrmoe study figures` from `results/*.jsonl`; not edited by hand. "
        "[What they mean](convergence.md).",
    ]
    comparisons = paired(runs)
    for protocol in compared_protocols(comparisons):
        mine = [c for c in comparisons if c["protocol"] == protocol]
        parts += [f"## {describe(protocol)}", _table(COLUMNS, map(cells, mine))]
    finals = [c for c in comparisons if is_final(c)]
    if finals:
        parts += ["## The default rule in long runs, all protocols together", _finals(finals)]
    differences = strata_differences(runs)
    if differences:
        parts += ["## With strata, minus the same without", _strata(differences)]
    for study in dict.fromkeys(row["study"] for row in gradients):
        of_study = [row for row in gradients if row["study"] == study]
        parts += [f"## Gradients: {study}", _gradients(of_study)]
    for name in dict.fromkeys(row["race"] for row in races):
        of_race = [row for row in races if row["race"] == name]
        parts += [f"## Time to loss: {name}", _race(of_race), _race_over_seeds(of_race)]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], lines: Any) -> str:
    every = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def _finals(finals: Sequence[dict[str, Any]]) -> str:
    """A line per length and arm: the pairs of every protocol that has seeds enough."""
    by_arm: dict[tuple[int, str], list[float]] = {}
    for comparison in finals:
        key = comparison["protocol"].steps, comparison["arm"].name
        by_arm.setdefault(key, []).extend(comparison["excess_by_seed"])
    lines = [[str(steps), arm, *_numbers(estimate(v))] for (steps, arm), v in by_arm.items()]
    return _table(("steps", "arm", "pairs", "over C0, %", "std. error", "95 % bound"), lines)


def _strata(differences: Sequence[dict[str, Any]]) -> str:
    """A line per protocol and arm."""
    lines = [
        [describe(each["protocol"]), each["arm"].name, *_numbers(each["difference"])]
        for each in differences
    ]
    columns = "", "arm with strata", "pairs", "difference, %", "std. error", "95 % bound"
    return _table(columns, lines)


def _numbers(excess: Estimate) -> tuple[str, ...]:
    bound = "" if excess.bound is None else f"{excess.bound:+.2f}"
    return str(excess.count), f"{excess.mean:+.2f}", _error(excess), bound


def _error(found: Estimate) -> str:
    return "" if found.standard_error is None else f"{found.standard_error:.2f}"


def _gradients(gradients: Sequence[Row]) -> str:
    """A line per step, arm and group of parameters."""
    lines = [
        [str(row["step"]), row["arm"], group, *(f"{g[key]:.3f}" for key in _GRADIENT_COLUMNS)]
        for row in gradients
        for group, g in row["groups"].items()
    ]
    return _table(("step", "arm", "group", *_GRADIENT_COLUMNS.values()), lines)


def _race(rows_of_race: Sequence[Row]) -> str:
    """A line per run and target."""
    lines = []
    for row in rows_of_race:
        of_seed = [r for r in rows_of_race if r["seed"] == row["seed"]]
        ratios = race_ratios(of_seed, row["arm"], PEERS[0], row["target_loss"])
        lines.append(
            [
                row["arm"],
                str(row["seed"]),
                f"{row['target_loss']:g}",
                "-" if row["steps_to_target"] is None else f"{row['steps_to_target']:.0f}",
                "-" if row["ms_to_target"] is None else f"{row['ms_to_target']:.0f}",
                f"{ratios[0]:.2f}" if ratios else "-",
                f"{row['imbalance_fwd']:.2f}",
                f"{row['imbalance_bwd']:.2f}",
                f"{row['backward_fraction']:.2f}",
            ]
        )
    columns = "arm", "seed", "loss", "steps", "MoE-layer ms", "over symi", "imbalance fwd"
    return _table((*columns, "bwd", "kept"), lines)


def _race_over_seeds(rows_of_race: Sequence[Row]) -> str:
    """A line per arm and target: how far its time lies below each peer's, over the seeds."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows_of_race if row["rate"]):
        for target in dict.fromkeys(row["target_loss"] for row in rows_of_race):
            line = [arm, f"{target:g}"]
            for peer in PEERS:
                ratios = race_ratios(rows_of_race, arm, peer, target)
                below = estimate([100 * (1 - r) for r in ratios]) if ratios else None
                line += ["-", ""] if below is None else [f"{below.mean:.1f}", _error(below)]
            seeds = {row["seed"] for row in rows_of_race if row["arm"] == arm}
            lines.append([*line, str(len(seeds))])
    columns = "arm", "loss", "below symi, %", "std. error", "below ultraep, %", "std. error"
    return _table((*columns, "seeds"), lines)
