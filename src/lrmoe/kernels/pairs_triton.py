"""Orders and lists of pairs for GPUs, in Triton; called through ``pairs`` and ``dispatch``.

A counting sort without atomics: every program counts its block of ids, one running sum over
(id, block) says where each block's ids of a kind begin, and the same blocks write. The order is
stable, and the same every time.

Shape letters: N = ids, B = kinds of ids, b = blocks of ids, P = kept pairs.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

_IDS_PER_PROGRAM = 128  # which are compared with one another
_KINDS_AT_ONCE = 32
_PAIRS_PER_PROGRAM = 1024
_TOKENS_AT_ONCE = 2048
_SCAN_WARPS = 8  # of the few programs that pass over all tokens


def counting_sort(
    ids_N: torch.Tensor, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`lrmoe.pairs.counting_sort`.

    Reads the ids twice, writes 16 bytes for each, and ``16 B`` bytes of counts per block.
    """
    N, device = len(ids_N), ids_N.device
    order_N, sorted_N = (torch.empty(N, dtype=torch.int64, device=device) for _ in range(2))
    num_blocks, num_kinds = triton.cdiv(N, _IDS_PER_PROGRAM), num_ids + 2
    if N == 0:
        return order_N, sorted_N, order_N.new_zeros(num_kinds)
    ids_N = ids_N.contiguous()
    count_Bb = order_N.new_empty(num_kinds, num_blocks)
    _count[(num_blocks,)](
        ids_N, count_Bb, N, num_ids, num_blocks, BLOCK=_IDS_PER_PROGRAM, KINDS=_KINDS_AT_ONCE
    )
    end_Bb = count_Bb.view(-1).cumsum(0)
    _place[(num_blocks,)](
        ids_N,
        count_Bb,
        end_Bb,
        order_N,
        sorted_N,
        N,
        num_ids,
        num_blocks,
        BLOCK=_IDS_PER_PROGRAM,
        OTHERS=_KINDS_AT_ONCE,
    )
    return order_N, sorted_N, count_Bb.sum(1)


