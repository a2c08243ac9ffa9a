"""``lrmoe replay``: a trace or a workload through policies and rates, on chosen hardware."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lrmoe.bench.arguments import parse_settings
from lrmoe.cluster.cost import Rows, layer_times
from lrmoe.cluster.exact import replay_pairs, totals, traced_config
from lrmoe.cluster.hardware import load_hardware
from lrmoe.cluster.models import model_shape
from lrmoe.cluster.replay import Cluster, LayerCalls, arm, generated, recorded, replay
from lrmoe.cluster.trace import Trace, read_megatron, read_trace
from lrmoe.cluster.workloads import KINDS, Workload
from lrmoe.planner import PLACEMENTS
from lrmoe.planner.memory import LayerShape
from lrmoe.state import pairs_by_rank

_WIDTH = 150  # where output goes to a file or a pipe, which have no width of their own
_GIB = 1 << 30
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": _GIB, "kb": 10**3, "mb": 10**6}
_UNITS |= {"gb": 10**9, "tb": 10**12, "tib": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What is replayed.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    model: str = "qwen3-30b-a3b"
    """A preset, or the config.json of a Qwen3-MoE or GLM-4-MoE model."""
    hardware: str = "h100"
    """``a100``, ``h100``, ``h200``, or the file of ``lrmoe bench calibrate``."""
    ranks: int = 8
    """Expert-parallel ranks. A trace brings its own."""
    ranks_per_node: int = 8
    tokens: int = 8192
    """Per rank and micro-batch."""
    layers: int = 4
    """MoE layers that are generated; all are alike but for their weights."""
    steps: int = 10
    micro_batches: int = 1
    workloads: tuple[str, ...] = ("clustered",)
    """Families ``log_normal``, ``zipf``, ``clustered``; ``W0`` to ``W7``; ``concentrated``."""
    imbalance: float = 1.9
    jitter: float = 0.3
    drift: float = 0.0
    burst: float = 0.0
    hot_share: float = 0.5
    """Share of the pairs that ``concentrated`` gives to its ``hot_experts``."""
    hot_experts: int = 16
    trace: str | None = None
    """File of ``lrmoe train --trace``; replaces the generated workloads."""
    own: bool = False
    """Also the traced run itself, exactly, from a trace with pairs."""
    megatron: tuple[str, ...] = ()
    """JSONL files, or their directory, of Megatron-LM's ``--moe-routing-trace-path`` instead."""
    policies: tuple[str, ...] = ("fixed", "symi", "ultraep", "recalibrated")
    rates: tuple[float, ...] = (0.0, 0.2, 0.5)
    """Of ``recalibrated``; the other policies run at rate 0 unless ``all_rates``."""
    all_rates: bool = False
    selection: str = "sampled"
    quotas: str = "rate"
    slots: int = 2
    """Replica slots per rank."""
    memory: str = "80GiB"
    """Of a rank."""
    save: str = "activations"
    seeds: tuple[int, ...] = (0,)
    plot: str | None = None
    """Image of the passes as stacked bars."""

    def __post_init__(self) -> None:
        for name, allowed in (("workloads", KINDS), ("policies", PLACEMENTS)):
            for value in getattr(self, name):
                if value not in allowed:
                    known = ", ".join(map(repr, allowed))
                    raise ValueError(f"{name}={value!r}: allowed are {known}")
        for name in ("ranks", "ranks_per_node", "tokens", "layers", "steps", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        if self.slots < 0:
            raise ValueError(f"slots={self.slots}: allowed is >= 0")
        if self.trace is not None and self.megatron:
            raise ValueError(f"trace={self.trace!r} with megatron: give one of the two")
        if self.own and self.trace is None:
            raise ValueError("own=True with trace=None: name the trace of the run")
        parse_bytes("memory", self.memory)
        for rate in self.rates:
            arm("fixed", rate, selection=self.selection, quotas=self.quotas)


def parse_bytes(name: str, text: str) -> int:
    """``80GiB``, ``141GB`` or a plain number of bytes.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    number = text.strip().rstrip("bBiIkKmMgGtT").strip()
    unit = text.strip()[len(number) :].strip().lower() or "b"
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name}={text!r}: allowed are sizes such as 80GiB or 141GB") from error
    if size <= 0:
        raise ValueError(f"{name}={text!r}: allowed is > 0")
    return int(size)


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe replay``; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    from lrmoe.cli import write_json

    parsed = parse_settings(
        ReplaySettings,
        "lrmoe replay",
        "Simulated: routing through policies and rates, with the planner of training.",
        arguments,
    )
    if parsed is None:
        return 0
    settings, json_file = parsed
    rows = run(settings)
    print_rows(rows)
    if settings.plot is not None:
        plot_passes(rows, Path(settings.plot))
    if settings.trace is not None and settings.own:
        rows.append(own_row(settings, read_trace(settings.trace)))
        exact = ", ".join(f"{name} {value:g}" for name, value in list(rows[-1].items())[3:])
        Console(soft_wrap=True).print(
            f"the run itself, exactly but for the times, which are simulated: {exact}",
            highlight=False,
        )
    if json_file is not None:
        write_json(json_file, "replay", asdict(settings), rows)
    return 0


def own_row(settings: ReplaySettings, trace: Trace) -> dict[str, Any]:
    """What the traced run reported of itself, counted again from its pairs; simulated times of it.

    The clock gets the rows that were sent, not expected ones.
    """
    info, hardware = trace.info, load_hardware(settings.hardware)
    W, node_size = info.ep_size, min(settings.ranks_per_node, info.ep_size)
    config = traced_config(info)
    replays, ms_2 = list(replay_pairs(trace)), np.zeros(2)
    for r in replays:
        tokens_W = r.plan.forward_WV.sum(1) // info.top_k
        shape = LayerShape(
            hidden=info.hidden,
            ffn=info.ffn,
            experts=info.experts,
            top_k=info.top_k,
            ranks=W,
            tokens=int(tokens_W.max()),
            dtype_bytes=info.dtype_bytes,
            save=config.save,
        )
        pairs = [pairs_by_rank(r.plan, of_pass) for of_pass in (r.plan.forward_WV, r.kept_WV)]
        passes = layer_times(
            hardware,
            shape,
            r.plan,
            Rows.known(r.rows_2WW, np.stack(pairs), node_size),
            tokens_W,
            node_size=node_size,
            selects=not r.plan.keeps_all,
            is_global=config.effective_scope == "global",
            is_stratified=config.is_stratified,
        )
        ms_2 += [1e3 * of_pass.total for of_pass in passes]
    return {
        "simulated": True,
        "workload": "trace",
        "policy": config.placement,
        **totals(replays),
        "fwd_ms": ms_2[0] / len(replays),
        "bwd_ms": ms_2[1] / len(replays),
    }


def run(settings: ReplaySettings) -> list[dict[str, Any]]:
    """One row for every workload, seed, policy and rate. Simulated."""
    trace = _trace(settings)
    model = model_shape(settings.model)
    ranks, tokens = settings.ranks, settings.tokens
    if trace is not None:
        ranks = trace.info.ep_size
        model = replace(model, experts=trace.info.experts, top_k=trace.info.top_k)
    cluster = Cluster(
        model=model,
        hardware=load_hardware(settings.hardware),
        ranks=ranks,
        ranks_per_node=settings.ranks_per_node,
        memory_bytes=parse_bytes("memory", settings.memory),
        save=settings.save,
    )
    arms = [
        arm(
            policy,
            rate,
            selection=settings.selection,
            quotas=settings.quotas,
            slots=settings.slots,
        )
        for policy in settings.policies
        for rate in _rates(settings, policy)
    ]
    result = []
    for name, seed, calls in _sources(settings, trace, cluster, tokens):
        with _progress(f"simulating {name}", calls) as watched:
            for row in replay(cluster, arms, watched):
                result.append({"workload": name, "seed": seed, **row})
    return result


def _rates(settings: ReplaySettings, policy: str) -> tuple[float, ...]:
    if settings.all_rates or policy == "recalibrated":
        return settings.rates
    return (0.0,)


def _trace(settings: ReplaySettings) -> Trace | None:
    if settings.trace is not None:
        return read_trace(settings.trace)
    if settings.megatron:
        return read_megatron(settings.megatron, experts=model_shape(settings.model).experts)
    return None


def _sources(
    settings: ReplaySettings, trace: Trace | None, cluster: Cluster, tokens: int
) -> Iterator[tuple[str, int, Iterator[LayerCalls]]]:
    if trace is not None:
        yield "trace", 0, recorded(trace)
        return
    for kind, seed in itertools.product(settings.workloads, settings.seeds):
        workload = Workload(
            kind=kind,
            imbalance=settings.imbalance,
            jitter=settings.jitter,
            drift=settings.drift,
            burst=settings.burst,
            hot_share=settings.hot_share,
            hot_experts=settings.hot_experts,
        )
        calls = generated(
            workload,
            cluster,
            tokens=tokens,
            layers=settings.layers,
            steps=settings.steps,
            micro_batches=settings.micro_batches,
            seed=seed,
        )
        yield kind, seed, calls


@contextmanager
def _progress(text: str, calls: Iterator[LayerCalls]) -> Iterator[Iterator[LayerCalls]]:
    """The same calls, with a line on stderr that tells the layer where that is a terminal."""
    console = Console(stderr=True)

    def watched() -> Iterator[LayerCalls]:
        for of_layer in calls:
            if console.is_terminal:
                status.update(f"{text}: layer {of_layer.layer}")
            yield of_layer

    with console.status(text) as status:
        yield watched()


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kept": lambda row: f"{row['backward_fraction']:.2f}",
    "imb home": lambda row: f"{row['imbalance_home']:.2f}",
    "fwd": lambda row: f"{row['imbalance_fwd']:.2f}",
    "bwd": lambda row: f"{row['imbalance_bwd']:.2f}",
    "fwd ms": lambda row: f"{row['fwd_ms']:.2f}",
    "bwd ms": lambda row: f"{row['bwd_ms']:.2f}",
    "of it comm": lambda row: f"{row['comm_ms']:.2f}",
    "plan ms": lambda row: f"{row['plan_ms']:.2f}",
    "layer ms": lambda row: f"{row['makespan_ms']:.2f}",
    "replicas": lambda row: f"{row['replicas']:.1f}",
    "GiB": lambda row: f"{row['memory_subtotal_bytes'] / _GIB:.2f}",
    "fits": lambda row: f"{row['effective_throughput']:.0%}",
}
_NOTES = (
    "Simulated: the planner of training, a modelled clock (lrmoe.cluster.cost). Means of calls;",
    "planning is measured on this machine. replicas: over all ranks. GiB: placement, replicas and",
    "token buffers of one layer call on the fullest rank. fits: share of the batch that fits it.",
)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The result as a table on standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    first = rows[0]
    title = f"simulated: {first['model']}, {first['ranks']} ranks of {first['hardware']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("workload", "policy"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        is_last = i + 1 < len(rows) and rows[i + 1]["workload"] != row["workload"]
        label = row["policy"] + (f" C {row['rate']:g}" if row["rate"] else "")
        if row["infeasible_calls"]:
            label += f" ({row['infeasible_calls']} of {row['calls']} calls infeasible)"
        cells = [show(row) for show in _COLUMNS.values()]
        table.add_row(row["workload"], label, *cells, end_section=is_last)
    console.print(table)
    for note in _NOTES:
        console.print(note, style="dim", highlight=False)


PARTS = ("local", "gemm", "rows", "weights", "gradients", "fixed")


def plot_passes(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Forward and backward pass of every row as stacked bars, as an image."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    labels = [
        f"{row['policy']}" + (f" C{100 * row['rate']:.0f}" if row["rate"] else "") for row in rows
    ]
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.2 + 0.3 * len(rows)), sharey=True)
    for panel, phase in zip(axes, ("fwd", "bwd"), strict=True):
        left = [0.0] * len(rows)
        parts = (*PARTS, "plan") if phase == "fwd" else PARTS
        for part in parts:
            key = "plan_ms" if part == "plan" else f"{phase}_{part}_ms"
            widths = [row.get(key, 0.0) for row in rows]
            panel.barh(range(len(rows)), widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set_yticks(range(len(rows)), labels, fontsize=8)
        panel.set_xlabel(f"{'forward' if phase == 'fwd' else 'backward'} pass, ms (simulated)")
        panel.grid(visible=True, axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
