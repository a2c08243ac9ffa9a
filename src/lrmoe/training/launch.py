"""Starts the ranks of a run on this machine, with torchrun's launcher."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from signal import SIGKILL, SIGSEGV

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lrmoe.training.run_dir import default_run_dir, refuse_used
from lrmoe.training.settings import TrainSettings

# A stopped rank writes a checkpoint before it leaves; only then is it killed.
_SHUTDOWN_S = 600


_WORKER = "lrmoe.training.worker"


class RanksFailedError(RuntimeError):
    """A rank ended with an error; the message holds its traceback."""


def launch(settings: TrainSettings, nproc: int, worker: str = _WORKER) -> bool:
    """Runs the job on ``nproc`` ranks; one that fails ends all of them.

    Args:
        worker: the module that each rank runs.

    Returns:
        False if a signal ended the run early, with a checkpoint.

    Raises:
        ValueError: if the settings do not fit the ranks or the run directory.
        RanksFailedError: with the traceback of the rank that failed first.
    """
    # Refused here, these are one line; on the ranks they would be a traceback each.
    settings.on_ranks(nproc)
    settings.data.check_files()
    settings.model.check_files()
    if not settings.resume:
        refuse_used(Path(settings.run_dir or default_run_dir()))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
    # Ranks on a CPU share its cores; more threads than cores make every rank slower.
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    command = ("-m", worker, json.dumps(settings.to_dict()))
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException:
        return False
    except ChildFailedError as error:
        raise RanksFailedError(_describe(error)) from error
    return True


def _describe(error: ChildFailedError) -> str:
    """The failure that came first; the other ranks only say that a rank is gone."""
    # A rank that was killed leaves no time stamp of its own: what its peers report looks earlier.
    killed = [(r, f) for r, f in error.failures.items() if f.exitcode in (-SIGKILL, -SIGSEGV)]
    rank, failure = killed[0] if killed else error.get_first_failure()
    message = failure.error_file_data["message"]
    reason = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
    return f"rank {rank} ended with exit code {failure.exitcode}\n{reason}"
