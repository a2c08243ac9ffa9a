"""Routing counts over steps: families of skew that drift and burst, and the workloads W0 to W7.

The families, and the sampling (every token K different experts, each with its own probability),
are those of :mod:`lrmoe.planner.workloads`. Drawing the starts of a systematic sample token by
token and counting them per expert is the same as one multinomial draw over the gaps between the
experts' ends, so a call costs E draws per rank whatever the tokens.

W0 to W7 follow https://github.com/NVIDIA/Megatron-LM/pull/7488; W0, W1, W2, W4 and W5 are those of
``lrmoe bench layer``.

Shape letters: C = layer calls (steps, then micro-batches), S = steps, W = ranks, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrmoe.cluster import kernels
from lrmoe.planner.problem import Float, Int, home_ranks
from lrmoe.planner.workloads import FAMILIES

_HOT_EXPERTS = 1 / 8  # W1, W3: an eighth of the experts takes half of the pairs
_HOT_SHARE = 1 / 2
_RAGGED, _RAGGED_RANKS = 3, 4  # W4: three times the tokens of the next rank, four ranks over
_BURST_PERIOD = 8  # W7: a hot rank in every eighth step
_BURST_FACTOR = 8.0
NAMED = {
    "W0": "balanced",
    "W1": "hot experts, neighbours: an eighth takes half of the pairs",
    "W2": "a hot rank, always the same",
    "W3": "hot experts as in W1, spread over the ranks",
    "W4": "balanced experts, ragged sources",
    "W5": "every second expert and the last rank idle",
    "W6": "a hot rank, another one in every step",
    "W7": "balanced, a hot rank in every eighth step",
}
KINDS = (*FAMILIES, *NAMED, "concentrated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How skewed the routing of a layer is, and how it changes.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    kind: str = "clustered"
    """A family (weights fixed per layer, rescaled to ``imbalance``), W0 to W7, or ``concentrated``:
    a share of the pairs to the first few experts, as LLEP's experiments have it."""
    imbalance: float = 1.9
    """Max / mean over the home ranks, of families in every call, of W2, W6, W7 where they heat."""
    jitter: float = 0.3
    """Sigma of the log-normal factor of every expert in every call (families)."""
    drift: float = 0.0
    """Share of the variance of the log-weights that is drawn anew in every step (families)."""
    burst: float = 0.0
    """Probability that in a step one rank's weights are 8 times as large (families)."""
    hot_share: float = 0.5
    """Share of the pairs of the hot experts (``concentrated``)."""
    hot_experts: int = 16
    """How many they are."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"workload={self.kind!r}: allowed are {', '.join(map(repr, KINDS))}")
        if self.imbalance < 1:
            raise ValueError(f"imbalance={self.imbalance}: allowed is >= 1")
        if self.jitter < 0:
            raise ValueError(f"jitter={self.jitter}: allowed is >= 0")
        if self.hot_experts < 1:
            raise ValueError(f"hot_experts={self.hot_experts}: allowed is >= 1")
        for name in ("drift", "burst", "hot_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is 0 <= {name} <= 1")


def layer_counts(
    workload: Workload,
    ranks: int,
    experts: int,
    *,
    tokens: int,
    top_k: int,
    layer: int,
    steps: int,
    micro_batches: int = 1,
    seed: int = 0,
) -> Int:
    """Pairs of each source rank and expert in every call of a layer, [C, W, E].

    A function of its arguments alone; the base weights of a layer do not depend on the seed.

    Raises:
        ValueError: if experts do not divide over the ranks, or the skew cannot be reached.
    """
    if experts % ranks and ranks % experts:
        raise ValueError(f"experts={experts}: do not divide evenly over {ranks} ranks")
    rng = np.random.default_rng([layer, seed, ranks, experts, steps])
    if workload.kind in FAMILIES:
        log_CE = _log_weights(workload, ranks, experts, layer, steps, micro_batches, rng)
        pi_CE = kernels.rescale(log_CE, ranks, float(top_k), workload.imbalance)
    else:
        pi_SE = np.stack([_named(workload, ranks, experts, top_k, step) for step in range(steps)])
        pi_CE = np.repeat(pi_SE, micro_batches, axis=0)
    tokens_W = np.full(ranks, tokens)
    if workload.kind == "W4":
        tokens_W = _ragged(ranks, tokens)
    return _draw(pi_CE, tokens_W, top_k, rng)


def _log_weights(
    workload: Workload,
    ranks: int,
    experts: int,
    layer: int,
    steps: int,
    micro_batches: int,
    rng: np.random.Generator,
) -> Float:
    family = FAMILIES[workload.kind]
    log_E = np.log(family(experts, np.random.default_rng([layer, experts])))
    home_E, mean = home_ranks(ranks, experts), log_E.mean()
    log_SE = np.empty((steps, experts))
    for step in range(steps):
        if step and workload.drift:
            fresh_E = np.log(family(experts, rng)) - mean
            log_E = mean + np.sqrt(1 - workload.drift) * (log_E - mean)
            log_E = log_E + np.sqrt(workload.drift) * fresh_E
        log_SE[step] = log_E
        if workload.burst and rng.random() < workload.burst:
            log_SE[step] += np.log(_BURST_FACTOR) * (home_E == rng.integers(ranks))
    log_CE = np.repeat(log_SE, micro_batches, axis=0)
    return log_CE + workload.jitter * rng.standard_normal(log_CE.shape)


def _named(workload: Workload, ranks: int, experts: int, top_k: int, step: int) -> Float:
    """Probability that a token goes to each expert."""
    kind, even_E = workload.kind, np.full(experts, top_k / experts)
    if kind in ("W1", "W3"):
        num_hot = max(top_k, int(experts * _HOT_EXPERTS))
        hot = np.arange(num_hot) if kind == "W1" else np.arange(num_hot) * experts // num_hot
        return _heated(even_E, hot, _HOT_SHARE * top_k, kind)
    if kind == "concentrated":
        hot = np.arange(min(workload.hot_experts, experts))
        return _heated(even_E, hot, workload.hot_share * top_k, kind)
    if kind in ("W2", "W6", "W7"):
        if kind == "W7" and step % _BURST_PERIOD != _BURST_PERIOD - 1:
            return even_E
        rank = {"W2": 0, "W6": step % ranks, "W7": step // _BURST_PERIOD % ranks}[kind]
        hot = np.flatnonzero(home_ranks(ranks, experts) == rank)
        return _heated(even_E, hot, workload.imbalance * top_k / ranks, kind)
    if kind == "W5":
        is_busy_E = np.arange(experts) % 2 == 0
        if ranks > 1:
            is_busy_E &= home_ranks(ranks, experts) < ranks - 1
        if is_busy_E.sum() < top_k:
            raise ValueError(f"W5 leaves {is_busy_E.sum()} of {experts} experts for top_k={top_k}")
        return np.where(is_busy_E, top_k / is_busy_E.sum(), 0.0)
    return even_E


def _heated(even_E: Float, hot: Int, pairs: float, kind: str) -> Float:
    """So many of a token's pairs go to the hot experts, the rest evenly to the others."""
    if pairs > len(hot):
        raise ValueError(
            f"{kind}: {pairs:g} pairs per token cannot go to {len(hot)} different experts"
        )
    pi_E = np.full_like(even_E, (even_E.sum() - pairs) / max(len(even_E) - len(hot), 1))
    pi_E[hot] = pairs / len(hot)
    return pi_E


