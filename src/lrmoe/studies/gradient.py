"""``lrmoe study gradient``: bias and variance of each rule's gradient against the exact one.

A model is trained exactly; at some of its steps every rule computes the gradients of the same
batches, and they are compared per group of parameters. An error that is small in every batch and
points the same way in all of them moves the mean gradient more than a larger one that averages out.

Shape letters: B = blocks, S = tokens per block, T = B * S, K = top-k, L = MoE layers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

import lrmoe
from lrmoe.studies import experiments, rows
from lrmoe.studies.grid import DEFAULT_GRID
from lrmoe.studies.loop import (
    Loop,
    backward,
    block_ids,
    configure,
    identity,
    initial_model,
    token_loss,
)
from lrmoe.studies.settings import Arm, Protocol, Run, protocol_from_dict
from lrmoe.studies.texts import study_text
from lrmoe.training.data import TextData
from lrmoe.training.run_dir import append_row

GROUPS = ("down", "gate_up", "router", "rest", "all")
_QUARTERS = 4
Gradient = dict[str, torch.Tensor]  # a vector per group


@dataclass(frozen=True, kw_only=True)
class GradientStudy:
    """Where along a run the rules are compared, and on how many batches."""

    name: str
    protocol: Protocol
    seed: int = 0
    at_steps: tuple[int, ...] = (50, 200, 400)
    batches: int = 32
    """Different batches; how the error of their mean falls shows the bias."""
    draws: int = 16
    """Draws of one batch, whose mean is compared with a single one."""
    arms: tuple[Arm, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for name in ("batches", "draws"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 2")
        if not self.at_steps or not all(0 <= s <= self.protocol.steps for s in self.at_steps):
            raise ValueError(
                f"at_steps={list(self.at_steps)}: allowed are 0 to steps={self.protocol.steps}"
            )
        if not self.arms or any(arm.is_exact for arm in self.arms):
            raise ValueError("arms: needs one or more, each with a rate above 0")

    @property
    def run(self) -> Run:
        """The exact run whose models are looked at."""
        return Run(protocol=self.protocol, arm=Arm(), seed=self.seed)


def main(arguments: Sequence[str]) -> int:
    """Measures what is missing in the file of the rows; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    parser = argparse.ArgumentParser(
        prog="lrmoe study gradient",
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--grid", type=Path, default=DEFAULT_GRID, help="YAML file with a section 'gradient'")
    add("--stages", nargs="+", metavar="NAME", help="only these stages")
    add("--rows", type=Path, default=Path("results/gradient.jsonl"), help="file of the rows")
    add("--cache", type=Path, default=Path("runs/study"), help="directory of checkpoints")
    add("--json", metavar="FILE", help="file for the result as JSON")
    options = parser.parse_args(arguments)
    studies = read_studies(options.grid)
    names = [study.name for study in studies]
    for name in options.stages or ():
        if name not in names:
            raise ValueError(f"stage={name!r}: allowed are {', '.join(map(repr, names))}")
    for study in studies:
        if not options.stages or study.name in options.stages:
            measure(study, options.rows, options.cache)
    found = rows.load(options.rows)
    sys.stdout.write(table(found))
    if options.json is not None:
        from lrmoe.cli import write_json

        write_json(options.json, "study gradient", {"grid": options.grid.name}, found)
    return 0


def read_studies(path: Path) -> list[GradientStudy]:
    """The gradient studies of a grid file.

    Raises:
        ValueError: naming what is wrong with which study.
    """
    content = yaml.safe_load(path.read_text()) if path.is_file() else None
    if not isinstance(content, dict) or "gradient" not in content:
        raise ValueError(f"grid={str(path)!r}: has no section 'gradient'")
    defaults = content.get("arm_defaults", {})
    studies = []
    for values in content["gradient"]:
        arms = tuple(Arm.from_dict({**defaults, **arm}) for arm in values["arms"])
        own = {
            **values,
            "protocol": protocol_from_dict(values["protocol"]),
            "at_steps": tuple(values["at_steps"]),
            "arms": arms,
        }
        try:
            studies.append(GradientStudy(**own))
        except (TypeError, ValueError) as error:
            raise ValueError(f"gradient study {values.get('name')!r}: {error}") from error
    return studies


def measure(study: GradientStudy, path: Path, cache: Path) -> None:
    """Adds the rows of the study's steps and arms that the file lacks."""
    torch.set_num_threads(1)
    found = rows.open_for_append(path)
    done = [(row["study"], row["step"], Arm.from_dict(row["settings_arm"])) for row in found]
    wanted = {
        step: [arm for arm in study.arms if (study.name, step, arm) not in done]
        for step in study.at_steps
    }
    if not any(wanted.values()):
        return
    text = study_text(study.protocol)
    model = initial_model(study.run, text, cache)
    base = identity(study.run, text, model)
    for step, snapshot in _snapshots(study, text, cache):
        if not wanted[step]:
            continue
        model.load_state_dict(snapshot)
        origin = rows.origin()
        for values in compare(model, study, text, wanted[step]):
            append_row(path, base | {"study": study.name, "step": step} | values | origin)
            sys.stdout.write(f"{study.name}, step {step}: {values['arm']}\n")
            sys.stdout.flush()


def _snapshots(
    study: GradientStudy, text: TextData, cache: Path
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """The exact run's model after each of the study's steps."""
    model = initial_model(study.run, text, cache)
    if 0 in study.at_steps:
        yield 0, model.state_dict()
    for step in Loop(study.run, model, text).steps():
        if step in study.at_steps:
            yield step, model.state_dict()
        if step == max(study.at_steps):
            return


def compare(
    model: nn.Module, study: GradientStudy, text: TextData, arms: Sequence[Arm]
) -> Iterator[dict[str, Any]]:
    """A row per arm: its gradients against the exact ones, on text that training has not seen."""
    batches = _held_out(study, text)
    model.train()
    easy, hard = _by_difficulty(model, batches)
    sums = {arm.name: _Sums() for arm in arms}
    for number, ids_BS in enumerate(batches):
        exact, _ = gradient(model, Arm(), number, ids_BS)
        for arm in arms:
            approximate, kept = gradient(model, arm, number, ids_BS)
            sums[arm.name].add(exact, approximate, kept)
    exact, _ = gradient(model, Arm(), 0, batches[0])
    for arm in arms:
        draws = [gradient(model, arm, len(batches) + i, batches[0])[0] for i in range(study.draws)]
        yield {
            "arm": arm.name,
            "selection": arm.recalibration.selection,
            "rate": arm.recalibration.to_dict()["rate"],
            "router_grad": arm.recalibration.router_grad,
            "settings_arm": arm.to_dict(),
            "batches": study.batches,
            "draws": study.draws,
            "groups": {
                group: sums[arm.name].result(group)
                | _average_of_draws([d[group] for d in draws], exact[group])
                | {
                    "progress_easy": sums[arm.name].progress(group, easy),
                    "progress_hard": sums[arm.name].progress(group, hard),
                }
                for group in GROUPS
            },
            **sums[arm.name].shares(),
        }


def gradient(
    model: nn.Module, arm: Arm, draw: int, ids_BS: torch.Tensor
) -> tuple[Gradient, dict[str, torch.Tensor]]:
    """The gradient as a vector per group, and the share of pairs kept by quarters of token loss.

    Args:
        draw: a number of its own makes an independent draw; the same one repeats it.
    """
    handle = configure(model, arm, seed=draw)
    handle.load_state_dict({"layers": [{"step": 0, "micro_batch": 0}] * len(handle.states)})
    model.zero_grad()
    rule = experiments.make(arm.experiment)
    with lrmoe.capture(model) as records, experiments.selecting(rule):
        backward(model, ids_BS)
    handle.finish_step()  # drops the counters of this call
    vectors = _vectors(model)
    if arm.is_exact:
        return vectors, {}
    with torch.no_grad():
        loss_BS, _ = token_loss(model, ids_BS)
    kept_LTK = torch.stack([calls[0].kept for calls in records]).double()
    return vectors, {
        "kept_by_token_loss": _by_quarter(loss_BS.reshape(-1), kept_LTK.mean((0, 2))),
    }


def _vectors(model: nn.Module) -> Gradient:
    """A copy of the model's gradients."""
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parts[_group(name)].append(parameter.grad.reshape(-1))
    vectors = {group: torch.cat(parts[group]) for group in GROUPS if group != "all"}
    vectors["all"] = torch.cat(list(vectors.values()))
    return vectors


def _by_quarter(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Mean value in each quarter of the key, from low to high."""
    order = key.argsort()
    return torch.stack([value[part].mean() for part in order.chunk(_QUARTERS)])


def _group(name: str) -> str:
    if "down_proj" in name and "experts" in name and "shared" not in name:
        return "down"
    if "gate_up_proj" in name:
        return "gate_up"
    return "router" if name.endswith("mlp.gate.weight") else "rest"


def _held_out(study: GradientStudy, text: TextData) -> list[torch.Tensor]:
    """Batches of validation blocks, spread over all of them; each block once."""
    size = study.protocol.blocks_per_step
    if study.batches * size > len(text.validation):
        raise ValueError(
            f"batches={study.batches}: needs {study.batches * size} blocks, but validation_blocks "
            f"gave {len(text.validation)}"
        )
    blocks = text.validation.spread(study.batches * size)
    return [
        block_ids(blocks, list(range(start, len(blocks), study.batches)))
        for start in range(study.batches)
    ]


def _by_difficulty(model: nn.Module, batches: Sequence[torch.Tensor]) -> list[Gradient]:
    """Exact gradients of the loss of the tokens below and above the median loss."""
    configure(model, Arm(), seed=0)
    found = []
    for is_easy in (True, False):
        model.zero_grad()
        for ids_BS in batches:
            loss_BS, _ = token_loss(model, ids_BS)
            predicted_BS = loss_BS[:, :-1]
            chosen_BS = (predicted_BS < predicted_BS.median()) == is_easy
            torch.autograd.backward(predicted_BS[chosen_BS].mean() / len(batches))
        found.append(_vectors(model))
    return found


class _Sums:
    """Running sums over the batches, per group of parameters."""

    def __init__(self) -> None:
        self._count = 0
        self._exact: dict[str, Any] = defaultdict(float)  # sums of vectors
        self._error: dict[str, Any] = defaultdict(float)
        self._exact_sq: dict[str, Any] = defaultdict(float)  # element by element
        self._error_sq: dict[str, Any] = defaultdict(float)
        self._squares: dict[str, float] = defaultdict(float)
        self._falls: dict[str, list[list[float]]] = defaultdict(list)
        self._kept: dict[str, Any] = defaultdict(float)

    def add(self, exact: Gradient, approximate: Gradient, kept: Mapping[str, torch.Tensor]) -> None:
        """One more batch."""
        self._count += 1
        for group in GROUPS:
            g, error = exact[group], approximate[group] - exact[group]
            self._exact[group] = self._exact[group] + g
            self._error[group] = self._error[group] + error
            self._exact_sq[group] = self._exact_sq[group] + g.square()
            self._error_sq[group] = self._error_sq[group] + error.square()
            self._squares[f"exact {group}"] += _square(g)
            self._squares[f"error {group}"] += _square(error)
            along = float(approximate[group] @ g)
            self._squares[f"along {group}"] += along
            norm = math.sqrt(_square(approximate[group]) * _square(g))
            self._squares[f"cosine {group}"] += along / norm
            if self._count & (self._count - 1) == 0:
                self._falls[group].append([self._count, self._error_of_mean(group)])
        for name, shares in kept.items():
            self._kept[name] = self._kept[name] + shares

    def result(self, group: str) -> dict[str, Any]:
        """What one batch, and what the mean over all of them, says of the error."""
        M = self._count
        exact, error = (self._squares[f"{kind} {group}"] for kind in ("exact", "error"))
        mean_square = _square(self._error[group] / M)
        noise = (error / M - mean_square) / (M - 1)  # of the mean's error, squared
        scale = math.sqrt(_square(self._exact[group] / M))
        return {
            "error_one": math.sqrt(error / exact),
            "cosine_one": self._squares[f"cosine {group}"] / M,
            "length_one": self._squares[f"along {group}"] / exact,
            "error_mean": math.sqrt(mean_square) / scale,
            "error_mean_by_batches": [[n, round(e, 5)] for n, e in self._falls[group]],
            # The part of the mean's error that more batches would not remove.
            "bias": math.sqrt(max(mean_square - noise, 0.0)) / scale,
            "noise_one": math.sqrt(max(noise, 0.0) * M) / scale,
            **self._scaled(group),
        }

    def _scaled(self, group: str) -> dict[str, float]:
        """The same where every parameter counts alike, as for an optimizer that scales each."""
        M = self._count
        exact_sq, error_sq = self._exact_sq[group] / M, self._error_sq[group] / M
        mean_sq = (self._error[group] / M).square()
        noise = (error_sq - mean_sq) / (M - 1)
        has_gradient = exact_sq > 0
        ratio = (error_sq[has_gradient] / exact_sq[has_gradient]).mean()
        bias = ((mean_sq - noise)[has_gradient] / exact_sq[has_gradient]).mean()
        return {
            "error_scaled": math.sqrt(float(ratio)),
            "bias_scaled": math.sqrt(max(float(bias), 0.0)),
        }

    def progress(self, group: str, direction: Gradient) -> float:
        """A small step's first-order gain in a loss, over that of the exact mean gradient."""
        exact = float(self._exact[group] @ direction[group])
        return 1 + float(self._error[group] @ direction[group]) / exact

    def shares(self) -> dict[str, list[float]]:
        """Shares of kept pairs by quarters of what they have in common."""
        return {
            name: [round(x, 4) for x in (total / self._count).tolist()]
            for name, total in self._kept.items()
        }

    def _error_of_mean(self, group: str) -> float:
        return math.sqrt(_square(self._error[group]) / _square(self._exact[group]))


def _average_of_draws(draws: Sequence[torch.Tensor], exact: torch.Tensor) -> dict[str, float]:
    """The error of one draw of a batch, root mean square, and that of the mean of all draws."""
    scale = _square(exact)
    mean = torch.stack(list(draws)).mean(0)
    return {
        "error_draw": math.sqrt(sum(_square(d - exact) for d in draws) / len(draws) / scale),
        "error_mean_draw": math.sqrt(_square(mean - exact) / scale),
    }


def _square(vector: torch.Tensor) -> float:
    return float(torch.linalg.vecdot(vector, vector))


def table(found: Sequence[rows.Row]) -> str:
    """The group of all parameters, and the down projections, a line per row."""
    head = (
        f"{'study':16}{'step':>5}  {'arm':34}{'group':8}{'error':>7}{'cosine':>8}{'length':>8}"
        f"{'bias':>7}{'noise':>7}{'easy':>7}{'hard':>7}"
    )
    lines = [head]
    for row in found:
        for group in ("down", "all"):
            g = row["groups"][group]
            lines.append(
                f"{row['study']:16}{row['step']:5}  {row['arm']:34}{group:8}"
                f"{g['error_one']:7.3f}{g['cosine_one']:8.3f}{g['length_one']:8.3f}"
                f"{g['bias']:7.3f}{g['noise_one']:7.3f}"
                f"{g['progress_easy']:7.2f}{g['progress_hard']:7.2f}"
            )
    note = (
        "error, cosine, length: of one batch's gradient. bias: error of the mean gradient that "
        "more batches\ndo not remove; noise: what one batch adds; both over the mean gradient. "
        "easy, hard: first-order gain\nin the loss of the tokens below and above the median, over "
        "exact training's."
    )
    return "\n".join([*lines, note, ""])
