"""Where output gradients point, and what follows on a token, as numbers."""

import math

import pytest
import torch

from lrmoe.score import _hyperplanes, direction, text_code
from lrmoe.select import STRATUM_BITS, gray_place
from tests import oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_directions_are_signs_of_products(dtype, width):
    rows = torch.randn(50, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    code_T = direction(rows)
    assert code_T.dtype == torch.int64
    for row, code in zip(rows, code_T.tolist(), strict=True):
        planes = torch.cat(_hyperplanes(width, dtype, row.device), 1)
        signs = (row @ planes > 0).tolist()
        assert code % 2**64 == int("".join("01"[sign] for sign in signs), 2)
    assert torch.equal(direction(rows, is_short=True), code_T & -(1 << 48))
    assert torch.equal(direction(rows * 4), code_T)  # lengths do not matter


def test_strata_are_places_in_a_gray_code():
    edges = [0, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 48, (1 << 48) - 1]
    random = torch.randint(-(1 << 63), (1 << 63) - 1, (500,))
    code_T = torch.cat([torch.tensor(edges), random])
    assert gray_place(code_T).tolist() == [oracle.gray_place(code) for code in code_T.tolist()]
    every = torch.arange(2**STRATUM_BITS) << (64 - STRATUM_BITS)
    place, order = gray_place(every).sort()
    assert torch.equal(place, torch.arange(2**STRATUM_BITS))
    differ = every[order[1:]] ^ every[order[:-1]]
    assert ((differ & (differ - 1)) == 0).all()  # one sign


def test_near_directions_share_their_first_signs():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 64, generator=generator)
    angle = 0.1
    other = torch.randn(2000, 64, generator=generator)
    other -= (other * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows
    other *= rows.norm(dim=1, keepdim=True) / other.norm(dim=1, keepdim=True)
    turned = rows * math.cos(angle) + other * math.sin(angle)
    places = [gray_place(direction(each)) for each in (rows, turned)]
    share = ((places[0] ^ places[1]) < 2 ** (STRATUM_BITS - 6)).double().mean()
    expected = (1 - angle / math.pi) ** 6
    assert abs(share - expected) < 6 * math.sqrt(expected * (1 - expected) / 2000)
    differ = (direction(rows) ^ direction(turned)).tolist()
    count = sum(bin(each % 2**64).count("1") for each in differ)
    expected = 64 * 2000 * angle / math.pi
    # Signs of one pair of rows are independent given the rows' plane; so are pairs.
    assert abs(count - expected) < 8 * math.sqrt(expected)


def test_rows_that_are_not_finite_and_no_rows():
    rows = torch.full((3, 8), float("nan"))
    rows[1] = float("inf")
    rows[2] = 0
    place_T = gray_place(direction(rows))
    assert ((place_T >= 0) & (place_T < 2**STRATUM_BITS)).all()
    assert direction(rows[:0]).shape == (0,)


def test_codes_are_the_same_in_every_process():
    """Fixed by hand: a change of them changes every sample, and belongs in the changelog."""
    rows = torch.arange(24.0).view(3, 8).sin()
    assert direction(rows).tolist() == [
        -1_526_658_715_823_950_072,
        8_549_372_059_705_027_384,
        1_526_378_327_473_965_303,
    ]


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
            for planes in _hyperplanes(12, torch.float32, rows.device):
                assert planes.device == rows.device
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
