"""Hugging Face transformers: the layer under the names ``ep_implementation="lrmoe"`` (expert
parallelism with FSDP2) and ``experts_implementation="lrmoe"`` (one device).

No parameter is ever replaced: the experts module keeps its weights, and only its forward goes
through :func:`lrmoe.experts`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from lrmoe.config import Recalibration
from lrmoe.kernels.gated import Activation
from lrmoe.layer import experts
from lrmoe.planner import load_compiled
from lrmoe.report import LayerReport, PairRecord
from lrmoe.score import text_code
from lrmoe.state import LayerState
from lrmoe.step_memory import StepMemory

try:
    from transformers.distributed.expert_parallel import (
        EPImplementation,
        EPImplementationInterface,
    )
    from transformers.integrations import moe as hf_moe
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        "lrmoe's plug-in needs transformers >= 5.23, whose registry of expert-parallel "
        "implementations it uses; install it with: pip install 'lrmoe[transformers]'"
    ) from error

NAME = "lrmoe"
_STATE = "_lrmoe_state"
_creation_order = itertools.count()
_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
# States that no handle owns yet: they take any optimizer step of this process for theirs.
_unowned: weakref.WeakSet[LayerState] = weakref.WeakSet()
_step_hook: Any = None


def register_transformers() -> None:
    """Make ``"lrmoe"`` an ``ep_implementation`` and an ``experts_implementation``; idempotent."""
    global _step_hook
    EPImplementationInterface.register(NAME, ExpertParallel)
    ExpertsInterface.register(NAME, experts_forward)
    if _step_hook is None:
        _step_hook = register_optimizer_step_post_hook(_after_step)


class ExpertParallel(EPImplementation):
    """One experts module under expert parallelism; transformers builds one per MoE layer."""

    def __init__(self, experts_module: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts_module, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(
                f"tp_size={tp_mesh.size()} with ep_implementation='lrmoe': allowed is tp_size=1, "
                "where every rank holds its own tokens"
            )
        self.module = experts_module
        self.act = _activation(experts_module)
        _state_of(experts_module)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted expert outputs of this rank's batch, whose expert ids are over all ranks."""
        _refuse_wrappers(self.module)
        return experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.module.gate_up_proj,  # type: ignore[arg-type]
            self.module.down_proj,  # type: ignore[arg-type]
            act=self.act or "silu",
            group=self.ep_mesh.get_group(),
            state=_state_of(self.module),
        )


def experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """``experts_implementation="lrmoe"``: all experts on this device."""
    if getattr(self, "_is_expert_parallel", False):
        raise ValueError(
            "experts_implementation='lrmoe' inside another ep_implementation: the experts would "
            "see pairs without their routing weights; use "
            "DistributedConfig(ep_implementation='lrmoe')"
        )
    _refuse_wrappers(self)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj,  # type: ignore[arg-type]
        self.down_proj,  # type: ignore[arg-type]
        act=_activation(self) or "silu",
        state=_state_of(self),
    )


class Handle:
    """The MoE layers of one model: their settings, reports and counters."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], config: Recalibration) -> None:
        self._model = weakref.ref(model)
        self._modules = layers
        self.states = [_state_of(module) for module in layers]
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # What an MoE layer holds while others run: its weights, and as much for their gradient.
        step_memory = StepMemory(
            {layer: 2 * _local_bytes(module) for layer, module in enumerate(layers)}
        )
        for layer, state in enumerate(self.states):
            state.layer = state.tally.layer = layer
            state.step_memory = step_memory
            _unowned.discard(state)
        self.set(config)

    def set(self, config: Recalibration) -> None:
        """Change the settings of every layer, from its next call on.

        A placement that never ran on this machine is compiled now, which takes half a minute.
        """
        if config.is_planned:
            load_compiled(config.placement)
        self.config = config
        for state in self.states:
            state.config = config

    @property
    def is_timed(self) -> bool:
        """Whether the layers measure their times for the reports; two CUDA events per pass.

        Off until it is set; ``lrmoe.TrainerCallback`` and ``lrmoe train`` set it.
        """
        return all(state.is_timed for state in self.states)

    @is_timed.setter
    def is_timed(self, value: bool) -> None:
        for state in self.states:
            state.is_timed = value

    def reports(self) -> list[LayerReport]:
        """One report per MoE layer: totals over the micro-batches of the last finished step."""
        return [state.report() for state in self.states]

    def finish_step(self) -> None:
        """End an optimizer step; optimizers of the model's parameters do this themselves."""
        for state in self.states:
            state.finish_step()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw the samples the interrupted one would have drawn."""
        return {"layers": [state.state_dict() for state in self.states]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            ValueError: if the values are of a model with another number of MoE layers.
        """
        layers = values["layers"]
        if len(layers) != len(self.states):
            raise ValueError(
                f"the saved state has {len(layers)} MoE layers, this model {len(self.states)}"
            )
        for state, saved in zip(self.states, layers, strict=True):
            state.load_state_dict(saved)

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._optimizers:
            model = self._model()
            ours = {id(p) for p in model.parameters()} if model is not None else set()
            if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                return False
            self._optimizers.add(optimizer)
        return True


