"""Rules that are tried in studies and are not (yet) settings of the library.

Each replaces how the layer selects within its quotas, on one rank, and nothing else of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from lrmoe import recalibrate
from lrmoe.config import Recalibration
from lrmoe.planner.problem import Float, Int
from lrmoe.select import Segments, Selection, select_sampled

_Select = Callable[..., Selection]


@contextmanager
def experiment(name: str | None) -> Iterator[None]:
    """The layers of this process select by the named rule inside."""
    if name is None:
        yield
        return
    original = recalibrate._select
    recalibrate._select = EXPERIMENTS[name]
    try:
        yield
    finally:
        recalibrate._select = original


def pooled(
    score_N: torch.Tensor,
    count_e: Int,
    quota_e: Int,
    share_e: Float | None,
    config: Recalibration,
    generator: torch.Generator,
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
    if share_e is not None or not config.is_unbiased:
        raise ValueError("experiment 'pooled': needs an unbiased rule and scope='global'")
    segments = Segments.of(count_e, score_N.device)
    root_N = score_N.double().sqrt()
    sum_e = root_N.new_zeros(len(count_e)).index_add_(0, segments.expert_N, root_N)
    count_N = segments.last_N - segments.start_N + 1
    mean_N = (sum_e[segments.expert_N] / count_N).clamp_min(1e-300)
    size_N = root_N / mean_N**normalised
    rho = config.min_inclusion
    size_N = (1 - rho) * size_N / size_N.mean().clamp_min(1e-300) + rho
    everything = Segments.of(np.array([len(score_N)]), score_N.device)
    quota = np.array([int(quota_e.sum())])
    return select_sampled(size_N, everything, quota, generator)


EXPERIMENTS: dict[str, _Select] = {
    "pooled": partial(pooled, normalised=0.0),
    "pooled-half": partial(pooled, normalised=0.5),
    "pooled-by-count": partial(pooled, normalised=1.0),
}
