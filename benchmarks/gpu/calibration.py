"""The experts' work at several sizes: what the replay's cost model is fitted to.

``lrmoe bench calibrate --gpu_rows FILE`` turns these rows, with those of the kernels and the
layer, into coefficients (``src/lrmoe/bench/calibrate_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.gpu.expert_work import Buffers, make_plan, make_routing, rank_work
from benchmarks.gpu.part import Part, start
from benchmarks.gpu.problems import LayerSize, layer_sizes
from benchmarks.gpu.timing import time_in_turn

_RANKS = 8
# Tokens per rank, and experts over all ranks: between few large groups and many small ones.
_TOKENS = (256, 1024, 8192)
_EXPERTS = (32, 128)
_SMALL_TOKENS = (16, 32, 64)
_SMALL_EXPERTS = (8, 16)
_RATES = ("0", "0.5")


def measure(part: Part, size: LayerSize) -> None:
    """Two rows, one a pass, for every size and rate; all of them on the first of eight ranks."""
    tokens, experts = (_SMALL_TOKENS, _SMALL_EXPERTS) if part.is_small else (_TOKENS, _EXPERTS)
    work = {}
    for num_experts in experts:
        of_experts = replace(size, experts=num_experts, tokens=tokens[-1])
        buffers = Buffers.make(of_experts, _RANKS, part.device)
        for num_tokens in tokens:
            smaller = replace(of_experts, tokens=num_tokens)
            routing = make_routing(smaller, _RANKS, "W0")
            for rate in _RATES:
                made = make_plan(smaller, routing, "fixed", rate)
                name = f"{num_experts} experts, {num_tokens} tokens, C{rate}"
                work[name] = rank_work(routing, made, 0, buffers)
    arms = {name: one.run for name, one in work.items()}
    times = time_in_turn(part.device, arms, part.rounds, lead=1)
    for name, one in work.items():
        fwd_ms, bwd_ms = np.median(times[name], axis=0)
        for phase, ms, pairs, groups, rows in zip(
            ("fwd", "bwd"), (fwd_ms, bwd_ms), one.pairs_2, one.groups_2, one.rows_2, strict=True
        ):
            part.write(
                "expert_work",
                model=size.name,
                hidden=size.hidden,
                ffn=size.ffn,
                dtype="bf16",
                case=name,
                phase=phase,
                pairs=pairs,
                groups=groups,
                rows=rows,
                ms=float(ms),
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Both models' widths."""
    part = start("The experts' work at several sizes.", arguments)
    for size in layer_sizes(part):
        measure(part, size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
