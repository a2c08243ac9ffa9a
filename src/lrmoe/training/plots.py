"""The pictures of a run: loss, expert load, backward fraction, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrmoe.training.run_dir import RunDirectory, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"forward": "#3b6ea8", "backward": "#c8713c", "other": "#b8b8b8"}


def run_figures(directory: RunDirectory) -> dict[str, Figure]:
    """Figures by name; those that need layer reports are absent where there are none."""
    rows = list(read_rows(directory.metrics))
    figures = {"loss": _loss(rows, directory)}
    if rows[-1]["moe_ms"] is not None:
        figures["backward_fraction"] = _backward_fraction(rows)
        figures["time_split"] = _time_split(rows)
        figures["expert_load"] = _expert_load(list(read_rows(directory.expert_load)))
    return figures


def comparison_figures(
    directories: Sequence[RunDirectory], names: Sequence[str]
) -> dict[str, Figure]:
    """Several runs in one figure each: validation loss by step and by time in the MoE layers."""
    evaluations = [
        list(read_rows(d.evaluations)) if d.evaluations.exists() else [] for d in directories
    ]
    figures = {}
    clocks = {
        "step": ("step", "Validation loss"),
        "moe_ms_total": ("time in MoE layers, ms", "Validation loss by MoE-layer time"),
        "train_s": ("training time, s", "Validation loss by time"),
    }
    for clock, (label, title) in clocks.items():
        figure, (axes,) = _figure()
        for rows, name in zip(evaluations, names, strict=True):
            if any(row[clock] for row in rows):
                axes.plot([r[clock] for r in rows], [r["val_loss"] for r in rows], "o-", label=name)
        if axes.lines:
            axes.set(xlabel=label, ylabel="loss, nats per token", title=title)
            axes.grid(alpha=0.3)
            axes.legend()
            figures[f"validation_loss_by_{clock}"] = figure
    return figures


def draw_plots(directory: RunDirectory) -> list[Path]:
    """Writes each figure as a PNG into ``plots/``, and all of them side by side."""
    directory.plots.mkdir(exist_ok=True)
    paths = []
    for name, figure in run_figures(directory).items():
        path = directory.plots / f"{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    overview = directory.plots / "overview.png"
    _side_by_side(paths).savefig(overview, dpi=90)
    return [*paths, overview]


def _side_by_side(paths: Sequence[Path]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    figure = Figure(figsize=(14, 4.5 * -(-len(paths) // 2)), layout="constrained")
    grid = list(figure.subplots(-(-len(paths) // 2), 2, squeeze=False).flat)
    for axes in grid:
        axes.axis("off")
    for axes, path in zip(grid, paths, strict=False):
        axes.imshow(imread(path))
    return figure


def _figure(width: float = 6.4, height: float = 4.0, rows: int = 1) -> tuple[Figure, Any]:
    # Figure without pyplot: no display, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _loss(rows: list[dict[str, Any]], directory: RunDirectory) -> Figure:
    figure, (axes,) = _figure()
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], label="training")
    if directory.evaluations.exists():
        evaluations = list(read_rows(directory.evaluations))
        axes.plot(
            [r["step"] for r in evaluations],
            [r["val_loss"] for r in evaluations],
            "o-",
            label="validation",
        )
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _backward_fraction(rows: list[dict[str, Any]]) -> Figure:
    figure, (axes,) = _figure()
    steps = [r["step"] for r in rows]
    axes.plot(steps, [r["backward_fraction"] for r in rows], label="pairs with a backward pass")
    axes.plot(steps, [r["score_mass"] for r in rows], label="retained score mass")
    axes.set(xlabel="step", ylabel="share", title="Backward fraction", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def _time_split(rows: list[dict[str, Any]]) -> Figure:
    figure, (axes,) = _figure()
    forward = np.array([r["moe_fwd_ms"] for r in rows])
    backward = np.array([r["moe_bwd_ms"] for r in rows])
    step_ms = np.array([r["step_ms"] for r in rows])
    axes.stackplot(
        [r["step"] for r in rows],
        forward,
        backward,
        np.maximum(step_ms - forward - backward, 0),
        labels=["MoE layers forward", "MoE layers backward", "everything else"],
        colors=list(_COLORS.values()),
    )
    # Room for the legend above what is drawn.
    axes.set(
        xlabel="step", ylabel="ms per step", title="Time of a step", ylim=(0, 1.2 * step_ms.max())
    )
    axes.legend(loc="upper center", ncols=3, fontsize="small")
    return figure


def _expert_load(rows: list[dict[str, Any]]) -> Figure:
    """One row of pixels per expert and logged step; load over the layer's mean."""
    load = np.array([r["load"] for r in rows], dtype=float)  # [steps, layers, experts]
    relative = load / np.maximum(load.mean(axis=2, keepdims=True), 1)
    num_layers, num_experts = load.shape[1:]
    figure, all_axes = _figure(7.0, 1.0 + 1.3 * num_layers, num_layers)
    for layer, axes in enumerate(all_axes):
        axes.imshow(
            relative[:, layer].T,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(rows[0]["step"], rows[-1]["step"] + 1, -0.5, num_experts - 0.5),
        )
        axes.set_ylabel(f"layer {layer}\nexpert")
    all_axes[0].set_title("Expert load (1 = the layer's mean)")
    all_axes[-1].set_xlabel("step")
    figure.colorbar(all_axes[0].images[0], ax=list(all_axes), extend="max", shrink=0.8)
    return figure
