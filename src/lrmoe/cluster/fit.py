"""``lrmoe plan``: does a training job fit its GPUs, at which C, with which replicas.

The layer's part is what training's planner says: every sampled layer call is planned in mode
``planned`` with the memory budget that the rest of the model leaves, so it keeps all pairs unless
memory forces drops. The rest is counted from the architecture:

- weights, gradients and optimizer state, sharded evenly over all ranks (FSDP, experts over EP
  first);
- what FSDP gathers: embeddings and output head, one layer's dense weights, and where the ranks
  outnumber the EP group, one layer's home experts, their weights and their gradients;
- activations: with checkpointing one hidden state per layer, otherwise about twelve and the
  attention's; one layer's attention; logits in bf16 and their gradient in float32.

Shape letters: W = expert-parallel ranks, C = layer calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lrmoe.bench.arguments import parse_settings
from lrmoe.cluster.command import parse_bytes
from lrmoe.cluster.cost import Rows
from lrmoe.cluster.models import ModelShape, model_shape
from lrmoe.cluster.workloads import Workload, layer_counts
from lrmoe.planner import PLACEMENTS, Budgets, InfeasiblePlan, PlanProblem, plan
from lrmoe.planner.memory import memory_costs, memory_items, saved_costs
from lrmoe.planner.problem import Int, MemoryCosts

EXIT_INFEASIBLE = 3
ITEMS = (
    "weights", "gradients", "optimizer", "gathered", "activations", "token_buffers", "replicas",
    "staging", "reserve",
)  # fmt: skip
_GIB = 1 << 30
_BF16, _FLOAT32 = 2, 4
_LEAST_TOKENS = 256
# Saved hidden states of a layer without checkpointing: norms, residuals, attention's in and out.
_SAVED_STATES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The job, and what may be done to make it fit.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    model: str
    """A preset, or the config.json of a Qwen3-MoE or GLM-4-MoE model."""
    ranks: int = 8
    """GPUs, which share the dense parameters (FSDP)."""
    ep: int | None = None
    """Of them, those that share the experts; ``None``: as many as divide both."""
    tokens: int = 8192
    """Per rank and micro-batch."""
    memory: str = "80GiB"
    """Of one GPU."""
    skew: float = 2.0
    """Expected max / mean of the routed pairs over the ranks, at home."""
    worst_skew: float = 4.0
    """The worst to be ready for; capped at what top-k routing can reach."""
    c_max: float = 0.2
    """Largest share of pairs that may lose their backward pass."""
    placement: str = "recalibrated"
    slots: int = 2
    """Replica slots per rank."""
    save: str = "activations"
    draw: str = "backward"
    checkpointing: bool = True
    """Activation checkpointing of every layer."""
    optimizer_bytes: int = 12
    """Of a parameter on the GPU; 0 where the optimizer's state is offloaded."""
    reserve: str = "2GiB"
    """For the CUDA context, communication buffers and fragmentation."""
    samples: int = 8
    """Layer calls that are planned for each skew."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        for name in ("slots", "optimizer_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 0")
        if self.ep is not None and (self.ep < 1 or self.ranks % self.ep):
            raise ValueError(f"ep={self.ep}: must divide ranks={self.ranks}")
        if not 1 <= self.skew <= self.worst_skew:
            raise ValueError(
                f"skew={self.skew}, worst_skew={self.worst_skew}: "
                "allowed is 1 <= skew <= worst_skew"
            )
        if not 0 <= self.c_max < 1:
            raise ValueError(f"c_max={self.c_max}: allowed is 0 <= c_max < 1")
        if self.placement not in PLACEMENTS:
            known = ", ".join(map(repr, PLACEMENTS))
            raise ValueError(f"placement={self.placement!r}: allowed are {known}")
        for name in ("memory", "reserve"):
            parse_bytes(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a job fits, at one skew."""

    fits: bool
    reason: str
    """Why not; empty where it fits."""
    rate: float
    """Share of the pairs that memory forces to drop, the worst call."""
    replicas: int
    """Instances beyond home over the ranks of an EP group, the worst call."""
    items: dict[str, int]
    """Bytes of the fullest rank, by the names of ``ITEMS``."""

    @property
    def total(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.items.values())


def resolved_ep(settings: PlanSettings, model: ModelShape) -> int:
    """``ep`` with its default filled in: the most ranks that the experts divide over.

    Raises:
        ValueError: if the experts do not divide over the ranks of ``ep``.
    """
    if settings.ep is None:
        sizes = (n for n in range(settings.ranks, 0, -1) if settings.ranks % n == 0)
        return next(n for n in sizes if model.experts % n == 0)
    if model.experts % settings.ep:
        raise ValueError(f"ep={settings.ep}: must divide the model's {model.experts} experts")
    return settings.ep


