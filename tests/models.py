"""Tiny Qwen3-MoE and GLM-4-MoE models, and gradients to compare across process layouts.

The reference is one process with the model's own eager experts, float32: one forward pass per
rank's batch, the mean of the losses. A forward pass per batch also makes Qwen3's auxiliary loss,
which is local to a rank's batch, comparable when a test switches it on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from tests.errors import relative_error

VOCABULARY = 64
FAMILIES = ("qwen3", "glm", "glm_groups")

# Larger than the default 0.02: experts that matter, and routing scores far from ties, where
# rounding would send a token elsewhere.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "output_router_logits": False,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_config(family: str, **overrides: Any) -> Qwen3MoeConfig | Glm4MoeConfig:
    """Return the config of a two-MoE-layer model with 8 experts, top-2.

    Args:
        family: "qwen3"; "glm" (a dense layer first, a shared expert, correction bias); or
            "glm_groups" (the same, and only one of two expert groups per token).
    """
    if family == "qwen3":
        own = {"num_experts": 8, "num_hidden_layers": 2, "norm_topk_prob": True}
        return Qwen3MoeConfig(**(_COMMON | own | overrides))
    if family in ("glm", "glm_groups"):
        own = {
            "n_routed_experts": 8,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 2 if family == "glm_groups" else 1,
            "topk_group": 1,
            "num_mtp_layers": 0,
            "attention_bias": True,
            "use_qk_norm": False,
        }
        return Glm4MoeConfig(**(_COMMON | own | overrides))
    raise ValueError(f"family is {family!r}, expected one of {FAMILIES}")


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """Return the model with seeded weights; GLM's correction biases differ from zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.1)  # more would starve experts
    return model


def save_tiny(
    directory: str | Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> str:
    """Save the tiny model for ``from_pretrained`` and return its directory."""
    tiny_model(family, seed, dtype, **overrides).save_pretrained(directory)
    return str(directory)


def make_batches(
    num_ranks: int, seed: int = 0, batch_size: int = 2, length: int = 12
) -> list[dict[str, Tensor]]:
    """Return one batch per rank, all different: rank r has r tokens less a row, some unlabelled."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rank in range(num_ranks):
        shape = (batch_size, length - rank)
        input_ids = torch.randint(VOCABULARY, shape, generator=generator)
        labels = input_ids.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)
        batches.append({"input_ids": input_ids, "labels": labels})
    return batches


def load(
    model_dir: str,
    fsdp_size: int = 1,
    ep_size: int = 1,
    ep_implementation: str = "auto",
    experts_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load a saved model in training mode, sharded over the ranks where a size is above one."""
    kwargs: dict[str, Any] = {"dtype": dtype}
    if experts_implementation is not None:
        kwargs["experts_implementation"] = experts_implementation
    if fsdp_size * ep_size > 1:
        kwargs["distributed_config"] = DistributedConfig(
            fsdp_size=fsdp_size, ep_size=ep_size, ep_implementation=ep_implementation
        )
    return AutoModelForCausalLM.from_pretrained(model_dir, **kwargs).train()


class Gradients(NamedTuple):
    """One step's loss (mean over the ranks' batches) and gradients."""

    loss: float
    parameters: dict[str, Tensor]  # full tensors by full name, of the mean loss
    layer_inputs: list[list[Tensor]]  # [rank][MoE layer]: of that rank's own loss, not the mean


@contextmanager
def record_layer_input_gradients(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Yield a list that backward passes fill: [MoE layer][backward pass], router path included.

    Works under both kinds of activation checkpointing: a tensor that takes part in the backward
    pass fires its hook, the other forward's does not.
    """
    blocks = [m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
    records: list[list[Tensor]] = [[] for _ in blocks]

    def watch(layer: int, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(lambda grad: records[layer].append(grad.detach().clone()))

    hooks = [
        block.register_forward_pre_hook(lambda _, args, layer=layer: watch(layer, args[0]))
        for layer, block in enumerate(blocks)
    ]
    yield records
    for hook in hooks:
        hook.remove()


def reference_gradients(model_dir: str, batches: Sequence[dict[str, Tensor]]) -> Gradients:
    """Return the step's gradients, computed in this process by the model's own eager experts."""
    model = load(model_dir, experts_implementation="eager")
    losses, layer_inputs = [], []
    for batch in batches:
        with record_layer_input_gradients(model) as records:
            loss = model(**batch).loss
            loss.backward()
        losses.append(loss.item())
        layer_inputs.append([record[-1] for record in records])
    grads = {
        name: parameter.grad / len(batches)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Gradients(sum(losses) / len(losses), grads, layer_inputs)


def sharded_gradients(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> Gradients:
    """Return the same of a sharded model, on every rank; rank r computes with ``batches[r]``.

    Leaves the gradients on the model. Without tensor parallelism every rank has its own batch.
    """
    with record_layer_input_gradients(model) as records:
        loss = model(**batches[dist.get_rank()]).loss
        loss.backward()
    losses = [torch.zeros_like(loss.detach()) for _ in batches]
    dist.all_gather(losses, loss.detach())
    layer_inputs: list = [None] * len(batches)
    dist.all_gather_object(layer_inputs, [record[-1] for record in records])
    return Gradients(torch.stack(losses).mean().item(), gather_full_gradients(model), layer_inputs)


def gather_full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return every existing gradient as a full plain tensor, by name, on every rank.

    Collective. A plain tensor is taken as it is: the same on every rank, or local on purpose.
    Each DTensor is gathered over its own mesh, dense and expert parameters alike.
    """
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    names: list = [sorted(grads)]
    if dist.is_initialized():
        # a name that one rank lacks would leave the others waiting in its gather
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, sorted(grads))
    different = set.union(*map(set, names)) - set.intersection(*map(set, names))
    if different:
        raise RuntimeError(f"only some ranks have a gradient for {sorted(different)}")
    return {name: _full(grads[name]) for name in names[0]}


def _full(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def gradient_errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """Return the relative error of the loss, of each parameter and of each MoE layer's input.

    Expert tensors also count expert by expert (``name[e]``): a wrong small expert must not hide
    behind large ones. Missing and additional parameters are an error.
    """
    if got.parameters.keys() != want.parameters.keys():
        raise ValueError(f"names differ: {got.parameters.keys() ^ want.parameters.keys()}")
    errors = {"loss": abs(got.loss - want.loss) / abs(want.loss)}
    for name, grad in want.parameters.items():
        errors[name] = relative_error(got.parameters[name], grad)
        if ".experts." in name:
            pairs = zip(got.parameters[name], grad, strict=True)
            errors |= {f"{name}[{e}]": relative_error(a, b) for e, (a, b) in enumerate(pairs)}
    for rank, layers in enumerate(want.layer_inputs):
        for layer, grad in enumerate(layers):
            name = f"input of MoE layer {layer}, rank {rank}"
            errors[name] = relative_error(got.layer_inputs[rank][layer], grad)
    return errors


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """Return the largest error and its name; NaN counts as the largest."""
    name = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return errors[name], name
