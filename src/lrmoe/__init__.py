"""LRMoE: Mixture-of-Experts training whose backward pass is a quantity that can be planned.

Importing this runs nothing and needs no GPU and no transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrmoe.clip import clip_grad_norm_
from lrmoe.config import AutoRate, Budget, Recalibration
from lrmoe.layer import experts
from lrmoe.planner import InfeasiblePlan, Plan, PlanProblem, plan
from lrmoe.report import LayerReport, PairRecord
from lrmoe.score import text_code
from lrmoe.state import LayerState, token_losses

if TYPE_CHECKING:
    from lrmoe.integrations.callback import TrainerCallback
    from lrmoe.integrations.transformers import capture, configure, register_transformers

__version__ = "0.1.0"

_NEEDS_TRANSFORMERS = {
    "TrainerCallback": "lrmoe.integrations.callback",
    "capture": "lrmoe.integrations.transformers",
    "configure": "lrmoe.integrations.transformers",
    "register_transformers": "lrmoe.integrations.transformers",
}


def __getattr__(name: str) -> Any:
    """Names of the transformers plug-in, imported when first used."""
    if name not in _NEEDS_TRANSFORMERS:
        raise AttributeError(f"module 'lrmoe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEEDS_TRANSFORMERS[name]), name)


__all__ = [
    "AutoRate",
    "Budget",
    "InfeasiblePlan",
    "LayerReport",
    "LayerState",
    "PairRecord",
    "Plan",
    "PlanProblem",
    "Recalibration",
    "TrainerCallback",
    "capture",
    "clip_grad_norm_",
    "configure",
    "experts",
    "plan",
    "register_transformers",
    "text_code",
    "token_losses",
]
