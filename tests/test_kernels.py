"""Every operation under the layer against a loop or plain PyTorch, in poisoned memory.

Shape letters: P = rows in expert-major order, e = experts, R = forward rows, F = expert width, U =
unique rows, D = row width.
"""

import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from lrmoe.kernels import gated, grouped_gemm, scratch
from lrmoe.kernels.gated import (
    gated_backward,
    gated_backward_reference,
    gated_forward,
    gated_forward_reference,
)
from lrmoe.kernels.grouped_gemm import grouped_mm, grouped_outer
from lrmoe.kernels.rows import gather_rows, row_norm_sq, sum_rows
from tests.errors import relative_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Of one product, relative to its norm: the rounding of the result, not of a long sum.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}
COUNTS = {
    "mixed": [3, 0, 1, 7, 0],
    "first and last empty": [0, 5, 0],
    "one expert": [4],
    "no rows": [0, 0],
}


def _offsets(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def _split(rows, counts):
    return torch.split(rows, counts)


# ---- grouped GEMMs -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("widths", [(16, 8), (8, 24), (5, 3), (8, 3), (3, 8)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.filterwarnings("ignore:.*not a multiple of 16 bytes")
def test_grouped_mm_equals_a_loop(dtype, counts, widths, transposed):
    A, B = widths
    rows = torch.randn(sum(counts), A).to(dtype)
    if transposed:
        weight = torch.randn(len(counts), B, A).to(dtype).transpose(1, 2)
    else:
        weight = torch.randn(len(counts), A, B).to(dtype)
    for _ in range(3):  # the second pass finds memory that the first has used
        got = grouped_mm(rows, weight, _offsets(counts))
        want = [
            part.double() @ w.double() for part, w in zip(_split(rows, counts), weight, strict=True)
        ]
        assert got.dtype == dtype
        assert got.isfinite().all()
        assert relative_error(got, torch.cat(want)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm_takes_weights_without_a_dense_axis(dtype):
    weight = torch.randn(2, 16, 8, 8).to(dtype)[..., 0]
    rows = torch.randn(4, 16).to(dtype)
    want = torch.cat(
        [rows[:1].double() @ weight[0].double(), rows[1:].double() @ weight[1].double()]
    )
    assert relative_error(grouped_mm(rows, weight, _offsets([1, 3])), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("widths", [(16, 8), (8, 24), (5, 3), (8, 3), (3, 8)])
@pytest.mark.filterwarnings("ignore:.*not a multiple of 16 bytes")
def test_grouped_outer_equals_a_loop_and_is_zero_without_rows(dtype, counts, widths):
    A, B = widths
    rows_A, rows_B = (torch.randn(sum(counts), width).to(dtype) for width in (A, B))
    for _ in range(3):
        got = grouped_outer(rows_A, rows_B, _offsets(counts))
        assert got.shape == (len(counts), A, B)
        assert got.dtype == dtype
        parts = zip(_split(rows_A, counts), _split(rows_B, counts), strict=True)
        for e, (a, b) in enumerate(parts):
            assert relative_error(got[e], a.double().T @ b.double()) <= TOLERANCE[dtype]
            if counts[e] == 0:
                assert (got[e] == 0).all()


def _quacks_gemm(A, B, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned):
    """What QuACK's ``gemm`` documents of these arguments; products of no rows are not written."""
    assert not tuned  # or every new number of rows would be tuned for
    assert (cu_seqlens_m is None) != (cu_seqlens_k is None)
    starts = cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k
    assert starts.dtype == torch.int32
    assert starts[0] == 0
    runs = [slice(a, b) for a, b in itertools.pairwise(starts.tolist())]
    if cu_seqlens_m is not None:
        assert (A.stride(1), len(B)) == (1, len(runs))
        out = torch.full((len(A), B.shape[2]), float("nan"), dtype=A.dtype)
        for e, run in enumerate(runs):
            out[run] = A[run] @ B[e]
        return out
    assert (A.stride(0), B.stride(1)) == (1, 1)
    out = torch.full((len(runs), len(A), B.shape[1]), float("nan"), dtype=A.dtype)
    for e, run in enumerate(runs):
        if run.start < run.stop:
            out[e] = A[:, run] @ B[run]
    return out


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_quacks_products_are_called_as_documented(counts, monkeypatch):
    """On the CPU, with a double: its kernels need a GPU."""
    calls = []
    monkeypatch.setattr(
        grouped_gemm, "_gemm", lambda *a, **k: calls.append(1) or _quacks_gemm(*a, **k)
    )
    rows_A, rows_B = torch.randn(sum(counts), 16), torch.randn(sum(counts), 8)
    weight = torch.randn(len(counts), 8, 16).mT
    grouped_mm(rows_A, weight, _offsets(counts))
    assert not calls  # float32 on a CPU is not for it
    monkeypatch.setattr(grouped_gemm, "_is_quacks", lambda rows: len(rows) > 0)
    got, outer = (
        grouped_mm(rows_A, weight, _offsets(counts)),
        grouped_outer(rows_A, rows_B, _offsets(counts)),
    )
    assert len(calls) == (2 if sum(counts) else 0)
    monkeypatch.undo()
    want, want_outer = (
        grouped_mm(rows_A, weight, _offsets(counts)),
        grouped_outer(rows_A, rows_B, _offsets(counts)),
    )
    assert relative_error(got, want.double()) <= TOLERANCE[torch.float32]
    assert relative_error(outer, want_outer.double()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("library", "message"), [("cublas", "allowed are 'torch', 'quack'"), ("quack", "install it")]
)
def test_a_library_that_is_not_there_is_refused_on_import(library, message):
    environment = os.environ | {"LRMOE_GROUPED_GEMM": library}
    program = "import sys; sys.modules['quack'] = None; import lrmoe"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"LRMOE_GROUPED_GEMM='{library}': " in done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]])
