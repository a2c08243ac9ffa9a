"""Reports of the MoE layers in the logs of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from lrmoe.report import LayerReport

if TYPE_CHECKING:
    from lrmoe.integrations.transformers import Handle


class TrainerCallback(transformers.TrainerCallback):
    """Adds the layers' reports to what an unmodified Trainer logs, and has their times measured.

    They appear in the progress bar's output and in ``state.log_history``. Reporting integrations
    that the Trainer set up before (TensorBoard, wandb) see them after :meth:`attach`.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        handle.is_timed = True

    def attach(self, trainer: transformers.Trainer) -> None:
        """Put this callback before all others, so that every reporter logs its values."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(c for c in callbacks if c is not self)]

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer with the values it logs."""
        if logs is None or "loss" not in logs:
            return
        values = summarise(self.handle.reports())
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)


def summarise(reports: list[LayerReport]) -> dict[str, float]:
    """The reports as a few numbers of this rank: sums of work and time, means of shares."""
    pairs = sum(r.pairs for r in reports)
    mean = 1 / max(len(reports), 1)
    return {
        "moe_fwd_ms": sum(r.fwd_ms for r in reports),
        "moe_bwd_ms": sum(r.bwd_ms for r in reports),
        "backward_fraction": sum(r.kept_pairs for r in reports) / pairs if pairs else 1.0,
        "score_mass": sum(r.score_mass for r in reports) * mean,
        "imbalance_fwd": sum(r.imbalance_fwd for r in reports) * mean,
        "imbalance_bwd": sum(r.imbalance_bwd for r in reports) * mean,
        "bytes_fwd": sum(r.bytes_fwd for r in reports),
        "bytes_bwd": sum(r.bytes_bwd for r in reports),
        "replicas": sum(r.replicas for r in reports),
        "dead_experts": sum(r.dead_experts for r in reports),
    }
