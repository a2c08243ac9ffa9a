# mypy: ignore-errors
"""Which replicas level the ranks, compiled by numba: the search of ``placement="recalibrated"``.

The derivation is in :mod:`lrmoe.planner.recalibrated`. Integers only, and every loop has a fixed
order, so all ranks find the same replicas.

Shape letters: W = ranks, E = experts, L = replica slots of a rank, X = exports: pairs of an expert
that leave its home for a replica on another rank, R = the rows of a rank's state below. *Cost* of a
rank: its pairs, plus the set-up cost of the replicas it sends or receives, in pairs.

A state of the search is a handful of plain arrays, because numba compiles functions of records of
arrays many times slower:

- ``export_3X``: expert, rank and pairs of each export; ``num_1[0]`` of them are set
- ``rank_RW``: the rows COST .. OUT of each rank
- ``left_E``: pairs still at home
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import njit

NO_LIMIT = 1 << 60
EXPERT, RANK, PAIRS = 0, 1, 2
COST, WORK, LIMIT, FREE, OUT = 0, 1, 2, 3, 4  # WORK: pairs; LIMIT: pairs allowed; OUT: copies sent

_SWEEPS = 6
_SWEEPS_OF_A_TRIAL = 4
# The local search: how many of the least loaded ranks, of the busiest ranks and of a busy rank's
# experts it combines, and how many trials it may make. A trial costs about as many operations as
# there are replicas, so larger groups get fewer.
_RECEIVERS, _DONORS, _EXPERTS = 6, 2, 3
_TRIALS, _LEAST_TRIALS = 7200, 150
_STARTS = 4
_ROUNDS = 4
_LARGEST_GROUP = 128  # beyond it slots are hardly ever what limits, and scans get expensive

# Ways to move pairs off the ranks above a threshold.
_BEST_FIT, _LARGEST_ROOM, _LARGEST_CHUNK, _LARGEST_NEED = 0, 1, 2, 3

# memory_pairs: by how much a replica lowers its rank's limit. copies_out: replicas elsewhere of one
# rank's experts. setup_intra, setup_inter: cost of a replica in pairs, to the rank that sends the
# weights and the one that receives them. intra_only: no replica outside its home's node.
Rules = namedtuple(
    "Rules",
    ["memory_pairs", "copies_out", "setup_intra", "setup_inter", "node_size", "intra_only"],
)

# Compiling this file is what the first plan of a process waits for where no cache exists, so the
# functions avoid what numba is slow to compile: sorting, slice assignment, comparing tuples.
_jit = njit(cache=True, error_model="numpy")


@_jit
def _descending(values_W):
    """Positions in descending order of value, ties in ascending order (shell sort)."""
    W = len(values_W)
    order_W = np.arange(W)
    gap = W // 2
    while gap > 0:
        for i in range(gap, W):
            r = order_W[i]
            j = i - gap
            while j >= 0:
                o = order_W[j]
                if values_W[o] > values_W[r] or (values_W[o] == values_W[r] and o < r):
                    break
                order_W[j + gap] = o
                j -= gap
            order_W[j + gap] = r
        gap //= 2
    return order_W


@_jit
def _largest(values_W):
    largest = values_W[0]
    for value in values_W:
        largest = max(largest, value)
    return largest


@_jit
def _copy(to_3X, to_num_1, to_RW, to_E, of_3X, of_num_1, of_RW, of_E):
    """Make one state equal to another."""
    num = of_num_1[0]
    to_num_1[0] = num
    for row in range(3):
        for x in range(num):
            to_3X[row, x] = of_3X[row, x]
    for row in range(of_RW.shape[0]):
        for r in range(of_RW.shape[1]):
            to_RW[row, r] = of_RW[row, r]
    for e in range(len(of_E)):
        to_E[e] = of_E[e]


@_jit
def _is_less(over, cost, than_over, than_cost):
    return over < than_over or (over == than_over and cost < than_cost)


@_jit
def home_layout(load_E, W):
    """Home load per rank; each rank's run of experts, heaviest first; ranks, heaviest first."""
    E = len(load_E)
    load_W = np.zeros(W, np.int64)
    first_W = np.empty(W + 1, np.int64)
    order_E = np.arange(E)
    for r in range(W + 1):
        first_W[r] = (r * E + W - 1) // W
    for r in range(W):
        a, b = first_W[r], first_W[r + 1]
        for i in range(a, b):
            load_W[r] += load_E[i]
        for i in range(a + 1, b):
            e = order_E[i]
            j = i - 1
            while j >= a and load_E[order_E[j]] < load_E[e]:
                order_E[j + 1] = order_E[j]
                j -= 1
            order_E[j + 1] = e
    return load_W, first_W, order_E, _descending(load_W)