def test_rows_of_no_expert_do_not_lengthen_the_padding(counts):
    """Ids of no expert are refused after the products; those must not run out of memory first."""
    _, place_P, longest = grouped_gemm._padding(_offsets(counts), 1000)
    assert longest == max(*counts, 1)
    assert place_P.max() < longest
    rows, weight = torch.randn(1000, 4).double(), torch.randn(3, 4, 5).double()
    assert grouped_mm(rows, weight, _offsets(counts)).shape == (1000, 5)


def test_sizes_that_grouped_mm_cannot_take_warn_once():
    # one warning for all GEMMs of all layers, not one per call site
    offsets = _offsets([2, 1])
    grouped_gemm.warn_padded.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for width in (3, 5):
            grouped_mm(torch.randn(3, width), torch.randn(2, width, 8), offsets)
            grouped_outer(torch.randn(3, 8), torch.randn(3, width), offsets)
        grouped_mm(torch.randn(3, 8), torch.randn(2, 8, 4), offsets)  # a size it takes
        grouped_mm(torch.randn(3, 3).double(), torch.randn(2, 3, 8).double(), offsets)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert "not a multiple of 16 bytes" in str(caught[0].message)


# ---- the gated activation ----------------------------------------------------------------------


def _is_close(got, want, slack):
    """Within the rounding of the result; ``slack`` is what cancellation or saturation may add."""
    unit = 2**-7 if got.dtype == torch.bfloat16 else 3e-6
    off = (got.float() - want.float()).abs()
    return bool((off <= want.float().abs() * unit + slack.float().abs()).all())


# The compiled sigmoid stops at exp(-88), where the exact one goes on to zero.
SATURATED = 1e-38


def _gated_case(dtype, R=9, F_=7, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(R, 2 * F_, generator=generator) * scale).to(dtype)
    return gate_up, torch.rand(R, generator=generator) + 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 7), (1, 1), (33, 64), (0, 8), (5, 3)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0, 1e4])