def _note_text(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Before a forward pass: leave its text with the layers that draw by it."""
    states = model.__dict__["_lrmoe_handle"].states
    if not any(state.config.strata == "text" for state in states):
        return
    ids = keywords.get("input_ids", arguments[0] if arguments else None)
    # What is no text is refused by the layer, where every rank hears of it.
    text_T = None
    if isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.ndim in (1, 2):
        text_T = text_code(ids)
    for state in states:
        state.text_T = text_T


def configure(model: nn.Module, config: Recalibration | dict[str, Any] | None = None) -> Handle:
    """Set how the MoE layers of a model run; call again to change it. Never replaces a parameter.

    A model on one device gets ``experts_implementation="lrmoe"``; under expert parallelism it must
    have been loaded with ``DistributedConfig(ep_implementation="lrmoe")``.

    Args:
        config: the settings; ``None`` takes ``model.config.lrmoe`` (a dict), or exact training.

    Raises:
        ValueError: for a model this cannot run in, saying what to do.
    """
    register_transformers()
    _refuse_wrapped_model(model)
    base: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT wraps
    layers = [m for m in model.modules() if _is_experts(m)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no experts module of transformers' layout (gate_up_proj, "
            "down_proj); supported are Qwen3-MoE, GLM-4-MoE and models with the same experts"
        )
    for module in layers:
        _activation(module)  # refuses experts it cannot compute
    is_parallel = [getattr(m, "_is_expert_parallel", False) for m in layers]
    if any(is_parallel):
        if any(not hasattr(m, _STATE) for m in layers):
            used = getattr(
                getattr(base.config, "distributed_config", None), "ep_implementation", "?"
            )
            raise ValueError(
                f"the model was loaded with ep_implementation={used!r}; load it with "
                "DistributedConfig(..., ep_implementation='lrmoe'), after "
                "lrmoe.register_transformers()"
            )
    else:
        base.set_experts_implementation(NAME)
    if config is None:
        config = _config_of(layers[0])
    elif isinstance(config, dict):
        config = Recalibration.from_dict(config)
    handle = Handle(model, layers, config)
    for other in [h for h in _handles if h._model() is model]:
        _handles.discard(other)  # the steps of a layer must be counted once
    _handles.add(handle)
    if _note_text not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_note_text, with_kwargs=True)
    # The model keeps its handle alive: layers step with the optimizer whoever else forgets it.
    model.__dict__["_lrmoe_handle"] = handle
    return handle


@contextmanager
def capture(model: nn.Module) -> Iterator[list[list[PairRecord]]]:
    """Record every pair of the backward passes inside: ``records[layer][micro-batch]``."""
    states = [_state_of(m) for m in model.modules() if hasattr(m, _STATE)]
    if not states:
        raise ValueError(
            "no layer of this model runs through lrmoe yet: call lrmoe.configure first"
        )
    records: list[list[PairRecord]] = [[] for _ in states]
    for state, record in zip(states, records, strict=True):
        state.captured = record
    try:
        yield records
    finally:
        for state in states:
            state.captured = None


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for handle in list(_handles):
        if handle._owns(optimizer):
            handle.finish_step()
    for state in list(_unowned):
        state.finish_step()


def _state_of(module: nn.Module) -> LayerState:
    state: LayerState | None = getattr(module, _STATE, None)
    if state is None:
        state = LayerState(_config_of(module), layer=next(_creation_order))
        setattr(module, _STATE, state)
        _unowned.add(state)
    return state


def _config_of(module: nn.Module) -> Recalibration:
    """The settings that travel in the model's config, or exact training."""
    values = getattr(getattr(module, "config", None), NAME, None)
    return Recalibration.from_dict(values) if values else Recalibration(rate=0.0)


def _local_bytes(module: nn.Module) -> int:
    """Bytes of the experts' weights on this rank, of a shard where they are sharded."""
    weights = [getattr(module, name) for name in ("gate_up_proj", "down_proj")]
    return sum((w.to_local() if hasattr(w, "to_local") else w).nbytes for w in weights)


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("gate_up_proj", "down_proj", "has_gate"))


def _activation(module: nn.Module) -> Activation | None:
    """The activation of an experts module, ``None`` for SiLU.

    Raises:
        ValueError: if the experts compute something else than ``down(act(gate) * up)``.
    """
    flags = {
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
        "has_post_expert_norm": False,
    }
    for name, needed in flags.items():
        if bool(getattr(module, name, needed)) != needed:
            raise ValueError(
                f"{type(module).__name__}.{name}={not needed}: lrmoe computes experts with "
                f"{name}={needed} only"
            )
    if getattr(type(module), "_apply_gate", None) is not hf_moe._default_apply_gate:
        raise ValueError(
            f"{type(module).__name__} has a gate of its own (_apply_gate): lrmoe computes "
            "act_fn(gate) * up only"
        )
    act: Activation = module.act_fn  # type: ignore[assignment]
    is_silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
    return None if is_silu or act is nn.functional.silu else act


def _refuse_wrapped_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel: load it with "
            "DistributedConfig(fsdp_size=..., ep_size=..., ep_implementation='lrmoe') instead"
        )
    if type(model).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}: load it with "
            "DistributedConfig(fsdp_size=..., ep_size=..., ep_implementation='lrmoe') instead"
        )
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    pp_size = getattr(distributed, "pp_size", 1)
    if pp_size > 1:
        raise ValueError(f"pp_size={pp_size}: pipeline parallelism is not supported; use pp_size=1")
    for module in model.modules():
        _refuse_wrappers(module)


def _refuse_wrappers(module: nn.Module) -> None:
    """Wrappers may come after :func:`configure`, so every call looks again."""
    if any(hasattr(p, "ds_id") for p in module.parameters(recurse=False)):
        raise ValueError(
            "the parameters are partitioned by DeepSpeed ZeRO-3: use DistributedConfig("
            "fsdp_size=..., ep_size=..., ep_implementation='lrmoe') without DeepSpeed instead"
        )
    active_ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if active_ddp is not None:
        raise ValueError(
            "the model runs inside DistributedDataParallel: load it with "
            "DistributedConfig(fsdp_size=..., ep_size=..., ep_implementation='lrmoe') instead"
        )
