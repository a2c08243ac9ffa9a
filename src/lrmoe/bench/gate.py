"""No number before the gradients agree: C0 of this package against Hugging Face's layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lrmoe.bench.arms import Arm, Problem, hf_arm, lrmoe_arm
from lrmoe.bench.settings import LayerBench

# Largest relative error, norm of difference over norm of reference, that a gradient may have.
# bf16: both implementations are held against Hugging Face's in float32 on the same bf16 numbers,
# since two correct ones differ from each other by their rounding.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Outcome of the gate for one workload and dtype, the same on every rank."""

    error: dict[str, float]
    """By implementation, of the worst parameter on the worst rank."""
    failure: str | None
    """A sentence that names the parameter and its error; ``None`` if all agree."""


def check_gradients(
    bench: LayerBench, problem: Problem, workload: str, dtype: str, mesh: DeviceMesh
) -> Agreement:
    """One exact forward and backward pass of each, compared on every rank. Collective."""
    reference_problem = problem if dtype == "fp32" else problem.widened()
    reference = gradients(reference_problem, hf_arm(reference_problem, mesh))
    errors = {}
    for arm in (lrmoe_arm(problem, bench, 0.0, mesh), hf_arm(problem, mesh)):
        found = reference if _is_reference(arm, dtype) else gradients(problem, arm)
        errors[arm.impl] = {name: relative_error(found[name], reference[name]) for name in found}
    problem.clear()

    everywhere: list[dict[str, dict[str, float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, errors)
    worst: dict[str, float] = {}
    failure = None
    for impl in errors:
        # NaN compares false with everything: it must come out as the largest.
        error, parameter, rank = max(
            (value if value == value else float("inf"), name, rank)
            for rank, of_rank in enumerate(everywhere)
            for name, value in of_rank[impl].items()
        )
        worst[impl] = error
        if failure is None and error > TOLERANCE[dtype]:
            against = "Hugging Face's" + ("" if dtype == "fp32" else " in float32")
            failure = (
                f"{workload} {dtype}: the gradient of {parameter} of {impl} on rank {rank} differs "
                f"from {against} by {error:.2e} (allowed: {TOLERANCE[dtype]:g})"
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


def distance(bench: LayerBench, problem: Problem, arm: Arm) -> None:
    """Placeholder."""


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """``|found - reference| / |reference|``; where the reference is zero, 0 only for zero."""
    wide, reference = found.detach().double(), reference.detach().double()
    difference = float((wide - reference).norm())
    if difference == 0.0:
        return 0.0
    return difference / float(reference.norm()) if bool(reference.any()) else float("inf")


def _is_reference(arm: Arm, dtype: str) -> bool:
    return arm.impl == "hf_all_to_all" and dtype == "fp32"
