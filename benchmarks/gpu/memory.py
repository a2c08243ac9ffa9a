"""Peak memory of a layer call by the allocator, beside what the memory model says.

The model (``src/lrmoe/planner/memory.py``) counts the home weights, and neither the layer's output
nor what was there before; so the peak is taken less the output and with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import lrmoe
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.problems import LayerSize, Problem, layer_sizes, make_problem

SETTINGS: tuple[dict[str, Any], ...] = (
    {"rate": 0.0},
    {"rate": 0.5},
    {"rate": 0.5, "draw": "forward"},
    {"rate": 0.0, "save": "inputs"},
    {"rate": 0.5, "save": "inputs"},
    {"rate": 0.5, "draw": "forward", "save": "inputs"},
)


def measure(part: Part, size: LayerSize) -> None:
    """A row for every setting."""
    problem = make_problem(size, part.device)
    for setting in SETTINGS:
        config = lrmoe.Recalibration(**setting)
        _run(problem, lrmoe.LayerState(config))  # workspaces that stay, compiled code
        state = lrmoe.LayerState(config)
        peak = None
        if part.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            output_bytes = _run(problem, state)
            peak = torch.cuda.max_memory_allocated() - before - output_bytes
            peak += problem.gate_up_e2FD.nbytes + problem.down_eDF.nbytes
        else:
            _run(problem, state)
        report = state.report()
        model, tensors = (sum(m.values()) for m in (report.memory_model, report.memory))
        part.write(
            "memory",
            impl="lrmoe",
            **size.dims(),
            rate=config.rate,
            draw=config.draw,
            save=config.save,
            dtype="bf16",
            allocator_bytes=peak,
            tensor_bytes=tensors,
            model_bytes=model,
            ratio_to_model=None if peak is None else peak / model,
            model_items=report.memory_model,
        )


def _run(problem: Problem, state: lrmoe.LayerState) -> int:
    """One call, both passes; the bytes of its output."""
    problem.clear()
    output_TD = lrmoe.experts(*problem.arguments(), state=state)
    output_TD.backward(problem.grad_TD)
    problem.clear()
    return output_TD.nbytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Both models."""
    part = start("Peak memory beside the memory model.", arguments)
    for size in layer_sizes(part):
        measure(part, size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
