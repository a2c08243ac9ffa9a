"""What a layer reports: counters and timers per layer, and the definitions of the metrics.

Shape letters: W = ranks, E = experts, T = tokens, K = top-k.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from lrmoe.planner.problem import Int


@dataclass(slots=True, kw_only=True)
class LayerReport:
    """One MoE layer, totals over the micro-batches of the last finished optimizer step.

    Pairs, imbalances and expert load are of the whole expert-parallel group. Rows, bytes, times,
    score mass and memory are of this rank. Rows and bytes are those sent to *other* ranks.
    """

    layer: int
    pairs: int = 0
    kept_pairs: int = 0
    backward_fraction: float = 1.0
    """Kept / routed pairs, as realised."""
    rate: float = 0.0
    """Requested share of dropped pairs in the last call; with ``auto`` what the layer chose."""
    score_mass: float = 1.0
    """Sum of LRM over the kept pairs / over all pairs of this rank."""
    imbalance_home: float = 1.0
    """Max / mean over ranks of the routed pairs, under home placement."""
    imbalance_fwd: float = 1.0
    """Max / mean over ranks of the pairs computed in the forward pass."""
    imbalance_bwd: float = 1.0
    """Max / mean over ranks of the pairs computed in the backward pass."""
    max_vio: float = 0.0
    """``imbalance_fwd - 1``."""
    dead_experts: int = 0
    """Experts without a routed pair in the whole step."""
    gemm_rows_fwd: int = 0
    gemm_rows_bwd: int = 0
    payload_rows_fwd: int = 0
    payload_rows_bwd: int = 0
    bytes_fwd: int = 0
    bytes_bwd: int = 0
    replicas: int = 0
    """Instances beyond home, summed over ranks."""
    moved_weights: int = 0
    """Copies of an expert's weights that travelled to replicas, in both passes, over all ranks."""
    moved_rows: int = 0
    rows_slack: int = 0
    """Padding rows of the backward payload (``rows="static"``)."""
    plan_us: float = 0.0
    makespan: float = 0.0
    """Predicted, in pairs' forward passes: the busiest rank's in the forward pass plus the busiest
    rank's in the backward pass (a kept pair counts twice), and what replicas cost."""
    fwd_ms: float = 0.0
    bwd_ms: float = 0.0
    recompute_ms: float = 0.0
    """Forward passes repeated by activation checkpointing; not part of ``fwd_ms``."""
    bytes_recompute: int = 0
    clock: str = "off"
    """What ``fwd_ms`` and ``bwd_ms`` measure: nothing (``off``; they are 0), ``wall``, ``cuda``, or
    ``cpu`` (this rank's own CPU time, where ranks outnumber cores or ``LRMOE_CLOCK=cpu`` says so).
    Layers measure if their ``LayerState.is_timed`` says so."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors alive at the peak of the largest layer call of the step, by category:
    ``home_weights``, ``replica_weights``, ``gradients``, ``replica_gradients``, ``saved`` (for the
    backward pass), ``work`` (temporaries and payload)."""
    memory_model: dict[str, int] = field(default_factory=dict)
    """The same of the memory model (:mod:`lrmoe.planner.memory`), which budgets rely on."""
    memory_step: int = 0
    """The largest sum of a layer call's peak and what the other MoE layers held meanwhile: what
    ``budget.memory`` bounds."""
    nonfinite_tokens: int = 0
    """Tokens of this rank whose output gradient was not finite."""
    expert_load: list[int] = field(default_factory=list)
    """Routed pairs of each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """Every pair of one layer call on its source rank, [T, K] each."""

    call: int  # number of the layer's calls before it
    expert: torch.Tensor
    score: torch.Tensor  # LRM, float32
    kept: torch.Tensor  # bool
    weight: torch.Tensor  # float32 (float64 in a float64 layer), 0 where dropped
    forward_rank: torch.Tensor
    backward_rank: torch.Tensor  # -1 where dropped


def imbalance(load_W: Int) -> float:
    """Max / mean over ranks; 1 if there is no load."""
    total = int(load_W.sum())
    return float(load_W.max() * len(load_W) / total) if total else 1.0


_REAL = ("plan_us", "makespan")


class Tally:
    """Sums up the layer calls of one optimizer step into a :class:`LayerReport`."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.rate = 0.0
        self.counts_WE: Int | None = None
        self.forward_load_W: Int | None = None
        self.backward_load_W: Int | None = None
        self.totals: dict[str, float | torch.Tensor] = {}
        self.memory: dict[str, int] = {}
        self.memory_model: Callable[[], dict[str, int]] = dict
        self.memory_step = 0
        self.sums: list[torch.Tensor] = []
        """Of :func:`lrmoe.score.pair_sums`, one of each call."""
        self.spans: list[tuple[str, Span]] = []

    def routed(self, counts_WE: Int, forward_load_W: Int) -> None:
        """Account for the routing of one layer call."""
        self.counts_WE = _plus(self.counts_WE, counts_WE)
        self.forward_load_W = _plus(self.forward_load_W, forward_load_W)

    def kept(self, backward_load_W: Int) -> None:
        """Account for the kept pairs of one layer call, by the rank that computes them."""
        self.backward_load_W = _plus(self.backward_load_W, backward_load_W)

    def add(self, **values: float | torch.Tensor) -> None:
        """Add to counters of the report; what is still on the device stays there until then."""
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0) + value

    def hold(
        self,
        moments: list[tuple[dict[str, int], int]],
        model: Callable[[], dict[str, int]],
    ) -> None:
        """Bytes of a layer call at some moments; the report shows the largest call's largest.

        Args:
            moments: bytes by category, and those that other layers held meanwhile.
            model: the model's figures for the peak of this call, made when they are asked for.
        """
        peak = max((by_name for by_name, _ in moments), key=lambda by_name: sum(by_name.values()))
        if sum(peak.values()) > sum(self.memory.values()):
            self.memory, self.memory_model = peak, model
        step = max(sum(by_name.values()) + others for by_name, others in moments)
        self.memory_step = max(self.memory_step, step)

    @property
    def is_empty(self) -> bool:
        """Whether no layer call was accounted for."""
        return self.counts_WE is None

    def report(self) -> LayerReport:
        """The totals as a report; waits for the device where times or scores are still open."""
        report = LayerReport(
            layer=self.layer,
            memory=dict(self.memory),
            memory_model=self.memory_model(),
            memory_step=self.memory_step,
            rate=self.rate,
        )
        for name, value in self.totals.items():
            setattr(report, name, value if name in _REAL else int(value))
        for phase, span in self.spans:
            setattr(report, phase, getattr(report, phase) + span.ms())
            report.clock = span.clock
        if self.counts_WE is not None and self.forward_load_W is not None:
            counts_E = self.counts_WE.sum(0)
            W = len(self.counts_WE)
            report.pairs = int(counts_E.sum())
            report.expert_load = counts_E.tolist()
            report.dead_experts = int((counts_E == 0).sum())
            report.imbalance_home = imbalance(counts_E.reshape(W, -1).sum(1))
            report.imbalance_fwd = imbalance(self.forward_load_W)
            report.max_vio = report.imbalance_fwd - 1
        if self.backward_load_W is not None:
            report.kept_pairs = int(self.backward_load_W.sum())
            report.backward_fraction = report.kept_pairs / max(report.pairs, 1)
            report.imbalance_bwd = imbalance(self.backward_load_W)
        if self.sums:
            kept, everything, num_bad = torch.cat(self.sums).sum(0).tolist()
            report.score_mass = kept / everything if everything else 1.0
            report.nonfinite_tokens = int(num_bad)
        return report


