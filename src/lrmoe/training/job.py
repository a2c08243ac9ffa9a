"""A training run on this rank, from settings to summary. START HERE.

``run`` is called on every rank. Whatever may fail because of the settings is checked on rank 0, or
on values that all ranks share, before the first collective that others would wait in.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from lrmoe.training import checkpoint
from lrmoe.training.callbacks import StepLines, StopOnSignal
from lrmoe.training.data import TextData, load_text
from lrmoe.training.ranks import Ranks
from lrmoe.training.run_dir import RunDirectory, default_run_dir, refuse_used, write_atomically
from lrmoe.training.settings import TrainSettings, nearest

MODEL_TYPES = ("qwen3_moe", "glm4_moe")

# Settings that a resumed run may change: how long, how often, how many ranks. Everything else
# decides the numbers and must stay. The global batch is compared as one number.
_FREE = {
    "training": {
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "keep_last",
        "report_to",
        "activation_checkpointing",
    },
    # The text itself is compared by its fingerprint, the model by its config.
    "data": {"path", "tokenizer", "text_field", "validation_share"},
    "model": {"preset", "path", "overrides"},
    "recalibration": {"save", "rows"},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    run_dir: str
    summary: dict[str, Any]
    completed: bool
    """False if a signal ended it early, with a checkpoint."""


def run(settings: TrainSettings) -> Outcome:
    """Trains, and writes the run directory. Collective: called on every rank of the run.

    Raises:
        ValueError: if the settings, the text, the model or the checkpoint do not fit together.
    """
    started = time.monotonic()
    ranks = Ranks(settings.parallel.timeout_s)
    try:
        return _run(settings, ranks, started)
    finally:
        ranks.close()


def _run(settings: TrainSettings, ranks: Ranks, started: float) -> Outcome:
    _quieten(ranks)
    if not torch.cuda.is_available() and ranks.world_size > 1:
        torch.set_num_threads(1)  # the ranks share the cores
    settings = settings.on_ranks(ranks.world_size)
    console = Console(quiet=not ranks.is_first, soft_wrap=True)
    directory = RunDirectory(ranks.on_first(lambda: str(_claim(settings))))
    settings = dataclasses.replace(settings, run_dir=str(directory.root))
    job = _Job(settings, load_text(settings.data), ranks, directory, console)

    model_config = load_model_config(settings, job.text)
    arguments = training_arguments(settings, directory)
    agreement = _agreement(job, model_config)
    resume_from = ranks.on_first(lambda: _resume_point(job, agreement))
    if ranks.is_first:
        again = dataclasses.replace(settings, resume=False)
        write_atomically(directory.config, yaml.safe_dump(again.to_dict(), sort_keys=False))

    model = load_model(settings, model_config, directory, ranks)
    handle = None
    if settings.parallel.ep_implementation == "lrmoe":
        import lrmoe

        handle = lrmoe.configure(model, settings.recalibration)
        handle.is_timed = True
    trainer, stop = _make_trainer(job, model, handle, arguments, agreement)
    blocks = f"{len(job.text.train):,} blocks of {settings.data.block_size} tokens"
    console.print(f"{directory.root}: {_describe_model(model)}; {blocks}", highlight=False)

    if resume_from is not None and _reached_end(trainer, resume_from, console):
        checkpoint.load_model(resume_from, model)
        return _finished(job, model, started)
    with stop.listening(), _traced(job, model_config, handle):
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    if stop.stopped:
        return _stopped(job, trainer.state.global_step)
    return _finished(job, model, started)


@dataclass(frozen=True, slots=True)
class _Job:
    """What every part of a run needs."""

    settings: TrainSettings
    text: TextData
    ranks: Ranks
    directory: RunDirectory
    console: Console


def _quieten(ranks: Ranks) -> None:
    """Bars and warnings of libraries that would drown the run's own lines."""
    from transformers.utils import logging as transformers_logging

    if not (ranks.is_first and sys.stderr.isatty()):
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # At each checkpoint, about the two gathers that moving strided shards takes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # At each checkpoint of a run on one rank.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _claim(settings: TrainSettings) -> Path:
    """The run directory, made if this is a new run."""
    if settings.trace is not None:
        trace = Path(settings.trace)
        if trace.exists() or not trace.absolute().parent.is_dir():
            raise ValueError(
                f"trace={settings.trace!r}: must be a new file in an existing directory"
            )
    root = Path(settings.run_dir or default_run_dir())
    if settings.resume:
        if not root.is_dir():
            raise ValueError(
                f"run_dir={str(root)!r}: does not exist, so there is nothing to resume"
            )
    else:
        refuse_used(root)
    root.mkdir(parents=True, exist_ok=True)
    return root


