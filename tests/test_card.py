"""The layer on a pretend card: nothing mixes the host's tensors with the card's, results are the
CPU's, and copies and waits are those that docs/gpu.md allows."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

import lrmoe.state
from lrmoe import Budget, InfeasiblePlan, LayerState, Recalibration, experts, text_code
from lrmoe.exchange import PendingCounts
from lrmoe.upload import upload, upload_together
from tests.card import CARD, Card, pretended, put, run_threads
from tests.dist.test_layer import local, make_job
from tests.dist.test_replicas import CONFIGS, random_plan
from tests.errors import relative_error
from tests.layers import make_case, oracle_gradients, run_layer


def run_on_card(case, config, **options):
    with Card() as card:
        run = run_layer(type(case)(*map(put, case)), config, **options)
    return run, card


def assert_same(run, of_cpu):
    assert torch.equal(run.output.held, of_cpu.output)
    for name, grad in of_cpu.grads.items():
        found = run.grads[name]
        assert (found is None) == (grad is None)
        assert grad is None or torch.equal(found.held, grad), name


SETTINGS = [
    {"rate": 0.0},
    {"draw": "forward"},
    {"draw": "forward", "rows": "static", "save": "inputs"},
    {"strata": "neighbors", "router_grad": "completed"},
    {"strata": "text", "router_grad": "exact"},
    {"strata": "none"},
    {"selection": "top"},
    {"selection": "token_loss"},
    {"selection": "gradient", "scope": "local"},
    {"scope": "global", "save": "inputs"},
    {"rate": "auto"},
    {"rate": 0.0, "budget": Budget(memory=1 << 30)},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_computes_the_same(settings, dtype):
    config = Recalibration(**({"rate": 0.4} | settings))
    if config.budget.memory is not None and dtype == torch.float64:
        pytest.skip("no budgets for it")
    case = make_case(40, hidden=16, width=16, dtype=dtype)
    of_cpu = run_layer(case, config)
    with pretended():
        run, card = run_on_card(case, config)
    assert_same(run, of_cpu)
    assert card.launches


def _threads(config, cases, plan, *, on_card):
    """A layer call of every rank, and the cards."""

    def run(group):
        rank = group[1]
        case = local(cases[rank], rank, len(cases))
        if on_card:
            return run_on_card(case, config, group=group)
        return run_layer(case, config, group=group), None

    with pretended(), patch.object(lrmoe.state, "plan", plan):
        return run_threads(run, len(cases))


@pytest.mark.parametrize("moves", [None, False, True], ids=["home", "replicas", "moving"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_several_ranks_compute_the_same(config, moves):
    job = make_job((11, 14, 0), config, num_experts=9, dtype=torch.float32, top_k=3)
    for seed in range(2):
        plan = lrmoe.state.plan if moves is None else partial(random_plan, seed=seed, moves=moves)
        of_cpu = _threads(config, job.cases, plan, on_card=False)
        of_card = _threads(config, job.cases, plan, on_card=True)
        for (run, _), (want, _) in zip(of_card, of_cpu, strict=True):
            assert_same(run, want)


@pytest.mark.parametrize("tops", [(3, 1), (1, 3)])
def test_ranks_whose_tokens_have_different_numbers_of_experts(tops):
    """Sums of rows have room for the most of any rank; C0, against the loop over the pairs."""
    cases = [make_case(9, top_k=k, num_experts=4, seed=k) for k in tops]
    cases = [case._replace(gate_up=cases[0].gate_up, down=cases[0].down) for case in cases]
    done = _threads(Recalibration(rate=0.0), cases, lrmoe.state.plan, on_card=False)
    wants = [oracle_gradients(case, torch.ones_like(case.p)) for case in cases]
    for (run, _), want in zip(done, wants, strict=True):
        for name in ("x", "p"):
            assert relative_error(run.grads[name], want[name]) < 1e-10
    for name in ("gate_up", "down"):
        found = torch.cat([run.grads[name] for run, _ in done])
        assert relative_error(found, sum(want[name] for want in wants)) < 1e-10


def passes(case, config, group=None):
    """The card after the forward and after the backward pass."""
    state = LayerState(config)
    if config.strata == "text":
        state.text_T = text_code(torch.arange(len(case.x)) % 5)
    with Card() as forward:
        leaves = [put(t).requires_grad_() for t in (case.x, case.p, case.gate_up, case.down)]
        expert, grad = put(case.expert), put(case.grad)
        output = experts(leaves[0], expert, *leaves[1:], group=group, state=state)
    with Card() as backward:
        output.backward(grad)
    return forward, backward


@pytest.mark.parametrize("draw", ["backward", "forward"])
@pytest.mark.parametrize(
    ("rows", "scope"), [("exact", "local"), ("exact", "global"), ("static", "local")]
)
@pytest.mark.parametrize("strata", ["gradient", "neighbors"])
@pytest.mark.parametrize("rate", [0.0, 0.4, "auto"])
@pytest.mark.parametrize("save", ["activations", "inputs"])
@pytest.mark.parametrize("router_grad", ["kept", "completed", "exact"])
def test_one_rank_waits_for_the_counts_alone(draw, rows, scope, strata, rate, save, router_grad):
    case = make_case(9, hidden=16, width=16, dtype=torch.float32)
    config = Recalibration(
        rate=rate,
        draw=draw,
        rows=rows,
        scope=scope,
        strata=strata,
        save=save,
        router_grad=router_grad,
    )
    with pretended():
        forward, backward = passes(case, config)
    assert forward.reads == ["cudaEventSynchronize"]
    assert backward.reads == []


def drawn_in_place(problem):
    """A plan with replicas from which no kept pair moves away."""
    made = random_plan(problem, seed=0, moves=False)
    if made.quota_WE is None:
        return made
    backward_WV = np.zeros_like(made.forward_WV)
    for rank, quota_E in enumerate(made.quota_WE):
        for expert, quota in enumerate(quota_E):
            for v in np.flatnonzero(made.instance_expert_V == expert):
                taken = min(quota - backward_WV[rank, made.instance_expert_V == expert].sum(),
                            made.forward_WV[rank, v])  # fmt: skip
                backward_WV[rank, v] = taken
    assert (backward_WV <= made.forward_WV).all()
    return replace(made, backward_WV=backward_WV, capacity_V=backward_WV.sum(0))


# By the settings what docs/gpu.md says of several ranks: reads of the forward and of the backward
# pass, at home and with replicas from which no pair moves.
WAITS = [
    ({}, (1, 1), (2, 1)),
    ({"rows": "static"}, (1, 0), (2, 0)),
    ({"draw": "forward"}, (2, 0), (3, 0)),
    ({"draw": "forward", "rows": "static"}, (1, 0), (2, 0)),
    ({"scope": "global"}, (1, 2), None),
    ({"selection": "top"}, (1, 2), None),
]


@pytest.mark.parametrize(("settings", "home", "replicas"), WAITS, ids=str)
def test_several_ranks_wait_as_often_as_the_page_says(settings, home, replicas):
    config = Recalibration(rate=0.4, **settings)
    job = make_job((11, 14), config, num_experts=8, dtype=torch.float32, top_k=3)

    def run(group):
        return passes(local(job.cases[group[1]], group[1], 2), config, group)

    for plan, want in ((lrmoe.state.plan, home), (drawn_in_place, replicas)):
        if want is not None:
            with pretended(), patch.object(lrmoe.state, "plan", plan):
                for found in run_threads(run, 2):
                    assert tuple(len(card.reads) for card in found) == want


@pytest.mark.parametrize("router_grad", ["kept", "exact"])
def test_the_card_has_its_forward_work_before_the_host_waits(router_grad, monkeypatch):
    """The plan of one rank is made while the experts' products run."""
    case = make_case(9, hidden=16, width=16, dtype=torch.float32)
    before = []
    real = PendingCounts.wait

    def wait(counts):
        before.append(list(torch.utils._python_dispatch._get_current_dispatch_mode().launches))
        return real(counts)

    monkeypatch.setattr(PendingCounts, "wait", wait)
    with pretended():
        forward, _ = passes(case, Recalibration(rate=0.2, router_grad=router_grad))
    assert len(before) == 1
    products = [name for name in forward.launches if "grouped_mm" in name]
    assert len(products) == 2
    assert [name for name in before[0] if "grouped_mm" in name] == products
    if router_grad == "kept":
        assert before[0][-1] == "lrmoe::sum_rows"


