"""The one timer: arms in turn, forward and backward between barriers, gathered from all ranks.

Shape letters: S = rounds.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lrmoe import dispatch, layer
from lrmoe.bench.arms import Arm
from lrmoe.exchange import Exchange

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}

# What counts as scoring, selecting and packing, by the pass in which it is called. In the forward
# pass only what draw="forward" does there; the pair table is sorted in any case.
_LOCAL_STAGES = {
    "forward": [(layer, "choose_pairs"), (dispatch, "announce_kept")],
    "backward": [
        (layer, "sort_pairs"),
        (layer, "restore_pairs"),
        (layer, "row_norm_sq"),
        (layer, "norms_and_codes"),
        (layer, "pair_lrm"),
        (layer, "choose_pairs"),
        (dispatch, "announce_kept"),
        (dispatch, "send_rows"),
    ],
}
_COLLECTIVES = ("all_to_all", "all_gather_counts")


def end_rank() -> NoReturn:
    """Leave a rank that was started for a measurement, once all of them are done.

    The results are written by then. The end of the interpreter is left out: the threads under a
    process group have been seen to abort there ("terminate called without an active exception").
    """
    dist.barrier()  # nobody leaves while another still receives from it
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds of one arm in every round, the slowest rank's, by one clock."""

    fwd_S: NDArray[np.float64]
    bwd_S: NDArray[np.float64]

    def total(self) -> NDArray[np.float64]:
        """Both passes. Between them is a barrier, so each counts its own slowest rank."""
        return self.fwd_S + self.bwd_S


def time_arms(
    arms: Sequence[Arm],
    rounds: int,
    warmup: int,
    after_each: Callable[[], None],
) -> list[dict[str, Times]]:
    """Every arm once per round, each round starting with another one. Collective.

    Args:
        after_each: called after every measurement, outside the clocks.

    Returns:
        For each arm its times by every clock of ``CLOCKS``, the same on every rank.
    """
    mine = np.zeros((len(arms), rounds, 2, len(CLOCKS)))
    for i in range(-warmup, rounds):
        for k in range(len(arms)):
            place = (i + k) % len(arms)
            passes = time_once(arms[place])
            if i >= 0:
                mine[place, i] = passes
            after_each()
    everywhere = [mine] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    slowest = np.stack(everywhere).max(0) * 1e3
    return [
        {
            clock: Times(fwd_S=of_arm[:, 0, i], bwd_S=of_arm[:, 1, i])
            for i, clock in enumerate(CLOCKS)
        }
        for of_arm in slowest
    ]


def time_once(arm: Arm) -> list[NDArray[np.float64]]:
    """Seconds of a forward and of a backward pass on this rank by every clock, between barriers."""
    with _no_garbage_collection():
        dist.barrier()
        start = _now()
        output = arm.forward()
        forward = _now() - start
        dist.barrier()
        start = _now()
        arm.backward(output)
        backward = _now() - start
        dist.barrier()
    if arm.state is not None:
        arm.state.finish_step()
    return [forward, backward]


def _now() -> NDArray[np.float64]:
    return np.array([clock() for clock in CLOCKS.values()])


def time_local_stages(arm: Arm, rounds: int, after_each: Callable[[], None]) -> float:
    """Milliseconds that scoring, selecting and packing take in a layer call, without collectives.

    Median over rounds of their own, so that the timed ones carry no instruments; slowest rank. CPU
    time, since nothing in it waits: on an idle machine that is also its wall time.
    Contains, on the rank that owns the tokens: sorting the pair table again, the gradient norms and
    scores, the selection, the unique token rows and the notes that go with them, the gather of the
    payload rows; and on the experts' rank: unpacking the notes into expert order. Collective.
    """
    mine = np.zeros(rounds)
    for i in range(rounds):
        watch = _Stopwatch(time.process_time)
        with _no_garbage_collection():
            dist.barrier()
            with _instrumented(watch, "forward"):
                output = arm.forward()
            with _instrumented(watch, "backward"):
                arm.backward(output)
        assert arm.state is not None
        arm.state.finish_step()
        mine[i] = watch.seconds * 1e3
        after_each()
    everywhere = [mine] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return float(np.median(np.stack(everywhere).max(0)))


@dataclass(slots=True)
class _Stopwatch:
    """Adds up the time inside some functions, less the time inside others that they call."""

    clock: Clock
    seconds: float = 0.0
    _paused: float = field(default=0.0)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            start, paused = self.clock(), self._paused
            result = function(*args, **kwargs)
            self.seconds += self.clock() - start - (self._paused - paused)
            return result

        return counted

    def pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            result = function(*args, **kwargs)
            self._paused += self.clock() - start
            return result

        return paused


@contextmanager
def _instrumented(watch: _Stopwatch, phase: str) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in _LOCAL_STAGES[phase]:
            stack.enter_context(patch.object(module, name, watch.counting(getattr(module, name))))
        for name in _COLLECTIVES:
            stack.enter_context(
                patch.object(Exchange, name, watch.pausing(getattr(Exchange, name)))
            )
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection of the whole heap would fall on whichever arm happens to trigger it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
