"""What of the selection is a loop on CPUs, compiled by numba; called through ``select``."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

_LONGEST = 256  # as select.LONGEST_CHAIN; not imported, since numba's cache would miss a change
_TAKEN = 1 << 16  # above any place and number of signs

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