def test_compiled_forward_equals_the_reference(dtype, shape, scale):
    gate_up, factor = _gated_case(dtype, *shape, scale)
    for _ in range(3):
        scaled, norm_sq = gated_forward(gate_up, factor, None)
        want, want_norm_sq = gated_forward_reference(gate_up, factor, None)
        assert scaled.dtype == dtype
        assert norm_sq.dtype == torch.float32
        gate, up = gate_up.float().chunk(2, 1)
        assert _is_close(scaled, want, gate * up * SATURATED)
        assert ((norm_sq - want_norm_sq).abs() <= 1e-5 * want_norm_sq + 1e-37).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 7), (33, 64), (5, 3)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0, 1e4])
def test_compiled_backward_equals_the_reference_on_gathered_rows(dtype, shape, scale):
    gate_up, _ = _gated_case(dtype, *shape, scale)
    R, F_ = shape
    for num_kept in (0, 1, 2 * R):  # with repeats, in no order
        row_ids = torch.randint(R, (num_kept,)).to(torch.int32)
        grad_h, coef = torch.randn(num_kept, F_).to(dtype), torch.rand(num_kept) * 5
        for _ in range(3):
            got = [a.clone() for a in gated_backward(gate_up, row_ids, grad_h, coef, None)]
            want = gated_backward_reference(gate_up, row_ids, grad_h, coef, None)
            assert got[0].dtype == got[1].dtype == dtype
            assert got[2].dtype == torch.float32
            gate, up = gate_up[row_ids.long()].float().chunk(2, 1)
            size = coef[:, None] * grad_h.float()
            # of the gate: a derivative near its zero is a difference of larger numbers
            assert _is_close(got[0][:, :F_], want[0][:, :F_], size * up * (1 + gate.abs()) * 1e-6)
            assert _is_close(got[0][:, F_:], want[0][:, F_:], size * gate * SATURATED)
            assert _is_close(got[1], want[1], coef[:, None] * gate * up * SATURATED)
            assert relative_error(got[2], want[2]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_values_are_never_hidden(dtype):
    gate_up, factor = _gated_case(dtype, R=6, F_=4)
    for row, (column, value) in enumerate(
        [(1, "nan"), (5, "nan"), (2, "inf"), (2, "-inf"), (6, "inf")]
    ):
        gate_up[row, column] = float(value)
    scaled, norm_sq = gated_forward(gate_up, factor, None)
    want, _ = gated_forward_reference(gate_up, factor, None)
    assert torch.equal(scaled.isfinite(), want.isfinite())
    assert norm_sq.isfinite().tolist() == [False] * 5 + [True]
    grad_h, rows = torch.randn(6, 4).to(dtype), torch.arange(6, dtype=torch.int32)
    grad_h[5, 0] = float("nan")
    grad, scaled, inner = gated_backward(gate_up, rows, grad_h, factor, None)
    want = gated_backward_reference(gate_up, rows, grad_h, factor, None)
    assert torch.equal(grad.isfinite().all(1), want[0].isfinite().all(1))
    assert torch.equal(scaled.isfinite(), want[1].isfinite())
    assert torch.equal(inner.isfinite(), want[2].isfinite())


def test_the_compiled_sigmoid_is_as_exact_as_float32():
    gate = torch.linspace(-80, 80, 40_001)
    gate_up = torch.stack([gate, torch.ones_like(gate)], 1)
    h, _ = gated_forward(gate_up, torch.ones_like(gate), None)
    want = F.silu(gate.double())
    assert ((h[:, 0] - want).abs() <= want.abs() * 5e-7).all()


@pytest.mark.parametrize("num_rows", [0, 6, 7, 8, 20])
def test_rows_of_the_reference_do_not_depend_on_how_they_are_divided(num_rows, monkeypatch):
    generator = torch.Generator().manual_seed(num_rows)
    gate_up = torch.randn(20, 10, generator=generator)
    ids = torch.randint(20, (num_rows,), generator=generator, dtype=torch.int32)
    grad_h = torch.randn(num_rows, 5, generator=generator)
    coef = torch.rand(num_rows, generator=generator)
    whole = (
        *gated.gated_forward_reference(gate_up[:num_rows], coef, F.gelu),
        *gated.gated_backward_reference(gate_up, ids, grad_h, coef, F.gelu),
    )
    monkeypatch.setattr(gated, "_CHUNK", 7)
    parts = (
        *gated.gated_forward_reference(gate_up[:num_rows], coef, F.gelu),
        *gated.gated_backward_reference(gate_up, ids, grad_h, coef, F.gelu),
    )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)


