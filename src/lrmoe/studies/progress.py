"""A bar for the run in progress, on a terminal only."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StepBar:
    """One bar that starts anew with every run."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> StepBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, description: str) -> None:
        """A new run."""
        self._progress.reset(self._task, description=description, total=None)

    def advance(self, step: int, steps: int) -> None:
        """The run has made ``step`` of ``steps``."""
        self._progress.update(self._task, completed=step, total=steps)
