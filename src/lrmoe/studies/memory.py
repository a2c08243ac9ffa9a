"""``lrmoe study memory``: what each part of the method takes off a layer call and off a step.

By the planner's memory model, with the policies' own plans and expected token rows; no clock. One
thing is changed at a time, from fixed ownership with a row per pair to ours, so that every
difference has one cause. The bound is what a rank would need if pairs were spread perfectly evenly
without a single replica.

Shape letters: W = ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lrmoe.bench.arguments import parse_settings
from lrmoe.cli import write_json
from lrmoe.cluster.cost import Rows
from lrmoe.cluster.models import model_shape
from lrmoe.planner import Budgets, Plan, PlanProblem, plan
from lrmoe.planner.memory import LayerShape, memory_items
from lrmoe.planner.workloads import FAMILIES, routed_counts

_GIB = 1 << 30
_PAPER_GIB = 5.44
ITEMS = (
    "home_weights", "gradients", "replica_weights", "replica_gradients", "staging",
    "dispatch_rows", "saved_state", "payload_rows", "workspace",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStudy:
    """What is compared.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    model: str = "qwen3-30b-a3b"
    """A preset, or a config.json."""
    ranks: int = 8
    tokens: int = 8192
    """Per rank."""
    imbalance: float = 2.0
    """Pairs of the busiest home rank over the mean."""
    family: str = "clustered"
    layers: int = 4
    """Different routings of one seed, of which the mean is taken."""
    seeds: tuple[int, ...] = (0, 1, 2)
    slots: int = 2

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        if self.family not in FAMILIES:
            raise ValueError(
                f"family={self.family!r}: allowed are {', '.join(map(repr, FAMILIES))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the layer."""

    name: str
    placement: str = "fixed"
    rate: str = "0"
    save: str = "activations"
    draw: str = "backward"
    one_row_per_token: bool = True
    """De-duplication: a token travels once per rank, not once per pair."""


# Every arm differs in one thing from the one before it.
STEPS = (
    Arm(name="fixed, a row per pair", one_row_per_token=False),
    Arm(name="+ a row per token and rank"),
    Arm(name="+ balance (recalibrated)", placement="recalibrated"),
    Arm(name="+ C20", placement="recalibrated", rate="0.2"),
    Arm(name="+ C50 instead", placement="recalibrated", rate="0.5"),
    Arm(name="+ drawn in the forward pass", placement="recalibrated", rate="0.5", draw="forward"),
    Arm(name="+ save=inputs", placement="recalibrated", rate="0.5", draw="forward", save="inputs"),
)
OTHERS = (
    Arm(name="ultraep", placement="ultraep"),
    Arm(name="ultraep C20", placement="ultraep", rate="0.2"),
    Arm(name="ultraep C50", placement="ultraep", rate="0.5"),
    Arm(name="recalibrated C20, save=inputs", placement="recalibrated", rate="0.2", save="inputs"),
    Arm(name="recalibrated C20, drawn early", placement="recalibrated", rate="0.2", draw="forward"),
)


def run(study: MemoryStudy) -> list[dict[str, Any]]:
    """A row for every arm: bytes of the fullest rank, means over layers and seeds."""
    return [_row(study, arm, section) for section, arm in _arms()]


def _arms() -> Iterator[tuple[str, Arm]]:
    yield from (("step", arm) for arm in STEPS)
    yield from (("other", arm) for arm in OTHERS)


def _row(study: MemoryStudy, arm: Arm, section: str) -> dict[str, Any]:
    model = model_shape(study.model)
    shape = model.layer_shape(
        study.ranks,
        study.tokens,
        save=arm.save,
        draw=arm.draw,
        has_replicas=arm.placement != "fixed",
    )
    sums = dict.fromkeys((*ITEMS, "layer_call", "whole_step", "bound_layer_call"), 0.0)
    replicas, n = 0, 0
    for seed in study.seeds:
        for layer in range(study.layers):
            made = _plan(study, arm, shape, layer, seed)
            rows = Rows.expected(
                made, np.full(study.ranks, study.tokens), shape.top_k, study.ranks
            ).received_2W
            if not arm.one_row_per_token:
                rows = _pairs(made, study.ranks)
            items = memory_items(shape, made, np.ceil(rows).astype(np.int64))
            worst = int(items.layer_call.argmax())
            for name in ITEMS:
                sums[name] += int(getattr(items, f"{name}_W")[worst])
            sums["layer_call"] += int(items.layer_call[worst])
            sums["whole_step"] += int(items.whole_step.max())
            sums["bound_layer_call"] += _bound(shape, made, rows)
            replicas, n = replicas + made.num_replicas, n + 1
    means = {f"{name}_bytes": total / n for name, total in sums.items()}
    return {"section": section, **asdict(arm), "replicas": replicas / n, **means}


def _plan(study: MemoryStudy, arm: Arm, shape: LayerShape, layer: int, seed: int) -> Plan:
    counts_WE = routed_counts(
        study.family,
        study.ranks,
        shape.experts,
        study.imbalance,
        tokens=study.tokens,
        top_k=shape.top_k,
        layer=layer,
        seed=seed,
    )
    return plan(
        PlanProblem(
            counts_WE=counts_WE,
            rate=Fraction(arm.rate),
            placement=arm.placement,
            budgets=Budgets(slots=study.slots),
            top_k=shape.top_k,
        )
    )


def _pairs(made: Plan, num_ranks: int) -> Any:
    """Pairs of every rank in both passes."""
    kept_V = made.quota_E[made.instance_expert_V] if made.backward_V is None else made.backward_V
    passes = (made.forward_WV.sum(0), kept_V)
    return np.stack([np.bincount(made.instance_rank_V, p, num_ranks) for p in passes])


def _bound(shape: LayerShape, made: Plan, rows_2W: Any) -> float:
    """The layer call of every rank if pairs and rows were level, without replicas."""
    pairs_2W = _pairs(made, shape.ranks)
    even = replace(shape, has_replicas=False)
    best = 0.0
    (kept_rows, kept), (rows, pairs) = (
        (float(rows_2W[i].mean()), float(pairs_2W[i].mean())) for i in (1, 0)
    )
    saved_rows, saved_pairs = (kept_rows, kept) if shape.draw == "forward" else (rows, pairs)
    home = shape.experts // shape.ranks * shape.expert_bytes
    for moment in even.moments():
        of_rows, of_pairs = (kept_rows, kept) if moment.is_backward else (rows, pairs)
        size = float((1 + moment.gradients) * home + shape.source_bytes)
        size += of_rows * moment.row + of_pairs * (moment.pair + moment.part)
        if moment.has_saved:
            size += saved_rows * shape.row_bytes + saved_pairs * shape.saved_pair_bytes
        best = max(best, size)
    return best


def print_rows(study: MemoryStudy, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """The rows as a table in GiB."""
    table = Table(
        title=f"{study.model}, {study.ranks} ranks, {study.tokens} tokens each, imbalance "
        f"{study.imbalance:g}: GiB of the fullest rank, by the memory model (simulated)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for name in ("layer call", "change", "bound", "weights", "grads", "replicas", "rows", "saved",
                 "payload", "work", "whole step"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows:
        gib = {name: row[f"{name}_bytes"] / _GIB for name in ITEMS}
        call = row["layer_call_bytes"] / _GIB
        change = ""
        if row["section"] == "step" and before is not None:
            change = f"{call - before:+.2f}"
        before = call
        replicas = gib["replica_weights"] + gib["replica_gradients"] + gib["staging"]
        cells = (
            f"{call:.2f}", change, f"{row['bound_layer_call_bytes'] / _GIB:.2f}",
            *(f"{v:.2f}" for v in (
                gib["home_weights"], gib["gradients"], replicas, gib["dispatch_rows"],
                gib["saved_state"], gib["payload_rows"], gib["workspace"],
                row["whole_step_bytes"] / _GIB,
            )),
        )  # fmt: skip
        table.add_row(row["name"], *cells, end_section=row is rows[len(STEPS) - 1])
    console.print(table)
    console.print(
        f"The paper's subtotal is {_PAPER_GIB} GiB, 57.8 % below Megatron-LM. whole step: all "
        "layers' weights, gradients, optimizer state and saved state, one layer at its peak.",
        style="dim",
    )


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe study memory``; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    parsed = parse_settings(
        MemoryStudy, "lrmoe study memory", "Where the memory of a layer call goes.", arguments
    )
    if parsed is None:
        return 0
    study, json_file = parsed
    rows = run(study)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    print_rows(study, rows, console)
    if json_file is not None:
        write_json(json_file, "study memory", asdict(study), rows)
    return 0
