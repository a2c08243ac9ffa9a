"""Scores and quotas -> the kept pairs and their weights. No processes, no host syncs.

Shape letters: N = pairs in expert-major order, P = kept pairs, e = segments: the experts, each a
contiguous run of pairs. Counts and quotas are known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lrmoe.kernels.ops import define
from lrmoe.planner.problem import Float, Int
from lrmoe.upload import upload, upload_together

# Probabilities (in units of 1 / ONE) and sizes are integers, so sums of them are exact: a sample
# has exactly q pairs, and the weight is the exact inverse of the probability that was used. A size
# of at least one unit keeps every pair reachable, also at rho = 0.
ONE = 1 << 40
_MEAN_SIZE = 1 << 20
_MAX_SIZE = (1 << 40) - 1
_MAX_KEPT = 1 << 22
_KEY_BITS = 48  # of a sort inside the experts; the expert is above them
STRATUM_BITS = 16
_FIRST_SIGNS = 16  # by which pairs are sorted before they are chained
LONGEST_CHAIN = 256  # pairs whose order one chain decides
_FEWEST_TIE_BITS, _MOST_TIE_BITS = 4, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which pairs get a backward pass."""

    kept_P: torch.Tensor  # int64, ascending positions in the expert-major order
    weight_P: torch.Tensor  # float32 (float64 for float64 scores)
    # int64 instance in the backward pass; None: that of the forward pass
    instance_P: torch.Tensor | None = None


