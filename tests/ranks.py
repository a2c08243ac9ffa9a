"""Run one function on several ranks, each a fresh process, and bring back what they return.

Ranks talk through gloo and compute on the CPU; with ``backend = "nccl"`` each has a GPU.

Imports take seconds, which most calls do not. So every rank has a process that imports, and each
call forks a fresh one from it: what a call changes is gone after it. Ranks do not share it, so that
they differ in what Python draws when it starts, such as the order of sets of strings.

Rendezvous, arguments, results and tracebacks are files in a temporary directory: no ports, no
shared memory. The children use one thread and poisoned memory, like the parent's tests.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
import torch._dynamo  # this and the next are imported at the first call of a layer, for a second
import torch.distributed as dist
import torch.distributed.tensor

backend = "gloo"
START_S = 120  # to import torch and meet, on a machine that does other things too
_servers: list["_Server"] = []  # by rank


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
    while len(_servers) < world_size:
        _servers.append(_Server())
    servers = _servers[:world_size]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        torch.save((fn, args), directory / "call.pt")
        try:
            for rank, server in enumerate(servers):
                server.fork(fn.__module__, name, rank, world_size, timeout, backend)
            _wait(servers, directory, timeout)
        finally:
            for server in servers:
                server.kill()
        return [
            torch.load(directory / f"result{rank}.pt", weights_only=False, map_location="cpu")
            for rank in range(world_size)
        ]


def rank_device() -> torch.device:
    """Where this rank's tensors belong."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Server:
    """A process that imports what its ranks need and is forked for one after the other."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.ranks import serve; serve({theirs.fileno()})"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt ends the tests, and they end the ranks
        )
        theirs.close()
        self._pid: int | None = 0
        self._exitcode: int | None = 0

    def fork(self, module: str, *arguments: Any) -> None:
        """Start a rank with the arguments of :func:`_run_rank`, whose function is of the module."""
        self._pid = self._exitcode = None
        self._connection.send((dict(os.environ), module, arguments))

    @property
    def exitcode(self) -> int | None:
        """How the rank ended, or None."""
        while self._exitcode is None and self._connection.poll():
            self._receive()
        return self._exitcode

    def kill(self) -> None:
        """End the rank, if it has not ended."""
        while self._pid is None:
            self._receive()
        while self._exitcode is None:
            os.kill(self._pid, signal.SIGKILL)
            self._receive()

    def _receive(self) -> None:
        self._pid, self._exitcode = self._connection.recv()


def serve(descriptor: int) -> None:
    """Fork a rank for every request that comes, until the tests have ended."""
    numba.njit(lambda: 0)()  # loads what numba loads at the first call of anything compiled
    connection = Connection(descriptor)
    pid = None
    while True:
        try:
            environment, module, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        if pid is not None:
            os.waitpid(pid, 0)
        with suppress(Exception):  # the rank will say what is wrong
            importlib.import_module(module)
        gc.freeze()  # a collection in a rank would copy every page
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.environ.clear()
            os.environ.update(environment)
            _run_rank(*arguments)
            sys.stdout.flush()
            os._exit(0)  # to take down what was imported takes longer than most calls
        connection.send((pid, None))
        # Until the next request the process id belongs to this rank: the tests may kill it.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        is_exit = ended.si_code == os.CLD_EXITED
        connection.send((pid, ended.si_status if is_exit else -ended.si_status))


def _wait(servers: list[_Server], directory: Path, timeout: float) -> None:
    """Return when every rank ended well; raise for the first failure or at the deadline."""
    deadline, met = time.monotonic() + START_S, False
    while True:
        if not met and all((directory / f"met{r}").exists() for r in range(len(servers))):
            deadline, met = time.monotonic() + timeout, True
        codes = [server.exitcode for server in servers]
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
        if dist.is_initialized():  # a training job has ended it
            dist.barrier()  # nobody leaves while another still receives from it
            dist.destroy_process_group()
    except BaseException:
        # written whole, then renamed: the parent never reads half a report
        report = directory / f"error{rank}.part"
        report.write_text(f"{time.monotonic_ns()}\n{traceback.format_exc()}")
        report.rename(directory / f"error{rank}.txt")
        os._exit(1)  # a normal exit may wait for peers that wait for us
