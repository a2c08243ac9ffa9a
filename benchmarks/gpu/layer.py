"""The layer's forward and backward pass beside its peers, in turn, on the same tensors.

An implementation is timed only where its output and every gradient agree with the float32 loop on
the same bf16 numbers. Forward and backward pass are timed on the device, launches included: a host
that is too slow shows. Beside them stands, for the backward pass at C20, the time between the start
and the end of each stage that scores, selects and packs, from rounds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import lrmoe
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.peers import Forward, make_peers
from benchmarks.gpu.problems import WORKLOADS, LayerSize, Problem, layer_sizes, make_problem
from benchmarks.gpu.reference import passes, worst_error
from benchmarks.gpu.timing import Mark, Stopwatch, Timed, ratio, summary, time_in_turn
from lrmoe import dispatch, layer

# (rate, when the sample is drawn)
SETTINGS = ((0.0, "backward"), (0.2, "backward"), (0.5, "backward"), (0.2, "forward"),
            (0.5, "forward"))  # fmt: skip
# As bench/gate.py: two right results in bf16 differ by their rounding.
_TOLERANCE = 1e-2
# What the backward pass of a draw there calls besides the experts' own work, as bench/timing.py.
STAGES = (
    (layer, "restore_pairs"),
    (layer, "norms_and_codes"),
    (layer, "pair_lrm"),
    (layer, "choose_pairs"),
    (dispatch, "announce_kept"),
    (dispatch, "send_rows"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One implementation at one setting."""

    impl: str
    forward: Forward
    rate: float = 0.0
    draw: str | None = None
    state: lrmoe.LayerState | None = None

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return self.impl if self.draw is None else f"lrmoe C{round(100 * self.rate)} {self.draw}"

    def timed(self, problem: Problem) -> Timed:
        """Both passes."""

        def run(mark: Mark) -> None:
            output_TD = self.forward()
            mark()
            output_TD.backward(problem.grad_TD)
            mark()
            if self.state is not None:
                self.state.finish_step()

        return run


def make_arm(problem: Problem, rate: float, draw: str) -> Arm:
    """This package's layer."""
    state = lrmoe.LayerState(lrmoe.Recalibration(rate=rate, draw=draw))
    return Arm(
        impl="lrmoe",
        forward=lambda: lrmoe.experts(*problem.arguments(), state=state),
        rate=rate,
        draw=draw,
        state=state,
    )


def measure(part: Part, size: LayerSize, workload: str) -> bool:
    """Rows of every arm at one shape and routing; whether all of them agree."""
    problem = make_problem(size, part.device, workload=workload)
    peers, missing = make_peers(problem)
    common = {**size.dims(), "workload": workload, "dtype": "bf16", "placement": "fixed"}
    for impl, reason in missing.items():
        part.write("layer", impl=impl, **common, missing=reason)
    exact = [make_arm(problem, *SETTINGS[0])]
    exact += [Arm(impl=name, forward=forward) for name, forward in peers.items()]
    errors = agreement(problem, exact)
    right = [arm for arm in exact if errors[arm.name][0] <= _TOLERANCE]
    for arm in exact:
        if arm not in right:
            error, tensor = errors[arm.name]
            reason = f"its {tensor} is off by {error:.1e}; not timed"
            part.write("layer", impl=arm.impl, rate=arm.rate, **common, missing=reason)
    if exact[0] not in right:
        return False
    arms = right + [make_arm(problem, *setting) for setting in SETTINGS[1:]]
    times = time_in_turn(
        part.device,
        {arm.name: arm.timed(problem) for arm in arms},
        part.rounds,
        after_each=problem.clear,
    )
    ours, hf = times[exact[0].name], times.get("hf_grouped_mm")
    stages = _stages(part, problem)
    for arm in arms:
        of_arm = times[arm.name]
        row: dict[str, Any] = {"impl": arm.impl, "rate": arm.rate, "draw": arm.draw, **common}
        row |= {"selection": None, "backward_fraction": 1.0, **summary(of_arm)}
        if arm.state is not None:
            row["selection"] = arm.state.config.selection
            row["backward_fraction"] = arm.state.report().backward_fraction
        row["gradient_error"] = errors.get(arm.name, (None,))[0]
        row["ratio_to_hf"] = None if hf is None else ratio(of_arm.sum(1), hf.sum(1))
        row["bwd_ratio_to_c0"] = ratio(of_arm[:, 1], ours[:, 1])
        row["score_select_pack_ms"] = None
        if (arm.rate, arm.draw) == (0.2, "backward"):
            row["score_select_pack_ms"] = sum(stages.values())
            row["stages_ms"] = stages
            row["share_of_c0_bwd"] = sum(stages.values()) / float(np.median(ours[:, 1]))
        part.write("layer", **row)
    return len(right) == len(exact)


def agreement(problem: Problem, arms: Sequence[Arm]) -> dict[str, tuple[float, str]]:
    """Worst error of each arm's output and gradients against the float32 loop."""
    reference = passes(problem.to(torch.float32))
    errors = {}
    for arm in arms:
        problem.clear()
        output_TD = arm.forward()
        output_TD.backward(problem.grad_TD)
        found = {"output": output_TD.detach(), **problem.gradients()}
        errors[arm.name] = worst_error(found, reference)
    problem.clear()
    return errors


def _stages(part: Part, problem: Problem) -> dict[str, float]:
    """Milliseconds of each stage of the backward pass at C20, medians over rounds."""
    arm = make_arm(problem, 0.2, "backward")
    rounds: list[dict[str, float]] = []
    for _ in range(part.rounds):
        output_TD = arm.forward()
        watches: dict[str, list[Stopwatch]] = {name: [] for _, name in STAGES}
        with _watched(part.device, watches):
            output_TD.backward(problem.grad_TD)
        rounds.append({n: sum(sum(w.ms()) for w in of_name) for n, of_name in watches.items()})
        problem.clear()
    return {name: float(np.median([r[name] for r in rounds])) for name in rounds[0]}


@contextmanager
def _watched(device: torch.device, watches: dict[str, list[Stopwatch]]) -> Iterator[None]:
    """The stages, each call between two marks on the device's timeline."""

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            watch = Stopwatch(device)
            watches[name].append(watch)
            watch.mark()
            result = function(*args, **kwargs)
            watch.mark()
            return result

        return watched

    with ExitStack() as stack:
        for module, name in STAGES:
            replacement = watching(name, getattr(module, name))
            stack.enter_context(patch.object(module, name, replacement))
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Every shape and routing; 1 if an implementation's results are wrong."""
    part = start("The layer beside its peers.", arguments)
    agree = [measure(part, size, w) for size in layer_sizes(part) for w in WORKLOADS]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    raise SystemExit(main())
