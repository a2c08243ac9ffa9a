"""What happens beside the training steps: stopping on a signal, and lines on the console."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from lrmoe.training.ranks import Ranks


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Ends training after the current step, with a checkpoint, on SIGINT or SIGTERM.

    The ranks agree once per step, so that all of them save and leave at the same one, whichever of
    them got the signal.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._received = False
        self.stopped = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside the block."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {s: signal.signal(s, self._note) for s in signals}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Agrees on whether to stop."""
        if self._ranks.any(self._received):
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True


class StepLines(ProgressCallback):  # type: ignore[misc]
    """One short line per logged step, above a progress bar where the output is a terminal."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self._shows_bar = console.is_terminal
        self._max_steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar."""
        self._max_steps = state.max_steps
        if self._shows_bar:
            super().on_train_begin(args, state, control, **kwargs)
            if self.training_bar is not None:
                self.training_bar.update(state.global_step)
                self.current_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._shows_bar:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar of an evaluation."""
        if self._shows_bar:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar."""
        if self._shows_bar:
            super().on_train_end(args, state, control, **kwargs)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Prints the step."""
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            self._print(f"{self._position(state)}  validation loss {logs['eval_loss']:.4f}")
        elif "loss" in logs:
            line = f"{self._position(state)}  loss {logs['loss']:.4f}"
            line += f"  {logs['tokens_per_second']:,.0f} tokens/s"
            if logs.get("moe_ms") is not None:
                line += f"  MoE {logs['moe_ms'] / logs['step_ms']:.0%} of the step"
                line += f"  backward {logs['backward_fraction']:.1%}"
                line += f"  imbalance {logs['imbalance_fwd']:.2f}"
            self._print(line)

    def _position(self, state: Any) -> str:
        width = len(str(self._max_steps))
        return f"step {state.global_step:>{width}}/{self._max_steps}"

    def _print(self, line: str) -> None:
        if self._shows_bar and self.training_bar is not None:
            self.training_bar.write(line)
        else:
            self._console.print(line, highlight=False)
