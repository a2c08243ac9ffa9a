"""Every kernel of the layer against its limit, which is measured in the same run.

Row kernels: bytes that must move, each input read once and each output written once, over their
time, as a share of the copy bandwidth. Grouped products: FLOPs over time, as a share of a dense
product's rate. Sorting and selecting: microseconds.

Shape letters: T = tokens, N = T * K pairs, P = kept pairs, D = model dim, F = expert width, b =
bytes of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import limits
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.problems import LayerSize, Problem, layer_sizes, make_problem
from benchmarks.gpu.timing import one_stage, time_in_turn
from lrmoe.kernels.gated import gated_backward, gated_forward
from lrmoe.kernels.grouped_gemm import grouped_mm, grouped_outer
from lrmoe.kernels.rows import gather_rows, row_norm_sq, sum_rows
from lrmoe.pairs import sort_pairs
from lrmoe.score import direction, norms_and_codes
from lrmoe.select import (
    STRATUM_BITS,
    Segments,
    gray_place,
    sampling_sizes,
    select_sampled,
    select_top,
)

_INT64, _INT32, _FLOAT32, _BOOL = 8, 4, 4, 1
# Kept shares of the backward pass's products: C0 and C50.
_KEPT_SHARES = (1.0, 0.5)
_RATE = 0.2  # of the selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operation, and what it must move or multiply."""

    name: str
    run: Callable[[], Any]
    num_bytes: int | None = None
    flops: int | None = None


def gather_bytes(T: int, P: int, D: int, b: int) -> int:
    """``T D b + 4 P`` read (rows once each, ids), ``P D b`` written."""
    return T * D * b + P * _INT32 + P * D * b


def sum_bytes(P: int, T: int, D: int, b: int) -> int:
    """``P D b + 4 P`` read, ``T D b`` written."""
    return P * D * b + P * _INT32 + T * D * b


def gated_forward_bytes(P: int, F: int, b: int) -> int:
    """``2 P F b + 4 P`` read (gate and up, scale), ``P F b + 4 P`` written (h, its norm)."""
    return 2 * P * F * b + P * _FLOAT32 + P * F * b + P * _FLOAT32


def gated_backward_bytes(P: int, F: int, b: int) -> int:
    """``3 P F b + 8 P`` read (gate and up, dh; ids, coefficients), ``3 P F b + 4 P`` written."""
    read = 2 * P * F * b + P * F * b + P * (_INT32 + _FLOAT32)
    return read + 2 * P * F * b + P * F * b + P * _FLOAT32


def norm_bytes(T: int, D: int, b: int) -> int:
    """``T D b`` read, ``5 T`` written (norm, whether it is finite)."""
    return T * D * b + T * (_FLOAT32 + _BOOL)


def codes_bytes(T: int, D: int, b: int) -> int:
    """Beside the norms: ``16 D b`` read (what gives the signs), ``8 T`` written."""
    return STRATUM_BITS * D * b + T * _INT64


def product_flops(P: int, A: int, B: int) -> int:
    """A product of P rows of A with A x B matrices, or P outer products of A and B."""
    return 2 * P * A * B


def row_kernels(problem: Problem) -> list[Kernel]:
    """Copies, sums, the activation, the norms: at the row counts of an exact layer call."""
    size, device = problem.size, problem.x_TD.device
    T, N, D, F = size.tokens, size.num_pairs, size.hidden, size.ffn
    x_TD, grad_TD = problem.x_TD.detach(), problem.grad_TD
    b = x_TD.element_size()
    token_N = sort_pairs(problem.expert_TK, problem.size.experts).token_N.to(torch.int32)
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = x_TD.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    y_ND, gate_up_N2F, grad_h_NF = normal(N, D), normal(N, 2 * F), normal(N, F)
    p_N = normal(N, dtype=torch.float32).abs_()
    in_order_N = torch.arange(N, dtype=torch.int32, device=device)
    return [
        Kernel(
            name="gather_rows",
            run=lambda: gather_rows(x_TD, token_N, "rows"),
            num_bytes=gather_bytes(T, N, D, b),
        ),
        Kernel(
            name="sum_rows",
            run=lambda: sum_rows(y_ND, token_N, T, size.top_k),
            num_bytes=sum_bytes(N, T, D, b),
        ),
        Kernel(
            name="gated_forward",
            run=lambda: gated_forward(gate_up_N2F, p_N, None),
            num_bytes=gated_forward_bytes(N, F, b),
        ),
        Kernel(
            name="gated_backward",
            run=lambda: gated_backward(gate_up_N2F, in_order_N, grad_h_NF, p_N, None),
            num_bytes=gated_backward_bytes(N, F, b),
        ),
        Kernel(name="row_norm_sq", run=lambda: row_norm_sq(grad_TD), num_bytes=norm_bytes(T, D, b)),
        Kernel(
            name="norms_and_codes",
            run=lambda: norms_and_codes(grad_TD, "gradient"),
            num_bytes=norm_bytes(T, D, b) + codes_bytes(T, D, b),
        ),
    ]


