"""Slow answers that are obviously right, written from the specification alone.

Nothing here imports lrmoe, so that a test can disagree with it. Loops instead of kernels, the
dtype of the inputs (float64 in most tests), exact rationals where the specification counts.

Shape letters: W ranks, T tokens, D hidden size, K top-k, E experts, F expert width; one letter per
axis, [E, 2F, D] is `E2FD`. A pair is one (token, slot) entry of a [T, K] table. "Section" is a
section of the specification.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


# ---- sections 2 and 4: the layer and its gradients ---------------------------------------------


def pair_outputs(
    x_TD: Tensor,
    expert_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    act: Activation = F.silu,
) -> tuple[Tensor, Tensor]:
    """Return every pair's h [T, K, F] and y [T, K, D] (section 1): gate rows come first."""
    T, K = expert_TK.shape
    gate_ups, downs = gate_up_E2FD.unbind(0), down_EDF.unbind(0)
    h, y = [], []
    for t in range(T):
        for expert in expert_TK[t].tolist():
            gate_F, up_F = (gate_ups[expert] @ x_TD[t]).chunk(2)
            h.append(act(gate_F) * up_F)
            y.append(downs[expert] @ h[-1])
    if not h:
        return x_TD.new_zeros(T, K, down_EDF.shape[2]), x_TD.new_zeros(T, K, down_EDF.shape[1])
    return torch.stack(h).unflatten(0, (T, K)), torch.stack(y).unflatten(0, (T, K))


def moe_forward(
    x_TD: Tensor,
    expert_TK: Tensor,
    p_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    act: Activation = F.silu,
) -> Tensor:
    """Return the complete layer's output [T, D], differentiable: ``sum_j p * y`` (section 2)."""
    _, y_TKD = pair_outputs(x_TD, expert_TK, gate_up_E2FD, down_EDF, act)
    return (p_TK[:, :, None] * y_TKD).sum(1)


def selected_moe(
    x_TD: Tensor,
    expert_TK: Tensor,
    p_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_TK: Tensor,
    act: Activation = F.silu,
) -> Tensor:
    """Return the same output, with each pair's gradient times its weight: section 4's oracle.

    Autograd then gives the expert, input and router gradients of ``router_grad="kept"``. A weight
    of 0 is a dropped pair. With a non-finite output gradient 0 * NaN is NaN: this oracle then
    poisons a token's dropped pairs too; compare only the token's input gradient in that case.
    """
    _, y_TKD = pair_outputs(x_TD, expert_TK, gate_up_E2FD, down_EDF, act)
    c_TKD = p_TK[:, :, None] * y_TKD
    fixed_TKD = c_TKD.detach()
    return (fixed_TKD + weight_TK[:, :, None] * (c_TKD - fixed_TKD)).sum(1)


def router_gradient(
    mode: str,
    p_TK: Tensor,
    y_TKD: Tensor,
    grad_TD: Tensor,
    weight_TK: Tensor,
    unbiased: bool = False,
) -> Tensor:
    """Return the gradient [T, K] of the routing weights in one router mode (section 8).

    Args:
        mode: "kept", "exact" or "completed".
        y_TKD: the expert outputs; the routed output is their p-weighted sum, no shared expert.
        weight_TK: weights of the kept pairs, 0 where dropped.
        unbiased: which "completed" formula: that of `sampled` (and every rule named unbiased),
            otherwise that of `top` (and every rule with weight 1).

    Where the specification is silent: a token without a dropped pair has nothing to complete, its
    residual is not formed (it would be 0 / 0); if the dropped pairs' p (or, in the unbiased
    formula, all pairs' p) sum to zero, the value that would be divided by that sum is 0, so
    "completed" then falls back to "kept" for that token. An input-dtype sum is used: in float32
    the residual of `top` is a difference of nearly equal numbers, so compare in float64, or
    compare p times the result.
    """
    dp_TK = (grad_TD[:, None, :] * y_TKD).sum(2)
    if mode == "exact":
        return dp_TK
    if mode == "kept":
        return weight_TK * dp_TK
    if mode != "completed":
        raise ValueError(f"mode is {mode!r}, expected 'kept', 'exact' or 'completed'")
    result_TK = torch.zeros_like(dp_TK)
    for t in range(dp_TK.shape[0]):
        out_D = (p_TK[t, :, None] * y_TKD[t]).sum(0)
        along = (grad_TD[t] * out_D).sum()
        kept_K = weight_TK[t] != 0
        if unbiased:
            total = p_TK[t].sum()
            mean = along / total if total != 0 else torch.zeros_like(total)
            result_TK[t] = mean + weight_TK[t] * (dp_TK[t] - mean)
            continue
        result_TK[t] = torch.where(kept_K, dp_TK[t], 0)
        missing = p_TK[t][~kept_K].sum()
        if not kept_K.all() and missing != 0:
            residual = along - (p_TK[t] * dp_TK[t])[kept_K].sum()
            result_TK[t] = torch.where(kept_K, dp_TK[t], residual / missing)
    return result_TK


