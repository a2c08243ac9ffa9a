"""How many pairs of each expert get a backward pass, and each rank's share of them.

Exact integer arithmetic throughout. Shape letters: W = ranks, E = experts.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from lrmoe.planner.problem import Float, Int


def rate_quotas(counts_E: Int, rate: Fraction) -> Int:
    """``ceil((1 - C) n)`` pairs of each expert: at least one where there is a pair."""
    dropped_E: Int = counts_E * rate.numerator // rate.denominator
    return counts_E - dropped_E


def apportion(counts_WE: Int, quota_E: Int) -> Int:
    """Each rank's share of every quota by largest remainder; ties go to the lower rank."""
    base_WE, rest_WE, _ = _exact_shares(counts_WE, quota_E)
    missing_E = quota_E - base_WE.sum(0)
    # Stable sort of the negated remainders: descending, the lower rank first among equals.
    order_WE = np.argsort(-rest_WE, axis=0, kind="stable")
    place_WE = np.argsort(order_WE, axis=0, kind="stable")
    shares_WE: Int = base_WE + (place_WE < missing_E)
    return shares_WE


def apportion_randomly(counts_WE: Int, quota_E: Int, seed: int) -> tuple[Int, Float]:
    """Shares whose mean over the seeds is exactly ``n q / N``, and P(share >= 1).

    Systematic rounding: the fractional parts of an expert's shares are laid end to end, and a rank
    gets one more where the line crosses an integer, seen from a uniform random start. Every share
    is its exact value rounded down or up, and they always add up to the quota.
    """
    base_WE, rest_WE, total_E = _exact_shares(counts_WE, quota_E)
    start_E = np.random.Generator(np.random.Philox(seed)).integers(0, total_E)
    end_WE = start_E + rest_WE.cumsum(0)
    extra_WE = end_WE // total_E - (end_WE - rest_WE) // total_E
    probability_WE = np.where(base_WE > 0, 1.0, rest_WE / total_E)
    return base_WE + extra_WE, np.where(counts_WE > 0, probability_WE, 1.0)


def _exact_shares(counts_WE: Int, quota_E: Int) -> tuple[Int, Int, Int]:
    """``n q / N`` as integer part, numerator of the rest, and denominator (1 without pairs)."""
    total_E = np.maximum(counts_WE.sum(0), 1)
    product_WE = counts_WE * quota_E
    return product_WE // total_E, product_WE % total_E, total_E
