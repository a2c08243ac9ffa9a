"""Run one function on several ranks, each a fresh process, and bring back what they return.

Ranks talk through gloo and compute on the CPU; with ``backend = "nccl"`` each has a GPU.

Rendezvous, arguments, results and tracebacks are files in a temporary directory: no ports, no
shared memory. The children use one thread and poisoned memory, like the parent's tests.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

backend = "gloo"
START_S = 120  # to import torch and meet, on a machine that does other things too


class RankError(RuntimeError):
    """A rank raised or died; the message names it and holds its traceback."""


def run_ranks(fn: Callable, world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Return ``[fn(rank, world_size, *args) for every rank]``, each computed in its own process.

    Args:
        fn: a module-level function; a default process group exists when it is called.
        timeout: seconds from the moment all ranks have met; starting them does not count.

    Raises:
        RankError: the first rank that failed, with its traceback. The others are killed: they
            would wait for it in a collective.
        TimeoutError: names the ranks that still ran, and shows where each of them waited.
    """
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, here are {torch.cuda.device_count()}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        torch.save((fn, args), directory / "call.pt")
        processes = [
            context.Process(
                target=_run_rank, args=(name, rank, world_size, timeout, backend), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, directory, timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [
            torch.load(directory / f"result{rank}.pt", weights_only=False, map_location="cpu")
            for rank in range(world_size)
        ]


def rank_device() -> torch.device:
    """Where this rank's tensors belong."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _wait(processes: list, directory: Path, timeout: float) -> None:
    """Return when every process ended well; raise for the first failure or at the deadline."""
    deadline, met = time.monotonic() + START_S, False
    while True:
        if not met and all((directory / f"met{r}").exists() for r in range(len(processes))):
            deadline, met = time.monotonic() + timeout, True
        codes = [process.exitcode for process in processes]
        if any(code not in (None, 0) for code in codes):
            raise RankError(_first_failure(codes, directory))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            stacks = "".join(
                f"\nrank {rank} waited at:\n{path.read_text()}"
                for rank in running
                if (path := directory / f"stack{rank}.txt").exists()
            )
            late = f"still ran after {timeout} s" if met else f"had not met after {START_S} s"
            raise TimeoutError(f"ranks {running} {late}{stacks}")
        time.sleep(0.02)


def _first_failure(codes: list[int | None], directory: Path) -> str:
    """Describe every failure, the one that came first at the head: the others mostly follow it."""
    failures = []
    for rank, code in enumerate(codes):
        report = directory / f"error{rank}.txt"
        if report.exists():
            at, text = report.read_text().split("\n", 1)
            failures.append((int(at), f"rank {rank} failed\n{text}"))
        elif code not in (None, 0):  # killed: no report, and the cause of its peers' reports
            failures.append((0, f"rank {rank} died with exit code {code}\n"))
    return "\n".join(text for _, text in sorted(failures))


def _run_rank(name: str, rank: int, world_size: int, timeout: float, backend: str) -> None:
    """Run the function as one rank; leave its result or its traceback in the directory."""
    directory = Path(name)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        torch.set_num_threads(1)
        # On a GPU not every operation has a deterministic kernel; memory is poisoned all the same.
        torch.use_deterministic_algorithms(True, warn_only=backend == "nccl")
        torch.manual_seed(0)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        fn, args = torch.load(directory / "call.pt", weights_only=False)
        dist.init_process_group(
            backend,
            init_method=f"file://{directory / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=max(timeout, START_S)),
        )
        (directory / f"met{rank}").touch()
        stack = (directory / f"stack{rank}.txt").open("w")
        faulthandler.dump_traceback_later(max(0.8 * timeout, timeout - 2), file=stack)
        torch.save(fn(rank, world_size, *args), directory / f"result{rank}.pt")
        dist.barrier()  # nobody leaves while another still receives from it
        dist.destroy_process_group()
    except BaseException:
        # written whole, then renamed: the parent never reads half a report
        report = directory / f"error{rank}.part"
        report.write_text(f"{time.monotonic_ns()}\n{traceback.format_exc()}")
        report.rename(directory / f"error{rank}.txt")
        os._exit(1)  # a normal exit may wait for peers that wait for us
