"""``lrmoe bench layer``: this layer beside Hugging Face's, in one process group and run.

Shape letters: W = ranks, S = rounds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

from lrmoe.bench import arms as arms_
from lrmoe.bench.gate import Agreement, check_gradients
from lrmoe.bench.settings import LayerBench
from lrmoe.bench.timing import Times, end_rank, time_arms, time_local_stages
from lrmoe.bench.workloads import Shape, route
from lrmoe.report import LayerReport, imbalance

ROW_KEYS = (
    "workload",
    "dtype",
    "impl",
    "rate",
    "backward_fraction",
    "score_mass",
    "placement",
    "selection",
    "imbalance_home",
    "imbalance_fwd",
    "imbalance_bwd",
    "fwd_ms",
    "bwd_ms",
    "total_ms",
    "total_p20_ms",
    "total_p80_ms",
    "ratio_to_hf",
    "ratio_to_floor",
    "cpu_fwd_ms",
    "cpu_bwd_ms",
    "cpu_total_ms",
    "cpu_ratio_to_hf",
    "cpu_ratio_to_floor",
    "bytes_fwd",
    "bytes_bwd",
    "payload_rows_fwd",
    "payload_rows_bwd",
    "gemm_rows_fwd",
    "gemm_rows_bwd",
    "score_select_pack_ms",
    "replicas",
    "moved_rows",
    "plan_us",
    "gradient_error",
    "clock",
)
# For glibc, read when a process starts: no allocation of its own mapping, nothing returned.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_CPU_KEYS = ("fwd_ms", "bwd_ms", "total_ms", "ratio_to_hf", "ratio_to_floor")
_TIMEOUT = timedelta(minutes=10)
_STAGE_ROUNDS = 3


class GradientMismatchError(RuntimeError):
    """An implementation's gradients are wrong; nothing was timed."""


def run(bench: LayerBench) -> list[dict[str, Any]]:
    """The rows of the result, on its own ranks or on those that torchrun has started.

    Under torchrun every rank calls this and gets all rows.

    Raises:
        ValueError: if the number of ranks is not torchrun's.
        GradientMismatchError: on every rank, if the gradients of exact training do not agree.
    """
    if "RANK" not in os.environ:
        return _on_own_ranks(bench)
    world_size = int(os.environ["WORLD_SIZE"])
    if bench.num_ranks != world_size:
        raise ValueError(f"ranks={bench.ranks}: torchrun has started {world_size}; leave it out")
    if bench.keep_memory and any(os.environ.get(k) != v for k, v in _KEEP_MEMORY.items()):
        needed = " ".join(f"{name}={value}" for name, value in _KEEP_MEMORY.items())
        raise ValueError(f"keep_memory=true: start torchrun itself with {needed}")
    if dist.is_initialized():
        return measure(bench)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        return measure(bench)
    finally:
        dist.destroy_process_group()


def measure(bench: LayerBench) -> list[dict[str, Any]]:
    """The rows, on a rank of the default process group. Collective."""
    torch.set_num_threads(bench.threads)
    # torch.distributed tells its own callers about renamed functions, once per call site.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    mesh = init_device_mesh("cpu", (bench.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    cases = [(workload, dtype) for dtype in bench.dtypes for workload in bench.workloads]
    per_case = (bench.rounds + bench.warmup) * (len(bench.arms) + 2)
    per_case += _STAGE_ROUNDS * len(bench.arms)
    with _progress(len(cases) * (per_case + 1)) as advance:
        agreements = {}
        for case in cases:
            problem = _problem(bench, *case)
            agreements[case] = check_gradients(bench, problem, *case, mesh)
            failure = agreements[case].failure
            if failure is not None:
                raise GradientMismatchError(failure)
            advance()
        return [
            row
            for case in cases
            for row in _measure_case(bench, *case, agreements[case], mesh, advance)
        ]


def _problem(bench: LayerBench, workload: str, dtype: str) -> arms_.Problem:
    shape = Shape(
        ranks=bench.num_ranks,
        tokens=bench.tokens,
        experts=bench.experts,
        top_k=bench.top_k,
        imbalance=bench.imbalance,
        empty_source=bench.empty_source,
    )
    return arms_.make_problem(bench, route(workload, shape, bench.seed), dtype, dist.get_rank())


