"""What of the selection is a loop on CPUs, compiled by numba; called through ``select``."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

_LONGEST = 256  # as select.LONGEST_CHAIN; not imported, since numba's cache would miss a change
_TAKEN = 1 << 16  # above any place and number of signs
# As in select.
_UNIT_BITS = 40
_ONE = 1 << _UNIT_BITS
_MEAN_SIZE = float(1 << 20)
_MAX_SIZE = (1 << 40) - 1
_LARGEST = float(np.finfo(np.float32).max)

u64 = np.uint64


@njit(inline="always", cache=True)
def _ones(bits):
    """Number of bits that are set."""
    bits = bits - ((bits >> u64(1)) & u64(0x5555555555555555))
    bits = (bits & u64(0x3333333333333333)) + ((bits >> u64(2)) & u64(0x3333333333333333))
    bits = (bits + (bits >> u64(4))) & u64(0x0F0F0F0F0F0F0F0F)
    return (bits * u64(0x0101010101010101)) >> u64(56)


@njit(cache=True)
def chained(order, starts, lengths, directions, result):
    """Fill ``result``; see :func:`lrmoe.select.chained`."""
    signs = np.empty(_LONGEST, np.uint64)
    taken = np.empty(_LONGEST, np.int64)
    for c in range(len(starts)):
        first, length = starts[c], lengths[c]
        if length > _LONGEST:
            raise ValueError("lengths: a run is longer than 256, which is allowed at most")
        for j in range(length):
            signs[j] = u64(directions[order[first + j]])
            taken[j] = j
        current = 0
        for i in range(length):
            result[first + i] = order[first + current]
            taken[current] = _TAKEN
            here = signs[current]
            least = np.int64(2 * _TAKEN)
            for j in range(length):
                # The number of signs that differ, then the place.
                key = (np.int64(_ones(signs[j] ^ here)) << 8) + taken[j]
                least = min(least, key)
            current = least & (_LONGEST - 1)


@njit(error_model="numpy", cache=True)
def relative_sizes(scores, counts, rho, sizes):
    """Fill ``sizes``; see :func:`lrmoe.select.relative_sizes`."""
    first = 0
    for count in counts:
        total = 0.0
        for i in range(first, first + count):
            total += _root(scores[i])
        mean = total / max(count, 1)
        for i in range(first, first + count):
            size = _root(scores[i]) / mean if mean > 0.0 else 1.0
            sizes[i] = size * (1.0 - rho) + rho
        first += count


@njit(inline="always", error_model="numpy", cache=True)
def _root(score):
    score = np.float64(score)
    return np.sqrt(score if score <= _LARGEST else _LARGEST)  # what is not finite counts as that


@njit(error_model="numpy", cache=True)
def sample_pairs(sizes, counts, quotas, order, starts, kept, weights):
    """Fill the last two; see :func:`lrmoe.select.sample_pairs`.

    Capping goes in rounds: each caps all pairs whose share of what is left of the quota would reach
    1, until none is new. No sort.
    """
    units = np.empty(counts.max() if len(counts) else 0, np.int64)
    drawn = np.empty_like(units)
    first, slot = 0, 0
    for e in range(len(counts)):
        count, quota = counts[e], quotas[e]
        if quota > 0:
            for j in range(count):
                size = np.rint(np.float64(sizes[first + j]) * _MEAN_SIZE)
                units[j] = min(max(np.int64(size), 1), _MAX_SIZE)
            least, spared, num_capped, rest = _capped(units[:count], quota)
            _draw(units, order[first : first + count] - first, starts[e], drawn,
                  least, spared, (quota - num_capped) << _UNIT_BITS, max(rest, 1))  # fmt: skip
            for j in range(count):
                if drawn[j] > 0:
                    kept[slot] = first + j
                    weights[slot] = np.float64(_ONE) / np.float64(drawn[j])
                    slot += 1
        first += count


@njit(cache=True)
def _capped(units, quota):
    """The least size that is capped, one pair of that size that is not (or -1), how many are, and
    the sizes of the others."""
    least, spared, num_capped, rest = _MAX_SIZE + 1, -1, 0, units.sum()
    while True:
        room = quota - num_capped
        now_least, now_capped, now_rest = least, 0, 0
        for unit in units:
            others = rest - unit
            # Less than one's own size, so that no more pairs are capped than there is room for.
            margin = min(others >> 20, unit - 1) if room > 1 else 0
            if unit >= least or (room > 0 and unit * (room - 1) + margin >= others):
                now_capped += 1
                now_least = min(now_least, unit)
            else:
                now_rest += unit
        is_last = not (num_capped < now_capped < quota and now_rest > 0)
        if now_capped == quota and now_rest > 0 and now_capped > num_capped:
            # The last place may go to a pair for certain only if no other is left.
            for j in range(len(units)):
                if units[j] == now_least:
                    spared = j
            now_capped -= 1
            now_rest += now_least
        least, num_capped, rest = now_least, now_capped, now_rest
        if is_last:
            return least, spared, num_capped, rest


@njit(error_model="numpy", cache=True)
def _draw(units, order, start, drawn, least, spared, left, rest):
    """Fill ``drawn`` with the probability of every pair that is kept, 0 for the others: those
    where the running sum of the probabilities passes a whole number."""
    running, certain, before = 0, 0, 0
    for j in order:
        if units[j] >= least and j != spared:
            certain += 1
            probability = _ONE
        else:
            running += units[j]
            end = np.int64(np.floor(running / np.float64(rest) * left + 0.5))
            probability, before = end - before, end
        upper = start + (certain << _UNIT_BITS) + before
        is_kept = (upper >> _UNIT_BITS) > ((upper - probability) >> _UNIT_BITS)
        drawn[j] = probability if is_kept else 0
