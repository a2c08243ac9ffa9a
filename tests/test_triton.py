"""The Triton kernels against the plain PyTorch operators: on CUDA if there is a card, else in
Triton's interpreter, in poisoned memory and odd sizes; and whether they compile for a card.

Shape letters: P = gathered rows, U = unique rows, D = row width, R = forward rows, F = expert
width, N = pairs in expert-major order, e = experts.
"""

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lrmoe import dispatch, pairs, score, select
from lrmoe.kernels import (
    gated,
    gated_triton,
    grouped_gemm,
    pairs_triton,
    rows,
    rows_triton,
    score_triton,
    select_triton,
)
from tests.errors import relative_error

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 4e-3 if HAS_CUDA else 8e-3,  # the interpreter cuts off, a card rounds
    torch.float16: 5e-4,
}
INF, NAN = float("inf"), float("nan")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    *([pytest.mark.gpu] if HAS_CUDA else []),
]


@pytest.fixture(params=[None, 16], ids=["one block", "blocks of 16"])
def _blocks(request, monkeypatch):
    """Small blocks, so that every loop over a row or a run has several rounds."""
    if request.param is not None:
        for module in (rows_triton, gated_triton, select_triton, score_triton):
            monkeypatch.setattr(module, "_LARGEST_BLOCK", request.param)


def _tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def _ids(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---- rows --------------------------------------------------------------------------------------

ROW_IDS = {
    "some twice, some never": ([3, 0, 3, 3, 1, 0, 6, 3], 7),
    "all the same": ([2] * 40, 5),
    "permutation": ([2, 0, 1], 3),
    "none": ([], 4),
    "no rows at all": ([], 0),
}


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", ROW_IDS.values(), ids=ROW_IDS)
@pytest.mark.parametrize(("width", "id_dtype"), [(1, torch.int32), (37, torch.int64)])
def test_rows_are_copied_and_summed(dtype, ids, width, id_dtype):
    values, num_rows = ids
    row_ids = _ids(values, id_dtype)
    source = _tensor(width, num_rows, dtype=dtype).t()  # not contiguous
    out = torch.full((len(values), width), NAN, dtype=dtype, device=DEVICE)
    rows_triton.copy_rows(source, row_ids, out)
    assert torch.equal(out, source[row_ids.long()])
    parts = _tensor(len(values), width, dtype=dtype)
    most = max(Counter(values).values(), default=1)
    got = rows_triton.sum_rows(parts, row_ids, num_rows, most)
    want = torch.zeros(num_rows, width, dtype=torch.float64, device=DEVICE)
    want.index_add_(0, row_ids.long(), parts.double())
    assert got.dtype == dtype
    assert got.shape == want.shape
    assert relative_error(got, want) <= TOLERANCE[dtype]


def test_sums_are_taken_in_ascending_order_and_rounded_once():
    # 1 + 2^-8 four times is lost if bfloat16 is rounded in between; the order decides with 1e8
    parts = torch.tensor([[1.0], [2**-9], [2**-9], [2**-9], [2**-9]]).to(DEVICE, torch.bfloat16)
    got = rows_triton.sum_rows(parts, _ids([0] * 5), 1, 5)
    assert got.item() == 1 + 2**-7
    ordered = torch.tensor([[1e8], [-1e8], [1.0]], device=DEVICE)
    assert rows_triton.sum_rows(ordered, _ids([0, 0, 0]), 1, 3).item() == 1
    ordered = torch.tensor([[1.0], [1e8], [-1e8]], device=DEVICE)
    assert rows_triton.sum_rows(ordered, _ids([0, 0, 0]), 1, 3).item() == 0


def test_a_row_that_is_named_too_often_is_nan_and_spoils_no_other():
    parts = _tensor(6, 5)
    got = rows_triton.sum_rows(parts, _ids([0, 0, 0, 1, 0, 0]), 3, 2)
    assert got[0].isnan().all()
    assert torch.equal(got[1], parts[3])
    assert (got[2] == 0).all()


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 37), (1, 1), (3, 0), (0, 4)])
def test_row_norms_equal_the_operator(dtype, shape):
    x = _tensor(*shape, dtype=dtype)
    if x.numel() > 9:
        x[1, 3], x[2, 36], x[4, 0] = NAN, -INF, torch.finfo(dtype).max  # whose square overflows
    got, want = rows_triton.row_norm_sq(x), rows.row_norm_sq(x.cpu())
    torch.testing.assert_close(got[0].cpu(), want[0], equal_nan=True)
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 40, 300), (1, 1, 1), (0, 2, 2)])
def test_products_of_no_rows_are_cleared_and_others_are_not(dtype, shape, monkeypatch):
    monkeypatch.setattr(rows_triton, "_ENTRIES_TO_CLEAR", 256)  # several times for each program
    ends = _ids([0, 3, 3, 7][: shape[0]], torch.int32)
    products = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    rows_triton.clear_empty(products, ends)
    on_host = torch.full(shape, NAN, dtype=dtype)
    grouped_gemm.clear_empty(on_host, ends.cpu())
    torch.testing.assert_close(products.cpu(), on_host, rtol=0, atol=0, equal_nan=True)
    empty = [True, False, True, False][: shape[0]]
    assert [bool((p == 0).all()) for p in on_host] == empty
    assert [bool(p.isnan().all()) for p in on_host] == [not e for e in empty]