def _measure_case(
    bench: LayerBench,
    workload: str,
    dtype: str,
    agreement: Agreement,
    mesh: DeviceMesh,
    advance: Callable[[], None],
) -> list[dict[str, Any]]:
    """The rows of one workload in one dtype: Hugging Face, every rate, the floor."""
    problem = _problem(bench, workload, dtype)
    send_W, receive_W = arms_.hf_splits(problem, mesh)
    arms = [
        arms_.hf_arm(problem, mesh),
        *(arms_.lrmoe_arm(problem, bench, *placement_rate, mesh) for placement_rate in bench.arms),
        arms_.floor_arm(sum(receive_W), bench, dtype),
    ]
    clock = bench.resolved_clock

    def after_each() -> None:
        problem.clear()
        advance()

    times = time_arms(arms, bench.rounds, bench.warmup, after_each)
    hf, floor = times[0], times[-1]
    hf_counts = _hf_counts(send_W, receive_W, problem)
    rows = []
    for arm, of_arm in zip(arms, times, strict=True):
        row: dict[str, Any] = dict.fromkeys(ROW_KEYS)
        row |= {"workload": workload, "dtype": dtype, "impl": arm.impl, "rate": arm.rate}
        row |= {"backward_fraction": 1.0, "clock": clock, **hf_counts}
        row |= _summary(of_arm[clock], hf[clock], floor[clock])
        # Beside the wall clock: what other programs do on the same cores is not in here.
        by_cpu = _summary(of_arm["cpu"], hf["cpu"], floor["cpu"])
        row |= {f"cpu_{key}": by_cpu[key] for key in _CPU_KEYS}
        row["gradient_error"] = agreement.error.get(arm.key)
        if arm.state is not None:
            reports: list[LayerReport] = [arm.state.report()] * bench.num_ranks
            dist.all_gather_object(reports, arm.state.report())
            row |= _layer_counts(reports)
            row["placement"] = arm.placement
            row["selection"] = arm.state.config.selection
            row["score_select_pack_ms"] = time_local_stages(arm, _STAGE_ROUNDS, after_each)
        elif arm.impl == "gemm_floor":
            row |= {key: None for key in row if key.startswith(("bytes", "payload", "placement"))}
        rows.append(row)
    return rows


def _summary(times: Times, hf: Times, floor: Times) -> dict[str, float]:
    """Medians over the rounds. A ratio is the median of the rounds' own ratios: both sides of it
    were measured moments apart, so what slows the whole machine for a while cancels."""
    total_S = times.total()
    p20, p50, p80 = (float(v) for v in np.quantile(total_S, [0.2, 0.5, 0.8]))
    return {
        "fwd_ms": float(np.median(times.fwd_S)),
        "bwd_ms": float(np.median(times.bwd_S)),
        "total_ms": p50,
        "total_p20_ms": p20,
        "total_p80_ms": p80,
        "ratio_to_hf": float(np.median(total_S / hf.total())),
        "ratio_to_floor": float(np.median(total_S / floor.total())),
    }


def _hf_counts(
    send_W: list[int], receive_W: list[int], problem: arms_.Problem
) -> dict[str, float | str]:
    """Hugging Face's rows and bytes from its own splits, over all ranks. Collective.

    One row per pair goes out and one comes back, in both passes; only those for other ranks count.
    """
    rank = dist.get_rank()
    sent, received = sum(send_W) - send_W[rank], sum(receive_W) - receive_W[rank]
    row_bytes = problem.x_TD.shape[1] * problem.x_TD.element_size()
    mine = [sent, (sent + received) * row_bytes, sum(receive_W)]
    everywhere = [mine] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    payload_rows, num_bytes, gemm_rows = (sum(column) for column in zip(*everywhere, strict=True))
    load = imbalance(np.array([of_rank[2] for of_rank in everywhere]))
    counts: dict[str, float | str] = {"placement": "fixed", "imbalance_home": load}
    for phase in ("fwd", "bwd"):
        counts |= {
            f"imbalance_{phase}": load,
            f"bytes_{phase}": num_bytes,
            f"payload_rows_{phase}": payload_rows,
            f"gemm_rows_{phase}": gemm_rows,
        }
    return counts


def _layer_counts(reports: list[LayerReport]) -> dict[str, float]:
    """Rows and bytes summed over the ranks; what every rank knows of the group as it is."""
    of_group = ("backward_fraction", "imbalance_home", "imbalance_fwd", "imbalance_bwd")
    of_rank = [f"{kind}_{p}" for kind in ("bytes", "payload_rows", "gemm_rows") for p in _PASSES]
    return {
        **{name: getattr(reports[0], name) for name in of_group},
        **{name: sum(getattr(report, name) for report in reports) for name in of_rank},
        "score_mass": float(np.mean([report.score_mass for report in reports])),
        "replicas": reports[0].replicas,
        "moved_rows": sum(report.moved_rows for report in reports),
        "plan_us": max(report.plan_us for report in reports),
    }


_PASSES = ("fwd", "bwd")


def _on_own_ranks(bench: LayerBench) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="lrmoe-bench-") as directory,
        patch.dict(os.environ, _KEEP_MEMORY if bench.keep_memory else {}),
    ):
        spawn(_rank_main, (directory, asdict(bench)), nprocs=bench.num_ranks)  # type: ignore[no-untyped-call]
        outcome = json.loads((Path(directory) / "outcome.json").read_text())
    if "failure" in outcome:
        raise GradientMismatchError(outcome["failure"])
    rows: list[dict[str, Any]] = outcome["rows"]
    return rows


def _rank_main(rank: int, directory: str, settings: dict[str, Any]) -> None:
    bench = LayerBench(**settings)
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=bench.num_ranks, timeout=_TIMEOUT
    )
    outcome: dict[str, Any]
    try:
        outcome = {"rows": measure(bench)}
    except GradientMismatchError as error:
        outcome = {"failure": str(error)}
    if rank == 0:
        (Path(directory) / "outcome.json").write_text(json.dumps(outcome))
    end_rank()


def _progress(total: int) -> AbstractContextManager[Callable[[], None]]:
    """A bar on the first rank's terminal; nothing where there is none."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        return nullcontext(lambda: None)
    from lrmoe.bench.table import progress_bar

    return progress_bar(total)
