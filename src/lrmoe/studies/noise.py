"""``lrmoe study noise``: the variance that sizes and quotas leave, before a run is trained.

The gradients of every pair are worked out one by one, so that a rule's variance is a formula:
``sum (1 / pi - 1) |g|^2`` over the pairs (independent draws; a fixed number of kept pairs changes
little). Sizes may then use what no layer knows, which bounds what better sizes could bring. What
strata save is no such sum: there the noise is that of samples which are drawn.

Shape letters: T = tokens, K = top-k, N = T * K pairs, D = model dim, F = expert width, E = experts,
n = pairs of one expert, A, B = sides of a weight.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lrmoe.recalibrate import strata_of
from lrmoe.score import code_of, direction
from lrmoe.select import ONE, Segments, inclusion_probabilities, select_sampled
from lrmoe.studies import rows
from lrmoe.studies.loop import Loop, backward, block_ids, configure, identity, initial_model
from lrmoe.studies.settings import Arm, Protocol, Run
from lrmoe.studies.texts import study_text
from lrmoe.training.run_dir import append_row

GROUPS = ("down", "gate_up", "x", "router")
RATES = (0.2, 0.5)
STEPS = (50, 200, 400)
STRATA = ("none", "gradient", "neighbors", "text")
_BATCHES = 4
_DRAWS = 16
_RHO = 0.1


@dataclass(frozen=True, kw_only=True)
class LayerPairs:
    """The pairs of one layer call, by expert: squared norms of what each adds to every gradient."""

    count_E: np.ndarray
    p_N: torch.Tensor
    grad_norm_sq_N: torch.Tensor
    h_norm_sq_N: torch.Tensor
    own: dict[str, torch.Tensor]
    """[N] per group; ``x``: the layer's input; ``router``: the pair's own logit."""
    whole: dict[str, float]
    """Squared norm of the sum over all pairs."""
    terms: list[dict[str, tuple[torch.Tensor, torch.Tensor]]]
    """By expert, of ``down`` and ``gate_up``: rows [n, A] and [n, B], whose products are the pairs'
    terms of the gradient."""
    code_N: dict[str, torch.Tensor]
    """int64 [N] by name: direction of the output gradient; successor and token itself."""

    @property
    def segments(self) -> Segments:
        """The experts' runs."""
        return Segments(self.count_E, self.p_N.device)


def main(arguments: Sequence[str]) -> int:
    """Measures, if the file of the rows is not there yet, and shows; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lrmoe study noise",
        description="The default protocol's exact run, looked at after a few of its steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=Path, default=Path("results/noise.jsonl"), help="file of the rows")
    add("--cache", type=Path, default=Path("runs/study"), help="directory of checkpoints")
    options = parser.parse_args(arguments)
    if not options.rows.exists():
        measure(Run(protocol=Protocol(), arm=Arm(), seed=0), STEPS, options.rows, options.cache)
    sys.stdout.write(table(rows.load(options.rows)))
    return 0


def measure(run: Run, steps: Sequence[int], path: Path, cache: Path) -> None:
    """Adds a row per step, rate and choice of sizes."""
    torch.set_num_threads(1)
    text = study_text(run.protocol)
    model = initial_model(run, text, cache)
    base = identity(run, text, model)
    size = run.protocol.blocks_per_step
    batches = [
        block_ids(text.validation, list(range(i * size, (i + 1) * size))) for i in range(_BATCHES)
    ]
    for step in Loop(run, model, text).steps():
        if step in steps:
            looked_at = initial_model(run, text, cache)
            looked_at.load_state_dict(model.state_dict())
            layers = [pairs for ids_BS in batches for pairs in layer_pairs(looked_at, ids_BS)]
            for values in (*compare(layers), *compare_strata(layers)):
                append_row(path, base | {"step": step} | values | rows.origin())
        if step == max(steps):
            return


def compare(layers: Sequence[LayerPairs]) -> Iterator[dict[str, Any]]:
    """Expected noise over the gradient's length, per group, all layers and batches together."""
    for rate in RATES:
        for name, sizes in SIZES.items():
            for is_pooled in (False, True):
                noise = dict.fromkeys(GROUPS, 0.0)
                for pairs in layers:
                    pi_N = probabilities(sizes(pairs), pairs, rate, is_pooled)
                    for group in GROUPS:
                        noise[group] += float(((1 / pi_N - 1) * pairs.own[group]).sum())
                whole = {group: sum(pairs.whole[group] for pairs in layers) for group in GROUPS}
                yield {
                    "rate": rate,
                    "sizes": name,
                    "is_pooled": is_pooled,
                    "strata": None,
                    "noise": {g: math.sqrt(noise[g] / whole[g]) for g in GROUPS},
                }


