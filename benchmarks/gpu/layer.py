"""The layer's forward and backward pass beside its peers, in turn, on the same tensors.

An implementation is timed only where its output and every gradient agree with the float32 loop on
the same bf16 numbers. Forward and backward pass are timed on the device, each behind a call of the
same kind, as layers follow one another in a model: a host that is too slow shows. Beside them stand
what the host takes to launch either pass, and for the backward pass at C20 the time between the
start and the end of each stage that scores, selects and packs, from rounds of their own.

Packages that nobody need have come last, beside this layer's C0 and transformers' experts once
more: one whose kernel fails may leave the process without its device, and one that tries kernels in
its first call may outlast the time limit. By then all other rows are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

import lrmoe
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.peers import Forward, make_packages, make_peers, why_missing
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
    problem: Problem
    """With the leaves that its gradients come out in."""
    forward: Forward
    rate: float = 0.0
    draw: str | None = None
    state: lrmoe.LayerState | None = None

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return self.impl if self.draw is None else f"lrmoe C{round(100 * self.rate)} {self.draw}"

    def timed(self) -> Timed:
        """Both passes."""

        def run(mark: Mark) -> None:
            self.problem.clear()
            output_TD = self.forward()
            mark()
            output_TD.backward(self.problem.grad_TD)
            mark()
            if self.state is not None:
                self.state.finish_step()

        return run


def make_arm(problem: Problem, rate: float, draw: str) -> Arm:
    """This package's layer."""
    state = lrmoe.LayerState(lrmoe.Recalibration(rate=rate, draw=draw))
    return Arm(
        impl="lrmoe",
        problem=problem,
        forward=lambda: lrmoe.experts(*problem.arguments(), state=state),
        rate=rate,
        draw=draw,
        state=state,
    )


def measure(part: Part, size: LayerSize, workload: str) -> bool:
    """Rows of every arm at one shape and routing; whether all of them agree."""
    problem = make_problem(size, part.device, workload=workload)
    peers, missing = make_peers(problem)
    common = _common(size, workload)
    for impl, reason in missing.items():
        part.write("layer", impl=impl, **common, missing=reason)
    exact = [make_arm(problem, *SETTINGS[0])]
    exact += [Arm(impl=name, problem=problem, forward=forward) for name, forward in peers.items()]
    reference = passes(problem.to(torch.float32))
    errors = {arm.name: error_of(arm, reference) for arm in exact}
    right = [arm for arm in exact if _is_right(part, arm, errors, common)]
    c0 = exact[0]
    if c0 not in right:
        return False
    arms = right + [make_arm(problem, *setting) for setting in SETTINGS[1:]]
    times, host = _times(part, arms), _times(part, arms, is_host=True)
    stages = _stages(part, problem)
    for arm in arms:
        row = _row(arm, c0, times, host, errors, common)
        if (arm.rate, arm.draw) == (0.2, "backward"):
            row["score_select_pack_ms"] = sum(stages.values())
            row["stages_ms"] = stages
            c0_ms = float(np.median(times[c0.name][:, 1]))
            row["share_of_c0_bwd"] = sum(stages.values()) / c0_ms
        part.write("layer", **row)
    return len(right) == len(exact)


def measure_packages(part: Part, size: LayerSize, workload: str) -> bool:
    """Rows of the packages at one shape and routing; whether all that run agree."""
    problem = make_problem(size, part.device, workload=workload)
    packages, missing = make_packages(problem)
    common = _common(size, workload)
    reference = passes(problem.to(torch.float32)) if packages else {}
    arms, errors = [], {}
    for name, (forward, own) in packages.items():
        arm = Arm(impl=name, problem=own, forward=forward)
        try:
            errors[name] = error_of(arm, reference)
        except Exception as error:  # another interface, or a card that it has no kernels for
            missing[name] = why_missing(name, error)
        else:
            arms.append(arm)
    for impl, reason in missing.items():
        part.write("layer", impl=impl, **common, missing=reason)
    right = [arm for arm in arms if _is_right(part, arm, errors, common)]
    if right:
        c0 = make_arm(problem, *SETTINGS[0])
        peers, _ = make_peers(problem)
        beside = [Arm(impl=n, problem=problem, forward=f) for n, f in peers.items() if n != "loop"]
        timed = [c0, *beside, *right]
        times, host = _times(part, timed), _times(part, timed, is_host=True)
        for arm in right:
            part.write("layer", **_row(arm, c0, times, host, errors, common))
    return len(right) == len(arms)


