"""What ``lrmoe bench layer`` may be asked for; every check in ``__post_init__``."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from lrmoe.bench.workloads import WORKLOADS, largest_imbalance, least_experts
from lrmoe.config import Budget, Recalibration

DTYPES = ("bf16", "fp32")
CLOCKS = ("auto", "wall", "cpu")


@dataclass(frozen=True, kw_only=True)
class LayerBench:
    """One benchmark of the layer: shapes, what is compared, how long it is measured.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    workloads: tuple[str, ...] = ("W0", "W1", "W2", "W4", "W5")
    """W0 balanced, W1 hot expert set, W2 hot rank, W4 ragged sources, W5 zero-load experts and
    rank."""
    dtypes: tuple[str, ...] = ("bf16",)
    """bf16, fp32."""
    rates: tuple[float, ...] = (0.0, 0.2, 0.5)
    """Shares of pairs without a backward pass, one arm each."""
    placements: tuple[str, ...] = ("fixed",)
    """Placement policies; every one is measured at every rate."""
    slots: int | None = 2
    """Replica slots per rank; None: no limit. Policies that move experts have those as well."""
    tokens: int = 4096
    """Tokens per rank (W4: on average)."""
    hidden: int = 512
    ffn: int = 256
    experts: int = 64
    top_k: int = 8
    ranks: int | None = None
    """Expert-parallel ranks; None: 2, or as many as torchrun has started."""
    threads: int = 1
    """Threads of each rank."""
    imbalance: float = 1.79
    """W2: pairs of the busiest rank over the mean, realised within 1 %."""
    empty_source: bool = False
    """W4: the last rank has no tokens at all."""
    selection: str = "sampled"
    scope: str | None = None
    draw: str = "backward"
    router_grad: str = "kept"
    rows: str = "exact"
    save: str = "activations"
    rounds: int = 7
    """Measured rounds; every round times every arm once."""
    warmup: int = 1
    """Rounds before those, not counted."""
    clock: str = "auto"
    """wall: the slowest rank between barriers. cpu: each rank's own CPU time, for ranks that share
    cores with others. auto: cpu where ranks outnumber cores."""
    keep_memory: bool = False
    """Ranks keep the memory they free (glibc), as a GPU's caching allocator does. Otherwise large
    temporaries are new memory in every call, whose page faults count for every implementation."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("workloads", "dtypes", "rates", "placements"):
            object.__setattr__(self, name, _distinct(name, getattr(self, name)))
        _among("workloads", self.workloads, tuple(WORKLOADS))
        _among("dtypes", self.dtypes, DTYPES)
        _among("clock", (self.clock,), CLOCKS)
        for name in ("tokens", "hidden", "ffn", "experts", "top_k", "threads", "rounds"):
            _at_least(name, getattr(self, name), 1)
        _at_least("warmup", self.warmup, 0)
        W = self.num_ranks
        _at_least("ranks", W, 1)
        if self.experts % W:
            raise ValueError(
                f"experts={self.experts} with ranks={W}: must divide evenly over the ranks"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: allowed is at most experts={self.experts}")
        highest = largest_imbalance(W, self.experts, self.top_k)
        if "W2" in self.workloads and not 1 <= self.imbalance <= highest:
            raise ValueError(
                f"imbalance={self.imbalance}: allowed is 1 <= imbalance <= {highest:g} with "
                f"ranks={W}, experts={self.experts}, top_k={self.top_k}"
            )
        if "W5" in self.workloads and least_experts(W, self.top_k) > self.experts:
            raise ValueError(
                f"workload W5 leaves experts and a rank idle: it needs experts >= "
                f"{least_experts(W, self.top_k)} with ranks={W}, top_k={self.top_k}"
            )
        for placement, rate in self.arms:
            self.recalibration(placement, rate)

    @property
    def arms(self) -> list[tuple[str, float]]:
        """Placement and rate of every arm of this package's layer."""
        return [(placement, rate) for placement in self.placements for rate in self.rates]

    @property
    def num_ranks(self) -> int:
        """``ranks`` with its default filled in."""
        return self.ranks if self.ranks is not None else int(os.environ.get("WORLD_SIZE", "2"))

    @property
    def resolved_clock(self) -> str:
        """``clock`` with ``auto`` decided: ``cpu`` where ranks outnumber cores."""
        if self.clock != "auto":
            return self.clock
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        return "cpu" if on_host > (os.cpu_count() or 1) else "wall"

    def recalibration(self, placement: str, rate: float) -> Recalibration:
        """The layer's settings of one arm."""
        return Recalibration(
            rate=rate,
            placement=placement,
            budget=Budget(slots=self.slots),
            selection=self.selection,
            scope=self.scope,
            draw=self.draw,
            router_grad=self.router_grad,
            rows=self.rows,
            save=self.save,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values with the defaults that depend on the machine filled in."""
        return {**asdict(self), "ranks": self.num_ranks, "clock": self.resolved_clock}


def _distinct(name: str, values: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = tuple(values)
    if not found or len(set(found)) != len(found):
        raise ValueError(f"{name}={list(found)}: must be one or more different values")
    return found


def _among(name: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer >= {least}")
