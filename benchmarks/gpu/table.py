"""The short table at the end of the check: what was measured, beside its bar.

python -m benchmarks.gpu.table FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# At most (<=) or at least (>=) so much.
_ROW_KERNELS = (">=", 0.80)
_PRODUCTS = (">=", 0.70)
_AGAINST_HF = ("<=", 1.0)
_AGAINST_HF_QWEN3 = ("<=", 0.8)
_BACKWARD = {0.2: ("<=", 0.85), 0.5: ("<=", 0.58)}
_SELECTION = ("<=", 0.04)
_MEMORY = 0.05
_QWEN3 = "qwen3-30b-a3b"


def verdict(value: float | None, bar: tuple[str, float]) -> str:
    """The bar, and whether the value keeps to it."""
    side, limit = bar
    if value is None:
        return f"{side} {limit:g} not measured"
    is_kept = value <= limit if side == "<=" else value >= limit
    return f"{side} {limit:g} {'ok' if is_kept else 'MISSED'}"


def limits(rows: Sequence[Row]) -> list[str]:
    """The two rates that everything is held against."""
    return [
        f"{row['name']:12} {row['bytes_per_s'] / 1e12:8.2f} TB/s"
        if row["name"] == "copy"
        else f"{row['name']:12} {row['flops'] / 1e12:8.0f} TFLOP/s"
        for row in rows
    ]


def kernels(rows: Sequence[Row]) -> list[str]:
    """Microseconds at each model's shapes, and the share of the limit where there is one."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        of_name = [row for row in rows if row["name"] == name]
        line = f"{name:18}"
        for row in of_name:
            line += f"  {row['model']} {1e3 * row['ms']:8.1f} us"
            line += "" if row["of_limit"] is None else f" {row['of_limit']:6.1%}"
        if of_name[0]["of_limit"] is not None:
            bar = _PRODUCTS if of_name[0]["flops"] is not None else _ROW_KERNELS
            line += f"  {verdict(min(row['of_limit'] for row in of_name), bar)}"
        lines.append(line)
    return lines


def layers(rows: Sequence[Row]) -> list[str]:
    """Times, and ratios with their bars."""
    lines = []
    for row in rows:
        head = f"{row['model']:14} {row['workload']} "
        if "missing" in row:
            if not row["missing"].startswith("not importable"):
                lines.append(f"{head}{row['impl']}: {row['missing']}")
            continue
        is_ours = row["impl"] == "lrmoe"
        name = f"C{round(100 * row['rate'])} {row['draw']}" if is_ours else row["impl"]
        line = f"{head}{name:14} {row['fwd_ms']:7.3f} + {row['bwd_ms']:7.3f} ms"
        line += f" (host {row['host_fwd_ms']:.2f} + {row['host_bwd_ms']:.2f})"
        to_hf, to_c0 = row["ratio_to_hf"], row["bwd_ratio_to_c0"]
        line += "" if to_hf is None else f"  /hf {to_hf:5.2f}"
        if is_ours and row["rate"] == 0:
            bar = _AGAINST_HF_QWEN3 if row["model"] == _QWEN3 else _AGAINST_HF
            line += f" {verdict(to_hf, bar)}"
        if is_ours and row["rate"] > 0:
            line += f"  bwd/C0 {to_c0:5.2f} {verdict(to_c0, _BACKWARD[row['rate']])}"
        lines.append(line)
        if row["score_select_pack_ms"] is not None:
            share = row["share_of_c0_bwd"]
            parts = ", ".join(f"{n} {1e3 * ms:.0f}" for n, ms in row["stages_ms"].items())
            lines.append(
                f"  score, select, pack {1e3 * row['score_select_pack_ms']:.0f} us ({parts}): "
                f"{share:.1%} of C0's backward {verdict(share, _SELECTION)}"
            )
    return lines


