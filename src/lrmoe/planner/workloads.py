"""Pair counts as real routers produce them: families of skew, rescaled to a target rank imbalance.

Public figures behind the choices: per-rank counts of DeepSeek-V3 fit a log-normal best
(https://github.com/deepseek-ai/DeepEP/pull/393); hot experts of one layer cluster on neighbouring
ranks, so independent draws understate the skew; rank imbalances of 1.3 to 4.0 are reported for
training and prefill at 64 ranks (arXiv 2606.04101); "p % of the pairs to k experts" is the protocol
of LLEP (arXiv 2601.17111).

A layer's expert weights are fixed by ``layer``; every micro-batch (``seed``) multiplies them by a
log-normal jitter and raises the result to the power that gives the wanted max / mean over ranks.
Tokens then draw K different experts each. With ``w`` the weights, drawing without replacement
reaches expert e with probability close to ``pi_e = 1 - exp(-c w_e)``, c such that they sum to K;
systematic sampling draws exactly K experts with exactly these probabilities.

Shape letters: W = ranks, E = experts, T = tokens of a rank, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lrmoe.planner.problem import Float, Int, home_ranks

_JITTER = 0.3
_NEIGHBOUR_CORRELATION = 0.8
# Orders of the experts per rank between which its tokens are divided: without them, experts with
# adjacent numbers would never be drawn by the same token.
_ORDERS = 8
IMBALANCES = (1.3, 2.0, 3.0, 4.0)
CONCENTRATIONS = tuple((share, k) for share in (0.3, 0.5, 0.8, 0.95) for k in (1, 4, 16))


def log_normal(E: int, rng: np.random.Generator) -> Float:
    """Independent log-normal weights, sigma 1."""
    return rng.lognormal(0.0, 1.0, E)


def zipf(E: int, rng: np.random.Generator) -> Float:
    """Zipf weights with exponent 0.75, experts in random order."""
    return rng.permutation(np.arange(1, E + 1, dtype=np.float64) ** -0.75)


def clustered(E: int, rng: np.random.Generator) -> Float:
    """Log-normal weights that correlate with the neighbours', so hot experts cluster."""
    noise_E = rng.standard_normal(E)
    log_E = np.empty(E)
    log_E[0] = noise_E[0]
    fresh = np.sqrt(1 - _NEIGHBOUR_CORRELATION**2)
    for e in range(1, E):
        log_E[e] = _NEIGHBOUR_CORRELATION * log_E[e - 1] + fresh * noise_E[e]
    return np.exp(log_E)


FAMILIES: dict[str, Callable[[int, np.random.Generator], Float]] = {
    "log_normal": log_normal,
    "zipf": zipf,
    "clustered": clustered,
}


def routed_counts(
    family: str,
    ranks: int,
    experts: int,
    imbalance: float,
    *,
    tokens: int = 4096,
    top_k: int = 8,
    layer: int = 0,
    seed: int = 0,
) -> Int:
    """Pairs of each source rank and expert, int64 [W, E]; a function of its arguments alone.

    Args:
        family: a key of :data:`FAMILIES`.
        imbalance: wanted max / mean over the ranks' home experts; the largest possible one where
            it is out of reach.
        tokens: per rank; each draws ``top_k`` different experts.
    """
    base_E = FAMILIES[family](experts, np.random.default_rng([layer, experts]))
    rng = np.random.default_rng([layer, seed, ranks, experts])
    weight_E = base_E * rng.lognormal(0.0, _JITTER, experts)
    pi_E = rescaled(weight_E, ranks, top_k, imbalance)
    counts_WE = np.zeros((ranks, experts), np.int64)
    part_O = np.diff(np.linspace(0, tokens, _ORDERS + 1).astype(np.int64))
    for rank in range(ranks):
        for part in part_O.tolist():
            order_E = rng.permutation(experts)
            end_E = np.cumsum(pi_E[order_E])
            end_E[-1] = top_k
            start_T1 = rng.random((part, 1))
            drawn = np.searchsorted(end_E, (start_T1 + np.arange(top_k)).ravel(), side="right")
            counts_WE[rank] += np.bincount(order_E[drawn], minlength=experts)
    return counts_WE


def concentrated_counts(
    share: float, k: int, ranks: int, experts: int, *, pairs: int = 32768, seed: int = 0
) -> Int:
    """LLEP's protocol: a share of all pairs to the first ``k`` experts, the rest to the others.

    Args:
        pairs: of each source rank. Not drawn token by token: a top-k router could not send most of
            its pairs to one expert.
    """
    rng = np.random.default_rng([seed, ranks, experts])
    p_E = np.full(experts, (1 - share) / max(experts - k, 1))
    p_E[:k] = share / k
    counts_WE: Int = rng.multinomial(pairs, p_E / p_E.sum(), size=ranks)
    return counts_WE


def rescaled(weight_E: Float, ranks: int, top_k: int, imbalance: float) -> Float:
    """Inclusion probabilities of the power of ``weight_E`` that has this imbalance over ranks."""
    home_E = home_ranks(ranks, len(weight_E))
    mean = top_k / ranks

    def probabilities(power: float) -> Float:
        log_E = power * np.log(weight_E)
        return inclusion(np.exp(log_E - log_E.max()), top_k)

    low, high = 0.0, 16.0
    for _ in range(30):  # to one part in 1e8
        middle = (low + high) / 2
        load_W = np.bincount(home_E, weights=probabilities(middle), minlength=ranks)
        low, high = (middle, high) if load_W.max() < imbalance * mean else (low, middle)
    return probabilities(high)


def inclusion(weight_E: Float, top_k: int) -> Float:
    """``1 - exp(-c w)`` with c such that the sum is ``top_k``."""
    weight_E = np.maximum(weight_E, 1e-300)  # so that every sum up to E can be reached
    low, high = -50.0, 700.0
    for _ in range(80):
        middle = (low + high) / 2
        total = -np.expm1(-np.exp(middle) * weight_E).sum()
        low, high = (middle, high) if total < top_k else (low, middle)
    pi_E: Float = -np.expm1(-np.exp(high) * weight_E)
    pi_E *= top_k / pi_E.sum()
    return pi_E