def list_rows(
    needed_WT: torch.Tensor,
    start_W: torch.Tensor,
    token_P: torch.Tensor,
    rank_P: torch.Tensor,
    total: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`lrmoe.pairs.list_rows`. One program per rank passes over the tokens' flags twice."""
    W, T = needed_WT.shape
    token_U = token_P.new_empty(total)
    row_P = torch.empty_like(token_P, dtype=torch.int32)
    if T == 0:
        return token_U, row_P
    row_WT = torch.empty(W, T, dtype=torch.int32, device=token_P.device)
    _scan[(W,)](
        needed_WT.contiguous().view(torch.uint8),
        start_W,
        token_U,
        row_WT,
        T,
        W,
        total,
        BLOCK=_TOKENS_AT_ONCE,
        num_warps=_SCAN_WARPS,
    )
    if len(token_P):
        grid = (triton.cdiv(len(token_P), _PAIRS_PER_PROGRAM),)
        _rows[grid](row_WT, token_P, rank_P, row_P, len(token_P), T, BLOCK=_PAIRS_PER_PROGRAM)
    return token_U, row_P


def spread_runs(
    values_b: torch.Tensor, end_b: torch.Tensor, total: int, is_counting: bool
) -> torch.Tensor:
    """:func:`lrmoe.select.spread_runs`. Every program finds its places among the ends."""
    value_N = values_b.new_empty(total)
    if total:
        _spread[(triton.cdiv(total, _PAIRS_PER_PROGRAM),)](
            values_b,
            end_b,
            value_N,
            len(end_b),
            total,
            COUNTS=is_counting,
            BLOCK=_PAIRS_PER_PROGRAM,
        )
    return value_N


def pack_kept(
    kept_P: torch.Tensor, weight_P: torch.Tensor, p_N: torch.Tensor, token_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`lrmoe.dispatch.pack_kept`. A pair's ids (16 bytes) and two weights read, its ids
    (8 bytes) and one weight written."""
    row_P, place_P = (torch.empty_like(kept_P, dtype=torch.int32) for _ in range(2))
    coef_P = p_N.new_empty(kept_P.shape)
    if len(kept_P):
        grid = (triton.cdiv(len(kept_P), _PAIRS_PER_PROGRAM),)
        _pack[grid](
            kept_P,
            weight_P,
            p_N,
            token_N,
            row_P,
            place_P,
            coef_P,
            len(kept_P),
            BLOCK=_PAIRS_PER_PROGRAM,
        )
    return row_P, place_P, coef_P


@triton.jit
def _kind(ids, place, num, num_ids):
    """``id + 1``, 0 below the ids, one beyond them above; -1 beyond the last."""
    ids = tl.load(ids + place, mask=place < num, other=0).to(tl.int64)
    kind = (tl.minimum(tl.maximum(ids, -1), num_ids) + 1).to(tl.int32)
    return tl.where(place < num, kind, -1)


@triton.jit
def _count(ids, counts, num, num_ids, num_blocks, BLOCK: tl.constexpr, KINDS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    kind = _kind(ids, b * BLOCK + tl.arange(0, BLOCK), num, num_ids)
    for start in range(0, num_ids + 2, KINDS):
        some = start + tl.arange(0, KINDS)
        count = tl.sum((kind[:, None] == some[None, :]).to(tl.int32), 0)
        cell = some.to(tl.int64) * num_blocks + b
        tl.store(counts + cell, count.to(tl.int64), mask=some < num_ids + 2)


@triton.jit
def _place(
    ids, counts, ends, order, ordered, num, num_ids, num_blocks,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    place = b * BLOCK + nth
    is_inside = place < num
    kind = _kind(ids, place, num, num_ids)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, BLOCK, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_kind = _kind(ids, b * BLOCK + other, num, num_ids)
        is_before = (kind[:, None] == other_kind[None, :]) & (other[None, :] < nth[:, None])
        before += tl.sum(is_before.to(tl.int32), 1)
    kind = kind.to(tl.int64)
    cell = kind * num_blocks + b
    end = tl.load(ends + cell, mask=is_inside, other=0)
    count = tl.load(counts + cell, mask=is_inside, other=0)
    target = end - count + before
    tl.store(order + target, place, mask=is_inside)
    tl.store(ordered + target, kind - 1, mask=is_inside)


@triton.jit
def _scan(needed, starts, tokens, rows, num_tokens, num_ranks, total, BLOCK: tl.constexpr):
    w = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + w)
    size = tl.load(starts + w + 1, mask=w + 1 < num_ranks, other=total) - first
    beyond = first * 0  # where those that are not needed follow
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        flag = tl.load(needed + w * num_tokens + token, mask=token < num_tokens, other=0)
        beyond += tl.sum(flag.to(tl.int64), 0)
    row = first * 0
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_inside = token < num_tokens
        flag = tl.load(needed + w * num_tokens + token, mask=is_inside, other=0).to(tl.int64)
        rest = tl.where(is_inside, 1 - flag, 0)
        needed_row = row + tl.cumsum(flag, 0) - 1
        place = tl.where(flag != 0, needed_row, beyond + tl.cumsum(rest, 0) - 1)
        tl.store(rows + w * num_tokens + token, place.to(tl.int32), mask=is_inside)
        tl.store(tokens + first + place, token.to(tl.int64), mask=is_inside & (place < size))
        row += tl.sum(flag, 0)
        beyond += tl.sum(rest, 0)


@triton.jit
def _rows(rows, tokens, ranks, found, num, num_tokens, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = entry < num
    rank = tl.load(ranks + entry, mask=is_inside, other=0)
    token = tl.load(tokens + entry, mask=is_inside, other=0)
    row = tl.load(rows + rank * num_tokens + token, mask=is_inside, other=0)
    tl.store(found + entry, row, mask=is_inside)


@triton.jit
def _spread(values, ends, spread, num_runs, num, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num
    # The first run that ends after the place, by bisection: all before it end at it or before.
    low = place * 0
    high = low + num_runs
    width = num_runs
    while width > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_past = tl.load(ends + middle, mask=is_inside & is_open, other=0) <= place
        low = tl.where(is_open & is_past, middle + 1, low)
        high = tl.where(is_open & (is_past == 0), middle, high)
        width = width // 2
    value = tl.load(values + low, mask=is_inside, other=0)
    if COUNTS:
        value += place
    tl.store(spread + place, value, mask=is_inside)


@triton.jit
def _pack(kept, weights, ps, tokens, rows, places, coefs, num, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = entry < num
    pair = tl.load(kept + entry, mask=is_inside, other=0)
    weight = tl.load(weights + entry, mask=is_inside, other=0.0)
    p = tl.load(ps + pair, mask=is_inside, other=0.0)
    tl.store(rows + entry, tl.load(tokens + pair, mask=is_inside, other=0).to(tl.int32), is_inside)
    tl.store(places + entry, pair.to(tl.int32), mask=is_inside)
    tl.store(coefs + entry, p * weight, mask=is_inside)
