"""Replicas for one layer call: weights out to slots, gradients home.

A replica has no parameter, no optimizer state and no place in a checkpoint. Its weights lie in a
slot buffer that all layers share, so a later layer overwrites them, and they are sent again before
the backward pass unless the buffer still holds them.

Shape letters: W = ranks, V = instances, e = home experts of this rank, s = replicas on it, D =
model dim, F = expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lrmoe.compute import Weights
from lrmoe.dispatch import local_instances
from lrmoe.exchange import Exchange, Pending, as_list
from lrmoe.kernels.rows import sum_rows
from lrmoe.planner.problem import Int, Plan
from lrmoe.upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Who sends which expert's weights where, the same on every rank (host)."""

    send_expert_n: Int  # home experts of this rank, by destination, then slot
    send_W: list[int]
    receive_slot_n: Int  # replicas of this rank, by source, then slot
    receive_W: list[int]

    @classmethod
    def of(cls, plan: Plan, exchange: Exchange, needed_V: Int) -> Routes:
        """The routes of the replicas that are needed.

        Args:
            needed_V: bool, instances with work; home experts are ignored.
        """
        E, W, rank = len(plan.quota_E), exchange.num_ranks, exchange.rank
        home_V = plan.instance_expert_V // (E // W)
        replicas = np.flatnonzero((home_V != plan.instance_rank_V) & needed_V)
        mine = replicas[home_V[replicas] == rank]
        here = replicas[plan.instance_rank_V[replicas] == rank]
        here = here[np.argsort(home_V[here], kind="stable")]
        first_replica = local_instances(plan, rank).start + E // W
        return cls(
            send_expert_n=plan.instance_expert_V[mine] - rank * (E // W),
            send_W=as_list(np.bincount(plan.instance_rank_V[mine], minlength=W)),
            receive_slot_n=here - first_replica,
            receive_W=as_list(np.bincount(home_V[here], minlength=W)),
        )


class Slots:
    """The slot buffers of this process, by device, dtype and shape of an expert."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._holds: dict[tuple[object, ...], tuple[object, bytes]] = {}

    def send(
        self,
        plan: Plan,
        exchange: Exchange,
        home: Weights,
        needed_V: Int,
        call: object,
    ) -> Arriving:
        """Start sending replicas' weights; every rank calls this if any replica is needed.

        Nothing is sent if the slots still hold the same replicas of the same call, which all ranks
        know without asking.
        """
        routes = Routes.of(plan, exchange, needed_V)
        num_slots = num_local_replicas(plan, exchange)
        key = (
            id(exchange.group),
            home.down_eDF.device,
            home.down_eDF.dtype,
            home.down_eDF.shape[1:],
        )
        buffers = self._buffers.get(key)
        if buffers is None or len(buffers[0]) < num_slots:
            buffers = [
                w.new_empty(num_slots, *w.shape[1:]) for w in (home.gate_up_e2FD, home.down_eDF)
            ]
            self._buffers[key] = buffers
            self._holds.pop(key, None)
        holds = (call, needed_V.tobytes())
        gate_up, down = (b[:num_slots] for b in buffers)
        if self._holds.get(key) == holds:
            return Arriving(gate_up, down, routes, [])
        self._holds[key] = holds
        expert_n = upload(routes.send_expert_n, down.device)
        n = len(routes.receive_slot_n)
        in_order = np.array_equal(routes.receive_slot_n, np.arange(n))
        pending = [
            exchange.start_all_to_all(
                w.index_select(0, expert_n),
                routes.send_W,
                routes.receive_W,
                out=slots[:n] if in_order else None,
            )
            for w, slots in ((home.gate_up_e2FD, gate_up), (home.down_eDF, down))
        ]
        return Arriving(gate_up, down, routes, pending, in_order=in_order)

    def shrink(self, num_slots: int, call: object, exchange: Exchange) -> None:
        """Give back this group's buffers with more slots than a call needs; all its ranks call it.

        What another call left is forgotten on all of them, also where no buffer is given back: they
        must agree on what is still held.
        """
        for key, buffers in list(self._buffers.items()):
            if key[0] != id(exchange.group):  # whose ranks may not all be here
                continue
            if self._holds.get(key, (call,))[0] != call:
                del self._holds[key]
            if len(buffers[0]) > num_slots:
                del self._buffers[key]


class Arriving:
    """Replica weights on their way into the slots; call it to wait for them."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        routes: Routes,
        pending: list[Pending],
        *,
        in_order: bool = True,
    ) -> None:
        self._weights = Weights(gate_up_e2FD=gate_up, down_eDF=down)
        self._slot_n = upload(routes.receive_slot_n, down.device)
        self._pending = pending
        self._in_order = in_order
        self.was_sent = bool(pending)
        """Whether weights travel, which all ranks agree on; else the slots still hold them."""

    def __call__(self) -> Weights:
        """The replicas' weights, by slot."""
        targets = (self._weights.gate_up_e2FD, self._weights.down_eDF)
        for target, pending in zip(targets, self._pending, strict=False):
            received = pending.wait()
            if not self._in_order:
                target.index_copy_(0, self._slot_n, received)
        self._pending = []
        return self._weights