# ---- the gated activation ----------------------------------------------------------------------


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("shape", [(5, 21), (1, 1), (3, 40), (0, 8)])
def test_swiglu_equals_the_reference(dtype, shape):
    R, F = shape
    gate_up, scale = _tensor(R, 2 * F, dtype=dtype) * 4, torch.rand(R, device=DEVICE)
    if R > 1:
        gate_up[0, 0] = -100  # the exponential overflows
    scaled = torch.full((R, F), NAN, dtype=dtype, device=DEVICE)
    norm_sq = torch.full((R,), NAN, device=DEVICE)
    gated_triton.swiglu_forward(gate_up, scale, scaled, norm_sq)
    want = gated.gated_forward_reference(gate_up.double(), scale.double(), None)
    assert relative_error(scaled, want[0]) <= TOLERANCE[dtype]
    assert relative_error(norm_sq, want[1]) <= 1e-6

    row_ids = torch.randint(0, R, (2 * R,), device=DEVICE) if R else _ids([])
    P = len(row_ids)
    grad_h, coef = _tensor(P, F, dtype=dtype), torch.rand(P, device=DEVICE)
    out = [torch.full((P, n), NAN, dtype=dtype, device=DEVICE) for n in (2 * F, F)]
    inner = torch.full((P,), NAN, device=DEVICE)
    gated_triton.swiglu_backward(gate_up, row_ids, grad_h, coef, *out, inner)
    want = gated.gated_backward_reference(
        gate_up.double(), row_ids, grad_h.double(), coef.double(), None
    )
    assert relative_error(out[0], want[0]) <= TOLERANCE[dtype]
    assert relative_error(out[1], want[1]) <= TOLERANCE[dtype]
    assert relative_error(inner, want[2]) <= 1e-5


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 7), (torch.bfloat16, 6)])
def test_swiglu_takes_the_padded_rows_that_grouped_mm_makes(dtype, width):
    offsets = _ids([2, 5], torch.int32)
    x, weight = _tensor(5, 16, dtype=dtype), _tensor(2, 2 * width, 16, dtype=dtype)
    gate_up = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    grad_h = torch.nn.functional.grouped_mm(x, weight[:, :width].transpose(1, 2), offs=offsets)
    if not HAS_CUDA:
        assert not gate_up.is_contiguous()  # else this tests nothing
    scale, row_ids = torch.rand(5, device=DEVICE), torch.arange(5, device=DEVICE)
    scaled = torch.full((5, width), NAN, dtype=dtype, device=DEVICE)
    norm_sq, inner = (torch.full((5,), NAN, device=DEVICE) for _ in range(2))
    gated_triton.swiglu_forward(gate_up, scale, scaled, norm_sq)
    want = gated.gated_forward_reference(gate_up.double(), scale.double(), None)
    assert relative_error(scaled, want[0]) <= TOLERANCE[dtype]
    grad_gate_up = torch.full((5, 2 * width), NAN, dtype=dtype, device=DEVICE)
    gated_triton.swiglu_backward(gate_up, row_ids, grad_h, scale, grad_gate_up, scaled, inner)
    want = gated.gated_backward_reference(
        gate_up.double(), row_ids, grad_h.double(), scale.double(), None
    )
    assert relative_error(grad_gate_up, want[0]) <= TOLERANCE[dtype]


