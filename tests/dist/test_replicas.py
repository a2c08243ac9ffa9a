"""Replicas and rerouted pairs over several ranks: gradients against the single-process oracle.

Placements, forward splits and capacities are random here, so that no policy's habits hide a fault.
Shape letters: W ranks, E experts, V instances.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import lrmoe.state
from lrmoe import Budget, LayerState, Recalibration, experts
from lrmoe import planner as planners
from lrmoe.dispatch import local_instances
from lrmoe.replicas import Slots
from tests.dist.test_layer import Job, local, make_job, union
from tests.layers import TENSORS, TOLERANCE, oracle_gradients, run_layer
from tests.errors import relative_error
from tests.ranks import rank_device, run_ranks

pytestmark = pytest.mark.dist
_real_plan = planners.plan

CONFIGS = [
    Recalibration(rate=0.0),
    Recalibration(rate=0.3),
    Recalibration(rate=0.5, selection="top"),
    Recalibration(rate=0.3, selection="top", scope="local"),
    Recalibration(rate=0.4, draw="forward"),
    Recalibration(rate=0.4, draw="forward", save="inputs", scope="global"),
    Recalibration(rate=0.4, save="inputs"),
    Recalibration(rate=0.3, router_grad="exact"),
]


def random_plan(problem, seed, moves, idle=()):
    """A legal plan with replicas, random splits, and capacities that make pairs move (or not).

    In the passes named by ``idle`` no replica has a pair.
    """
    rng = np.random.default_rng(seed)
    W, E = problem.counts_WE.shape
    expert_V = list(range(E))
    rank_V = [e // (E // W) for e in expert_V]
    for rank in range(W):
        # a rank may have no replica, and one without any pair
        for expert in rng.choice(E, size=rng.integers(0, 4), replace=False):
            if expert // (E // W) != rank:
                expert_V.append(int(expert))
                rank_V.append(rank)
    order = np.argsort(rank_V, kind="stable")
    expert_V, rank_V = np.array(expert_V)[order], np.array(rank_V)[order]

    is_home_V = expert_V // (E // W) == rank_V

    def split(pairs_E, name):
        share_V = np.zeros(len(expert_V), np.int64)
        for expert, pairs in enumerate(pairs_E):
            mine = np.flatnonzero((expert_V == expert) & (is_home_V | (name not in idle)))
            share_V[mine] = rng.multinomial(pairs, rng.dirichlet(np.full(len(mine), 0.5)))
        return share_V

    forward_WV = np.stack([split(counts_E, "forward") for counts_E in problem.counts_WE])
    base = _real_plan(problem)
    if base.quota_WE is None:
        capacity_V = split(base.quota_E, "backward") if moves else forward_WV.sum(0)
        backward_WV = None
    else:
        backward_WV = np.stack([split(quota_E, "backward") for quota_E in base.quota_WE])
        if not moves and base.keeps_all:
            backward_WV = forward_WV
            base = replace(base, share_probability_WE=None)
        capacity_V = backward_WV.sum(0)
    return replace(
        base,
        instance_expert_V=expert_V,
        instance_rank_V=rank_V,
        forward_WV=forward_WV,
        capacity_V=capacity_V,
        backward_WV=backward_WV,
        backward_V=forward_WV.sum(0) if base.keeps_all and not moves else None,
    )


def _run_jobs(rank, world_size, jobs):
    done = []
    for seed, moves, job, through in jobs:
        lrmoe.state.plan = partial(random_plan, seed=seed, moves=moves)
        case = local(job.cases[rank], rank, world_size)
        through_fn = partial(checkpoint, use_reentrant=through) if through is not None else None
        extra = {} if through_fn is None else {"through": through_fn}
        done.append(run_layer(case, job.config, group=dist.group.WORLD, **extra))
    return done


@pytest.mark.parametrize("tokens", [(11, 14), pytest.param((9, 0, 12, 7), marks=pytest.mark.slow)])
def test_gradients_equal_the_oracle_with_replicas(tokens):
    jobs = []
    for seed in range(3):
        for moves in (False, True):
            for config in CONFIGS:
                job = make_job(tokens, config, num_experts=8, dtype=torch.float64, top_k=3)
                jobs.append((seed, moves, job, None))
        for through in (False, True):  # non-reentrant and reentrant checkpointing
            for draw in ("backward", "forward"):
                config = Recalibration(rate=0.4, draw=draw)
                job = make_job(tokens, config, num_experts=8, dtype=torch.float64, top_k=3)
                jobs.append((seed, True, job, through))
    ranks = run_ranks(_run_jobs, len(tokens), jobs, timeout=150)
    moved, replicas = 0, 0
    for i, (_, moves, job, _) in enumerate(jobs):
        runs = [done[i] for done in ranks]
        _assert_equal_to_the_oracle(job, runs)
        reports = [run.report for run in runs]
        assert len({report.replicas for report in reports}) == 1
        replicas += reports[0].replicas
        moved += sum(report.moved_rows for report in reports)
        if not moves and job.config.rate == 0:
            assert all(report.moved_rows == 0 for report in reports)
        records = [run.records[0] for run in runs]
        for record, report in zip(records, reports, strict=True):
            kept = record.kept
            assert (record.backward_rank[~kept] == -1).all()
            changed = (record.forward_rank != record.backward_rank)[kept].sum()
            assert changed <= report.moved_rows
    assert replicas > 0
    assert moved > 0


def _run_idle(rank, world_size, jobs):
    done = []
    for seed, idle, job in jobs:
        lrmoe.state.plan = partial(random_plan, seed=seed, moves=True, idle=idle)
        case = local(job.cases[rank], rank, world_size)
        done.append(run_layer(case, job.config, group=dist.group.WORLD))
    return done


def test_replicas_may_be_idle_in_either_pass():
    # float32: other dtypes do not reach the grouped GEMM, which counts its experts
    jobs = [
        (seed, idle, make_job((11, 14), config, num_experts=8, top_k=3))
        for seed in range(2)
        for idle in ((), ("forward",), ("backward",), ("forward", "backward"))
        for config in CONFIGS
    ]
    # nothing of the forward pass but the recomputation needs the weights that are sent for it
    jobs += [
        (seed, ("forward",), make_job((11, 14), config, num_experts=8, top_k=3))
        for seed in range(8)
        for scope in ("local", "global")
        for config in (Recalibration(rate=0.5, draw="forward", save="inputs", scope=scope),)
    ]
    ranks = run_ranks(_run_idle, 2, jobs)
    num_counted = 0
    for i, (_, idle, job) in enumerate(jobs):
        _assert_equal_to_the_oracle(job, [done[i] for done in ranks])
        if idle == ("forward",) and job.config.draw == "forward":
            num_counted += ranks[0][i].report.moved_weights
    assert num_counted > 0


def _assert_equal_to_the_oracle(job: Job, runs):
    total = {}
    dtype = runs[0].output.dtype
    for case, run in zip(job.cases, runs, strict=True):
        assert relative_error(run.output, _forward(case)) < TOLERANCE[dtype]
        want = oracle_gradients(case, run.records[0].weight, job.config)
        for name in ("x", "p"):
            assert relative_error(run.grads[name], want[name]) < max(1e-9, TOLERANCE[dtype]), (
                job.config,
                name,
            )
        for name in ("gate_up", "down"):
            total[name] = total.get(name, 0) + want[name]
    for name, want in total.items():
        got = torch.cat([run.grads[name] for run in runs])
        assert relative_error(got, want) < TOLERANCE[dtype], (job.config, name)


def _forward(case):
    with torch.no_grad():
        return experts(*case[:5])


def _run_policies(rank, world_size, jobs):
    lrmoe.state.link_costs = lambda *_: planners.Costs()  # so few pairs would never pay for weights
    done = []
    for job in jobs:
        state = LayerState(job.config)
        case = local(job.cases[rank], rank, world_size)
        for _ in range(3):  # policies that look at history need some
            run = run_layer(case, state=state, group=dist.group.WORLD)
        done.append(run)
    return done


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_policy_trains_exactly(world_size):
    # experts of rank 0 are hot
    hot = {"num_experts": 8, "top_k": 2, "used": (0, 1, 2, 7), "dtype": torch.float64}
    jobs = [
        make_job((40, 30, 0, 20)[:world_size], config, **hot)
        for placement in planners.PLACEMENTS
        for config in (
            Recalibration(rate=0.0, placement=placement, budget=Budget(slots=2)),
            Recalibration(rate=0.4, placement=placement, budget=Budget(slots=2)),
            Recalibration(rate=0.4, placement=placement, selection="top"),
            Recalibration(rate=0.4, placement=placement, quotas="makespan", draw="forward"),
        )
    ]
    ranks = run_ranks(_run_policies, world_size, jobs, timeout=200)
    replicas, faster = {}, {}
    for i, job in enumerate(jobs):
        runs = [done[i] for done in ranks]
        _assert_equal_to_the_oracle(job, [run._replace(records=run.records[-1:]) for run in runs])
        report = runs[0].report
        name = job.config.placement
        replicas[name] = replicas.get(name, 0) + report.replicas
        faster[name] = report.imbalance_fwd < report.imbalance_home
    assert replicas["fixed"] == 0
    # FasterMoE's cost model sees no gain at this size, and LLEP leaves it be below its minimum
    for name in ("recalibrated", "symi", "eplb", "laer"):
        assert replicas[name] > 0, name
    assert faster["recalibrated"]


def _two_layers(rank, world_size, job):
    """Two layers share the slots: the first one's weights are sent again in its backward pass."""
    lrmoe.state.plan = partial(random_plan, seed=1, moves=True)
    case = local(job.cases[rank], rank, world_size)
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
    other = [(1.5 * leaves[n]).detach().requires_grad_() for n in ("gate_up", "down")]
    hidden = leaves["x"]
    states = [LayerState(job.config, layer) for layer in (0, 1)]
    weights = [(leaves["gate_up"], leaves["down"]), tuple(other)]
    for state, (gate_up, down) in zip(states, weights, strict=True):
        hidden = hidden + experts(
            hidden, case.expert, leaves["p"], gate_up, down, group=dist.group.WORLD, state=state
        )
    hidden.backward(case.grad)
    out = experts(
        leaves["x"], case.expert, leaves["p"], *weights[0], group=dist.group.WORLD, state=states[0]
    )
    gradients = [leaves[n].grad for n in TENSORS] + [t.grad for t in other]
    states[0].finish_step()
    with pytest.raises(RuntimeError, match="parameters changed between the forward"):
        out.backward(case.grad)
    return gradients


