"""No number before the gradients agree: C0 of this package against Hugging Face's layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lrmoe.bench.arms import Arm, Problem, hf_arm, lrmoe_arm
from lrmoe.bench.settings import LayerBench

# Largest relative error, norm of difference over norm of reference, that a gradient may have.
# bf16: both implementations are held against Hugging Face's in float32 on the same bf16 numbers,
# since two right ones differ from each other by their rounding.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Outcome of the gate for one workload and dtype, the same on every rank."""

    error: dict[tuple[str, str | None, float], float]
    """By implementation, placement and rate: distance from the exact gradient, of the worst
    parameter on the worst rank. Beyond C0 it holds what the dropped pairs would have added."""
    failure: str | None
    """A sentence that names the parameter and its error; ``None`` if all exact ones agree."""


def check_gradients(
    bench: LayerBench, problem: Problem, workload: str, dtype: str, mesh: DeviceMesh
) -> Agreement:
    """One forward and backward pass of every arm, compared on every rank. Collective."""
    reference_problem = problem if dtype == "fp32" else problem.widened()
    reference = gradients(reference_problem, hf_arm(reference_problem, mesh))
    arms = [hf_arm(problem, mesh)]
    for placement in bench.placements:
        for rate in sorted({0.0, *bench.rates}):
            arms.append(lrmoe_arm(problem, bench, placement, rate, mesh))
    errors = {}
    for arm in arms:
        found = gradients(problem, arm)
        errors[arm.key] = {name: relative_error(found[name], reference[name]) for name in found}
    problem.clear()

    everywhere = [errors] * dist.get_world_size()
    dist.all_gather_object(everywhere, errors)
    worst, failure = {}, None
    for key in errors:
        error, parameter, rank = max(
            (value, name, rank)
            for rank, of_rank in enumerate(everywhere)
            for name, value in of_rank[key].items()
        )
        worst[key] = error
        impl, place, rate = key
        if failure is None and rate == 0.0 and error > TOLERANCE[dtype]:
            whose = f"{impl} ({place}) on rank {rank}"
            failure = (
                f"{workload} {dtype}: the gradient of {parameter} of {whose} differs "
                f"from {'' if dtype == 'fp32' else 'the float32 result of '}hf_all_to_all by "
                f"{error:.2e} (allowed: {TOLERANCE[dtype]:g})"
            )
    return Agreement(error=worst, failure=failure)


def gradients(problem: Problem, arm: Arm) -> dict[str, torch.Tensor]:
    """The gradients that one forward and backward pass leaves."""
    problem.clear()
    arm.backward(arm.forward())
    found = {}
    for name, leaf in problem.leaves().items():
        assert leaf.grad is not None, name
        found[name] = leaf.grad
    return found


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """``|found - reference| / |reference|``; infinite if NaN, or if only the reference is zero."""
    wide, reference = found.detach().double(), reference.detach().double()
    difference, norm = float((wide - reference).norm()), float(reference.norm())
    if difference == 0.0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf
