"""One layer's inputs, a run of ``lrmoe.experts`` on them, and what the oracles say of the run.

Shape letters as in ``tests.oracle``: T tokens, D hidden size, K top-k, E experts, F expert width.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe import (
    LayerReport,
    LayerState,
    PairRecord,
    Recalibration,
    experts,
    select,
    text_code,
    token_losses,
)
from lrmoe.config import SCORED_RULES, UNBIASED_RULES
from lrmoe.kernels import select_cpu
from tests import oracle
from tests.errors import relative_error

RULES = SCORED_RULES + UNBIASED_RULES
TENSORS = ("x", "p", "gate_up", "down")
# Relative error of a gradient, norm of difference / norm of reference.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """The inputs of one layer call and the gradient of its output."""

    x: Tensor
    expert: Tensor
    p: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(*(a.to(dtype) if a.is_floating_point() else a for a in self))

    def on(self, device: torch.device) -> "Case":
        return Case(*(a.to(device) for a in self))


def drawn_probabilities(size_N, count_e, quota_e, order_N) -> Iterator[list[int]]:
    """What ``select.sample_pairs`` draws by, in the given order of each expert, as multiples of
    1 / ONE.

    Who is capped is taken from it; that weights are exact inverses is tested without this.
    """
    sizes, order, first = size_N.double().cpu().numpy(), order_N.tolist(), 0
    for count, quota in zip(count_e.tolist(), quota_e.tolist(), strict=True):
        units = np.rint(sizes[first : first + count] * 2**20).astype(np.int64).clip(1, 2**40 - 1)
        least, spared, num_capped, rest = select_cpu._capped(units, quota)
        pi, running, before = [], 0, 0
        for place in order[first : first + count]:
            if units[place - first] >= least and place - first != spared:
                pi.append(select.ONE)
                continue
            running += int(units[place - first])
            share = float(running) / float(max(rest, 1))
            end = math.floor(share * float((quota - num_capped) * select.ONE) + 0.5)
            pi.append(end - before)
            before = end
        yield pi
        first += count


class Starts:
    """In place of :func:`lrmoe.select.sample_pairs`: one start for all experts, and where to cut.

    Between two cuts the sample is the same whatever the start, so that a sum over the stretches is
    the mean over the starts.
    """

    def __init__(self):
        self.now = 0
        self.cuts: set[int] = set()
        self._real = select.sample_pairs

    def stretches(self, *cuts: Iterable[int]) -> Iterator[float]:
        """The share of each stretch, from whose middle samples are drawn meanwhile."""
        for start, end in itertools.pairwise(sorted({0, select.ONE}.union(self.cuts, *cuts))):
            self.now = (start + end) // 2
            yield (end - start) / select.ONE

    def sample_pairs(self, size_N, count_e, quota_e, order_N, start_e, num_kept):
        for pi in drawn_probabilities(size_N, count_e, quota_e, order_N):
            self.cuts.update(-total % select.ONE for total in itertools.accumulate(pi))
        start_e = torch.full_like(start_e, self.now)
        return self._real(size_N, count_e, quota_e, order_N, start_e, num_kept)


def make_case(
    num_tokens: int = 16,
    top_k: int = 2,
    num_experts: int = 5,
    hidden: int = 8,
    width: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    used: Sequence[int] | None = None,
) -> Case:
    """Return a random case; experts outside ``used`` (by default, the last one) get no pair."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.tensor(range(max(num_experts - 1, top_k)) if used is None else used)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    chosen = [
        used[torch.randperm(len(used), generator=generator)[:top_k]] for _ in range(num_tokens)
    ]
    return Case(
        x=normal(num_tokens, hidden),
        expert=torch.stack(chosen) if chosen else torch.zeros(0, top_k, dtype=torch.int64),
        p=normal(num_tokens, top_k).softmax(1),
        gate_up=normal(num_experts, 2 * width, hidden),
        down=normal(num_experts, hidden, width),
        # token norms that differ by two orders of magnitude make selections matter
        grad=normal(num_tokens, hidden) * normal(num_tokens, 1).exp(),
    ).to(dtype)


