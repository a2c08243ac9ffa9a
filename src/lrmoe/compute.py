"""The experts' own work on the rank that holds them: three grouped GEMMs forward, up to five back.

Shape letters: U = token rows received, R = pairs computed in the forward pass, P = kept pairs, D =
model dim, F = expert width, e = instances on this rank. Pairs are expert-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lrmoe.kernels.gated import Activation, gated_backward, gated_forward
from lrmoe.kernels.grouped_gemm import grouped_mm, grouped_outer
from lrmoe.kernels.rows import gather_rows, sum_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The parameters of the instances on this rank, in Hugging Face's layout."""

    gate_up_e2FD: torch.Tensor  # gate rows first
    down_eDF: torch.Tensor
    act: Activation | None  # None: SiLU


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """What the experts make of the rows they receive."""

    gate_up_R2F: torch.Tensor
    output_RD: torch.Tensor
    h_norm_sq_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPairs:
    """The pairs that get a backward pass here, and where their rows are."""

    row_P: torch.Tensor  # int32 row of the gradient payload
    x_row_P: torch.Tensor  # int32 row of the saved inputs
    gate_up_row_P: torch.Tensor  # int32 row of the saved gate_up outputs
    coef_P: torch.Tensor  # routing weight times selection weight
    offsets_e: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Results of the backward work; ``None`` where nobody asked."""

    x_UD: torch.Tensor | None
    p_P: torch.Tensor  # <G, y> of every kept pair, without weights
    gate_up_e2FD: torch.Tensor | None
    down_eDF: torch.Tensor | None


def forward_experts(
    x_UD: torch.Tensor,
    row_R: torch.Tensor,
    scale_R: torch.Tensor,
    offsets_e: torch.Tensor,
    experts: Experts,
) -> ForwardWork:
    """``scale * down(act(gate) * up)`` of every pair, with the scale inside the down projection."""
    x_RD = gather_rows(x_UD, row_R, "rows")
    gate_up_R2F = grouped_mm(x_RD, experts.gate_up_e2FD.transpose(1, 2), offsets_e)
    scaled_h_RF, h_norm_sq_R = gated_forward(gate_up_R2F, scale_R, experts.act)
    return ForwardWork(
        gate_up_R2F=gate_up_R2F,
        output_RD=grouped_mm(scaled_h_RF, experts.down_eDF.transpose(1, 2), offsets_e),
        h_norm_sq_R=h_norm_sq_R,
    )


def recompute_gate_up(x_UD: torch.Tensor, kept: KeptPairs, experts: Experts) -> torch.Tensor:
    """The gate_up outputs of the kept pairs (``save="inputs"``), one row per kept pair."""
    x_PD = gather_rows(x_UD, kept.x_row_P, "rows")
    return grouped_mm(x_PD, experts.gate_up_e2FD.transpose(1, 2), kept.offsets_e)


def backward_experts(
    grad_UD: torch.Tensor,
    x_UD: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    kept: KeptPairs,
    experts: Experts,
    *,
    needs_x: bool,
    needs_gate_up: bool,
    needs_down: bool,
) -> Gradients:
    """dgrad and wgrad of the kept pairs; the input gradient is summed per token row.

    No GEMM is run for a gradient nobody needs. Experts without a kept pair get zeros.
    """
    # The scratch rows hold the output gradients first and the inputs later, one row a pair.
    grad_PD = gather_rows(grad_UD, kept.row_P, "rows")
    grad_h_PF = grouped_mm(grad_PD, experts.down_eDF, kept.offsets_e)
    grad_gate_up_P2F, scaled_h_PF, grad_p_P = gated_backward(
        gate_up_R2F, kept.gate_up_row_P, grad_h_PF, kept.coef_P, experts.act
    )
    grad_down_eDF = grad_x_UD = grad_gate_up_e2FD = None
    if needs_down:
        grad_down_eDF = grouped_outer(grad_PD, scaled_h_PF, kept.offsets_e)
    if needs_gate_up:
        x_PD = gather_rows(x_UD, kept.x_row_P, "rows")
        grad_gate_up_e2FD = grouped_outer(grad_gate_up_P2F, x_PD, kept.offsets_e)
    if needs_x:
        grad_x_PD = grouped_mm(grad_gate_up_P2F, experts.gate_up_e2FD, kept.offsets_e)
        grad_x_UD = sum_rows(grad_x_PD, kept.row_P, grad_UD.shape[0])
    return Gradients(
        x_UD=grad_x_UD, p_P=grad_p_P, gate_up_e2FD=grad_gate_up_e2FD, down_eDF=grad_down_eDF
    )


def compact_saved(
    x_UD: torch.Tensor,
    row_R: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    kept_row_P: torch.Tensor,
    forward_P: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and gate_up outputs of the kept pairs alone, laid out like the gradient payload.

    The payload's rows are the same tokens, so both are found through any pair that they feed.
    """
    # Padding rows of a static payload are named by no pair; they repeat row 0.
    forward_row_U = row_R.new_zeros(num_rows)
    forward_row_U[kept_row_P.long()] = row_R.index_select(0, forward_P)
    x_kept_UD = x_UD[forward_row_U] if num_rows else x_UD[:0]
    return x_kept_UD, gate_up_R2F[forward_P]