@_jit
def _setup(a, d, rules):
    """Cost in pairs of a replica on rank ``d`` of an expert of rank ``a``, to each of them."""
    if a // rules.node_size == d // rules.node_size:
        return rules.setup_intra
    return rules.setup_inter


@_jit
def _room(rank_RW, threshold, d, rules):
    """Pairs, and set-up cost, that one more replica on rank ``d`` could take."""
    return min(
        threshold - rank_RW[COST, d],
        rank_RW[LIMIT, d] - rules.memory_pairs - rank_RW[WORK, d],
    )


@_jit
def _need(rank_RW, threshold, a):
    """What rank ``a`` is above the threshold or its limit; not positive if it is not."""
    return max(rank_RW[COST, a] - threshold, rank_RW[WORK, a] - rank_RW[LIMIT, a])


@_jit
def _export(export_3X, num_1, rank_RW, left_E, e, a, d, q, setup, memory_pairs):
    """Move ``q`` pairs of expert ``e`` from its home ``a`` into a new replica on rank ``d``."""
    x = num_1[0]
    num_1[0] = x + 1
    export_3X[EXPERT, x] = e
    export_3X[RANK, x] = d
    export_3X[PAIRS, x] = q
    left_E[e] -= q
    rank_RW[WORK, a] -= q
    rank_RW[WORK, d] += q
    rank_RW[COST, a] += setup - q
    rank_RW[COST, d] += setup + q
    rank_RW[LIMIT, d] -= memory_pairs
    rank_RW[FREE, d] -= 1
    rank_RW[OUT, a] += 1


@_jit
def _remove(export_3X, num_1, rank_RW, left_E, x, a, setup, memory_pairs):
    """Undo export ``x`` of an expert of rank ``a``; the last export takes its place."""
    e, d, q = export_3X[EXPERT, x], export_3X[RANK, x], export_3X[PAIRS, x]
    left_E[e] += q
    rank_RW[WORK, a] += q
    rank_RW[WORK, d] -= q
    rank_RW[COST, a] += q - setup
    rank_RW[COST, d] -= q + setup
    rank_RW[LIMIT, d] += memory_pairs
    rank_RW[FREE, d] += 1
    rank_RW[OUT, a] -= 1
    last = num_1[0] - 1
    num_1[0] = last
    for row in range(3):
        export_3X[row, x] = export_3X[row, last]


@_jit
def _enqueue(queue, size, room_W, d):
    """Insert a rank into the queue of receivers: ascending room, the lower rank last among ties."""
    i = size - 1
    room = room_W[d]
    while i >= 0 and (room_W[queue[i]] > room or (room_W[queue[i]] == room and queue[i] < d)):
        queue[i + 1] = queue[i]
        i -= 1
    queue[i + 1] = d


@_jit
def _tightest(queue, size, room_W, need):
    """First place in the queue whose room is at least ``need``; ``size`` if there is none."""
    low, high = 0, size
    while low < high:
        middle = (low + high) >> 1
        if room_W[queue[middle]] < need:
            low = middle + 1
        else:
            high = middle
    return low


@_jit
def _holder(queue, size, room_W, held_WL, e, want):
    """Place in the queue of the rank that still holds the weights of ``e``; -1 if none is worth it.

    Weights that are there already cost nothing, if the chunk is not much smaller for it.
    """
    place, best = -1, 0
    for j in range(size):
        for s in range(held_WL.shape[1]):
            if held_WL[queue[j], s] == e and min(room_W[queue[j]], want) > best:
                best = min(room_W[queue[j]], want)
                place = j
    return place if 2 * best >= want else -1


