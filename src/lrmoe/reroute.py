"""Kept pairs -> instances with room: as few as possible leave the instance of their forward pass.

An instance that has more kept pairs than its capacity passes the excess on to instances of the same
expert that have room. Exactly the excess moves, which is the least that any assignment within the
capacities can move (``tests/test_reroute.py`` compares with a min-cost flow).

Shape letters: P = kept pairs in expert-major order, V = instances.
"""

from __future__ import annotations

import torch

from lrmoe.pairs import count, counting_sort


def reroute(
    instance_P: torch.Tensor,
    expert_P: torch.Tensor,
    capacity_V: torch.Tensor,
    instance_expert_V: torch.Tensor,
) -> torch.Tensor:
    """The instance of each kept pair in the backward pass, int64 [P].

    Inside an instance the first pairs stay. Needs, for every expert, capacities that add up to at
    least its kept pairs; with more, the room is filled in instance order. (device sync: how many
    pairs move)

    Args:
        instance_P: instance of the forward pass.
        capacity_V: kept pairs each instance may take, int64.
        instance_expert_V: the expert of each instance, int64.
    """
    V = capacity_V.shape[0]
    order_P, sorted_P, count_B = counting_sort(instance_P, V)
    wanted_V = count_B[1:-1]
    starts_V = wanted_V.cumsum(0) - wanted_V
    place_P = torch.empty_like(instance_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device) - starts_V[sorted_P]
    moved_M = (place_P >= capacity_V[instance_P]).nonzero().squeeze(1)
    if moved_M.shape[0] == 0:
        return instance_P

    # The room of each expert's instances, laid end to end, takes its moved pairs in order.
    by_expert_V = torch.sort(instance_expert_V, stable=True).indices
    room_V = (capacity_V - wanted_V).clamp_(min=0)[by_expert_V]
    room_ends_V = room_V.cumsum(0)
    num_experts = V  # every expert has an instance, so there are no more
    expert_room_E = room_V.new_zeros(num_experts).index_add_(
        0, instance_expert_V[by_expert_V], room_V
    )
    room_start_E = expert_room_E.cumsum(0) - expert_room_E
    moved_expert_M = expert_P[moved_M]
    moved_E = count(moved_expert_M, num_experts)
    # Kept pairs are expert-major, so the moved pairs of an expert are one run.
    nth_M = (
        torch.arange(len(moved_M), device=moved_M.device)
        - (moved_E.cumsum(0) - moved_E)[moved_expert_M]
    )
    seat_M = room_start_E[moved_expert_M] + nth_M
    target_M = by_expert_V[torch.searchsorted(room_ends_V, seat_M, right=True)]
    rerouted_P = instance_P.clone()
    rerouted_P[moved_M] = target_M
    return rerouted_P
