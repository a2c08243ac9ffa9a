"""One training run of a study on one rank: a plain loop around ``lrmoe.configure``.

The text, its order, the models and the correction bias are the trainer's; nothing else of it is
needed here, so that a run costs little more than its steps.

Shape letters: B = blocks, S = tokens per block, T = B * S.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, get_scheduler, set_seed
from transformers.utils import logging as transformers_logging

import lrmoe
from lrmoe.integrations.transformers import Handle
from lrmoe.report import LayerReport
from lrmoe.studies import experiments
from lrmoe.studies.settings import Arm, Protocol, Run
from lrmoe.studies.texts import study_text
from lrmoe.training.balance import CorrectionBias
from lrmoe.training.data import RankBatches, TextData, TokenBlocks
from lrmoe.training.presets import preset_config

_CURVE_POINTS = 8
_CURVE_BLOCKS = 64
_EVALUATION_BLOCKS = 16
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_QUALITY = ("val_loss", "ppl", "val_loss_quantiles", "train_loss")  # None if the run diverged
_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
# What pretraining shares with the run that continues it: seeds of runs are small numbers.
_PRETRAINING_SEED = 1_000_000

OnStep = Callable[[int, int], None]


def train(run: Run, cache: Path, on_step: OnStep = lambda step, steps: None) -> dict[str, Any]:
    """Trains, and returns the row of the run.

    Args:
        cache: directory for the checkpoints that ``continued`` runs start from.
        on_step: called after each step with its number and that of the last.
    """
    torch.set_num_threads(1)  # sums in another order would make another run
    text = study_text(run.protocol)
    model = initial_model(run, text, cache)
    row = identity(run, text, model)
    started = time.perf_counter()
    trainer = Loop(run, model, text)
    curve, losses, reports = [], [], []
    for step in trainer.steps():
        losses.append(trainer.loss)
        reports.append(trainer.handle.reports())
        on_step(step, run.protocol.steps)
        if not math.isfinite(trainer.loss):
            break
        if _is_on_curve(step, run.protocol.steps):
            few = text.validation.spread(_CURVE_BLOCKS)
            curve.append([step, round(validate(model, few, run.protocol.bf16).mean().item(), 5)])
    wall_s = time.perf_counter() - started
    loss_T = validate(model, text.validation, run.protocol.bf16)
    is_finite = math.isfinite(losses[-1]) and bool(loss_T.isfinite().all())
    return {
        **row,
        **(_quality(loss_T, losses) if is_finite else dict.fromkeys(_QUALITY)),
        **_work(reports, run.protocol.steps),
        "curve": curve,
        "step_ms": trainer.cpu_s * 1e3 / len(losses),
        "step_clock": "cpu",
        "wall_s": wall_s,
        "target_loss": None,
        "ms_to_target": None,
        "steps_to_target": None,
    }


def _quality(loss_T: torch.Tensor, losses: list[float]) -> dict[str, Any]:
    loss = loss_T.mean().item()
    quantiles = loss_T.quantile(torch.tensor(_QUANTILES, dtype=loss_T.dtype))
    return {
        "val_loss": loss,
        "ppl": math.exp(loss),
        "val_loss_quantiles": [round(q, 5) for q in quantiles.tolist()],
        "train_loss": fmean(losses[-50:]),
    }


def _is_on_curve(step: int, steps: int) -> bool:
    return step * _CURVE_POINTS % steps < _CURVE_POINTS


def _work(reports: list[list[LayerReport]], steps: int) -> dict[str, Any]:
    """What the layers did, per step where it is not a share."""
    pairs = sum(r.pairs for layers in reports for r in layers)
    return {
        "backward_fraction": sum(r.kept_pairs for layers in reports for r in layers) / pairs,
        "score_mass": fmean(r.score_mass for layers in reports for r in layers),
        "score_mass_by_layer": [
            round(fmean(r.score_mass for r in calls), 4) for calls in zip(*reports, strict=True)
        ],
        "rates": [
            [step, *(r.rate for r in reports[step - 1])]
            for step in range(1, len(reports) + 1)
            if _is_on_curve(step, steps)
        ],
        "moe_ms": fmean(sum(r.fwd_ms + r.bwd_ms for r in layers) for layers in reports),
        "moe_clock": reports[0][0].clock,
    }


def identity(run: Run, text: TextData, model: nn.Module) -> dict[str, Any]:
    """What the run is, and fingerprints of what paired runs share."""
    protocol, config = run.protocol, run.arm.recalibration
    return {
        "model": protocol.model,
        "text": protocol.text,
        "regime": protocol.regime,
        "arm": run.arm.name,
        "selection": config.selection,
        "placement": config.placement,
        "rate": config.to_dict()["rate"],
        "router_grad": config.router_grad,
        "seed": run.seed,
        "steps": protocol.steps,
        "settings": run.to_dict(),
        "text_fingerprint": text.fingerprint,
        "initial_fingerprint": _fingerprint(p.detach().numpy().tobytes() for p in _tensors(model)),
        "order_fingerprint": _fingerprint(repr(b).encode() for b in batches(run, len(text.train))),
    }


class Loop:
    """A model, its optimizer and the text in the run's order; :meth:`steps` trains."""

    def __init__(self, run: Run, model: nn.Module, text: TextData):
        protocol = run.protocol
        self.run, self.model, self.text = run, model, text
        self.handle = configure(model, run.arm, run.seed)
        self.optimizer = _OPTIMIZERS[protocol.optimizer](
            _decay_groups(model, protocol.weight_decay), lr=protocol.learning_rate
        )
        self._schedule = get_scheduler(
            protocol.schedule, self.optimizer, protocol.warmup_steps, protocol.steps
        )
        self._bias = CorrectionBias(model, rate=1e-3)
        self._batches = batches(run, len(text.train))
        self._rule = experiments.make(run.arm.experiment)
        self.loss = math.nan
        """Language loss of the last step's text, before the step."""
        self.cpu_s = 0.0
        """Time of the steps so far, of this process alone: others may share its core."""

    def steps(self) -> Iterator[int]:
        """Trains a step at a time; yields its number, from 1, after it was made."""
        self.model.train()
        for step, batch in enumerate(self._batches, start=1):
            started = time.process_time()
            ids_BS = block_ids(self.text.train, batch)
            with experiments.selecting(self._rule):
                self.loss = backward(self.model, ids_BS, self.run.protocol.bf16)
            if self.run.protocol.max_grad_norm > 0:
                lrmoe.clip_grad_norm_(self.model, self.run.protocol.max_grad_norm)
            self.optimizer.step()
            self._schedule.step()
            self._bias.update()
            self.optimizer.zero_grad()
            self.cpu_s += time.process_time() - started
            yield step
            self.model.train()


