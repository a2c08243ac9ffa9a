"""``lrmoe study systems``: the paper's system figures, simulated, beside the paper's numbers.

Sections (the ``section`` of a row):

- ``main``: every policy at C0, ours at C20 and C50, both models, every seed, all layers: latency
  and memory breakdown (the paper's figures 7 and 8, Table 1 at equal numbers of steps).
- ``pressure``: 1 to 20 times the tokens: effective throughput and replicas (figure 6).
- ``imbalance``, ``drift``, ``jitter``: the first model over the routing's skew and change.
- ``slots``: over the replica slots that a policy may use.
- ``hardware``: the same on other GPUs, and on one whose links cost nothing.
- ``scaling``: EP 8 to 1,024 in nodes of 8, as many experts as ranks beyond 128.

The settings below were committed before any policy was run with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lrmoe.bench.arguments import parse_settings
from lrmoe.cluster.command import PARTS, parse_bytes
from lrmoe.cluster.hardware import Hardware, load_hardware
from lrmoe.cluster.models import ModelShape, model_shape
from lrmoe.cluster.replay import Cluster, arm, generated, replay
from lrmoe.cluster.workloads import Workload
from lrmoe.config import Recalibration
from lrmoe.planner import PLACEMENTS

Row = dict[str, Any]
PAPER = {
    "backward below fixed (Megatron-LM)": 0.572,
    "backward below symi": 0.579,
    "backward below ultraep": 0.227,
    "effective throughput at 20x": 1.0,
    "memory subtotal below fixed": 0.578,
    "memory subtotal, GiB": 5.44,
}
_LARGE_RANKS = 64  # above, peers whose planning takes seconds are left out
_LARGE = ("fixed", "ultraep", "recalibrated")
_LARGEST_RATE = 1e18
_GIB = 1 << 30
# What a memory subtotal is made of.
_MEMORY = (
    "home_weights", "replicas", "staging", "dispatch_rows", "saved_state", "payload_rows",
    "workspace",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Systems:
    """What is simulated.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    models: tuple[str, ...] = ("qwen3-30b-a3b", "glm4.5-106b-a12b")
    hardware: str = "h100"
    ranks: int = 8
    tokens: int = 8192
    """Per rank; the paper's sequence length."""
    memory: str = "80GiB"
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 8
    layers: int | None = None
    """``None``: all of the model in ``main``, eight elsewhere."""
    imbalance: float = 1.9
    jitter: float = 0.3
    drift: float = 0.05
    slots: int = 2
    rates: tuple[float, ...] = (0.2, 0.5)
    """Of ours, beside 0."""
    pressures: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 20)
    imbalances: tuple[float, ...] = (1.0, 1.3, 1.6, 1.9, 2.5, 3.0, 4.0)
    drifts: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.3, 1.0)
    jitters: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.6, 1.0)
    slot_counts: tuple[int, ...] = (0, 1, 2, 4, 8)
    scales: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    sections: tuple[str, ...] = (
        "main", "pressure", "imbalance", "drift", "jitter", "slots", "hardware", "scaling",
    )  # fmt: skip
    out: str = "systems"
    """Directory for rows, tables and figures."""

    def __post_init__(self) -> None:
        for section in self.sections:
            if section not in SECTIONS:
                known = ", ".join(map(repr, SECTIONS))
                raise ValueError(f"sections={section!r}: allowed are {known}")
        for name in ("ranks", "tokens", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        parse_bytes("memory", self.memory)

    def cluster(self, model: ModelShape, **changes: Any) -> Cluster:
        """The paper's eight GPUs, or a variation."""
        values: dict[str, Any] = {
            "model": model,
            "hardware": load_hardware(self.hardware),
            "ranks": self.ranks,
            "memory_bytes": parse_bytes("memory", self.memory),
        }
        return Cluster(**(values | changes))

    def workload(self, **changes: Any) -> Workload:
        """Clustered hot experts, with the home imbalance at which the figures are compared."""
        values: dict[str, Any] = {
            "imbalance": self.imbalance, "jitter": self.jitter, "drift": self.drift,
        }  # fmt: skip
        return Workload(**(values | changes))

    def ours(self, **changes: Any) -> list[Recalibration]:
        """Our planner at every rate; above 0 also with the other quotas, and drawn early."""
        settings: dict[str, Any] = {"slots": self.slots} | changes
        plain = [arm("recalibrated", rate, **settings) for rate in (0.0, *self.rates)]
        level = [arm("recalibrated", rate, quotas="makespan", **settings) for rate in self.rates]
        early = [arm("recalibrated", rate, draw="forward", **settings) for rate in self.rates]
        return plain + level + early

    def few(self, **changes: Any) -> list[Recalibration]:
        """The arms that the paper compares."""
        settings: dict[str, Any] = {"slots": self.slots} | changes
        peers = [arm(policy, 0.0, **settings) for policy in ("fixed", "symi", "ultraep")]
        return peers + self.ours(**changes)

    def every(self) -> list[Recalibration]:
        """All policies."""
        peers = [
            arm(policy, 0.0, slots=self.slots) for policy in PLACEMENTS if policy != "recalibrated"
        ]
        return peers + self.ours()


def _simulate(
    settings: Systems,
    section: str,
    cluster: Cluster,
    arms: Sequence[Recalibration],
    workload: Workload,
    seed: int,
    **what: Any,
) -> list[Row]:
    tokens = what.pop("tokens", settings.tokens)
    layers = what.pop("layers", settings.layers or 8)
    calls = generated(
        workload, cluster, tokens=tokens, layers=layers, steps=what.pop("steps", settings.steps),
        seed=seed,
    )  # fmt: skip
    head = {
        "section": section,
        "workload": workload.kind,
        "imbalance": workload.imbalance,
        "jitter": workload.jitter,
        "drift": workload.drift,
        "seed": seed,
        "tokens": tokens,
        **what,
    }
    return [head | row for row in replay(cluster, arms, calls)]


def _models(settings: Systems) -> Iterator[tuple[ModelShape, int]]:
    for name in settings.models:
        for seed in settings.seeds:
            yield model_shape(name), seed


def main_section(settings: Systems) -> Iterator[Row]:
    """Every policy on every layer."""
    for model, seed in _models(settings):
        yield from _simulate(
            settings, "main", settings.cluster(model), settings.every(), settings.workload(), seed,
            layers=settings.layers or model.moe_layers,
        )  # fmt: skip


def pressure(settings: Systems) -> Iterator[Row]:
    """More tokens per rank."""
    for model, seed in _models(settings):
        for factor in settings.pressures:
            arms = settings.every() + settings.ours(slots=1)
            yield from _simulate(
                settings, "pressure", settings.cluster(model), arms, settings.workload(), seed,
                tokens=settings.tokens * factor, pressure=factor,
            )  # fmt: skip


def _routing(name: str, values: Callable[[Systems], Sequence[float]]) -> Section:
    def section(settings: Systems) -> Iterator[Row]:
        model = model_shape(settings.models[0])
        for seed in settings.seeds:
            for value in values(settings):
                workload = settings.workload(**{name: value})
                yield from _simulate(
                    settings, name, settings.cluster(model), settings.few(), workload, seed
                )

    return section


def slots(settings: Systems) -> Iterator[Row]:
    """More or fewer replica slots."""
    model = model_shape(settings.models[0])
    for seed in settings.seeds:
        for count in settings.slot_counts:
            yield from _simulate(
                settings, "slots", settings.cluster(model), settings.few(slots=count),
                settings.workload(), seed,
            )  # fmt: skip


def hardware(settings: Systems) -> Iterator[Row]:
    """Other GPUs, and links that cost nothing."""
    chosen = load_hardware(settings.hardware)
    free_links = replace(
        chosen,
        name=f"{chosen.name}, free links",
        intra_bytes_per_s=_LARGEST_RATE,
        inter_bytes_per_s=_LARGEST_RATE,
        collective_s=0.0,
    )
    only_gemms = replace(
        free_links, name=f"{chosen.name}, GEMMs alone", row_bytes_per_s=_LARGEST_RATE
    )
    every: list[Hardware] = [*map(load_hardware, ("a100", "h100", "h200")), free_links, only_gemms]
    for model, seed in _models(settings):
        for gpu in every:
            yield from _simulate(
                settings, "hardware", settings.cluster(model, hardware=gpu), settings.few(),
                settings.workload(), seed,
            )  # fmt: skip


def scaling(settings: Systems) -> Iterator[Row]:
    """More ranks, in nodes of eight."""
    base = model_shape(settings.models[0])
    for ranks in settings.scales:
        model = replace(base, experts=max(base.experts, ranks))
        arms = settings.every()
        if ranks > _LARGE_RANKS:
            arms = [config for config in arms if config.placement in _LARGE]
        is_large = ranks > 256
        yield from _simulate(
            settings, "scaling", settings.cluster(model, ranks=ranks), arms, settings.workload(),
            settings.seeds[0], layers=1 if is_large else 4, steps=4,
            experts=model.experts,
        )  # fmt: skip


Section = Callable[[Systems], Iterator[Row]]
SECTIONS: dict[str, Section] = {
    "main": main_section,
    "pressure": pressure,
    "imbalance": _routing("imbalance", lambda settings: settings.imbalances),
    "drift": _routing("drift", lambda settings: settings.drifts),
    "jitter": _routing("jitter", lambda settings: settings.jitters),
    "slots": slots,
    "hardware": hardware,
    "scaling": scaling,
}


def label(row: Row) -> str:
    """An arm's name in tables and figures."""
    text = str(row["policy"])
    if row["rate"]:
        text += f" C{100 * row['rate']:.0f}"
    if row["quotas"] == "makespan":
        text += " makespan"
    if row["draw"] == "forward":
        text += " drawn early"
    return text


def means(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """Rows with the same keys as one, numbers averaged (over seeds), in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return {
        key: {
            name: fmean(row.get(name, 0.0) for row in group)
            if isinstance(value, int | float) and not isinstance(value, bool)
            else value
            for name, value in group[0].items()
        }
        for key, group in groups.items()
    }


_ARM = ("policy", "rate", "quotas", "draw")


def below(rows: Sequence[Row], what: str, ours: tuple[Any, ...], peer: str) -> tuple[float, float]:
    """How far an arm of ours is below a peer at C0: the mean over seeds, and half their range."""
    shares = []
    for seed in sorted({row["seed"] for row in rows}):
        of_arm = {tuple(row[key] for key in _ARM): row for row in rows if row["seed"] == seed}
        shares.append(1 - of_arm[ours][what] / of_arm[(peer, 0.0, "rate", "backward")][what])
    return fmean(shares), (max(shares) - min(shares)) / 2


def tables(settings: Systems, rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    parts = []
    of = {section: [row for row in rows if row["section"] == section] for section in SECTIONS}
    if of["main"]:
        parts.append(_headline(settings, of["main"]))
        for model in settings.models:
            name = model_shape(model).name
            parts.append(_breakdown(name, [row for row in of["main"] if row["model"] == name]))
    if of["pressure"]:
        parts.append(_pressure_table(settings, of["pressure"]))
    for section, key in (
        ("imbalance", "imbalance"), ("drift", "drift"), ("jitter", "jitter"), ("slots", "slots"),
        ("hardware", "hardware"), ("scaling", "ranks"),
    ):  # fmt: skip
        if of[section]:
            parts.append(_curve_table(section, key, of[section]))
    return "\n".join(parts)


def _markdown(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [f"**{title}** (simulated)", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * len(head))
    lines += ["| " + " | ".join(cells) + " |" for cells in body]
    return "\n".join([*lines, ""])


def _headline(settings: Systems, rows: Sequence[Row]) -> str:
    body = []
    names = [model_shape(model).name for model in settings.models]
    for rate in settings.rates:
        for quotas in ("rate", "makespan"):
            ours = ("recalibrated", rate, quotas, "backward")
            for what, text, peers in (
                ("bwd_ms", "backward", ("fixed", "symi", "ultraep")),
                ("makespan_ms", "layer time", ("fixed", "symi", "ultraep")),
                ("memory_subtotal_bytes", "memory subtotal", ("fixed",)),
            ):
                for peer in peers:
                    cells = [f"{text}, C{100 * rate:.0f} {quotas}, below {peer}"]
                    for name in names:
                        mine = [row for row in rows if row["model"] == name]
                        mean, half = below(mine, what, ours, peer)
                        cells.append(f"{mean:.1%} +- {half:.1%}")
                    body.append(cells)
        early = ("recalibrated", rate, "rate", "forward")
        cells = [f"memory subtotal, C{100 * rate:.0f} drawn early, below fixed"]
        for name in names:
            mine = [row for row in rows if row["model"] == name]
            mean, half = below(mine, "memory_subtotal_bytes", early, "fixed")
            cells.append(f"{mean:.1%} +- {half:.1%}")
        body.append(cells)
    return _markdown("Ours against peers at C0", ["", *names], body)


def _breakdown(name: str, rows: Sequence[Row]) -> str:
    body = []
    for row in means(rows, _ARM).values():
        cells = [label(row)]
        cells += [f"{row[f'imbalance_{which}']:.2f}" for which in ("fwd", "bwd")]
        cells += [f"{row['fwd_ms']:.2f}", f"{row['bwd_ms']:.2f}"]
        cells += [f"{row[f'bwd_{part}_ms']:.2f}" for part in PARTS]
        cells += [f"{row['plan_ms']:.2f}", f"{row['replicas']:.1f}"]
        cells += [f"{row['memory_subtotal_bytes'] / _GIB:.2f}"]
        cells += [f"{row[f'memory_{item}_bytes'] / _GIB:.2f}" for item in _MEMORY]
        body.append(cells)
    head = ["", "imb fwd", "bwd", "fwd ms", "bwd ms", *(f"bwd {part}" for part in PARTS)]
    head += ["plan", "replicas", "GiB", "home", "replicas", "staging", "dispatch"]
    head += ["saved", "payload", "work"]
    return _markdown(f"{name}: a layer call", head, body)


def _pressure_table(settings: Systems, rows: Sequence[Row]) -> str:
    found = means(rows, ("model", *_ARM, "slots", "pressure"))
    arms = list(dict.fromkeys(key[:-1] for key in found))
    body = []
    for key in arms:
        of_arm = [found[(*key, factor)] for factor in settings.pressures]
        if of_arm[0]["quotas"] == "makespan":
            continue
        slots = of_arm[0]["slots"]
        cells = [str(key[0]), label(of_arm[0]), "" if slots is None else f"{slots:g}"]
        cells += [
            f"{row['effective_throughput']:.0%} / {row['effective_throughput_step']:.0%}"
            for row in of_arm
        ]
        cells += [f"{of_arm[-1]['replicas']:.1f}", f"{of_arm[-1]['replicas_most']:.0f}"]
        body.append(cells)
    head = ["model", "", "slots", *(f"{factor}x" for factor in settings.pressures),
            "replicas at the last", "most"]  # fmt: skip
    title = "Share of the batch that fits: one layer's buffers / all layers' saved state"
    return _markdown(title, head, body)


def _curve_table(section: str, key: str, rows: Sequence[Row]) -> str:
    # When the draw is made changes what is saved, not what is timed.
    found = means([row for row in rows if row["draw"] == "backward"], ("model", key, *_ARM))
    values = list(dict.fromkeys((k[0], k[1]) for k in found if k[1] is not None))
    arms = list(dict.fromkeys(k[2:] for k in found))
    body = []
    for model, value in values:
        cells = [str(model), f"{value:g}" if isinstance(value, int | float) else str(value)]
        for one in arms:
            row = found.get((model, value, *one)) or found.get((model, None, *one))
            cells.append("" if row is None else f"{row['bwd_ms']:.2f} / {row['makespan_ms']:.2f}")
        body.append(cells)
    names = [label(dict(zip(_ARM, one, strict=True))) for one in arms]
    return _markdown(f"Backward / layer ms over {section}", ["model", key, *names], body)


def figures(settings: Systems, rows: Sequence[Row], out: Path) -> None:
    """The images of the result page."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    of = {section: [row for row in rows if row["section"] == section] for section in SECTIONS}
    names = [model_shape(model).name for model in settings.models]
    arms = list(dict.fromkeys(tuple(row[key] for key in _ARM) for row in rows))
    if of["main"]:
        figure, axes = plt.subplots(len(names), 2, figsize=(12, 4.2 * len(names)), squeeze=False)
        for panels, name in zip(axes, names, strict=True):
            mine = list(means([r for r in of["main"] if r["model"] == name], _ARM).values())
            for panel, phase in zip(panels, ("fwd", "bwd"), strict=True):
                _stack(panel, mine, [f"{phase}_{part}_ms" for part in PARTS], PARTS, 1.0)
                panel.set_title(f"{name}, {phase} pass, ms of a layer call (simulated)", fontsize=9)
        axes[0][0].legend(fontsize=7)
        _save(figure, out / "systems_latency.png")
        figure, axes = plt.subplots(1, len(names), figsize=(12, 4.5), squeeze=False)
        for panel, name in zip(axes[0], names, strict=True):
            mine = list(means([r for r in of["main"] if r["model"] == name], _ARM).values())
            _stack(panel, mine, [f"memory_{item}_bytes" for item in _MEMORY], _MEMORY, 1 / _GIB)
            panel.set_title(f"{name}, GiB of the fullest rank (simulated)", fontsize=9)
        axes[0][0].legend(fontsize=7)
        _save(figure, out / "systems_memory.png")
    if of["pressure"]:
        figure, axes = plt.subplots(1, len(names), figsize=(12, 4), sharey=True, squeeze=False)
        for panel, name in zip(axes[0], names, strict=True):
            mine = [
                row for row in of["pressure"]
                if row["model"] == name and row["slots"] != 1 and row["quotas"] == "rate"
                and row["draw"] == "backward"
            ]  # fmt: skip
            _lines(panel, mine, "pressure", "effective_throughput", arms)
            panel.set_xlabel("batch pressure (times 8,192 tokens per rank)")
            panel.set_title(f"{name} (simulated)", fontsize=9)
        axes[0][0].set_ylabel("effective throughput")
        axes[0][0].legend(fontsize=7)
        _save(figure, out / "systems_pressure.png")
    curves = [s for s in ("imbalance", "drift", "jitter", "slots") if of[s]]
    if curves:
        figure, axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.6), squeeze=False)
        for panel, section in zip(axes[0], curves, strict=True):
            _lines(panel, of[section], section, "bwd_ms", arms)
            panel.set_xlabel(section)
        axes[0][0].set_ylabel("backward pass, ms (simulated)")
        axes[0][0].legend(fontsize=6)
        _save(figure, out / "systems_sensitivity.png")
    if of["scaling"]:
        figure, axes = plt.subplots(1, 2, figsize=(11, 4))
        _lines(axes[0], of["scaling"], "ranks", "makespan_ms", arms)
        axes[0].set_ylabel("layer call, ms (simulated)")
        _lines(axes[1], of["scaling"], "ranks", "comm_ms", arms)
        axes[1].set_ylabel("of it communication, ms (simulated)")
        for panel in axes:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("expert-parallel ranks, nodes of 8")
        axes[1].legend(fontsize=6, loc="lower right")
        _save(figure, out / "systems_scaling.png")