def test_layers_share_the_slots_and_a_step_in_between_is_refused():
    job = make_job((11, 14), Recalibration(rate=0.0), num_experts=8, dtype=torch.float64, top_k=3)
    got = run_ranks(_two_layers, 2, job)
    case = union(job.cases)
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
    other = [(1.5 * leaves[n]).detach().requires_grad_() for n in ("gate_up", "down")]
    hidden = leaves["x"]
    for gate_up, down in [(leaves["gate_up"], leaves["down"]), other]:
        hidden = hidden + experts(hidden, case.expert, leaves["p"], gate_up, down)
    hidden.backward(case.grad)
    want = [leaves[n].grad for n in TENSORS] + [t.grad for t in other]
    for i, tensor in enumerate(want):
        parts = torch.cat([rank[i] for rank in got])
        assert relative_error(parts, tensor) < 1e-10, i


def _compared_slots(rank, world_size, job):
    """How often a replica's weights were used, and how often they were not bit-equal to home's."""
    lrmoe.state.plan = partial(random_plan, seed=1, moves=True)
    case = local(job.cases[rank], rank, world_size)
    all_experts = job.cases[0].gate_up.to(rank_device())
    whole = [all_experts, 1.5 * all_experts]  # by layer
    found = Counter()
    real_send = Slots.send

    def send(self, plan, exchange, home, needed_V, call):
        arriving = real_send(self, plan, exchange, home, needed_V, call)
        mine = slice(rank * len(home.gate_up_e2FD), (rank + 1) * len(home.gate_up_e2FD))
        (gate_up,) = (w for w in whole if torch.equal(w[mine], home.gate_up_e2FD))
        here = local_instances(plan, rank)
        experts_s = plan.instance_expert_V[here][len(home.gate_up_e2FD) :]
        needed_s = needed_V[here][len(home.gate_up_e2FD) :]

        class Compared(type(arriving)):
            def __call__(self):
                slots = super().__call__()
                for slot, (expert, needed) in enumerate(zip(experts_s, needed_s, strict=True)):
                    if needed:
                        equal = torch.equal(slots.gate_up_e2FD[slot], gate_up[expert])
                        found["equal" if equal else "different"] += 1
                return slots

        arriving.__class__ = Compared
        return arriving

    Slots.send = send
    hidden = case.x.clone().requires_grad_()
    states = [LayerState(job.config, layer) for layer in (0, 1)]
    for state, scale in zip(states, (1, 1.5), strict=True):
        weights = [(scale * t).requires_grad_() for t in (case.gate_up, case.down)]
        hidden = hidden + experts(
            hidden, case.expert, case.p, *weights, group=dist.group.WORLD, state=state
        )
    forward = found.total()
    hidden.backward(case.grad)
    return forward, found.total(), found["different"]