def _ragged(ranks: int, tokens: int) -> Int:
    weight_W = float(_RAGGED) ** -(np.arange(ranks) % _RAGGED_RANKS)
    tokens_W: Int = (weight_W / weight_W.sum() * tokens * ranks).astype(np.int64)
    tokens_W[0] += tokens * ranks - tokens_W.sum()
    return tokens_W


def _draw(pi_CE: Float, tokens_W: Int, top_k: int, rng: np.random.Generator) -> Int:
    """Counts of a systematic sample with these probabilities, experts in a random order."""
    C, E = pi_CE.shape
    order_CE = np.argsort(rng.random((C, E)), axis=1)
    end_CE = np.take_along_axis(pi_CE, order_CE, 1).cumsum(1)
    end_CE *= top_k / end_CE[:, -1:]
    end_CE[:, -1] = top_k
    turns_CE = np.floor(end_CE)
    place_CE = end_CE - turns_CE
    sorted_CE = np.argsort(place_CE, axis=1, kind="stable")
    cuts_CE = np.take_along_axis(place_CE, sorted_CE, 1)
    gaps_CE = np.diff(cuts_CE, axis=1, prepend=0.0, append=1.0)
    gaps_CE = np.maximum(gaps_CE, 0.0)
    gaps_CE /= gaps_CE.sum(1, keepdims=True)
    in_gap_CWE = rng.multinomial(tokens_W[None, :], gaps_CE[:, None, :])
    counts_CWE: Int = kernels.counts_of_gaps(
        in_gap_CWE, sorted_CE, turns_CE.astype(np.int64), order_CE, tokens_W
    )
    return counts_CWE
