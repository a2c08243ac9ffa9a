"""Rules that are tried in studies and are not (yet) settings of the library.

Each replaces how the layer selects within its quotas, on one rank, and nothing else of the layer.

Shape letters: N = pairs in expert-major order, E = experts, T = tokens, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from lrmoe import layer, recalibrate
from lrmoe.config import Recalibration
from lrmoe.planner.problem import Float, Int
from lrmoe.select import STRATUM_BITS, Segments, Selection, sampling_sizes, select_sampled

_DECAY = 0.9  # of what `Predicted` remembers, per step

Select = Callable[
    [torch.Tensor, Int, Int, Float | None, Recalibration, torch.Generator, torch.Tensor | None],
    Selection,
]


@contextmanager
def selecting(rule: Select | None) -> Iterator[None]:
    """The layers of this process select by the rule in the one step inside."""
    if rule is None:
        yield
        return
    if isinstance(rule, Predicted):
        rule.begin_step()
    original, original_choice = recalibrate._select, recalibrate.choose_pairs
    recalibrate._select = rule  # type: ignore[assignment]
    if isinstance(rule, Covering):
        layer.choose_pairs = partial(rule.note_tokens, original_choice)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        recalibrate._select = original
        layer.choose_pairs = original_choice  # type: ignore[attr-defined]


def make(name: str | None) -> Select | None:
    """A rule for one run: it may remember earlier steps."""
    return None if name is None else EXPERIMENTS[name]()


def pooled(
    score_N: torch.Tensor,
    count_e: Int,
    quota_e: Int,
    share_e: Float | None,
    config: Recalibration,
    generator: torch.Generator,
    code_N: torch.Tensor | None = None,
    *,
    normalised: float,
) -> Selection:
    """``sampled`` with one draw over all experts: their quotas are shared out by size, not count.

    For the same number of kept pairs the variance of a sum over all pairs is least if inclusion is
    proportional to the pairs' norms, whichever expert they belong to (Neyman's allocation). An
    optimizer that scales each parameter on its own may want every expert's noise to be small.

    Args:
        normalised: how much of an expert's mean size is divided out: 0 is Neyman's allocation, 1
            gives experts shares near their counts.
    """
    _refuse(share_e, config)
    segments = Segments(count_e, score_N.device)
    root_N, mean_E = _roots(score_N, segments)
    size_N = root_N / mean_E[segments.expert_N].clamp_min(1e-300) ** normalised
    rho = config.min_inclusion
    size_N = (1 - rho) * size_N / size_N.mean().clamp_min(1e-300) + rho
    everything = Segments(np.array([len(score_N)]), score_N.device)
    quota = np.array([int(quota_e.sum())])
    stratum_N, direction_N = recalibrate.strata_of(code_N, config.strata)
    if direction_N is not None:
        raise ValueError(
            "strata='neighbors': goes through the pairs of one expert, and this draw is over all; "
            "allowed are 'none', 'gradient' and 'text'"
        )
    if stratum_N is not None:  # by expert first
        stratum_N = ((segments.expert_N << STRATUM_BITS) + stratum_N) // len(count_e)
    return select_sampled(size_N, everything, quota, generator, None, stratum_N)


def levelled(
    score_N: torch.Tensor,
    count_e: Int,
    quota_e: Int,
    share_e: Float | None,
    config: Recalibration,
    generator: torch.Generator,
    code_N: torch.Tensor | None = None,
    *,
    power: float,
) -> Selection:
    """``sampled`` with quotas that grow more slowly than the counts: hot experts drop more.

    Args:
        power: quotas go with this power of the counts, as far as there are pairs.
    """
    _refuse(share_e, config)
    size_e = np.maximum(count_e, 1).astype(np.float64) ** (power - 1)
    segments = Segments(count_e, score_N.device)
    size_N = sampling_sizes(score_N, segments, config.min_inclusion)
    quota_e = shared_quotas(size_e, count_e, quota_e, rho=0.0)
    strata = recalibrate.strata_of(code_N, config.strata)
    return select_sampled(size_N, segments, quota_e, generator, None, *strata)


class Predicted:
    """``sampled`` with quotas shared out by the sizes that experts' pairs had in earlier steps.

    Unlike pooled quotas these are known when the plan is made, before the scores are.

    Args:
        normalised: as for :func:`pooled`.
    """

    def __init__(self, normalised: float) -> None:
        self._normalised = normalised
        self._mean_E: dict[int, torch.Tensor] = {}  # by layer, in the order of the calls
        self._calls = 0

    def __call__(
        self,
        score_N: torch.Tensor,
        count_e: Int,
        quota_e: Int,
        share_e: Float | None,
        config: Recalibration,
        generator: torch.Generator,
        code_N: torch.Tensor | None = None,
    ) -> Selection:
        """The rule inside one layer call."""
        _refuse(share_e, config)
        segments = Segments(count_e, score_N.device)
        _, mean_E = _roots(score_N, segments)
        layer = self._calls
        known_E = self._mean_E.get(layer)
        if known_E is not None:
            quota_e = shared_quotas(known_E.numpy() ** (1 - self._normalised), count_e, quota_e)
            mean_E = torch.where(torch.from_numpy(count_e) > 0, mean_E, known_E)
            mean_E = _DECAY * known_E + (1 - _DECAY) * mean_E
        self._mean_E[layer] = mean_E
        self._calls += 1
        size_N = sampling_sizes(score_N, segments, config.min_inclusion)
        strata = recalibrate.strata_of(code_N, config.strata)
        return select_sampled(size_N, segments, quota_e, generator, None, *strata)

    def begin_step(self) -> None:
        """The next call is of the layer that the first call was of."""
        self._calls = 0


class Covering:
    """``sampled`` in which every token keeps a pair, as far as the experts' quotas have room.

    Which pair that is follows from the scores and not from the draw: it is kept for certain, with
    weight 1. The rest of an expert's quota is drawn from its other pairs, with the inverse of their
    probability as weight. Given the scores, every pair is reachable, so the estimate is unbiased.
    """

    def __init__(self) -> None:
        self._token_N: torch.Tensor | None = None

    def note_tokens(self, choose: Callable[..., Selection], *arguments: Any) -> Selection:
        """Choose the pairs of a layer call, knowing whose they are."""
        self._token_N = arguments[3].token_N
        return choose(*arguments)

    def __call__(
        self,
        score_N: torch.Tensor,
        count_e: Int,
        quota_e: Int,
        share_e: Float | None,
        config: Recalibration,
        generator: torch.Generator,
        code_N: torch.Tensor | None = None,
    ) -> Selection:
        """The rule inside one layer call."""
        _refuse(share_e, config)
        assert self._token_N is not None
        # One place stays for the draw wherever something is dropped, or its pairs would be lost.
        room_e = np.where(quota_e < count_e, np.maximum(quota_e - 1, 0), count_e)
        is_certain_N = covering(score_N, self._token_N, count_e, room_e)
        expert_N = Segments(count_e, score_N.device).expert_N
        certain_e = torch.bincount(expert_N[is_certain_N], minlength=len(count_e)).numpy()
        rest_R = (~is_certain_N).nonzero().squeeze(1)
        segments = Segments(count_e - certain_e, score_N.device)
        size_R = sampling_sizes(score_N[rest_R], segments, config.min_inclusion)
        strata = recalibrate.strata_of(None if code_N is None else code_N[rest_R], config.strata)
        drawn = select_sampled(size_R, segments, quota_e - certain_e, generator, None, *strata)
        weight_N = is_certain_N.to(drawn.weight_P.dtype)
        weight_N[rest_R[drawn.kept_P]] = drawn.weight_P
        kept_P = weight_N.nonzero().squeeze(1)
        return Selection(kept_P=kept_P, weight_P=weight_N[kept_P])


def covering(
    score_N: torch.Tensor, token_N: torch.Tensor, count_e: Int, room_e: Int
) -> torch.Tensor:
    """bool [N]: a pair of each token, the highest that finds room at its expert.

    Tokens ask for their pairs in the order of the scores; where an expert is asked for more than it
    has room, the higher scores get it.
    """
    expert_N = Segments(count_e, score_N.device).expert_N
    by_score = torch.sort(score_N, descending=True, stable=True).indices
    by_token = by_score[torch.sort(token_N[by_score], stable=True).indices]
    num_tokens = int(token_N.max()) + 1
    room_E, is_chosen_N = (
        torch.from_numpy(room_e.copy()),
        torch.zeros_like(token_N, dtype=torch.bool),
    )
    is_open_T = torch.ones(num_tokens, dtype=torch.bool)
    for pair_T in by_token.view(num_tokens, -1).T:
        asking = pair_T[is_open_T]
        asking = asking[torch.sort(score_N[asking], descending=True, stable=True).indices]
        asking = asking[torch.sort(expert_N[asking], stable=True).indices]
        asked_E = torch.bincount(expert_N[asking], minlength=len(room_E))
        place = torch.arange(len(asking)) - (asked_E.cumsum(0) - asked_E)[expert_N[asking]]
        chosen = asking[place < room_E[expert_N[asking]]]
        is_chosen_N[chosen] = True
        is_open_T[token_N[chosen]] = False
        room_E -= torch.bincount(expert_N[chosen], minlength=len(room_E))
    return is_chosen_N


def shared_quotas(size_E: Float, count_E: Int, quota_E: Int, rho: float = 0.1) -> Int:
    """As many in total, by count times size; at least one, and at most all, of each expert."""
    mean = float((size_E * count_E).sum() / count_E.sum())
    share_E = (1 - rho) * size_E / max(mean, 1e-300) + rho
    low, high = 0.0, float(count_E.sum())
    for _ in range(60):  # the total rises with the factor
        factor = (low + high) / 2
        wanted_E = np.clip(factor * share_E * count_E, np.minimum(count_E, 1), count_E)
        low, high = (factor, high) if wanted_E.sum() < quota_E.sum() else (low, factor)
    result_E = np.floor(wanted_E).astype(np.int64)
    rest = int(quota_E.sum()) - int(result_E.sum())
    by_remainder = np.argsort(-(wanted_E - result_E), kind="stable")
    has_room = by_remainder[result_E[by_remainder] < count_E[by_remainder]]
    result_E[has_room[:rest]] += 1
    return result_E


def _roots(score_N: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs' sizes, and their mean in each expert (0 without pairs)."""
    root_N = score_N.double().sqrt()
    sum_E = root_N.new_zeros(len(segments.count_e)).index_add_(0, segments.expert_N, root_N)
    return root_N, sum_E / torch.from_numpy(np.maximum(segments.count_e, 1))


def _refuse(share_e: Float | None, config: Recalibration) -> None:
    if share_e is not None or not config.is_unbiased:
        raise ValueError("experiments need an unbiased rule and scope='global'")


EXPERIMENTS: dict[str, Callable[[], Select]] = {
    "pooled": lambda: partial(pooled, normalised=0.0),
    "pooled-half": lambda: partial(pooled, normalised=0.5),
    "pooled-by-count": lambda: partial(pooled, normalised=1.0),
    "levelled-half": lambda: partial(levelled, power=0.5),
    "levelled": lambda: partial(levelled, power=0.0),
    "covering": Covering,
    "predicted": lambda: Predicted(normalised=0.0),
    "predicted-half": lambda: Predicted(normalised=0.5),
}