def test_replicas_are_bit_equal_to_home_in_both_passes_though_layers_share_the_slots():
    job = make_job((11, 14), Recalibration(rate=0.0), num_experts=8, dtype=torch.float32, top_k=3)
    ranks = run_ranks(_compared_slots, 2, job)
    assert sum(forward for forward, _, _ in ranks) > 0
    assert all(both > forward for forward, both, _ in ranks if forward)
    assert all(different == 0 for *_, different in ranks)


def _one_freezes(rank, world_size, job):
    case = local(job.cases[rank], rank, world_size)
    gate_up = case.gate_up.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=r"8 for gate_up_proj, 16 for down_proj: \[2\d, 1\d\]"):
        experts(
            case.x.requires_grad_(), case.expert, case.p, gate_up, case.down.requires_grad_(),
            group=dist.group.WORLD, state=LayerState(job.config),
        )  # fmt: skip
    return True


def test_ranks_must_agree_on_frozen_experts_where_there_may_be_replicas():
    config = Recalibration(rate=0.0, placement="recalibrated")
    job = make_job((11, 14), config, num_experts=8, dtype=torch.float32, top_k=3)
    assert run_ranks(_one_freezes, 2, job) == [True, True]


def _other_group_in_between(rank, world_size, job):
    """A call of one rank alone, between the two passes of a call of all."""
    lrmoe.state.plan = partial(random_plan, seed=1, moves=False)
    case = local(job.cases[rank], rank, world_size)
    state = LayerState(job.config)
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
    output = experts(
        leaves["x"], case.expert, leaves["p"], leaves["gate_up"], leaves["down"],
        group=dist.group.WORLD, state=state,
    )  # fmt: skip
    lrmoe.state.plan = _real_plan
    if rank == 0:
        alone = job.cases[0].on(rank_device())
        with torch.no_grad():
            limited = Recalibration(budget=Budget(memory=1 << 40))
            experts(*alone[:5], state=LayerState(limited))
    output.backward(case.grad)
    return {n: leaf.grad for n, leaf in leaves.items()}