def compare_strata(layers: Sequence[LayerPairs]) -> Iterator[dict[str, Any]]:
    """The same, of samples by ``p |G| |h|`` that are laid out by strata."""
    generator = torch.Generator().manual_seed(0)
    for rate in RATES:
        for name in STRATA:
            noise = dict.fromkeys(("down", "gate_up"), 0.0)
            for pairs in layers:
                for group, value in drawn_noise(pairs, rate, name, generator).items():
                    noise[group] += value
            whole = {group: sum(pairs.whole[group] for pairs in layers) for group in noise}
            yield {
                "rate": rate,
                "sizes": "p |G| |h|",
                "is_pooled": False,
                "strata": name,
                "noise": {group: math.sqrt(noise[group] / whole[group]) for group in noise},
            }


def drawn_noise(
    pairs: LayerPairs, rate: float, strata: str, generator: torch.Generator
) -> dict[str, float]:
    """Mean squared error of the two gradients over some samples."""
    segments, quota_E = pairs.segments, _quotas(pairs, rate)
    size_N = _relative(pairs.own["down"].sqrt(), segments)
    sums = dict.fromkeys(("down", "gate_up"), 0.0)
    for _ in range(_DRAWS):
        order = strata_of(pairs.code_N.get(strata), strata)
        chosen = select_sampled(size_N, segments, quota_E, generator, None, *order)
        off_N = torch.full_like(size_N, -1.0)
        off_N[chosen.kept_P] += chosen.weight_P
        off_by_expert = torch.split(off_N.float(), pairs.count_E.tolist())
        for off_n, terms in zip(off_by_expert, pairs.terms, strict=True):
            for group, (left_nA, right_nB) in terms.items():
                error_AB = (off_n[:, None] * left_nA).T @ right_nB
                sums[group] += float(error_AB.square().sum())
    return {group: value / _DRAWS for group, value in sums.items()}


def probabilities(
    size_N: torch.Tensor, pairs: LayerPairs, rate: float, is_pooled: bool
) -> torch.Tensor:
    """P(kept), proportional to size within each expert's quota, or within the sum of the quotas."""
    segments, quota_E = pairs.segments, _quotas(pairs, rate)
    if is_pooled:
        segments = Segments(np.array([len(size_N)]), size_N.device)
        quota_E = np.array([quota_E.sum()])
    size_N = _relative(size_N, segments)
    return inclusion_probabilities(size_N, segments, quota_E).double() / ONE


def _quotas(pairs: LayerPairs, rate: float) -> np.ndarray:
    return np.ceil(np.round((1 - rate) * pairs.count_E, 9)).astype(np.int64)


def _relative(size_N: torch.Tensor, segments: Segments) -> torch.Tensor:
    size_N = size_N.double()
    mean_N = _expert_mean(size_N, segments)
    return (1 - _RHO) * torch.where(mean_N > 0, size_N / mean_N, 1.0) + _RHO


def _expert_mean(value_N: torch.Tensor, segments: Segments) -> torch.Tensor:
    sum_E = value_N.new_zeros(len(segments.count_e)).index_add_(0, segments.expert_N, value_N)
    return sum_E[segments.expert_N] / (segments.last_N - segments.start_N + 1)


def _smoothed(pairs: LayerPairs) -> torch.Tensor:
    h_sq_N = pairs.h_norm_sq_N + _expert_mean(pairs.h_norm_sq_N, pairs.segments)
    return pairs.p_N * (pairs.grad_norm_sq_N * h_sq_N).sqrt()


def _oracle(*groups: str) -> Callable[[LayerPairs], torch.Tensor]:
    return lambda pairs: sum(
        (pairs.own[g] / pairs.whole[g] for g in groups), torch.zeros_like(pairs.p_N)
    ).sqrt()


# What a pair's size may be; the last two need what only a complete backward pass knows.
SIZES: dict[str, Callable[[LayerPairs], torch.Tensor]] = {
    "uniform": lambda pairs: torch.ones_like(pairs.p_N),
    "p |G| |h|": lambda pairs: pairs.own["down"].sqrt(),
    "p |G|": lambda pairs: pairs.p_N * pairs.grad_norm_sq_N.sqrt(),
    "p |G| sqrt(|h|^2 + mean)": _smoothed,
    "p |h| (forward)": lambda pairs: pairs.p_N * pairs.h_norm_sq_N.sqrt(),
    "oracle: down, gate_up": _oracle("down", "gate_up"),
    "oracle: down, gate_up, x": _oracle("down", "gate_up", "x"),
}


