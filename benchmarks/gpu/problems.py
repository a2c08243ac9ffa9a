"""The layers that are measured, and their inputs.

Shape letters: T = tokens, D = model dim, F = expert width, E = experts, K = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.part import Part
from lrmoe.bench.workloads import Shape, route

# Even routing, and an eighth of the experts with half of the pairs (names of bench/workloads.py).
WORKLOADS = ("W0", "W1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """One MoE layer of a model and the tokens that it gets."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int

    @property
    def num_pairs(self) -> int:
        """Token-expert pairs of one call."""
        return self.tokens * self.top_k

    def dims(self) -> dict[str, int | str]:
        """How rows name it."""
        return {
            "model": self.name,
            "tokens": self.tokens,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "experts": self.experts,
            "top_k": self.top_k,
        }


QWEN3 = LayerSize(name="qwen3-30b-a3b", hidden=2048, ffn=768, experts=128, top_k=8, tokens=8192)
GLM = LayerSize(name="glm-4.5-air", hidden=4096, ffn=1408, experts=128, top_k=8, tokens=8192)
_SMALL = (
    LayerSize(name="qwen3-30b-a3b", hidden=64, ffn=32, experts=16, top_k=4, tokens=128),
    LayerSize(name="glm-4.5-air", hidden=96, ffn=48, experts=16, top_k=4, tokens=96),
)


def layer_sizes(part: Part) -> tuple[LayerSize, ...]:
    """The layers of the check; with ``--small`` tiny ones by the same names."""
    return _SMALL if part.is_small else (QWEN3, GLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs of a layer call, weights in Hugging Face's layout, and the output's gradient."""

    size: LayerSize
    x_TD: torch.Tensor
    expert_TK: torch.Tensor
    p_TK: torch.Tensor
    gate_up_e2FD: torch.Tensor
    down_eDF: torch.Tensor
    grad_TD: torch.Tensor
    row_2F: torch.Tensor | None = None
    """Which row of Hugging Face's layout each row of gate and up is (CPU); ``None``: the same."""

    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets a gradient."""
        return {
            "input": self.x_TD,
            "router weights": self.p_TK,
            "gate_up": self.gate_up_e2FD,
            "down": self.down_eDF,
        }

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """In the order that experts functions take them."""
        return self.x_TD, self.expert_TK, self.p_TK, self.gate_up_e2FD, self.down_eDF

    def clear(self) -> None:
        """Forget all gradients."""
        for leaf in self.leaves().values():
            leaf.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those that a backward pass left, in Hugging Face's layout."""
        found = {}
        for name, leaf in self.leaves().items():
            assert leaf.grad is not None, name
            found[name] = leaf.grad
        if self.row_2F is not None:
            found["gate_up"] = found["gate_up"][:, self.row_2F.argsort()]
        return found

    def with_rows(self, row_2F: torch.Tensor) -> Problem:
        """The very same leaves, but gate and up are a copy with its rows in another order."""
        assert self.row_2F is None
        rows = row_2F.to(self.gate_up_e2FD.device)
        gate_up_e2FD = self.gate_up_e2FD.detach().index_select(1, rows).requires_grad_()
        return replace(self, gate_up_e2FD=gate_up_e2FD, row_2F=row_2F)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Problem:
        """The same numbers elsewhere."""

        def leaf(t: torch.Tensor) -> torch.Tensor:
            return t.detach().to(device or t.device, dtype, copy=True).requires_grad_()

        return Problem(
            size=self.size,
            x_TD=leaf(self.x_TD),
            expert_TK=self.expert_TK.to(device or self.expert_TK.device),
            p_TK=leaf(self.p_TK),
            gate_up_e2FD=leaf(self.gate_up_e2FD),
            down_eDF=leaf(self.down_eDF),
            grad_TD=leaf(self.grad_TD).detach(),
            row_2F=self.row_2F,
        )


def make_problem(
    size: LayerSize,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    workload: str = "W0",
    seed: int = 0,
) -> Problem:
    """Random inputs and weights, routed as the workload says."""
    shape = Shape(
        ranks=1,
        tokens=size.tokens,
        experts=size.experts,
        top_k=size.top_k,
        imbalance=1.0,
        empty_source=False,
    )
    routing = route(workload, shape, seed)
    generator = torch.Generator(device).manual_seed(seed)
    T, D, F, E = size.tokens, size.hidden, size.ffn, size.experts

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype).mul_(std)

    # As large as an initialised model's, so that no gradient vanishes in bf16.
    return Problem(
        size=size,
        x_TD=normal(T, D).requires_grad_(),
        expert_TK=routing.expert_TK.to(device),
        p_TK=routing.weight_TK.to(device, dtype).requires_grad_(),
        gate_up_e2FD=normal(E, 2 * F, D, std=D**-0.5).requires_grad_(),
        down_eDF=normal(E, D, F, std=F**-0.5).requires_grad_(),
        grad_TD=normal(T, D),
    )
