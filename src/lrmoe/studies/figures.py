"""``lrmoe study figures``: every figure and table of the studies from their rows, one command."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lrmoe.studies import rows
from lrmoe.studies.convergence import describe
from lrmoe.studies.rows import Row, run_of
from lrmoe.studies.settings import Arm
from lrmoe.studies.shown import (
    FINAL_RULES,
    compared_protocols,
    is_control,
    is_final,
    is_plain,
    rule_name,
)
from lrmoe.studies.statistics import paired, race_ratios
from lrmoe.studies.tables import PEERS, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "sampled": "#3b6ea8",
    "sampled, strata": "#123f73",
    "sampled, text strata": "#1f8a8a",
    "sampled, neighbors": "#8a1f5a",
    "sampled, drawn forward": "#7fb2e5",
    "sampled, drawn forward, text strata": "#7fd0d0",
    "random_unbiased": "#5a9e6f",
    "random_unbiased, strata": "#2d6b41",
    "top": "#c8713c",
    "pooled, drawn forward": "#888888",
    "pooled-half, drawn forward": "#aaaaee",
    "random": "#b8a03c",
    "router": "#9467a8",
    "gradient": "#777777",
    "weighted_gradient": "#aaaaaa",
    "token_loss": "#c06080",
    "pooled": "#000000",
    "pooled-half": "#5555bb",
    "pooled-by-count": "#55bbbb",
    "levelled": "#dd4444",
    "levelled-half": "#ee8888",
    "covering": "#cc44cc",
    "predicted": "#996633",
    "predicted-half": "#339966",
}
# Rules of the figure over rates; the bars show all arms.
_RATE_RULES = ("sampled", "sampled, strata", "sampled, drawn forward", "random_unbiased", "top")
_PEER, _LOW_RATE = PEERS[0], 0.2
_GROUPS = {"down": "down projections", "all": "all parameters"}


def main(arguments: Sequence[str]) -> int:
    """Draws what the rows allow; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    parser = argparse.ArgumentParser(
        prog="lrmoe study figures",
        description="Figures as PNG, and all tables as one Markdown page.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--results", type=Path, default=Path("results"), help="directory of the rows")
    add("--images", type=Path, default=Path("docs/images"), help="directory of the figures")
    add("--tables", type=Path, default=Path("docs/convergence-tables.md"), help="the page")
    options = parser.parse_args(arguments)
    runs = rows.load(options.results / "convergence.jsonl")
    gradients = rows.load(options.results / "gradient.jsonl")
    races = rows.load(options.results / "time-to-loss.jsonl")
    if not runs and not gradients and not races:
        raise ValueError(f"results={str(options.results)!r}: holds no rows of these studies")
    options.images.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(runs, gradients, races).items():
        path = options.images / f"{name}.png"
        # Without a time stamp, the same rows give the same file.
        figure.savefig(path, dpi=110, metadata={"Software": None})
        sys.stdout.write(f"{path}\n")
    options.tables.write_text(tables(runs, gradients, races))
    sys.stdout.write(f"{options.tables}\n")
    return 0


def figures(
    runs: Sequence[Row], gradients: Sequence[Row], races: Sequence[Row] = ()
) -> dict[str, Figure]:
    """The figures by name; those without rows are absent."""
    found: dict[str, Figure] = {}
    comparisons = paired(runs)
    if any(not c["arm"].is_exact for c in comparisons):
        found["convergence_rates"] = _rates(comparisons)
        found["convergence_arms"] = _arms(comparisons)
        found["convergence_where"] = _where(runs)
    finals = [c for c in comparisons if is_final(c)]
    if finals:
        found["convergence_finalists"] = _finalists(finals)
    if gradients:
        found["gradient_averaging"] = _averaging(gradients)
        found["gradient_bias"] = _bias(gradients)
    explained = _explained(comparisons, gradients)
    if explained:
        found["gradient_explains"] = _explains(explained)
    if races:
        found["time_to_loss"] = _races(races)
    return found


def _color(rule: str) -> str:
    return _COLORS.get(rule, "#444444")


