"""The one timer: CUDA events, or the wall clock on a CPU; what is compared runs in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# More than the level-2 cache of any GPU this runs on (H200: 60 MB).
_FLUSHED_BYTES = 256 << 20
# About a millisecond, in which the host queues up the launches of what is timed.
_HEAD_START_CYCLES = 2_000_000

Mark = Callable[[], None]
Timed = Callable[[Mark], Any]


class Stopwatch:
    """The moments that something passes on the device's timeline, or on the host's."""

    def __init__(self, device: torch.device, *, is_host: bool = False) -> None:
        self._is_cuda = device.type == "cuda" and not is_host
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Now, once the device has done what was launched before."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Between each mark and the next (device sync)."""
        pairs = list(zip(self._moments[:-1], self._moments[1:], strict=True))
        if not self._is_cuda:
            return [(end - begin) * 1e3 for begin, end in pairs]
        self._moments[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def time_in_turn(
    device: torch.device,
    arms: Mapping[str, Timed],
    rounds: int,
    *,
    warmup: int = 2,
    has_head_start: bool = False,
    lead: int = 0,
    is_host: bool = False,
    after_each: Callable[[], None] = lambda: None,
) -> dict[str, NDArray[np.float64]]:
    """Milliseconds of every arm in every round, [rounds, stages].

    A round runs every arm once, each round starting with another one, so that what slows the device
    for a while slows all of them. The cache is flushed before each, behind its lead.

    Args:
        arms: each calls its argument at the end of every stage.
        has_head_start: the device waits while the host launches, so that the times are the
            device's own. Otherwise a host that is too slow shows.
        lead: how often an arm runs, right before, without being timed: the device is then as far
            behind the host as it is inside a model.
        is_host: the time that the host takes, with nothing left to do on the device at first.
        after_each: called after every measurement, outside the clock.
    """
    is_cuda = device.type == "cuda"
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device) if is_cuda else None
    names = list(arms)
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(-warmup, rounds):
            for k in range(len(names)):
                name = names[(i + k) % len(names)]
                for _ in range(lead):
                    arms[name](lambda: None)
                if flushed is not None:
                    flushed.zero_()  # after the lead, whose weights and rows would be there still
                    if has_head_start:
                        torch.cuda._sleep(_HEAD_START_CYCLES)
                    if is_host:
                        torch.cuda.synchronize(device)  # the flush
                stopwatch = Stopwatch(device, is_host=is_host)
                stopwatch.mark()
                arms[name](stopwatch.mark)
                of_arm = stopwatch.ms()
                if i >= 0:
                    times[name].append(of_arm)
                after_each()
    finally:
        if was_collecting:
            gc.enable()
    return {name: np.array(of_arm) for name, of_arm in times.items()}


def one_stage(run: Callable[[], Any]) -> Timed:
    """A function as an arm."""

    def timed(mark: Mark) -> Any:
        result = run()
        mark()
        return result

    return timed


def summary(times: NDArray[np.float64]) -> dict[str, float]:
    """Forward and backward pass of an arm with these two stages: medians, and the spread."""
    total = times.sum(1)
    p20, p50, p80 = (float(v) for v in np.quantile(total, (0.2, 0.5, 0.8)))
    return {
        "fwd_ms": float(np.median(times[:, 0])),
        "bwd_ms": float(np.median(times[:, 1])),
        "total_ms": p50,
        "total_p20_ms": p20,
        "total_p80_ms": p80,
    }


def ratio(times: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The median over the rounds of the ratio inside a round."""
    return float(np.median(times / other))