def test_swiglu_hides_no_non_finite_value():
    gate_up = torch.tensor([[NAN, 1.0, 1.0, 1.0], [1.0, 1.0, INF, 1.0]], device=DEVICE)
    scaled, norm_sq = torch.empty(2, 2, device=DEVICE), torch.empty(2, device=DEVICE)
    gated_triton.swiglu_forward(gate_up, torch.ones(2, device=DEVICE), scaled, norm_sq)
    assert scaled.isfinite().tolist() == [[False, True], [False, True]]
    assert not norm_sq.isfinite().any()


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (9, 37)])
def test_flagged_rows_become_nan_and_others_stay(dtype, shape):
    rows_TD = _tensor(*shape, dtype=dtype)
    before, is_bad_T = rows_TD.clone(), torch.arange(shape[0], device=DEVICE) % 3 == 0
    rows_triton.poison_rows(rows_TD, is_bad_T)
    assert torch.equal(rows_TD.isnan(), is_bad_T[:, None].expand(shape))
    assert torch.equal(rows_TD[~is_bad_T], before[~is_bad_T])
    rows.poison_rows(before, is_bad_T)
    assert torch.equal(rows_TD.isnan(), before.isnan())


# ---- pairs and scores --------------------------------------------------------------------------

SORTED = {
    "experts": (np.random.default_rng(0).integers(0, 128, 1000), 128),
    "of no expert too": (np.random.default_rng(1).integers(-3, 8, 300), 5),
    "all the same": (np.full(257, 2), 3),
    "one": (np.array([0]), 1),
    "none": (np.array([], np.int64), 4),
}


@pytest.mark.parametrize("case", SORTED.values(), ids=SORTED)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_a_counting_sort_equals_the_reference(case, dtype):
    ids, num_ids = torch.from_numpy(case[0]).to(dtype), case[1]
    want = pairs.counting_sort(ids, num_ids)
    for got, each in zip(pairs_triton.counting_sort(ids.to(DEVICE), num_ids), want, strict=True):
        assert got.dtype == each.dtype
        assert torch.equal(got.cpu(), each)


def test_a_counting_sort_takes_ids_beyond_32_bits():
    ids = torch.tensor([1 << 62, 0, -(1 << 63), (1 << 32) + 1, 1])
    got = pairs_triton.counting_sort(ids.to(DEVICE), 2)
    assert [each.tolist() for each in got] == [[2, 1, 4, 0, 3], [-1, 0, 1, 2, 2], [1, 1, 1, 2]]