class Segments:
    """The experts' runs of pairs: what is known of them on the host, and per pair on the device.

    Args:
        count_e: number of pairs of each expert, in expert-major order.
    """

    def __init__(self, count_e: Int, device: torch.device) -> None:
        self.count_e = count_e
        self.device_count_e = upload(count_e, device)

    @cached_property
    def expert_N(self) -> torch.Tensor:
        """The expert of each pair."""
        return torch.repeat_interleave(self.device_count_e, output_size=int(self.count_e.sum()))

    @cached_property
    def start_N(self) -> torch.Tensor:
        """First position of the expert's run."""
        return (self.device_count_e.cumsum(0) - self.device_count_e)[self.expert_N]

    @cached_property
    def last_N(self) -> torch.Tensor:
        """Last position of the expert's run."""
        return self.start_N + self.device_count_e[self.expert_N] - 1

    @cached_property
    def place_N(self) -> torch.Tensor:
        """Place inside the expert's run."""
        return torch.arange(len(self.expert_N), device=self.expert_N.device) - self.start_N

    def spread(self, values_e: Int | Float) -> torch.Tensor:
        """A value per expert -> one per pair."""
        return spread(values_e, self.count_e, self.expert_N.device)

    def sort(
        self, key_N: torch.Tensor, bits: int = _KEY_BITS, salt_e: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Positions that order every run by ascending key, ``0 <= key < 2^bits``.

        Equal keys keep their order; with salts they are shuffled.
        """
        whole_N = (self.expert_N << bits) | key_N
        if salt_e is not None:
            spare = tie_bits(len(self.count_e), bits)
            tie_N = _mixed(self.place_N + salt_e[self.expert_N]) >> (32 - spare)
            whole_N, bits = (whole_N << spare) | tie_N, bits + spare
        if is_short_key(len(self.count_e), bits):
            whole_N = whole_N.to(torch.int32)
        return torch.sort(whole_N, stable=True).indices


def keep_everything(num_pairs: int, like: torch.Tensor) -> Selection:
    """Every pair with weight 1: exact training."""
    return Selection(
        kept_P=torch.arange(num_pairs, device=like.device),
        weight_P=torch.ones(num_pairs, device=like.device, dtype=like.dtype),
    )


def select_top(score_N: torch.Tensor, segments: Segments, quota_e: Int) -> Selection:
    """The ``quota`` highest scores of each expert; ties go to the earlier pair; NaN ranks first."""
    quota = upload(quota_e, score_N.device)
    kept_P = top_pairs(score_N, segments.device_count_e, quota, int(quota_e.sum()))
    return Selection(kept_P=kept_P, weight_P=torch.ones_like(score_N[kept_P]))


def select_sampled(
    size_N: torch.Tensor,
    segments: Segments,
    quota_e: Int,
    generator: torch.Generator,
    share_probability_e: Float | None = None,
    stratum_N: torch.Tensor | None = None,
    direction_N: torch.Tensor | None = None,
) -> Selection:
    """Exactly ``quota`` pairs of each expert, with probabilities proportional to size (at most 1).

    Systematic sampling in the order of the strata, and in a random order without them. The weight
    is ``1 / P(kept)``, which makes any sum over pairs unbiased, whatever the order.

    Args:
        size_N: float, never negative, from :func:`sampling_sizes`.
        share_probability_e: P(quota >= 1) of a quota that was itself drawn
            (:class:`lrmoe.planner.Plan`); the weight accounts for it.
        stratum_N: int64 in ``[0, 2^STRATUM_BITS)``: pairs with near numbers are alike. As many of
            any run of them are kept as their probabilities say, to within one. Those of one
            stratum are in random order: in that of the text, a sample of every other pair would
            follow whatever in the text has a period.
        direction_N: int64, from :func:`lrmoe.score.direction`, in place of strata: sorted by their
            first signs and cut into runs of up to 256, in which every pair is followed by the one
            most alike that is left.
    """
    _check_quota(quota_e)
    device = size_N.device
    count_e, longest = segments.device_count_e, int(segments.count_e.max(initial=0))
    drawn_2e = torch.randint(0, ONE, (2, len(count_e)), generator=generator, device=device)
    start_e, salt_e = drawn_2e[0], drawn_2e[1]
    if direction_N is not None:
        first_N = (direction_N >> (64 - _FIRST_SIGNS)) & ((1 << _FIRST_SIGNS) - 1)
        order_N = order_runs(first_N, count_e, longest, _FIRST_SIGNS, salt_e)
        start_c, length_c = even_runs(segments.count_e, LONGEST_CHAIN)
        order_N = chained(order_N, upload(start_c, device), upload(length_c, device), direction_N)
    elif stratum_N is not None:
        order_N = order_runs(stratum_N, count_e, longest, STRATUM_BITS, salt_e)
    else:
        key_N = torch.randint(0, 1 << _KEY_BITS, size_N.shape, generator=generator, device=device)
        order_N = order_runs(key_N, count_e, longest, _KEY_BITS)
    kept_P, weight_P = sample_pairs(
        size_N,
        count_e,
        upload(quota_e, device),
        order_N,
        start_e,
        int(quota_e.sum()),
    )
    if share_probability_e is not None and (share_probability_e < 1).any():
        weight_P /= segments.spread(share_probability_e)[kept_P]
    return Selection(kept_P=kept_P, weight_P=weight_P.to(_wide(size_N.dtype)))


def is_short_key(num_runs: int, bits: int) -> bool:
    """Whether a key below the number of its run fits into int32: half of a radix sort's passes."""
    return num_runs.bit_length() + bits < 32


def tie_bits(num_runs: int, bits: int) -> int:
    """Random bits below a key: what an int32 leaves; if that is too little, what an int64 does."""
    left = 31 - num_runs.bit_length() - bits
    return left if left >= _FEWEST_TIE_BITS else min(_MOST_TIE_BITS, left + 32)


def _mixed(values_N: torch.Tensor) -> torch.Tensor:
    """32 bits that look random: the finalizer of MurmurHash3, of the low 32 bits; int64."""
    x = values_N & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def sampling_sizes(score_N: torch.Tensor, segments: Segments, rho: float) -> torch.Tensor:
    """``(1 - rho) sqrt(score) / mean + rho``, the mean over the expert; ones if all are zero.

    A non-finite score counts as the largest float32: its pair is all but certainly kept.
    """
    return relative_sizes(score_N, segments.device_count_e, rho)


def even_runs(count_e: Int, longest: int) -> tuple[Int, Int]:
    """Starts and lengths of the fewest runs of at most ``longest`` pairs, none of two experts."""
    number_e = -(-count_e // longest)
    expert_c = np.repeat(np.arange(len(count_e)), number_e)
    nth_c = np.arange(len(expert_c)) - (number_e.cumsum() - number_e)[expert_c]
    count_c, number_c = count_e[expert_c], number_e[expert_c]
    start_c, end_c = nth_c * count_c // number_c, (nth_c + 1) * count_c // number_c
    return (count_e.cumsum() - count_e)[expert_c] + start_c, end_c - start_c


# ---- operators: here for every device, in kernels/select_triton.py for CUDA ----------------------


@define(
    "select_triton",
    fake=lambda key_N, count_e, longest, bits, salt_e=None: torch.empty_like(key_N),
)
def order_runs(
    key_N: torch.Tensor,
    count_e: torch.Tensor,
    longest: int,
    bits: int,
    salt_e: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions that order every run of ``count`` pairs by ascending key: int64 [N].

    Args:
        longest: of the runs; what it changes is how they are sorted.
        key_N: int64, ``0 <= key < 2^bits``; with the bits of the number of runs less than 64.
        salt_e: int64, at random: equal keys are shuffled, up to a few of many; ``None``: they
            keep their order.
    """
    return Segments(count_e.cpu().numpy(), count_e.device).sort(key_N, bits, salt_e)


@define("select_triton", fake=torch.empty_like)
def gray_place(direction_N: torch.Tensor) -> torch.Tensor:
    """Where the first signs of a direction are in the order of a Gray code: a stratum, int64.

    Those that agree in the first n signs are within ``2^(STRATUM_BITS - n)`` of each other.
    """
    place_N = (direction_N >> (64 - STRATUM_BITS)) & ((1 << STRATUM_BITS) - 1)
    shift = 1
    while shift < STRATUM_BITS:  # each bit becomes the parity of itself and those above
        place_N = place_N ^ (place_N >> shift)
        shift *= 2
    return place_N


@define(
    "select_triton",
    fake=lambda score_N, count_e, quota_e, num_kept: count_e.new_empty(num_kept),
)
def top_pairs(
    score_N: torch.Tensor, count_e: torch.Tensor, quota_e: torch.Tensor, num_kept: int
) -> torch.Tensor:
    """Positions of the ``quota`` highest scores of each expert, ascending: int64 [P]."""
    segments = Segments(count_e.cpu().numpy(), count_e.device)
    order_N = segments.sort(_descending(score_N))
    starts_e = segments.count_e.cumsum() - segments.count_e
    return order_N[blocks(starts_e, quota_e.cpu().numpy(), score_N.device)].sort().values


def _fake_sample(
    size_N: torch.Tensor,
    count_e: torch.Tensor,
    quota_e: torch.Tensor,
    order_N: torch.Tensor,
    start_e: torch.Tensor,
    num_kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return order_N.new_empty(num_kept), order_N.new_empty(num_kept, dtype=torch.float64)


@define("select_triton", fake=_fake_sample)
def sample_pairs(
    size_N: torch.Tensor,
    count_e: torch.Tensor,
    quota_e: torch.Tensor,
    order_N: torch.Tensor,
    start_e: torch.Tensor,
    num_kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A systematic sample: kept positions, ascending, and ``1 / P(kept)`` in float64.

    Args:
        order_N: the order inside each expert in which the probabilities are laid end to end.
        start_e: int64 in ``[0, ONE)``.
    """
    from lrmoe.kernels import select_cpu  # compiles with numba on first use

    kept_P = torch.empty(num_kept, dtype=torch.int64)
    weight_P = torch.empty(num_kept, dtype=torch.float64)
    wide_N = size_N.to(_wide(size_N.dtype))
    arguments = (wide_N, count_e, quota_e, order_N, start_e, kept_P, weight_P)
    select_cpu.sample_pairs(*[tensor.detach().cpu().numpy() for tensor in arguments])
    return kept_P.to(order_N.device), weight_P.to(order_N.device)


@define(
    "select_triton",
    fake=lambda order_N, start_c, length_c, direction_N: torch.empty_like(order_N),
)
def chained(
    order_N: torch.Tensor, start_c: torch.Tensor, length_c: torch.Tensor, direction_N: torch.Tensor
) -> torch.Tensor:
    """The order, in each run a chain: after every pair the one whose signs differ least.

    A run keeps its first pair; ties fall to the pair that was earlier. ``length^2`` steps a run.

    Args:
        start_c: of the runs that ``order_N`` is cut into, of at most 256 places.
        direction_N: int64 by pair, 64 signs.
    """
    from lrmoe.kernels import select_cpu  # compiles with numba on first use

    result_N = torch.empty_like(order_N, device="cpu")
    arguments = (order_N, start_c, length_c, direction_N, result_N)
    select_cpu.chained(*[tensor.cpu().numpy() for tensor in arguments])
    return result_N.to(order_N.device)


@define(
    "select_triton",
    fake=lambda score_N, count_e, rho: score_N.new_empty(score_N.shape, dtype=_wide(score_N.dtype)),
)
def relative_sizes(score_N: torch.Tensor, count_e: torch.Tensor, rho: float) -> torch.Tensor:
    """:func:`sampling_sizes` of runs of ``count`` pairs."""
    from lrmoe.kernels import select_cpu

    size_N = torch.empty_like(score_N, dtype=_wide(score_N.dtype), device="cpu")
    scores = score_N.detach().to("cpu", size_N.dtype).numpy()
    select_cpu.relative_sizes(scores, count_e.cpu().numpy(), rho, size_N.numpy())
    return size_N.to(score_N.device)


def _check_quota(quota_e: Int) -> None:
    if int(quota_e.sum()) > _MAX_KEPT:
        raise ValueError(f"{int(quota_e.sum())} kept pairs on one rank: allowed are {_MAX_KEPT}")


def inclusion_probabilities(size_N: torch.Tensor, segments: Segments, quota_e: Int) -> torch.Tensor:
    """``min(1, c size)`` with c such that every expert sums to its quota; int64, units of 1 / ONE.

    With sizes in descending order, the pair at place k is capped at 1 exactly if
    ``size_k (q - k) >= size_k + size_{k+1} + ...``; so one sort solves for c. The sizes have mean 1
    in every expert.
    """
    _check_quota(quota_e)
    place_N, start_N, last_N = segments.place_N, segments.start_N, segments.last_N
    quota_N = segments.spread(quota_e)
    units_N = _units(size_N)
    order_N = segments.sort(_MAX_SIZE - units_N)
    units_N = units_N[order_N]
    running_N = units_N.cumsum(0)
    through_N = running_N - (running_N[start_N] - units_N[start_N])  # sum up to and with this pair
    total_N = through_N[last_N]
    rest_N = total_N - through_N
    room_N = quota_N - place_N

    # units * room >= units + rest, with a margin that keeps the probability of a free pair clear of
    # 1 after rounding. The last place (room 1) goes to a pair for certain only if no other is left.
    margin_N = torch.where(room_N > 1, rest_N >> 20, 0)
    is_capped_N = (units_N * (room_N - 1) + margin_N >= rest_N) & (room_N > 0)
    num_capped_e = place_N.new_zeros(len(segments.count_e)).scatter_reduce_(
        0, segments.expert_N, torch.where(is_capped_N, place_N + 1, 0), "amax"
    )
    num_capped_N = num_capped_e[segments.expert_N]

    # The free pairs divide what is left of the quota; rounding the running sum keeps it exact.
    first_free_N = (start_N + num_capped_N).clamp_(max=max(units_N.shape[0] - 1, 0))
    free_before_N = through_N[first_free_N] - units_N[first_free_N]
    share_N = (through_N - free_before_N).double() / (total_N - free_before_N)
    left_N = (quota_N - num_capped_N) * ONE
    end_N = (share_N * left_N).round_().long()
    begin_N = torch.where(place_N > num_capped_N, end_N.roll(1), 0)
    pi_N = torch.where(place_N < num_capped_N, ONE, end_N - begin_N)
    return torch.empty_like(pi_N).index_copy_(0, order_N, pi_N)


def sampling_noise(
    size_N: torch.Tensor, score_N: torch.Tensor, segments: Segments, quota_Ae: Float
) -> torch.Tensor:
    """``sum (1 / pi - 1) score`` with the probabilities of each row of quotas; float64 [A].

    Where the score is the squared norm of a pair's term, this is the expected squared error of the
    sum of the terms, as far as they are orthogonal. One sort serves all rows, and nothing waits
    for the device.

    Args:
        quota_Ae: A rows of quotas, which may be fractions: of a share that is yet to be rounded.
    """
    given_Ae, count_e = upload(quota_Ae, size_N.device), segments.device_count_e
    end_e = count_e.cumsum(0)
    start_e = end_e - count_e
    units_N = _units(size_N)
    order_N = segments.sort(_MAX_SIZE - units_N)
    units_N, score_N = units_N[order_N], score_N[order_N].double()

    # In descending order the pair at place k is capped from the quota k + (size_k + size_{k+1} +
    # ...) / size_k on. These ascend inside an expert, up to its count, so end to end over all.
    running_M = _running(units_N)
    through_end_N = running_M[end_e][segments.expert_N] - running_M[:-1]
    capped_from_N = segments.start_N + segments.place_N + through_end_N.double() / units_N
    free_Ae = torch.searchsorted(capped_from_N, start_e + given_Ae, right=True)
    free_Ae = torch.minimum(torch.maximum(free_Ae, start_e), end_e)

    def of_free(value_N: torch.Tensor) -> torch.Tensor:
        running_M = _running(value_N)
        return running_M[end_e] - running_M[free_Ae]

    # pi = units * room / (units of the free pairs), so the sum of score / pi needs no pair twice.
    room_Ae = given_Ae - (free_Ae - start_e)
    noise_Ae = of_free(units_N) * of_free(score_N / units_N) / room_Ae - of_free(score_N)
    noise_A: torch.Tensor = torch.where(free_Ae < end_e, noise_Ae, 0.0).clamp_(min=0).sum(1)
    return noise_A


def blocks(start_b: Int, length_b: Int, device: torch.device) -> torch.Tensor:
    """Positions of consecutive runs: ``start[0], start[0]+1, ..., start[1], ...`` (int64)."""
    end_b = length_b.cumsum()
    shift_b, device_end_b = upload_together(device, start_b - (end_b - length_b), end_b)
    return spread_runs(shift_b, device_end_b, int(length_b.sum()), True)


def spread(values_b: NDArray[np.generic], length_b: Int, device: torch.device) -> torch.Tensor:
    """Each value as often as its run is long. The total is known: no device sync."""
    device_values_b, end_b = upload_together(device, values_b, length_b.cumsum())
    return spread_runs(device_values_b, end_b, int(length_b.sum()), False)


@define(
    "pairs_triton",
    fake=lambda values_b, end_b, total, is_counting: values_b.new_empty(total),
)
def spread_runs(
    values_b: torch.Tensor, end_b: torch.Tensor, total: int, is_counting: bool
) -> torch.Tensor:
    """Each run's value at all of its places: ``[total]``.

    Args:
        end_b: int64, where the runs end that are laid end to end; the last at ``total``.
        is_counting: add the place (values are int64 then).
    """
    length_b = end_b.diff(prepend=end_b.new_zeros(1))
    value_N = values_b.repeat_interleave(length_b, output_size=total)
    return value_N + torch.arange(total, device=value_N.device) if is_counting else value_N


def _units(size_N: torch.Tensor) -> torch.Tensor:
    return (size_N.double() * _MEAN_SIZE).round_().long().clamp_(1, _MAX_SIZE)


def _running(value_N: torch.Tensor) -> torch.Tensor:
    """Sums of the first 0, 1, ..., N values; none is finite if the total is not.

    Whole numbers, of which floats are made too (the total is 2^52): their sums are the same every
    time, also on devices that add up floats in any order.
    """
    if not value_N.is_floating_point():
        return torch.nn.functional.pad(value_N.cumsum(0), (1, 0))
    scale = 2.0**52 / value_N.sum().clamp_min(1e-200)
    return _running((value_N * scale).round().long()) / scale


def _descending(score_N: torch.Tensor) -> torch.Tensor:
    """Integer keys that order scores from high to low; every non-finite one first.

    A float's bits order like its magnitude. Only losses of tokens can be negative.
    """
    score_N = score_N.float().nan_to_num(float("inf"), float("inf"), float("inf"))
    bits_N = score_N.view(torch.int32).long()
    return 0x7F800000 - torch.where(bits_N < 0, -(bits_N & 0x7FFFFFFF), bits_N)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
