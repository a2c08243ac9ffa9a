"""What the figures and tables of the studies show, and under which name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lrmoe.studies.settings import Arm, Protocol

_STRATA = {"gradient": ", strata", "neighbors": ", neighbors", "text": ", text strata"}
# The default's draw now, and what it was before.
FINAL_RULES = ("sampled, strata", "sampled")
FINAL_STEPS, FINAL_SEEDS = 2000, 5


def rule_name(arm: Arm) -> str:
    """The rule and its draw."""
    config = arm.recalibration
    draw = ", drawn forward" if config.draw == "forward" else ""
    if config.is_stratified:
        draw += _STRATA[config.strata]
    return (arm.experiment or config.selection) + draw


def is_plain(arm: Arm) -> bool:
    """Whether nothing but rule, draw, strata and rate differs from the default."""
    config = arm.recalibration
    own = {name: getattr(config, name) for name in ("rate", "selection", "draw", "strata")}
    if arm.experiment is not None:
        own |= {"experiment": arm.experiment, "scope": "global"}
    return Arm.from_dict(own) == arm and isinstance(config.rate, float)


def is_control(arm: Arm) -> bool:
    """Whether next to nothing is dropped: how far apart do nearly equal runs end?"""
    config = arm.recalibration
    return not arm.is_exact and not config.is_auto and config.rate_at(0) < 0.01


def is_final(comparison: dict[str, Any]) -> bool:
    """Whether it is one of the bars of the default rule: long runs, and seeds enough."""
    arm, excess = comparison["arm"], comparison["excess"]
    is_default = is_plain(arm) and rule_name(arm) in FINAL_RULES and not arm.is_exact
    is_long = comparison["protocol"].steps >= FINAL_STEPS
    return is_default and is_long and excess.count >= FINAL_SEEDS


def compared_protocols(comparisons: Sequence[dict[str, Any]]) -> list[Protocol]:
    """Those with something to compare, in order."""
    by_name = {repr(c["protocol"]): c["protocol"] for c in comparisons if not c["arm"].is_exact}
    return list(by_name.values())
