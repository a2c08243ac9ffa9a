"""The grids of the studies, from a YAML file: which runs, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lrmoe.studies.settings import Arm, Protocol, Run, protocol_from_dict

DEFAULT_GRID = Path(__file__).with_name("grids.yaml")
_STAGE_KEYS = {"name", "protocol", "seeds", "arms"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Runs that are looked at together; the first arm is the exact one."""

    name: str
    protocol: Protocol
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]

    def runs(self) -> list[Run]:
        """Seed by seed, so that what is finished can be compared."""
        return [
            Run(protocol=self.protocol, arm=arm, seed=seed)
            for seed in self.seeds
            for arm in self.arms
        ]


def read_stages(path: Path, section: str) -> list[Stage]:
    """The stages of a section of a grid file.

    Raises:
        ValueError: naming what is wrong with which stage.
    """
    if not path.is_file():
        raise ValueError(f"grid={str(path)!r}: no such file")
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or section not in content:
        raise ValueError(f"grid={str(path)!r}: has no section {section!r}")
    defaults = content.get("arm_defaults", {})
    return [_stage(values, defaults) for values in content[section]]


def chosen(stages: Sequence[Stage], names: Sequence[str] | None) -> list[Stage]:
    """The named stages, or all.

    Raises:
        ValueError: for a name that no stage has.
    """
    if not names:
        return list(stages)
    by_name = {stage.name: stage for stage in stages}
    for name in names:
        if name not in by_name:
            raise ValueError(f"stage={name!r}: allowed are {', '.join(map(repr, by_name))}")
    return [by_name[name] for name in names]


def unique_runs(stages: Sequence[Stage]) -> list[Run]:
    """All runs in order; one that several stages share is made once."""
    return list({run.key: run for stage in stages for run in stage.runs()}.values())


def _stage(values: Mapping[str, Any], arm_defaults: Mapping[str, Any]) -> Stage:
    name = values.get("name")
    if not isinstance(name, str):
        raise ValueError(f"stage {values!r}: needs a name")
    wrong = set(values) ^ _STAGE_KEYS
    if wrong:
        raise ValueError(f"stage {name!r}: needs exactly {sorted(_STAGE_KEYS)}; see {wrong}")
    try:
        arms = tuple(Arm.from_dict({**arm_defaults, **arm}) for arm in values["arms"])
        protocol = protocol_from_dict(values["protocol"])
    except ValueError as error:
        raise ValueError(f"stage {name!r}: {error}") from error
    seeds = tuple(values["seeds"])
    if not arms or not arms[0].is_exact:
        raise ValueError(f"stage {name!r}: the first arm must have rate 0")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"stage {name!r}: seeds={list(seeds)}: must be one or more different ones")
    return Stage(name=name, protocol=protocol, seeds=seeds, arms=arms)
