"""How much a token-expert pair matters: the load recalibration metric and the control scores.

All scores are float32 (float64 for float64 gradients), never negative, and only compared inside one
expert. Shape letters: T = tokens, D = model dim, N = pairs in expert-major order.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from lrmoe.kernels.ops import define
from lrmoe.kernels.rows import new_norms, row_norm_sq
from lrmoe.select import STRATUM_BITS, gray_place
from lrmoe.upload import upload

_SIGNS = 64
_SUCCESSOR_BITS = 10


def lrm(p_N: torch.Tensor, grad_norm_sq_N: torch.Tensor, h_norm_sq_N: torch.Tensor) -> torch.Tensor:
    """``p^2 |G|^2 |h|^2``: the squared Frobenius norm of the pair's own term in dL/dW_down.

    LRMoE (arXiv 2610.37720), section 3.2 and appendix 7.1. Exact for one pair and this projection.
    """
    return p_N.square() * grad_norm_sq_N * h_norm_sq_N


@define(
    "score_triton", fake=lambda p_N, grad_norm_sq_T, token_N, h_norm_sq_N: torch.empty_like(p_N)
)
def pair_lrm(
    p_N: torch.Tensor,
    grad_norm_sq_T: torch.Tensor,
    token_N: torch.Tensor,
    h_norm_sq_N: torch.Tensor,
) -> torch.Tensor:
    """:func:`lrm` of pairs whose tokens' ``|G|^2`` are given by token; one dtype."""
    return lrm(p_N, grad_norm_sq_T[token_N], h_norm_sq_N)


def control_score(
    rule: str,
    p_N: torch.Tensor,
    lrm_N: torch.Tensor,
    grad_norm_sq_N: torch.Tensor | None,
    token_loss_N: torch.Tensor | None,
    generator: torch.Generator,
) -> torch.Tensor:
    """What the rule ranks pairs by, higher is kept; ``sampled`` draws by the LRM too."""
    if rule in ("top", "sampled"):
        return lrm_N
    if rule == "random":
        return torch.rand(p_N.shape, generator=generator, device=p_N.device, dtype=torch.float32)
    if rule == "random_unbiased":
        return torch.zeros_like(p_N)
    if rule == "router":
        return p_N.abs()
    if rule in ("gradient", "weighted_gradient"):
        assert grad_norm_sq_N is not None
        size_N = grad_norm_sq_N.sqrt()
        return size_N if rule == "gradient" else p_N.abs() * size_N
    assert rule == "token_loss", rule
    assert token_loss_N is not None
    return token_loss_N


def direction(grad_TD: torch.Tensor, *, is_short: bool = False) -> torch.Tensor:
    """Where each row points: int64 [T], the signs of its products with 64 fixed random vectors.

    Two rows at an angle differ in a sign with probability angle / pi (Charikar 2002). The first
    sign is the highest bit. Lengths do not matter.

    Args:
        is_short: the first 16 signs alone, as bits of the same value; the others are 0.
    """
    first_DB, others_DB = _hyperplanes(grad_TD.shape[1], grad_TD.dtype, grad_TD.device)
    # The first by a product of their own in any case: another's rounding could turn a sign.
    product_TB = grad_TD @ first_DB
    if not is_short:
        product_TB = torch.cat([product_TB, grad_TD @ others_DB], dim=1)
    return pack_signs(product_TB)


