"""``lrmoe study convergence``: validation loss of rules and rates against exact training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lrmoe.studies import rows
from lrmoe.studies.grid import DEFAULT_GRID, Stage, chosen, read_stages, unique_runs
from lrmoe.studies.settings import Protocol, Run
from lrmoe.studies.statistics import Estimate, paired

if TYPE_CHECKING:
    from lrmoe.studies.rows import Row

_WIDTH = 150  # where output goes to a file or a pipe
# Overrides of a model's config that its description names.
_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top",
}


def main(arguments: Sequence[str], section: str = "convergence") -> int:
    """Runs what is missing of the grid, then shows all rows; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    parser = argparse.ArgumentParser(
        prog=f"lrmoe study {section}",
        description="Finished runs are rows of a file; a second call continues where one stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--grid", type=Path, default=DEFAULT_GRID, help="YAML file with the runs")
    add("--section", default=section, help="section of that file")
    add("--stages", nargs="+", metavar="NAME", help="only these stages")
    add("--rows", type=Path, default=Path("results/convergence.jsonl"), help="file of the rows")
    add("--runs", type=int, metavar="N", help="stop after N runs; 0 only shows what there is")
    add("--shard", default="0/1", metavar="I/N", help="every N-th of the runs, from the I-th")
    add("--cache", type=Path, default=Path("runs/study"), help="directory of checkpoints")
    add("--list", action="store_true", help="list the runs and whether they are finished")
    add("--json", metavar="FILE", help="file for the result as JSON")
    options = parser.parse_args(arguments)
    stages = chosen(read_stages(options.grid, options.section), options.stages)
    runs = unique_runs(stages)
    if options.list:
        _list(shard(runs, options.shard), rows.load(options.rows))
        return 0
    execute(shard(runs, options.shard), options.rows, options.cache, options.runs)
    found = rows.load(options.rows)
    report(stages, found)
    if options.json is not None:
        from lrmoe.cli import write_json

        write_json(options.json, f"study {section}", {"grid": options.grid.name}, found)
    return 0


def execute(runs: Sequence[Run], path: Path, cache: Path, most: int | None) -> None:
    """Trains what is missing, with a line per finished run and a bar on a terminal."""
    from lrmoe.studies.loop import train
    from lrmoe.studies.progress import StepBar

    todo = len(rows.missing(runs, rows.load(path)))
    todo = todo if most is None else min(todo, most)
    with StepBar() as bar:

        def one(run: Run) -> Row:
            bar.start(f"{run.protocol.model} {run.protocol.text} {run.arm.name} seed {run.seed}")
            return train(run, cache, bar.advance)

        for number, row in enumerate(rows.execute(runs, path, one, most), start=1):
            loss = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
            sys.stdout.write(
                f"{number}/{todo} {row['model']} {row['text']} {row['arm']} seed {row['seed']}: "
                f"{loss}, {row['wall_s']:.0f} s\n"
            )
            sys.stdout.flush()


def shard(runs: Sequence[Run], text: str) -> list[Run]:
    """``1/2``: the second half of the runs, interleaved.

    Raises:
        ValueError: if it is not I/N with 0 <= I < N.
    """
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise ValueError(f"shard={text!r}: allowed is I/N with 0 <= I < N")
    return list(runs[int(part) :: int(parts)])


def report(stages: Sequence[Stage], found: Sequence[Row]) -> None:
    """A table per protocol of the stages."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    comparisons = paired(found)
    protocols = list({repr(stage.protocol): stage.protocol for stage in stages}.values())
    for protocol in protocols:
        mine = [c for c in comparisons if c["protocol"] == protocol]
        if mine:
            console.print(_table(protocol, mine))


def describe(protocol: Protocol) -> str:
    """Model, text and length, and what else is not the default."""
    default = Protocol()
    sizes = [f"{_SIZES[k]} {v}" for k, v in protocol.overrides.items() if k in _SIZES]
    rest = [
        f"{name}={getattr(protocol, name)}"
        for name in (
            "regime",
            "blocks_per_step",
            "learning_rate",
            "optimizer",
            "bf16",
            "max_grad_norm",
        )
        if getattr(protocol, name) != getattr(default, name)
    ]
    model = " ".join([protocol.model, *([f"({', '.join(sizes)})"] if sizes else [])])
    return ", ".join([model, protocol.text, f"{protocol.steps} steps", *rest])


COLUMNS = ("arm", "seeds", "kept", "score mass", "loss", "over C0, %", "std. error", "95 % bound")


def cells(comparison: dict[str, Any]) -> list[str]:
    """A line of a table with the columns of ``COLUMNS``."""
    excess: Estimate = comparison["excess"]
    line = [
        comparison["arm"].name,
        str(excess.count),
        f"{comparison['backward_fraction']:.3f}",
        f"{comparison['score_mass']:.3f}",
        f"{comparison['loss'].mean:.4f}",
    ]
    if comparison["arm"].is_exact:
        return [*line, "", "", ""]
    return [
        *line,
        f"{excess.mean:+.2f}",
        "" if excess.standard_error is None else f"{excess.standard_error:.2f}",
        "" if excess.bound is None else f"{excess.bound:+.2f}",
    ]


def _table(protocol: Protocol, comparisons: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=describe(protocol), title_justify="left")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, no_wrap=True, justify="right" if i else "left")
    for comparison in comparisons:
        table.add_row(*cells(comparison))
    return table


def _list(runs: Sequence[Run], found: Sequence[Row]) -> None:
    todo = {run.key for run in rows.missing(runs, found)}
    for run in runs:
        mark = "todo" if run.key in todo else "done"
        sys.stdout.write(f"{mark}  {describe(run.protocol)}: {run.arm.name}, seed {run.seed}\n")
