"""What happens beside the training steps: stopping on a signal, and lines on the console."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import transformers
from rich.console import Console
from tqdm import tqdm

from lrmoe.training.ranks import Ranks


class StopOnSignal(transformers.TrainerCallback):
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


class StepLines(transformers.TrainerCallback):
    """One short line per logged step, above a progress bar where the output is a terminal."""

    def __init__(self, console: Console):
        self._console = console
        self._bar: tqdm[Any] | None = None
        self._evaluation_bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar."""
        if self._console.is_terminal and state.is_world_process_zero:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Moves the bar of an evaluation."""
        if self._console.is_terminal and state.is_world_process_zero:
            if self._evaluation_bar is None:
                self._evaluation_bar = tqdm(
                    total=len(eval_dataloader), desc="evaluation", leave=False, dynamic_ncols=True
                )
            self._evaluation_bar.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar of an evaluation."""
        if self._evaluation_bar is not None:
            self._evaluation_bar.close()
            self._evaluation_bar = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Prints the step."""
        if not state.is_world_process_zero or not logs:
            return
        position = f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
        if "eval_loss" in logs:
            self._print(f"{position}  validation loss {logs['eval_loss']:.4f}")
        elif "loss" in logs:
            line = f"{position}  loss {logs['loss']:.4f}"
            line += f"  {logs['tokens_per_second']:,.0f} tokens/s"
            if "moe_ms" in logs:
                line += f"  MoE {logs['moe_ms'] / logs['step_ms']:.0%} of the step"
                line += f"  backward {logs['backward_fraction']:.1%}"
                line += f"  imbalance {logs['imbalance_fwd']:.2f}"
            self._print(line)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            self._console.print(line, highlight=False)