@_jit
def _neighbour(queue, size, room_W, a, want, rules, is_best_fit):
    """Place in the queue of a rank in the node of ``a``; -1 if none takes a fair part of it."""
    place = -1
    setup = rules.setup_intra
    for j in range(size):
        if queue[j] // rules.node_size == a // rules.node_size:
            place = j  # ascending room: the last is the largest
            if is_best_fit and room_W[queue[j]] >= want + setup:
                break
    if place >= 0 and not rules.intra_only:
        chunk = min(room_W[queue[place]] - setup, want)
        if chunk <= setup or 2 * chunk < want:
            return -1
    return place


@_jit
def export_rank_by_rank(
    export_3X, num_1, rank_RW, left_E, threshold, first_W, order_E, rank_order_W, rules, held_WL,
    is_best_fit,
):  # fmt: skip
    """Move pairs off every rank above ``threshold``, the heaviest rank first.

    Each time the expert with the most pairs left at home goes to the rank whose room is the
    tightest that takes all of the chunk (``is_best_fit``: large rooms stay for large chunks), or
    else to the largest room. So every chunk exhausts a need, a room or an expert.
    """
    W = len(first_W) - 1
    order_E = order_E.copy()
    room_W = np.empty(W, np.int64)
    queue = np.empty(W + 1, np.int64)
    size = 0
    has_nodes = rules.node_size < W
    prefers_node = has_nodes and (rules.intra_only or rules.setup_intra < rules.setup_inter)
    farthest = rules.setup_inter if has_nodes else rules.setup_intra
    for i in range(W):  # heaviest first, so rooms mostly arrive ascending
        d = rank_order_W[i]
        room_W[d] = _room(rank_RW, threshold, d, rules)
        if rank_RW[FREE, d] > 0 and room_W[d] > rules.setup_intra:
            _enqueue(queue, size, room_W, d)
            size += 1
    for i in range(W):
        a = rank_order_W[i]
        first, end = first_W[a], first_W[a + 1]
        while first < end and size > 0 and rank_RW[OUT, a] < rules.copies_out:
            need = _need(rank_RW, threshold, a)
            e = order_E[first]
            available = left_E[e]
            if need <= 0 or available == 0:
                break
            place = -1
            if held_WL.shape[1] > 0:
                place = _holder(queue, size, room_W, held_WL, e, min(need, available))
            is_held = place >= 0
            if place < 0 and prefers_node:
                want = min(need + rules.setup_intra, available)
                place = _neighbour(queue, size, room_W, a, want, rules, is_best_fit)
                if place < 0 and rules.intra_only:
                    break
            if place < 0:
                place = size - 1
                if is_best_fit:
                    least = min(need + farthest, available) + farthest
                    place = min(place, _tightest(queue, size, room_W, least))
            d = queue[place]
            setup = 0 if is_held else _setup(a, d, rules)
            q = min(min(room_W[d] - setup, available), need + setup)
            if q <= setup:
                break  # would cost both ranks more than it moves
            _export(export_3X, num_1, rank_RW, left_E, e, a, d, q, setup, rules.memory_pairs)
            size -= 1
            for j in range(place, size):
                queue[j] = queue[j + 1]
            # A rank that could not take all is full, and must not get the same expert again.
            is_full = q < available and q < need + setup
            room_W[d] = _room(rank_RW, threshold, d, rules)
            if rank_RW[FREE, d] > 0 and room_W[d] > rules.setup_intra and not is_full:
                _enqueue(queue, size, room_W, d)
                size += 1
            place = first
            while place + 1 < end and left_E[order_E[place + 1]] > left_E[e]:
                order_E[place] = order_E[place + 1]
                place += 1
            order_E[place] = e