def test_large_gates_saturate_the_sigmoid():
    gate = torch.tensor([-1e20, -1e5, -200.0, -90.0, -80.0, 80.0, 90.0, 200.0, 1e20])
    gate_up = torch.stack([gate, torch.ones(9)], 1)
    h, norm_sq = gated_forward(gate_up, torch.ones(9), None)
    want = F.silu(gate)
    assert ((h[:, 0] - want).abs() <= want.abs() * 1e-6 + gate.abs() * SATURATED).all()
    assert norm_sq[:6].isfinite().all()
    grad, _, _ = gated_backward(
        gate_up, torch.arange(9).int(), torch.ones(9, 1), torch.ones(9), None
    )
    want = torch.tensor([0.0, 0, 0, 0, 0, 1, 1, 1, 1])
    assert (grad[:, 0] - want).abs().max() < 1e-6


def test_bfloat16_rounds_to_nearest_even():
    # h = silu(96) u, whose sigmoid is 1 in float32; between 64 and 128 bfloat16 has steps of 1/2
    up = torch.tensor([1 + 1 / 128, 1 + 3 / 128, 1 + 2 / 128, -1 - 3 / 128]).bfloat16()
    gate_up = torch.stack([torch.full_like(up, 96.0), up], 1)
    assert (96.0 * up.float()).tolist() == [96.75, 98.25, 97.5, -98.25]  # three ties
    scaled, _ = gated_forward(gate_up, torch.ones(4), None)
    assert scaled[:, 0].tolist() == [97.0, 98.0, 97.5, -98.0]


@pytest.mark.parametrize("act", [None, F.gelu, F.relu, torch.tanh])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_activation_equals_autograd(act, dtype):
    gate_up, factor = _gated_case(dtype)
    rows = torch.tensor([4, 0, 4, 8], dtype=torch.int32)
    grad_h, coef = torch.randn(4, 7).to(dtype), torch.rand(4)
    leaf = gate_up[rows.long()].double().requires_grad_()
    h = (act or F.silu)(leaf[:, :7]) * leaf[:, 7:]
    (want,) = torch.autograd.grad(h, leaf, coef[:, None].double() * grad_h.double())
    grad, scaled, inner = gated_backward(gate_up, rows, grad_h, coef, act)
    tolerance = 1e-7 if dtype == torch.float64 else 1e-5  # coef is float32
    assert relative_error(grad, want) <= tolerance
    assert relative_error(scaled, coef[:, None] * h) <= tolerance
    assert relative_error(inner, (grad_h.double() * h).sum(1)) <= tolerance
    scaled, norm_sq = gated_forward(gate_up, factor, act)
    h = (act or F.silu)(gate_up[:, :7].double()) * gate_up[:, 7:].double()
    assert relative_error(scaled, factor[:, None] * h) <= tolerance
    assert relative_error(norm_sq, h.square().sum(1)) <= tolerance


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_sum_rows_equal_loops(dtype):
    rows_UD = torch.randn(5, 8).to(dtype)
    row_ids = torch.tensor([4, 0, 0, 2, 4, 4], dtype=torch.int32)
    rows_PD = torch.randn(6, 8).to(dtype)
    for _ in range(3):
        gathered = gather_rows(rows_UD, row_ids, "rows")
        assert torch.equal(gathered, rows_UD[row_ids.long()])
        summed = sum_rows(rows_PD, row_ids, 6, 3)
        want = torch.zeros(6, 8, dtype=torch.float64)
        for row, i in zip(rows_PD, row_ids.tolist(), strict=True):
            want[i] += row.double()
        assert relative_error(summed, want) <= TOLERANCE[dtype]
        assert (summed[[1, 3, 5]] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3), (0, 0)])