def _new_norms_and_codes(
    grad_TD: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norm_sq_T, is_bad_T = new_norms(grad_TD)
    return norm_sq_T, is_bad_T, grad_TD.new_empty(len(grad_TD), dtype=torch.int64)


def norms_and_codes(
    grad_TD: torch.Tensor, strata: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`~lrmoe.kernels.rows.row_norm_sq` and :func:`code_of` the :func:`direction` of each
    row, in one pass over the gradient where there is a kernel."""
    planes = _hyperplanes(grad_TD.shape[1], grad_TD.dtype, grad_TD.device)
    return grad_pass(grad_TD, *planes, strata == "neighbors")


@define("score_triton", fake=_new_norms_and_codes)
def grad_pass(
    grad_TD: torch.Tensor, first_DB: torch.Tensor, others_DB: torch.Tensor, has_all_signs: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``|row|^2``; which rows are not finite; the signs (those of both products, or as a place in
    the order of a Gray code those of the first alone), int64 [T]."""
    return grad_passes(grad_TD, first_DB, others_DB, has_all_signs)


def grad_passes(
    grad_TD: torch.Tensor, first_DB: torch.Tensor, others_DB: torch.Tensor, has_all_signs: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`grad_pass` in operators of their own, for every device and dtype."""
    norm_sq_T, is_bad_T = row_norm_sq(grad_TD)
    product_TB = grad_TD @ first_DB
    if has_all_signs:
        product_TB = torch.cat([product_TB, grad_TD @ others_DB], dim=1)
        return norm_sq_T, is_bad_T, pack_signs(product_TB)
    return norm_sq_T, is_bad_T, gray_place(pack_signs(product_TB))


def code_of(direction_T: torch.Tensor, strata: str) -> torch.Tensor:
    """What samples by gradient are laid out by, int64 [T]: a token's place, or all of its signs."""
    return gray_place(direction_T) if strata == "gradient" else direction_T


@define(
    "score_triton",
    fake=lambda lrm_N, kept_P, is_bad_T: lrm_N.new_empty(1, 3, dtype=torch.float64),
)
def pair_sums(lrm_N: torch.Tensor, kept_P: torch.Tensor, is_bad_T: torch.Tensor) -> torch.Tensor:
    """Parts of sums, float64 [n, 3] with any n: LRM of the kept pairs, of all, and bad tokens."""
    sums = lrm_N[kept_P].sum(), lrm_N.sum(), is_bad_T.sum()
    return torch.stack([each.double() for each in sums])[None]


@define(
    "score_triton",
    fake=lambda product_TB: product_TB.new_empty(len(product_TB), dtype=torch.int64),
)
def pack_signs(product_TB: torch.Tensor) -> torch.Tensor:
    """Which of a row's numbers are positive, the first as the highest bit: int64 [T].

    Args:
        product_TB: 16 or 64 numbers a row.
    """
    T, B = product_TB.shape
    bit_Tb8 = (product_TB > 0).view(torch.uint8).view(T, B // 8, 8)
    shift_8 = torch.arange(7, -1, -1, dtype=torch.uint8, device=product_TB.device)
    byte_T8 = bit_Tb8.new_zeros(T, 8)
    # The lowest byte is the first in memory.
    byte_T8[:, 8 - B // 8 :] = (bit_Tb8 << shift_8).sum(2, dtype=torch.uint8).flip(1)
    return byte_T8.view(torch.int64).squeeze(1)


def text_code(input_ids: torch.Tensor) -> torch.Tensor:
    """What each token is followed by, and what it is, as a number: int64 ``[B * S]``.

    Tokens with the same successor are together, and among them the same tokens: 10 bits of a hash
    of the successor, then 6 of the token. The gradient of a language model's loss depends on the
    successor most. The last token of a sequence has none; it counts as followed by the first.

    Args:
        input_ids: integer, [B, S] or [S].

    Raises:
        ValueError: for other types or dimensions.
    """
    if input_ids.is_floating_point() or input_ids.ndim not in (1, 2):
        raise ValueError(
            f"input_ids: {input_ids.dtype} of shape {tuple(input_ids.shape)}; allowed are integers "
            "of shape [B, S] or [S]"
        )
    ids = input_ids.long()
    successor = _hash(ids.roll(-1, dims=-1)) >> (32 - _SUCCESSOR_BITS)
    token = _hash(ids) >> (32 - (STRATUM_BITS - _SUCCESSOR_BITS))
    return ((successor << (STRATUM_BITS - _SUCCESSOR_BITS)) | token).reshape(-1)


def _hash(ids: torch.Tensor) -> torch.Tensor:
    """32 bits; Knuth's multiplicative hash, whose upper bits are the good ones."""
    return (ids * 2_654_435_761) & 0xFFFFFFFF


@cache
def _hyperplanes(
    width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[D, 16] and [D, 48], the same on every rank and in every run."""
    # Not of PyTorch, whose default dtype and device the caller may have changed.
    normal_DB = np.random.default_rng(width).standard_normal((width, _SIGNS), dtype=np.float32)
    with torch.inference_mode(False):  # kept for calls outside of it
        parts = normal_DB[:, :STRATUM_BITS], normal_DB[:, STRATUM_BITS:]
        first_DB, others_DB = (upload(part_DB, device).to(dtype) for part_DB in parts)
        return first_DB, others_DB
