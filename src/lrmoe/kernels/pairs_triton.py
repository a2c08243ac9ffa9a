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
_KINDS_AT_ONCE = 64
_PAIRS_PER_PROGRAM = 1024


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
        ids_N, count_Bb, end_Bb, order_N, sorted_N, N, num_ids, num_blocks, BLOCK=_IDS_PER_PROGRAM
    )
    return order_N, sorted_N, count_Bb.sum(1)


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
def _kind(ids, place, is_inside, num_ids):
    """``id + 1``, 0 below the ids, one beyond them above."""
    ids = tl.load(ids + place, mask=is_inside, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(ids, -1), num_ids) + 1


@triton.jit
def _count(ids, counts, num, num_ids, num_blocks, BLOCK: tl.constexpr, KINDS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    place = b * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num
    kind = tl.where(is_inside, _kind(ids, place, is_inside, num_ids), -1)
    for start in range(0, num_ids + 2, KINDS):
        some = start + tl.arange(0, KINDS)
        count = tl.sum((kind[:, None] == some[None, :]).to(tl.int64), 0)
        tl.store(counts + some * num_blocks + b, count, mask=some < num_ids + 2)


@triton.jit
def _place(ids, counts, ends, order, ordered, num, num_ids, num_blocks, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, BLOCK)
    place = b * BLOCK + nth
    is_inside = place < num
    kind = tl.where(is_inside, _kind(ids, place, is_inside, num_ids), -1)
    is_before = (kind[:, None] == kind[None, :]) & (nth[None, :] < nth[:, None])
    before = tl.sum(is_before.to(tl.int64), 1)
    cell = kind * num_blocks + b
    end = tl.load(ends + cell, mask=is_inside, other=0)
    count = tl.load(counts + cell, mask=is_inside, other=0)
    target = end - count + before
    tl.store(order + target, place, mask=is_inside)
    tl.store(ordered + target, kind - 1, mask=is_inside)


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
