"""The gated activation ``act(gate) * up`` between the two expert projections, and its backward.

Each pass reads every input once: the routing weight is folded into ``h`` on the way in (the down
projection is linear), and the norms and inner products that the layer needs come out beside it.

Shape letters: R = rows in the forward pass, P = kept rows, F = expert width; gate_up rows hold the
gate first, then up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lrmoe.kernels.ops import define, triton_kernels
from lrmoe.kernels.scratch import scratch

Activation = Callable[[torch.Tensor], torch.Tensor]
_FUSED = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
_CHUNK = 4096


def gated_forward(
    gate_up_R2F: torch.Tensor, scale_R: torch.Tensor, act: Activation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale * h`` in the dtype of the input, in scratch, and ``|h|^2`` in float32.

    Args:
        act: ``None`` is SiLU, which has a fused kernel; any other is called as it is.
    """
    R, F2 = gate_up_R2F.shape
    if act is not None or not _is_fused(gate_up_R2F):
        return gated_forward_reference(gate_up_R2F, scale_R, act)
    scaled_RF = scratch("h", (R, F2 // 2), gate_up_R2F.dtype, gate_up_R2F.device)
    norm_sq_R = scale_R.new_empty(R)
    swiglu_forward(gate_up_R2F, scale_R, scaled_RF, norm_sq_R)
    return scaled_RF, norm_sq_R


def gated_backward(
    gate_up_R2F: torch.Tensor,
    row_ids_P: torch.Tensor,
    grad_h_PF: torch.Tensor,
    coef_P: torch.Tensor,
    act: Activation | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of gate_up, ``coef * h``, and ``<grad_h, h>`` in float32, for the kept rows.

    Args:
        gate_up_R2F: the forward rows; ``row_ids_P`` names the one of each kept row.
        grad_h_PF: ``W_down^T G``, without the coefficient.
        coef_P: float32, routing weight times selection weight; scales the first two results.
    """
    if act is not None or not _is_fused(gate_up_R2F):
        return gated_backward_reference(gate_up_R2F, row_ids_P, grad_h_PF, coef_P, act)
    P, F = grad_h_PF.shape
    dtype, device = gate_up_R2F.dtype, gate_up_R2F.device
    grad_gate_up_P2F = scratch("grad_gate_up", (P, 2 * F), dtype, device)
    scaled_PF = scratch("h", (P, F), dtype, device)
    inner_P = coef_P.new_empty(P)
    swiglu_backward(gate_up_R2F, row_ids_P, grad_h_PF, coef_P, grad_gate_up_P2F, scaled_PF, inner_P)
    return grad_gate_up_P2F, scaled_PF, inner_P


def gated_forward_reference(
    gate_up_R2F: torch.Tensor, scale_R: torch.Tensor, act: Activation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gated_forward` in plain PyTorch: any activation, dtype and device."""
    R, F2 = gate_up_R2F.shape
    wide = _wide(gate_up_R2F.dtype)
    scaled_RF = gate_up_R2F.new_empty(R, F2 // 2)
    norm_sq_R = gate_up_R2F.new_empty(R, dtype=wide)
    for rows in _chunks(R):
        h = _gated(gate_up_R2F[rows].to(wide), act)
        scaled_RF[rows] = h * scale_R[rows].to(wide)[:, None]
        norm_sq_R[rows] = h.square().sum(1)
    return scaled_RF, norm_sq_R


def gated_backward_reference(
    gate_up_R2F: torch.Tensor,
    row_ids_P: torch.Tensor,
    grad_h_PF: torch.Tensor,
    coef_P: torch.Tensor,
    act: Activation | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`gated_backward` in plain PyTorch: any activation, dtype and device."""
    P, F = grad_h_PF.shape
    wide = _wide(gate_up_R2F.dtype)
    grad_gate_up_P2F = gate_up_R2F.new_empty(P, 2 * F)
    scaled_PF = gate_up_R2F.new_empty(P, F)
    inner_P = gate_up_R2F.new_empty(P, dtype=wide)
    for rows in _chunks(P):
        grad_h, coef = grad_h_PF[rows].to(wide), coef_P[rows].to(wide)[:, None]
        with torch.enable_grad():
            gate_up = gate_up_R2F[row_ids_P[rows]].to(wide).requires_grad_()
            h = _gated(gate_up, act)
            (grad_gate_up_P2F[rows],) = torch.autograd.grad(h, gate_up, coef * grad_h)
        h = h.detach()
        scaled_PF[rows] = coef * h
        inner_P[rows] = (grad_h * h).sum(1)
    return grad_gate_up_P2F, scaled_PF, inner_P


def _chunks(num_rows: int) -> Iterator[slice]:
    """Few rows at a time, so that temporaries in float32 stay small."""
    return (slice(first, first + _CHUNK) for first in range(0, num_rows, _CHUNK))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _gated(gate_up: torch.Tensor, act: Activation | None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu if act is None else act)(gate) * up


def _is_fused(rows: torch.Tensor) -> bool:
    if rows.is_cuda and triton_kernels("gated_triton") is None:
        return False
    return rows.dtype in _FUSED.get(rows.device.type, ())


@define("gated_triton", fills=("scaled_RF", "norm_sq_R"))
def swiglu_forward(
    gate_up_R2F: torch.Tensor,
    scale_R: torch.Tensor,
    scaled_RF: torch.Tensor,
    norm_sq_R: torch.Tensor,
) -> None:
    """Fill the last two; see :func:`gated_forward`."""
    from lrmoe.kernels import gated_cpu  # compiles with numba on first use

    gated_cpu.forward(*map(_array, (gate_up_R2F, scale_R, scaled_RF, norm_sq_R)))


@define("gated_triton", fills=("grad_gate_up_P2F", "scaled_PF", "inner_P"))
def swiglu_backward(
    gate_up_R2F: torch.Tensor,
    row_ids_P: torch.Tensor,
    grad_h_PF: torch.Tensor,
    coef_P: torch.Tensor,
    grad_gate_up_P2F: torch.Tensor,
    scaled_PF: torch.Tensor,
    inner_P: torch.Tensor,
) -> None:
    """Fill the last three; see :func:`gated_backward`."""
    from lrmoe.kernels import gated_cpu

    tensors = (gate_up_R2F, row_ids_P, grad_h_PF, coef_P, grad_gate_up_P2F, scaled_PF, inner_P)
    gated_cpu.backward(*map(_array, tensors))


def _array(tensor: torch.Tensor):  # type: ignore[no-untyped-def]
    """The tensor's memory as numpy sees it; bfloat16 as its bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