def _agreement(job: _Job, model_config: Any) -> dict[str, Any]:
    """What a run must share with a checkpoint it resumes from, by the name of the setting."""
    settings = job.settings
    values: dict[str, Any] = {}
    for section, fields in settings.to_dict().items():
        if section in ("run_dir", "resume", "nproc", "trace", "trace_pairs", "parallel"):
            continue
        for key, value in fields.items():
            if key not in _FREE.get(section, ()):
                values[f"{section}.{key}"] = value
    training = settings.training
    values["data (fingerprint of the tokens)"] = job.text.fingerprint
    values["parallel.ep_implementation"] = settings.parallel.ep_implementation
    values["blocks per step (batch size x micro-batches x ranks)"] = (
        training.per_device_train_batch_size
        * training.gradient_accumulation_steps
        * job.ranks.world_size
    )
    for key, value in model_config.to_diff_dict().items():
        if key not in ("transformers_version", "dtype", "lrmoe", "use_cache"):
            values[f"model ({key})"] = value
    # As it reads back from the manifest: tuples become lists, keys become strings.
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _resume_point(job: _Job, agreement: dict[str, Any]) -> Path | None:
    """The checkpoint to start from, after the files of the run were cut back to it."""
    if not job.settings.resume:
        return None
    directory = job.directory
    found = checkpoint.find_newest(directory.checkpoints)
    for sentence in found.ignored:
        job.console.print(f"ignored: checkpoints/{sentence}", highlight=False)
    if found.newest is None:
        raise ValueError(
            f"run_dir={str(directory.root)!r}: holds no complete checkpoint to resume from"
        )
    manifest = checkpoint.read_manifest(found.newest)
    # Checkpoints from before there were strata had none.
    saved = {"recalibration.strata": "none"} | manifest["agreement"]
    for key in sorted({*saved, *agreement}):
        if saved.get(key) != agreement.get(key):
            raise ValueError(
                f"{key}={agreement.get(key)!r}: the checkpoint {found.newest.name} was trained "
                f"with {saved.get(key)!r}; use that value, or start a new run"
            )
    checkpoint.point_latest(found.newest)
    directory.truncate_step_logs(manifest["step"])
    directory.summary.unlink(missing_ok=True)
    job.console.print(f"resuming from {found.newest.name}", highlight=False)
    return found.newest


@contextmanager
def _traced(job: _Job, model_config: Any, handle: Any) -> Iterator[None]:
    """Record the routing of the layers inside, if the settings ask for it. Collective."""
    settings, ranks = job.settings, job.ranks
    if settings.trace is None:
        yield
        return
    from lrmoe.cluster.trace import Recorder, TraceInfo, join

    path = Path(settings.trace)
    info = TraceInfo(
        ranks=ranks.world_size,
        ep_size=settings.parallel.ep_size or 1,
        experts=num_experts(model_config),
        top_k=model_config.num_experts_per_tok,
        hidden=model_config.hidden_size,
        ffn=model_config.moe_intermediate_size,
        dtype_bytes=2 if settings.training.bf16 or settings.model.dtype == "bfloat16" else 4,
        device="cuda" if torch.cuda.is_available() else "cpu",
        has_pairs=settings.trace_pairs,
        has_directions=settings.trace_pairs,
        settings=settings.recalibration.to_dict(),
    )
    recorder = Recorder(path, info, ranks.rank)
    for state in handle.states:
        state.recorder = recorder
    yield
    recorder.close()
    ranks.barrier()
    ranks.on_first(lambda: join(path, info))


def _reached_end(trainer: Any, resume_from: Path, console: Console) -> bool:
    """Whether only the export and the summary are left to do."""
    step = checkpoint.read_manifest(resume_from)["step"]
    *_, last = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    if step >= last:
        console.print(f"the run has already reached step {step} of {last}", highlight=False)
    return bool(step >= last)


def load_model_config(settings: TrainSettings, text: TextData) -> Any:
    """The model's config.

    Raises:
        ValueError: if there is none, it is of another family, or its vocabulary is too small.
    """
    from transformers import AutoConfig

    from lrmoe.training.presets import preset_config

    model = settings.model
    model.check_files()
    if model.path is None:
        config = preset_config(model.preset, model.overrides)
    else:
        config = AutoConfig.from_pretrained(model.path)
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"model.path={model.path!r}: is of type {config.model_type!r}; allowed are "
            f"{', '.join(map(repr, MODEL_TYPES))}"
        )
    if config.vocab_size < text.vocabulary:
        raise ValueError(
            f"data.tokenizer={settings.data.tokenizer!r}: has {text.vocabulary} tokens, but the "
            f"model's vocabulary is {config.vocab_size}"
        )
    if config.model_type == "qwen3_moe":
        config.output_router_logits = True  # transformers leaves the auxiliary loss off
    if num_experts(config) % (settings.parallel.ep_size or 1):
        raise ValueError(
            f"parallel.ep_size={settings.parallel.ep_size}: must divide the model's "
            f"{num_experts(config)} experts"
        )
    return config


def num_experts(config: Any) -> int:
    """Routed experts of an MoE layer."""
    name = "num_experts" if config.model_type == "qwen3_moe" else "n_routed_experts"
    return int(getattr(config, name))


