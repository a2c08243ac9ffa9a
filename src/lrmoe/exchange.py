"""The only module that calls torch.distributed: counts, rows and scalars between the EP ranks.

Shape letters: W = ranks of the group. A group of ``None`` is one rank: the same calls, no copies.
Bytes are counted here, where they are handed to the collective, and only those for other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from lrmoe.planner.problem import Int

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Collectives of one expert-parallel group, and the bytes this rank sent through it.

    Every rank calls the same methods in the same order, whatever the routing, also with zero rows.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.keeps_rows = self.num_ranks == 1
        """Whether tokens stay where they are and every one is a row: no list of rows is made."""
        self.sent_bytes = 0
        # Random streams of ranks that hold the same experts in other groups must differ too.
        self.global_rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.group_key = self.global_rank if group is None else dist.get_global_rank(group, 0)

    def all_gather_counts(self, counts: torch.Tensor) -> Int:
        """int64 [n] on every rank -> [W, n] on the host (device sync)."""
        return self.start_all_gather_counts(counts).wait()

    def start_all_gather_counts(self, counts: torch.Tensor) -> PendingCounts:
        """:meth:`all_gather_counts` that goes on while the host launches other work."""
        if self.num_ranks == 1:
            return PendingCounts(counts[None])
        gathered = counts.new_empty(self.num_ranks * counts.shape[0])
        _all_gather(gathered, counts, group=self.group)
        return PendingCounts(gathered.view(self.num_ranks, -1))

    def all_to_all(
        self, rows: torch.Tensor, send_W: Sequence[int], receive_W: Sequence[int]
    ) -> torch.Tensor:
        """Rows laid out by destination -> rows laid out by source. One rank: the same tensor."""
        if self.num_ranks == 1:
            return rows
        self._count(rows, send_W)
        received = rows.new_empty(sum(receive_W), *rows.shape[1:])
        dist.all_to_all_single(
            received, rows.contiguous(), list(receive_W), list(send_W), group=self.group
        )
        return received

    def start_all_to_all(
        self,
        rows: torch.Tensor,
        send_W: Sequence[int],
        receive_W: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Pending:
        """:meth:`all_to_all` that goes on while other work is done, into ``out`` if given."""
        if self.num_ranks == 1:
            return Pending(rows, None, rows)
        self._count(rows, send_W)
        rows = rows.contiguous()
        received = rows.new_empty(sum(receive_W), *rows.shape[1:]) if out is None else out
        work = dist.all_to_all_single(
            received, rows, list(receive_W), list(send_W), group=self.group, async_op=True
        )
        return Pending(received, work, rows)

    def _count(self, rows: torch.Tensor, send_W: Sequence[int]) -> None:
        row_bytes = rows[0:1].numel() * rows.element_size() if rows.shape[0] else 0
        self.sent_bytes += (sum(send_W) - send_W[self.rank]) * row_bytes

    def take_sent_bytes(self) -> int:
        """Bytes sent to other ranks since the last call."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent


def as_list(values: Int) -> list[int]:
    """Split sizes as torch.distributed takes them."""
    return [int(v) for v in np.asarray(values)]


class PendingCounts:
    """Numbers on their way to the host."""

    def __init__(self, counts: torch.Tensor) -> None:
        # Into pinned memory, so the copy takes its turn on the device and nothing waits for it yet.
        # On other accelerators there is no event below that says when such a copy has arrived.
        self._counts = counts.to("cpu", non_blocking=counts.is_cuda)
        self._arrived = torch.cuda.Event() if counts.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(counts.device))

    def wait(self) -> Int:
        """The numbers; the host waits for what was launched before they left, not for more."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._counts.numpy()


class Pending:
    """A collective on its way, and the memory it reads from and writes to."""

    def __init__(self, received: torch.Tensor, work: dist.Work | None, sent: torch.Tensor) -> None:
        self._received, self._work, self._sent = received, work, sent

    def wait(self) -> torch.Tensor:
        """What arrived."""
        if self._work is not None:
            self._work.wait()
        return self._received
