"""Hugging Face's ``Trainer`` with what it lacks for expert parallelism: checkpoints and reports."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers

from lrmoe.training import checkpoint
from lrmoe.training.balance import CorrectionBias
from lrmoe.training.data import BlockLoader, RankBatches, TextData
from lrmoe.training.metrics import Window
from lrmoe.training.ranks import Ranks
from lrmoe.training.run_dir import RunDirectory, append_row
from lrmoe.training.settings import TrainSettings

# Its annotations are for callers: to a subclass nearly every attribute is optional.
_Trainer: Any = transformers.Trainer


class MoETrainer(_Trainer):  # type: ignore[misc]
    """A ``Trainer`` for models that ``from_pretrained(distributed_config=...)`` sharded.

    It differs from its base class in four things:

    - checkpoints hold the optimizer and all other state, and resume exactly (``checkpoint.py``);
    - the order of the blocks depends on the seed alone, not on how ranks share them;
    - Qwen3's auxiliary loss keeps its weight whatever the number of ranks and micro-batches;
    - every logged step becomes a row of ``metrics.jsonl``.

    Args:
        settings: the run.
        text: both splits.
        ranks: the processes of the run.
        directory: where the run writes.
        handle: ``lrmoe.configure``'s result, or ``None`` with another expert implementation.
        agreement: what a run must share with the checkpoints it resumes from.
        kwargs: of ``Trainer``.
    """

    def __init__(
        self,
        *,
        settings: TrainSettings,
        text: TextData,
        ranks: Ranks,
        directory: RunDirectory,
        handle: Any,
        agreement: dict[str, Any],
        **kwargs: Any,
    ):
        super().__init__(train_dataset=text.train, eval_dataset=text.validation, **kwargs)
        self.ranks = ranks
        self.directory = directory
        self.handle = handle
        self.window = Window()
        self.correction_bias = CorrectionBias(self.model, settings.model.correction_bias_rate)
        self._settings = settings
        self._agreement = agreement
        self._restored: dict[str, Any] = {}
        self.add_callback(_StepClock(self))

    # Data

    def get_train_dataloader(self) -> BlockLoader:
        """Micro-batches of this rank."""
        training = self._settings.training
        batches = RankBatches(
            len(self.train_dataset),
            batch_size=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            seed=training.seed,
        )
        return BlockLoader(self.train_dataset, batch_sampler=batches)

    # Loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The language loss, plus in training the auxiliary loss at its configured weight.

        An evaluation returns the language loss alone, whatever balances the experts.
        """
        if not model.training:
            inputs = {**inputs, "output_router_logits": False}
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        auxiliary = outputs.get("aux_loss")
        if model.training and auxiliary is not None and num_items_in_batch is not None:
            # transformers adds coefficient * aux to each micro-batch's share of the loss, and
            # Trainer multiplies that by the number of ranks, whose mean is taken. Right for the
            # shares, it would multiply the auxiliary loss by ranks * micro-batches.
            coefficient = self.model.config.router_aux_loss_coef
            has = self.ranks.world_size if self.args.average_tokens_across_devices else 1
            due = 1 / self.current_gradient_accumulation_steps
            loss = loss + coefficient * (due - has) * auxiliary
        return (loss, outputs) if return_outputs else loss

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the row of the step to the logs and to the run directory."""
        step = self.state.global_step
        if "loss" in logs:
            row, load = self.window.close(self.ranks, self._settings.parallel.ep_size or 1)
            # A tracker takes numbers only.
            logs.update({k: v for k, v in row.items() if isinstance(v, int | float)})
            if self.ranks.is_first:
                named = ("loss", "grad_norm", "learning_rate")
                head = {"step": step, **{k: logs[k] for k in named if k in logs}}
                append_row(self.directory.metrics, head | row)
                if load:
                    append_row(self.directory.expert_load, {"step": step, "load": load})
        elif "eval_loss" in logs:
            logs["eval_ppl"] = math.exp(min(logs["eval_loss"], 700.0))
            totals = self.window.totals(self.ranks)
            if self.ranks.is_first:
                head = {"step": step, "val_loss": logs["eval_loss"], "ppl": logs["eval_ppl"]}
                append_row(self.directory.evaluations, head | totals)
        super().log(logs, start_time)

    # Checkpoints

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.store_flos()
        self.state.stateful_callbacks["TrainerControl"] = self.control.state()
        checkpoint.save(
            self.directory.checkpoints,
            self.state.global_step,
            model=self.model,
            optimizer=self.optimizer.optimizer,
            scheduler_state=self.lr_scheduler.state_dict(),
            rank_state={
                "loss_sum": self._tr_loss.item(),
                "last_logged": self._globalstep_last_logged,
                "window": self.window.state_dict(),
                "layers": None if self.handle is None else self.handle.state_dict(),
            },
            manifest={"agreement": self._agreement},
            save_trainer_state=lambda path: self.state.save_to_json(str(path)),
            ranks=self.ranks,
            keep_last=self._settings.training.keep_last,
        )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        checkpoint.load_model(Path(resume_from_checkpoint), self.model)

    def _load_optimizer_and_scheduler(self, checkpoint_path: str | None) -> None:
        if checkpoint_path is None:
            return
        path = Path(checkpoint_path)
        optimizer = self.optimizer.optimizer
        checkpoint.load_optimizer(path, self.model, optimizer)
        num_groups = len(optimizer.param_groups)
        self.lr_scheduler.load_state_dict(checkpoint.load_scheduler_state(path, num_groups))
        own = checkpoint.load_rank_state(path, self.ranks.rank)
        # Every rank reads the first one's: it holds what all ranks share.
        first = checkpoint.load_rank_state(path, 0)
        assert first is not None
        same_layout = checkpoint.read_manifest(path)["world_size"] == self.ranks.world_size
        self._restored = own if same_layout and own is not None else first
        if not same_layout:
            self._restored = {**first, "loss_sum": self._mean_loss_sum(path)}
        if self.handle is not None and self._restored["layers"] is not None:
            self.handle.load_state_dict(self._restored["layers"])

    def _mean_loss_sum(self, path: Path) -> float:
        """The mean over the saving run's ranks: what a logged loss takes of it anyway."""
        saved = range(checkpoint.read_manifest(path)["world_size"])
        states = [checkpoint.load_rank_state(path, rank) for rank in saved]
        return fmean(state["loss_sum"] for state in states if state is not None)

    def _load_rng_state(self, checkpoint_path: str | None) -> None:
        if checkpoint_path is None:
            return
        state = checkpoint.load_rank_state(Path(checkpoint_path), self.ranks.rank)
        # A rank that the saving run did not have starts from its seed.
        if state is not None:
            checkpoint.set_random_state(state["random"])

    def restore_counters(self) -> None:
        """Continues the sums behind the logged values; the base class starts them at zero."""
        if self._restored:
            self._tr_loss += self._restored["loss_sum"]
            self._globalstep_last_logged = self._restored["last_logged"]
            self.window.load_state_dict(self._restored["window"])
            self._restored = {}


class _StepClock(transformers.TrainerCallback):
    """Feeds the window, and updates the correction bias, once per optimizer step."""

    def __init__(self, trainer: MoETrainer):
        self._trainer = trainer
        self._start = 0.0
        training = trainer._settings.training
        self._tokens = (
            training.per_device_train_batch_size
            * training.gradient_accumulation_steps
            * trainer.ranks.world_size
            * trainer._settings.data.block_size
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.restore_counters()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.correction_bias.update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # device sync: the step's time must hold its work
        seconds = time.perf_counter() - self._start
        handle = self._trainer.handle
        reports = [] if handle is None else handle.reports()
        self._trainer.window.add_step(seconds, self._tokens, reports)
        if state.global_step >= state.max_steps:
            # The last step has its rows, whatever logging_steps and eval_steps divide.
            control.should_log = control.should_evaluate = True
