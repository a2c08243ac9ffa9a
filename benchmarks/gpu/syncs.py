"""Device syncs of a layer call: how often the host waits, and where.

Counted are the warnings of ``torch.cuda.set_sync_debug_mode``, which PyTorch's own synchronising
operations give, and the waits for counts on their way to the host, which are waits for an event.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

import lrmoe
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.problems import Problem, layer_sizes, make_problem
from lrmoe.exchange import PendingCounts
from lrmoe.planner.problem import Int

_WARNING = "synchronizing CUDA operation"
# By draw and rows, forward and backward pass: what the method allows on one rank (docs/gpu.md).
ALLOWED = {
    ("backward", "exact"): (1, 1),
    ("backward", "static"): (1, 0),
    ("forward", "exact"): (2, 0),
    ("forward", "static"): (1, 0),
}


def measure(part: Part) -> None:
    """A row for every setting, at the first model's shapes."""
    size = layer_sizes(part)[0]
    problem = make_problem(size, part.device)
    is_known = part.device.type == "cuda"
    for (draw, rows), (fwd_allowed, bwd_allowed) in ALLOWED.items():
        state = lrmoe.LayerState(lrmoe.Recalibration(rate=0.2, draw=draw, rows=rows))
        _count_passes(problem, state)  # the first call compiles
        forward, backward = _count_passes(problem, state)
        part.write(
            "syncs",
            impl="lrmoe",
            **size.dims(),
            rate=0.2,
            draw=draw,
            rows=rows,
            fwd_syncs=forward.total() if is_known else None,
            bwd_syncs=backward.total() if is_known else None,
            fwd_allowed=fwd_allowed,
            bwd_allowed=bwd_allowed,
            fwd_places=dict(forward),
            bwd_places=dict(backward),
        )


def _count_passes(problem: Problem, state: lrmoe.LayerState) -> tuple[Counter[str], Counter[str]]:
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs.append(lrmoe.experts(*problem.arguments(), state=state))

    device = problem.x_TD.device
    counts = (
        count_syncs(device, forward),
        count_syncs(device, lambda: outputs[0].backward(problem.grad_TD)),
    )
    problem.clear()
    return counts


def count_syncs(device: torch.device, run: Callable[[], object]) -> Counter[str]:
    """The syncs inside by the line that waits; nothing on a CPU."""
    if device.type != "cuda":
        run()
        return Counter()
    torch.cuda.synchronize()
    wait, waits = PendingCounts.wait, Counter[str]()

    def counted(counts: PendingCounts) -> Int:
        waits["the counts"] += 1
        return wait(counts)

    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(PendingCounts, "wait", counted),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits + Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if _WARNING in str(w.message)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Every draw with every kind of rows."""
    measure(start("Device syncs of a layer call.", arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
