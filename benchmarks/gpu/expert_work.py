"""One rank's own rows of an expert-parallel layer call, and the work of its experts on them.

Everything between the ranks is left out: the rows are there, as if they had just arrived.

Shape letters: W = ranks, T = tokens of a rank, K = top-k, N = pairs of all ranks by expert, R =
pairs of one rank, P = kept ones, U = token rows, D = model dim, F = expert width, E = experts, V =
instances, e = instances on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from benchmarks.gpu.problems import LayerSize
from benchmarks.gpu.timing import Mark
from lrmoe import compute
from lrmoe.bench.workloads import Shape, route
from lrmoe.pairs import sort_pairs
from lrmoe.planner import Budgets, Plan, PlanProblem, plan
from lrmoe.planner.costs import link_costs
from lrmoe.planner.memory import LayerShape
from lrmoe.planner.problem import Int
from lrmoe.select import Segments, sampling_sizes, select_sampled

SLOTS = 2
IMBALANCE = 1.79  # of W2, as in benchmarks/README.md
_RHO = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of all ranks go."""

    expert_NK: torch.Tensor  # rank 0's tokens first
    counts_WE: Int


def make_routing(size: LayerSize, ranks: int, workload: str, seed: int = 0) -> Routing:
    """Every rank's tokens, as the workload routes them."""
    shape = Shape(
        ranks=ranks,
        tokens=size.tokens,
        experts=size.experts,
        top_k=size.top_k,
        imbalance=IMBALANCE,
        empty_source=False,
    )
    expert_NK = route(workload, shape, seed).expert_TK
    counts = [np.bincount(t.flatten(), minlength=size.experts) for t in expert_NK.chunk(ranks)]
    return Routing(expert_NK=expert_NK, counts_WE=np.stack(counts))


