"""What the trainer says between ranks, outside the model: flags, small records, barriers.

All of it goes over the host, so that nothing here waits for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes of a run.

    Args:
        timeout_s: seconds after which a collective that some rank never joins raises.
    """

    def __init__(self, timeout_s: int):
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._group: dist.ProcessGroup | None = None
        if self.world_size == 1:
            # accelerate would wrap the model of a launched single rank in DistributedDataParallel.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        else:
            timeout = timedelta(seconds=timeout_s)
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            if not dist.is_initialized():
                dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run directory."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self._group is not None:
            dist.barrier(self._group)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; the same answer on all of them."""
        if self._group is None:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flags.item())

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank. Small plain Python values only."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of ``work()`` on rank 0, or its ``ValueError``, on every rank."""
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = work()
            except ValueError as error:
                outcome[1] = error
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def close(self) -> None:
        """Ends the process groups and joins the threads of ours."""
        # A thread of gloo that lets go of a finished collective while the interpreter is already
        # shutting down aborts the process. The last collective of a run is on our group, and
        # without our reference it ends with the others.
        self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()