class Run(NamedTuple):
    """What a layer call and its backward pass left behind."""

    output: Tensor
    grads: dict[str, Tensor | None]
    records: list[PairRecord]
    report: LayerReport


def run_layer(
    case: Case,
    config: Recalibration | None = None,
    *,
    state: LayerState | None = None,
    frozen: Sequence[str] = (),
    act: Any = "silu",
    group: Any = None,
    loss: Tensor | None = None,
    through: Callable[..., Tensor] = lambda fn, *args: fn(*args),
) -> Run:
    """Run the layer forward and back once.

    Args:
        frozen: names of tensors that need no gradient.
        loss: the tokens' losses, for ``selection="token_loss"``.
        through: calls the layer; activation checkpointing, say.
    """
    state = state or LayerState(config)
    state.captured = records = []
    if state.config.strata == "text":
        state.text_T = text_code(torch.arange(len(case.x), device=case.x.device) % 5)
    leaves = {
        name: getattr(case, name).detach().clone().requires_grad_(name not in frozen)
        for name in TENSORS
    }

    def layer(x: Tensor, p: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return experts(x, case.expert, p, gate_up, down, act=act, group=group, state=state)

    output = through(layer, *leaves.values())
    with token_losses(torch.zeros(len(case.x)) if loss is None else loss):
        output.backward(case.grad)
    state.captured = None
    return Run(
        output.detach(), {name: leaf.grad for name, leaf in leaves.items()}, records, state.report()
    )


def oracle_gradients(
    case: Case,
    weight: Tensor,
    config: Recalibration | None = None,
    act: oracle.Activation = F.silu,
) -> dict[str, Tensor]:
    """Return the gradients, in float64, that pairs with these weights (0: dropped) must give."""
    case, weight = case.to(torch.float64), weight.double()
    leaves = [getattr(case, name).clone().requires_grad_() for name in TENSORS]
    if not len(case.x):
        return {name: torch.zeros_like(leaf) for name, leaf in zip(TENSORS, leaves, strict=True)}
    output = oracle.selected_moe(leaves[0], case.expert, *leaves[1:], weight, act)
    grads = dict(zip(TENSORS, torch.autograd.grad(output, leaves, case.grad), strict=True))
    if config is not None and config.router_grad != "kept":
        _, y = oracle.pair_outputs(case.x, case.expert, case.gate_up, case.down, act)
        grads["p"] = oracle.router_gradient(
            config.router_grad, case.p, y, case.grad, weight, config.is_unbiased
        )
    return grads


def gradient_errors(
    case: Case, grads: dict[str, Tensor | None], want: dict[str, Tensor], router_grad: str = "kept"
) -> dict[str, float]:
    """Return the relative error of every gradient, of the experts' also expert by expert."""
    errors = {}
    for name, reference in want.items():
        got = grads[name]
        if got is None:
            errors[name] = float("inf")
            continue
        if name == "p" and router_grad == "completed":
            # the dropped pairs' value is a difference divided by their p: compare before that
            got, reference = got.double() * case.p.double(), reference * case.p.double()
        errors[name] = relative_error(got, reference)
        if name in ("gate_up", "down"):
            floor = reference.norm().item() * 1e-3  # an expert with next to nothing
            for e, (a, b) in enumerate(zip(got, reference, strict=True)):
                scale = max(b.norm().item(), floor)
                errors[f"{name}[{e}]"] = (a.double() - b).norm().item() / scale if scale else 0.0
    return errors


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """Return the largest error and its name; NaN counts as the largest."""
    name = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return errors[name], name


def rule_scores(rule: str, case: Case, record: PairRecord, loss: Tensor | None) -> Tensor | None:
    """Return what a weight-one rule ranks pairs by, [T, K] float32; None for ``random``."""
    norm = case.grad.float().norm(dim=1, keepdim=True).expand(case.p.shape)
    if rule == "top":
        return record.score
    if rule == "router":
        return case.p.float().abs()
    if rule == "gradient":
        return norm
    if rule == "weighted_gradient":
        return case.p.float().abs() * norm
    if rule == "token_loss":
        return loss.float()[:, None].expand(case.p.shape)
    return None


def quotas(experts_TK: Sequence[Tensor], num_experts: int, config: Recalibration) -> list[int]:
    """Return each expert's quota over all ranks' tables."""
    counts = [torch.bincount(e.flatten(), minlength=num_experts).tolist() for e in experts_TK]
    return oracle.rate_quotas(counts, float(config.rate_at(0)))


def expected_kept(
    cases: Sequence[Case],
    records: Sequence[PairRecord],
    config: Recalibration,
    losses: Sequence[Tensor | None],
) -> list[Tensor] | None:
    """Return the pairs that a weight-one rule must keep on each rank, None for ``random``.

    One group of the given ranks in global scope; in local scope each rank keeps its share.
    """
    num_experts = cases[0].gate_up.shape[0]
    tables = [case.expert for case in cases]
    quota_E = quotas(tables, num_experts, config)
    scores = [
        rule_scores(config.selection, *args) for args in zip(cases, records, losses, strict=True)
    ]
    if scores[0] is None:
        return None
    ids = [oracle.global_pair_ids(rank, *table.shape) for rank, table in enumerate(tables)]
    if config.effective_scope == "global":
        kept = oracle.select_top(
            [s for score in scores for s in score.flatten().tolist()],
            [e for table in tables for e in table.flatten().tolist()],
            [pair for some in ids for pair in some],
            quota_E,
        )
        parts = torch.tensor(kept).split([table.numel() for table in tables])
        return [part.view_as(table) for part, table in zip(parts, tables, strict=True)]
    counts_W = [torch.bincount(t.flatten(), minlength=num_experts).tolist() for t in tables]
    shares = [
        oracle.apportion([counts[e] for counts in counts_W], q) for e, q in enumerate(quota_E)
    ]
    return [
        torch.tensor(
            oracle.select_top(
                score.flatten().tolist(), table.flatten().tolist(), some, [s[rank] for s in shares]
            )
        ).view_as(table)
        for rank, (score, table, some) in enumerate(zip(scores, tables, ids, strict=True))
    ]


def expected_weights(
    case: Case, record: PairRecord, config: Recalibration, act: oracle.Activation = F.silu
) -> tuple[Tensor, Tensor]:
    """Return ``1 / pi`` of every pair, and how far off, relatively, rounding may make it.

    For an unbiased rule that draws within this one table.
    """
    if config.selection == "random_unbiased":
        score = torch.zeros_like(case.p, dtype=torch.float64)
    elif config.draw == "forward":
        one = case.to(torch.float64)
        h, _ = oracle.pair_outputs(one.x, one.expert, one.gate_up, one.down, act)
        score = one.p.square() * h.square().sum(2)
    else:
        score = record.score.double()
    num_experts = case.gate_up.shape[0]
    weight, slack = torch.zeros_like(score), torch.zeros_like(score)
    for e, quota in enumerate(quotas([case.expert], num_experts, config)):
        mine = case.expert == e
        if mine.any():
            sizes = oracle.sampled_sizes(score[mine].tolist(), config.min_inclusion)
            # counted in units of 2^-20, at least one: no pair is out of reach
            units = [max(round(size * 2**20), 1) for size in sizes]
            pi = oracle.inclusion_probabilities(units, quota)
            weight[mine] = torch.tensor([float(1 / Fraction(x)) for x in pi], dtype=torch.float64)
            slack[mine] = 1e-3 + 1 / torch.tensor(units, dtype=torch.float64)
    return weight, slack


def all_configs(selection: str, rates: Sequence[float], **fixed: Any) -> Iterator[Recalibration]:
    """Return every setting of a rule that the config allows."""
    choices: dict[str, Sequence[Any]] = {
        "rate": rates,
        "scope": ("global", "local"),
        "draw": ("backward", "forward") if selection in UNBIASED_RULES else ("backward",),
        "router_grad": ("kept", "completed", "exact"),
        "rows": ("exact", "static"),
        "save": ("activations", "inputs"),
    }
    choices |= {name: (value,) for name, value in fixed.items()}
    for values in itertools.product(*choices.values()):
        setting = dict(zip(choices, values, strict=True))
        if setting["rows"] == "static" and setting["scope"] == "global":
            continue
        yield Recalibration(selection=selection, **setting)