# ---- section 3: the score ----------------------------------------------------------------------


def lrm(p_TK: Tensor, grad_norm_sq_T: Tensor, h_norm_sq_TK: Tensor) -> Tensor:
    """Return ``p^2 |G_t|^2 |h_s|^2`` for every pair (section 3)."""
    return p_TK**2 * grad_norm_sq_T[:, None] * h_norm_sq_TK


def lrm_brute(
    x_TD: Tensor,
    expert_TK: Tensor,
    p_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    grad_TD: Tensor,
    act: Activation = F.silu,
) -> Tensor:
    """Return each pair's squared norm of its own down-projection gradient, by autograd (section 3).

    In float64 whatever the inputs' dtype; the product formula is not used.
    """
    x_TD, p_TK, gate_up_E2FD, down_EDF, grad_TD = (
        a.detach().double() for a in (x_TD, p_TK, gate_up_E2FD, down_EDF, grad_TD)
    )
    h_TKF, _ = pair_outputs(x_TD, expert_TK, gate_up_E2FD, down_EDF, act)
    score_TK = torch.zeros_like(p_TK)
    for t in range(expert_TK.shape[0]):
        for j, expert in enumerate(expert_TK[t].tolist()):
            down_DF = down_EDF[expert].clone().requires_grad_()
            term_D = p_TK[t, j] * (down_DF @ h_TKF[t, j])
            (own_DF,) = torch.autograd.grad(term_D, down_DF, grad_TD[t])
            score_TK[t, j] = (own_DF**2).sum()
    return score_TK


# ---- sections 4 and 5: quotas ------------------------------------------------------------------


def rate_quotas(n_WE: Iterable[Iterable[int]], rate: float) -> list[int]:
    """Return each expert's quota: ``ceil((1 - rate) n_e)``, 1 to n_e, 0 without pairs (section 5).

    Exact: the rate is the decimal number it prints as, so 0.7 of 10 pairs leaves 3, not 4.
    """
    counts_E = [int(sum(column)) for column in zip(*(list(row) for row in n_WE), strict=True)]
    keep = 1 - Fraction(str(rate))
    return [min(n, max(1, math.ceil(keep * n))) if n else 0 for n in counts_E]


def apportion(n_W: Sequence[int], q: int) -> list[int]:
    """Return one expert's quota per rank: largest remainder, ties to the lower rank (section 4).

    A share never exceeds the rank's pairs: it is at most ``ceil(q n_r / n)``, and q <= n.
    """
    total = sum(int(n) for n in n_W)
    if not 0 <= q <= total:
        raise ValueError(f"q is {q}, expected 0 to {total}")
    if total == 0:
        return [0] * len(n_W)
    share_W = [Fraction(q * int(n), total) for n in n_W]
    quota_W = [math.floor(share) for share in share_W]
    by_remainder = sorted(range(len(n_W)), key=lambda r: (quota_W[r] - share_W[r], r))
    for r in by_remainder[: q - sum(quota_W)]:
        quota_W[r] += 1
    return quota_W


