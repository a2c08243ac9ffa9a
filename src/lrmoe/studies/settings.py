"""What a run of a study is: the protocol it shares with the runs it is compared with, and its own.

Two runs are paired if they have the same protocol and the same seed: same initial model, same text
in the same order. They differ in what the layers drop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from lrmoe.config import Recalibration

TEXTS = ("code", "prose")
REGIMES = ("scratch", "continued")
OPTIMIZERS = ("adamw", "adafactor")
SCHEDULES = ("cosine", "linear", "constant_with_warmup")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a model is trained and measured; everything but what the layers drop.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    model: str = "qwen3-moe-small"
    """A preset of ``lrmoe.training.presets``."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the preset's model config to change."""
    text: str = "code"
    """``code``: the standard library's source. ``prose``: English (``lrmoe.studies.texts``)."""
    regime: str = "scratch"
    """``continued``: from a model that was first trained exactly for ``pretraining_steps``."""
    steps: int = 400
    blocks_per_step: int = 8
    block_size: int = 256
    optimizer: str = "adamw"
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 20
    schedule: str = "cosine"
    max_grad_norm: float = 1.0
    """0: gradients are not clipped."""
    bf16: bool = False
    """Autocast to bfloat16; parameters stay float32."""
    validation_blocks: int = 512
    pretraining_steps: int = 1000
    """Only used by the ``continued`` regime."""

    def __post_init__(self) -> None:
        from lrmoe.training.presets import preset_config

        preset_config(self.model, self.overrides)
        _among("text", self.text, TEXTS)
        _among("regime", self.regime, REGIMES)
        _among("optimizer", self.optimizer, OPTIMIZERS)
        _among("schedule", self.schedule, SCHEDULES)
        for name in ("steps", "blocks_per_step", "validation_blocks", "pretraining_steps"):
            _at_least(name, getattr(self, name), 1)
        _at_least("block_size", self.block_size, 2)
        for name in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm"):
            _at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What the MoE layers of a run drop, and how."""

    recalibration: Recalibration = field(
        default_factory=lambda: Recalibration(rate=0.0, strata="none")
    )
    """Its ``seed`` is not used: it is that of the run."""
    exact_layers: tuple[int, ...] = ()
    """MoE layers that keep every pair; negative numbers count from the last."""
    experiment: str | None = None
    """A rule of ``lrmoe.studies.experiments``."""

    def __post_init__(self) -> None:
        from lrmoe.studies.experiments import EXPERIMENTS

        if self.experiment is not None:
            _among("experiment", self.experiment, tuple(EXPERIMENTS))

    @property
    def is_exact(self) -> bool:
        """Whether every pair of every layer is kept."""
        return self.recalibration.rate == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, all of them: a row keeps its meaning if a default changes."""
        values = self.recalibration.to_dict()
        del values["seed"]
        own = {"exact_layers": list(self.exact_layers), "experiment": self.experiment}
        return {**values, **own}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Arm:
        """The inverse of :meth:`to_dict`; what is left out takes its default, except the rate.

        Raises:
            ValueError: for an unknown key or a bad value.
        """
        own = dict(values)
        if "rate" not in own:
            raise ValueError(f"arm {own!r}: has no rate")
        if "seed" in own:
            raise ValueError(f"seed={own['seed']!r} in an arm: seeds belong to the stage")
        own.setdefault("strata", "none")  # of rows from before there were any
        layers, experiment = tuple(own.pop("exact_layers", ())), own.pop("experiment", None)
        return cls(
            recalibration=Recalibration.from_dict(own), exact_layers=layers, experiment=experiment
        )

    @property
    def name(self) -> str:
        """Rule and rate, and what is not the default: ``sampled C50 router_grad=exact``."""
        if self.is_exact:
            return "C0"
        config, default = self.recalibration, Arm().to_dict()
        said = {"rate", "selection", "experiment"}
        if self.experiment is not None:
            said.add("scope")  # experiments have one
        rest = {k: v for k, v in self.to_dict().items() if k not in said and v != default[k]}
        auto = rest.pop("auto", {})
        rest = {k: v for k, v in auto.items() if v != default["auto"][k]} | rest
        rule = self.experiment or config.selection
        return " ".join([rule, _rate_name(config.rate), *(f"{k}={v}" for k, v in rest.items())])


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    protocol: Protocol
    arm: Arm
    seed: int

    @property
    def key(self) -> str:
        """Equal for equal settings, whatever later versions add with a default."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @property
    def baseline(self) -> Run:
        """The exact run it is compared with."""
        return Run(protocol=self.protocol, arm=Arm(), seed=self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "protocol": asdict(self.protocol),
            "arm": self.arm.to_dict(),
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """The inverse of :meth:`to_dict`."""
        return cls(
            protocol=protocol_from_dict(values["protocol"]),
            arm=Arm.from_dict(values["arm"]),
            seed=int(values["seed"]),
        )


def protocol_from_dict(values: Mapping[str, Any]) -> Protocol:
    """A protocol from plain values.

    Raises:
        ValueError: for an unknown key, naming the nearest valid one, and for a bad value.
    """
    known = [f.name for f in fields(Protocol)]
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"protocol {key!r} is not a setting; the nearest is {near!r}")
    return Protocol(**values)


def _rate_name(rate: Any) -> str:
    if isinstance(rate, str):
        return rate
    if isinstance(rate, float):
        return f"C{100 * rate:g}"
    return "C" + "-".join(f"{100 * c:g}@{step}" for step, c in rate)


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name}={value!r}: must be at least {least}")