def _stack(
    panel: Any, rows: Sequence[Row], keys: Sequence[str], names: Sequence[str], scale: float
) -> None:
    left = [0.0] * len(rows)
    for key, name in zip(keys, names, strict=True):
        widths = [scale * row.get(key, 0.0) for row in rows]
        panel.barh(range(len(rows)), widths, left=left, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    panel.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=7)
    panel.invert_yaxis()
    panel.grid(visible=True, axis="x", alpha=0.3)


def _lines(panel: Any, rows: Sequence[Row], x: str, y: str, arms: Sequence[Any]) -> None:
    """Lines over ``x``; an arm has the same colour in every panel, its place in ``arms``."""
    import matplotlib as mpl

    found = means([row for row in rows if row["draw"] == "backward"], (*_ARM, x))
    colours = mpl.color_sequences["tab20"]
    for one in dict.fromkeys(key[:-1] for key in found):
        points = sorted(
            (key[-1], row[y])
            for key, row in found.items()
            if key[:-1] == one and key[-1] is not None
        )
        if not points:  # a policy without slots is the same at all of them
            continue
        panel.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=3,
            color=colours[arms.index(one) % len(colours)],
            label=label(dict(zip(_ARM, one, strict=True))),
        )
    panel.grid(visible=True, alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(settings: Systems) -> list[Row]:
    """The rows of all sections."""
    from rich.console import Console

    rows: list[Row] = []
    with Console(stderr=True).status("simulating") as status:
        for section in settings.sections:
            status.update(f"simulating {section}")
            rows += SECTIONS[section](settings)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe study systems``; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    import sys

    from lrmoe.cli import write_json

    parsed = parse_settings(
        Systems, "lrmoe study systems", "Simulated: the paper's system figures.", arguments
    )
    if parsed is None:
        return 0
    settings, json_file = parsed
    rows = run(settings)
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rows.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    text = tables(settings, rows)
    (out / "tables.md").write_text(text)
    figures(settings, rows, out)
    sys.stdout.write(text + f"\n{out}/rows.jsonl, tables.md, *.png\n")
    if json_file is not None:
        write_json(json_file, "study systems", asdict(settings), rows)
    return 0
