"""The pair table, the token rows and the two orders, each against a loop.

Shape letters: T = tokens, K = top-k, N = pairs, P = a subset, U = token rows, W = ranks, e =
instances on one rank, R = received pairs.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrmoe.pairs import (
    arrival_order,
    count_token_rows,
    counting_sort,
    sort_pairs,
    token_rows,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_pairs_are_sorted_by_expert_then_token_and_slot(dtype):
    top_k_index_TK = torch.tensor([[3, 0], [0, 2], [3, 2], [2, 0]], dtype=dtype)
    pairs = sort_pairs(top_k_index_TK, 4)
    assert pairs.expert_N.tolist() == [0, 0, 0, 2, 2, 2, 3, 3]
    assert pairs.flat_N.tolist() == [1, 2, 7, 3, 5, 6, 0, 4]
    assert pairs.token_N.tolist() == [0, 1, 3, 1, 2, 3, 0, 2]
    assert {pairs.flat_N.dtype, pairs.token_N.dtype, pairs.expert_N.dtype} == {torch.int64}


@pytest.mark.parametrize("shape", [(0, 2), (3, 1)])
def test_pairs_without_tokens_and_with_one_slot(shape):
    top_k_index_TK = torch.arange(shape[0] * shape[1]).view(shape).flip(0)
    pairs = sort_pairs(top_k_index_TK, 4)
    assert pairs.flat_N.tolist() == list(range(shape[0] * shape[1]))[::-1]
    assert pairs.token_N.tolist() == list(range(shape[0]))[::-1]


@pytest.mark.parametrize("beyond", [1 << 32, -(1 << 32), (1 << 32) + 1, 1 << 62, -1, 5, -(1 << 63)])
def test_ids_of_no_expert_come_first_and_last_and_are_counted_apart(beyond):
    pairs = sort_pairs(torch.tensor([[0, beyond], [4, 0]]), 5)
    below, above = int(beyond < 0), int(beyond > 0)
    assert pairs.expert_N.tolist() == [-1] * below + [0, 0, 4] + [5] * above
    assert pairs.flat_N.tolist() == [1] * below + [0, 3, 2] + [1] * above
    assert pairs.count_B.tolist() == [below, 2, 0, 0, 0, 1, above]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("num_ids", [1, 7, 300])
def test_a_counting_sort_equals_a_stable_sort(dtype, num_ids):
    ids = np.random.default_rng(num_ids).integers(0, min(num_ids + 2, 120), 500)
    order_N, sorted_N, count_B = counting_sort(torch.from_numpy(ids).to(dtype), num_ids)
    clamped = np.minimum(ids, num_ids)
    want = sorted(range(len(ids)), key=clamped.__getitem__)
    assert order_N.tolist() == want
    assert sorted_N.tolist() == clamped[want].tolist()
    assert count_B.tolist() == [0, *(int((clamped == i).sum()) for i in range(num_ids + 1))]


@st.composite
def pairs_and_destinations(draw):
    """(num tokens, num ranks, [(token, rank)] sorted by rank) of some pairs."""
    num_tokens, num_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    pair = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_tokens - 1))
    pairs = sorted(draw(st.lists(pair, max_size=12)))
    return num_tokens, num_ranks, [(token, rank) for rank, token in pairs]


@given(pairs_and_destinations(), st.data())
def test_a_token_has_one_row_per_destination_whatever_the_padding(case, data):
    num_tokens, num_ranks, pairs = case
    token_P = torch.tensor([token for token, _ in pairs], dtype=torch.int64)
    rank_P = torch.tensor([rank for _, rank in pairs], dtype=torch.int64)
    needed_WT, rows_W = count_token_rows(token_P, rank_P, num_tokens, num_ranks)
    needed = [sorted({t for t, r in pairs if r == rank}) for rank in range(num_ranks)]
    assert rows_W.tolist() == [len(tokens) for tokens in needed]

    slack = [data.draw(st.integers(0, num_tokens - len(tokens))) for tokens in needed]
    rows = token_rows(needed_WT, token_P, rank_P, rows_W.numpy() + np.array(slack))
    start = 0
    for rank, tokens in enumerate(needed):
        message = rows.token_U[start : start + len(tokens) + slack[rank]].tolist()
        assert message[: len(tokens)] == tokens
        assert len(set(message)) == len(message)  # what comes back is summed by token
        for (token, destination), row in zip(pairs, rows.row_P.tolist(), strict=True):
            if destination == rank:
                assert row < len(tokens)  # no pair names a padding row
                assert message[row] == token
        start += len(message)
    assert rows.token_U.shape[0] == start
    assert ((rows.token_U >= 0) & (rows.token_U < num_tokens)).all()
    assert rows.row_P.dtype == torch.int32


@given(
    st.integers(1, 4).flatmap(
        lambda e: st.lists(
            st.lists(st.integers(0, 4), min_size=e, max_size=e), min_size=1, max_size=4
        )
    )
)
def test_message_order_and_expert_major_order_are_inverse(pairs_We):
    counts_We = np.array(pairs_We)
    rows_W = counts_We.sum(1)  # of each source, say one row per pair
    order = arrival_order(counts_We, rows_W, CPU)
    message = [
        (source, instance, i)
        for source, row in enumerate(pairs_We)
        for instance, n in enumerate(row)
        for i in range(n)
    ]
    place = {pair: i for i, pair in enumerate(message)}
    by_expert = sorted(message, key=lambda pair: (pair[1], pair[0], pair[2]))
    values_R = torch.arange(len(message))
    expert_major_R = order.to_expert_major(values_R)
    assert expert_major_R.tolist() == [place[pair] for pair in by_expert]
    assert torch.equal(order.to_message(expert_major_R), values_R)
    assert order.offsets_e.tolist() == counts_We.sum(0).cumsum().tolist()
    assert order.offsets_e.dtype == torch.int32
    if len(pairs_We) > 1:
        starts_W = rows_W.cumsum() - rows_W
        assert order.row_shift_R.tolist() == [int(starts_W[source]) for source, _, _ in by_expert]
    rows_RD = torch.randn(len(message), 3)
    assert torch.equal(order.to_message(order.to_expert_major(rows_RD)), rows_RD)
