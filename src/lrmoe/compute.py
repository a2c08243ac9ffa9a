"""The experts' own work on the rank that holds them: three grouped GEMMs forward, up to five back.

Shape letters: U = token rows received, R = pairs computed in the forward pass, P = kept pairs, D =
model dim, F = expert width, e = home experts of this rank, s = replicas in its slots. Pairs are
instance-major: those of home experts come first, then those of replicas, whose weights lie in
another buffer. Every grouped GEMM therefore runs once per buffer that has instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lrmoe.kernels.gated import Activation, gated_backward, gated_forward
from lrmoe.kernels.grouped_gemm import grouped_mm, grouped_outer
from lrmoe.kernels.rows import gather_rows, sum_rows

if TYPE_CHECKING:
    from lrmoe.replicas import Arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Both projections of some experts, in Hugging Face's layout."""

    gate_up_e2FD: torch.Tensor  # gate rows first
    down_eDF: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The instances on this rank."""

    home: Weights
    replicas: Arriving | None  # None: no rank has any with work
    act: Activation | None  # None: SiLU


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Where the rows of the instances end."""

    offsets_e: torch.Tensor  # int32, inclusive ends of home experts, then replicas
    home_rows: int  # rows of the home experts, known on the host
    top_k: int  # no token has more rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """What the experts make of the rows they receive."""

    gate_up_R2F: torch.Tensor | None
    output: torch.Tensor
    """Outputs of the pairs [R, D], or their sums per token row [U, D]."""
    h_norm_sq_R: torch.Tensor
    peak_bytes: int
    """Of temporaries and results, at their largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPairs:
    """The pairs that get a backward pass here, and where their rows are."""

    row_P: torch.Tensor  # int32 row of the gradient payload
    x_row_P: torch.Tensor  # int32 row of the saved inputs
    gate_up_row_P: torch.Tensor  # int32 row of the saved gate_up outputs
    coef_P: torch.Tensor  # routing weight times selection weight
    groups: Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Results of the backward work; ``None`` where nobody asked."""

    x_UD: torch.Tensor | None
    p_P: torch.Tensor  # <G, y> of every kept pair, without weights
    gate_up_e2FD: torch.Tensor | None
    down_eDF: torch.Tensor | None
    replica_gate_up_s2FD: torch.Tensor | None
    replica_down_sDF: torch.Tensor | None
    temporary_bytes: int
    """Of rows and pairs, at their largest before the weight gradients are formed."""
    late_bytes: int
    """Of rows and pairs, at their largest beside the weight gradients."""


def forward_experts(
    x_UD: torch.Tensor,
    row_R: torch.Tensor,
    scale_R: torch.Tensor,
    groups: Groups,
    experts: Experts,
    *,
    returns_pairs: bool,
    keeps_gate_up: bool,
) -> ForwardWork:
    """``scale * down(act(gate) * up)`` of every pair, with the scale inside the down projection.

    Args:
        returns_pairs: give the outputs of the pairs, not their sums per token row.
        keeps_gate_up: give the gate_up outputs too; else they are freed before the down projection.
    """
    x_RD = gather_rows(x_UD, row_R, "rows")
    gate_up_R2F: torch.Tensor | None = _gate_up(x_RD, groups, experts)
    assert gate_up_R2F is not None
    # What joins the products of two weight buffers is there twice.
    twice = 1 + _joins(groups, experts)
    peak = _nbytes(x_RD) + twice * gate_up_R2F.nbytes
    del x_RD
    scaled_h_RF, h_norm_sq_R = gated_forward(gate_up_R2F, scale_R, experts.act)
    peak = max(peak, _nbytes(gate_up_R2F, scaled_h_RF))
    if not keeps_gate_up:
        gate_up_R2F = None
    outputs = _products(scaled_h_RF, lambda w: w.down_eDF.transpose(1, 2), groups, experts)
    if returns_pairs:
        output = _joined(outputs)
        largest = _nbytes(output)
    else:
        output, largest = _summed(outputs, row_R, x_UD.shape[0], groups.top_k)
    return ForwardWork(
        gate_up_R2F=gate_up_R2F,
        output=output,
        h_norm_sq_R=h_norm_sq_R,
        peak_bytes=max(peak, _nbytes(gate_up_R2F, scaled_h_RF) + largest),
    )


def recompute_gate_up(
    x_UD: torch.Tensor, x_row_P: torch.Tensor, groups: Groups, experts: Experts
) -> torch.Tensor:
    """The gate_up outputs of some pairs, one row each, from their tokens' inputs."""
    return _gate_up(gather_rows(x_UD, x_row_P, "rows"), groups, experts)