def fit(settings: PlanSettings, model: ModelShape, skew: float) -> Fit:
    """What training with these settings needs at a rank imbalance."""
    ep = resolved_ep(settings, model)
    highest = ep * min(1.0, model.experts // ep / model.top_k)
    items = _state_items(settings, model, ep)
    shape = model.layer_shape(
        ep,
        settings.tokens,
        save=settings.save,
        draw=settings.draw,
        has_replicas=settings.placement != "fixed",
    )
    alive = 1 if settings.checkpointing else model.moe_layers
    # All layers alike: what those that are alive have saved counts in every layer's budget.
    saved = saved_costs(shape)
    memory = tuple(
        replace(
            moment,
            fixed=alive * shape.source_bytes,
            forward_row=moment.forward_row + (alive - 1) * saved.forward_row,
            forward_pair=moment.forward_pair + (alive - 1) * saved.forward_pair,
            kept_row=moment.kept_row + (alive - 1) * saved.kept_row,
            kept_pair=moment.kept_pair + (alive - 1) * saved.kept_pair,
        )
        for moment in memory_costs(shape)
    )
    left = parse_bytes("memory", settings.memory) - sum(items.values())
    worst = Fit(fits=True, reason="", rate=0.0, replicas=0, items=items)
    if left < 0:
        reason = _overfull(items, parse_bytes("memory", settings.memory), settings.ranks)
        worst = replace(worst, fits=False, reason=reason)
    dropped, replicas, sizes = 0.0, 0, (0, 0, 0)
    for problem in _problems(settings, model, ep, min(skew, highest), memory):
        try:
            made = plan(
                replace(problem, budgets=replace(problem.budgets, memory_bytes=max(left, 0)))
            )
        except InfeasiblePlan as error:
            made = plan(problem)
            if worst.fits:
                worst = replace(worst, fits=False, reason=str(error))
        tokens_W = np.full(ep, settings.tokens)
        rows = Rows.expected(made, tokens_W, model.top_k, ep)
        of_call = memory_items(
            shape, made, np.ceil(rows.received_2W).astype(np.int64), has_home_gradients=False
        )
        buffers_W = (alive - 1) * of_call.held_W + of_call.token_buffers
        replica_W = of_call.replica_weights_W + of_call.replica_gradients_W
        at = int((buffers_W + replica_W + of_call.staging_W).argmax())
        here = (int(buffers_W[at]), int(replica_W[at]), int(of_call.staging_W[at]))
        sizes = max(sizes, here, key=sum)
        dropped = max(dropped, 1 - int(made.quota_E.sum()) / int(made.forward_WV.sum()))
        replicas = max(replicas, made.num_replicas)
    parts = dict(zip(("token_buffers", "replicas", "staging"), sizes, strict=True))
    return replace(worst, rate=dropped, replicas=replicas, items=items | parts)


def _state_items(settings: PlanSettings, model: ModelShape, ep: int) -> dict[str, int]:
    """Everything that does not depend on the routing."""
    ranks, T, D = settings.ranks, settings.tokens, model.hidden
    parameters = model.expert_parameters + model.other_parameters
    embeddings = model.vocab * D * (1 if model.is_tied else 2)
    layer = model.attention_parameters + 3 * D * max(
        model.shared_ffn, model.dense_ffn * (model.dense_layers > 0)
    )
    gathered = _BF16 * (embeddings + layer) if ranks > 1 else 0
    if ranks > ep:
        gathered += 2 * _BF16 * (model.experts // ep) * 3 * D * model.ffn
    attention = T * (2 * model.heads + 2 * model.kv_heads) * model.head_dim * _BF16
    if settings.checkpointing:
        activations = model.layers * T * D * _BF16 + attention + _SAVED_STATES * T * D * _BF16
    else:
        activations = model.layers * (_SAVED_STATES * T * D * _BF16 + attention)
        activations += model.layers * T * 3 * model.shared_ffn * _BF16
    activations += T * model.vocab * (_BF16 + _FLOAT32)
    return {
        "weights": _BF16 * parameters // ranks,
        "gradients": _BF16 * parameters // ranks,
        "optimizer": settings.optimizer_bytes * parameters // ranks,
        "gathered": gathered,
        "activations": activations,
        "reserve": parse_bytes("reserve", settings.reserve),
    }


def _problems(
    settings: PlanSettings, model: ModelShape, ep: int, skew: float, memory: tuple[MemoryCosts, ...]
) -> Iterator[PlanProblem]:
    """Layer calls to plan: another layer each, with the history of its own."""
    has_slots = settings.placement not in ("fixed", "fastermoe")
    for layer in range(settings.samples):
        counts_CWE: Int = layer_counts(
            Workload(kind="clustered", imbalance=skew),
            ep,
            model.experts,
            tokens=settings.tokens,
            top_k=model.top_k,
            layer=layer,
            steps=2,
            seed=settings.seed,
        )
        yield PlanProblem(
            counts_WE=counts_CWE[1],
            past_counts_SWE=counts_CWE[:1],
            rate=Fraction(0),
            c_max=Fraction(str(settings.c_max)),
            quotas="planned",
            placement=settings.placement,
            budgets=Budgets(slots=settings.slots if has_slots else None),
            memory=memory,
            top_k=model.top_k,
        )


def _overfull(items: dict[str, int], memory: int, ranks: int) -> str:
    needed, shared = sum(items.values()), ("weights", "gradients", "optimizer")
    sharded = sum(items[name] for name in shared)
    text = (
        f"before any token is routed {needed / _GIB:.1f} GiB of {memory / _GIB:.1f} GiB are needed "
        f"({', '.join(f'{name} {items[name] / _GIB:.1f}' for name in items)})"
    )
    room = memory - (needed - sharded)
    if room > 0:
        text += (
            f"; weights, gradients and optimizer fit from {-(-sharded * ranks // room)} ranks on"
        )
    return text


def recommend(settings: PlanSettings, model: ModelShape) -> dict[str, Any] | None:
    """The nearest settings that fit at the expected skew; ``None`` if nothing does.

    Micro-batches as large as asked for come first, then fewer drops, then less recomputation, then
    larger EP groups.
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    sizes = [n for n in range(1, settings.ranks + 1) if settings.ranks % n == 0]
    tokens = settings.tokens
    while not found and tokens >= min(_LEAST_TOKENS, settings.tokens):
        for ep in (n for n in sizes if model.experts % n == 0):
            for checkpointing, save in (
                (False, "activations"),
                (True, "activations"),
                (True, "inputs"),
            ):
                trial = replace(
                    settings, ep=ep, tokens=tokens, checkpointing=checkpointing, save=save
                )
                result = fit(trial, model, settings.skew)
                if result.fits:
                    rank = (round(result.rate, 4), checkpointing, save == "inputs", -ep)
                    choice = {
                        "ep": ep,
                        "fsdp": settings.ranks,
                        "tokens": tokens,
                        "accumulation": -(-settings.tokens // tokens),
                        "rate": result.rate,
                        "checkpointing": checkpointing,
                        "save": save,
                        "total_bytes": result.total,
                    }
                    found.append((rank, choice))
        tokens //= 2
    return min(found, key=lambda pair: pair[0])[1] if found else None


def run(settings: PlanSettings) -> list[dict[str, Any]]:
    """The result at the expected and at the worst skew."""
    model = model_shape(settings.model)
    ep = resolved_ep(settings, model)
    recommendation = recommend(settings, model)
    rows = []
    for name, skew in (("expected", settings.skew), ("worst", settings.worst_skew)):
        result = fit(settings, model, skew)
        rows.append(
            {
                "simulated": True,
                "model": model.name,
                "ranks": settings.ranks,
                "ep": ep,
                "tokens": settings.tokens,
                "skew_case": name,
                "skew": skew,
                "rate": result.rate,
                "fits": result.fits,
                "reason": result.reason,
                "replicas": result.replicas,
                **{f"{item}_bytes": result.items[item] for item in ITEMS},
                "total_bytes": result.total,
                "memory_bytes": parse_bytes("memory", settings.memory),
                "recommendation": recommendation,
            }
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe plan``; returns the exit code: 3 if the job does not fit at the expected skew.

    Raises:
        ValueError: for a mistake of the user.
    """
    from lrmoe.cli import write_json

    parsed = parse_settings(
        PlanSettings,
        "lrmoe plan",
        "Does a training job fit its GPUs, at which C, with which replicas? Simulated.",
        arguments,
    )
    if parsed is None:
        return 0
    settings, json_file = parsed
    rows = run(settings)
    print_rows(rows)
    if json_file is not None:
        write_json(json_file, "plan", asdict(settings), rows)
    return 0 if rows[0]["fits"] else EXIT_INFEASIBLE


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The memory table, the verdict and the recommendation on standard output."""
    console = Console(soft_wrap=True)
    first = rows[0]
    title = (
        f"simulated: {first['model']} on {first['ranks']} ranks (EP {first['ep']}), "
        f"{first['tokens']} tokens per rank; GiB of the fullest rank"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['skew_case']} skew {row['skew']:g}", justify="right")
    for item in ITEMS:
        table.add_row(
            item.replace("_", " "), *(f"{row[f'{item}_bytes'] / _GIB:.2f}" for row in rows)
        )
    table.add_section()
    table.add_row("total", *(f"{row['total_bytes'] / _GIB:.2f}" for row in rows))
    table.add_row("of", *(f"{row['memory_bytes'] / _GIB:.2f}" for row in rows))
    table.add_row("fits", *("yes" if row["fits"] else "no" for row in rows))
    table.add_row("dropped pairs (C)", *(f"{row['rate']:.1%}" for row in rows))
    table.add_row("replicas, all ranks", *(str(row["replicas"]) for row in rows))
    console.print(table)
    for reason in dict.fromkeys(row["reason"] for row in rows if not row["fits"]):
        console.print(f"does not fit: {reason}", highlight=False)
    choice = first["recommendation"]
    if choice is None:
        console.print("No micro-batch, EP size or recomputation makes it fit these ranks.")
        return
    console.print(
        f"recommended: ep {choice['ep']}, fsdp {choice['fsdp']}, micro-batches of "
        f"{choice['tokens']} tokens"
        + (f" ({choice['accumulation']} per step)" if choice["accumulation"] > 1 else "")
        + f", C {choice['rate']:.1%}, checkpointing {'on' if choice['checkpointing'] else 'off'}, "
        f"save {choice['save']}: {choice['total_bytes'] / _GIB:.1f} GiB",
        highlight=False,
    )
