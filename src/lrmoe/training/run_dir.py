"""Where a run keeps its files, and the files that grow by a line per step."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class RunDirectory:
    """The paths of a run directory."""

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.metrics = self.root / "metrics.jsonl"
        self.evaluations = self.root / "eval.jsonl"
        self.expert_load = self.root / "expert_load.jsonl"
        self.summary = self.root / "summary.json"
        self.tensorboard = self.root / "tb"
        self.checkpoints = self.root / "checkpoints"
        self.initial = self.root / ".initial"
        self.final = self.root / "final"
        self.plots = self.root / "plots"

    @property
    def step_logs(self) -> tuple[Path, ...]:
        """The files that hold one object per line, each with its ``step``."""
        return self.metrics, self.evaluations, self.expert_load

    def truncate_step_logs(self, step: int) -> None:
        """Drops what a run wrote after ``step``, and a line that it could not finish."""
        for path in self.step_logs:
            if path.exists():
                kept = [row for row in read_rows(path) if row["step"] <= step]
                write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def default_run_dir() -> str:
    """A fresh name under ``runs/``."""
    return str(Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def refuse_used(root: Path) -> None:
    """Raises ``ValueError`` if the directory holds anything: runs never share one."""
    if root.is_dir() and any(root.iterdir()):
        raise ValueError(
            f"run_dir={str(root)!r}: is not empty; name another, or continue it with --resume true"
        )


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line; a last line without its end is skipped."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def flat_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted names and values; an empty section stays one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds one line, in a single write so that a crash leaves at most one unfinished line."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file's content: a crash leaves the old or the new content, never a mix."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
