"""Scores of pairs and signs of directions for GPUs, in Triton; called through ``score``.

Shape letters: T = tokens, D = model dim, N = pairs, B = signs, 16 or 64.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lrmoe.kernels.select_triton import gray_code
from lrmoe.score import grad_passes

_PAIRS_PER_PROGRAM = 1024
_ROWS_PER_PROGRAM = 16
_LARGEST_BLOCK = 128  # entries of a row at a time, of half types; of float32 a quarter
_FIRST = tl.constexpr(16)
_ALL = tl.constexpr(64)


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


def grad_pass(
    grad_TD: torch.Tensor, first_DB: torch.Tensor, others_DB: torch.Tensor, has_all_signs: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`lrmoe.score.grad_pass`.

    Reads ``T D`` entries, writes ``3 T`` scalars; the planes, 64 entries a column of the gradient,
    stay in the cache. float64, which no product on a card takes here, goes the long way.
    """
    T, D = grad_TD.shape
    if grad_TD.dtype == torch.float64:
        return grad_passes(grad_TD, first_DB, others_DB, has_all_signs)
    norm_sq_T = grad_TD.new_empty(T, dtype=torch.float32)
    is_bad_T = grad_TD.new_empty(T, dtype=torch.uint8)
    code_T = grad_TD.new_empty(T, dtype=torch.int64)
    is_float32 = grad_TD.dtype == torch.float32
    largest = _LARGEST_BLOCK // 4 if is_float32 else _LARGEST_BLOCK
    if T:
        _grad_pass[(triton.cdiv(T, _ROWS_PER_PROGRAM),)](
            grad_TD.contiguous(),
            first_DB.contiguous(),
            others_DB.contiguous(),
            norm_sq_T,
            is_bad_T,
            code_T,
            T,
            D,
            HAS_ALL=has_all_signs,
            PRECISION="ieee" if is_float32 else "tf32",  # in which those of half types are exact
            ROWS=_ROWS_PER_PROGRAM,
            BLOCK=max(min(triton.next_power_of_2(D), largest), 16),
        )
    return norm_sq_T, is_bad_T.view(torch.bool), code_T


def pair_sums(lrm_N: torch.Tensor, kept_P: torch.Tensor, is_bad_T: torch.Tensor) -> torch.Tensor:
    """:func:`lrmoe.score.pair_sums`, a part for every block. Reads the kept ids, the LRM (that of
    the kept twice), and a flag a token."""
    longest = max(len(lrm_N), len(kept_P), len(is_bad_T), 1)
    num_parts = triton.cdiv(longest, _PAIRS_PER_PROGRAM)
    part_n3 = torch.empty(num_parts, 3, dtype=torch.float64, device=lrm_N.device)
    _sums[(num_parts,)](
        lrm_N,
        kept_P,
        is_bad_T.view(torch.uint8),
        part_n3,
        len(lrm_N),
        len(kept_P),
        len(is_bad_T),
        BLOCK=_PAIRS_PER_PROGRAM,
    )
    return part_n3


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
def _sums(lrms, kept, flags, parts, num_pairs, num_kept, num_tokens, BLOCK: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    place = part * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(kept + place, mask=place < num_kept, other=0)
    of_kept = tl.load(lrms + pair, mask=place < num_kept, other=0.0).to(tl.float64)
    of_all = tl.load(lrms + place, mask=place < num_pairs, other=0.0).to(tl.float64)
    bad = tl.load(flags + place, mask=place < num_tokens, other=0).to(tl.int32)
    tl.store(parts + part * 3, tl.sum(of_kept, 0))
    tl.store(parts + part * 3 + 1, tl.sum(of_all, 0))
    tl.store(parts + part * 3 + 2, tl.sum(bad, 0).to(tl.float64))


@triton.jit
def _bits(product, COUNT: tl.constexpr):
    """The signs of each row, the first as the highest bit."""
    nth = tl.arange(0, COUNT).to(tl.int64)
    # Each bit once, so their sum is their union; the first is that of the number's sign.
    return tl.sum((product > 0).to(tl.int64) << (63 - nth)[None, :], 1)


@triton.jit
def _grad_pass(
    rows, first, others, norm_sq, is_bad, codes, num, width,
    HAS_ALL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num
    nth = tl.arange(0, _FIRST)
    others_nth = tl.arange(0, _ALL) - _FIRST  # the first are made on their own
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bad = tl.zeros([ROWS, BLOCK], dtype=tl.int32)
    product = tl.zeros([ROWS, _FIRST], dtype=tl.float32)
    others_product = tl.zeros([ROWS, _ALL], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < width
        entry = row[:, None] * width + column[None, :]
        x = tl.load(rows + entry, mask=is_row[:, None] & is_column[None, :], other=0.0)
        x = x.to(tl.float32)
        total += x * x
        bad |= ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)
        place = column[:, None] * _FIRST + nth[None, :]
        plane = tl.load(first + place, mask=is_column[:, None], other=0.0).to(tl.float32)
        product = tl.dot(x, plane, product, input_precision=PRECISION)
        if HAS_ALL:
            place = column[:, None] * (_ALL - _FIRST) + others_nth[None, :]
            mask = is_column[:, None] & (others_nth >= 0)[None, :]
            plane = tl.load(others + place, mask=mask, other=0.0).to(tl.float32)
            others_product = tl.dot(x, plane, others_product, input_precision=PRECISION)
    tl.store(norm_sq + row, tl.sum(total, 1), mask=is_row)
    tl.store(is_bad + row, tl.max(bad, 1).to(tl.uint8), mask=is_row)
    code = _bits(product, _FIRST)
    # Of the others the first are 0, not above it.
    code = code | _bits(others_product, _ALL) if HAS_ALL else gray_code(code)
    tl.store(codes + row, code, mask=is_row)


@triton.jit
def _signs(products, directions, num, ROWS: tl.constexpr, SIGNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    nth = tl.arange(0, SIGNS)
    is_row = row < num
    product = tl.load(products + row[:, None] * SIGNS + nth[None, :], mask=is_row[:, None])
    tl.store(directions + row, _bits(product, SIGNS), mask=is_row)
