"""Selection inside each expert's run of pairs, for GPUs, in Triton; called through ``select``.

One program per expert, which passes over its run as often as it must; a run of a few thousand pairs
stays in cache. No atomics, so a draw is the same every time.

Shape letters: N = pairs in expert-major order, P = kept pairs, e = experts.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lrmoe.select import LONGEST_CHAIN, STRATUM_BITS, is_short_key, tie_bits

_LARGEST_BLOCK = 2048
_WARPS = 8
_UNIT_BITS = tl.constexpr(40)  # probabilities are whole multiples of 2^-40 (select.ONE)
_MEAN_SIZE = tl.constexpr(float(1 << 20))
_MAX_SIZE = tl.constexpr((1 << 40) - 1)
_LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
_NON_FINITE = tl.constexpr(0x7F800000)
_CHAIN_WARPS = 1  # the steps of a chain are short, and many chains fit on a multiprocessor
_CODES_PER_PROGRAM = 1024
_PAIRS_RANKED, _OTHERS_AT_ONCE = 128, 32
_MOST_COMPARISONS = 1 << 28  # by which a layer call's pairs are put in order
_SHIFT = tl.constexpr(64 - STRATUM_BITS)  # to the first signs of a direction
_FIRST_SIGNS = tl.constexpr((1 << STRATUM_BITS) - 1)


def order_runs(
    key_N: torch.Tensor,
    count_e: torch.Tensor,
    longest: int,
    bits: int,
    salt_e: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`lrmoe.select.order_runs`.

    In one launch, which compares every key with every other of its run, in place of the dozen
    launches of a sort; where these would be many, one sort, of 32-bit keys where they are wide
    enough (from where on a sort is faster has not been measured). Reads 8 bytes a pair, more often
    from the cache, and writes 8.
    """
    spare = 0 if salt_e is None else tie_bits(len(count_e), bits)
    salt_e = count_e if salt_e is None else salt_e  # not read without spare bits
    if len(count_e) == 0 or len(key_N) == 0:
        return torch.empty_like(key_N)
    if len(key_N) * longest <= _MOST_COMPARISONS:
        order_N = torch.empty_like(key_N)
        _ranks[(len(count_e), triton.cdiv(longest, _PAIRS_RANKED))](
            key_N,
            count_e,
            salt_e,
            order_N,
            spare,
            IS_SHORT=bits + spare < 32,
            RUNS=_runs(count_e),
            BLOCK=_PAIRS_RANKED,
            OTHERS=_OTHERS_AT_ONCE,
        )
        return order_N
    is_short = is_short_key(len(count_e), bits + spare)
    whole_N = torch.empty_like(key_N, dtype=torch.int32 if is_short else torch.int64)
    _whole_keys[(len(count_e),)](
        key_N,
        count_e,
        salt_e,
        whole_N,
        bits,
        spare,
        RUNS=_runs(count_e),
        BLOCK=_block(key_N),
        num_warps=_WARPS,
    )
    return torch.sort(whole_N, stable=True).indices


def gray_place(direction_N: torch.Tensor) -> torch.Tensor:
    """:func:`lrmoe.select.gray_place`. Reads and writes 8 bytes a direction."""
    place_N = torch.empty_like(direction_N)
    if len(direction_N):
        grid = (triton.cdiv(len(direction_N), _CODES_PER_PROGRAM),)
        _gray[grid](direction_N, place_N, len(direction_N), BLOCK=_CODES_PER_PROGRAM)
    return place_N


def relative_sizes(score_N: torch.Tensor, count_e: torch.Tensor, rho: float) -> torch.Tensor:
    """:func:`lrmoe.select.sampling_sizes`. Reads the scores twice."""
    size_N = score_N.new_empty(
        score_N.shape, dtype=torch.promote_types(score_N.dtype, torch.float32)
    )
    if len(count_e) and len(score_N):
        _sizes[(len(count_e),)](
            score_N,
            count_e,
            size_N,
            rho,
            RUNS=_runs(count_e),
            BLOCK=_block(score_N),
            num_warps=_WARPS,
        )
    return size_N


