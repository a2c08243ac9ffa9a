"""SwiGLU forward and backward for GPUs, in Triton; called through ``kernels.gated``.

One program per row, float32 inside. Every operand is read and written once.

Shape letters: R = rows in the forward pass, P = kept rows, F = expert width.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

_LARGEST_BLOCK = 1024


def swiglu_forward(
    gate_up_R2F: torch.Tensor,
    scale_R: torch.Tensor,
    scaled_RF: torch.Tensor,
    norm_sq_R: torch.Tensor,
) -> None:
    """Fill the last two. Moves ``3 R F`` entries and ``2 R`` scalars."""
    R, F = scaled_RF.shape
    gate_up_R2F = gate_up_R2F.contiguous()  # grouped_mm pads odd widths
    if R:
        _forward[(R,)](gate_up_R2F, scale_R, scaled_RF, norm_sq_R, F, BLOCK=_block(F))


def swiglu_backward(
    gate_up_R2F: torch.Tensor,
    row_ids_P: torch.Tensor,
    grad_h_PF: torch.Tensor,
    coef_P: torch.Tensor,
    grad_gate_up_P2F: torch.Tensor,
    scaled_PF: torch.Tensor,
    inner_P: torch.Tensor,
) -> None:
    """Fill the last three. Moves ``6 P F`` entries and ``3 P`` scalars."""
    P, F = grad_h_PF.shape
    # grouped_mm pads odd widths
    gate_up_R2F, grad_h_PF = gate_up_R2F.contiguous(), grad_h_PF.contiguous()
    if P:
        _backward[(P,)](
            gate_up_R2F,
            row_ids_P,
            grad_h_PF,
            coef_P,
            grad_gate_up_P2F,
            scaled_PF,
            inner_P,
            F,
            BLOCK=_block(F),
        )


def _block(width: int) -> int:
    return min(triton.next_power_of_2(max(width, 16)), _LARGEST_BLOCK)


@triton.jit
def _forward(gate_up, scale, scaled, norm_sq, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(scale + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_inside = column < width
        gate = gate_up + row * 2 * width + column
        g = tl.load(gate, mask=is_inside, other=0.0).to(tl.float32)
        u = tl.load(gate + width, mask=is_inside, other=0.0).to(tl.float32)
        h = g / (1.0 + tl.exp(-g)) * u
        total += h * h
        target = scaled + row * width + column
        tl.store(target, (s * h).to(scaled.dtype.element_ty), mask=is_inside)
    tl.store(norm_sq + row, tl.sum(total, 0))


@triton.jit
def _backward(
    gate_up, row_ids, grad_h, coef, grad_gate_up, scaled, inner, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(row_ids + row).to(tl.int64)
    c = tl.load(coef + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_inside = column < width
        gate = gate_up + source * 2 * width + column
        g = tl.load(gate, mask=is_inside, other=0.0).to(tl.float32)
        u = tl.load(gate + width, mask=is_inside, other=0.0).to(tl.float32)
        d = tl.load(grad_h + row * width + column, mask=is_inside, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-g))
        a = g * s
        total += d * a * u
        store = scaled.dtype.element_ty
        tl.store(scaled + row * width + column, (c * a * u).to(store), mask=is_inside)
        grad_gate = grad_gate_up + row * 2 * width + column
        tl.store(grad_gate, (c * d * u * s * (1.0 + g * (1.0 - s))).to(store), mask=is_inside)
        tl.store(grad_gate + width, (c * d * a).to(store), mask=is_inside)
    tl.store(inner + row, tl.sum(total, 0))