def test_a_limit_that_cannot_be_kept_is_found_before_the_products():
    case = make_case(9, hidden=16, width=16, dtype=torch.float32)
    state = LayerState(Recalibration(rate=0.2, budget=Budget(forward_pairs=3)))
    with pretended(), Card() as card:
        arguments = [put(t) for t in case[:-1]]
        arguments[0].requires_grad_()
        with pytest.raises(InfeasiblePlan):
            experts(*arguments, state=state)
    assert not any("copy_rows" in name for name in card.launches)


# A card waits for a host that launches many small kernels.
LAUNCHES = [
    (1, "gradient", 14, 29),
    (1, "neighbors", 14, 34),
    (2, "gradient", 36, 70),
]


@pytest.mark.parametrize(("num_ranks", "strata", "forward", "backward"), LAUNCHES)
def test_a_pass_launches_few_operators(num_ranks, strata, forward, backward):
    config = Recalibration(rate=0.2, strata=strata)
    job = make_job((40, 40)[:num_ranks], config, dtype=torch.float32, hidden=16, width=16)

    def run(group):
        case = local(job.cases[group[1]], group[1], num_ranks)
        passes(case, config, group)  # what is made once for all calls is there then
        return passes(case, config, group)

    with pretended():
        for found in run_threads(run, num_ranks):
            launched = [card.launches for card in found]
            assert tuple(map(len, launched)) == (forward, backward), launched