def make_plan(size: LayerSize, routing: Routing, placement: str, rate: str) -> Plan:
    """What the layer would plan on GPUs of one node: ``fixed``, or a policy with two slots."""
    problem = PlanProblem(counts_WE=routing.counts_WE, rate=Fraction(rate), share_seed=0)
    if placement != "fixed":
        ranks = len(routing.counts_WE)
        shape = LayerShape(
            hidden=size.hidden,
            ffn=size.ffn,
            experts=size.experts,
            top_k=size.top_k,
            ranks=ranks,
            tokens=size.tokens,
            has_replicas=True,
        )
        problem = PlanProblem(
            counts_WE=routing.counts_WE,
            rate=Fraction(rate),
            placement=placement,
            budgets=Budgets(slots=SLOTS),
            costs=link_costs(shape, "cuda"),
            top_k=size.top_k,
            share_seed=0,
        )
    return plan(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Random rows and weights that all ranks of a measurement share, since they run in turn."""

    x_UD: torch.Tensor
    grad_UD: torch.Tensor
    home: compute.Weights
    replicas: compute.Weights

    @classmethod
    def make(cls, size: LayerSize, ranks: int, device: torch.device) -> Buffers:
        """As much as a rank can need."""
        generator = torch.Generator(device).manual_seed(0)
        D, F, U = size.hidden, size.ffn, ranks * size.tokens

        def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
            rows = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
            return rows.mul_(std)

        def weights(e: int) -> compute.Weights:
            return compute.Weights(
                gate_up_e2FD=normal(e, 2 * F, D, std=D**-0.5),
                down_eDF=normal(e, D, F, std=F**-0.5),
            )

        return cls(
            x_UD=normal(U, D),
            grad_UD=normal(U, D),
            home=weights(size.experts // ranks),
            replicas=weights(SLOTS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank's experts get in a layer call."""

    x_UD: torch.Tensor
    grad_UD: torch.Tensor
    row_R: torch.Tensor
    scale_R: torch.Tensor
    groups: compute.Groups
    kept: compute.KeptPairs
    experts: compute.Experts
    groups_2: tuple[int, int]
    """Instances that have pairs, in both passes."""

    @property
    def pairs_2(self) -> tuple[int, int]:
        """Pairs computed in both passes."""
        return len(self.row_R), len(self.kept.row_P)

    @property
    def rows_2(self) -> tuple[int, int]:
        """Token rows that arrived in both passes."""
        return len(self.x_UD), len(self.grad_UD)

    def run(self, mark: Mark) -> None:
        """The experts' forward and backward work."""
        work = compute.forward_experts(
            self.x_UD,
            self.row_R,
            self.scale_R,
            self.groups,
            self.experts,
            returns_pairs=False,
            keeps_gate_up=True,
        )
        mark()
        compute.backward_experts(
            self.grad_UD,
            self.x_UD,
            work.gate_up_R2F,
            self.kept,
            self.experts,
            needs_x=True,
            needs_gate_up=True,
            needs_down=True,
        )
        mark()


def rank_work(routing: Routing, made: Plan, rank: int, buffers: Buffers) -> RankWork:
    """The rows of one rank's instances.

    Kept pairs are drawn at each instance among the pairs of all ranks, as many as planned there:
    the counts are the layer's, while which rank's pairs they are may differ.
    """
    device, e = buffers.x_UD.device, len(buffers.home.down_eDF)
    pairs = sort_pairs(routing.expert_NK, len(made.quota_E))
    instance_N = _instances(made)
    here_V = np.flatnonzero(made.instance_rank_V == rank)
    mine = torch.from_numpy(np.flatnonzero(made.instance_rank_V[instance_N] == rank))
    mine = mine[torch.from_numpy(np.argsort(instance_N[mine], kind="stable"))]  # home first
    forward_e = made.forward_WV.sum(0)[here_V]
    token_U, row_R = torch.unique(pairs.token_N[mine], return_inverse=True)

    kept_V = made.quota_E if made.backward_V is None else made.backward_V
    kept_e = np.minimum(kept_V[here_V], forward_e)
    generator = torch.Generator(device).manual_seed(rank)
    score_R = torch.rand(len(mine), generator=generator, device=device).square_()
    segments = Segments(forward_e, device)
    chosen = select_sampled(sampling_sizes(score_R, segments, _RHO), segments, kept_e, generator)
    kept_P = chosen.kept_P.to(torch.int32)
    row_R = row_R.to(device, torch.int32)
    x_row_P = row_R[chosen.kept_P]
    sent_rows, row_P = torch.unique(x_row_P, return_inverse=True)

    def groups(pairs_e: Int) -> compute.Groups:
        ends = torch.from_numpy(pairs_e.cumsum().astype(np.int32)).to(device)
        return compute.Groups(
            offsets_e=ends,
            home_rows=int(pairs_e[:e].sum()),
            top_k=routing.expert_NK.shape[1],
        )

    num_replicas = len(here_V) - e
    replicas = compute.Weights(
        gate_up_e2FD=buffers.replicas.gate_up_e2FD[:num_replicas],
        down_eDF=buffers.replicas.down_eDF[:num_replicas],
    )
    return RankWork(
        x_UD=buffers.x_UD[: len(token_U)],
        grad_UD=buffers.grad_UD[: len(sent_rows)],
        row_R=row_R,
        scale_R=torch.rand(len(mine), generator=generator, device=device),
        groups=groups(forward_e),
        kept=compute.KeptPairs(
            row_P=row_P.to(torch.int32),
            x_row_P=x_row_P,
            gate_up_row_P=kept_P,
            coef_P=torch.rand(len(kept_P), generator=generator, device=device),
            groups=groups(kept_e),
        ),
        experts=compute.Experts(
            home=buffers.home,
            # Only what calling it returns is used: the weights are there.
            replicas=(lambda: replicas) if num_replicas else None,  # type: ignore[arg-type]
            act=None,
        ),
        groups_2=(int((forward_e > 0).sum()), int((kept_e > 0).sum())),
    )


def _instances(made: Plan) -> Int:
    """The instance of every pair, in the order of experts, then ranks, then tokens."""
    W, V = made.forward_WV.shape
    instance_VW = np.repeat(np.arange(V), W)
    rank_VW = np.tile(np.arange(W), V)
    order = np.lexsort((instance_VW, rank_VW, made.instance_expert_V[instance_VW]))
    lengths = made.forward_WV.T.reshape(-1)[order]
    found: Int = np.repeat(instance_VW[order], lengths)
    return found
