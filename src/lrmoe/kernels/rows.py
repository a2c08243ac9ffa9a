"""Row copies and row sums, the inverse pair that carries tokens into and out of expert order.

Shape letters: P = gathered rows, U = unique rows, D = row width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lrmoe.kernels.scratch import scratch


def gather_rows(rows_UD: torch.Tensor, row_ids_P: torch.Tensor, name: str) -> torch.Tensor:
    """``rows_UD[row_ids_P]`` in the scratch buffer ``name``: valid until the name's next use."""
    out_PD = scratch(name, (row_ids_P.shape[0], rows_UD.shape[1]), rows_UD.dtype, rows_UD.device)
    return torch.index_select(rows_UD, 0, row_ids_P, out=out_PD)


def sum_rows(rows_PD: torch.Tensor, row_ids_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """For every unique row the sum of the rows that name it, zero for one that none names.

    Accumulates in float32 (float64 for float64), casts once, always in ascending order of P: the
    same bits every time.
    """
    order_P = torch.argsort(row_ids_P, stable=True)
    ends_U = torch.bincount(row_ids_P, minlength=num_rows).cumsum(0)
    offsets = F.pad(ends_U, (1, 0))
    if rows_PD.shape[0] == 0 or num_rows == 0:
        return rows_PD.new_zeros(num_rows, rows_PD.shape[1])
    return F.embedding_bag(order_P, rows_PD, offsets, mode="sum", include_last_offset=True)