def layer_pairs(model: nn.Module, ids_BS: torch.Tensor) -> list[LayerPairs]:
    """Every MoE layer's pairs in an exact backward pass of the batch."""
    configure(model, Arm(), seed=0)
    model.train()
    calls: list[dict[str, Any]] = []

    def remember(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        call = {"module": module, "arguments": [a.detach() for a in arguments]}
        output.register_hook(lambda grad_TD: call.update(grad_TD=grad_TD))
        calls.append(call)

    layers = [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "has_gate")]
    hooks = [layer.register_forward_hook(remember) for layer in layers]
    backward(model, ids_BS)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    text_T = (ids_BS.roll(-1, dims=1) * 256 + ids_BS).reshape(-1)
    return [_norms(call["module"], text_T, call["grad_TD"], *call["arguments"]) for call in calls]


@torch.no_grad()
def _norms(
    experts: Any,
    text_T: torch.Tensor,
    grad_TD: torch.Tensor,
    x_TD: torch.Tensor,
    expert_TK: torch.Tensor,
    p_TK: torch.Tensor,
) -> LayerPairs:
    expert_N, flat_N = expert_TK.reshape(-1).sort(stable=True)
    token_N, p_N = flat_N // expert_TK.shape[1], p_TK.reshape(-1)[flat_N]
    count_E = torch.bincount(expert_N, minlength=experts.gate_up_proj.shape[0])
    own: dict[str, list[torch.Tensor]] = {group: [] for group in GROUPS}
    whole = dict.fromkeys(GROUPS, 0.0)
    h_norm_sq, terms, dx_TD = [], [], torch.zeros_like(x_TD)
    ends_E = count_E.cumsum(0).tolist()
    for expert, (start, end) in enumerate(pairwise([0, *ends_E])):
        token_n, p_n1 = token_N[start:end], p_N[start:end, None]
        x_nD, grad_nD = x_TD[token_n], p_n1 * grad_TD[token_n]
        gate_nF, up_nF = (x_nD @ experts.gate_up_proj[expert].T).chunk(2, dim=1)
        sigmoid_nF = gate_nF.sigmoid()
        h_nF = gate_nF * sigmoid_nF * up_nF
        dh_nF = grad_nD @ experts.down_proj[expert]
        slope_nF = sigmoid_nF * (1 + gate_nF * (1 - sigmoid_nF))
        dz_n2F = torch.cat([dh_nF * up_nF * slope_nF, dh_nF * gate_nF * sigmoid_nF], dim=1)
        dx_nD = dz_n2F @ experts.gate_up_proj[expert]
        dlogit_n = (dh_nF * h_nF).sum(1)  # p dL/dp
        h_norm_sq.append(_square(h_nF))
        terms.append({"down": (grad_nD, h_nF), "gate_up": (dz_n2F, x_nD)})
        own["down"].append(_square(grad_nD) * _square(h_nF))
        own["gate_up"].append(_square(dz_n2F) * _square(x_nD))
        own["x"].append(_square(dx_nD))
        own["router"].append(dlogit_n.square())
        whole["down"] += float((grad_nD.T @ h_nF).square().sum())
        whole["gate_up"] += float((dz_n2F.T @ x_nD).square().sum())
        dx_TD.index_add_(0, token_n, dx_nD)
    whole["x"] = float(dx_TD.square().sum())
    whole["router"] = float(torch.cat(own["router"]).sum())
    codes = {name: code_of(direction(grad_TD), name) for name in ("gradient", "neighbors")}
    codes["text"] = text_T
    return LayerPairs(
        count_E=count_E.numpy(),
        p_N=p_N,
        grad_norm_sq_N=_square(grad_TD)[token_N],
        h_norm_sq_N=torch.cat(h_norm_sq),
        own={group: torch.cat(parts) for group, parts in own.items()},
        whole=whole,
        terms=terms,
        code_N={name: code_T[token_N] for name, code_T in codes.items()},
    )


def _square(rows_nD: torch.Tensor) -> torch.Tensor:
    return rows_nD.square().sum(1)


def table(found: Sequence[rows.Row]) -> str:
    """A line per step, rate and choice of sizes."""
    head = "".join(f"{group:>9}" for group in GROUPS)
    lines = [f"{'step':>5}{'rate':>6}  {'sizes':28}{'quotas':10}{'strata':10}{head}"]
    for row in found:
        quotas = "pooled" if row["is_pooled"] else "by count"
        strata = row["strata"] or "expected"
        noise = "".join(
            f"{row['noise'][group]:9.3f}" if group in row["noise"] else f"{'':9}"
            for group in GROUPS
        )
        lines.append(
            f"{row['step']:5}{row['rate']:6}  {row['sizes']:28}{quotas:10}{strata:10}{noise}"
        )
    note = (
        "Noise of one batch's gradient, over its length; x: of the layer's input. Strata: of drawn "
        "samples, in random order, by the output gradients' directions, from each to its nearest, "
        "or by the text."
    )
    return "\n".join([*lines, note, ""])
