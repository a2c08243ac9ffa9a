"""Row kernels for GPUs, in Triton; called through ``kernels.rows`` and ``score``.

Bytes: every operand is read and written once, row ids included. Sums of rows have no atomics on
values: ids are put in buckets in any order, and every sum takes its bucket in ascending order.

Shape letters: P = gathered rows, U = unique rows, T = tokens, D = row width.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

_LARGEST_BLOCK = 2048  # entries of a row that one program holds
_IDS_PER_PROGRAM = 1024
_ENTRIES_TO_CLEAR = 8192  # at a time
_PROGRAMS_PER_EXPERT = 16  # few, since hardly any has something to clear
_ROWS_PER_PROGRAM = 4
_NONE = tl.constexpr((1 << 31) - 1)  # beyond every row


def copy_rows(rows_UD: torch.Tensor, row_ids_P: torch.Tensor, out_PD: torch.Tensor) -> None:
    """Fill ``out_PD`` with ``rows_UD[row_ids_P]``. Moves ``2 P D`` entries and ``P`` ids."""
    P, D = out_PD.shape
    if P == 0 or D == 0:
        return
    block = _block(D)
    grid = (triton.cdiv(P, _ROWS_PER_PROGRAM), triton.cdiv(D, block))
    _gather[grid](
        rows_UD.contiguous(), row_ids_P, out_PD, P, D, ROWS=_ROWS_PER_PROGRAM, BLOCK=block
    )


def sum_rows(
    rows_PD: torch.Tensor, row_ids_P: torch.Tensor, num_rows: int, most: int
) -> torch.Tensor:
    """Sums of the rows that name each unique row.

    Moves ``(P + U) D`` entries, ``P`` ids, ``8 P`` bytes of places and ``8 U`` of counts.
    """
    (P, D), U = rows_PD.shape, num_rows
    if P == 0 or U == 0 or D == 0:
        return rows_PD.new_zeros(U, D)
    out_UD = rows_PD.new_empty(U, D)
    count_U = torch.zeros(U, dtype=torch.int32, device=out_UD.device)
    place_Um = torch.empty(U, most, dtype=torch.int32, device=out_UD.device)
    grid = (triton.cdiv(P, _IDS_PER_PROGRAM),)
    _fill[grid](row_ids_P, count_U, place_Um, P, most, BLOCK=_IDS_PER_PROGRAM)
    block = _block(D)
    wide = tl.float64 if rows_PD.dtype == torch.float64 else tl.float32
    _sum[(U, triton.cdiv(D, block))](
        rows_PD.contiguous(),
        place_Um,
        count_U,
        out_UD,
        D,
        most,
        BLOCK=block,
        MOST=triton.next_power_of_2(most),
        WIDE=wide,
    )
    return out_UD


def row_norm_sq(rows_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``|row|^2`` and which rows are not finite. Reads ``T D`` entries, writes ``2 T`` scalars."""
    T, D = rows_TD.shape
    wide = torch.promote_types(rows_TD.dtype, torch.float32)
    norm_sq_T = rows_TD.new_empty(T, dtype=wide)
    is_bad_T = rows_TD.new_empty(T, dtype=torch.uint8)
    if T:
        _norm[(T,)](
            rows_TD.contiguous(),
            norm_sq_T,
            is_bad_T,
            D,
            BLOCK=_block(D),
            WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        )
    return norm_sq_T, is_bad_T.view(torch.bool)


def poison_rows(rows_TD: torch.Tensor, is_bad_T: torch.Tensor) -> None:
    """:func:`lrmoe.kernels.rows.poison_rows`. Reads ``T`` flags, writes the rows that are bad."""
    T, D = rows_TD.shape
    if T and D:
        _poison[(T,)](rows_TD, is_bad_T.view(torch.uint8), rows_TD.stride(0), D, BLOCK=_block(D))


def clear_empty(products_eAB: torch.Tensor, offsets_e: torch.Tensor) -> None:
    """Zero what belongs to experts without rows; nothing else is touched."""
    size = products_eAB[0].numel() if len(products_eAB) else 0
    if size:
        grid = (len(offsets_e), _PROGRAMS_PER_EXPERT)
        _clear[grid](
            products_eAB, offsets_e, size, PROGRAMS=_PROGRAMS_PER_EXPERT, BLOCK=_ENTRIES_TO_CLEAR
        )


def _block(width: int) -> int:
    return min(triton.next_power_of_2(max(width, 16)), _LARGEST_BLOCK)


@triton.jit
def _gather(rows, ids, out, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    source = tl.load(ids + row, mask=is_row, other=0).to(tl.int64)
    is_inside = is_row[:, None] & (column < width)[None, :]
    values = tl.load(rows + source[:, None] * width + column[None, :], mask=is_inside)
    tl.store(out + row[:, None] * width + column[None, :], values, mask=is_inside)


@triton.jit
def _fill(ids, counts, places, num_ids, most, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num_ids
    row = tl.load(ids + place, mask=is_inside, other=0).to(tl.int64)
    nth = tl.atomic_add(counts + row, tl.full([BLOCK], 1, tl.int32), mask=is_inside)
    # Never beyond the bucket, even if an id came more often than was said.
    tl.store(places + row * most + nth, place.to(tl.int32), mask=is_inside & (nth < most))


@triton.jit
def _following(places, before):
    """The smallest place of a bucket above another one; ``_NONE`` after the last."""
    return tl.min(tl.where(places > before, places, _NONE), 0)


@triton.jit
def _sum(
    rows, places, counts, out, width, most,
    BLOCK: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    named = tl.load(counts + row)
    count = tl.minimum(named, most)
    nth = tl.arange(0, MOST)
    bucket = tl.load(places + row * most + nth, mask=nth < count, other=_NONE)
    total = tl.zeros([BLOCK], dtype=WIDE)
    before = count * 0 - 1
    for _ in range(0, count, 2):  # two rows on their way at a time
        one = _following(bucket, before)
        two = _following(bucket, one)
        before = two
        values = rows + one.to(tl.int64) * width + column
        row_one = tl.load(values, mask=is_inside, other=0.0)
        values = rows + two.to(tl.int64) * width + column
        row_two = tl.load(values, mask=is_inside & (two < _NONE), other=0.0)
        total += row_one.to(WIDE)
        total += row_two.to(WIDE)
    total = tl.where(named > most, float("nan"), total)  # no part of a sum passes for it
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _poison(rows, flags, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flags + row) != 0:
        nan = tl.full([BLOCK], float("nan"), dtype=tl.float32).to(rows.dtype.element_ty)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(rows + row * stride + column, nan, mask=column < width)


@triton.jit
def _clear(products, ends, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    if tl.load(ends + e) == tl.load(ends + e - 1, mask=e > 0, other=0):
        nothing = tl.zeros([BLOCK], dtype=products.dtype.element_ty)
        for start in range(tl.program_id(1) * BLOCK, size, PROGRAMS * BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(products + e * size + place, nothing, mask=place < size)


@triton.jit
def _norm(rows, norm_sq, is_bad, width, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=WIDE)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(WIDE)
        total += x * x
        bad |= ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)
    tl.store(norm_sq + row, tl.sum(total, 0))
    tl.store(is_bad + row, tl.max(bad, 0).to(tl.uint8))
