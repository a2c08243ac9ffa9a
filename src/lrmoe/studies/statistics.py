"""Paired differences of runs: mean, standard error, one-sided 95 % bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from lrmoe.studies.rows import Row, run_of
from lrmoe.studies.settings import Run

# Quantiles of Student's t at 0.95 for 1, 2, ... degrees of freedom.
_T_95 = (
    6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125,
    1.7959, 1.7823, 1.7709, 1.7613, 1.7531, 1.7459, 1.7396, 1.7341, 1.7291, 1.7247,
    1.7207, 1.7171, 1.7139, 1.7109, 1.7081, 1.7056, 1.7033, 1.7011, 1.6991, 1.6973,
)  # fmt: skip
# What paired runs must share beside their protocol and seed.
_SHARED = (
    "text_fingerprint",
    "initial_fingerprint",
    "order_fingerprint",
    "torch",
    "transformers",
    "system",
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds; ``None`` where there are too few of them to say."""

    mean: float
    standard_error: float | None
    bound: float | None
    """The mean is below this with a confidence of 95 % (normal differences assumed)."""
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, standard error and upper one-sided 95 % bound of the mean.

    Where a value is not finite, as of a run that diverged, the mean is not either, and the
    others are None.
    """
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return Estimate(mean=fmean(values), standard_error=None, bound=None, count=count)
    error = stdev(values) / math.sqrt(count)
    return Estimate(
        mean=fmean(values),
        standard_error=error,
        bound=fmean(values) + t_quantile_95(count - 1) * error,
        count=count,
    )


def t_quantile_95(degrees: int) -> float:
    """The 0.95 quantile of Student's t."""
    if degrees < 1:
        raise ValueError(f"degrees={degrees}: must be at least 1")
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    # Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5), good to 1e-6 here.
    z = 1.6448536269514722
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def paired(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each arm of each protocol against the exact run of the same seed.

    A row per protocol and arm, in the order of first appearance: ``loss`` and ``excess`` (relative
    to the exact run of the seed, in per cent) as :class:`Estimate`. Only seeds that have both
    count; a diverged run makes the excess infinite. Arms without a pair are left out.

    Raises:
        ValueError: if a run appears twice, or if paired rows do not share text, order, initial
            model, machine and versions: their difference would not be that of the arms.
    """
    groups: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    runs = {}
    for row in rows:
        run = run_of(row)
        protocol = repr(run.protocol)
        arm = "C0" if run.arm.is_exact else repr(run.arm)
        if run.seed in groups[protocol][arm]:
            raise ValueError(f"two rows of one run: {row['arm']}, seed {run.seed}")
        groups[protocol][arm][run.seed] = row
        runs[protocol, arm] = run
    result = []
    for protocol, arms in groups.items():
        exact = arms.get("C0", {})
        for arm, by_seed in arms.items():
            seeds = [seed for seed in by_seed if seed in exact]
            for seed in seeds:
                _refuse_unpaired(by_seed[seed], exact[seed])
            if seeds:
                run = runs[protocol, arm]
                result.append(_compare(run, [(by_seed[s], exact[s]) for s in seeds]))
    return result


def strata_differences(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each arm with strata against the same without, of the same seed: per cent of the loss.

    A row per protocol and arm with ``difference`` as :class:`Estimate`. Only seeds that have both
    count; where a run diverged the difference is nan.

    Raises:
        ValueError: if rows do not share what :func:`paired` asks for.
    """
    by_key = {run_of(row).key: row for row in rows}
    found: dict[str, tuple[Run, list[float]]] = {}
    for row in by_key.values():
        run = run_of(row)
        if not run.arm.recalibration.is_stratified:
            continue
        plain = replace(run.arm.recalibration, strata="none")
        partner = by_key.get(replace(run, arm=replace(run.arm, recalibration=plain)).key)
        if partner is not None:
            _refuse_unpaired(row, partner)
            _, values = found.setdefault(repr((run.protocol, run.arm)), (run, []))
            losses = row["val_loss"], partner["val_loss"]
            values.append(math.nan if None in losses else 100 * (losses[0] / losses[1] - 1))
    return [
        {"protocol": run.protocol, "arm": run.arm, "difference": estimate(values)}
        for run, values in found.values()
    ]


def race_ratios(
    rows_of_race: Sequence[Row], arm: str, peer: str, target: float
) -> list[float] | None:
    """MoE-layer time until a loss over that of the peer's run with the same seed, seed by seed.

    ``None`` if a seed has no such run, or one of the two did not get there.
    """
    mine, its = (
        {
            row["seed"]: row["ms_to_target"]
            for row in rows_of_race
            if row["arm"] == name and row["target_loss"] == target
        }
        for name in (arm, peer)
    )
    if not mine or not all(ms and its.get(seed) for seed, ms in mine.items()):
        return None
    return [ms / its[seed] for seed, ms in mine.items()]


def _compare(run: Any, pairs: list[tuple[Row, Row]]) -> dict[str, Any]:
    losses = [math.inf if row["val_loss"] is None else row["val_loss"] for row, _ in pairs]
    excess = [
        100 * (loss / exact["val_loss"] - 1) for loss, (_, exact) in zip(losses, pairs, strict=True)
    ]
    return {
        "protocol": run.protocol,
        "arm": run.arm,
        "loss": estimate(losses),
        "excess": estimate(excess),
        "excess_by_seed": excess,
        "backward_fraction": fmean(row["backward_fraction"] for row, _ in pairs),
        "score_mass": fmean(row["score_mass"] for row, _ in pairs),
    }


def _refuse_unpaired(row: Row, exact: Row) -> None:
    for key in _SHARED:
        if row[key] != exact[key]:
            raise ValueError(
                f"{row['arm']}, seed {row['seed']}: {key}={row[key]!r}, but the exact run has "
                f"{exact[key]!r}; rows of different settings are not compared"
            )
