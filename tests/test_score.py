"""Where output gradients point, as numbers that are near for near directions."""

import math

import pytest
import torch

from lrmoe.score import _hyperplanes, direction, text_code
from lrmoe.select import STRATUM_BITS


def by_hand(row):
    """The place of the row's signs in the reflected Gray code, built by reflection."""
    signs = (row @ _hyperplanes(len(row), row.dtype, row.device) > 0).tolist()
    first, size = 0, 2**STRATUM_BITS
    is_reflected = False
    for sign in signs:
        size //= 2
        if sign != is_reflected:
            first += size
        is_reflected ^= sign
    return first


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_numbers_are_places_in_a_gray_code(dtype, width):
    rows = torch.randn(50, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    code_T = direction(rows)
    assert code_T.dtype == torch.int64
    assert code_T.tolist() == [by_hand(row) for row in rows]
    assert torch.equal(direction(rows * 4), code_T)  # lengths do not matter


def test_neighbours_differ_in_one_sign():
    """All 2^16 codes would be long: that the code is one follows from neighbouring numbers."""
    rows = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    sign_TB = rows @ _hyperplanes(64, rows.dtype, rows.device) > 0
    code_T, order_T = direction(rows).sort()
    near = (code_T.diff() == 1).nonzero().squeeze(1)
    assert len(near) > 20
    differ = sign_TB[order_T[near]] != sign_TB[order_T[near + 1]]
    assert (differ.sum(1) == 1).all()


def test_near_directions_share_their_first_signs():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 64, generator=generator)
    angle = 0.1
    other = torch.randn(2000, 64, generator=generator)
    other -= (other * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows
    other *= rows.norm(dim=1, keepdim=True) / other.norm(dim=1, keepdim=True)
    turned = rows * math.cos(angle) + other * math.sin(angle)
    share = ((direction(rows) ^ direction(turned)) < 2 ** (STRATUM_BITS - 6)).double().mean()
    expected = (1 - angle / math.pi) ** 6
    assert abs(share - expected) < 6 * math.sqrt(expected * (1 - expected) / 2000)


def test_rows_that_are_not_finite_and_no_rows():
    rows = torch.full((3, 8), float("nan"))
    rows[1] = float("inf")
    rows[2] = 0
    code_T = direction(rows)
    assert ((code_T >= 0) & (code_T < 2**STRATUM_BITS)).all()
    assert direction(rows[:0]).shape == (0,)


def test_codes_are_the_same_in_every_process():
    """Fixed by hand: a change of them changes every sample, and belongs in the changelog."""
    rows = torch.arange(24.0).view(3, 8).sin()
    assert direction(rows).tolist() == [22107, 6122, 64752]


def test_codes_do_not_depend_on_the_defaults_of_the_process():
    rows = torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    want = direction(rows)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            _hyperplanes.cache_clear()
            assert torch.equal(direction(rows), want)
        with torch.device("meta"):
            _hyperplanes.cache_clear()
            assert _hyperplanes(12, torch.float32, rows.device).device == rows.device
    finally:
        torch.set_default_dtype(before)
    _hyperplanes.cache_clear()
    with torch.inference_mode():
        direction(rows)
    leaf = rows.clone().requires_grad_()
    assert torch.equal(direction(leaf), want)  # what is kept is no inference tensor


def test_tokens_with_one_successor_are_together_and_equal_ones_among_them():
    ids = torch.randint(0, 150_000, (6, 400), generator=torch.Generator().manual_seed(0))
    ids[:, ::3] = ids[:, ::3] % 20  # frequent ones
    code_T, successor_T = text_code(ids), ids.roll(-1, dims=1).reshape(-1)
    assert code_T.shape == (2400,)
    assert ((code_T >= 0) & (code_T < 2**STRATUM_BITS)).all()
    upper_T = code_T >> 6
    for successor in successor_T.unique():
        assert len(upper_T[successor_T == successor].unique()) == 1
    kinds = torch.stack([successor_T, ids.reshape(-1)], 1)
    same = (kinds[:, None] == kinds[None]).all(2)
    assert (code_T[:, None] == code_T[None])[same].all()
    # Others rarely share a number: 2 in 65,536 at random, more where the successor is the same.
    assert (code_T[:, None] == code_T[None])[~same].double().mean() < 0.005
    assert len(upper_T.unique()) > 500
    assert torch.equal(text_code(ids[0].int()), code_T[:400])


def test_text_that_is_none_is_refused():
    for bad in (torch.rand(3), torch.zeros(1, 2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="allowed are integers of shape"):
            text_code(bad)
