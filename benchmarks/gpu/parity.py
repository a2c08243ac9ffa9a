"""The device's numbers against references: float32 against float64, bf16 against float32.

In float32 the layer's output and every gradient are compared with the loop in float64 on the CPU,
at C0 and with pairs dropped: the loop then weights each pair's gradient as the layer says it did.
In bf16, at a model's shapes, the layer's error stands beside that of transformers' own experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import lrmoe
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.peers import Forward, make_peers
from benchmarks.gpu.problems import LayerSize, Problem, layer_sizes, make_problem
from benchmarks.gpu.reference import passes, worst_error

BAR = 1e-5  # of float32
SETTINGS: tuple[dict[str, Any], ...] = (
    {"rate": 0.0},
    {"rate": 0.2},
    {"rate": 0.5},
    {"rate": 0.5, "selection": "top"},
    {"rate": 0.5, "draw": "forward"},
    {"rate": 0.5, "draw": "forward", "save": "inputs", "rows": "static"},
)
_SIZE = LayerSize(name="parity", hidden=512, ffn=256, experts=32, top_k=4, tokens=1024)
_BF16_TOKENS = 2048


def in_float32(part: Part) -> bool:
    """A row for every setting; whether all are within the bar."""
    size = replace(_SIZE, hidden=64, ffn=32, tokens=96) if part.is_small else _SIZE
    problem = make_problem(size, part.device, torch.float32)
    exact = problem.to(torch.float64, torch.device("cpu"))
    worst = 0.0
    for setting in SETTINGS:
        config = lrmoe.Recalibration(**setting)
        found, weight_TK = _layer_passes(problem, config)
        error, tensor = worst_error(found, passes(exact, weight_TK))
        worst = max(worst, error)
        part.write(
            "parity",
            impl="lrmoe",
            **size.dims(),
            rate=config.rate,
            selection=config.selection,
            draw=config.draw,
            save=config.save,
            rows=config.rows,
            dtype="fp32",
            reference="loop in float64 on the CPU",
            gradient_error=error,
            worst_tensor=tensor,
            bar=BAR,
        )
    return worst <= BAR


def _layer_passes(
    problem: Problem, config: lrmoe.Recalibration
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Output and gradients of the layer, and every pair's weight in its backward pass (CPU)."""
    state = lrmoe.LayerState(config)
    state.captured = []
    problem.clear()
    output_TD = lrmoe.experts(*problem.arguments(), state=state)
    output_TD.backward(problem.grad_TD)
    found = {"output": output_TD.detach(), **problem.gradients()}
    problem.clear()
    return found, state.captured[0].weight.cpu().double()


def in_bf16(part: Part, size: LayerSize) -> None:
    """A row for this layer, for transformers' experts and for the loop, all exact."""
    if not part.is_small:
        size = replace(size, tokens=_BF16_TOKENS)
    problem = make_problem(size, part.device)
    peers, missing = make_peers(problem)
    implementations: dict[str, Forward] = {
        "lrmoe": lambda: lrmoe.experts(*problem.arguments()),
        **peers,
    }
    reference = passes(problem.to(torch.float32))
    common = {**size.dims(), "rate": 0.0, "dtype": "bf16", "reference": "loop in float32"}
    for impl, forward in implementations.items():
        problem.clear()
        output_TD = forward()
        output_TD.backward(problem.grad_TD)
        found = {"output": output_TD.detach(), **problem.gradients()}
        error, tensor = worst_error(found, reference)
        part.write("parity", impl=impl, **common, gradient_error=error, worst_tensor=tensor)
    if "hf_grouped_mm" in missing:
        part.write("parity", impl="hf_grouped_mm", **common, missing=missing["hf_grouped_mm"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Both dtypes; 1 if a float32 result is wrong."""
    part = start("Results of the device against references.", arguments)
    is_right = in_float32(part)
    in_bf16(part, layer_sizes(part)[0])
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
