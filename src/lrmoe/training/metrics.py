"""What a run logs: one row per logged step, from the layers' reports on all ranks."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from lrmoe.training.ranks import Ranks

# What a row says of the MoE layers; null where another expert implementation reports nothing.
LAYER_KEYS = (
    "moe_ms",
    "moe_fwd_ms",
    "moe_bwd_ms",
    "moe_clock",
    "backward_fraction",
    "score_mass",
    "imbalance_fwd",
    "imbalance_bwd",
    "bytes_fwd",
    "bytes_bwd",
    "replicas",
    "moved_weights",
    "moved_rows",
    "plan_us",
    "makespan",
    "memory_layer",
    "memory_layer_model",
    "memory_step",
    "dead_experts",
)
# Fields of a layer's report, summed over the layers of a step.
_SUMMED = (
    "pairs",
    "kept_pairs",
    "fwd_ms",
    "bwd_ms",
    "bytes_fwd",
    "bytes_bwd",
    "replicas",
    "moved_weights",
    "moved_rows",
    "plan_us",
    "makespan",
    "dead_experts",
)
# Fields that are ratios: averaged over the layers.
_AVERAGED = ("score_mass", "imbalance_fwd", "imbalance_bwd")


class Window:
    """What this rank measured since the last logged step, and since the start of the run.

    Plain numbers only, so that a checkpoint can carry it and a resumed run logs the same rows.
    """

    def __init__(self) -> None:
        self.train_s = 0.0
        self.moe_ms = 0.0
        self.tokens_seen = 0
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.tokens = 0
        self.sums = dict.fromkeys((*_SUMMED, *_AVERAGED), 0.0)
        self.clock: str | None = None  # what the layers' times measure; None without reports
        self.expert_load: list[list[int]] = []
        # Bytes of the largest layer call, the memory model's figure for it, and of all MoE layers.
        self.memory = [0, 0, 0]

    def add_step(self, seconds: float, tokens: int, reports: Sequence[Any]) -> None:
        """Counts one optimizer step.

        Args:
            seconds: time of the step on this rank.
            tokens: tokens of the step on all ranks.
            reports: the layers' reports of the step; none with another expert implementation.
        """
        self.steps += 1
        self.seconds += seconds
        self.tokens += tokens
        self.train_s += seconds
        self.tokens_seen += tokens
        if not reports:
            return
        self.clock = reports[0].clock
        for name in _SUMMED:
            self.sums[name] += sum(getattr(r, name) for r in reports)
        for name in _AVERAGED:
            self.sums[name] += sum(getattr(r, name) for r in reports) / len(reports)
        self.moe_ms += sum(r.fwd_ms + r.bwd_ms for r in reports)
        largest = max(reports, key=lambda r: sum(r.memory.values()))
        measured = sum(largest.memory.values())
        if measured > self.memory[0]:
            self.memory[:2] = measured, sum(largest.memory_model.values())
        self.memory[2] = max(self.memory[2], *(r.memory_step for r in reports))
        load = [list(r.expert_load) for r in reports]
        if self.expert_load:
            load = [
                [a + b for a, b in zip(x, y, strict=True)]
                for x, y in zip(self.expert_load, load, strict=True)
            ]
        self.expert_load = load

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything, for a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken; what an older version did not count starts at 0."""
        vars(self).update(state | {"sums": self.sums | state["sums"]})

    def totals(self, ranks: Ranks) -> dict[str, float]:
        """Since the start of the run: seconds of training and of the MoE layers, slowest rank.

        Collective: every rank calls it.
        """
        rows = ranks.gather((self.train_s, self.moe_ms))
        return {
            "train_s": max(train_s for train_s, _ in rows),
            "moe_ms_total": max(moe_ms for _, moe_ms in rows),
        }

    def close(self, ranks: Ranks, ep_size: int) -> tuple[dict[str, Any], list[list[int]]]:
        """The row of the window over all ranks, and pairs per [MoE layer][expert]; starts anew.

        Values are per optimizer step: times are the slowest rank's, bytes and counts are summed
        over the ranks. Collective: every rank calls it.
        """
        windows = ranks.gather({**vars(self), "memory_peak": peak_memory()})
        seconds = max(w["seconds"] for w in windows)
        row: dict[str, Any] = {
            "tokens_per_second": self.tokens / seconds,
            "step_ms": 1e3 * seconds / self.steps,
        }
        load: list[list[int]] = []
        if self.clock is None:
            row |= dict.fromkeys(LAYER_KEYS)
        else:
            row |= _layer_values(windows, self.steps)
            # Every rank of an EP group reports the load of the whole group.
            load = [
                [sum(counts) // ep_size for counts in zip(*layers, strict=True)]
                for layers in zip(*(w["expert_load"] for w in windows), strict=True)
            ]
        row["memory_peak"] = max(w["memory_peak"] for w in windows)
        self._clear()
        return row, load


def _layer_values(windows: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The keys of ``LAYER_KEYS`` from every rank's window."""

    def per_step(name: str) -> list[float]:
        return [w["sums"][name] / steps for w in windows]

    forward, backward = per_step("fwd_ms"), per_step("bwd_ms")
    moe_ms, slowest = max(
        (f + b, rank) for rank, (f, b) in enumerate(zip(forward, backward, strict=True))
    )
    return {
        "moe_ms": moe_ms,
        "moe_fwd_ms": forward[slowest],
        "moe_bwd_ms": backward[slowest],
        "moe_clock": windows[slowest]["clock"],
        "backward_fraction": sum(per_step("kept_pairs")) / sum(per_step("pairs")),
        "score_mass": fmean(per_step("score_mass")),
        "imbalance_fwd": max(per_step("imbalance_fwd")),
        "imbalance_bwd": max(per_step("imbalance_bwd")),
        "bytes_fwd": sum(per_step("bytes_fwd")),
        "bytes_bwd": sum(per_step("bytes_bwd")),
        "replicas": max(per_step("replicas")),
        "moved_weights": max(per_step("moved_weights")),
        "moved_rows": sum(per_step("moved_rows")),
        "plan_us": max(per_step("plan_us")),
        "makespan": max(per_step("makespan")),
        **_memory(windows),
        "dead_experts": max(per_step("dead_experts")),
    }


def _memory(windows: list[dict[str, Any]]) -> dict[str, int]:
    """Of the rank that needed most in a layer call, and of the one whose layers held most."""
    layer, model, _ = max(w["memory"] for w in windows)
    step = max(w["memory"][2] for w in windows)
    return {"memory_layer": layer, "memory_layer_model": model, "memory_step": step}


def peak_memory() -> int:
    """Bytes this rank has used at most: of the GPU where there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