def sample_pairs(
    size_N: torch.Tensor,
    count_e: torch.Tensor,
    quota_e: torch.Tensor,
    order_N: torch.Tensor,
    start_e: torch.Tensor,
    num_kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`lrmoe.select.sample_pairs`.

    The run is read once per round of capping (two or three where no pair dominates), and three
    times more. Operation by operation as on CPUs, so products and sums must not be fused.
    """
    kept_P = order_N.new_empty(num_kept)
    weight_P = order_N.new_empty(num_kept, dtype=torch.float64)
    if num_kept == 0:
        return kept_P, weight_P
    _sample[(len(count_e),)](
        size_N,
        count_e,
        quota_e,
        order_N,
        start_e,
        torch.empty_like(order_N),
        kept_P,
        weight_P,
        RUNS=_runs(count_e),
        BLOCK=_block(size_N),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return kept_P, weight_P


def chained(
    order_N: torch.Tensor, start_c: torch.Tensor, length_c: torch.Tensor, direction_N: torch.Tensor
) -> torch.Tensor:
    """:func:`lrmoe.select.chained`. One program per run, which stays in registers.

    Reads the order and the signs once, 16 bytes a pair, and writes the order.
    """
    result_N = torch.empty_like(order_N)
    if len(start_c) and len(order_N):
        _chain[(len(start_c),)](
            order_N,
            start_c,
            length_c,
            direction_N,
            result_N,
            LONGEST=LONGEST_CHAIN,
            num_warps=_CHAIN_WARPS,
        )
    return result_N


def top_pairs(
    score_N: torch.Tensor, count_e: torch.Tensor, quota_e: torch.Tensor, num_kept: int
) -> torch.Tensor:
    """:func:`lrmoe.select.top_pairs`. Reads the run 34 times: the lowest kept score bit by bit."""
    kept_P = count_e.new_empty(num_kept)
    if num_kept == 0:
        return kept_P
    _top[(len(count_e),)](
        score_N.float(),
        count_e,
        quota_e,
        kept_P,
        RUNS=_runs(count_e),
        BLOCK=_block(score_N),
        num_warps=_WARPS,
    )
    return kept_P


def _runs(count_e: torch.Tensor) -> int:
    return triton.next_power_of_2(max(len(count_e), 2))


def _block(values_N: torch.Tensor) -> int:
    return min(triton.next_power_of_2(max(len(values_N), 16)), _LARGEST_BLOCK)


@triton.jit
def _before(counts, e, RUNS: tl.constexpr):
    """The sum of the counts of the runs before this one: where it begins."""
    run = tl.arange(0, RUNS)
    return tl.sum(tl.load(counts + run, mask=run < e, other=0), 0)


@triton.jit
def _mixed(values):
    """As :func:`lrmoe.select._mixed`."""
    x = values & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
def _tied(keys, place, is_inside, salt, spare):
    """The key at a place of a run with random bits below it, of which there may be none."""
    key = tl.load(keys + place, mask=is_inside, other=0)
    return (key << spare) | (_mixed(place + salt) >> (32 - spare))


@triton.jit
def _ranks(
    keys, counts, salts, orders, spare,
    IS_SHORT: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Every pair's place among those of its run: how many are before it, a block at a time."""
    e = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    count = tl.load(counts + e)
    if start < count:
        kind: tl.constexpr = tl.int32 if IS_SHORT else tl.int64
        first = _before(counts, e, RUNS)
        salt = tl.load(salts + e)
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        key = _tied(keys + first, place, place < count, salt, spare).to(kind)
        hits = tl.zeros([BLOCK, OTHERS], dtype=tl.int32)
        nth = tl.arange(0, OTHERS).to(tl.int64)
        for others in range(0, start, OTHERS):  # whose ties are before
            other = _tied(keys + first, others + nth, others + nth < count, salt, spare).to(kind)
            hits += (other[None, :] <= key[:, None]).to(tl.int32)
        for others in range(start, start + BLOCK, OTHERS):
            other_place = others + nth
            other = _tied(keys + first, other_place, other_place < count, salt, spare).to(kind)
            is_tie = (other[None, :] == key[:, None]) & (other_place[None, :] < place[:, None])
            is_before = ((other[None, :] < key[:, None]) | is_tie) & (other_place < count)[None, :]
            hits += is_before.to(tl.int32)
        for others in range(start + BLOCK, count, OTHERS):  # whose ties are behind
            other_place = others + nth
            other = _tied(keys + first, other_place, other_place < count, salt, spare).to(kind)
            is_before = (other[None, :] < key[:, None]) & (other_place < count)[None, :]
            hits += is_before.to(tl.int32)
        rank = tl.sum(hits, 1)
        tl.store(orders + first + rank, first + place, mask=place < count)


@triton.jit
def _whole_keys(keys, counts, salts, wholes, bits, spare, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    first = _before(counts, e, RUNS)
    count = tl.load(counts + e)
    salt = tl.load(salts + e)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tied = _tied(keys + first, place, place < count, salt, spare)
        whole = (e.to(tl.int64) << (bits + spare)) | tied
        tl.store(wholes + first + place, whole.to(wholes.dtype.element_ty), mask=place < count)


@triton.jit
def gray_code(direction):
    """As :func:`lrmoe.select.gray_place`."""
    place = (direction >> _SHIFT) & _FIRST_SIGNS
    place = place ^ (place >> 1)
    place = place ^ (place >> 2)
    place = place ^ (place >> 4)
    return place ^ (place >> 8)


@triton.jit
def _gray(directions, places, num, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    direction = tl.load(directions + entry, mask=entry < num, other=0)
    tl.store(places + entry, gray_code(direction), mask=entry < num)


@triton.jit
def _root(score):
    score = score.to(tl.float64)
    is_finite = (score == score) & (tl.abs(score) <= _LARGEST)
    return tl.sqrt(tl.where(is_finite, score, _LARGEST))


@triton.jit
def _sizes(scores, counts, sizes, rho, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    first = _before(counts, e, RUNS)
    count = tl.load(counts + e)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += _root(tl.load(scores + first + place, mask=place < count, other=0.0))
    mean = tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        root = _root(tl.load(scores + first + place, mask=place < count, other=0.0))
        size = tl.where(mean > 0, root / tl.where(mean > 0, mean, 1.0), 1.0)
        size = size * (1.0 - rho) + rho
        tl.store(sizes + first + place, size.to(sizes.dtype.element_ty), mask=place < count)


@triton.jit
def _units(sizes, first, place, count):
    """Sizes as whole multiples of 2^-20, at least one; 0 beyond the run."""
    size = tl.load(sizes + first + place, mask=place < count, other=0.0).to(tl.float64) * _MEAN_SIZE
    # Half to even, as torch rounds: what lies half-way between is moved to the even neighbour.
    below = tl.floor(size)
    rest = size - below
    is_odd = below - 2.0 * tl.floor(below * 0.5) == 1.0
    units = (below + tl.where((rest > 0.5) | ((rest == 0.5) & is_odd), 1.0, 0.0)).to(tl.int64)
    units = tl.minimum(tl.maximum(units, 1), _MAX_SIZE)
    return tl.where(place < count, units, 0)


@triton.jit
def _is_capped(units, room, rest):
    """Whether a pair's share of what is left of the quota reaches 1 (``rest``: with its own)."""
    others = rest - units
    # Less than one's own size, so that no more pairs are capped than there is room for.
    margin = tl.where(room > 1, tl.minimum(others >> 20, units - 1), 0)
    return (units > 0) & (room > 0) & (units * (room - 1) + margin >= others)


@triton.jit
def _ends(running, total, left):
    """The running sum of the probabilities, rounded so that the last one is ``left`` exactly."""
    end = running.to(tl.float64) / total.to(tl.float64) * left.to(tl.float64)
    return tl.floor(end + 0.5).to(tl.int64)


@triton.jit
def _sample(
    sizes,
    counts,
    quotas,
    orders,
    starts,
    drawn,
    kept,
    weights,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e = tl.program_id(0)
    first = _before(counts, e, RUNS)
    quota = tl.load(quotas + e)
    count = tl.where(quota > 0, tl.load(counts + e), 0)
    one = (count * 0 + 1) << _UNIT_BITS

    # Capping. A round caps every pair whose share of what is left would reach 1; the capped ones
    # are those of at least `least` units, but for one that must stay free (`spared`).
    least = count * 0 + _MAX_SIZE + 1
    total = count * 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.sum(_units(sizes, first, place, count), 0)
    num_capped = count * 0
    rest = total
    spared = count * 0 - 1
    goes_on = quota > 0
    while goes_on:
        room = quota - num_capped
        now_least = least
        now_capped = count * 0
        now_rest = count * 0
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            units = _units(sizes, first, place, count)
            is_capped = (units >= least) | _is_capped(units, room, rest)
            now_capped += tl.sum(is_capped.to(tl.int64), 0)
            now_rest += tl.sum(tl.where(is_capped, 0, units), 0)
            now_least = tl.minimum(now_least, tl.min(tl.where(is_capped, units, _MAX_SIZE + 1), 0))
        goes_on = (now_capped > num_capped) & (now_capped < quota) & (now_rest > 0)
        # The last place may go to a pair for certain only if no other is left.
        if (now_capped == quota) & (now_rest > 0) & (now_capped > num_capped):
            for start in range(0, count, BLOCK):
                place = start + tl.arange(0, BLOCK)
                units = _units(sizes, first, place, count)
                spared = tl.maximum(spared, tl.max(tl.where(units == now_least, place, -1), 0))
            now_capped -= 1
            now_rest += now_least
        least = now_least
        num_capped = now_capped
        rest = now_rest

    # The sample: probabilities end to end in the given order, and a pair wherever the running sum
    # passes a whole number.
    left = (quota - num_capped) << _UNIT_BITS
    shift = tl.load(starts + e)
    running = count * 0
    certain = count * 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_inside = place < count
        position = tl.load(orders + first + place, mask=is_inside, other=0) - first
        units = tl.where(is_inside, _units(sizes, first, position, count), 0)
        is_capped = is_inside & (units >= least) & (position != spared)
        free = tl.where(is_capped, 0, units)
        through = running + tl.cumsum(free, 0)
        capped = certain + tl.cumsum(is_capped.to(tl.int64), 0)
        divisor = tl.maximum(rest, 1)
        end = _ends(through, divisor, left)
        begin = _ends(through - free, divisor, left)
        probability = tl.where(is_capped, one, end - begin)
        upper = shift + (capped << _UNIT_BITS) + end
        is_kept = is_inside & ((upper >> _UNIT_BITS) > ((upper - probability) >> _UNIT_BITS))
        target = drawn + first + position
        tl.store(target, tl.where(is_kept, probability, 0), mask=place < count)
        running += tl.sum(free, 0)
        certain += tl.sum(is_capped.to(tl.int64), 0)
    tl.debug_barrier()  # all of the run is drawn before it is read in another order

    slot = _before(quotas, e, RUNS)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        probability = tl.load(drawn + first + place, mask=place < count, other=0)
        is_kept = probability > 0
        target = slot + tl.cumsum(is_kept.to(tl.int64), 0) - 1
        tl.store(kept + target, first + place, mask=is_kept)
        weight = one.to(tl.float64) / tl.where(is_kept, probability, 1).to(tl.float64)
        tl.store(weights + target, weight, mask=is_kept)
        slot += tl.sum(is_kept.to(tl.int64), 0)


@triton.jit
def _num_ones(bits):
    """Bits that are set in a 64-bit word; the two highest apart: shifts would bring signs along."""
    total = ((bits >> 63) & 1) + ((bits >> 62) & 1)
    bits = bits & 0x3FFFFFFFFFFFFFFF
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits = bits + (bits >> 8)
    bits = bits + (bits >> 16)
    bits = bits + (bits >> 32)
    return total + (bits & 0x7F)


@triton.jit
def _chain(orders, starts, lengths, directions, results, LONGEST: tl.constexpr):
    c = tl.program_id(0)
    first = tl.load(starts + c)
    length = tl.load(lengths + c)
    place = tl.arange(0, LONGEST).to(tl.int64)
    is_inside = place < length
    pair = tl.load(orders + first + place, mask=is_inside, other=0)
    signs = tl.load(directions + pair, mask=is_inside, other=0)
    is_left = is_inside & (place > 0)
    current = length * 0
    rank = tl.zeros([LONGEST], dtype=tl.int64)  # of each place in the chain
    step = length * 0 + 1
    while step < length:
        here = tl.sum(tl.where(place == current, signs, 0), 0)
        # The number of signs that differ, then the place.
        key = tl.where(is_left, (_num_ones(signs ^ here) << 8) + place, 1 << 16)
        current = tl.min(key, 0) & (LONGEST - 1)
        is_next = place == current
        rank = tl.where(is_next, step, rank)
        is_left = is_left & (place != current)
        step += 1
    tl.store(results + first + rank, pair, mask=is_inside)


@triton.jit
def _keys(scores, first, place, count):
    """Whole numbers in the order of the scores, what is not finite highest; none beyond the run."""
    score = tl.load(scores + first + place, mask=place < count, other=0.0)
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    is_finite = (score == score) & (tl.abs(score) <= _LARGEST)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    key = tl.where(is_finite, key, _NON_FINITE)
    return tl.where(place < count, key, -(1 << 40))


@triton.jit
def _top(scores, counts, quotas, kept, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    first = _before(counts, e, RUNS)
    quota = tl.load(quotas + e)
    count = tl.where(quota > 0, tl.load(counts + e), 0)
    # The largest key that at least `quota` pairs reach, bit by bit from below the smallest.
    lowest = count * 0 - (1 << 31)
    step = count * 0 + (1 << 31)
    while step > 0:
        tried = lowest + step
        reached = count * 0
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            key = _keys(scores, first, place, count)
            reached += tl.sum((key >= tried).to(tl.int64), 0)
        lowest = tl.where(reached >= quota, tried, lowest)
        step = step >> 1
    above = count * 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = _keys(scores, first, place, count)
        above += tl.sum((key > lowest).to(tl.int64), 0)
    ties = quota - above  # of the pairs at the lowest kept score the first ones
    slot = _before(quotas, e, RUNS)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = _keys(scores, first, place, count)
        is_tie = key == lowest
        nth = tl.cumsum(is_tie.to(tl.int64), 0)
        is_kept = (key > lowest) | (is_tie & (nth <= ties))
        target = slot + tl.cumsum(is_kept.to(tl.int64), 0) - 1
        tl.store(kept + target, first + place, mask=is_kept)
        slot += tl.sum(is_kept.to(tl.int64), 0)
        ties -= tl.sum(is_tie.to(tl.int64), 0)
