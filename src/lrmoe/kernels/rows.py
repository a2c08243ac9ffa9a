"""Row copies and row sums, the inverse pair that carries tokens into and out of expert order.

Shape letters: P = gathered rows, U = unique rows, T = tokens, D = row width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lrmoe.kernels.ops import define
from lrmoe.kernels.scratch import scratch

# Dtypes as integers, and how far these are from the bits of a float32.
_BITS = {torch.float32: (torch.int32, 0), torch.bfloat16: (torch.int16, 16)}


def gather_rows(rows_UD: torch.Tensor, row_ids_P: torch.Tensor, name: str) -> torch.Tensor:
    """``rows_UD[row_ids_P]`` in the scratch buffer ``name``: valid until the name's next use."""
    out_PD = scratch(name, (row_ids_P.shape[0], rows_UD.shape[1]), rows_UD.dtype, rows_UD.device)
    copy_rows(rows_UD, row_ids_P, out_PD)
    return out_PD


@define(
    "rows_triton",
    fake=lambda rows_PD, _, num_rows, most: rows_PD.new_empty(num_rows, rows_PD.shape[1]),
)
def sum_rows(
    rows_PD: torch.Tensor, row_ids_P: torch.Tensor, num_rows: int, most: int
) -> torch.Tensor:
    """For every unique row the sum of the rows that name it, zero for one that none names.

    Accumulates in float32 (float64 for float64), casts once, always in ascending order of P: the
    same bits every time.

    Args:
        most: no unique row is named more often. On CPUs that is asserted; on CUDA such a sum is
            NaN.
    """
    if rows_PD.shape[0] == 0 or num_rows == 0:
        return rows_PD.new_zeros(num_rows, rows_PD.shape[1])
    order_P = torch.argsort(row_ids_P, stable=True)
    count_U = torch.bincount(row_ids_P, minlength=num_rows)
    if rows_PD.device.type == "cpu":
        assert int(count_U.max()) <= most, "a row is named more often than was said"
    offsets = F.pad(count_U.cumsum(0), (1, 0))
    return F.embedding_bag(order_P, rows_PD, offsets, mode="sum", include_last_offset=True)


def new_norms(rows_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results without values."""
    wide = torch.promote_types(rows_TD.dtype, torch.float32)
    norm_sq_T = rows_TD.new_empty(len(rows_TD), dtype=wide)
    return norm_sq_T, rows_TD.new_empty(len(rows_TD), dtype=torch.bool)


@define("rows_triton", fake=new_norms)
def row_norm_sq(rows_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``|row|^2``, accumulated in float32 or wider, and which rows are not finite."""
    bits = _BITS.get(rows_TD.dtype) if rows_TD.device.type == "cpu" else None
    if bits is not None:
        from lrmoe.kernels import rows_cpu  # compiles with numba on first use

        norm_sq_T, is_bad_T = new_norms(rows_TD)
        integers, shift = bits
        rows = rows_TD.detach().contiguous().view(integers).numpy()
        rows_cpu.row_norm_sq(rows, shift, norm_sq_T.numpy(), is_bad_T.numpy())
        return norm_sq_T, is_bad_T
    wide_TD = rows_TD.to(torch.promote_types(rows_TD.dtype, torch.float32))
    norm_sq_T = torch.linalg.vecdot(wide_TD, wide_TD)
    # A large finite row may square to infinity; only the entries tell the two apart.
    is_bad_T = ~torch.isfinite(rows_TD.abs().amax(1)) if rows_TD.shape[1] else norm_sq_T < 0
    return norm_sq_T, is_bad_T


@define("rows_triton", fills=("rows_TD",))
def poison_rows(rows_TD: torch.Tensor, is_bad_T: torch.Tensor) -> None:
    """Fill the rows that are flagged with NaN; the others are neither read nor written."""
    rows_TD[is_bad_T] = float("nan")


@define("rows_triton", fills=("out_PD",))
def copy_rows(rows_UD: torch.Tensor, row_ids_P: torch.Tensor, out_PD: torch.Tensor) -> None:
    """``out_PD[i] = rows_UD[row_ids_P[i]]``."""
    torch.index_select(rows_UD, 0, row_ids_P, out=out_PD)
