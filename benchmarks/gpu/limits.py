"""What the device can do at most: copying, and multiplying dense matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.part import Part
from benchmarks.gpu.timing import one_stage, time_in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured rates that everything else is held against."""

    bytes_per_s: float
    """Of a large copy inside the device's memory, bytes read plus bytes written."""
    flops: float
    """Of one large dense bf16 product of random numbers, per second."""


def measure(part: Part) -> Limits:
    """Both limits, and a row for each.

    A copy of n bytes moves 2 n; a product of two n x n matrices takes 2 n^3 FLOPs.
    """
    num_bytes, n = (1 << 22, 256) if part.is_small else (2 << 30, 8192)
    generator = torch.Generator(part.device).manual_seed(0)
    source = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, device=part.device, generator=generator
    )
    target = torch.empty_like(source)
    a, b = (
        torch.randn(n, n, device=part.device, generator=generator).to(torch.bfloat16)
        for _ in range(2)
    )
    product = torch.empty_like(a)
    arms = {
        "copy": one_stage(lambda: target.copy_(source)),
        "dense": one_stage(lambda: torch.mm(a, b, out=product)),
    }
    times = time_in_turn(part.device, arms, part.rounds, has_head_start=True)
    seconds = {name: float(np.median(of_arm)) / 1e3 for name, of_arm in times.items()}
    found = Limits(bytes_per_s=2 * num_bytes / seconds["copy"], flops=2 * n**3 / seconds["dense"])
    part.write("limit", name="copy", bytes=2 * num_bytes, bytes_per_s=found.bytes_per_s)
    part.write("limit", name="dense_bf16", size=n, flops=found.flops)
    return found
