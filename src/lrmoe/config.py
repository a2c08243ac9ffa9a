"""What a user may set: frozen dataclasses, every check in ``__post_init__``.

``C`` is the recalibration rate: the share of routed pairs that get no backward pass. C = 0 is exact
training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from itertools import pairwise
from typing import Any

from lrmoe.planner import PLACEMENTS
from lrmoe.planner.problem import QUOTA_MODES

# Rules that keep pairs with weight 1 (biased), and rules whose kept pairs carry 1 / P(kept).
SCORED_RULES = ("top", "random", "gradient", "weighted_gradient", "router", "token_loss")
UNBIASED_RULES = ("sampled", "random_unbiased")

AUTO = "auto"
_RATES_ALLOWED = "must be a number, a sequence of (step, number), or 'auto'"
# Above it the noise of a rate is not measured (lrmoe.auto.RATES).
_HIGHEST_AUTO = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of every rank that a plan must respect; ``None`` is unlimited.

    A layer call that would exceed one is planned with other replicas or fewer kept pairs, down to
    ``c_max``; if nothing fits, :class:`lrmoe.InfeasiblePlan` is raised on every rank before
    anything is allocated.
    """

    memory: int | None = None
    """Bytes that the MoE layers of a model may hold at any moment of a training step: weights and
    gradients of the home experts, replicas, what forward passes saved, and the running layer's
    temporaries on the experts' side (:mod:`lrmoe.planner.memory`). The optimizer's state, the rest
    of the model, and the rows a rank sends and gets back for its own tokens are not in it."""
    slots: int | None = None
    """Replica slots. Policies that move home experts need more, and have them."""
    staging: int | None = None
    """Bytes of weights on their way to replicas, or of their gradients on the way home, in one
    layer call."""
    link_bytes: int | None = None
    """Bytes sent, and bytes received, in one layer call (both passes); inside a node and between
    nodes each for itself."""
    forward_pairs: int | None = None
    """Token-expert pairs computed in one forward layer call."""
    c_max: float | None = None
    """Largest share of a layer call's pairs that may be dropped to keep to the other limits;
    ``None``: ``rate``."""

    @property
    def needs_costs(self) -> bool:
        """Whether bytes on links are limited."""
        return self.staging is not None or self.link_bytes is not None

    def __post_init__(self) -> None:
        for name in ("memory", "slots", "staging", "link_bytes", "forward_pairs"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"budget.{name}={value!r}: must be an integer")
            if value is not None and value < 0:
                raise ValueError(f"budget.{name}={value!r}: must be at least 0")
        if self.c_max is not None and not 0 <= self.c_max < 1:
            raise ValueError(f"budget.c_max={self.c_max!r}: allowed is 0 <= c_max < 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRate:
    """What ``rate="auto"`` keeps to. Each layer drops as much as keeps the noise of it small.

    *Noise* is the expected squared error that dropping adds to the gradient of the layer's down
    projections, over the sum of its pairs' squared norms (LRM). That sum is about the variance
    which the gradient has already because a batch is a sample, so noise 0.05 is what a batch
    smaller by a twentieth would add. ``docs/method.md`` says how it is known beforehand.
    """

    target: float = 0.05
    """Largest noise of a layer."""
    low: float = 0.0
    """Smallest rate, whatever its noise, and the rate during warm-up."""
    high: float = 0.5
    """Largest rate."""
    warmup_steps: int = 10
    """Optimizer steps before the first choice; a choice looks back over about ten."""

    def __post_init__(self) -> None:
        for name in ("target", "low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"auto.{name}={value!r}: must be a number")
        if not 0 <= self.target < math.inf:
            raise ValueError(f"auto.target={self.target!r}: allowed is 0 <= target")
        if not 0 <= self.low <= self.high <= _HIGHEST_AUTO:
            raise ValueError(
                f"auto.low={self.low!r}, auto.high={self.high!r}: allowed is "
                f"0 <= low <= high <= {_HIGHEST_AUTO}"
            )
        steps = self.warmup_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"auto.warmup_steps={steps!r}: must be an integer >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """How much of the backward pass an MoE layer does, and how the pairs are chosen.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    rate: float | Sequence[tuple[int, float]] | str = 0.2
    """Requested share C of pairs without a backward pass, ``0 <= C < 1``; 0 is exact training.
    A schedule is a sequence of ``(optimizer step, C)``, linear in between, constant outside.
    ``auto`` (unbiased rules): every layer chooses its own, as ``auto`` says."""
    selection: str = "sampled"
    """``sampled`` and ``random_unbiased`` are unbiased; ``top`` is the paper's rule; the rest are
    controls."""
    scope: str | None = None
    """``global``: one ranking per expert over all ranks; ``local``: every rank picks its own share.
    ``None``: local for the unbiased rules, global for the others."""
    quotas: str = "rate"
    """``rate``: every expert keeps ``ceil((1 - C) n)`` of its ``n`` pairs. ``planned``: all, less
    what the budgets do not allow. ``makespan``: as many in total as ``rate``, dropped where the
    ranks are busiest."""
    placement: str = "fixed"
    """``fixed``: pairs are computed on their expert's home rank. ``recalibrated``: our planner puts
    replicas of hot experts on idle ranks. The other names are peers' policies
    (:mod:`lrmoe.planner.peers`)."""
    router_grad: str = "kept"
    """Router gradient of the pairs: ``kept``, ``completed`` or ``exact`` (``docs/method.md``)."""
    draw: str = "backward"
    """``backward``: select when the output gradient is known. ``forward`` (unbiased rules): select
    before, and save nothing for dropped pairs."""
    rows: str = "exact"
    """``exact``: one host sync for the row counts of the backward payload. ``static``: no sync, the
    payload is padded to a bound known from the plan (needs local scope)."""
    save: str = "activations"
    """``activations`` keeps the gate_up outputs; ``inputs`` recomputes them for kept pairs."""
    min_inclusion: float = 0.1
    """rho of the specification: how much of the size of a pair in ``sampled`` is uniform."""
    strata: str = "gradient"
    """Of the unbiased rules: pairs of an expert that are alike are drawn evenly, which leaves every
    probability as it is and usually lowers the variance (``docs/method.md``). ``gradient``: by
    where the tokens' output gradients point; a draw in the forward pass, which does not know them,
    is then in random order. ``neighbors``: from each pair to the one that points most alike.
    ``text``: by the token's successor and the token itself (:func:`lrmoe.text_code`). ``none``: in
    random order."""
    seed: int = 0
    auto: AutoRate = field(default_factory=AutoRate)
    """Of ``rate="auto"``; other rates do not look at it."""
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _checked_rate(self.rate))
        choices = {
            "selection": SCORED_RULES + UNBIASED_RULES,
            "scope": (None, "global", "local"),
            "quotas": QUOTA_MODES,
            "placement": PLACEMENTS,
            "router_grad": ("kept", "completed", "exact"),
            "draw": ("backward", "forward"),
            "rows": ("exact", "static"),
            "save": ("activations", "inputs"),
            "strata": ("none", "gradient", "neighbors", "text"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        if self.draw == "forward" and not self.is_unbiased:
            raise ValueError(
                f"draw='forward' with selection={self.selection!r}: the rule needs the output "
                "gradient or keeps weight 1; allowed are"
                f" {', '.join(map(repr, UNBIASED_RULES))}"
            )
        if self.rows == "static" and self.effective_scope == "global":
            raise ValueError(
                "rows='static' with scope='global': the kept pairs per rank are not known when the "
                "plan is made; use scope='local' or rows='exact'"
            )
        if self.rows == "static" and self.placement != "fixed":
            raise ValueError(
                f"rows='static' with placement={self.placement!r}: replicas decide the rows of the "
                "payload; use placement='fixed' or rows='exact'"
            )
        rho = self.min_inclusion
        if isinstance(rho, bool) or not isinstance(rho, (int, float)) or not 0 <= rho <= 1:
            raise ValueError(f"min_inclusion={rho!r}: allowed is 0 <= value <= 1")
        if self.is_auto and not self.is_unbiased:
            raise ValueError(
                f"rate='auto' with selection={self.selection!r}: the error of one gradient does "
                "not say what a biased rule harms; allowed are "
                f"{', '.join(map(repr, UNBIASED_RULES))}"
            )
        if self.is_auto and self.quotas != "rate":
            raise ValueError(
                f"rate='auto' with quotas={self.quotas!r}: the noise is known for equal shares of "
                "the experts only; use quotas='rate'"
            )
        if not isinstance(self.auto, AutoRate):
            raise ValueError(f"auto={self.auto!r}: must be an AutoRate")
        if not isinstance(self.budget, Budget):
            raise ValueError(f"budget={self.budget!r}: must be a Budget")
        for name in ("memory", "link_bytes"):
            if self.router_grad == "exact" and getattr(self.budget, name) is not None:
                raise ValueError(
                    f"router_grad='exact' with budget.{name}: the outputs of all pairs return to "
                    "their tokens, which the planner does not count; use 'kept' or 'completed'"
                )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r}: must be an integer")

    @property
    def is_unbiased(self) -> bool:
        """Whether kept pairs carry the inverse of their probability of being kept."""
        return self.selection in UNBIASED_RULES

    @property
    def is_stratified(self) -> bool:
        """Whether the draw is laid out by anything."""
        by_gradient = self.strata in ("gradient", "neighbors") and self.draw == "backward"
        return self.is_unbiased and (by_gradient or self.strata == "text")

    @property
    def is_auto(self) -> bool:
        """Whether the layers choose their rates."""
        return self.rate == AUTO

    @property
    def c_max(self) -> float | None:
        """What budgets may drop of a call's pairs; ``None``: no more than its rate."""
        if self.is_auto and self.budget.c_max is None:
            return self.auto.high
        return self.budget.c_max

    @property
    def effective_scope(self) -> str:
        """``scope`` with the rule's default filled in."""
        return self.scope or ("local" if self.is_unbiased else "global")

    @property
    def is_planned(self) -> bool:
        """Whether anything but the rate shapes a plan, so that the compiled planner runs."""
        return self.placement != "fixed" or self.quotas != "rate" or self.budget != Budget()

    def rate_at(self, step: int) -> Fraction:
        """The requested rate at an optimizer step, as the decimal number the user wrote.

        Raises:
            ValueError: for ``auto``, which is a matter of the layer.
        """
        if isinstance(self.rate, float):
            return Fraction(str(self.rate))
        if isinstance(self.rate, str):
            raise ValueError(
                f"rate={self.rate!r}: chosen by each layer while it trains; a number is needed here"
            )
        points = self.rate
        if step <= points[0][0]:
            return Fraction(str(points[0][1]))
        for (s0, c0), (s1, c1) in pairwise(points):
            if step < s1:
                a, b = Fraction(str(c0)), Fraction(str(c1))
                return a + (b - a) * Fraction(step - s0, s1 - s0)
        return Fraction(str(points[-1][1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they travel in ``model.config.lrmoe`` and in YAML."""
        values = asdict(self)
        if not isinstance(self.rate, (float, str)):
            values["rate"] = [list(point) for point in self.rate]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recalibration:
        """The inverse of :meth:`to_dict`; an unknown key is an error naming the nearest one."""
        _refuse_unknown("lrmoe setting", values, cls)
        parts: dict[str, type[Budget | AutoRate]] = {"budget": Budget, "auto": AutoRate}
        for name, part in parts.items():
            if isinstance(values.get(name), dict):
                _refuse_unknown(f"lrmoe {name}", values[name], part)
                values = values | {name: part(**values[name])}
        return cls(**values)


def _refuse_unknown(
    what: str, values: dict[str, Any], of: type[Budget | AutoRate | Recalibration]
) -> None:
    known = [f.name for f in fields(of)]
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(known)}"
            raise ValueError(f"{what} {key!r} is unknown{hint}")


def _checked_rate(rate: Any) -> float | str | tuple[tuple[int, float], ...]:
    """The rate as a float, a tuple of points or ``auto``; raises with what is allowed."""

    def number(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"rate={rate!r}: {_RATES_ALLOWED}")
        if not (math.isfinite(value) and 0 <= value < 1):
            raise ValueError(f"rate={rate!r}: allowed is 0 <= rate < 1")
        return float(value)

    if rate == AUTO:
        return AUTO
    if isinstance(rate, str):
        raise ValueError(f"rate={rate!r}: {_RATES_ALLOWED}")
    if not isinstance(rate, Sequence):
        return number(rate)
    points = tuple(rate)
    if not points or any(not isinstance(p, Sequence) or len(p) != 2 for p in points):
        raise ValueError(f"rate={rate!r}: a schedule is a non-empty sequence of (step, number)")
    if any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s, _ in points):
        raise ValueError(f"rate={rate!r}: the steps of a schedule are integers >= 0")
    if any(b[0] <= a[0] for a, b in pairwise(points)):
        raise ValueError(f"rate={rate!r}: the steps of a schedule must increase")
    return tuple((s, number(c)) for s, c in points)