def products(problem: Problem) -> list[Kernel]:
    """The grouped products of a layer call: two forward, four backward, the latter also at C50."""
    size, device = problem.size, problem.x_TD.device
    D, F, dtype = size.hidden, size.ffn, problem.x_TD.dtype
    gate_up, down = problem.gate_up_e2FD.detach(), problem.down_eDF.detach()
    counts_E = torch.bincount(problem.expert_TK.flatten(), minlength=size.experts)
    found = []
    for share in _KEPT_SHARES:
        kept_E = (counts_E * share).ceil().long()
        P, ends_E = int(kept_E.sum()), kept_E.cumsum(0).to(torch.int32)
        generator = torch.Generator(device).manual_seed(2)
        rows_PD, rows_P2F, rows_PF = (
            torch.randn(P, width, generator=generator, device=device, dtype=dtype)
            for width in (D, 2 * F, F)
        )
        of_pass: list[tuple[str, Callable[..., Any], Sequence[Any], int, int]] = [
            ("dgrad down", grouped_mm, (rows_PD, down, ends_E), D, F),
            ("wgrad down", grouped_outer, (rows_PD, rows_PF, ends_E), D, F),
            ("wgrad gate_up", grouped_outer, (rows_P2F, rows_PD, ends_E), 2 * F, D),
            ("dgrad gate_up", grouped_mm, (rows_P2F, gate_up, ends_E), 2 * F, D),
        ]
        if share == 1:
            of_pass[:0] = [
                ("fprop gate_up", grouped_mm, (rows_PD, gate_up.mT, ends_E), D, 2 * F),
                ("fprop down", grouped_mm, (rows_PF, down.mT, ends_E), F, D),
            ]
        for name, function, arguments, A, B in of_pass:
            found.append(
                Kernel(
                    name=name if share == 1 else f"{name} C{round(100 * (1 - share))}",
                    run=lambda f=function, a=arguments: f(*a),
                    flops=product_flops(P, A, B),
                )
            )
    return found


def selection(problem: Problem) -> list[Kernel]:
    """What decides which pairs are kept, stage by stage."""
    size, device = problem.size, problem.x_TD.device
    pairs = sort_pairs(problem.expert_TK, problem.size.experts)
    counts_E = torch.bincount(pairs.expert_N, minlength=size.experts).cpu().numpy()
    quota_E = np.ceil((1 - _RATE) * counts_E).astype(np.int64)
    segments = Segments(counts_E, device)
    generator = torch.Generator(device).manual_seed(3)
    score_N = torch.rand(size.num_pairs, generator=generator, device=device).square_()
    size_N = sampling_sizes(score_N, segments, 0.1)
    code_T = direction(problem.grad_TD)
    code_N, place_N = code_T[pairs.token_N], gray_place(code_T)[pairs.token_N]
    runs: dict[str, Callable[[], Any]] = {
        "norms_and_codes, all signs": lambda: norms_and_codes(problem.grad_TD, "neighbors"),
        "sort_pairs": lambda: sort_pairs(problem.expert_TK, problem.size.experts),
        "Segments": lambda: Segments(counts_E, device),
        "sampling_sizes": lambda: sampling_sizes(score_N, segments, 0.1),
        "select_sampled": lambda: select_sampled(size_N, segments, quota_E, generator),
        "select_sampled, strata": lambda: select_sampled(
            size_N, segments, quota_E, generator, None, place_N
        ),
        "select_sampled, neighbors": lambda: select_sampled(
            size_N, segments, quota_E, generator, None, None, code_N
        ),
        "select_top": lambda: select_top(score_N, segments, quota_E),
    }
    return [Kernel(name=name, run=run) for name, run in runs.items()]


def measure(part: Part, size: LayerSize, found: limits.Limits) -> None:
    """A row for every kernel at one layer's shapes."""
    problem = make_problem(size, part.device)
    # Rows are freed before the products make theirs.
    for group in (selection, row_kernels, products):
        _measure_group(part, size, group(problem), found)


def _measure_group(
    part: Part, size: LayerSize, kernels: Sequence[Kernel], found: limits.Limits
) -> None:
    arms = {kernel.name: one_stage(kernel.run) for kernel in kernels}
    times = time_in_turn(part.device, arms, part.rounds, has_head_start=True)
    for kernel in kernels:
        ms = float(np.median(times[kernel.name]))
        row: dict[str, Any] = {"name": kernel.name, **size.dims(), "dtype": "bf16"}
        row |= {"ms": ms, "bytes": kernel.num_bytes, "flops": kernel.flops, "of_limit": None}
        if kernel.num_bytes is not None:
            row["of_limit"] = kernel.num_bytes / (ms / 1e3) / found.bytes_per_s
        if kernel.flops is not None:
            row["of_limit"] = kernel.flops / (ms / 1e3) / found.flops
        part.write("kernel", **row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Limits, then every kernel at the shapes of both models."""
    part = start("Kernels against their limits.", arguments)
    found = limits.measure(part)
    for size in layer_sizes(part):
        measure(part, size, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