def test_rows_without_rows(shape):
    num_pairs, num_rows = shape
    nothing = torch.zeros(num_pairs, dtype=torch.int32)
    assert (
        sum_rows(torch.zeros(num_pairs, 4), nothing, num_rows, 1).tolist() == [[0.0] * 4] * num_rows
    )
    assert gather_rows(torch.zeros(num_rows, 4), nothing, "rows").shape == (0, 4)


def test_sum_rows_accumulates_in_float32_and_casts_once():
    # 4,096 times 2^-9 beside a 1: a bfloat16 sum would stay at 1
    rows = torch.full((4097, 8), 2.0**-9).bfloat16()
    rows[0] = 1.0
    total = sum_rows(rows, torch.zeros(4097, dtype=torch.int32), 1, 4097)
    assert torch.equal(total, torch.full((1, 8), 9.0).bfloat16())


def test_sum_rows_has_the_same_bits_every_time():
    rows, ids = torch.randn(500, 16), torch.randint(20, (500,)).int()
    first = sum_rows(rows, ids, 20, 500)
    in_order = torch.zeros(20, 16)
    for row, i in zip(rows, ids.tolist(), strict=True):
        in_order[i] += row
    for _ in range(3):
        assert torch.equal(sum_rows(rows, ids, 20, 500), first)
    assert torch.equal(first, in_order)


# ---- scratch memory ----------------------------------------------------------------------------


def test_scratch_is_reused_grows_and_can_be_given_back():
    torch.use_deterministic_algorithms(False)  # the next test's fixture switches it on again
    scratch.release_scratch()
    cpu = torch.device("cpu")
    small = scratch.scratch("a", (2, 3), torch.float32, cpu)
    assert scratch.scratch("a", (3,), torch.float32, cpu).data_ptr() == small.data_ptr()
    assert scratch.scratch("b", (3,), torch.float32, cpu).data_ptr() != small.data_ptr()
    assert scratch.scratch("a", (3,), torch.float64, cpu).data_ptr() != small.data_ptr()
    assert scratch.scratch("a", (5, 2), torch.float32, cpu).shape == (5, 2)
    assert scratch.scratch_bytes() == 10 * 4 + 3 * 4 + 3 * 8
    scratch.release_scratch()
    assert scratch.scratch_bytes() == 0


def test_deterministic_mode_poisons_scratch_instead_of_reusing_it():
    tensor = scratch.scratch("a", (4,), torch.float32, torch.device("cpu"))
    assert tensor.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (37, 513)])
def test_row_norms_equal_float64(dtype, shape):
    rows_TD = torch.randn(shape, dtype=torch.float64).to(dtype)
    norm_sq_T, is_bad_T = row_norm_sq(rows_TD)
    assert norm_sq_T.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        norm_sq_T.double(), rows_TD.double().square().sum(1), rtol=1e-6, atol=0
    )
    assert is_bad_T.dtype == torch.bool
    assert not is_bad_T.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_row_norms_tell_what_is_not_finite_from_what_is_large(dtype):
    rows_TD = torch.ones(6, 70, dtype=dtype)
    rows_TD[0, 69], rows_TD[1, 0], rows_TD[2, 33] = float("inf"), -float("inf"), float("nan")
    rows_TD[3] = torch.finfo(dtype).max
    rows_TD[4] = -rows_TD[3]
    norm_sq_T, is_bad_T = row_norm_sq(rows_TD)
    assert is_bad_T.tolist() == [True, True, True, False, False, False]
    assert norm_sq_T[5] == 70
    assert (norm_sq_T[3:5] > 1e9).all()
    # Columns of a wider tensor, whose rows are not dense.
    wide_TD = torch.cat([rows_TD, rows_TD], dim=1)[:, ::2]
    assert torch.equal(
        row_norm_sq(wide_TD)[1], torch.tensor([False, True, False, False, False, False])
    )
