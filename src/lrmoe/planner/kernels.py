# mypy: ignore-errors
"""Instances, splits, quotas and predictions of a placement, compiled by numba.

Integers, but for costs. Every loop has a fixed order, so all ranks compute the same plan. Matrices
over sources are filled row by row: at a thousand ranks they are megabytes, and columns would touch
every cache line many times. They are allocated by the caller: numpy asks the system for huge pages,
and without them page faults took longer than the planning (9 ms instead of 0.5 for 25 megabytes).

Shape letters: W = ranks, E = experts, V = instances (rank-major), X = exports (an expert's pairs
that leave home for one other rank), L = replica slots of a rank, Q = quantiles of the score, C =
link classes (inside a node, between nodes).
"""

from __future__ import annotations

import numpy as np
from numba import njit

NO_LIMIT = 1 << 60

_jit = njit(cache=True, error_model="numpy")


@_jit
def sums(counts_WE):
    """Pairs of every expert."""
    W, E = counts_WE.shape
    load_E = np.zeros(E, np.int64)
    for r in range(W):
        for e in range(E):
            load_E[e] += counts_WE[r, e]
    return load_E


@_jit
def lay_out(load_E, W, expert_X, rank_X, pairs_X, held_WL):
    """Instances of home experts and exports, rank by rank: home experts, then replicas by slot.

    A replica keeps the slot that still holds its weights; the others take the lowest free ones, in
    the order of the exports.

    Returns:
        Expert, rank, slot (-1: home), pairs and "weights must travel" of every instance; the first
        instance of each rank; each expert's instances in ascending order, and where they start.
    """
    E, X = len(load_E), len(expert_X)
    V, L = E + X, held_WL.shape[1]
    expert_V, rank_V, slot_V = np.empty(V, np.int64), np.empty(V, np.int64), np.empty(V, np.int64)
    total_V, is_sent_V = np.empty(V, np.int64), np.zeros(V, np.bool_)
    begin_W = np.zeros(W + 1, np.int64)
    for x in range(X):
        begin_W[rank_X[x] + 1] += 1
    for e in range(E):
        begin_W[e * W // E + 1] += 1
    for r in range(W):
        begin_W[r + 1] += begin_W[r]
    end_W = begin_W[:-1].copy()
    for e in range(E):
        r = e * W // E
        v = end_W[r]
        end_W[r] = v + 1
        expert_V[v], rank_V[v], slot_V[v], total_V[v] = e, r, -1, load_E[e]
    home_end_W = end_W.copy()
    for x in range(X):
        e, r = expert_X[x], rank_X[x]
        v = end_W[r]
        end_W[r] = v + 1
        expert_V[v], rank_V[v], slot_V[v], total_V[v] = e, r, -1, pairs_X[x]
        is_sent_V[v] = True
        for s in range(L):
            if held_WL[r, s] == e:
                slot_V[v] = s
                is_sent_V[v] = False
                break
    for r in range(W):
        slot = 0
        for v in range(home_end_W[r], begin_W[r + 1]):
            if slot_V[v] >= 0:
                continue
            is_free = False
            while not is_free:
                is_free = True
                for u in range(home_end_W[r], begin_W[r + 1]):
                    if slot_V[u] == slot:
                        is_free = False
                        slot += 1
                        break
            slot_V[v] = slot
        for v in range(home_end_W[r] + 1, begin_W[r + 1]):  # by slot
            e, s, q, sent = expert_V[v], slot_V[v], total_V[v], is_sent_V[v]
            u = v - 1
            while u >= home_end_W[r] and slot_V[u] > s:
                expert_V[u + 1], slot_V[u + 1] = expert_V[u], slot_V[u]
                total_V[u + 1], is_sent_V[u + 1] = total_V[u], is_sent_V[u]
                u -= 1
            expert_V[u + 1], slot_V[u + 1], total_V[u + 1], is_sent_V[u + 1] = e, s, q, sent
    start_E, of_V = instances_of(expert_V, E)
    for e in range(E):
        away, home = 0, -1
        for i in range(start_E[e], start_E[e + 1]):
            v = of_V[i]
            if slot_V[v] >= 0:
                away += total_V[v]
            else:
                home = v
        total_V[home] -= away
    return expert_V, rank_V, slot_V, total_V, is_sent_V, begin_W, start_E, of_V


@_jit
def instances_of(expert_V, E):
    """Each expert's instances in ascending order: where they start, and which they are."""
    start_E = np.zeros(E + 1, np.int64)
    for e in expert_V:
        start_E[e + 1] += 1
    for e in range(E):
        start_E[e + 1] += start_E[e]
    next_E = start_E[:-1].copy()
    of_V = np.empty(len(expert_V), np.int64)
    for v in range(len(expert_V)):
        e = expert_V[v]
        of_V[next_E[e]] = v
        next_E[e] += 1
    return start_E, of_V


@_jit
def _reserve(counts_WE, e, rank_V, total_V, first, end, of_V, node_size, own_V, near_V, rest_V):
    """Room of each of an expert's instances by whom it is for: its own rank, its node, anyone."""
    W = counts_WE.shape[0]
    for i in range(first, end):
        v = of_V[i]
        own_V[v] = min(counts_WE[rank_V[v], e], total_V[v])
        rest_V[v] = total_V[v] - own_V[v]
    if node_size == W:
        return
    i = first
    while i < end:
        node = rank_V[of_V[i]] // node_size
        left = 0
        for r in range(node * node_size, (node + 1) * node_size):
            left += counts_WE[r, e]
        j = i
        while j < end and rank_V[of_V[j]] // node_size == node:
            left -= own_V[of_V[j]]
            j += 1
        for k in range(i, j):
            v = of_V[k]
            near_V[v] = min(rest_V[v], left)
            rest_V[v] -= near_V[v]
            left -= near_V[v]
        i = j


@_jit
def _hash(seed, i):
    """64 mixed bits of two integers (the finalizer of SplitMix64)."""
    z = np.uint64(seed) + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_jit
def _start_of_shares(total_V, seed, is_random):
    """Where the lines of shares start, and one over their lengths."""
    V = len(total_V)
    rest_V, inverse_V = np.empty(V, np.int64), np.empty(V)
    for v in range(V):
        total = max(total_V[v], 1)
        inverse_V[v] = 1.0 / total
        rest_V[v] = total >> 1
        if is_random:
            rest_V[v] = np.int64((_hash(seed, v) >> np.uint64(11)) % np.uint64(total))
    return rest_V, inverse_V


@_jit
def split_in_nodes(counts_WE, rank_V, total_V, start_E, of_V, node_size, forward_WV):
    """Set ``forward_WV``, pairs of each source at each instance: own rank first, then the node.

    A rank gives its own pairs to its own instance as far as that has room; what is left in a node
    fills the instances of the node; the rest fills what is left, source after source, instance
    after instance.
    """
    W, E = counts_WE.shape
    V = len(rank_V)
    own_V, near_V, rest_V = np.zeros(V, np.int64), np.zeros(V, np.int64), np.zeros(V, np.int64)
    own_E, near_E, rest_E = start_E[:-1].copy(), start_E[:-1].copy(), start_E[:-1].copy()
    for e in range(E):
        first, end = start_E[e], start_E[e + 1]
        if end - first > 1:
            _reserve(
                counts_WE, e, rank_V, total_V, first, end, of_V, node_size, own_V, near_V, rest_V
            )
    for r in range(W):
        base = r - r % node_size
        for v in range(V):
            forward_WV[r, v] = 0
        for e in range(E):
            first, end, n = start_E[e], start_E[e + 1], counts_WE[r, e]
            if end - first == 1:
                forward_WV[r, of_V[first]] = n
                continue
            i = own_E[e]
            if i < end and rank_V[of_V[i]] == r:
                v = of_V[i]
                own_E[e] = i + 1
                forward_WV[r, v] = own_V[v]
                n -= own_V[v]
            i = near_E[e]
            while i < end and rank_V[of_V[i]] < base:
                i += 1
            while n > 0 and i < end and rank_V[of_V[i]] < base + node_size:
                v = of_V[i]
                q = min(n, near_V[v])
                near_V[v] -= q
                forward_WV[r, v] += q
                n -= q
                if near_V[v] == 0:
                    i += 1
            near_E[e] = i
            i = rest_E[e]
            while n > 0:
                v = of_V[i]
                q = min(n, rest_V[v])
                rest_V[v] -= q
                forward_WV[r, v] += q
                n -= q
                if rest_V[v] == 0:
                    i += 1
            rest_E[e] = i


@_jit
def split_and_share(
    counts_WE, expert_V, rank_V, total_V, begin_W, start_E, of_V, forward_WV,
    with_shares, kept_V, seed, is_random, backward_WV, quota_WE, reached_WE,
):  # fmt: skip
    """:func:`split_in_nodes` for one node, and if wanted :func:`share_sources`, row by row.

    At any time each expert has one *current* instance, which takes the sources' pairs until it is
    full. So a row has one entry per expert, in arrays by expert that vector registers can run over,
    and a few more: instances on the source's own rank, and those that fill up.
    """
    W, E = counts_WE.shape
    V = len(rank_V)
    own_V, near_V, rest_V = np.zeros(V, np.int64), np.zeros(V, np.int64), np.zeros(V, np.int64)
    current_E, place_E = np.empty(E, np.int64), start_E[:-1].copy()
    left_E = np.full(E, NO_LIMIT)  # of the current instance, for others than its own rank
    for e in range(E):
        first, end = start_E[e], start_E[e + 1]
        current_E[e] = of_V[first]
        if end - first > 1:
            _reserve(counts_WE, e, rank_V, total_V, first, end, of_V, W, own_V, near_V, rest_V)
            left_E[e] = rest_V[of_V[first]]
    line_V, inverse_V = _start_of_shares(total_V, seed, is_random)
    total_V = np.maximum(total_V, 1)  # an instance without pairs must not divide by zero
    # The current instances' entries of the arrays over instances.
    line_E, inverse_E = line_V[current_E], inverse_V[current_E]
    total_E, kept_E = total_V[current_E], kept_V[current_E]
    pairs_E = np.empty(E, np.int64)
    more_V = np.zeros(V, np.int64)  # pairs in this row beside those of the current instances
    more = np.empty(V, np.int64)
    for r in range(W):
        num_more = 0
        for e in range(E):
            pairs_E[e] = counts_WE[r, e]
        for v in range(begin_W[r], begin_W[r + 1]):
            if own_V[v] > 0:
                pairs_E[expert_V[v]] -= own_V[v]
                more_V[v] = own_V[v]
                more[num_more] = v
                num_more += 1
        lowest = 0
        for e in range(E):
            left_E[e] -= pairs_E[e]
            lowest = min(lowest, left_E[e])
        if lowest < 0:
            for e in range(E):
                while left_E[e] < 0:
                    over, v = -left_E[e], current_E[e]
                    if more_V[v] == 0:
                        more[num_more] = v
                        num_more += 1
                    more_V[v] += pairs_E[e] - over
                    pairs_E[e] = over
                    line_V[v] = line_E[e]
                    place_E[e] += 1
                    v = of_V[place_E[e]]
                    current_E[e], left_E[e] = v, rest_V[v] - over
                    line_E[e], inverse_E[e] = line_V[v], inverse_V[v]
                    total_E[e], kept_E[e] = total_V[v], kept_V[v]
        for v in range(V):
            forward_WV[r, v] = 0
        for e in range(E):
            forward_WV[r, current_E[e]] = pairs_E[e]
        if with_shares:
            for v in range(V):
                backward_WV[r, v] = 0
            # Without branches. A float's quotient is off by one at most, as long as the products
            # stay below 2^53.
            for e in range(E):
                line = line_E[e] + pairs_E[e] * kept_E[e]
                share = np.int64(line * inverse_E[e])
                rest = line - share * total_E[e]
                share += np.int64(rest >= total_E[e]) - np.int64(rest < 0)
                line_E[e] = line - share * total_E[e]
                quota_WE[r, e] = share
            for e in range(E):
                backward_WV[r, current_E[e]] = quota_WE[r, e]
            if is_random:
                for e in range(E):
                    exact = min(1.0, pairs_E[e] * kept_E[e] * inverse_E[e])
                    reached_WE[r, e] = exact if counts_WE[r, e] > 0 else 1.0
        for i in range(num_more):
            v = more[i]
            e, q = expert_V[v], more_V[v]
            more_V[v] = 0
            forward_WV[r, v] += q
            if not with_shares:
                continue
            is_current = current_E[e] == v
            line = (line_E[e] if is_current else line_V[v]) + q * kept_V[v]
            share = line // total_V[v]
            if is_current:
                line_E[e] = line - share * total_V[v]
            else:
                line_V[v] = line - share * total_V[v]
            backward_WV[r, v] += share
            quota_WE[r, e] += share
            if is_random and is_current:
                reached_WE[r, e] = min(1.0, forward_WV[r, v] * kept_V[v] * inverse_V[v])
        if is_random and with_shares:
            for i in range(num_more):  # the instances' starts are independent
                v = more[i]
                e = expert_V[v]
                if current_E[e] != v:
                    missed = max(0.0, 1.0 - forward_WV[r, v] * kept_V[v] * inverse_V[v])
                    reached_WE[r, e] = 1.0 - (1.0 - reached_WE[r, e]) * missed


@_jit
def share_quotas(quota_E, load_E, total_V, start_E, of_V):
    """Each instance's part of its expert's quota, in proportion to its pairs, largest remainder."""
    kept_V = np.zeros(len(total_V), np.int64)
    for e in range(len(load_E)):
        first, end = start_E[e], start_E[e + 1]
        if end - first == 1:
            kept_V[of_V[first]] = quota_E[e]
            continue
        if load_E[e] == 0:
            continue
        left = quota_E[e]
        for i in range(first, end):
            v = of_V[i]
            kept_V[v] = quota_E[e] * total_V[v] // load_E[e]
            left -= kept_V[v]
        while left > 0:  # fewer steps than instances
            best, most = -1, -1
            for i in range(first, end):
                v = of_V[i]
                rest = quota_E[e] * total_V[v] - kept_V[v] * load_E[e]
                if rest > most and kept_V[v] < total_V[v]:
                    best, most = v, rest
            kept_V[best] += 1
            left -= 1
    return kept_V


@_jit
def least_kept(total_V, load_E, start_E, of_V, numerator, denominator):
    """Pairs of each instance that no mode may drop: a share of them, one per expert at least."""
    least_V = np.empty(len(total_V), np.int64)
    for v in range(len(total_V)):
        least_V[v] = (total_V[v] * numerator + denominator - 1) // denominator
    for e in range(len(load_E)):
        kept, largest = 0, of_V[start_E[e]]
        for i in range(start_E[e], start_E[e + 1]):
            kept += least_V[of_V[i]]
            if total_V[of_V[i]] > total_V[largest]:
                largest = of_V[i]
        if kept == 0 and load_E[e] > 0:
            least_V[largest] = 1
    return least_V


@_jit
def drop_on_rank(amount, first, end, expert_V, total_V, kept_V, least_V, score_EQ):
    """Drop ``amount`` more pairs among a rank's instances, where the scores lost are the lowest.

    Without scores all instances lose the same share. With them, the pairs of an instance are taken
    to be spread evenly over its expert's quantiles, the lowest of which are dropped already; the
    share of an instance grows as long as its next score is below those of the others. Never more
    than ``kept_V - least_V``.
    """
    room = 0
    for v in range(first, end):
        room += kept_V[v] - least_V[v]
    amount = min(amount, room)
    if amount <= 0:
        return
    Q = score_EQ.shape[1]
    # The largest level (a share in 1 / 2^20, or a score) that does not drop too much.
    before_V = kept_V[first:end].copy()
    if Q == 0:
        low, high = 0, 1 << 20
        while high - low > 1:
            middle = (low + high) >> 1
            dropped = 0
            for v in range(first, end):
                dropped += min(kept_V[v] - least_V[v], (kept_V[v] * middle) >> 20)
            if dropped <= amount:
                low = middle
            else:
                high = middle
        for v in range(first, end):
            q = min(kept_V[v] - least_V[v], (kept_V[v] * low) >> 20)
            kept_V[v] -= q
            amount -= q
    else:
        while amount > 0:  # each turn finishes one part of one instance
            best, least_score = -1, np.inf
            for v in range(first, end):
                if kept_V[v] > least_V[v]:
                    part = min(Q - 1, (total_V[v] - kept_V[v]) * Q // total_V[v])
                    if score_EQ[expert_V[v], part] < least_score:
                        best, least_score = v, score_EQ[expert_V[v], part]
            part = (total_V[best] - kept_V[best]) * Q // total_V[best]
            # pairs up to the end of this part of the quantiles
            until = ((part + 1) * total_V[best] + Q - 1) // Q - (total_V[best] - kept_V[best])
            q = min(min(amount, max(until, 1)), kept_V[best] - least_V[best])
            kept_V[best] -= q
            amount -= q
    while amount > 0:  # rounding: those that have lost the smallest share so far
        best, least_share = -1, 2.0
        for v in range(first, end):
            if kept_V[v] > least_V[v]:
                share = (before_V[v - first] - kept_V[v]) / before_V[v - first]
                if share < least_share:
                    best, least_share = v, share
        kept_V[best] -= 1
        amount -= 1


@_jit
def drop_pairs(extra, cap_W, begin_W, expert_V, total_V, kept_V, least_V, score_EQ):
    """Lower ``kept_V`` to the ranks' caps, and spend ``extra`` drops on the busiest ranks.

    The drops that caps force count as part of ``extra``. What is left of it levels the ranks from
    above, to the level at which it is used up. A cap that ``least_V`` does not allow stays unmet,
    which :func:`lrmoe.planner.settle.settle` finds.
    """
    W = len(cap_W)
    work_W, room_W = np.zeros(W, np.int64), np.zeros(W, np.int64)
    for r in range(W):
        for v in range(begin_W[r], begin_W[r + 1]):
            work_W[r] += kept_V[v]
            room_W[r] += kept_V[v] - least_V[v]
    low, high = -1, 0  # the level: too low, low enough
    for r in range(W):
        high = max(high, work_W[r])
    while high - low > 1:
        middle = (low + high) >> 1
        dropped = 0
        for r in range(W):
            dropped += min(room_W[r], max(0, work_W[r] - min(middle, cap_W[r])))
        if dropped <= extra:
            high = middle
        else:
            low = middle
    left = extra
    drop_W = np.zeros(W, np.int64)
    for r in range(W):
        drop_W[r] = max(0, work_W[r] - min(high, cap_W[r]))
        left -= min(room_W[r], drop_W[r])
    while left > 0:  # less than one more for every rank at the level
        changed = False
        for r in range(W):
            if left > 0 and drop_W[r] < room_W[r] and work_W[r] - drop_W[r] >= high:
                drop_W[r] += 1
                left -= 1
                changed = True
        if not changed:
            break
    for r in range(W):
        drop_on_rank(
            drop_W[r], begin_W[r], begin_W[r + 1], expert_V, total_V, kept_V, least_V, score_EQ
        )


@_jit
def share_sources(
    forward_WV, total_V, kept_V, expert_V, seed, is_random, backward_WV, quota_WE, reached_WE
):
    """Set each source's share of an instance's kept pairs, and the sums over an expert's instances.

    ``reached_WE`` is the probability that a sum is not zero (1 for a source without pairs).

    Systematic rounding: the exact shares ``f b / F`` of an instance are laid end to end, and a
    source gets one more where the line crosses an integer, seen from the middle of the first, or
    from a random start. Every share is its exact value rounded down or up, and they add up. (The
    largest remainder does too, but needs a sort of every column.)
    """
    W, V = forward_WV.shape
    rest_V, _ = _start_of_shares(total_V, seed, is_random)
    E = quota_WE.shape[1]
    has_pairs_E = np.empty(E, np.bool_)
    for r in range(W):
        for e in range(E):
            quota_WE[r, e] = 0
            has_pairs_E[e] = False
            if is_random:
                reached_WE[r, e] = 0.0
        for v in range(V):
            backward_WV[r, v] = 0
            if forward_WV[r, v] > 0:
                e, q = expert_V[v], forward_WV[r, v]
                line = rest_V[v] + q * kept_V[v]
                share = line // total_V[v]
                rest_V[v] = line - share * total_V[v]
                backward_WV[r, v] = share
                quota_WE[r, e] += share
                has_pairs_E[e] = True
                if is_random:  # the instances' starts are independent
                    missed = max(0.0, 1.0 - q * kept_V[v] / total_V[v])
                    reached_WE[r, e] = 1.0 - (1.0 - reached_WE[r, e]) * missed
        if is_random:
            for e in range(E):
                if not has_pairs_E[e]:
                    reached_WE[r, e] = 1.0


@_jit
def with_headroom(kept_V, limit_W, begin_W, start_E, expert_V):
    """Kept pairs an instance may take: its plan, and its part of the room its rank has left.

    Only experts with several instances can use room: the kept pairs of the others are fixed.
    """
    capacity_V = kept_V.copy()
    for r in range(len(limit_W)):
        work, shared = 0, 0
        for v in range(begin_W[r], begin_W[r + 1]):
            work += kept_V[v]
            e = expert_V[v]
            if start_E[e + 1] - start_E[e] > 1:
                shared += kept_V[v]
        room = limit_W[r] - work
        if room <= 0 or shared == 0:
            continue
        for v in range(begin_W[r], begin_W[r + 1]):
            e = expert_V[v]
            if start_E[e + 1] - start_E[e] > 1:
                capacity_V[v] += room * kept_V[v] // shared
    return capacity_V


@_jit
def home_peak(load_E, W):
    """Largest home load of a rank."""
    E = len(load_E)
    load_W = np.zeros(W, np.int64)
    peak = 0
    for e in range(E):
        r = e * W // E
        load_W[r] += load_E[e]
        peak = max(peak, load_W[r])
    return peak


@_jit
def expert_sums(values_V, start_E, of_V):
    """Sum over each expert's instances."""
    E = len(start_E) - 1
    total_E = np.zeros(E, np.int64)
    for e in range(E):
        for i in range(start_E[e], start_E[e + 1]):
            total_E[e] += values_V[of_V[i]]
    return total_E


@_jit
def rank_work(total_V, kept_V, begin_W):
    """Pairs of each rank in the two passes; the largest of each, and all kept ones."""
    W = len(begin_W) - 1
    forward_W, backward_W = np.zeros(W, np.int64), np.zeros(W, np.int64)
    forward, backward, kept = 0, 0, 0
    for r in range(W):
        for v in range(begin_W[r], begin_W[r + 1]):
            forward_W[r] += total_V[v]
            backward_W[r] += kept_V[v]
        forward = max(forward, forward_W[r])
        backward = max(backward, backward_W[r])
        kept += backward_W[r]
    return forward_W, backward_W, forward, backward, kept


@_jit
def rank_sums(values_V, begin_W):
    """Sum over each rank's instances."""
    total_W = np.zeros(len(begin_W) - 1, np.int64)
    for r in range(len(begin_W) - 1):
        for v in range(begin_W[r], begin_W[r + 1]):
            total_W[r] += values_V[v]
    return total_W


@_jit
def count_rows(forward_WV, backward_WV, tokens_W, begin_W, node_size):
    """Token rows: received by each rank in both passes, and crossing its links of each class.

    A source sends a rank at most one row per token, and at most one per pair. Rows go there and
    back, so a rank's link carries the rows it sends as a source and those it returns as a computing
    rank; both directions carry the same.
    """
    W = len(tokens_W)
    received_2W = np.zeros((2, W), np.int64)
    crossing_2CW = np.zeros((2, 2, W), np.int64)
    for s in range(W):
        for r in range(W):
            forward, backward = 0, 0
            for v in range(begin_W[r], begin_W[r + 1]):
                forward += forward_WV[s, v]
                backward += backward_WV[s, v]
            forward = min(forward, tokens_W[s])
            backward = min(backward, forward)
            received_2W[0, r] += forward
            received_2W[1, r] += backward
            if s != r:
                c = 0 if s // node_size == r // node_size else 1
                crossing_2CW[0, c, s] += forward
                crossing_2CW[0, c, r] += forward
                crossing_2CW[1, c, s] += backward
                crossing_2CW[1, c, r] += backward
    return received_2W, crossing_2CW


@_jit
def count_copies(expert_V, rank_V, is_sent_V, is_again_V, E, W, node_size):
    """Copies of weights: sent and received by each rank over each class of link, and again in the
    backward pass. Gradients travel as the latter, in the other direction."""
    sent_2CW = np.zeros((2, 2, W), np.int64)
    received_2CW = np.zeros((2, 2, W), np.int64)
    for v in range(len(expert_V)):
        h, r = expert_V[v] * W // E, rank_V[v]
        c = 0 if h // node_size == r // node_size else 1
        if is_sent_V[v]:
            sent_2CW[0, c, h] += 1
            received_2CW[0, c, r] += 1
        if is_again_V[v]:
            sent_2CW[1, c, h] += 1
            received_2CW[1, c, r] += 1
    return sent_2CW, received_2CW
