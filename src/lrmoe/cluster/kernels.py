# mypy: ignore-errors
"""Counts and expected token rows of many layer calls, compiled by numba.

Shape letters: C = layer calls, W = ranks, E = experts, V = instances (rank-major), K = top-k.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_jit = njit(cache=True, error_model="numpy")
_NEWTON = 60
_FIRST_POWER, _POWER_STEP, _LARGEST_POWER = 0.2, 1.4, 16.0
_LARGEST_TILT = 20.0


@_jit
def inclusion_into(log_E, power, top_k, start, pi_E):
    """``1 - exp(-exp(u + power log_E))`` with u such that the sum is ``top_k``; returns u.

    The sum is increasing in u; Newton steps, kept inside a bracket that each of them narrows.
    """
    E = len(log_E)
    low, high = -745.0, 745.0
    top = -np.inf
    for e in range(E):
        top = max(top, power * log_E[e])
    u = start
    for _ in range(_NEWTON):
        total, slope = 0.0, 0.0
        for e in range(E):
            x = np.exp(min(u + power * log_E[e] - top, 700.0))
            kept = np.exp(-x)
            total += 1.0 - kept
            slope += x * kept
        if total < top_k:
            low = u
        else:
            high = u
        if abs(total - top_k) < 1e-10 * top_k:
            break
        step = (top_k - total) / slope if slope > 0 else np.inf
        u = u + step if low < u + step < high else (low + high) / 2
    total = 0.0
    for e in range(E):
        pi_E[e] = -np.expm1(-np.exp(min(u + power * log_E[e] - top, 700.0)))
        total += pi_E[e]
    for e in range(E):
        pi_E[e] = min(1.0, pi_E[e] * top_k / total)
    return u


@_jit
def _busiest(pi_E, load_W):
    """The rank with the most pairs at home, with every rank's."""
    E, W = len(pi_E), len(load_W)
    load_W[:] = 0.0
    for e in range(E):
        load_W[e * W // E] += pi_E[e]
    return load_W.argmax()


@_jit
def rescale(log_CE, ranks, top_k, imbalance):
    """Inclusion probabilities with this rank imbalance, from the weights of each call.

    The weights are raised to the least power that gives it, as in
    :func:`lrmoe.planner.workloads.rescaled`. Where none does, because the hottest experts are on
    different ranks and already in every token, those of the busiest rank are raised by one factor.
    """
    C, E = log_CE.shape
    pi_CE = np.empty((C, E))
    load_W, log_E = np.empty(ranks), np.empty(E)
    limit = imbalance * top_k / ranks
    for c in range(C):
        low, high, u = 0.0, _FIRST_POWER, 0.0
        while True:  # the imbalance may fall again at higher powers: find the first crossing
            u = inclusion_into(log_CE[c], high, top_k, u, pi_CE[c])
            rank = _busiest(pi_CE[c], load_W)
            if load_W[rank] >= limit or high >= _LARGEST_POWER:
                break
            low, high = high, high * _POWER_STEP
        if load_W[rank] >= limit:
            for _ in range(20):
                middle = (low + high) / 2
                u = inclusion_into(log_CE[c], middle, top_k, u, pi_CE[c])
                if load_W[_busiest(pi_CE[c], load_W)] < limit:
                    low = middle
                else:
                    high = middle
            inclusion_into(log_CE[c], high, top_k, u, pi_CE[c])
            continue
        u = inclusion_into(log_CE[c], 1.0, top_k, 0.0, pi_CE[c])
        rank = _busiest(pi_CE[c], load_W)
        low, high = 0.0, _LARGEST_TILT
        for _ in range(30):
            middle = (low + high) / 2
            for e in range(E):
                log_E[e] = log_CE[c, e] + (middle if e * ranks // E == rank else 0.0)
            u = inclusion_into(log_E, 1.0, top_k, u, pi_CE[c])
            if load_W[_busiest(pi_CE[c], load_W)] < limit:
                low = middle
            else:
                high = middle
    return pi_CE


@_jit
def expected_rows(forward_WV, backward_WV, tokens_W, begin_W, top_k, node_size):
    """Token rows and pairs by rank, in both passes.

    A token goes once to a rank that computes any of its pairs. With ``m`` pairs of a source's
    ``T`` tokens on a rank, ``K`` draws miss the rank with probability ``(1 - m / (T K))^K``; that
    the pairs of one expert are of different tokens lowers it by ``prod_v (1 - n_v / T) /
    exp(-m / T)``. Both are exact for one expert, and the product is the Poisson approximation of
    drawing K different experts. At most one row per pair and per token, at least the largest
    instance's pairs.

    Returns:
        Rows received by each rank and sent by each source, its own included, [2, W] each; rows and
        pairs of other ranks sent by sources, and arriving at computing ranks, over each class of
        link, [2 (rows, pairs), 2 (pass), C, W] each.
    """
    W = len(tokens_W)
    received_2W, source_2W = np.zeros((2, W)), np.zeros((2, W))
    sent, arrived = np.zeros((2, 2, 2, W)), np.zeros((2, 2, 2, W))
    for s in range(W):
        T = tokens_W[s]
        if T == 0:
            continue
        inverse = 1.0 / T
        for r in range(W):
            c = 0 if s // node_size == r // node_size else 1
            limit = float(T)
            for b in range(2):
                pairs, largest, miss = 0, 0, 1.0
                for v in range(begin_W[r], begin_W[r + 1]):
                    n = backward_WV[s, v] if b else forward_WV[s, v]
                    pairs += n
                    largest = max(largest, n)
                    miss *= 1.0 - n * inverse
                if pairs == 0:
                    continue
                m = pairs * inverse
                rows = float(T)
                if largest < T and m < top_k:
                    for _ in range(top_k):
                        miss *= 1.0 - m / top_k
                    rows = T * (1.0 - miss * np.exp(m))
                rows = min(max(rows, float(largest)), min(float(pairs), limit))
                if b == 0:
                    limit = rows
                received_2W[b, r] += rows
                source_2W[b, s] += rows
                if s != r:
                    sent[0, b, c, s] += rows
                    arrived[0, b, c, r] += rows
                    sent[1, b, c, s] += pairs
                    arrived[1, b, c, r] += pairs
    return received_2W, source_2W, sent, arrived


@_jit
def count_rows(rows_2WW, pairs_2WW, node_size):
    """What :func:`expected_rows` returns, from rows and pairs that are known."""
    W = rows_2WW.shape[1]
    received_2W, source_2W = np.zeros((2, W)), np.zeros((2, W))
    sent, arrived = np.zeros((2, 2, 2, W)), np.zeros((2, 2, 2, W))
    for b in range(2):
        for s in range(W):
            for r in range(W):
                received_2W[b, r] += rows_2WW[b, s, r]
                source_2W[b, s] += rows_2WW[b, s, r]
                if s != r:
                    c = 0 if s // node_size == r // node_size else 1
                    sent[0, b, c, s] += rows_2WW[b, s, r]
                    arrived[0, b, c, r] += rows_2WW[b, s, r]
                    sent[1, b, c, s] += pairs_2WW[b, s, r]
                    arrived[1, b, c, r] += pairs_2WW[b, s, r]
    return received_2W, source_2W, sent, arrived


@_jit
def group_times(pairs_V, is_replica_V, rank_V, W, group_s, pair_s):
    """Seconds of the grouped GEMMs on each rank, of home experts and of replicas, [2, W]."""
    time_2W = np.zeros((2, W))
    for v in range(len(pairs_V)):
        if pairs_V[v]:
            time_2W[1 if is_replica_V[v] else 0, rank_V[v]] += group_s + pair_s * pairs_V[v]
    return time_2W


@_jit
def counts_of_gaps(in_gap_CWE, sorted_CE, turns_CE, order_CE, tokens_W):
    """Starts in the gaps between the experts' ends -> pairs of every expert, [C, W, E].

    Args:
        in_gap_CWE: starts before the first end, then between the ends in ascending order.
        sorted_CE: which of the experts, in their random order, has the i-th smallest end.
        turns_CE: whole turns before each expert's end, in the random order.
        order_CE: expert at each place of the random order.
    """
    C, W = in_gap_CWE.shape[:2]
    E = order_CE.shape[1]
    counts_CWE = np.empty((C, W, E), np.int64)
    below_E = np.empty(E, np.int64)
    for c in range(C):
        for w in range(W):
            below = 0
            for i in range(E):
                below += in_gap_CWE[c, w, i]
                place = sorted_CE[c, i]
                below_E[place] = below + turns_CE[c, place] * tokens_W[w]
            for place in range(E):
                before = below_E[place - 1] if place else 0
                counts_CWE[c, w, order_CE[c, place]] = below_E[place] - before
    return counts_CWE