@pytest.fixture(params=[None, 16], ids=["one block", "blocks of 16"])
def _few_at_once(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(pairs_triton, "_TOKENS_AT_ONCE", request.param)
        monkeypatch.setattr(pairs_triton, "_PAIRS_PER_PROGRAM", request.param)


@pytest.mark.usefixtures("_few_at_once")
@pytest.mark.parametrize("shape", [(1, 1), (2, 37), (3, 0), (8, 100)])
@pytest.mark.parametrize("slack", [0, 3])
def test_rows_are_listed_as_in_the_reference(shape, slack):
    needed_WT = torch.rand(shape, device=DEVICE) < 0.4
    rank_P, token_P = needed_WT.nonzero().unbind(1)
    room_W = (needed_WT.sum(1) + slack).clamp(max=shape[1])
    arguments = needed_WT, room_W.cumsum(0) - room_W, token_P, rank_P
    total = int(room_W.sum()) if shape[1] else 0
    got = pairs_triton.list_rows(*arguments, total)
    want = pairs.list_rows(*(each.cpu() for each in arguments), total)
    for ours, each in zip(got, want, strict=True):
        assert ours.dtype == each.dtype
        assert torch.equal(ours.cpu(), each)


@pytest.mark.usefixtures("_few_at_once")
@pytest.mark.parametrize(
    "lengths", [[], [0], [5], [0, 3, 0, 0, 40, 1, 0], [1] * 130, [0] * 9 + [70]]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_runs_are_spread_as_in_the_reference(lengths, dtype):
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    values = torch.randint(-50, 50, (len(lengths),)).to(dtype)
    for is_counting in (False, True) if dtype == torch.int64 else (False,):
        want = select.spread_runs(values, ends, sum(lengths), is_counting)
        got = pairs_triton.spread_runs(
            values.to(DEVICE), ends.to(DEVICE), sum(lengths), is_counting
        )
        assert got.dtype == dtype
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_kept", [0, 1, 1500])
def test_kept_pairs_are_packed(dtype, num_kept):
    kept_P = torch.randperm(2000, device=DEVICE)[:num_kept].sort().values
    token_N = torch.randint(0, 50, (2000,), device=DEVICE)
    weight_P, p_N = _tensor(num_kept), _tensor(2000, dtype=dtype)
    got = pairs_triton.pack_kept(kept_P, weight_P, p_N, token_N)
    want = dispatch.pack_kept(kept_P.cpu(), weight_P.cpu(), p_N.cpu(), token_N.cpu())
    for ours, each in zip(got, want, strict=True):
        assert ours.dtype == each.dtype
        assert torch.equal(ours.cpu(), each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num", [0, 1, 1500])
def test_scores_equal_the_reference(dtype, num):
    norm_T = _tensor(60, dtype=dtype).square()
    norm_T[3], norm_T[4] = INF, NAN
    token_N = torch.randint(0, 60, (num,), device=DEVICE)
    p_N, h_N = _tensor(num, dtype=dtype), _tensor(num, dtype=dtype).square()
    got = score_triton.pair_lrm(p_N, norm_T, token_N, h_N)
    want = score.pair_lrm(*(each.cpu() for each in (p_N, norm_T, token_N, h_N)))
    torch.testing.assert_close(got.cpu(), want, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [0, 1, 37])
@pytest.mark.parametrize("signs", [16, 64])
def test_signs_equal_the_reference(dtype, num, signs):
    product_TB = _tensor(num, signs, dtype=dtype)
    if num > 3:
        product_TB[0], product_TB[1], product_TB[2], product_TB[3] = 1, -1, 0, NAN
    got_T = score_triton.pack_signs(product_TB)
    assert torch.equal(got_T.cpu(), score.pack_signs(product_TB.cpu()))
    places_T = select_triton.gray_place(got_T).cpu()
    assert torch.equal(places_T, select.gray_place(got_T.cpu()))


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "width"), [(0, 8), (1, 1), (37, 37), (19, 300)])
@pytest.mark.parametrize("strata", ["gradient", "neighbors"])
def test_one_pass_over_the_gradient_equals_the_reference(dtype, num, width, strata):
    grad_TD = _tensor(width, num, dtype=dtype).t()  # not contiguous
    if num > 5:
        grad_TD[1], grad_TD[2, 0], grad_TD[3, -1], grad_TD[4, 0] = 0, NAN, INF, -INF
    planes = score._hyperplanes(width, dtype, DEVICE)
    got = score_triton.grad_pass(grad_TD, *planes, strata == "neighbors")
    want_norm_T, want_bad_T = rows.row_norm_sq(grad_TD.cpu())
    assert got[0].dtype == want_norm_T.dtype
    torch.testing.assert_close(got[0].cpu(), want_norm_T, equal_nan=True, rtol=1e-5, atol=0)
    assert torch.equal(got[1].cpu(), want_bad_T)
    # Signs that rounding cannot turn.
    product_TB = grad_TD.cpu().double() @ torch.cat(planes, dim=1).cpu().double()
    looked_at = product_TB[:, : 16 if strata == "gradient" else 64].abs().amin(1)
    size_T = want_norm_T.double().sqrt()
    is_clear_T = (looked_at > 1e-5 * size_T) | (size_T == 0) | (size_T.isnan())
    assert is_clear_T.sum() >= num - 4
    want_T = score.code_of(score.pack_signs(product_TB), strata)
    assert torch.equal(got[2].cpu()[is_clear_T], want_T[is_clear_T])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num", "kept", "tokens"), [(0, 0, 0), (0, 0, 3), (5, 2, 3), (2500, 1200, 9)]
)
def test_sums_of_pairs_equal_the_reference(dtype, num, kept, tokens):
    lrm_N = _tensor(num, dtype=dtype).square()
    kept_P = torch.randperm(num, device=DEVICE)[:kept]
    is_bad_T = torch.arange(tokens, device=DEVICE) % 3 == 1
    got = score_triton.pair_sums(lrm_N, kept_P, is_bad_T)
    want = score.pair_sums(lrm_N.cpu(), kept_P.cpu(), is_bad_T.cpu())
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got.sum(0).cpu(), want.sum(0), rtol=1e-6, atol=0)