@pytest.mark.parametrize("is_cuda", [True, False])
def test_counts_are_not_read_before_they_are_there(is_cuda):
    """Only a CUDA event says when a copy that nothing waited for has arrived."""

    class Counts:
        device = CARD

        def to(self, device, *, non_blocking=False):
            assert device == "cpu"
            assert non_blocking == self.is_cuda
            return torch.tensor([3])

    Counts.is_cuda = is_cuda
    with pretended(), Card():
        assert PendingCounts(Counts()).wait().tolist() == [3]


@pytest.mark.parametrize(("num_bytes", "is_pinned"), [(1 << 16, False), ((1 << 16) + 8, True)])
def test_large_arrays_go_through_pinned_memory(num_bytes, is_pinned, monkeypatch):
    pinned, sent = [], []

    def pin_memory(tensor):
        pinned.append(tensor)
        return tensor.clone()

    def to(tensor, device, *, non_blocking):
        assert non_blocking
        sent.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    array = np.arange(num_bytes // 8)
    found = upload(array, torch.device("cuda"))
    assert np.array_equal(found.numpy(), array)
    assert (len(pinned), len(sent)) == (int(is_pinned), 1)
    assert np.shares_memory(sent[0].numpy(), array) != is_pinned


@pytest.mark.parametrize("lengths", [(3, 5, 1), (0, 2, 0), (0, 0, 0)])
def test_arrays_that_are_uploaded_together_arrive(lengths):
    arrays = [
        np.arange(n, dtype=dtype)[::-1]
        for n, dtype in zip(lengths, (np.int32, np.int64, np.float32), strict=True)
    ]
    with pretended(), Card() as card:
        there = upload_together(CARD, *arrays)
    assert len(card.uploads) == 1
    for found, array in zip(there, arrays, strict=True):
        assert found.held.numpy().dtype == array.dtype
        assert np.array_equal(found.held.numpy(), array)


def test_what_waits_and_what_mixes_is_seen():
    with Card() as card:
        x = put(torch.tensor([1.0, 0.0]))
        _ = x[x > 0], x.nonzero(), x.sum().item(), x.long().bincount(), x.cpu()
        assert len(card.reads) == 5
        with pytest.raises(AssertionError, match="mixes host and card"):
            x + torch.ones(2)
        with pytest.raises(AssertionError, match="mixes host and card"):
            x[torch.tensor([0])]
        assert (x + torch.tensor(1.0)).held.tolist() == [2, 1]
        y = x.to("cpu").to(CARD)
        assert card.uploads == [8]
    with pytest.raises(AssertionError, match="without the card"):
        _ = y + y


def test_a_copy_that_nothing_waited_for_is_late():
    with pretended(), Card() as card:
        event, x = torch.cuda.Event(), put(torch.tensor([1, 0]))
        event.record(None)
        late = x.to("cpu", non_blocking=True)
        event.synchronize()  # which was recorded before the copy
        assert late.tolist() != [1, 0]
        event.record(None)
        event.synchronize()
        assert late.tolist() == [1, 0]
    assert card.reads == ["cudaEventSynchronize"] * 2
