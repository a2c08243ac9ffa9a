"""``lrmoe study time-to-loss``: MoE-layer time until fixed validation losses, on two real ranks."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lrmoe.config import Recalibration
from lrmoe.report import CLOCK_VARIABLE
from lrmoe.studies import rows
from lrmoe.studies.grid import DEFAULT_GRID
from lrmoe.studies.texts import prose_folder
from lrmoe.training.launch import launch
from lrmoe.training.run_dir import RunDirectory, read_rows
from lrmoe.training.settings import DataSettings, ModelSettings, TrainingSettings, TrainSettings

_NPROC = 2
_SMOOTHING = 3  # evaluations, each with those before it


@dataclass(frozen=True, kw_only=True)
class Race:
    """Runs that are timed to the same losses."""

    name: str
    targets: tuple[float, ...]
    """Fixed beforehand; a run that misses one has no time for it."""
    arms: tuple[dict[str, Any], ...]
    """Settings of ``lrmoe.Recalibration``."""
    is_skewed: bool = False
    """Force a rank imbalance of 1.8 (``lrmoe.studies.skewed_worker``)."""
    clock: str = "wall"
    """``wall`` needs two idle cores; ``cpu`` is each rank's own CPU time, without waiting."""
    model: str = "qwen3-moe-small"
    overrides: tuple[tuple[str, Any], ...] = ()
    text: str = "code"
    steps: int = 400
    eval_steps: int = 20
    seeds: tuple[int, ...] = (0,)
    block_size: int = 256
    validation_blocks: int = 64

    def __post_init__(self) -> None:
        if not self.targets or list(self.targets) != sorted(self.targets, reverse=True):
            raise ValueError(f"targets={list(self.targets)}: must be losses in falling order")
        if self.text not in ("code", "prose"):
            raise ValueError(f"text={self.text!r}: allowed are 'code', 'prose'")
        if self.clock not in ("wall", "cpu"):
            raise ValueError(f"clock={self.clock!r}: allowed are 'wall', 'cpu'")
        for arm in self.arms:
            arm_config(arm)

    def runs(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Arm and seed, seed by seed."""
        for seed in self.seeds:
            for arm in self.arms:
                yield arm, seed


def main(arguments: Sequence[str]) -> int:
    """Runs what is missing, then shows all rows; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    parser = argparse.ArgumentParser(
        prog="lrmoe study time-to-loss",
        description="Times are of the slower rank. Races by wall clock need two idle cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--grid", type=Path, default=DEFAULT_GRID, help="YAML file with a section 'time-to-loss'")
    add("--stages", nargs="+", metavar="NAME", help="only these races")
    add("--rows", type=Path, default=Path("results/time-to-loss.jsonl"), help="file of the rows")
    add("--cache", type=Path, default=Path("runs/study"), help="directory of the runs")
    add("--runs", type=int, metavar="N", help="stop after N runs; 0 only shows what there is")
    add(
        "--simulate",
        metavar="FILE",
        type=Path,
        help="also write what the rows' steps cost on eight simulated GPUs",
    )
    add("--json", metavar="FILE", help="file for the result as JSON")
    options = parser.parse_args(arguments)
    races = read_races(options.grid)
    names = [race.name for race in races]
    for name in options.stages or ():
        if name not in names:
            raise ValueError(f"stage={name!r}: allowed are {', '.join(map(repr, names))}")
    chosen = [race for race in races if not options.stages or race.name in options.stages]
    execute(chosen, options.rows, options.cache, options.runs)
    found = rows.load(options.rows)
    sys.stdout.write(table(found))
    if options.simulate is not None:
        from lrmoe.studies.simulated_race import simulated, simulated_table

        made = list(simulated(found))
        options.simulate.write_text("".join(json.dumps(row) + "\n" for row in made))
        sys.stdout.write(simulated_table(made))
    if options.json is not None:
        from lrmoe.cli import write_json

        write_json(options.json, "study time-to-loss", {"grid": options.grid.name}, found)
    return 0


def read_races(path: Path) -> list[Race]:
    """The races of a grid file.

    Raises:
        ValueError: naming what is wrong with which race.
    """
    content = yaml.safe_load(path.read_text()) if path.is_file() else None
    if not isinstance(content, dict) or "time-to-loss" not in content:
        raise ValueError(f"grid={str(path)!r}: has no section 'time-to-loss'")
    races = []
    for values in content["time-to-loss"]:
        own = dict(values)
        for name in ("targets", "arms", "seeds"):
            if name in own:
                own[name] = tuple(own[name])
        own["overrides"] = tuple(own.get("overrides", {}).items())
        try:
            races.append(Race(**own))
        except (TypeError, ValueError) as error:
            raise ValueError(f"race {values.get('name')!r}: {error}") from error
    return races


def execute(races: Sequence[Race], path: Path, cache: Path, most: int | None) -> None:
    """Trains the runs without rows; a crash loses at most the one it happens in."""
    found = rows.open_for_append(path)
    done = {(row["race"], json.dumps(row["arm_settings"]), row["seed"]) for row in found}
    todo = [
        (race, arm, seed)
        for race in races
        for arm, seed in race.runs()
        if (race.name, json.dumps(arm), seed) not in done
    ]
    for race, arm, seed in todo[:most]:
        made = [row | rows.origin() for row in timed(race, arm, seed, cache)]
        with path.open("a") as file:
            # One write: all targets of a run, or none.
            file.write("".join(json.dumps(row) + "\n" for row in made))
        last = made[-1]
        sys.stdout.write(
            f"{race.name}: {name_of(arm)} seed {seed}: {last['val_loss']:.4f}, "
            f"MoE {last['moe_ms']:.0f} ms per step\n"
        )
        sys.stdout.flush()


def timed(race: Race, arm: dict[str, Any], seed: int, cache: Path) -> list[dict[str, Any]]:
    """Trains on two ranks; a row per target."""
    settings = train_settings(race, arm, seed, cache)
    directory = RunDirectory(str(settings.run_dir))
    shutil.rmtree(directory.root, ignore_errors=True)  # what a crash left
    worker = "lrmoe.studies.skewed_worker" if race.is_skewed else "lrmoe.training.worker"
    with _clock(race.clock):
        is_finished = launch(settings, _NPROC, worker)
    if not is_finished:
        raise KeyboardInterrupt
    summary = json.loads(directory.summary.read_text())
    evaluations = list(read_rows(directory.evaluations))
    metrics = list(read_rows(directory.metrics))
    shutil.rmtree(directory.root)
    config = settings.recalibration
    base = {
        "race": race.name,
        "model": race.model,
        "text": race.text,
        "regime": "scratch",
        "is_skewed": race.is_skewed,
        "arm": name_of(arm),
        "arm_settings": arm,
        "selection": config.selection,
        "placement": config.placement,
        "rate": config.to_dict()["rate"],
        "router_grad": config.router_grad,
        "seed": seed,
        "steps": race.steps,
        "val_loss": summary["val_loss"],
        "ppl": summary["ppl"],
        "moe_ms": evaluations[-1]["moe_ms_total"] / race.steps,
        "step_ms": evaluations[-1]["train_s"] * 1e3 / race.steps,
        "clock": metrics[-1]["moe_clock"],
        "backward_fraction": summary["backward_fraction"],
        "imbalance_fwd": summary["imbalance_fwd"],
        "imbalance_bwd": summary["imbalance_bwd"],
        "settings": settings.to_dict() | {"run_dir": None},
    }
    return [base | reached(evaluations, target) for target in race.targets]


@contextmanager
def _clock(clock: str) -> Iterator[None]:
    """What the ranks started inside measure."""
    before = os.environ.get(CLOCK_VARIABLE)
    os.environ[CLOCK_VARIABLE] = clock
    try:
        yield
    finally:
        if before is None:
            del os.environ[CLOCK_VARIABLE]
        else:
            os.environ[CLOCK_VARIABLE] = before


def train_settings(race: Race, arm: dict[str, Any], seed: int, cache: Path) -> TrainSettings:
    """The run as ``lrmoe train`` takes it."""
    path = None if race.text == "code" else str(prose_folder(cache / "prose"))
    config = arm_config(arm)
    return TrainSettings(
        run_dir=str(cache / f"race-{race.name}"),
        model=ModelSettings(preset=race.model, overrides=dict(race.overrides)),
        data=DataSettings(
            path=path, block_size=race.block_size, validation_blocks=race.validation_blocks
        ),
        training=TrainingSettings(
            max_steps=race.steps,
            eval_steps=race.eval_steps,
            save_steps=0,
            report_to="none",
            seed=seed,
        ),
        recalibration=replace(config, seed=seed),
    )


def arm_config(arm: dict[str, Any]) -> Recalibration:
    """Its settings; an arm that does not name strata has none, whatever the default is."""
    return Recalibration.from_dict({"strata": "none"} | arm)


def reached(evaluations: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """When the smoothed validation loss first was at the target, in three clocks.

    The loss of an evaluation is averaged with the two before it; between two evaluations, loss and
    clocks are taken to be linear.
    """
    losses = [
        float(np.mean([row["val_loss"] for row in evaluations[max(0, i + 1 - _SMOOTHING) : i + 1]]))
        for i in range(len(evaluations))
    ]
    clocks = {"ms_to_target": "moe_ms_total", "steps_to_target": "step", "s_to_target": "train_s"}
    first = next((i for i, loss in enumerate(losses) if loss <= target), None)
    if first is None:
        return {"target_loss": target} | dict.fromkeys(clocks)
    result: dict[str, Any] = {"target_loss": target}
    for key, clock in clocks.items():
        now = float(evaluations[first][clock])
        if first == 0:
            result[key] = now
            continue
        before = float(evaluations[first - 1][clock])
        share = (losses[first - 1] - target) / (losses[first - 1] - losses[first])
        result[key] = before + share * (now - before)
    return result


def name_of(arm: dict[str, Any]) -> str:
    """Placement, rule and rate."""
    config = arm_config(arm)
    rate = config.to_dict()["rate"]
    if rate == 0:
        return f"{config.placement} C0"
    strata = ""
    if config.is_stratified:
        strata = " strata" if config.strata == "gradient" else f" {config.strata}"
    return f"{config.placement} {config.quotas} {config.selection} C{100 * rate:g}{strata}"


def table(found: Sequence[rows.Row]) -> str:
    """A line per run and target, with the MoE-layer time over that of every exact run."""
    lines = [
        f"{'race':16}{'arm':44}{'seed':>5}{'target':>8}{'steps':>8}{'MoE ms':>10}{'step s':>9}"
    ]
    for row in found:
        cells = [row["steps_to_target"], row["ms_to_target"], row["s_to_target"]]
        steps, moe_ms, seconds = ("-" if c is None else f"{c:.1f}" for c in cells)
        lines.append(
            f"{row['race']:16}{row['arm']:44}{row['seed']:5}{row['target_loss']:8g}{steps:>8}"
            f"{moe_ms:>10}{seconds:>9}"
        )
    return "\n".join([*lines, ""])
