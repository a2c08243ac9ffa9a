"""The figures of a finished run, from the files it wrote."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from lrmoe.training.run_dir import RunDirectory, read_rows

# Averaged over the logged steps after the first, which carries the warm-up of the process.
_AVERAGED = (
    "tokens_per_second",
    "step_ms",
    "moe_ms",
    "moe_fwd_ms",
    "moe_bwd_ms",
    "backward_fraction",
    "score_mass",
    "imbalance_fwd",
    "imbalance_bwd",
    "bytes_fwd",
    "bytes_bwd",
    "replicas",
    "moved_weights",
    "moved_rows",
    "plan_us",
    "makespan",
    "dead_experts",
)
_MEMORY = ("memory_layer", "memory_layer_model", "memory_step")


def summarize(directory: RunDirectory, wall_s: float | None) -> dict[str, Any]:
    """One object with the run's results; ``None`` for what is not known.

    Args:
        directory: a run with at least one logged step.
        wall_s: seconds of this process, start-up and evaluations included.
    """
    rows = list(read_rows(directory.metrics))
    evaluations = list(read_rows(directory.evaluations)) if directory.evaluations.exists() else []
    last = evaluations[-1] if evaluations else {}
    steady = rows[1:] or rows
    summary: dict[str, Any] = {
        "steps": rows[-1]["step"],
        "loss": rows[-1]["loss"],
        "val_loss": last.get("val_loss"),
        "ppl": last.get("ppl"),
    }
    for name in _AVERAGED:
        values = [row[name] for row in steady if row[name] is not None]
        summary[name] = fmean(values) if values else None
    summary["makespan_error"] = _makespan_error(steady)
    for name in _MEMORY:
        summary[name] = None if rows[-1][name] is None else max(row[name] for row in rows)
    summary["memory_peak"] = max(row["memory_peak"] for row in rows)
    summary["train_s"] = last.get("train_s")
    summary["wall_s"] = wall_s
    return summary


def _makespan_error(rows: list[dict[str, Any]]) -> float | None:
    """How far the MoE layers' measured time lies from the planner's makespan, as a median share.

    The planner counts pairs; the time of a pair, the one free number, is the run's own median.
    """
    pairs = [(row["makespan"], row["moe_ms"]) for row in rows if row["makespan"]]
    if not pairs:
        return None
    ms_per_pair = median(ms / makespan for makespan, ms in pairs)
    return float(median(abs(ms_per_pair * makespan / ms - 1) for makespan, ms in pairs))


def print_table(summary: dict[str, Any], directory: RunDirectory, console: Console) -> None:
    """The summary for people."""
    table = Table(title=f"{directory.root}: {summary['steps']} steps", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    lines: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("training loss", "loss", "{:.4f}".format),
        ("validation loss", "val_loss", "{:.4f}".format),
        ("validation perplexity", "ppl", "{:.3f}".format),
        ("tokens/s", "tokens_per_second", "{:,.0f}".format),
        ("step, ms", "step_ms", "{:.1f}".format),
        ("MoE layers forward, ms", "moe_fwd_ms", "{:.1f}".format),
        ("MoE layers backward, ms", "moe_bwd_ms", "{:.1f}".format),
        ("backward fraction", "backward_fraction", "{:.1%}".format),
        ("retained score mass", "score_mass", "{:.1%}".format),
        ("imbalance forward (max / mean)", "imbalance_fwd", "{:.3f}".format),
        ("imbalance backward (max / mean)", "imbalance_bwd", "{:.3f}".format),
        ("payload forward, MB per step", "bytes_fwd", lambda v: f"{v / 1e6:,.2f}"),
        ("payload backward, MB per step", "bytes_bwd", lambda v: f"{v / 1e6:,.2f}"),
        ("replicas (all layers)", "replicas", lambda v: f"{v:.1f}" if v else "0"),
        ("expert weights moved per step", "moved_weights", "{:.1f}".format),
        ("planning per step, ms", "plan_us", lambda v: f"{v / 1e3:.2f}"),
        ("time off the predicted makespan", "makespan_error", "{:.1%}".format),
        ("largest MoE layer call, MB", "memory_layer", lambda v: f"{v / 1e6:,.1f}"),
        ("... by the memory model, MB", "memory_layer_model", lambda v: f"{v / 1e6:,.1f}"),
        ("MoE layers at once, MB", "memory_step", lambda v: f"{v / 1e6:,.1f}"),
        ("peak memory of a rank, MB", "memory_peak", lambda v: f"{v / 1e6:,.0f}"),
        ("training time, s", "train_s", "{:.1f}".format),
        ("wall time, s", "wall_s", "{:.1f}".format),
    )
    for label, key, form in lines:
        if summary[key] is not None:
            table.add_row(label, form(summary[key]))
    console.print(table)
