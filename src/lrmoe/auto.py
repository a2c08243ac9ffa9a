"""``rate="auto"``: each layer drops as much as keeps the noise of dropping below a target.

What an unbiased rule would add to the gradient at any rate follows from the scores of one backward
pass, whatever was kept in it (:func:`lrmoe.select.sampling_noise`). Every rank keeps running sums
of it; they travel with the counts of the next call, and all ranks choose from what all ranks sent.

Shape letters: A = candidate rates, B = A + 1 sums (the last one: of the scores), W = ranks.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lrmoe.config import AutoRate
from lrmoe.planner.problem import Int

RATES = tuple(Fraction(i, 20) for i in range(1, 20))
NUM_SUMS = len(RATES) + 1
_DECAY = 0.9  # per optimizer step; what AdamW averages gradients with by default
_STEPS_PER_UNIT = 1000  # a choice is a decimal of three places


class NoiseMeter:
    """Running sums of one layer on one rank, on the device of the scores."""

    def __init__(self) -> None:
        self._sums_B: torch.Tensor | None = None
        self._step = 0

    def add(self, step: int, measured_B: torch.Tensor) -> None:
        """Count a backward pass that belongs to an optimizer step."""
        # A non-finite gradient must not stay in the sums. Decided without a device sync.
        measured_B = torch.where(measured_B.isfinite().all(), measured_B, 0.0)
        if self._sums_B is not None:
            kept = _DECAY ** max(step - self._step, 0)
            measured_B = measured_B + kept * self._sums_B.to(measured_B.device)
        self._sums_B, self._step = measured_B, step

    def bits(self, device: torch.device) -> torch.Tensor:
        """The sums as int64 [B], so that they can travel among counts; zeros before the first."""
        if self._sums_B is None:
            return torch.zeros(NUM_SUMS, dtype=torch.int64, device=device)
        return self._sums_B.to(device).view(torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """The sums of this rank; empty before the first."""
        if self._sums_B is None:
            return {}
        return {"step": self._step, "sums": self._sums_B.tolist()}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._sums_B, self._step = None, 0
        if values:
            self._sums_B = torch.tensor(values["sums"], dtype=torch.float64)
            self._step = int(values["step"])


def choose_rate(bits_WB: Int, step: int, auto: AutoRate) -> Fraction:
    """The largest rate within bounds whose noise is at most the target; ``low`` where nothing is
    known, and during warm-up.

    Sums are exactly rounded, so all ranks choose alike from the same bits.
    """
    low, high = Fraction(str(auto.low)), Fraction(str(auto.high))
    sums_WB = np.ascontiguousarray(bits_WB).view(np.float64)
    *noise_A, score = (math.fsum(column) for column in sums_WB.T.tolist())
    if step < auto.warmup_steps or not score > 0:
        return low
    # Between candidates a straight line, which the noise, a convex function, does not exceed.
    points = [(0.0, 0.0), *((float(r), n / score) for r, n in zip(RATES, noise_A, strict=True))]
    largest = points[-1][0]
    for (rate, noise), (next_rate, next_noise) in pairwise(points):
        if next_noise > auto.target:
            share = (auto.target - noise) / (next_noise - noise)
            largest = rate + share * (next_rate - rate)
            break
    chosen = Fraction(math.floor(largest * _STEPS_PER_UNIT), _STEPS_PER_UNIT)
    return min(max(chosen, low), high)