def ep8(rows: Sequence[Row]) -> list[str]:
    """The slowest of eight ranks; a policy that makes no replica is ``fixed``, and left out."""
    return [
        f"{row['model']:14} {row['workload']} {row['placement']:12} C{100 * row['rate']:<3.0f} "
        f"imbalance {row['imbalance_fwd']:.2f} replicas {row['replicas']:2d} "
        f"{row['fwd_ms']:7.3f} + {row['bwd_ms']:7.3f} ms  bwd/C0 {row['bwd_ratio_to_c0']:.2f} "
        f"/fixed {row['ratio_to_fixed']:.2f}"
        for row in rows
        if row["placement"] == "fixed" or row["replicas"]
    ]


def memory(rows: Sequence[Row]) -> list[str]:
    """The allocator's peak over the model's."""
    lines = []
    for row in rows:
        ratio = row["ratio_to_model"]
        text, of_bar = "-", "not measured"
        if ratio is not None:
            text, of_bar = f"{ratio:.3f}", "ok" if abs(ratio - 1) <= _MEMORY else "MISSED"
        lines.append(
            f"{row['model']:14} C{100 * row['rate']:<3.0f} {row['draw']:8} {row['save']:11} "
            f"{row['model_bytes'] / 1e9:7.2f} GB  measured/model {text} within 5 % {of_bar}"
        )
    return lines


def syncs(rows: Sequence[Row]) -> list[str]:
    """Counted and allowed, by pass."""
    lines = []
    for row in rows:
        parts = []
        for phase in ("fwd", "bwd"):
            counted, allowed = row[f"{phase}_syncs"], row[f"{phase}_allowed"]
            parts.append(f"{phase} {'-' if counted is None else counted} "
                         f"{verdict(counted, ('<=', allowed))}")  # fmt: skip
        lines.append(f"draw {row['draw']:8} rows {row['rows']:6}  {'; '.join(parts)}")
    return lines


def parity(rows: Sequence[Row]) -> list[str]:
    """Worst relative errors."""
    lines = []
    for row in rows:
        if "missing" in row:
            continue
        what = f"{row['dtype']} {row['impl']:13} C{100 * row['rate']:<3.0f}"
        if row["dtype"] == "fp32":
            what += f" {row['selection']:7} {row['draw']:8}"
        line = f"{what} {row['gradient_error']:.1e} ({row['worst_tensor']})"
        if "bar" in row:
            line += f" {verdict(row['gradient_error'], ('<=', row['bar']))}"
        lines.append(line)
    return lines


def training(rows: Sequence[Row]) -> list[str]:
    """First and last losses."""
    lines = []
    for row in rows:
        line = f"C{100 * row['rate']:<3.0f} loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        if row["last_loss_cpu"] is not None:
            line += (
                f", CPU {row['last_loss_cpu']:.4f}; at most {row['largest_difference']:.1e} apart"
            )
        lines.append(line)
    return lines


SECTIONS: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "limit": limits,
    "kernel": kernels,
    "layer": layers,
    "ep8": ep8,
    "memory": memory,
    "syncs": syncs,
    "parity": parity,
    "training": training,
}
_TITLES = {
    "limit": "limits",
    "kernel": "kernels, share of the limit",
    "layer": "layer, forward + backward",
    "ep8": "EP8, each rank in turn, slowest rank; no communication",
    "memory": "peak memory of a layer call",
    "syncs": "device syncs of a layer call",
    "parity": "worst relative error of output and gradients",
    "training": "training, fp32",
}


def main(arguments: Sequence[str]) -> int:
    """Print the table of a file of rows."""
    (path,) = map(Path, arguments)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows:
        print("no rows were written")
        return 1
    about = {key: rows[-1][key] for key in ("device", "torch", "triton", "transformers", "commit")}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if rows[-1]["small"]:
        print("tiny shapes: the figures and their bars mean nothing")
    for kind, section in SECTIONS.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        if of_kind:
            print(f"\n== {_TITLES[kind]}")
            print("\n".join(section(of_kind)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