@_jit
def export_chunk_by_chunk(export_3X, num_1, rank_RW, left_E, threshold, first_W, rules, by_need):
    """Move pairs off the ranks above ``threshold``, over all of them the largest chunk first.

    A chunk goes to the rank with the most room per free slot: the one that can least afford small
    chunks. For groups in which slots are scarce.

    Args:
        by_need: the rank furthest above the threshold first, instead of the largest chunk.
    """
    W = len(first_W) - 1
    is_done_W = np.zeros(W, np.bool_)
    last_W = np.full(W, -1)  # the expert a rank was given last; it was all the rank could take
    while True:
        a, e, want, best = -1, -1, 0, 0
        for r in range(W):
            need = _need(rank_RW, threshold, r)
            if need <= 0 or is_done_W[r]:
                continue
            top, most = -1, 0
            for f in range(first_W[r], first_W[r + 1]):
                if left_E[f] > most:
                    top, most = f, left_E[f]
            value = need if by_need else min(need, most)
            if top >= 0 and value > best:
                a, e, want, best = r, top, min(need, most), value
        if a < 0:
            break
        d = -1
        most_room = 0.0
        for r in range(W):
            is_near = r // rules.node_size == a // rules.node_size
            if rank_RW[FREE, r] <= 0 or last_W[r] == e or (rules.intra_only and not is_near):
                continue
            setup = _setup(a, r, rules)
            room = _room(rank_RW, threshold, r, rules) - setup
            if room > setup and room / rank_RW[FREE, r] > most_room:
                most_room = room / rank_RW[FREE, r]
                d = r
        if d < 0 or rank_RW[OUT, a] >= rules.copies_out:
            is_done_W[a] = True
            continue
        setup = _setup(a, d, rules)
        q = min(min(want + setup, left_E[e]), _room(rank_RW, threshold, d, rules) - setup)
        if q <= setup:
            is_done_W[a] = True
            continue
        _export(export_3X, num_1, rank_RW, left_E, e, a, d, q, setup, rules.memory_pairs)
        last_W[d] = e


@_jit
def level(export_3X, num, rank_RW, left_E, home_E, sweeps):
    """Even out every export between its two ranks, in turns.

    The replicas are paid for, so they may as well level the ranks further. Each step moves the two
    ranks towards their mean, so no rank ever gets worse than the worse of the two.
    """
    for _ in range(sweeps):
        moved = 0
        for x in range(num):
            e, d = export_3X[EXPERT, x], export_3X[RANK, x]
            a = home_E[e]
            gap = rank_RW[COST, a] - rank_RW[COST, d]
            step = gap // 2 if gap >= 0 else -((-gap) // 2)
            if step > 0:
                step = min(step, min(left_E[e], rank_RW[LIMIT, d] - rank_RW[WORK, d]))
            else:
                step = max(step, max(-export_3X[PAIRS, x], rank_RW[WORK, a] - rank_RW[LIMIT, a]))
            if step == 0 or (step > 0) != (gap > 0):
                continue
            export_3X[PAIRS, x] += step
            left_E[e] -= step
            rank_RW[WORK, a] -= step
            rank_RW[WORK, d] += step
            rank_RW[COST, a] -= step
            rank_RW[COST, d] += step
            moved += abs(step)
        if moved == 0:
            break


@_jit
def _over_limits(rank_RW):
    """Pairs beyond the ranks' limits."""
    over = 0
    for r in range(rank_RW.shape[1]):
        over += max(0, rank_RW[WORK, r] - rank_RW[LIMIT, r])
    return over


@_jit
def _drop_empty(export_3X, num_1, rank_RW, left_E, home_E, rules):
    """Remove replicas that levelling left without pairs."""
    x = 0
    while x < num_1[0]:
        if export_3X[PAIRS, x] == 0:
            a = home_E[export_3X[EXPERT, x]]
            setup = _setup(a, export_3X[RANK, x], rules)
            _remove(export_3X, num_1, rank_RW, left_E, x, a, setup, rules.memory_pairs)
        else:
            x += 1


@_jit
def _distance(rank_RW, goal):
    """Sum of squared distances from the goal, and from limits that are exceeded.

    Ranks below the goal count as well: room that no expert fits into is as bad as the excess that
    it does not take.
    """
    total = 0.0
    for r in range(rank_RW.shape[1]):
        off = float(rank_RW[COST, r] - goal)
        over = float(max(0, rank_RW[WORK, r] - rank_RW[LIMIT, r]))
        total += off * off + over * over
    return total


