"""Small settings, and ways to start a run and to read what it left."""

import io
import json
import os
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lrmoe.training import job, plots
from lrmoe.training.settings import TrainingSettings
from tests.ranks import run_ranks

HERE = Path(__file__).parent

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

# Logging does not fall on the steps that are saved: sums in between must survive a resume.
TRAINING = TrainingSettings(
    max_steps=12,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=3,
    logging_steps=3,
    eval_steps=6,
    save_steps=4,
    keep_last=5,
    report_to="none",
)


def start(settings, nproc, *, expect=0, json_file=None):
    """``lrmoe train`` with these settings; its output."""
    root = Path(settings.run_dir)
    config = root.with_name(f"{root.name}.json")
    config.write_text(json.dumps(settings.to_dict()))
    command = [sys.executable, "-m", "lrmoe.cli", "train", str(config), "--nproc", str(nproc)]
    if json_file is not None:
        command += ["--json", str(json_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(settings, nproc):
    """The same run without the command and its launcher, which take longer; the first's output."""
    return run_ranks(_train, nproc, settings, timeout=120)[0]


def _train(rank, world_size, settings):
    # What the launcher says; accelerate asks for it, though the group exists.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE=str(world_size))
    os.environ["OMP_NUM_THREADS"] = "1"
    if world_size == 1:
        dist.destroy_process_group()  # a launched single rank has none
    with without_images(), redirect_stdout(io.StringIO()) as output:
        assert job.run(settings).completed
    return output.getvalue()


@contextmanager
def without_images():
    """A run inside makes its figures and draws none of them: that takes as long as its training."""
    with patch.object(Figure, "savefig"), patch.object(plots, "_side_by_side"):
        yield


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def with_(settings, **sections):
    """The settings with fields of sections replaced: ``with_(s, training={"max_steps": 3})``."""
    changed = {
        name: replace(getattr(settings, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return replace(settings, **changed)


def load_tensors(checkpoint, tmp_path):
    """Everything a checkpoint holds of model and optimizer, by name, gathered."""
    file = tmp_path / "whole.pt"
    dcp_to_torch_save(checkpoint / "tensors", file)
    state = torch.load(file, weights_only=False)
    return {f"{part}/{name}": v for part, values in state.items() for name, v in values.items()}


def rows_without_times(path):
    """The rows of a step log, less what depends on the clock or on memory."""
    timed = {"tokens_per_second", "step_ms", "moe_ms", "moe_fwd_ms", "moe_bwd_ms", "memory_peak"}
    timed |= {"plan_us", "makespan_error"}
    timed |= {"train_s", "moe_ms_total"}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]
