"""``lrmoe report RUN...``: one HTML page that compares run directories, without any network."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lrmoe.training.plots import comparison_figures, run_figures
from lrmoe.training.run_dir import RunDirectory, flat_items

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Key of summary.json -> (label, format); times are per optimizer step.
_FIGURES: dict[str, tuple[str, str]] = {
    "steps": ("steps", "{:,.0f}"),
    "loss": ("training loss", "{:.4f}"),
    "val_loss": ("validation loss", "{:.4f}"),
    "ppl": ("validation perplexity", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "step_ms": ("step, ms", "{:.1f}"),
    "moe_ms": ("MoE layers, ms", "{:.1f}"),
    "moe_fwd_ms": ("MoE layers forward, ms", "{:.1f}"),
    "moe_bwd_ms": ("MoE layers backward, ms", "{:.1f}"),
    "backward_fraction": ("backward fraction", "{:.1%}"),
    "score_mass": ("retained score mass", "{:.1%}"),
    "imbalance_fwd": ("imbalance forward", "{:.3f}"),
    "imbalance_bwd": ("imbalance backward", "{:.3f}"),
    "bytes_fwd": ("payload forward, bytes", "{:,.0f}"),
    "bytes_bwd": ("payload backward, bytes", "{:,.0f}"),
    "memory_peak": ("peak memory of a rank, bytes", "{:,.0f}"),
    "train_s": ("training time, s", "{:.1f}"),
    "wall_s": ("wall time, s", "{:.1f}"),
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .7rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td.text { font-family: ui-monospace, monospace; font-size: 13px; }
.wide { overflow-x: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
img { width: 100%; }
"""


def write_page(runs: Sequence[Path], page: Path) -> Path:
    """Writes the page: summaries side by side, differences of the settings, and plots.

    A run that has not finished is shown with what it has logged so far.

    Raises:
        ValueError: if a directory is not that of a run, or has not logged a step.
    """
    directories = [_checked(run) for run in runs]
    names = _names(runs)
    parts = [
        f"<h1>{'Run' if len(runs) == 1 else 'Runs'} {html.escape(', '.join(names))}</h1>",
        "<h2>Summary</h2>",
        _table(["", *names], _summary_rows([_summary(d) for d in directories])),
    ]
    configs = [_config(d) for d in directories]
    if len(runs) > 1:
        rows = _differences(configs)
        parts += ["<h2>What differs in the settings</h2>"]
        parts += [_table(["", *names], rows) if rows else "<p>Nothing.</p>"]
        parts += ["<h2>Side by side</h2>", _plots(comparison_figures(directories, names))]
    for directory, name, config in zip(directories, names, configs, strict=True):
        parts += [f"<h2>{html.escape(name)}</h2>", _plots(run_figures(directory))]
        settings = [[key, json.dumps(value)] for key, value in config.items()]
        parts += [
            "<details><summary>Settings</summary>",
            _table(["", "value"], settings),
            "</details>",
        ]
    body = "\n".join(parts)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(', '.join(names))}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )
    return page


def _checked(run: Path) -> RunDirectory:
    directory = RunDirectory(run)
    for needed in (directory.config, directory.metrics):
        if not needed.is_file():
            raise ValueError(f"RUN={str(run)!r}: is not a run directory, {needed.name} is missing")
    if not directory.metrics.read_text().strip():
        raise ValueError(f"RUN={str(run)!r}: has not logged a step yet")
    return directory


def _names(runs: Sequence[Path]) -> list[str]:
    """The last part of each path, or all of it where that does not tell the runs apart."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def _config(directory: RunDirectory) -> dict[str, Any]:
    config = dict(flat_items(yaml.safe_load(directory.config.read_text())))
    return {k: v for k, v in config.items() if k not in ("run_dir", "resume", "nproc")}


def _summary(directory: RunDirectory) -> dict[str, Any]:
    if directory.summary.is_file():
        summary: dict[str, Any] = json.loads(directory.summary.read_text())
        return summary
    from lrmoe.training.summary import summarize

    return summarize(directory, wall_s=None)


def _summary_rows(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for key, (label, form) in _FIGURES.items():
        values = [summary.get(key) for summary in summaries]
        if any(value is not None for value in values):
            rows.append([label, *("" if v is None else form.format(v) for v in values)])
    return rows


def _differences(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [[key, *(json.dumps(config.get(key)) for config in configs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f"<div class='wide'><table>\n{line(head, 'th')}\n{body}\n</table></div>"


def _plots(figures: dict[str, Figure]) -> str:
    images = []
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        data = base64.b64encode(buffer.getvalue()).decode()
        images.append(f"<img alt='{name.replace('_', ' ')}' src='data:image/png;base64,{data}'>")
    return f"<div class='plots'>{''.join(images)}</div>"
