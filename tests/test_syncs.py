"""How often a layer call makes the host wait for the device, counted on the CPU.

Operators whose result has a size or a value that the host must read are counted as they are
dispatched, and gathered counts where they are read; ``benchmarks/gpu/syncs.py`` counts on a card.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lrmoe import LayerState, Recalibration, experts
from lrmoe.exchange import PendingCounts
from tests.layers import make_case

# What waits on CUDA.
SYNCING = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::bincount",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::histc",
)


class Syncs(TorchDispatchMode):
    """Names of the operators inside that wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name().split(".")[0]
        keywords = keywords or {}
        is_repeat = name == "aten::repeat_interleave"
        if is_repeat and keywords.get("output_size") is None:
            self.found.append(name)
        if name in SYNCING:
            self.found.append(name)
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            indices = arguments[1]
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.found.append(f"{name} with a mask")
        return function(*arguments, **keywords)


@pytest.fixture
def gathered(monkeypatch):
    """Calls that bring counts to the host."""
    real, calls = PendingCounts.wait, []
    monkeypatch.setattr(PendingCounts, "wait", lambda self: calls.append(1) or real(self))
    return calls


@pytest.mark.parametrize("draw", ["backward", "forward"])
@pytest.mark.parametrize(
    ("rows", "scope"), [("exact", "local"), ("exact", "global"), ("static", "local")]
)
@pytest.mark.parametrize("strata", ["gradient", "neighbors"])
@pytest.mark.parametrize("rate", [0.0, 0.4, "auto"])
@pytest.mark.parametrize("save", ["activations", "inputs"])
@pytest.mark.parametrize("router_grad", ["kept", "completed", "exact"])
def test_one_rank_waits_for_the_counts_alone(
    draw, rows, scope, strata, rate, save, router_grad, gathered
):
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
    leaves = [t.requires_grad_() for t in (case.x, case.p, case.gate_up, case.down)]
    state = LayerState(config)
    with Syncs() as forward:
        output = experts(leaves[0], case.expert, *leaves[1:], state=state)
    assert forward.found == []
    assert len(gathered) == 1
    with Syncs() as backward:
        output.backward(case.grad)
    # "call_id" is on the host: reading it waits for nothing.
    assert backward.found == ["aten::_local_scalar_dense"]
    assert len(gathered) == 1


@pytest.mark.parametrize("router_grad", ["kept", "exact"])
def test_the_device_has_its_forward_work_before_the_host_waits(router_grad, monkeypatch):
    """The plan of one rank is made while the experts' products run."""
    case = make_case(9, hidden=16, width=16, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (case.x, case.p, case.gate_up, case.down)]
    real, before = PendingCounts.wait, []
    launches = Launches()
    monkeypatch.setattr(
        PendingCounts, "wait", lambda self: before.extend(launches.found) or real(self)
    )
    with launches:
        experts(
            leaves[0],
            case.expert,
            *leaves[1:],
            state=LayerState(Recalibration(rate=0.2, router_grad=router_grad)),
        )
    products = [name for name in launches.found if "grouped_mm" in name]
    assert len(products) == 2
    assert [name for name in before if "grouped_mm" in name] == products
    if router_grad == "kept":
        assert before[-1] == "lrmoe::sum_rows"


def test_what_waits_is_seen():
    x = torch.tensor([1.0, 0.0])
    with Syncs() as seen:
        _ = x[x > 0], x.nonzero(), x.sum().item(), x.long().bincount()
    assert len(seen.found) == 4


class Launches(TorchDispatchMode):
    """Names of the operators inside that do something: neither views nor empty tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        is_empty = "empty" in function.name() or function.name() == "aten::lift_fresh"
        if not function.is_view and not is_empty:
            self.found.append(function.name())
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("strata", "most"), [("gradient", 28), ("neighbors", 31)])
def test_a_backward_pass_dispatches_few_operators(strata, most):
    """A card waits for a host that launches many small kernels."""
    case = make_case(40, hidden=16, width=16, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (case.x, case.p, case.gate_up, case.down)]
    state = LayerState(Recalibration(rate=0.2, strata=strata))
    output = experts(leaves[0], case.expert, *leaves[1:], state=state)
    with Launches() as backward:
        output.backward(case.grad)
    assert 0 < len(backward.found) <= most, backward.found