CLOCK_VARIABLE = "LRMOE_CLOCK"
"""Environment variable: ``cpu`` makes layers on CPUs count their own CPU time in any case."""
_CLOCK = os.environ.get(CLOCK_VARIABLE, "wall")
if _CLOCK not in ("wall", "cpu"):  # on import, since no rank may raise where others wait for it
    raise ValueError(f"{CLOCK_VARIABLE}={_CLOCK!r}: allowed are 'wall', 'cpu'")


class Span:
    """Time of a stretch of code on this rank: wall clock, CUDA events, or its own CPU time.

    Args:
        is_timed: otherwise it costs nothing and takes no time.
    """

    def __init__(self, device: torch.device, num_ranks: int, *, is_timed: bool) -> None:
        if not is_timed:
            self.clock = "off"
        elif device.type == "cuda":
            self.clock = "cuda"
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        else:
            is_shared = num_ranks > (os.cpu_count() or 1) or _CLOCK == "cpu"
            self.clock = "cpu" if is_shared else "wall"
            self._now = time.process_time if is_shared else time.perf_counter
            self._start = self._now()
            self._end = self._start

    def stop(self) -> None:
        """End the stretch."""
        if self.clock == "cuda":
            self._events[1].record()
        elif self.clock != "off":
            self._end = self._now()

    def ms(self) -> float:
        """Length in milliseconds (device sync for CUDA)."""
        if self.clock == "off":
            return 0.0
        if self.clock == "cuda":
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return (self._end - self._start) * 1e3


def _plus(total: Int | None, part: Int) -> Int:
    return np.array(part) if total is None else total + part