def backward(model: nn.Module, ids_BS: torch.Tensor, bf16: bool = False) -> float:
    """Adds the gradients of a batch; returns its language loss."""
    with _autocast(bf16):
        loss_BS, auxiliary = token_loss(model, ids_BS)
    # As Hugging Face does: the mean over the tokens that have a successor.
    loss = loss_BS.sum() / (loss_BS.numel() - len(loss_BS))
    with lrmoe.token_losses(loss_BS.reshape(-1)):
        torch.autograd.backward(loss + auxiliary)
    return loss.item()


def configure(model: nn.Module, arm: Arm, seed: int) -> Handle:
    """The model's layers set up as the arm says."""
    config = replace(arm.recalibration, seed=seed)
    handle = lrmoe.configure(model, config)
    handle.is_timed = True
    for layer in arm.exact_layers:
        if not -len(handle.states) <= layer < len(handle.states):
            raise ValueError(f"exact_layers={arm.exact_layers}: has {len(handle.states)} layers")
        handle.states[layer].config = replace(config, rate=0.0)
    return handle


def token_loss(model: nn.Module, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Loss of predicting each token's successor (0 for the last of a block), and what balances."""
    config: Any = model.config
    wants_auxiliary = model.training and config.model_type == "qwen3_moe"
    arguments = {"output_router_logits": wants_auxiliary} if wants_auxiliary else {}
    output = model(input_ids=ids_BS, use_cache=False, **arguments)
    logits = output.logits[:, :-1].float()
    loss_BS = F.cross_entropy(logits.transpose(1, 2), ids_BS[:, 1:], reduction="none")
    auxiliary = config.router_aux_loss_coef * output.aux_loss if wants_auxiliary else 0.0
    return F.pad(loss_BS, (0, 1)), auxiliary


@torch.no_grad()
def validate(model: nn.Module, blocks: TokenBlocks, bf16: bool = False) -> torch.Tensor:
    """The loss of every predicted token of the blocks, float64."""
    model.eval()
    losses = []
    for start in range(0, len(blocks), _EVALUATION_BLOCKS):
        chosen = range(start, min(start + _EVALUATION_BLOCKS, len(blocks)))
        with _autocast(bf16):
            loss_BS, _ = token_loss(model, block_ids(blocks, list(chosen)))
        losses.append(loss_BS[:, :-1].reshape(-1).double())
    return torch.cat(losses)


def block_ids(blocks: TokenBlocks, chosen: list[int]) -> torch.Tensor:
    """int64 [B, S]."""
    return torch.stack([blocks[i]["input_ids"] for i in chosen])


def batches(run: Run, num_blocks: int) -> Iterator[list[int]]:
    """The blocks of each step, in an order that the seed alone fixes."""
    order = RankBatches(
        num_blocks,
        batch_size=run.protocol.blocks_per_step,
        accumulation=1,
        rank=0,
        world_size=1,
        seed=run.seed,
    )
    for step in range(run.protocol.steps):
        epoch, place = divmod(step, len(order))
        if place == 0:
            order.set_epoch(epoch)
            passing = iter(order)
        yield next(passing)


def initial_model(run: Run, text: TextData, cache: Path) -> nn.Module:
    """The model before the first step: random, or trained exactly before.

    Runs of a protocol continue the same checkpoint; the seed then decides order and draws.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    protocol = run.protocol
    config = preset_config(protocol.model, protocol.overrides)
    if protocol.regime == "scratch":
        set_seed(run.seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return model
    before = pretraining(protocol)
    path = cache / f"{_fingerprint([before.key.encode(), text.fingerprint.encode()])}.pt"
    model = initial_model(before, text, cache)
    if not path.exists():
        for _ in Loop(before, model, text).steps():
            pass
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        model = initial_model(before, text, cache)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def pretraining(protocol: Protocol) -> Run:
    """The exact run whose model the ``continued`` regime starts from."""
    scratch = Protocol(
        model=protocol.model,
        overrides=protocol.overrides,
        text=protocol.text,
        steps=protocol.pretraining_steps,
        blocks_per_step=protocol.blocks_per_step,
        block_size=protocol.block_size,
        schedule="constant_with_warmup",
        validation_blocks=protocol.validation_blocks,
    )
    return Run(protocol=scratch, arm=Arm(), seed=_PRETRAINING_SEED)


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _autocast(bf16: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _fingerprint(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
