"""The implementations that are compared, on the same tensors of one rank.

Shape letters: T = tokens on this rank, D = model dim, F = expert width, K = top-k, R = pairs that
this rank computes, e = experts on this rank, W = ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import lrmoe
from lrmoe.bench.settings import LayerBench
from lrmoe.bench.workloads import Routing

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One rank's share of a workload: inputs, Hugging Face's experts module, output gradient."""

    x_TD: torch.Tensor
    expert_TK: torch.Tensor
    p_TK: torch.Tensor
    module: Any  # Qwen3MoeExperts with this rank's experts
    grad_TD: torch.Tensor

    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets a gradient, by the name that messages use."""
        return {
            "input": self.x_TD,
            "router weights": self.p_TK,
            "gate_up": self.module.gate_up_proj,
            "down": self.module.down_proj,
        }

    def clear(self) -> None:
        """Forget all gradients."""
        for leaf in self.leaves().values():
            leaf.grad = None

    def widened(self) -> Problem:
        """The same numbers in float32."""
        leaves = self.leaves()
        wide = {name: leaf.detach().float() for name, leaf in leaves.items()}
        return Problem(
            x_TD=wide["input"].requires_grad_(),
            expert_TK=self.expert_TK,
            p_TK=wide["router weights"].requires_grad_(),
            module=_module(self.module.config, wide["gate_up"], wide["down"]),
            grad_TD=self.grad_TD.float(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One implementation at one rate: what is timed, and what it says of its work."""

    impl: str
    placement: str | None
    rate: float
    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    state: lrmoe.LayerState | None = None

    @property
    def key(self) -> tuple[str, str | None, float]:
        """What tells it from the others."""
        return self.impl, self.placement, self.rate


def make_problem(bench: LayerBench, routing: Routing, dtype: str, rank: int) -> Problem:
    """Random inputs and weights of a rank; the routing is the workload's."""
    generator = torch.Generator().manual_seed(bench.seed * bench.num_ranks + rank + 1)
    expert_TK, p_TK = routing.of_rank(rank)
    T, D, F = len(expert_TK), bench.hidden, bench.ffn
    e = bench.experts // bench.num_ranks
    torch_dtype = TORCH_DTYPES[dtype]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch_dtype)

    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=e, num_experts_per_tok=bench.top_k
    )
    config._experts_implementation = "grouped_mm"
    return Problem(
        x_TD=normal(T, D).requires_grad_(),
        expert_TK=expert_TK,
        p_TK=p_TK.to(torch_dtype).requires_grad_(),
        module=_module(config, normal(e, 2 * F, D, std=D**-0.5), normal(e, D, F, std=F**-0.5)),
        grad_TD=normal(T, D),
    )


def lrmoe_arm(
    problem: Problem, bench: LayerBench, placement: str, rate: float, mesh: DeviceMesh
) -> Arm:
    """This package's layer."""
    state = lrmoe.LayerState(bench.recalibration(placement, rate))
    group, module = mesh.get_group("ep"), problem.module

    def forward() -> torch.Tensor:
        return lrmoe.experts(
            problem.x_TD,
            problem.expert_TK,
            problem.p_TK,
            module.gate_up_proj,
            module.down_proj,
            group=group,
            state=state,
        )

    return Arm(
        impl="lrmoe",
        placement=placement,
        rate=rate,
        forward=forward,
        backward=lambda output_TD: output_TD.backward(problem.grad_TD),
        state=state,
    )


def hf_arm(problem: Problem, mesh: DeviceMesh) -> Arm:
    """Hugging Face's all-to-all expert parallelism with its grouped GEMM experts."""
    layer = _all_to_all(problem, mesh)
    return Arm(
        impl="hf_all_to_all",
        placement="fixed",
        rate=0.0,
        forward=lambda: layer(problem.x_TD, problem.expert_TK, problem.p_TK),
        backward=lambda output_TD: output_TD.backward(problem.grad_TD),
    )


def hf_splits(problem: Problem, mesh: DeviceMesh) -> tuple[list[int], list[int]]:
    """Rows that Hugging Face's dispatch sends to and receives from every rank. Collective."""
    with torch.no_grad():
        *_, state = _all_to_all(problem, mesh)._dispatch_tokens(
            problem.x_TD, problem.expert_TK, problem.p_TK
        )
    return list(state.send_sizes), list(state.recv_sizes)


def floor_arm(num_rows: int, bench: LayerBench, dtype: str) -> Arm:
    """The layer's FLOPs for the pairs that this rank computes, as one dense product each.

    Two products forward, four backward, into memory that exists already.
    """
    R, D, F, torch_dtype = num_rows, bench.hidden, bench.ffn, TORCH_DTYPES[dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch_dtype)

    x_RD, gate_up_R2F, h_RF = normal(R, D), normal(R, 2 * F), normal(R, F)
    gate_up_2FD, down_DF = normal(2 * F, D), normal(D, F)
    # Never read: products that fed each other would overflow.
    out = [torch.empty_like(t) for t in (x_RD, gate_up_R2F, h_RF, gate_up_2FD, down_DF)]
    out_RD, out_R2F, out_RF, out_2FD, out_DF = out

    def forward() -> None:
        torch.mm(x_RD, gate_up_2FD.t(), out=out_R2F)
        torch.mm(h_RF, down_DF.t(), out=out_RD)

    def backward(_: None) -> None:
        torch.mm(x_RD, down_DF, out=out_RF)
        torch.mm(gate_up_R2F, gate_up_2FD, out=out_RD)
        torch.mm(gate_up_R2F.t(), x_RD, out=out_2FD)
        torch.mm(x_RD.t(), h_RF, out=out_DF)

    return Arm(impl="gemm_floor", placement=None, rate=0.0, forward=forward, backward=backward)


def _all_to_all(problem: Problem, mesh: DeviceMesh) -> Any:
    return AllToAllEP(problem.module, mesh["ep"], mesh["tp"])


def _module(config: Any, gate_up_e2FD: torch.Tensor, down_eDF: torch.Tensor) -> Any:
    # On the meta device first: the module would initialise what is replaced here.
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]
    module.gate_up_proj = torch.nn.Parameter(gate_up_e2FD)
    module.down_proj = torch.nn.Parameter(down_eDF)
    return module
