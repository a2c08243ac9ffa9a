"""Grouped GEMMs over expert-major rows: one product per expert, row counts as they fall.

Shape letters: P = rows in expert-major order, e = experts on this rank, A and B = widths.
Offsets are inclusive ends per expert, int32, as ``torch.nn.functional.grouped_mm`` takes them; the
last offset equals the number of rows, so no row is left unwritten.

The products are PyTorch's. ``LRMOE_GROUPED_GEMM=quack`` takes those of the package quack-kernels,
which SonicMoE is built on, for bfloat16 and float16 on CUDA.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
import torch.nn.functional as F

from lrmoe.kernels.ops import define

_ALIGNMENT_BYTES = 16
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)

LIBRARY_VARIABLE = "LRMOE_GROUPED_GEMM"
"""Environment variable: whose grouped GEMMs run, ``torch`` or ``quack``."""
LIBRARY = os.environ.get(LIBRARY_VARIABLE, "torch")


def _load(library: str) -> Callable[..., torch.Tensor] | None:
    """Its product of rows and experts; ``None``: PyTorch's."""
    if library == "torch":
        return None
    if library != "quack":
        raise ValueError(f"{LIBRARY_VARIABLE}={library!r}: allowed are 'torch', 'quack'")
    try:
        gemm: Callable[..., torch.Tensor] = import_module("quack.gemm_interface").gemm
    except ImportError as error:
        raise ValueError(
            f"{LIBRARY_VARIABLE}='quack': quack-kernels cannot be imported ({error}); install it, "
            "or leave the variable out"
        ) from error
    return gemm


_gemm = _load(LIBRARY)  # on import, since no rank may raise where others wait for it


def grouped_mm(
    rows_PA: torch.Tensor, weight_eAB: torch.Tensor, offsets_e: torch.Tensor
) -> torch.Tensor:
    """``rows[i] @ weight[expert of row i]`` -> [P, B]. ``weight_eAB`` may be a transposed view."""
    if _is_native(rows_PA, weight_eAB):
        if _gemm is not None and _is_quacks(rows_PA):
            return _gemm(rows_PA, weight_eAB, cu_seqlens_m=_from_zero(offsets_e), tuned=False)
        return F.grouped_mm(rows_PA, weight_eAB, offs=offsets_e)
    expert_P, place_P, longest = _padding(offsets_e, rows_PA.shape[0])
    padded = rows_PA.new_zeros(weight_eAB.shape[0], longest, rows_PA.shape[1])
    padded[expert_P, place_P] = rows_PA
    return torch.bmm(padded, weight_eAB)[expert_P, place_P]


def grouped_outer(
    rows_PA: torch.Tensor, rows_PB: torch.Tensor, offsets_e: torch.Tensor
) -> torch.Tensor:
    """Per expert the sum of ``outer(rows_PA[i], rows_PB[i])`` -> [e, A, B]; zero without rows."""
    if _is_native(rows_PA, rows_PB):
        gemm = _gemm if _is_quacks(rows_PA) else None
        if gemm is not None:
            products_eAB = gemm(
                rows_PA.t(), rows_PB, cu_seqlens_k=_from_zero(offsets_e), tuned=False
            )
        else:
            products_eAB = F.grouped_mm(rows_PA.t(), rows_PB, offs=offsets_e)
        if gemm is not None or products_eAB.is_cuda:
            # Not every kernel writes the product of no rows (pytorch/pytorch#172439).
            clear_empty(products_eAB, offsets_e)
        return products_eAB
    expert_P, place_P, longest = _padding(offsets_e, rows_PA.shape[0])
    num_experts = offsets_e.shape[0]
    padded_A = rows_PA.new_zeros(num_experts, longest, rows_PA.shape[1])
    padded_B = rows_PB.new_zeros(num_experts, longest, rows_PB.shape[1])
    padded_A[expert_P, place_P] = rows_PA
    padded_B[expert_P, place_P] = rows_PB
    return torch.bmm(padded_A.transpose(1, 2), padded_B)


@define("rows_triton", fills=("products_eAB",))
def clear_empty(products_eAB: torch.Tensor, offsets_e: torch.Tensor) -> None:
    """Zero the products of experts without rows."""
    counts_e = torch.diff(offsets_e, prepend=offsets_e.new_zeros(1))
    products_eAB.masked_fill_((counts_e == 0)[:, None, None], 0)


def _is_quacks(rows_PA: torch.Tensor) -> bool:
    """Whether QuACK's kernels take the rows: on CUDA, of a half type, and not none."""
    return rows_PA.is_cuda and rows_PA.dtype in _HALF and rows_PA.shape[0] > 0


def _from_zero(offsets_e: torch.Tensor) -> torch.Tensor:
    """Starts of the experts and the end of the last, int32 [e + 1]."""
    return F.pad(offsets_e, (1, 0))


def _is_native(*tensors: torch.Tensor) -> bool:
    """Whether ``grouped_mm`` takes these: dtype, one dense axis, strides of whole 16 bytes."""
    if tensors[0].dtype not in _NATIVE:
        return False
    for t in tensors:
        if 1 not in t.stride()[-2:]:
            return False
        strides = [s * t.element_size() for s in t.stride() if s != 1]
        if any(s % _ALIGNMENT_BYTES for s in strides):
            warn_padded()
            return False
    return True


def is_padded(dtype: torch.dtype, *widths: int) -> bool:
    """Whether experts with these widths are padded to the longest one, which takes more memory."""
    return dtype not in _NATIVE or any(w * dtype.itemsize % _ALIGNMENT_BYTES for w in widths)


@cache
def warn_padded() -> None:
    """Say once, for all layers and products, that the slower path runs."""
    warnings.warn(
        f"a width of the experts is not a multiple of {_ALIGNMENT_BYTES} bytes: the grouped GEMM "
        "cannot take it, and experts are padded to the longest one instead, which is slower",
        stacklevel=4,
    )


def _padding(offsets_e: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Expert and place inside the expert of every row, and the longest expert (device sync).

    Rows beyond the last offset, which is where ids of no expert end up before they are refused,
    take the last place of the last expert: they must not make the padding longer.
    """
    if num_rows == 0:
        return offsets_e.new_zeros(0), offsets_e.new_zeros(0), 0
    row_P = torch.arange(num_rows, dtype=offsets_e.dtype, device=offsets_e.device)
    last = offsets_e.shape[0] - 1
    expert_P = torch.searchsorted(offsets_e, row_P, right=True).clamp_(max=last)
    start_e = F.pad(offsets_e, (1, 0))
    longest = max(int(start_e.diff().max()), 1)
    return expert_P, (row_P - start_e[expert_P]).clamp_(max=longest - 1), longest
