"""The traced run itself on the modelled clock: real rows where a replay of counts expects them."""

import numpy as np
import pytest

from lrmoe.cluster import command
from lrmoe.cluster.trace import Calls, RankPairs, Trace, TraceInfo
from lrmoe.config import Recalibration

W, E, K, T = 2, 8, 2, 400


def trace_of(ids_WTK):
    pairs = [
        RankPairs(expert_TK=ids.astype(np.int16), score_TK=np.ones(ids.shape, np.float32))
        for ids in ids_WTK
    ]
    counts_WE = np.stack([np.bincount(ids.ravel(), minlength=E) for ids in ids_WTK])
    calls = Calls(
        layer=0, group=0, step_C=np.zeros(1, int), micro_batch_C=np.zeros(1, int),
        counts_CWE=counts_WE[None], pairs_CW=[pairs],
    )  # fmt: skip
    info = TraceInfo(
        ranks=W, ep_size=W, experts=E, top_k=K, hidden=2048, ffn=8, dtype_bytes=2, has_pairs=True,
        settings=Recalibration(rate=0.0).to_dict(),
    )  # fmt: skip
    return Trace(info=info, calls=[calls])


def test_tokens_that_stay_on_one_rank_travel_less():
    """The same counts, but both experts of a token on one rank, or on two."""
    first = np.arange(T) % E
    together = first // 4 * 4 + (first + 1) % 4
    apart = (first + 4) % E
    settings = command.ReplaySettings(trace="t", own=True)
    rows = [
        command.own_row(settings, trace_of([np.stack([first, second], 1)] * W))
        for second in (together, apart)
    ]
    near, far = rows
    assert near["pairs"] == far["pairs"] == W * T * K
    assert (near["payload_rows_fwd"], far["payload_rows_fwd"]) == (T, 2 * T)
    assert near["bytes_fwd"] < far["bytes_fwd"]
    assert near["fwd_ms"] < far["fwd_ms"]
    assert near["bwd_ms"] < far["bwd_ms"]


def test_a_trace_is_needed():
    with pytest.raises(ValueError, match="own=True with trace=None"):
        command.ReplaySettings(own=True)
