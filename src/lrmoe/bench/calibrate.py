"""``lrmoe bench calibrate``: coefficients of the cost model on this machine, and how good they are.

Fitted are layer calls on two gloo ranks with home placement, at several numbers of tokens, experts
and pairs; the model then predicts other calls, with every workload and policy, on two and four
ranks. Both sides are a rank's own CPU time. The coefficients hold for the width that was measured.
With ``gpu_rows`` nothing is measured here: :mod:`lrmoe.bench.calibrate_gpu`.

Shape letters: W = ranks, T = tokens of a rank, D = model dim, F = expert width, E = experts, K =
top-k, N = measurements, Q = coefficients, R = rounds.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import lrmoe
from lrmoe.bench.calibrate_gpu import fit_gpu, read_rows
from lrmoe.bench.timing import end_rank
from lrmoe.bench.workloads import Shape, least_experts, route
from lrmoe.cluster.cost import PassTimes, Rows, layer_times
from lrmoe.cluster.hardware import Hardware
from lrmoe.config import Budget, Recalibration
from lrmoe.planner import PLACEMENTS, plan
from lrmoe.planner.memory import LayerShape
from lrmoe.planner.problem import Float, Int
from lrmoe.state import LayerState

# Rates and constants that are fitted, as seconds per unit.
_RATES = (
    "forward_flops", "backward_flops", "weight_bytes_per_s", "row_bytes_per_s", "intra_bytes_per_s",
)  # fmt: skip
_SECONDS = ("group_s", "select_s", "pair_s", "collective_s")
_LARGEST_RATE = 1e18  # of what costs nothing
_TIMEOUT = timedelta(minutes=10)
WORKLOADS = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is measured.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    hidden: int = 256
    ffn: int = 128
    rounds: int = 7
    validate: bool = True
    ranks: tuple[int, ...] = (2, 4)
    """Of the validation."""
    workloads: tuple[str, ...] = WORKLOADS
    policies: tuple[str, ...] = PLACEMENTS
    rates: tuple[float, ...] = (0.0, 0.5)
    tokens: int = 1024
    """Per rank, of the validation."""
    experts: int = 32
    top_k: int = 4
    imbalance: float = 1.6
    slots: int = 2
    name: str = "this-machine"
    out: str | None = None
    """File for the coefficients, as ``lrmoe replay --hardware`` reads it."""
    gpu_rows: str | None = None
    """Rows of ``benchmarks/gpu/check.sh``: that GPU's coefficients, and nothing is measured."""
    links: str = "h200"
    """With ``gpu_rows``: the published GPU whose links are taken over, since one card has none."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "rounds", "tokens", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        for field, allowed in (("workloads", WORKLOADS), ("policies", PLACEMENTS)):
            for value in getattr(self, field):
                if value not in allowed:
                    known = ", ".join(map(repr, allowed))
                    raise ValueError(f"{field}={value!r}: allowed are {known}")
        for W in self.ranks:
            if W < 2 or self.experts % W or least_experts(W, self.top_k) > self.experts:
                raise ValueError(
                    f"ranks={W}: allowed is >= 2, dividing experts={self.experts}, which must be "
                    f">= {least_experts(W, self.top_k)} for W5"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of layer call."""

    ranks: int
    tokens: int
    experts: int
    top_k: int
    workload: str
    imbalance: float
    policy: str
    rate: float
    slots: int
    repeat: int = 0
    """Several measurements of one case show what a difference means."""

    def config(self) -> Recalibration:
        """The layer's settings."""
        has_slots = self.policy not in ("fixed", "fastermoe")
        return Recalibration(
            rate=self.rate,
            placement=self.policy,
            budget=Budget(slots=self.slots if has_slots else None),
        )

    def routings(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Expert ids of every rank in the call before the timed one, and in the timed one."""
        shape = Shape(
            ranks=self.ranks,
            tokens=self.tokens,
            experts=self.experts,
            top_k=self.top_k,
            imbalance=self.imbalance,
            empty_source=False,
        )

        def ids(kind: str, draw: int, shift: int = 0) -> list[torch.Tensor]:
            routing = route(kind, shape, 2 * seed + draw)
            moved = (routing.expert_TK + shift) % self.experts
            if self.workload == "W3":  # hot experts in turn on every rank
                per_rank = self.experts // self.ranks
                moved = moved % self.ranks * per_rank + moved // self.ranks
            return list(torch.split(moved, routing.tokens_W))

        if self.workload == "W6":
            return ids("W2", 0, self.experts // self.ranks), ids("W2", 1)
        if self.workload == "W7":
            return ids("W0", 0), ids("W2", 1)
        kind = "W1" if self.workload == "W3" else self.workload
        return ids(kind, 0), ids(kind, 1)

    def counts(self, routing: list[torch.Tensor]) -> Int:
        """Pairs of every rank and expert."""
        E = self.experts
        return np.stack([np.bincount(ids.ravel().numpy(), minlength=E) for ids in routing])


def fitting_cases() -> list[Case]:
    """The calls that the coefficients are fitted to."""
    return [
        Case(
            ranks=2,
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            workload=workload,
            imbalance=1.4,
            policy="fixed",
            rate=rate,
            slots=0,
        )
        for tokens, experts, top_k, workload, rate in itertools.product(
            (256, 1024, 2048), (8, 64), (2, 4), ("W0", "W2"), (0.0, 0.5)
        )
    ]


def validation_cases(settings: Calibration) -> list[Case]:
    """The calls that are predicted; ``fixed`` twice, to see the noise."""
    return [
        Case(
            repeat=repeat,
            ranks=ranks,
            tokens=settings.tokens,
            experts=settings.experts,
            top_k=settings.top_k,
            workload=workload,
            imbalance=settings.imbalance,
            policy=policy,
            rate=rate,
            slots=settings.slots,
        )
        for ranks, workload, policy, rate in itertools.product(
            settings.ranks, settings.workloads, settings.policies, settings.rates
        )
        for repeat in range(2 if policy == "fixed" else 1)
    ]


def measure(settings: Calibration, cases: Sequence[Case]) -> list[Float]:
    """CPU seconds of every case, [R, W, 2 (pass)], on ranks started for it."""
    times: list[Float | None] = [None] * len(cases)
    for W in sorted({case.ranks for case in cases}):
        mine = [i for i, case in enumerate(cases) if case.ranks == W]
        with tempfile.TemporaryDirectory(prefix="lrmoe-calibrate-") as directory:
            of_ranks = [asdict(cases[i]) for i in mine]
            spawn(_rank_main, (directory, W, of_ranks, asdict(settings)), nprocs=W)  # type: ignore[no-untyped-call]
            for i, of_case in zip(mine, np.load(Path(directory) / "times.npy"), strict=True):
                times[i] = of_case
    return [of_case for of_case in times if of_case is not None]


def _rank_main(
    rank: int, directory: str, W: int, cases: list[dict[str, Any]], values: dict[str, Any]
) -> None:
    settings = Calibration(**values)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=W,
        timeout=_TIMEOUT,
    )  # fmt: skip
    timers = [_Timer(settings, Case(**case), rank) for case in cases]
    mine = np.empty((len(cases), settings.rounds, 2))
    # Every round times every case, so that what slows the machine for a while slows all of them.
    for i in range(-1, settings.rounds):
        for n, timer in enumerate(timers):
            passes = timer.once()
            if i >= 0:
                mine[n, i] = passes
    everywhere = [mine] * W
    dist.all_gather_object(everywhere, mine)
    if rank == 0:
        np.save(Path(directory) / "times.npy", np.stack(everywhere, axis=2))
    end_rank()


class _Timer:
    """One case on this rank. Cases share weights and inputs of the same size."""

    _shared: ClassVar[dict[tuple[int, ...], torch.Tensor]] = {}

    def __init__(self, settings: Calibration, case: Case, rank: int) -> None:
        D, F, e = settings.hidden, settings.ffn, case.experts // case.ranks
        self.weights = (self._normal(e, 2 * F, D), self._normal(e, D, F))
        self.state = LayerState(case.config())
        self.inputs = []
        for routing in case.routings(settings.seed):
            T = len(routing[rank])
            self.inputs.append((self._normal(T, D), routing[rank], self._normal(T, case.top_k)))

    def _normal(self, *size: int) -> torch.Tensor:
        if size not in self._shared:
            generator = torch.Generator().manual_seed(sum(size))
            values = torch.randn(*size, generator=generator) * size[-1] ** -0.5
            self._shared[size] = values.requires_grad_()
        return self._shared[size]

    def once(self) -> tuple[float, float]:
        """CPU seconds of the passes of the timed call, after the call that is its history."""
        forward = backward = 0.0
        for x, ids, p in self.inputs:
            dist.barrier()
            start = time.process_time()
            y = lrmoe.experts(x, ids, p, *self.weights, group=dist.group.WORLD, state=self.state)
            forward = time.process_time() - start
            gradient = torch.ones_like(y)
            dist.barrier()
            start = time.process_time()
            y.backward(gradient)  # type: ignore[no-untyped-call]
            backward = time.process_time() - start
            for leaf in (x, p, *self.weights):
                leaf.grad = None
        self.state.finish_step()
        return forward, backward


def predict(hardware: Hardware, settings: Calibration, case: Case) -> tuple[PassTimes, PassTimes]:
    """What the model says of a case, from its counts."""
    past, now = (case.counts(routing) for routing in case.routings(settings.seed))
    state = LayerState(case.config())
    if case.policy != "fixed":
        state.past_counts.append(past)
    tokens_W = now.sum(1) // case.top_k
    shape = LayerShape(
        hidden=settings.hidden,
        ffn=settings.ffn,
        experts=case.experts,
        top_k=case.top_k,
        ranks=case.ranks,
        tokens=int(tokens_W.max()),
        dtype_bytes=4,
    )
    made = plan(state.problem(now, shape, 0))
    rows = Rows.expected(made, tokens_W, case.top_k, case.ranks)
    return layer_times(
        hardware,
        shape,
        made,
        rows,
        tokens_W,
        node_size=case.ranks,
        selects=not made.keeps_all,
        is_global=False,
        is_stratified=False,
    )


def fit(settings: Calibration, cases: Sequence[Case], times: Sequence[Float]) -> Hardware:
    """The coefficients, none negative, that fit the measured times best, relative to each.

    The model is linear in the seconds per unit: every column of the system is its prediction with
    one of them at 1 and the others at nothing.
    """
    from scipy.optimize import nnls

    measured = [np.median(of_case, axis=0) for of_case in times]  # [W, 2]
    target_N = np.concatenate([of_case.ravel() for of_case in measured])
    system_NQ = np.stack(
        [
            np.concatenate([
                np.stack([of_pass.busy() for of_pass in predict(unit, settings, case)], 1).ravel()
                for case in cases
            ])
            for unit in (_unit(name) for name in (*_RATES, *_SECONDS))
        ],
        axis=1,
    )  # fmt: skip
    found_Q, _ = nnls(system_NQ / target_N[:, None], np.ones_like(target_N))
    values = dict(zip((*_RATES, *_SECONDS), found_Q, strict=True))
    rates = {name: 1 / max(values[name], 1 / _LARGEST_RATE) for name in _RATES}
    seconds = {name: float(values[name]) for name in _SECONDS}
    found: dict[str, Any] = {"name": settings.name, **rates, **seconds}
    return replace(_unit(""), **found)


def _unit(name: str) -> Hardware:
    """Hardware on which only one coefficient costs anything: one second per unit."""
    values: dict[str, float] = dict.fromkeys(_RATES, _LARGEST_RATE) | dict.fromkeys(_SECONDS, 0.0)
    if name:
        values[name] = 1.0
    return Hardware(
        name="unit",
        clock="cpu",
        memory_bytes=_LARGEST_RATE,
        peak_flops=_LARGEST_RATE,
        inter_bytes_per_s=_LARGEST_RATE,
        **values,
    )


def compare(
    hardware: Hardware, settings: Calibration, cases: Sequence[Case], times: Sequence[Float]
) -> list[dict[str, Any]]:
    """Predicted and measured CPU time of every case, rank and pass."""
    rows = []
    for case, of_case in zip(cases, times, strict=True):
        for b, (phase, passes) in enumerate(
            zip(("fwd", "bwd"), predict(hardware, settings, case), strict=True)
        ):
            for rank, predicted in enumerate(passes.busy()):
                p20, p50, p80 = np.quantile(of_case[:, rank, b], (0.2, 0.5, 0.8))
                rows.append(
                    asdict(case)
                    | {
                        "phase": phase,
                        "rank": rank,
                        "predicted_ms": 1e3 * float(predicted),
                        "measured_ms": 1e3 * float(p50),
                        "measured_p20_ms": 1e3 * float(p20),
                        "measured_p80_ms": 1e3 * float(p80),
                        "error": float(predicted / p50 - 1),
                    }
                )
    return rows


def orders(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often two policies of one workload, rate and pass come out in the measured order.

    By the slowest rank. Only pairs whose measured gap is larger than the largest one between two
    measurements of the same policy.
    """
    groups: dict[tuple[Any, ...], dict[tuple[str, int], tuple[float, float]]] = {}
    for row in rows:
        key = (row["ranks"], row["workload"], row["rate"], row["phase"])
        slowest = groups.setdefault(key, {})
        arm = (row["policy"], row["repeat"])
        predicted, measured = slowest.get(arm, (0.0, 0.0))
        slowest[arm] = (max(predicted, row["predicted_ms"]), max(measured, row["measured_ms"]))
    noise = max(
        (
            abs(of_arms[policy, 0][1] / of_arms[policy, 1][1] - 1)
            for of_arms in groups.values()
            for policy, repeat in of_arms
            if repeat
        ),
        default=0.0,
    )
    clear = right = 0
    wrong = []
    for key, of_arms in groups.items():
        once = {policy: times for (policy, repeat), times in of_arms.items() if not repeat}
        for (a, of_a), (b, of_b) in itertools.combinations(once.items(), 2):
            if max(of_a[1] / of_b[1], of_b[1] / of_a[1]) - 1 <= noise:
                continue
            clear += 1
            if (of_a[1] < of_b[1]) == (of_a[0] < of_b[0]):
                right += 1
            else:
                wrong.append([*key, a, b, of_a[1] / of_b[1], of_a[0] / of_b[0]])
    return {"noise": noise, "clear_pairs": clear, "right_pairs": right, "wrong": wrong}


def run(settings: Calibration) -> tuple[Hardware, list[dict[str, Any]]]:
    """The coefficients, and the comparison of the validation (empty if not asked for)."""
    cases = fitting_cases()
    hardware = fit(settings, cases, measure(settings, cases))
    if not settings.validate:
        return hardware, []
    predicted = validation_cases(settings)
    return hardware, compare(hardware, settings, predicted, measure(settings, predicted))


def to_file(hardware: Hardware, settings: Calibration) -> str:
    """The coefficients with their source, as JSON."""
    source = f"lrmoe bench calibrate, hidden {settings.hidden}, ffn {settings.ffn}, fp32, CPU time"
    entry: dict[str, Any] = {"clock": hardware.clock}
    for name, value in asdict(hardware).items():
        if name not in ("name", "clock"):
            entry[name] = [value, source]
    return json.dumps({hardware.name: entry}, indent=1) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe bench calibrate``; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    import sys

    from lrmoe.bench.arguments import parse_settings
    from lrmoe.cli import write_json

    parsed = parse_settings(
        Calibration,
        "lrmoe bench calibrate",
        "Coefficients of the cost model on this machine, and how well they predict.",
        arguments,
    )
    if parsed is None:
        return 0
    settings, json_file = parsed
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    if settings.gpu_rows is not None:
        fitted = fit_gpu(read_rows(settings.gpu_rows), settings.name, settings.links)
        hardware, file = fitted.hardware, fitted.to_file()
        summary = {"median_fit_error": float(np.median(fitted.errors))}
    else:
        hardware, rows = run(settings)
        file = to_file(hardware, settings)
    lines = [f"{name:20} {getattr(hardware, name):.3g}" for name in (*_RATES, *_SECONDS)]
    if rows:
        error_N = np.abs([row["error"] for row in rows])
        summary = {
            "median_error": float(np.median(error_N)),
            "p90_error": float(np.quantile(error_N, 0.9)),
            **orders(rows),
        }
        lines.append(
            f"{len(rows)} predictions of a rank's CPU time: median error "
            f"{summary['median_error']:.1%}, 90 % within {summary['p90_error']:.1%}; "
            f"{summary['right_pairs']} of {summary['clear_pairs']} orders of policies right "
            f"whose gap is above the noise ({summary['noise']:.1%})"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    if settings.out is not None:
        Path(settings.out).write_text(file)
    if json_file is not None:
        coefficients = {"coefficients": asdict(hardware), "summary": summary}
        write_json(json_file, "bench calibrate", asdict(settings) | coefficients, rows)
    return 0