SLOTS = Slots()


def add_replica_gradients(
    grad_eAB: torch.Tensor,
    replica_grad_sAB: torch.Tensor | None,
    plan: Plan,
    needed_V: Int,
    exchange: Exchange,
) -> torch.Tensor:
    """Send the replicas' gradients home and add them there: home first, then by ascending rank.

    Summed in float32 (float64 for float64), cast once. Collective: every rank calls it if any
    replica had a kept pair.
    """
    routes = Routes.of(plan, exchange, needed_V)
    if replica_grad_sAB is None:
        sent_nAB = grad_eAB[:0]
    elif np.array_equal(routes.receive_slot_n, np.arange(len(replica_grad_sAB))):
        sent_nAB = replica_grad_sAB
    else:
        slot_n = upload(routes.receive_slot_n, grad_eAB.device)
        sent_nAB = replica_grad_sAB.index_select(0, slot_n)
    returned_nAB = exchange.all_to_all(sent_nAB, routes.receive_W, routes.send_W)
    if len(routes.send_expert_n) == 0:
        return grad_eAB
    expert_u, row_n = np.unique(routes.send_expert_n, return_inverse=True)
    if len(expert_u) == len(row_n):  # one replica each: a sum of two is rounded once as it is
        return grad_eAB.index_add_(0, upload(routes.send_expert_n, grad_eAB.device), returned_nAB)
    expert_ids = upload(expert_u, grad_eAB.device)
    parts = torch.cat([grad_eAB.index_select(0, expert_ids), returned_nAB])
    of_part_n = upload(np.concatenate([np.arange(len(expert_u)), row_n]), grad_eAB.device)
    A = grad_eAB.shape[1]
    of_row = of_part_n[:, None] * A + torch.arange(A, device=grad_eAB.device)
    most = 1 + int(np.bincount(row_n).max())
    totals = sum_rows(parts.flatten(0, 1), of_row.flatten(), len(expert_u) * A, most)
    return grad_eAB.index_copy_(0, expert_ids, totals.view(-1, *grad_eAB.shape[1:]))


def replicas_needed(plan: Plan, needed_V: Int) -> bool:
    """Whether any replica of any rank has work."""
    W = len(plan.forward_WV)
    home_V = plan.instance_expert_V // (len(plan.quota_E) // W)
    return bool(((home_V != plan.instance_rank_V) & needed_V).any())


def num_local_replicas(plan: Plan, exchange: Exchange) -> int:
    """Replicas on this rank."""
    here = local_instances(plan, exchange.rank)
    return int(here.stop - here.start - len(plan.quota_E) // exchange.num_ranks)
