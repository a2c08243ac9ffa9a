"""Lower bounds that the planner is held against.

Shape letters: W = ranks, E = experts.
"""

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from lrmoe.planner.problem import home_ranks


def least_rank_load(load_E, W, slots):
    """The LP bound on the largest rank load, solved with HiGHS.

    Relaxed are the splits (fractions of pairs) and the slots (a replica that computes the share s
    of an expert takes s of a slot), and moving weights is free:

        min T   with   sum_r x[e, r] = load[e],   sum_e x[e, r] <= T,
                       sum over e not at home on r of x[e, r] / load[e] <= slots
    """
    experts = np.flatnonzero(load_E)
    if not len(experts):
        return 0.0
    n = len(experts)
    load, home = load_E[experts].astype(float), home_ranks(W, len(load_E))[experts]
    scale = load.sum() / W
    e, r = np.repeat(np.arange(n), W), np.tile(np.arange(W), n)
    x = np.arange(n * W)
    away = home[e] != r
    ones = np.ones(n * W)
    rows = sparse.coo_matrix(
        (np.r_[ones, -np.ones(W)], (np.r_[r, np.arange(W)], np.r_[x, np.full(W, n * W)])),
        shape=(W, n * W + 1),
    )
    used = sparse.coo_matrix((scale / load[e][away], (r[away], x[away])), shape=(W, n * W + 1))
    sums = sparse.coo_matrix((ones, (e, x)), shape=(n, n * W + 1))
    result = linprog(
        np.r_[np.zeros(n * W), 1.0],
        A_ub=sparse.vstack([rows, used]).tocsr(),
        b_ub=np.r_[np.zeros(W), np.full(W, float(slots))],
        A_eq=sums.tocsr(),
        b_eq=load / scale,
        method="highs",
    )
    assert result.status == 0, result.message
    return result.fun * scale


def least_makespan(counts_WE, quota_E, slots, forward_pair=1.0, backward_pair=2.0):
    """The LP bound on both passes, each with all the slots for itself."""
    W = len(counts_WE)
    forward = least_rank_load(counts_WE.sum(0), W, slots)
    if np.array_equal(quota_E, counts_WE.sum(0)):
        return (forward_pair + backward_pair) * forward
    return forward_pair * forward + backward_pair * least_rank_load(quota_E, W, slots)
