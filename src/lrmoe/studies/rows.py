"""The file of a study: one finished run per line, with where it came from."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lrmoe.cli import machine
from lrmoe.studies.settings import Run
from lrmoe.training.run_dir import append_row, read_rows, write_atomically

Row = dict[str, Any]


def load(path: Path) -> list[Row]:
    """The rows of a file; none if it does not exist. An unfinished last line is left out."""
    return list(read_rows(path)) if path.exists() else []


def open_for_append(path: Path) -> list[Row]:
    """The rows, after an unfinished last line (a crash while writing) was cut off the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = load(path)
    if path.exists() and not path.read_text().endswith("\n"):
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def missing(runs: Sequence[Run], rows: Sequence[Row]) -> list[Run]:
    """The runs without a row, in order."""
    done = {run_of(row).key for row in rows}
    return [run for run in runs if run.key not in done]


def run_of(row: Row) -> Run:
    """The settings a row was measured with."""
    return Run.from_dict(row["settings"])


def execute(
    runs: Sequence[Run], path: Path, train: Callable[[Run], Row], most: int | None = None
) -> Iterator[Row]:
    """Trains what is missing in the file, and adds a row as soon as each run is finished.

    A crash loses at most the run it happens in.

    Args:
        most: stop after this many runs.
    """
    for run in missing(runs, open_for_append(path))[:most]:
        row = train(run) | origin()
        append_row(path, row)
        yield row


def origin() -> Row:
    """Where and with what a row was made."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": f"{now:%Y-%m-%dT%H:%MZ}",
        "commit": _commit(),
        "version": version("lrmoe"),
        "transformers": version("transformers"),
        **machine(),
    }


def _commit() -> str | None:
    """The checked-out commit, marked where the source differs from it; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        if found.returncode:
            return None
        is_changed = git("diff", "--quiet", "HEAD", "--", folder.parent.as_posix()).returncode
    except FileNotFoundError:
        return None
    return found.stdout.strip() + ("-dirty" if is_changed else "")
