"""Coefficients of a GPU for the cost model, from the rows of ``benchmarks/gpu/check.sh``.

One card says how fast experts work and rows move; it says nothing of links, whose coefficients stay
those that were published. The model (rules 1 and 2 of :mod:`lrmoe.cluster.cost`) says of the
experts' work in one pass

    pairs * (FLOPs of a pair / rate + pair_s) + groups * (group_s + bytes / weight_bytes_per_s)
        + 2 * rows * bytes of a row / row_bytes_per_s

with 6 D F FLOPs a pair forward and 12 D F backward, and an expert's weights read once in the
forward pass, read and their gradient written in the backward pass. Rows move as fast as the row
kernels moved them; the rest is fitted, non-negative least squares of relative errors. Sorting pairs
and telling the experts of them comes on top of ``pair_s``; scoring and selecting is ``select_s``.

Shape letters: D = model dim, F = expert width, N = measurements, Q = coefficients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lrmoe.cluster.hardware import Hardware, load_hardware, sources

Row = Mapping[str, Any]
_DTYPE_BYTES = 2  # the check measures bf16
_LARGEST_RATE = 1e18  # of what costs nothing
_FITTED_RATES = ("forward_flops", "backward_flops", "weight_bytes_per_s")
_FITTED_SECONDS = ("group_s", "pair_s")
_OF_LINKS = ("intra_bytes_per_s", "inter_bytes_per_s", "collective_s")
_ROW_KERNELS = ("gather_rows", "sum_rows")
# Stages of the layer's backward pass at C20 that are counted by the pair, not by the row.
_BOOKKEEPING = ("restore_pairs", "announce_kept")
_SELECTING = ("norms_and_codes", "pair_lrm", "choose_pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """What was found."""

    hardware: Hardware
    sources: dict[str, str]
    """Where each coefficient comes from."""
    errors: list[float]
    """Of the fit, relative, for each row of the experts' work."""

    def to_file(self) -> str:
        """As ``lrmoe replay --hardware`` and ``cluster/hardware.json`` have it."""
        entry: dict[str, Any] = {"clock": self.hardware.clock}
        for name, value in asdict(self.hardware).items():
            if name not in ("name", "clock"):
                entry[name] = [value, self.sources[name]]
        return json.dumps({self.hardware.name: entry}, indent=1) + "\n"


def read_rows(path: str) -> list[Row]:
    """The rows of a file of the check.

    Raises:
        ValueError: if it is none, or none of a GPU.
    """
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"gpu_rows={path!r}: is not a file of JSON lines ({error})") from error
    if not rows or any("kind" not in row for row in rows):
        raise ValueError(f"gpu_rows={path!r}: is not a file of benchmarks/gpu/check.sh")
    devices = {row["device"] for row in rows}
    if devices == {"cpu"} or any(row["small"] for row in rows):
        raise ValueError(f"gpu_rows={path!r}: a run on a CPU, or of tiny shapes, measures no GPU")
    if len(devices) > 1:
        raise ValueError(f"gpu_rows={path!r}: of several devices, {sorted(devices)}")
    return rows


