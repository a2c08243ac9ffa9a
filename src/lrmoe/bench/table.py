"""What a person sees of a benchmark: a table per dtype, and a bar while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lrmoe.bench.settings import LayerBench

_WIDTH = 170  # where output goes to a file or a pipe, which have no width of their own
_NOTES = (
    "Medians over rounds of the slowest rank. /hf, /floor: median of the rounds' own ratios;",
    "cpu: by the ranks' own CPU time, which other programs on the same cores do not change. MB",
    "sent: forward + backward, all ranks, to other ranks. select: scoring, selecting and",
    "packing, no collectives. grad: distance from the exact gradient, worst parameter and rank;",
    "beyond C 0 it is what the dropped pairs would have added.",
)


def print_rows(bench: LayerBench, rows: Sequence[dict[str, Any]]) -> None:
    """The whole result on standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    config = bench.recalibration(*bench.arms[0])
    console.print(
        f"T {bench.tokens}, D {bench.hidden}, F {bench.ffn}, E {bench.experts}, K {bench.top_k}; "
        f"{bench.num_ranks} gloo ranks, threads per rank: {bench.threads}; {bench.rounds} rounds, "
        f"{bench.resolved_clock} clock; {config.selection}, scope {config.effective_scope}, "
        f"draw {config.draw}, router_grad {config.router_grad}, rows {config.rows}, "
        f"save {config.save}" + ("; freed memory kept" if bench.keep_memory else ""),
        highlight=False,
    )
    for dtype in bench.dtypes:
        console.print(_table(dtype, [row for row in rows if row["dtype"] == dtype]))
    for note in _NOTES:
        console.print(note, style="dim", highlight=False)


def _table(dtype: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=dtype, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        ends = i + 1 < len(rows) and rows[i + 1]["workload"] != row["workload"]
        cells = [show(row) for show in _COLUMNS.values()]
        table.add_row(row["workload"], _arm(row), *cells, end_section=ends)
    return table


def _arm(row: dict[str, Any]) -> str:
    if row["impl"] != "lrmoe":
        return str(row["impl"])
    placement = "" if row["placement"] == "fixed" else f"{row['placement']} "
    return f"lrmoe {placement}C {row['rate']:g}"


def _number(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row[key] is None else format(row[key], form)


def _range(row: dict[str, Any]) -> str:
    return f"{row['total_p20_ms']:.0f}-{row['total_p80_ms']:.0f}"


def _sent(row: dict[str, Any]) -> str:
    if row["bytes_fwd"] is None:
        return ""
    return f"{row['bytes_fwd'] / 1e6:.1f}+{row['bytes_bwd'] / 1e6:.1f}"


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kept": _number("backward_fraction", ".3f"),
    "imb fwd": _number("imbalance_fwd", ".2f"),
    "bwd": _number("imbalance_bwd", ".2f"),
    "fwd ms": _number("fwd_ms", ".1f"),
    "bwd ms": _number("bwd_ms", ".1f"),
    "total ms": _number("total_ms", ".1f"),
    "p20-p80": _range,
    "/hf": _number("ratio_to_hf", ".3f"),
    "cpu /hf": _number("cpu_ratio_to_hf", ".3f"),
    "/floor": _number("ratio_to_floor", ".2f"),
    "MB sent": _sent,
    "repl.": _number("replicas", "d"),
    "plan us": _number("plan_us", ".0f"),
    "select ms": _number("score_select_pack_ms", ".2f"),
    "grad": _number("gradient_error", ".1e"),
}


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; yields the function that advances it.

    Drawn only when advanced: a thread that refreshes it would take time from what is measured.
    """
    columns = (TextColumn("bench layer"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance() -> None:
            progress.advance(task)
            progress.refresh()

        yield advance