def test_a_call_of_one_rank_leaves_the_slots_of_others_alone():
    job = make_job((11, 14), Recalibration(rate=0.0), num_experts=8, dtype=torch.float32, top_k=3)
    got = run_ranks(_other_group_in_between, 2, job)
    want = oracle_gradients(union(job.cases), torch.ones(25, 3), job.config)
    for name in ("gate_up", "down"):
        assert relative_error(torch.cat([g[name] for g in got]), want[name]) < 1e-5


def _without_replicas_in_between(rank, world_size, job):
    """Under a memory budget, a layer without replicas between the two passes of one with some."""
    case = local(job.cases[rank], rank, world_size)
    states = [LayerState(job.config, layer) for layer in (0, 1)]
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
    other = [(1.5 * leaves[n]).detach().requires_grad_() for n in ("gate_up", "down")]
    made_here = []

    def with_replicas(problem):
        plan = random_plan(problem, seed=14, moves=False)
        made_here.append(int((plan.is_replica & (plan.instance_rank_V == rank)).sum()))
        return plan

    plans = (with_replicas, _real_plan)
    hidden = leaves["x"]
    weights = ((leaves["gate_up"], leaves["down"]), tuple(other))
    for state, (gate_up, down), made in zip(states, weights, plans, strict=True):
        lrmoe.state.plan = made
        hidden = hidden + experts(
            hidden, case.expert, leaves["p"], gate_up, down, group=dist.group.WORLD, state=state
        )
    hidden.backward(case.grad)
    gradients = [leaves[n].grad for n in ("gate_up", "down")] + [t.grad for t in other]
    return gradients, made_here[0]


def test_ranks_agree_on_what_slots_hold_when_a_budget_shrinks_them():
    config = Recalibration(rate=0.0, budget=Budget(memory=1 << 40))
    shape = {"num_experts": 8, "dtype": torch.float32, "top_k": 3, "hidden": 8, "width": 4}
    job = make_job((11, 14), config, **shape)
    got = run_ranks(_without_replicas_in_between, 2, job)
    counts = [replicas for _, replicas in got]
    assert min(counts) == 0 < max(counts)  # or the slots of all ranks would shrink alike
    case = union(job.cases)
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
    other = [(1.5 * leaves[n]).detach().requires_grad_() for n in ("gate_up", "down")]
    hidden = leaves["x"]
    for gate_up, down in [(leaves["gate_up"], leaves["down"]), other]:
        hidden = hidden + experts(hidden, case.expert, leaves["p"], gate_up, down)
    hidden.backward(case.grad)
    want = [leaves["gate_up"].grad, leaves["down"].grad] + [t.grad for t in other]
    for i, tensor in enumerate(want):
        assert relative_error(torch.cat([g[i] for g, _ in got]), tensor) < 1e-5, i


def test_random_plans_are_legal():
    rng = np.random.default_rng(0)
    for seed in range(20):
        problem = planners.PlanProblem(
            counts_WE=rng.integers(0, 9, (4, 8)), rate=planners.problem.Fraction(1, 3)
        )
        random_plan(problem, seed, moves=True).check(problem)
