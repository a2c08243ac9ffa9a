"""The comparison of sharded and reference gradients, proven on transformers' own all_to_all."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.models import (
    FAMILIES,
    gather_full_gradients,
    gradient_errors,
    load,
    make_batches,
    record_layer_input_gradients,
    reference_gradients,
    relative_error,
    save_tiny,
    sharded_gradients,
    tiny_model,
    worst,
)
from tests.ranks import run_ranks


def test_glm_bias_and_groups_change_the_choice_of_experts():
    chosen = {}
    hidden = torch.randn(1, 200, 32)
    for family in ("glm", "glm_groups"):
        gate = tiny_model(family).model.layers[1].mlp.gate
        biased = gate(hidden)[2].sort(1).values
        gate.e_score_correction_bias.zero_()
        assert (biased != gate(hidden)[2].sort(1).values).any(1).float().mean() > 0.2
        chosen[family] = biased
    assert (chosen["glm"] != chosen["glm_groups"]).any()
    assert torch.equal(chosen["glm_groups"][:, 0] // 4, chosen["glm_groups"][:, 1] // 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_keeps_every_tensor(tmp_path, family):
    model = tiny_model(family, seed=3)
    loaded = load(save_tiny(tmp_path, family, seed=3)).state_dict()
    state = model.state_dict()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    biases = [b for n, b in state.items() if n.endswith("e_score_correction_bias")]
    assert all(bias.abs().min() > 0 for bias in biases)
    assert len(biases) == (0 if family == "qwen3" else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_gradients_have_every_parameter_and_reach_every_expert(tmp_path, family):
    directory = save_tiny(tmp_path, family)
    reference = reference_gradients(directory, make_batches(4))
    assert reference.parameters.keys() == dict(load(directory).named_parameters()).keys()
    for name, grad in reference.parameters.items():
        assert grad.isfinite().all()
        rows = grad.flatten(1).norm(dim=1) if ".experts." in name else grad.norm()[None]
        assert (rows > 0).all(), name
    assert [[g.shape for g in layers] for layers in reference.layer_inputs] == [
        [(2, 12 - rank, 32)] * 2 for rank in range(4)
    ]
    assert worst(gradient_errors(reference, reference)) == (0, "loss")


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_layer_input_gradients_are_recorded_once(tmp_path, reentrant):
    directory = save_tiny(tmp_path, "qwen3")
    batches = make_batches(1)
    reference = reference_gradients(directory, batches)
    model = load(directory, experts_implementation="eager")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record_layer_input_gradients(model) as records:
        model(**batches[0]).loss.backward()
    assert [len(record) for record in records] == [1, 1]
    for record, grad in zip(records, reference.layer_inputs[0], strict=True):
        torch.testing.assert_close(record[0], grad)


def test_errors_see_one_wrong_expert_nan_and_missing_names(tmp_path):
    reference = reference_gradients(save_tiny(tmp_path, "qwen3"), make_batches(1))
    name = "model.layers.1.mlp.experts.down_proj"
    wrong = reference.parameters[name].clone()
    wrong[3] *= 1.01
    changed = reference._replace(parameters=reference.parameters | {name: wrong})
    error, where = worst(gradient_errors(changed, reference))
    assert where == f"{name}[3]"
    assert error == pytest.approx(0.01, rel=1e-3)
    wrong[3, 0, 0] = math.nan
    assert math.isnan(worst(gradient_errors(changed, reference))[0])
    with pytest.raises(ValueError, match="names differ"):
        gradient_errors(reference._replace(parameters={}), reference)
    assert relative_error(torch.ones(4), torch.zeros(4)) == 2


def _stock(rank, world_size, cases):
    """Return the worst error of each (directory, fsdp, ep, implementation, checkpointing) case."""
    results = []
    for directory, batches, reference, fsdp, ep, experts, checkpointing in cases:
        model = load(directory, fsdp, ep, "all_to_all", experts)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        errors = {}
        for step in range(2):  # the second finds memory that the first has used
            model.zero_grad()
            got = sharded_gradients(model, batches)
            errors |= {f"step {step}: {k}": v for k, v in gradient_errors(got, reference).items()}
        results.append(worst(errors))
    return results


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "ep_sizes", "names"),
    [
        (2, (2,), (*FAMILIES, "qwen3_aux")),
        pytest.param(4, (2, 4), ("qwen3", "glm"), marks=pytest.mark.slow),
    ],
)
def test_stock_all_to_all_equals_the_reference(tmp_path, world_size, ep_sizes, names):
    # the auxiliary loss is local to a rank's batch, in the reference too
    aux = {"qwen3_aux": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}
    batches = make_batches(world_size)
    cases = []
    for name in names:
        directory = save_tiny(tmp_path / name, name.removesuffix("_aux"), **aux.get(name, {}))
        reference = reference_gradients(directory, batches)
        cases += [
            (directory, batches, reference, world_size, ep, experts, checkpointing)
            for ep in ep_sizes
            for experts, checkpointing in (("eager", False), ("grouped_mm", True))
        ]
    for results in run_ranks(_stock, world_size, cases, timeout=120):
        for case, (error, name) in zip(cases, results, strict=True):
            assert error <= 1e-5, (name, error, case[3:])


def _lacks_a_gradient(rank, world_size):
    model = torch.nn.Linear(2, 2)
    if rank == 0:
        model.bias.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="only some ranks have a gradient for \\['bias'\\]"):
        gather_full_gradients(model)
    return dist.get_world_size()


@pytest.mark.dist
def test_a_gradient_that_one_rank_lacks_raises_on_all():
    assert run_ranks(_lacks_a_gradient, 2) == [2, 2]