@_jit
def _heaviest(left_E, first, end, below, after):
    """The expert that follows (``below`` pairs, number ``after``) in descending order; -1: none."""
    e, top = -1, 0
    for f in range(first, end):
        n = left_E[f]
        if n > top and (n < below or (n == below and f > after)):
            e, top = f, n
    return e


@_jit
def _is_on(export_3X, num, e, d):
    for y in range(num):  # noqa: SIM110 - numba has no any() over a generator
        if export_3X[EXPERT, y] == e and export_3X[RANK, y] == d:
            return True
    return False


@_jit
def improve(export_3X, num_1, rank_RW, left_E, goal, first_W, home_E, rules, trials):
    """Exchange replicas while that brings the ranks closer to the goal; best exchange first.

    An exchange gives a slot of one of the least loaded ranks, free or taken by another replica, to
    one of the heaviest experts of one of the busiest ranks; then everything is levelled again.

    Returns:
        Trials made.
    """
    W = rank_RW.shape[1]
    trial_3X, trial_num_1 = np.empty_like(export_3X), np.zeros(1, np.int64)
    trial_RW, trial_E = np.empty_like(rank_RW), np.empty_like(left_E)
    best_3X, best_num_1 = np.empty_like(export_3X), np.zeros(1, np.int64)
    best_RW, best_E = np.empty_like(rank_RW), np.empty_like(left_E)
    made = 0
    while made < trials:
        if _largest(rank_RW[COST]) <= goal and _over_limits(rank_RW) == 0:
            break
        least = _distance(rank_RW, goal)
        order_W = _descending(rank_RW[COST])
        is_better = False
        num = num_1[0]
        for i in range(min(_RECEIVERS, W)):
            d = order_W[W - 1 - i]
            for x in range(num + 1):
                if x == num and (rank_RW[FREE, d] <= 0 or num == export_3X.shape[1]):
                    continue
                if x < num and export_3X[RANK, x] != d:
                    continue
                for j in range(min(_DONORS, W)):
                    a = order_W[j]
                    if a == d or _need(rank_RW, goal, a) <= 0:
                        continue
                    if rank_RW[OUT, a] >= rules.copies_out:
                        continue
                    if rules.intra_only and a // rules.node_size != d // rules.node_size:
                        continue
                    below, e = NO_LIMIT, -1
                    for _ in range(_EXPERTS):
                        e = _heaviest(left_E, first_W[a], first_W[a + 1], below, e)
                        if e < 0:
                            break
                        below = left_E[e]
                        if _is_on(export_3X, num, e, d):
                            continue
                        made += 1
                        _copy(
                            trial_3X, trial_num_1, trial_RW, trial_E, export_3X, num_1, rank_RW,
                            left_E,
                        )  # fmt: skip
                        if x < num:
                            h = home_E[export_3X[EXPERT, x]]
                            _remove(
                                trial_3X, trial_num_1, trial_RW, trial_E, x, h,
                                _setup(h, d, rules), rules.memory_pairs,
                            )  # fmt: skip
                        _export(
                            trial_3X, trial_num_1, trial_RW, trial_E, e, a, d, 0,
                            _setup(a, d, rules), rules.memory_pairs,
                        )  # fmt: skip
                        level(
                            trial_3X, trial_num_1[0], trial_RW, trial_E, home_E,
                            _SWEEPS_OF_A_TRIAL,
                        )  # fmt: skip
                        value = _distance(trial_RW, goal)
                        if value < least:
                            least, is_better = value, True
                            _copy(
                                best_3X, best_num_1, best_RW, best_E, trial_3X, trial_num_1,
                                trial_RW, trial_E,
                            )  # fmt: skip
        if not is_better:
            break
        _copy(export_3X, num_1, rank_RW, left_E, best_3X, best_num_1, best_RW, best_E)
        level(export_3X, num_1[0], rank_RW, left_E, home_E, _SWEEPS)
        _drop_empty(export_3X, num_1, rank_RW, left_E, home_E, rules)
    return made