def systematic_apportion(n_W: Sequence[int], q: int, start: int) -> list[int]:
    """Return one expert's quota per rank, with shares rounded at random (not in the specification).

    With `start` uniform in 0 .. n - 1 and shared by all ranks, the quotas sum to q, each is its
    share rounded down or up, and its mean is its share exactly. `apportion` lacks the last, which
    makes a share below 1 that it rounds to 0 unreachable on every draw: see the tests.
    """
    total, before, quota_W = sum(int(n) for n in n_W), 0, []
    for n in n_W:
        after = before + int(n)
        quota_W.append((q * after + start) // total - (q * before + start) // total)
        before = after
    return quota_W


# ---- section 4: selection ----------------------------------------------------------------------


def global_pair_ids(rank: int, num_tokens: int, top_k: int) -> list[tuple[int, int]]:
    """Return a rank's pair ids ``(rank, token * K + slot)`` in [T, K] order (section 4)."""
    return [(rank, pair) for pair in range(num_tokens * top_k)]


def select_top(
    scores: Iterable[float],
    expert_ids: Iterable[int],
    pair_ids: Sequence[tuple[int, int]],
    quota_E: Sequence[int],
) -> list[bool]:
    """Return which pairs are kept: each expert's quota of highest scores (section 4).

    The order is (score descending, pair id ascending); every non-finite score counts as one same
    score above all others. Global scope: hand over all ranks' pairs at once. Local: one rank's.
    """
    scores, expert_ids = [float(s) for s in scores], [int(e) for e in expert_ids]
    rank_key = [
        (-(score if math.isfinite(score) else math.inf), pair_id)
        for score, pair_id in zip(scores, pair_ids, strict=True)
    ]
    kept = [False] * len(scores)
    for expert, quota in enumerate(quota_E):
        mine = [i for i, e in enumerate(expert_ids) if e == expert]
        for i in sorted(mine, key=lambda i: rank_key[i])[:quota]:
            kept[i] = True
    return kept


def sampled_sizes(lrm_scores: Iterable[float], rho: float) -> list[float]:
    """Return the sizes ``(1 - rho) sqrt(LRM) / mean + rho`` of one group of pairs (section 4).

    The group is what one draw chooses from: one rank's pairs of one expert in local scope. All
    ones if every score is zero. Non-finite scores (the specification is silent) count as the
    group's largest finite one.
    """
    scores = [float(s) for s in lrm_scores]
    largest = max((s for s in scores if math.isfinite(s)), default=0.0)
    roots = [math.sqrt(s if math.isfinite(s) else largest) for s in scores]
    if not any(roots):
        return [1.0] * len(roots)
    mean = math.fsum(roots) / len(roots)
    return [(1 - rho) * root / mean + rho for root in roots]


def inclusion_probabilities(sizes: Iterable[float], q: int) -> list[Fraction]:
    """Return ``pi = min(1, c a)`` with c solved so that they sum to q, exactly (section 4).

    Cap, solve for the rest, repeat until nothing new is capped: at most q rounds. If only zero
    sizes are left for the rest of q (rho = 0), they share it evenly: the limit of rho to 0.
    """
    sizes = [Fraction(a) for a in sizes]
    if not 0 <= q <= len(sizes):
        raise ValueError(f"q is {q}, expected 0 to {len(sizes)}")
    pi = [Fraction(1)] * len(sizes)
    free = set(range(len(sizes)))
    while free:
        left = q - (len(sizes) - len(free))
        total = sum(sizes[i] for i in free)
        for i in free:
            pi[i] = left * sizes[i] / total if total else Fraction(left, len(free))
        capped = {i for i in free if pi[i] >= 1}
        for i in capped:
            pi[i] = Fraction(1)
        if not capped:
            break
        free -= capped
    return pi


def systematic_sample(
    pi: Sequence[Fraction], order: Sequence[int], u: Fraction | float
) -> list[int]:
    """Return the picked pairs, ascending: systematic sampling in `order` from start u (section 4).

    The pairs lie end to end in `order` on [0, q), each as long as its pi; the one that holds
    u + k, for k = 0 .. q - 1, is picked. A pair's stretch includes its lower end.
    """
    u = Fraction(u)
    if sum(pi) != int(sum(pi)) or sorted(order) != list(range(len(pi))) or not 0 <= u < 1:
        raise ValueError("pi must sum to an integer, order be a permutation, u lie in [0, 1)")
    picked, lower = [], Fraction(0)
    for i in order:
        upper = lower + Fraction(pi[i])
        if math.ceil(upper - u) - math.ceil(lower - u) == 1:
            picked.append(i)
        lower = upper
    return sorted(picked)


def integrate_over_start(
    pi: Sequence[Fraction], order: Sequence[int]
) -> list[tuple[Fraction, list[int]]]:
    """Return all (interval length, picked pairs) as the start u goes from 0 to 1 (section 4).

    The lengths sum to 1, so a sum weighted by them is an exact expectation over the start. To
    drive another sampler, its u for an interval is the lengths before it plus half its own.
    """
    ends, total = {Fraction(0)}, Fraction(0)
    for i in order:
        total += Fraction(pi[i])
        ends.add(total % 1)
    cuts = [*sorted(ends), Fraction(1)]
    return [
        (upper - lower, systematic_sample(pi, order, (lower + upper) / 2))
        for lower, upper in pairwise(cuts)
    ]


# ---- sections 2 and 10: what has to travel -----------------------------------------------------


class Rows(NamedTuple):
    """Rows that the pairs require at least: nothing padded, nothing sent twice."""

    unique_WW: Tensor  # int64 [source, destination]: token rows; the diagonal stays at home
    pairs_W: Tensor  # int64: pairs computed on each (destination) rank: its GEMM rows


def unique_rows(
    expert_TK: Sequence[Tensor],
    kept_TK: Sequence[Tensor] | None,
    num_ranks: int,
    num_experts: int,
) -> Rows:
    """Return the rows that travel and the rows computed, under home placement (section 2).

    Args:
        expert_TK: one [T, K] table per source rank; T may differ and be zero.
        kept_TK: which pairs take part, bool, per source rank; None: all (the forward pass).
    """
    experts_per_rank = num_experts // num_ranks
    unique_WW = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    pairs_W = torch.zeros(num_ranks, dtype=torch.int64)
    for source in range(num_ranks):
        travelled = set()
        for t, experts in enumerate(expert_TK[source].tolist()):
            for j, expert in enumerate(experts):
                if kept_TK is None or bool(kept_TK[source][t, j]):
                    home = expert // experts_per_rank
                    pairs_W[home] += 1
                    travelled.add((t, home))
        for _, home in travelled:
            unique_WW[source, home] += 1
    return Rows(unique_WW, pairs_W)


def gray_place(direction, bits=16):
    """The place of the first signs in the reflected Gray code, built by reflection."""
    first, size, is_reflected = 0, 2**bits, False
    for place in range(bits):
        sign = bool(direction >> (63 - place) & 1)
        size //= 2
        if sign != is_reflected:
            first += size
        is_reflected ^= sign
    return first


def neighbors(direction_n, places_n=None, longest=256):
    """The order of one expert's pairs: by their first signs, cut evenly, and in each part always on
    to the nearest that is left. Among equal first signs in the order of ``places``, if given."""
    places = range(len(direction_n)) if places_n is None else places_n
    order = sorted(places, key=lambda i: direction_n[i] % 2**64 >> 48)
    number = -(-len(order) // longest)
    cuts = [c * len(order) // number for c in range(number + 1)] if number else []
    result = []
    for start, end in pairwise(cuts):
        left = order[start:end]
        result.append(left.pop(0))
        while left:
            signs = direction_n[result[-1]]
            differ = [bin((signs ^ direction_n[i]) % 2**64).count("1") for i in left]
            result.append(left.pop(differ.index(min(differ))))
    return result