# ---- selection ---------------------------------------------------------------------------------


def _runs(kind, seed):
    """Scores, counts and quotas of a few experts."""
    rng = np.random.default_rng(seed)
    counts = np.array([0, 7, 1, 33, 90, 0])
    quotas = np.array([rng.integers(0, n + 1) for n in counts])
    N = counts.sum()
    scores = {
        "random": rng.random(N) ** 4,
        "equal": np.ones(N),
        "zero": np.zeros(N),
        "huge": np.exp(rng.normal(0, 12, N)),
        "few values": rng.choice([0.0, 1.0, 4.0, 1e30], N),
        "not finite": rng.choice([0.0, 1.0, NAN, INF, 2.0], N),
        "one outweighs all": np.where(np.arange(N) % 11 == 0, 1e35, 1e-30),
    }[kind]
    return torch.tensor(scores, dtype=torch.float32, device=DEVICE), counts, quotas


KINDS = ("random", "equal", "zero", "huge", "few values", "not finite", "one outweighs all")


def _seeded(*values):
    """Every combination, each with a seed of its own: other quotas and other scores."""
    return [(*each, seed) for seed, each in enumerate(itertools.product(*values))]


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("kind", "rho", "seed"), _seeded(KINDS, (0.0, 0.1, 1.0)))
def test_a_sample_equals_the_reference(kind, rho, seed):
    score_N, counts, quotas = _runs(kind, seed)
    segments = select.Segments(counts, DEVICE)
    size_N = select_triton.relative_sizes(score_N, segments.device_count_e, rho)
    want_N = select.relative_sizes(score_N.cpu(), torch.from_numpy(counts), rho)
    torch.testing.assert_close(size_N.cpu(), want_N, rtol=1e-6, atol=0)

    size_N = want_N.to(DEVICE)
    order_N = segments.sort(torch.randint(0, 1 << 48, (len(score_N),), device=DEVICE))
    start_e = torch.randint(0, select.ONE, (len(counts),), device=DEVICE)
    quota_e = torch.from_numpy(quotas).to(DEVICE)
    kept_P, weight_P = select_triton.sample_pairs(
        size_N, segments.device_count_e, quota_e, order_N, start_e, int(quotas.sum())
    )
    on_host = (size_N, segments.device_count_e, quota_e, order_N, start_e)
    want = select.sample_pairs(*(each.cpu() for each in on_host), int(quotas.sum()))
    assert torch.equal(kept_P.cpu(), want[0])
    torch.testing.assert_close(weight_P.cpu(), want[1], rtol=1e-15, atol=0)
    probability_P = select.ONE / weight_P.cpu()
    # Exact inverses of whole multiples of 2^-40.
    assert ((probability_P - probability_P.round()).abs() < 1e-3).all()
    assert (weight_P >= 1).all()


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("bits", [1, 16, 48])
@pytest.mark.parametrize("counts", [[0, 7, 1, 33, 290, 0], [5], [0], [3] * 40])
@pytest.mark.parametrize("is_salted", [False, True])
@pytest.mark.parametrize("most", [0, 1 << 28], ids=["sorted", "compared"])
def test_an_order_equals_the_reference(bits, counts, is_salted, most, monkeypatch):
    monkeypatch.setattr(select_triton, "_MOST_COMPARISONS", most)
    count_e, longest = torch.tensor(counts), max(counts)
    key_N = torch.randint(0, 1 << bits, (sum(counts),), device=DEVICE)
    key_N[:: max(len(key_N) // 2, 1)] = (1 << bits) - 1
    salt_e = torch.randint(0, select.ONE, count_e.shape) if is_salted else None
    on_device = salt_e.to(DEVICE) if is_salted else None
    got_N = select_triton.order_runs(key_N, count_e.to(DEVICE), longest, bits, on_device)
    want_N = select.order_runs(key_N.cpu(), count_e, longest, bits, salt_e)
    assert torch.equal(got_N.cpu(), want_N)


def test_many_pairs_in_short_runs_are_sorted(monkeypatch):
    monkeypatch.setattr(select_triton, "_MOST_COMPARISONS", 100)
    monkeypatch.setattr(select_triton, "_ranks", None)  # cannot be launched
    key_N = torch.randint(0, 9, (60,), device=DEVICE)
    count_e = torch.full((20,), 3)
    got_N = select_triton.order_runs(key_N, count_e.to(DEVICE), 3, 16)
    assert torch.equal(got_N.cpu(), select.order_runs(key_N.cpu(), count_e, 3, 16))


@pytest.mark.parametrize("most", [0, 1 << 28], ids=["sorted", "compared"])
def test_an_order_whose_ties_need_wide_keys_equals_the_reference(most, monkeypatch):
    """There is room for the keys in 32 bits, but not for many random bits below them."""
    monkeypatch.setattr(select_triton, "_MOST_COMPARISONS", most)
    count_e = torch.ones(20, dtype=torch.int64)
    count_e[7] = 60
    key_N = torch.randint(0, 3, (79,), device=DEVICE) << 22
    salt_e = torch.randint(0, select.ONE, (20,))
    got_N = select_triton.order_runs(key_N, count_e.to(DEVICE), 60, 24, salt_e.to(DEVICE))
    assert torch.equal(got_N.cpu(), select.order_runs(key_N.cpu(), count_e, 60, 24, salt_e))


@pytest.mark.parametrize(
    ("kinds", "counts"),
    [(1, [0, 7, 1, 40]), (3, [0, 7, 1, 255, 256, 0, 257]), (1 << 20, [30, 256, 2])],
)
def test_a_chain_equals_the_reference(kinds, counts):
    """Of directions of which all or many are equal or none is; runs of every kind of length."""
    counts = np.array(counts)
    seen_k = torch.randint(-(1 << 63), (1 << 63) - 1, (kinds,), device=DEVICE)
    direction_N = seen_k[torch.randint(0, kinds, (int(counts.sum()),), device=DEVICE)]
    order_N = select.Segments(counts, DEVICE).sort(torch.randint_like(direction_N, 0, 1 << 48))
    start_c, length_c = map(torch.from_numpy, select.even_runs(counts, 256))
    got_N = select_triton.chained(order_N, start_c.to(DEVICE), length_c.to(DEVICE), direction_N)
    want_N = select.chained(order_N.cpu(), start_c, length_c, direction_N.cpu())
    assert torch.equal(got_N.cpu(), want_N)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("kind", "seed"), _seeded([*KINDS, "negative"]))
def test_the_highest_scores_equal_the_reference(kind, seed):
    if kind == "negative":
        score_N, counts, quotas = _runs("random", seed)
        score_N -= 0.3
    else:
        score_N, counts, quotas = _runs(kind, seed)
    count_e, quota_e = torch.from_numpy(counts), torch.from_numpy(quotas)
    num_kept = int(quotas.sum())
    got_P = select_triton.top_pairs(score_N, count_e.to(DEVICE), quota_e.to(DEVICE), num_kept)
    want_P = select.top_pairs(score_N.cpu(), count_e, quota_e, num_kept)
    assert torch.equal(got_P.cpu(), want_P)


# ---- the operators -----------------------------------------------------------------------------


def test_operators_pass_opcheck():
    counts, quotas = np.array([3, 0, 5]), np.array([2, 0, 3])
    count_e, quota_e = (torch.from_numpy(a).to(DEVICE) for a in (counts, quotas))
    order_N = select.Segments(counts, DEVICE).sort(torch.randint(0, 99, (8,), device=DEVICE))
    start_e = torch.randint(0, select.ONE, (3,), device=DEVICE)
    scores, gate_up, one = _tensor(8).abs(), _tensor(4, 16), torch.ones(4, device=DEVICE)
    ids = _ids([0, 3, 3, 1])
    kept_P, p_N, token_N = _ids([1, 6, 7]), _tensor(8), _ids([0, 1, 1, 0, 2, 0, 1, 2])
    calls = [
        (pairs.counting_sort, (ids, 4)),
        (pairs.list_rows, (_tensor(2, 5) > 0, _ids([0, 5]), _ids([1, 3]), _ids([0, 1]), 10)),
        (select.spread_runs, (_ids([7, 9, 4]), _ids([2, 2, 6]), 6, True)),
        (dispatch.pack_kept, (kept_P, _tensor(3), p_N, token_N)),
        (score.pair_lrm, (p_N, _tensor(3), token_N, scores)),
        (score.pack_signs, (_tensor(5, 64),)),
        (score.grad_pass, (_tensor(5, 8), _tensor(8, 16), _tensor(8, 48), True)),
        (score.pair_sums, (scores, kept_P, _tensor(3) > 0)),
        (select.order_runs, (torch.randint_like(order_N, 9), count_e, 5, 16)),
        (select.order_runs, (torch.randint_like(order_N, 9), count_e, 5, 16, start_e)),
        (select.gray_place, (torch.randint_like(order_N, 1 << 40),)),
        (rows.copy_rows, (_tensor(4, 8), ids, _tensor(4, 8))),
        (rows.sum_rows, (_tensor(4, 8), ids, 5, 2)),
        (rows.row_norm_sq, (_tensor(5, 8),)),
        (rows.poison_rows, (_tensor(4, 8), ids > 2)),
        (grouped_gemm.clear_empty, (_tensor(2, 4, 4), _ids([0, 3], torch.int32))),
        (gated.swiglu_forward, (gate_up, one, _tensor(4, 8), _tensor(4))),
        (
            gated.swiglu_backward,
            (gate_up, ids, _tensor(4, 8), one, _tensor(4, 16), _tensor(4, 8), _tensor(4)),
        ),
        (select.relative_sizes, (scores, count_e, 0.1)),
        (select.sample_pairs, (scores, count_e, quota_e, order_N, start_e, 5)),
        (select.top_pairs, (scores, count_e, quota_e, 5)),
        (select.chained, (order_N, _ids([0, 3]), _ids([3, 5]), torch.randint_like(order_N, 9))),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments)


def test_every_kernel_compiles_for_a_card():
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compiled") >= 38