@_jit
def _attempt(
    export_3X, num_1, rank_RW, left_E, way, threshold, load_E, load_W, first_W, order_E,
    rank_order_W, home_E, limit_2W, rules, held_WL,
):  # fmt: skip
    """From all pairs at home: export in one of the four ways, then level."""
    num_1[0] = 0
    for r in range(len(load_W)):
        rank_RW[COST, r] = rank_RW[WORK, r] = load_W[r]
        rank_RW[LIMIT, r], rank_RW[FREE, r] = limit_2W[0, r], limit_2W[1, r]
        rank_RW[OUT, r] = 0
    for e in range(len(load_E)):
        left_E[e] = load_E[e]
    if way <= _LARGEST_ROOM:
        export_rank_by_rank(
            export_3X, num_1, rank_RW, left_E, threshold, first_W, order_E, rank_order_W, rules,
            held_WL, way == _BEST_FIT,
        )  # fmt: skip
    else:
        export_chunk_by_chunk(
            export_3X, num_1, rank_RW, left_E, threshold, first_W, rules, way == _LARGEST_NEED
        )
    level(export_3X, num_1[0], rank_RW, left_E, home_E, _SWEEPS)
    _drop_empty(export_3X, num_1, rank_RW, left_E, home_E, rules)


@_jit
def place_replicas(load_E, W, slack, limit_2W, rules, held_WL):
    """Replicas with the least largest cost, and few of them.

    In order, until the largest cost is within the slack of the mean:

    1. Rank by rank, at a threshold of twice the slack (fewer replicas; levelling often reaches the
       slack all the same), then at the slack.
    2. Bisection for the least threshold that can be reached.
    3. All four ways around that threshold, and exchanges from the best few results.
    4. Fewer replicas within the slack of what was reached.

    Args:
        limit_2W: pairs a rank may compute, and replicas it may receive.

    Returns:
        Expert, rank and pairs of the exports; the largest cost; the pairs beyond the limits, 0 if
        the placement is legal.
    """
    E = len(load_E)
    home_E = np.arange(E) * W // E
    load_W, first_W, order_E, rank_order_W = home_layout(load_E, W)
    mean = (load_W.sum() + W - 1) // W
    goal = int(mean * (1.0 + slack))
    # One set of arrays for the running attempt, and the best few results, of which 0 is the best.
    size = 2 * W + E
    now_3X, now_num_1 = np.empty((3, size), np.int64), np.zeros(1, np.int64)
    now_RW, now_E = np.empty((5, W), np.int64), np.empty(E, np.int64)
    top_S3X, top_num_S1 = np.empty((_STARTS, 3, size), np.int64), np.zeros((_STARTS, 1), np.int64)
    top_SRW, top_SE = np.empty((_STARTS, 5, W), np.int64), np.empty((_STARTS, E), np.int64)
    cost_S, over_S = np.full(_STARTS, NO_LIMIT), np.full(_STARTS, NO_LIMIT)

    low, high, base = goal, NO_LIMIT, goal
    # Large groups take long to try and level to much the same anyway.
    fine = max(1, mean >> (8 if W <= _LARGEST_GROUP else 6))
    phase, step, favourite = 0, 0, _BEST_FIT
    while True:
        # Which way and which threshold comes next.
        if phase == 0:  # all at home, the two thresholds, and where limits are exceeded, no other
            if step == 7 or (step >= 5 and over_S[0] == 0):
                phase, step = 1, 0
                continue
            if step == 1 and W > _LARGEST_GROUP:
                step = 3  # levelling hardly ever gets so many ranks from twice the slack to it
            way = (step + 1) % 2
            threshold = NO_LIMIT if step in (0, 5, 6) else goal
            if step in (1, 2):
                threshold = int(mean * (1.0 + 2.0 * slack))
            if step == 0:
                way = _BEST_FIT
        elif phase == 1:  # bisection, each threshold in two ways
            if over_S[0] > 0 or high - low <= fine:
                phase, step = 2, 0
                base = max(goal, int(cost_S[0] * 0.96))
                continue
            threshold = (low + high) >> 1
            way = favourite if step == 0 else _LARGEST_ROOM - favourite
        elif phase == 2:  # around what was reached, each threshold in four ways
            if step == 12 or W > _LARGEST_GROUP or W == 1:
                phase, step = 3, 0
                continue
            threshold = int(base * (0.99 + 0.015 * (step // 4)))
            way = step % 4
        elif phase == 3:  # exchanges
            if W <= _LARGEST_GROUP and W > 1:
                _exchange_from_best(
                    top_S3X, top_num_S1, top_SRW, top_SE, cost_S, over_S, goal, first_W, home_E,
                    rules,
                )  # fmt: skip
            phase, step = 4, 0
            continue
        else:  # fewer replicas
            if step == 2 or over_S[0] > 0 or cost_S[0] <= goal:
                break
            threshold = int(cost_S[0] * (1.0 + slack))
            way = step
        step += 1
        _attempt(
            now_3X, now_num_1, now_RW, now_E, way, threshold, load_E, load_W, first_W, order_E,
            rank_order_W, home_E, limit_2W, rules, held_WL,
        )  # fmt: skip
        cost, over, num = _largest(now_RW[COST]), _over_limits(now_RW), now_num_1[0]

        # Where it belongs among the best few.
        place = _STARTS
        if phase < 4:
            while place > 0 and _is_less(over, cost, over_S[place - 1], cost_S[place - 1]):
                place -= 1
            if place > 0 and over == over_S[place - 1] and cost == cost_S[place - 1]:
                place = _STARTS  # the same result again
        elif over == 0 and cost <= threshold and num < top_num_S1[0, 0]:
            place = 0
        if place == 0 and way <= _LARGEST_ROOM:
            favourite = way
        if place < _STARTS:
            for s in range(_STARTS - 1, place - 1, -1):
                if s > place and over_S[s - 1] < NO_LIMIT:
                    _copy(
                        top_S3X[s], top_num_S1[s], top_SRW[s], top_SE[s], top_S3X[s - 1],
                        top_num_S1[s - 1], top_SRW[s - 1], top_SE[s - 1],
                    )  # fmt: skip
                    cost_S[s], over_S[s] = cost_S[s - 1], over_S[s - 1]
            _copy(
                top_S3X[place], top_num_S1[place], top_SRW[place], top_SE[place], now_3X,
                now_num_1, now_RW, now_E,
            )  # fmt: skip
            cost_S[place], over_S[place] = cost, over
        if over_S[0] == 0 and cost_S[0] <= goal and phase < 4:
            break
        if phase == 0 and over_S[0] == 0:
            high = cost_S[0]
        elif phase == 1:
            if over == 0 and cost <= threshold:
                high, step = min(threshold, cost_S[0]), 0
            elif step == 2:
                low, step = threshold, 0
    num = top_num_S1[0, 0]
    return (
        top_S3X[0, EXPERT, :num],
        top_S3X[0, RANK, :num],
        top_S3X[0, PAIRS, :num],
        cost_S[0],
        over_S[0],
    )


@_jit
def _exchange_from_best(
    top_S3X, top_num_S1, top_SRW, top_SE, cost_S, over_S, goal, first_W, home_E, rules
):
    """Improve the best few results in turn; the best of all becomes number 0."""
    left = max(_LEAST_TRIALS, _TRIALS // len(first_W))
    best = 0
    for s in range(_STARTS):
        # Towards a goal that is out of reach exchanges even out what does not matter, so the goal
        # stays just below what has been reached.
        for _ in range(_ROUNDS):
            if left <= 0 or cost_S[s] == NO_LIMIT or (over_S[best] == 0 and cost_S[best] <= goal):
                break
            near = max(goal, int(min(cost_S[best], cost_S[s]) * 0.97))
            left -= improve(
                top_S3X[s], top_num_S1[s], top_SRW[s], top_SE[s], near, first_W, home_E, rules,
                left,
            )  # fmt: skip
            before = cost_S[s]
            cost_S[s], over_S[s] = _largest(top_SRW[s, COST]), _over_limits(top_SRW[s])
            if _is_less(over_S[s], cost_S[s], over_S[best], cost_S[best]):
                best = s
            elif cost_S[s] >= before:
                break
    if best > 0:
        _copy(
            top_S3X[0], top_num_S1[0], top_SRW[0], top_SE[0], top_S3X[best], top_num_S1[best],
            top_SRW[best], top_SE[best],
        )  # fmt: skip
        cost_S[0], over_S[0] = cost_S[best], over_S[best]
