"""The races' steps on the replay's clock: eight ranks, simulated.

How many steps a run needs to a loss was found on two real ranks; how long the MoE layers of a step
take is simulated, with the cluster of ``lrmoe study systems`` at the race's own imbalance. Nothing
says that a model of that size would need as many steps more or less than exact training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lrmoe.cluster.models import model_shape
from lrmoe.cluster.replay import generated, replay
from lrmoe.config import Budget, Recalibration
from lrmoe.studies.rows import Row
from lrmoe.studies.systems import Systems
from lrmoe.studies.time_to_loss import arm_config

_LAYERS = 8
_PEERS = ("symi C0", "ultraep C0")


def simulated(found: Sequence[Row], settings: Systems | None = None) -> Iterator[Row]:
    """For every row of a race one per model of the settings; without a time where it has none.

    Args:
        found: rows of ``lrmoe study time-to-loss``; each race has its exact run at home placement.
        settings: the cluster; ``None``: that of the systems study.
    """
    settings = settings if settings is not None else Systems()
    for race in dict.fromkeys(row["race"] for row in found):
        mine = [row for row in found if row["race"] == race]
        imbalance = round(
            fmean(r["imbalance_fwd"] for r in mine if r["placement"] == "fixed" and r["rate"] == 0),
            2,
        )
        arms = {row["arm"]: _at_scale(row["arm_settings"], settings.slots) for row in mine}
        for name in settings.models:
            layer_ms = _layer_ms(settings, name, imbalance, arms)
            for row in mine:
                of_step = layer_ms[row["arm"]] * model_shape(name).moe_layers
                steps = row["steps_to_target"]
                yield {
                    **{key: row[key] for key in ("race", "arm", "seed", "target_loss")},
                    "simulated": True,
                    "model": name,
                    "hardware": settings.hardware,
                    "ranks": settings.ranks,
                    "tokens": settings.tokens,
                    "imbalance": imbalance,
                    "layer_ms": layer_ms[row["arm"]],
                    "steps_to_target": steps,
                    "ms_to_target": None if steps is None else steps * of_step,
                }


def _at_scale(arm: dict[str, Any], slots: int) -> Recalibration:
    config = arm_config(arm)
    return config if config.placement == "fixed" else replace(config, budget=Budget(slots=slots))


def _layer_ms(
    settings: Systems, name: str, imbalance: float, arms: dict[str, Recalibration]
) -> dict[str, float]:
    """Forward and backward pass and exposed planning of a layer call, mean over the seeds."""
    cluster, workload = settings.cluster(model_shape(name)), settings.workload(imbalance=imbalance)
    each: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in settings.seeds:
        calls = generated(
            workload, cluster, tokens=settings.tokens, layers=_LAYERS, steps=settings.steps,
            seed=seed,
        )  # fmt: skip
        rows = replay(cluster, list(arms.values()), calls)
        for arm, row in zip(arms, rows, strict=True):
            each[arm].append(row["makespan_ms"])
    return {arm: fmean(ms) for arm, ms in each.items()}


def simulated_table(made: Sequence[dict[str, Any]]) -> str:
    """A line per race, model, seed and arm: a layer call, and how far below each peer."""
    runs: dict[tuple[Any, ...], dict[float, dict[str, Any]]] = {}
    for row in made:
        run = (row["race"], row["model"], row["seed"], row["arm"])
        runs.setdefault(run, {})[row["target_loss"]] = row
    head = f"{'race':18}{'model':18}{'seed':>5}  {'arm':44}{'layer ms':>9}"
    lines = [f"{head}  % below {' and '.join(_PEERS)}"]
    for (*where, arm), by_loss in runs.items():
        peers = [runs.get((*where, peer), {}) for peer in _PEERS]
        cells = [
            f"{loss:g}: " + ", ".join(_below(row, peer.get(loss)) for peer in peers)
            for loss, row in by_loss.items()
        ]
        race, model, seed = where
        layer_ms = next(iter(by_loss.values()))["layer_ms"]
        lines.append(f"{race:18}{model:18}{seed:5}  {arm:44}{layer_ms:9.2f}  {';  '.join(cells)}")
    return "\n".join([*lines, "Simulated.", ""])


def _below(row: dict[str, Any], peer: dict[str, Any] | None) -> str:
    mine, other = row["ms_to_target"], None if peer is None else peer["ms_to_target"]
    return "-" if mine is None or other is None else f"{100 * (1 - mine / other):.1f}"
