"""Kept pairs go to instances with room, and no more of them move than must."""

import networkx
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.reroute import reroute


@st.composite
def cases(draw):
    """Instances of a few experts, pairs placed on them, and capacities that just suffice."""
    experts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    instance_expert_V = np.array(sorted(set(range(max(experts) + 1))) + experts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    capacity_V = np.zeros(len(instance_expert_V), np.int64)
    instance_P, expert_P = [], []
    for expert in range(instance_expert_V.max() + 1):
        mine = np.flatnonzero(instance_expert_V == expert)
        num_pairs = int(rng.integers(0, 12))
        shares = rng.dirichlet(np.ones(len(mine)))
        capacity_V[mine] = rng.multinomial(num_pairs, shares)
        capacity_V[mine] += rng.integers(0, 3, len(mine)) * draw(st.integers(0, 1))
        instance_P += sorted(rng.choice(mine, num_pairs))
        expert_P += [expert] * num_pairs
    return instance_expert_V, capacity_V, np.array(instance_P, int), np.array(expert_P, int)


def fewest_moves(instance_expert_V, capacity_V, instance_P, expert_P):
    """Cost of a min-cost flow that sends every pair to an instance; staying is free."""
    graph = networkx.DiGraph()
    graph.add_node("source", demand=-len(instance_P))
    graph.add_node("sink", demand=len(instance_P))
    for v, capacity in enumerate(capacity_V):
        graph.add_edge(("to", v), "sink", capacity=int(capacity), weight=0)
    for pair, (v, expert) in enumerate(zip(instance_P, expert_P, strict=True)):
        graph.add_edge("source", ("pair", pair), capacity=1, weight=0)
        for other in np.flatnonzero(instance_expert_V == expert):
            graph.add_edge(("pair", pair), ("to", other), capacity=1, weight=int(other != v))
    return networkx.min_cost_flow_cost(graph)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_capacities_hold_and_the_fewest_pairs_move(case):
    instance_expert_V, capacity_V, instance_P, expert_P = case
    got = reroute(
        torch.from_numpy(instance_P),
        torch.from_numpy(expert_P),
        torch.from_numpy(capacity_V),
        torch.from_numpy(instance_expert_V),
    ).numpy()
    assert np.array_equal(instance_expert_V[got], expert_P)
    assert (np.bincount(got, minlength=len(capacity_V)) <= capacity_V).all()
    assert (got != instance_P).sum() == fewest_moves(*case)