def load_model(
    settings: TrainSettings, config: Any, directory: RunDirectory, ranks: Ranks
) -> torch.nn.Module:
    """The model, sharded over the ranks.

    A model made from its config is saved and loaded again: each rank reads its own shard, and every
    layout starts from the same numbers.
    """
    from transformers import AutoModelForCausalLM, set_seed

    dtype = getattr(torch, settings.model.dtype)
    path = settings.model.path
    if path is None:
        path = str(directory.initial)

        def make_initial() -> None:
            set_seed(settings.training.seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            model.save_pretrained(path)

        ranks.on_first(make_initial)
    arguments: dict[str, Any] = {"config": config, "dtype": dtype}
    implementation = settings.parallel.ep_implementation
    if implementation == "lrmoe":
        import lrmoe

        lrmoe.register_transformers()
        arguments["experts_implementation"] = "lrmoe"
    if ranks.world_size > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        arguments["distributed_config"] = DistributedConfig(
            fsdp_size=settings.parallel.fsdp_size,
            ep_size=settings.parallel.ep_size,
            ep_implementation=implementation,
        )
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, **arguments)
    ranks.barrier()
    if ranks.is_first:
        shutil.rmtree(directory.initial, ignore_errors=True)
    return model


def _make_trainer(
    job: _Job, model: torch.nn.Module, handle: Any, arguments: Any, agreement: dict[str, Any]
) -> tuple[Any, StopOnSignal]:
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from lrmoe.training.trainer import MoETrainer

    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(job.directory.tensorboard))
    trainer = MoETrainer(
        settings=job.settings,
        text=job.text,
        ranks=job.ranks,
        directory=job.directory,
        handle=handle,
        agreement=agreement,
        model=model,
        args=arguments,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepLines(job.console))
    stop = StopOnSignal(job.ranks)
    trainer.add_callback(stop)
    return trainer, stop


def training_arguments(settings: TrainSettings, directory: RunDirectory) -> Any:
    """``TrainingArguments`` of the run.

    Raises:
        ValueError: if ``training.extra`` names a field that does not exist or that is not free.
    """
    from transformers import TrainingArguments

    training = settings.training
    on_gpu = torch.cuda.is_available()
    fixed: dict[str, Any] = {
        "output_dir": str(directory.root),
        "max_steps": training.max_steps if training.max_steps is not None else -1,
        "num_train_epochs": training.num_train_epochs or 1.0,
        "logging_strategy": "steps",
        "eval_strategy": "steps" if training.eval_steps else "no",
        "eval_steps": training.eval_steps or None,
        # Trainer refuses any other save of a sharded model; MoETrainer replaces what it does.
        "save_strategy": "steps",
        "save_only_model": True,
        "save_steps": training.save_steps or 10**9,
        "report_to": [name.strip() for name in training.report_to.split(",")],
        "prediction_loss_only": True,
        "logging_nan_inf_filter": False,  # a non-finite loss is never hidden
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "disable_tqdm": True,
        "ddp_timeout": settings.parallel.timeout_s,
    }
    own = {
        f.name for f in dataclasses.fields(training) if f.name not in ("extra", "keep_last", *fixed)
    }
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    for key, value in training.extra.items():
        if key in fixed or key in own:
            raise ValueError(f"training.extra.{key}={value!r}: is set by the run itself")
        if key not in known:
            raise ValueError(f"training.extra.{key} is not a setting{nearest(key, sorted(known))}")
    return TrainingArguments(
        **fixed, **{name: getattr(training, name) for name in own}, **training.extra
    )


def _describe_model(model: Any) -> str:
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    return (
        f"{config.model_type}, {total / 1e6:.1f} M parameters, {config.num_hidden_layers} layers, "
        f"{num_experts(config)} experts, top-{config.num_experts_per_tok}"
    )


def _stopped(job: _Job, step: int) -> Outcome:
    job.console.print(
        f"stopped at step {step}, checkpoint saved; continue with: "
        f"lrmoe train {job.directory.config} --resume true",
        highlight=False,
    )
    return Outcome(run_dir=str(job.directory.root), summary={"steps": step}, completed=False)


def _finished(job: _Job, model: torch.nn.Module, started: float) -> Outcome:
    from lrmoe.training.export import export_final
    from lrmoe.training.plots import draw_plots
    from lrmoe.training.summary import print_table, summarize

    directory = job.directory
    export_final(model, job.text.tokenizer, directory.final, job.ranks)

    def conclude() -> dict[str, Any]:
        summary = summarize(directory, wall_s=time.monotonic() - started)
        write_atomically(directory.summary, json.dumps(summary, indent=1) + "\n")
        draw_plots(directory)
        print_table(summary, directory, job.console)
        return summary

    summary = job.ranks.on_first(conclude)
    return Outcome(run_dir=str(directory.root), summary=summary, completed=True)