def backward_experts(
    grad_UD: torch.Tensor,
    x_UD: torch.Tensor,
    gate_up_R2F: torch.Tensor | None,
    kept: KeptPairs,
    experts: Experts,
    *,
    needs_x: bool,
    needs_gate_up: bool,
    needs_down: bool,
) -> Gradients:
    """dgrad and wgrad of the kept pairs; the input gradient is summed per token row.

    No GEMM is run for a gradient nobody needs. Experts without a kept pair get zeros. What a step
    no longer needs is freed before the next, which is what the memory model counts on; the caller
    must not hold ``grad_UD`` either.

    Args:
        gate_up_R2F: ``None`` where it was not saved; it is then made for the kept pairs.
    """
    made = 0
    if gate_up_R2F is None:
        gate_up_R2F = recompute_gate_up(x_UD, kept.x_row_P, kept.groups, experts)
        made = gate_up_R2F.nbytes
    # The scratch rows hold the output gradients first and the inputs later, one row a pair.
    num_rows = grad_UD.shape[0]
    grad_PD = gather_rows(grad_UD, kept.row_P, "rows")
    temporary = made + _nbytes(grad_UD, grad_PD)
    del grad_UD
    grad_h_PF = _grouped_mm(grad_PD, lambda w: w.down_eDF, kept.groups, experts)
    grad_gate_up_P2F, scaled_h_PF, grad_p_P = gated_backward(
        gate_up_R2F, kept.gate_up_row_P, grad_h_PF, kept.coef_P, experts.act
    )
    gated = _nbytes(grad_PD, grad_h_PF, grad_gate_up_P2F, scaled_h_PF)
    temporary = max(temporary, made + gated)
    del grad_h_PF, gate_up_R2F
    grad_x_UD = grad_gate_up = grad_down = replica_gate_up = replica_down = None
    if needs_down:
        grad_down, replica_down = _grouped_outer(grad_PD, scaled_h_PF, kept.groups, experts)
    late = _nbytes(grad_PD, grad_gate_up_P2F)
    del grad_PD, scaled_h_PF
    if needs_gate_up:
        x_PD = gather_rows(x_UD, kept.x_row_P, "rows")
        grad_gate_up, replica_gate_up = _grouped_outer(grad_gate_up_P2F, x_PD, kept.groups, experts)
        del x_PD
    if needs_x:
        products = _products(grad_gate_up_P2F, lambda w: w.gate_up_e2FD, kept.groups, experts)
        grad_x_UD, largest = _summed(products, kept.row_P, num_rows, kept.groups.top_k)
        late = max(late, grad_gate_up_P2F.nbytes + largest)
    return Gradients(
        x_UD=grad_x_UD,
        p_P=grad_p_P,
        gate_up_e2FD=grad_gate_up,
        down_eDF=grad_down,
        replica_gate_up_s2FD=replica_gate_up,
        replica_down_sDF=replica_down,
        temporary_bytes=temporary,
        late_bytes=late,
    )


def compact_saved(
    x_UD: torch.Tensor, gate_up_R2F: torch.Tensor | None, kept: KeptPairs, num_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inputs and gate_up outputs of the kept pairs alone, laid out like the gradient payload.

    The payload's rows are the same tokens, so both are found through any pair that they feed.

    Args:
        num_rows: of the payload; ``None``: the inputs are laid out like it already.
    """
    kept_gate_up = None if gate_up_R2F is None else gate_up_R2F[kept.gate_up_row_P]
    if num_rows is None:
        return x_UD, kept_gate_up
    # Padding rows of a static payload are named by no pair; they repeat row 0.
    x_row_U = kept.x_row_P.new_zeros(num_rows)
    x_row_U[kept.row_P.long()] = kept.x_row_P
    x_kept_UD = x_UD[x_row_U] if num_rows else x_UD[:0]
    return x_kept_UD, kept_gate_up


def _joins(groups: Groups, experts: Experts) -> bool:
    """Whether this rank has replicas with work, and every product runs in two parts."""
    return experts.replicas is not None and len(groups.offsets_e) > len(experts.home.down_eDF)


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def _gate_up(x_RD: torch.Tensor, groups: Groups, experts: Experts) -> torch.Tensor:
    return _grouped_mm(x_RD, lambda w: w.gate_up_e2FD.transpose(1, 2), groups, experts)


def _products(
    rows_RA: torch.Tensor,
    matrix: Callable[[Weights], torch.Tensor],
    groups: Groups,
    experts: Experts,
) -> Iterator[torch.Tensor]:
    """The rows' products in order, one tensor per weight buffer; the home experts' come while
    replicas are still on their way."""
    home = matrix(experts.home)
    n, ends = groups.home_rows, groups.offsets_e
    if experts.replicas is None:  # those of the plan, if any, have no pairs
        yield grouped_mm(rows_RA, home, ends[: len(home)])
        return
    yield grouped_mm(rows_RA[:n], home, ends[: len(home)])
    replicas = matrix(experts.replicas())
    if len(replicas):  # else this rank only sent weights
        yield grouped_mm(rows_RA[n:], replicas, ends[len(home) :] - n)


def _joined(products: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *more = products
    return torch.cat([first, *more]) if more else first


def _summed(
    products: Iterable[torch.Tensor], row_ids_R: torch.Tensor, num_rows: int, top_k: int
) -> tuple[torch.Tensor, int]:
    """Sums of the products per token row; and the bytes of both at their largest.

    A rank's replicas count as if they were another rank's: each buffer's sums are rounded once, and
    so is their total. Joining the products first would need them twice.
    """
    sums_UD, first, largest = None, 0, 0
    for product in products:
        row_ids = row_ids_R[first : first + len(product)]
        first += len(product)
        part_UD = sum_rows(product, row_ids, num_rows, top_k)
        before = 0 if sums_UD is None else sums_UD.nbytes
        largest = max(largest, before + _nbytes(product, part_UD))
        sums_UD = part_UD if sums_UD is None else sums_UD.add_(part_UD)
        del product, part_UD
    assert sums_UD is not None
    return sums_UD, largest


def _grouped_mm(
    rows_RA: torch.Tensor,
    matrix: Callable[[Weights], torch.Tensor],
    groups: Groups,
    experts: Experts,
) -> torch.Tensor:
    return _joined(_products(rows_RA, matrix, groups, experts))


def _grouped_outer(
    rows_PA: torch.Tensor, rows_PB: torch.Tensor, groups: Groups, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight gradients of the home experts, and of the replicas."""
    e, n, ends = len(experts.home.down_eDF), groups.home_rows, groups.offsets_e
    if not _joins(groups, experts):
        return grouped_outer(rows_PA, rows_PB, ends[:e]), None
    return (
        grouped_outer(rows_PA[:n], rows_PB[:n], ends[:e]),
        grouped_outer(rows_PA[n:], rows_PB[n:], ends[e:] - n),
    )