def error_of(arm: Arm, reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Worst error of output and gradients against the float32 loop, and whose (device sync)."""
    arm.problem.clear()
    output_TD = arm.forward()
    output_TD.backward(arm.problem.grad_TD)
    found = {"output": output_TD.detach(), **arm.problem.gradients()}
    arm.problem.clear()
    return worst_error(found, reference)


def _is_right(
    part: Part, arm: Arm, errors: dict[str, tuple[float, str]], common: dict[str, Any]
) -> bool:
    """Whether an arm agrees; if not, a row that says so."""
    error, tensor = errors[arm.name]
    if error <= _TOLERANCE:
        return True
    reason = f"its {tensor} is off by {error:.1e}; not timed"
    part.write("layer", impl=arm.impl, rate=arm.rate, **common, missing=reason)
    return False


def _common(size: LayerSize, workload: str) -> dict[str, Any]:
    """What every row of a shape and routing says."""
    return {**size.dims(), "workload": workload, "dtype": "bf16", "placement": "fixed"}


def _times(
    part: Part, arms: Sequence[Arm], *, is_host: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Both passes of each arm, in turn: behind another call of it, as layers follow one another in
    a model; or what the host alone takes."""

    def clear() -> None:
        for arm in arms:
            arm.problem.clear()

    timed = {arm.name: arm.timed() for arm in arms}
    lead = 0 if is_host else 1
    return time_in_turn(
        part.device, timed, part.rounds, lead=lead, is_host=is_host, after_each=clear
    )


def _row(
    arm: Arm,
    c0: Arm,
    times: dict[str, NDArray[np.float64]],
    host: dict[str, NDArray[np.float64]],
    errors: dict[str, tuple[float, str]],
    common: dict[str, Any],
) -> dict[str, Any]:
    """Times of an arm beside those of C0 and of transformers' experts."""
    of_arm, hf = times[arm.name], times.get("hf_grouped_mm")
    row: dict[str, Any] = {"impl": arm.impl, "rate": arm.rate, "draw": arm.draw, **common}
    row |= {"selection": None, "backward_fraction": 1.0, **summary(of_arm)}
    row["host_fwd_ms"], row["host_bwd_ms"] = np.median(host[arm.name], axis=0).tolist()
    if arm.state is not None:
        row["selection"] = arm.state.config.selection
        row["backward_fraction"] = arm.state.report().backward_fraction
    row["gradient_error"] = errors.get(arm.name, (None,))[0]
    row["ratio_to_hf"] = None if hf is None else ratio(of_arm.sum(1), hf.sum(1))
    row["bwd_ratio_to_c0"] = ratio(of_arm[:, 1], times[c0.name][:, 1])
    row["score_select_pack_ms"] = None
    return row


def _stages(part: Part, problem: Problem) -> dict[str, float]:
    """Milliseconds of each stage of the backward pass at C20, medians over rounds."""
    arm = make_arm(problem, 0.2, "backward")
    rounds: list[dict[str, float]] = []
    for _ in range(part.rounds):
        arm.forward().backward(problem.grad_TD)  # the device is then behind, as in a model
        problem.clear()
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
    cases = [(size, workload) for size in layer_sizes(part) for workload in WORKLOADS]
    agree = [measure(part, *case) for case in cases]
    if all(agree):  # no package is timed beside results that are wrong
        agree = [measure_packages(part, *case) for case in cases]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    raise SystemExit(main())
