"""Scores of pairs and signs of directions for GPUs, in Triton; called through ``score``.

Shape letters: T = tokens, N = pairs, B = signs, 16 or 64.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

_PAIRS_PER_PROGRAM = 1024
_ROWS_PER_PROGRAM = 16


def pair_lrm(
    p_N: torch.Tensor,
    grad_norm_sq_T: torch.Tensor,
    token_N: torch.Tensor,
    h_norm_sq_N: torch.Tensor,
) -> torch.Tensor:
    """:func:`lrmoe.score.pair_lrm`. Reads three numbers and an id a pair, writes one number."""
    score_N = torch.empty_like(p_N)
    if len(p_N):
        grid = (triton.cdiv(len(p_N), _PAIRS_PER_PROGRAM),)
        _lrm[grid](
            p_N, grad_norm_sq_T, token_N, h_norm_sq_N, score_N, len(p_N), BLOCK=_PAIRS_PER_PROGRAM
        )
    return score_N


def pack_signs(product_TB: torch.Tensor) -> torch.Tensor:
    """:func:`lrmoe.score.pack_signs`. Reads each number once, writes 8 bytes a token."""
    T, B = product_TB.shape
    direction_T = torch.empty(T, dtype=torch.int64, device=product_TB.device)
    if T:
        _signs[(triton.cdiv(T, _ROWS_PER_PROGRAM),)](
            product_TB.contiguous(), direction_T, T, ROWS=_ROWS_PER_PROGRAM, SIGNS=B
        )
    return direction_T


@triton.jit
def _lrm(ps, norms, tokens, h_norms, scores, num, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = pair < num
    p = tl.load(ps + pair, mask=is_inside, other=0.0)
    norm = tl.load(norms + tl.load(tokens + pair, mask=is_inside, other=0), mask=is_inside)
    score = p * p * norm * tl.load(h_norms + pair, mask=is_inside, other=0.0)
    tl.store(scores + pair, score, mask=is_inside)


@triton.jit
def _signs(products, directions, num, ROWS: tl.constexpr, SIGNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    nth = tl.arange(0, SIGNS).to(tl.int64)
    is_row = row < num
    product = tl.load(products + row[:, None] * SIGNS + nth[None, :], mask=is_row[:, None])
    sign = (product > 0).to(tl.int64)
    # Each bit once, so their sum is their union; the first is that of the number's sign.
    tl.store(directions + row, tl.sum(sign << (63 - nth)[None, :], 1), mask=is_row)