def fit_gpu(rows: Sequence[Row], name: str, links: str) -> GpuFit:
    """The coefficients that the rows of one GPU say.

    Args:
        links: the published GPU whose links, memory and constants of collectives are taken over.

    Raises:
        ValueError: if rows of some kind are missing.
    """
    published, of_links = load_hardware(links), sources(links)
    work = _of_kind(rows, "expert_work")
    layers = _of_kind(rows, "layer")
    dense = next(row for row in _of_kind(rows, "limit") if row["name"] == "dense_bf16")
    row_bytes_per_s = _row_rate(_of_kind(rows, "kernel"))
    bookkeeping_s = _stage_seconds(layers, _BOOKKEEPING)
    fitted, errors = _fit_work(work, row_bytes_per_s)
    found: dict[str, Any] = {
        **fitted,
        "name": name,
        "peak_flops": float(dense["flops"]),
        "row_bytes_per_s": row_bytes_per_s,
        "pair_s": fitted["pair_s"] + bookkeeping_s,
        "select_s": _stage_seconds(layers, _SELECTING),
    }
    about = work[0]
    measured = (
        f"benchmarks/gpu/check.sh on {about['device']}, {about['date']}, "
        f"commit {about['commit']}, torch {about['torch']}"
    )
    by_fit = (
        f"{measured}: fitted to {len(work)} passes of the experts' work, median error "
        f"{np.median(errors):.1%}"
    )
    where = dict.fromkeys((*_FITTED_RATES, *_FITTED_SECONDS), by_fit)
    where |= {
        "memory_bytes": of_links["memory_bytes"],
        "peak_flops": f"{measured}: one dense bf16 product, {dense['size']} wide",
        "row_bytes_per_s": f"{measured}: {' and '.join(_ROW_KERNELS)}, bytes over time",
        "pair_s": f"{by_fit}; and {' and '.join(_BOOKKEEPING)} at C20",
        "select_s": f"{measured}: {' and '.join(_SELECTING)} at C20",
    }
    where |= {n: f"not measured, as {links}: {of_links[n]}" for n in _OF_LINKS}
    return GpuFit(hardware=replace(published, **found), sources=where, errors=errors)


def _fit_work(work: Sequence[Row], row_bytes_per_s: float) -> tuple[dict[str, float], list[float]]:
    """Rates and constants, none negative, and the relative error of every row."""
    from scipy.optimize import nnls

    system_NQ = np.zeros((len(work), len(_FITTED_RATES) + len(_FITTED_SECONDS)))
    known_N = np.zeros(len(work))
    for i, row in enumerate(work):
        b = ("fwd", "bwd").index(row["phase"])
        D, F, pairs, groups = (row[name] for name in ("hidden", "ffn", "pairs", "groups"))
        system_NQ[i, b] = pairs * (6, 12)[b] * D * F
        system_NQ[i, 2] = groups * (1 + b) * 3 * D * F * _DTYPE_BYTES
        system_NQ[i, 3:] = groups, pairs
        known_N[i] = 2 * row["rows"] * D * _DTYPE_BYTES / row_bytes_per_s
    target_N = np.array([row["ms"] for row in work]) / 1e3
    relative_NQ = system_NQ / target_N[:, None]
    # The columns are of very different size; each is brought to one.
    scale_Q = np.linalg.norm(relative_NQ, axis=0)
    found_Q = nnls(relative_NQ / scale_Q, 1 - known_N / target_N)[0] / scale_Q
    errors = np.abs(relative_NQ @ found_Q + known_N / target_N - 1)
    found = dict(zip((*_FITTED_RATES, *_FITTED_SECONDS), found_Q.tolist(), strict=True))
    found |= {n: 1 / max(found[n], 1 / _LARGEST_RATE) for n in _FITTED_RATES}
    return found, errors.tolist()


def _row_rate(kernels: Sequence[Row]) -> float:
    """Bytes over time of the row kernels, all shapes together."""
    moving = [row for row in kernels if row["name"] in _ROW_KERNELS]
    if not moving:
        raise ValueError(f"gpu_rows: no row of {' or '.join(map(repr, _ROW_KERNELS))}")
    return float(sum(row["bytes"] for row in moving) / sum(row["ms"] / 1e3 for row in moving))


def _stage_seconds(layers: Sequence[Row], stages: Sequence[str]) -> float:
    """Of one routed pair, the mean over shapes and routings."""
    staged = [row for row in layers if row.get("stages_ms")]
    if not staged:
        raise ValueError("gpu_rows: no row of the layer with the stages of its selection")
    # A stage that a row does not name is one that its layer did not have.
    each = [
        sum(row["stages_ms"].get(stage, 0.0) for stage in stages) / (row["tokens"] * row["top_k"])
        for row in staged
    ]
    return float(np.mean(each)) / 1e3


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    found = [row for row in rows if row["kind"] == kind]
    if not found:
        raise ValueError(f"gpu_rows: no row of kind {kind!r}; run the whole check")
    return found