def _finalists(finals: Sequence[dict[str, Any]]) -> Figure:
    """The default rule after long runs: every seed, the mean, and its 95 % bound."""
    protocols = compared_protocols(finals)
    figure, (axes,) = _panels(1, width=max(9.6, 2.4 * len(protocols)), height=3.8)
    for comparison in sorted(finals, key=lambda c: c["arm"].recalibration.rate):
        rate, rule = comparison["arm"].recalibration.rate, rule_name(comparison["arm"])
        is_low, is_old = rate <= _LOW_RATE, rule == FINAL_RULES[1]
        place = protocols.index(comparison["protocol"]) - 0.3 + 0.4 * (not is_low) + 0.17 * is_old
        color = (("#3b6ea8", "#c8713c"), ("#9dc0e6", "#ecb894"))[is_old][not is_low]
        excess, seeds = comparison["excess"], comparison["excess_by_seed"]
        axes.plot([place] * len(seeds), seeds, ".", color=color, alpha=0.5)
        axes.plot(place, excess.mean, "o", color=color, label=f"C{100 * rate:g}, {rule}")
        if excess.bound is not None:  # no run diverged
            axes.plot([place] * 2, [excess.mean, excess.bound], "-", color=color)
            axes.plot(place, excess.bound, "_", color=color, ms=12)
    axes.axhline(0, color="black", lw=0.8)
    names = ["\n".join(wrap(describe(p), 34)) for p in protocols]
    axes.set_xticks(range(len(protocols)), names, fontsize="x-small")
    axes.set_xlim(-0.5, len(protocols) - 0.5)
    axes.set_ylabel("validation loss over C0, %", fontsize="small")
    axes.set_title("seeds (dots), mean, one-sided 95 % bound of the mean", fontsize="small")
    axes.grid(alpha=0.3, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    axes.legend(shown.values(), shown.keys(), fontsize="x-small")
    return figure


def _rates(comparisons: Sequence[dict[str, Any]]) -> Figure:
    """Excess loss by rate, a panel per protocol, a line per rule."""
    shown = [c for c in comparisons if is_plain(c["arm"]) and not is_control(c["arm"])]
    shown = [c for c in shown if c["arm"].is_exact or rule_name(c["arm"]) in _RATE_RULES]
    protocols = compared_protocols(shown)
    figure, panels = _panels(len(protocols), width=4.2, height=3.4)
    for axes, protocol in zip(panels, protocols, strict=True):
        by_rule: dict[str, list[dict[str, Any]]] = {}
        for c in shown:
            if c["protocol"] == protocol and not c["arm"].is_exact:
                by_rule.setdefault(rule_name(c["arm"]), []).append(c)
        for rule, mine in by_rule.items():
            mine.sort(key=lambda c: c["arm"].recalibration.rate)
            rates = [0.0] + [100 * c["arm"].recalibration.rate for c in mine]
            means = [0.0] + [c["excess"].mean for c in mine]
            errors = [0.0] + [c["excess"].standard_error or 0.0 for c in mine]
            axes.errorbar(
                rates, means, errors, fmt="o-", ms=4, capsize=3, label=rule, color=_color(rule)
            )
        seeds = max(c["excess"].count for c in shown if c["protocol"] == protocol)
        axes.axhline(0, color="black", lw=0.8)
        title = "\n".join(wrap(f"{describe(protocol)}; {_seeds(seeds)}", 60))
        axes.set_title(title, fontsize="x-small")
        axes.set(xlabel="rate C, %", ylabel="validation loss over C0, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return figure


def _arms(comparisons: Sequence[dict[str, Any]]) -> Figure:
    """Every arm as a bar with its standard error and its seeds, a panel per protocol."""
    protocols = compared_protocols([c for c in comparisons if not c["arm"].is_exact])
    most = max(sum(c["protocol"] == p for c in comparisons) for p in protocols)
    figure, panels = _panels(len(protocols), width=7.0, height=1.2 + 0.22 * most)
    for axes, protocol in zip(panels, protocols, strict=True):
        mine = [c for c in comparisons if c["protocol"] == protocol and not c["arm"].is_exact]
        mine.sort(key=lambda c: -c["excess"].mean)
        names = [c["arm"].name for c in mine]
        means = [c["excess"].mean if math.isfinite(c["excess"].mean) else 0.0 for c in mine]
        errors = [c["excess"].standard_error or 0.0 for c in mine]
        colors = [_color(rule_name(c["arm"])) for c in mine]
        axes.barh(names, means, xerr=errors, color=colors, alpha=0.7, capsize=2)
        for i, c in enumerate(mine):
            axes.plot(c["excess_by_seed"], [i] * len(c["excess_by_seed"]), "k.", ms=4)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_title("\n".join(wrap(describe(protocol), 90)), fontsize="small")
        axes.set_xlabel("validation loss over C0, %; points: seeds")
        axes.tick_params(axis="y", labelsize="x-small")
        axes.grid(alpha=0.3, axis="x")
    return figure


def _where(runs: Sequence[Row]) -> Figure:
    """Change of the quantiles of the tokens' losses: do easy or hard tokens suffer?"""
    exact = {_pair_key(row): row for row in runs if run_of(row).arm.is_exact}
    changes: dict[tuple[str, float], list[list[float]]] = {}
    for row in runs:
        arm = run_of(row).arm
        partner = exact.get(_pair_key(row))
        if arm.is_exact or partner is None or not is_plain(arm):
            continue
        if row["regime"] != "scratch" or row["val_loss"] is None:
            continue
        mine, its = row["val_loss_quantiles"], partner["val_loss_quantiles"]
        change = [a - b for a, b in zip(mine, its, strict=True)]
        changes.setdefault((rule_name(arm), row["rate"]), []).append(change)
    rates = sorted({rate for _, rate in changes if rate in (0.2, 0.5)})
    figure, panels = _panels(max(len(rates), 1), width=4.6, height=4.2)
    for axes, rate in zip(panels, rates, strict=False):
        for (rule, its_rate), values in changes.items():
            if its_rate == rate:
                mean = [sum(v) / len(v) for v in zip(*values, strict=True)]
                axes.plot((10, 25, 50, 75, 90), mean, "o-", ms=4, label=rule, color=_color(rule))
        axes.axhline(0, color="black", lw=0.8)
        axes.set_title(f"C{100 * rate:g}, all runs from scratch", fontsize="small")
        axes.set(xlabel="quantile of the tokens' losses, %", ylabel="loss over C0, nats")
        axes.grid(alpha=0.3)
    shown = _handles(panels)
    figure.legend(
        shown.values(), shown.keys(), fontsize="x-small", loc="outside lower center", ncols=4
    )
    return figure


def _pair_key(row: Row) -> tuple[str, int]:
    run = run_of(row)
    return repr(run.protocol), run.seed


def _averaging(gradients: Sequence[Row]) -> Figure:
    """How the error of the mean gradient falls with the number of batches."""
    places = _by_place(gradients)
    study = next(iter(places))[0]
    step = max(step for name, step in places if name == study)
    figure, panels = _panels(2 * len(_GROUPS), width=4.2, height=3.4)
    shown = [(group, rate) for group in _GROUPS for rate in (0.2, 0.5)]
    for axes, (group, rate) in zip(panels, shown, strict=True):
        for row in places[study, step]:
            if row["rate"] == rate:
                rule = _row_rule(row)
                counts, errors = zip(*row["groups"][group]["error_mean_by_batches"], strict=True)
                axes.loglog(counts, errors, "o-", ms=3, label=rule, color=_color(rule))
        title = f"{study}, step {step}: {_GROUPS[group]}, C{100 * rate:g}"
        axes.set_title(title, fontsize="small")
        axes.set(xlabel="batches averaged", ylabel="error of the mean gradient, relative")
        axes.grid(alpha=0.3, which="both")
        if axes.lines:
            axes.legend(fontsize="xx-small", loc="lower left")
    return figure


def _bias(gradients: Sequence[Row]) -> Figure:
    """Error of one batch beside the bias of the mean, and what easy and hard tokens gain."""
    places = _by_place(gradients)
    study = next(iter(places))[0]
    step = max(step for name, step in places if name == study)
    figure, panels = _panels(4, width=5.4, height=3.4)
    pairs = (
        {"error_one": "error of one batch's gradient", "bias": "bias, over the mean gradient"},
        {"progress_easy": "tokens below the median loss", "progress_hard": "above"},
    )
    titles = ("down projections", "gain of a small step, over exact (1)")
    shown = [
        (rate, keys, title)
        for rate in (0.2, 0.5)
        for keys, title in zip(pairs, titles, strict=True)
    ]
    for axes, (rate, measures, title) in zip(panels, shown, strict=True):
        mine = [row for row in places[study, step] if row["rate"] == rate]
        height = 0.38
        for i, (key, label) in enumerate(measures.items()):
            # Gains far below zero say no more than that the step makes the loss worse.
            values = [max(row["groups"]["down"][key], -0.5) for row in mine]
            at = [place + (i - 0.5) * height for place in range(len(mine))]
            axes.barh(at, values, height, label=label, color=("#3b6ea8", "#c8713c")[i])
        axes.set_yticks(range(len(mine)), [_row_rule(row) for row in mine], fontsize="x-small")
        axes.set_title(f"{study}, step {step}, C{100 * rate:g}: {title}", fontsize="small")
        axes.axvline(0, color="black", lw=0.8)
        axes.grid(alpha=0.3, axis="x")
        if mine:
            place = (0.5, -0.08)
            axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=place, ncols=2)
    return figure


def _explained(
    comparisons: Sequence[dict[str, Any]], gradients: Sequence[Row]
) -> list[tuple[Arm, float, dict[str, float]]]:
    """Arms whose gradients were measured on the model that their runs continue: excess, errors."""
    by_arm = {(repr(c["protocol"]), repr(c["arm"])): c["excess"].mean for c in comparisons}
    found = []
    for row in gradients:
        protocol, arm = run_of(row).protocol, Arm.from_dict(row["settings_arm"])
        excess = by_arm.get((repr(protocol), repr(arm)))
        if excess is not None and protocol.regime == "continued" and row["step"] == 0:
            found.append((arm, excess, row["groups"]["all"]))
    return found


def _explains(explained: Sequence[tuple[Arm, float, dict[str, float]]]) -> Figure:
    """The loss a rule ends at over the error of its gradient, and over the bias."""
    from matplotlib.ticker import NullFormatter

    figure, panels = _panels(2, width=6.4, height=5.0)
    measures = {
        "error_one": "error of one batch's gradient, all parameters",
        "bias": "bias of the mean gradient, all parameters",
    }
    least = 0.003  # what is lower is drawn here: the axes are logarithmic
    places: dict[Axes, list[tuple[str, tuple[float, float]]]] = {axes: [] for axes in panels}
    for axes, (key, title) in zip(panels, measures.items(), strict=True):
        axes.set(xlabel=title, ylabel="validation loss over C0, %", xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.xaxis.set_minor_formatter(NullFormatter())
        for arm, excess, errors in explained:
            place = (max(errors[key], least), max(excess, least))
            mark = "o" if arm.recalibration.is_unbiased else "s"
            axes.plot(*place, mark, color=_color(rule_name(arm)))
            places[axes].append((arm.name.replace("strata=gradient", "strata"), place))
    factor = quadratic_factor(explained)
    if factor is not None:
        ends = [
            min(e["error_one"] for *_, e in explained),
            max(e["error_one"] for *_, e in explained),
        ]
        line = [factor * x * x for x in ends]
        label = f"{factor:.2g} error^2, through the unbiased rules"
        panels[0].plot(ends, line, color="black", lw=0.8, label=label)
        panels[0].legend(fontsize="x-small")
    panels[0].set_title("circles: unbiased rules; squares: weight 1", fontsize="small")
    for axes in panels:
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * (high / low) ** 0.3)  # room for names at the right
    figure.draw_without_rendering()  # names go where the layout has put the points
    for axes, of_axes in places.items():
        _label(axes, of_axes)
    return figure


def _label(axes: Axes, places: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Names beside their points, each as far down as those it would cover need."""
    size, line = 6, 8
    taken: list[tuple[float, float, float]] = []
    for name, place in sorted(places, key=lambda item: -item[1][1]):
        left, height = axes.transData.transform(place) * 72 / axes.figure.dpi
        right, at = left + 0.6 * size * len(name), height
        for other_left, other_right, other_at in taken:  # from the top down
            if left < other_right and right > other_left and abs(at - other_at) < line:
                at = other_at - line
        taken = sorted([*taken, (left, right, at)], key=lambda box: -box[2])
        offset = (6, at - height)
        text = axes.annotate(
            name, place, xytext=offset, textcoords="offset points", fontsize=size, va="center"
        )
        text.set_in_layout(False)


def quadratic_factor(explained: Sequence[tuple[Arm, float, dict[str, float]]]) -> float | None:
    """``a`` of ``excess = a error^2``, the geometric mean over the unbiased rules."""
    ratios = [
        math.log(excess / errors["error_one"] ** 2)
        for arm, excess, errors in explained
        if arm.recalibration.is_unbiased and excess > 0
    ]
    return math.exp(sum(ratios) / len(ratios)) if ratios else None


def _row_rule(row: Row) -> str:
    return rule_name(Arm.from_dict(row["settings_arm"]))


def _by_place(gradients: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    places: dict[tuple[str, int], list[Row]] = {}
    for row in gradients:
        places.setdefault((row["study"], row["step"]), []).append(row)
    return places


def _races(races: Sequence[Row]) -> Figure:
    """MoE-layer time until each loss over that of SYMI at C0, a panel per race."""
    names = list(dict.fromkeys(row["race"] for row in races))
    # One colour for an arm in every panel, the exact runs first.
    rates = {row["arm"]: row["rate"] for row in races}
    all_arms = sorted(rates, key=lambda arm: rates[arm])
    figure, panels = _panels(len(names), width=6.4, height=3.8)
    for axes, name in zip(panels, names, strict=True):
        mine = [row for row in races if row["race"] == name]
        targets = list(dict.fromkeys(row["target_loss"] for row in mine))
        present = {row["arm"] for row in mine}
        arms = [arm for arm in all_arms if arm in present]
        width = 0.8 / len(arms)
        for i, arm in enumerate(arms):
            ratios = [race_ratios(mine, arm, _PEER, target) for target in targets]
            places = [t + (i - (len(arms) - 1) / 2) * width for t in range(len(targets))]
            heights = [math.nan if found is None else fmean(found) for found in ratios]
            color = f"C{all_arms.index(arm)}"
            axes.bar(places, heights, width=0.94 * width, label=arm, color=color, alpha=0.8)
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xticks(range(len(targets)), [f"{t:g}" for t in targets])
        axes.set(xlabel="validation loss", ylabel=f"MoE-layer time over {_PEER} ({_clock(mine)})")
        axes.set_title(f"{name}, two ranks, {_seeds(len({r['seed'] for r in mine}))}")
        axes.grid(alpha=0.3, axis="y")
    shown = _handles(panels)
    arms = [arm for arm in all_arms if arm in shown]
    figure.legend(
        [shown[arm] for arm in arms], arms, fontsize="x-small", loc="outside lower center", ncols=4
    )
    return figure


def _clock(rows_of_race: Sequence[Row]) -> str:
    return "/".join(sorted({f"{row['clock']} time" for row in rows_of_race}))


def _handles(panels: Sequence[Axes]) -> dict[str, Any]:
    """What a legend of all panels shows, by label."""
    shown: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    return shown


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    # Figure without pyplot: no display, no global state.
    from matplotlib.figure import Figure

    columns = min(count, 2)
    lines = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in every[count:]:
        axes.axis("off")
    return figure, every[:count]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"up to {count} seeds"
