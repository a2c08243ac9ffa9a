"""A whole Hugging Face model whose experts are the slow oracle, with given weights of pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from lrmoe import PairRecord
from tests import oracle
from tests.models import Gradients, load, record_layer_input_gradients


def replay_gradients(
    model_dir: str, batches: Sequence[dict[str, Tensor]], records: Sequence[Sequence[PairRecord]]
) -> Gradients:
    """Return the gradients of the mean loss over the ranks' batches, in one process.

    Every pair's gradient is scaled by its weight in ``records[rank][layer]`` (0: dropped): the
    specification's oracle, inside the model's own graph, with ``router_grad="kept"``.
    """
    current: list[PairRecord] = []

    def experts(self: nn.Module, x: Tensor, expert: Tensor, p: Tensor) -> Tensor:
        record = current.pop(0)
        assert torch.equal(record.expert, expert)
        weight = record.weight.to(p.dtype)
        return oracle.selected_moe(
            x, expert, p, self.gate_up_proj, self.down_proj, weight, self.act_fn
        )

    ExpertsInterface.register("replay", experts)
    model = load(model_dir, experts_implementation="replay")
    losses, layer_inputs = [], []
    for batch, layers in zip(batches, records, strict=True):
        current[:] = layers
        with record_layer_input_gradients(model) as inputs:
            loss = model(**batch).loss
            loss.backward()
        losses.append(loss.item())
        layer_inputs.append([grads[-1] for grads in inputs])
    parameters = {n: p.grad / len(batches) for n, p in model.named_parameters()}
    return Gradients(sum(losses) / len(losses), parameters, layer_inputs)
