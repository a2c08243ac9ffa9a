"""Coefficients of the cost model, each with its source: published ones, and those of a machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

CLOCKS = ("gpu", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """How fast one rank works.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    name: str
    clock: str
    """``gpu``: stages overlap by the rules of :mod:`lrmoe.cluster.cost`. ``cpu``: a rank's own CPU
    time, in which nothing overlaps and nobody waits."""
    memory_bytes: float
    peak_flops: float
    forward_flops: float
    """Of the experts' forward pass, in the limit of many rows per expert."""
    backward_flops: float
    weight_bytes_per_s: float
    """Weights of a group read (and in the backward pass gradients written) by its GEMMs."""
    group_s: float
    """Of one group in one pass."""
    row_bytes_per_s: float
    """Token rows gathered, copied and summed in a rank's own memory."""
    pair_s: float
    """Bookkeeping of one pair in one pass, where it is."""
    select_s: float = 0.0
    """Scoring and selecting one pair, where it comes from."""
    intra_bytes_per_s: float
    """Sent, and at the same time received, by a rank inside its node."""
    inter_bytes_per_s: float
    collective_s: float

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise ValueError(f"clock={self.clock!r}: allowed are {', '.join(map(repr, CLOCKS))}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("name", "clock"):
                continue
            is_rate = f.name.endswith(("_per_s", "flops", "memory_bytes"))
            if not isinstance(value, int | float) or value < 0 or (is_rate and value == 0):
                allowed = "> 0" if is_rate else ">= 0"
                raise ValueError(f"{self.name}.{f.name}={value!r}: allowed are numbers {allowed}")


def load_hardware(name: str) -> Hardware:
    """The coefficients of a published GPU by name, or of the file of ``lrmoe bench calibrate``.

    Raises:
        ValueError: if there is no such hardware or the file is not one.
    """
    published: dict[str, Any] = json.loads(
        files("lrmoe.cluster").joinpath("hardware.json").read_text()
    )
    if name in published:
        return _hardware(name, published[name])
    path = Path(name)
    if not path.is_file():
        known = ", ".join(map(repr, published))
        raise ValueError(f"hardware={name!r}: neither a file nor one of {known}")
    try:
        entries = json.loads(path.read_text())
        ((only, entry),) = entries.items()
        return _hardware(only, entry)
    except (json.JSONDecodeError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"hardware={name!r}: is not a file of coefficients ({error})") from error


def _hardware(name: str, entry: dict[str, Any]) -> Hardware:
    values = {key: value if key == "clock" else value[0] for key, value in entry.items()}
    return Hardware(name=name, **values)


def sources(name: str) -> dict[str, str]:
    """Where each coefficient of a published GPU comes from."""
    published = json.loads(files("lrmoe.cluster").joinpath("hardware.json").read_text())
    return {key: value[1] for key, value in published[name].items() if key != "clock"}
