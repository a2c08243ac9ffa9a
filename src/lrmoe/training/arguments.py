"""The command line of ``lrmoe train``: a YAML file and dotted overrides to settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from lrmoe.config import AutoRate, Budget, Recalibration
from lrmoe.training.settings import TrainSettings, nearest

# Settings whose keys are not ours: any key below them is passed on.
_OPEN = ("model.overrides", "training.extra")


def parse(arguments: Sequence[str]) -> TrainSettings | None:
    """The settings, or ``None`` when only help or the resolved config was asked for.

    Raises:
        ValueError: for an unknown key, naming the nearest valid one, and for a bad value.
    """
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--config", arguments[0]]
    parser = _parser()
    known = [*_keys(TrainSettings), *(f"recalibration.{key}" for key in _keys(Recalibration))]
    _refuse_unknown(arguments, known)
    try:
        namespace = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(_one_line(error)) from error
    except SystemExit as leaving:
        if leaving.code:
            raise
        return None
    values = namespace.as_dict()
    values.pop("config", None)
    return TrainSettings.from_dict(values)


def _parser() -> Any:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="lrmoe train",
        description="Trains or fine-tunes an MoE model under expert parallelism.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file; also as first argument")
    parser.add_class_arguments(TrainSettings, skip={"recalibration"})
    # One by one: jsonargparse cannot take a dataclass with slots as a default.
    parser.add_class_arguments(Recalibration, "recalibration", skip={"auto", "budget"})
    parser.add_class_arguments(AutoRate, "recalibration.auto")
    parser.add_class_arguments(Budget, "recalibration.budget")
    return parser


def _keys(settings: Any) -> Iterator[str]:
    for f in fields(settings):
        default = f.default_factory() if callable(f.default_factory) else f.default
        if is_dataclass(default):
            yield from (f"{f.name}.{key}" for key in _keys(default))
        else:
            yield f.name


def _refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """jsonargparse refuses unknown keys too, but does not say which one was meant."""
    used: list[str] = []
    for i, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        key, _, value = argument[2:].partition("=")
        if key == "config":
            path = Path(value or arguments[i + 1])
            if not path.is_file():
                raise ValueError(f"config={str(path)!r}: no such file")
            content = yaml.safe_load(path.read_text())
            if not isinstance(content, Mapping):
                raise ValueError(f"config={str(path)!r}: must hold settings by name")
            used += _flat(content)
        elif key not in ("help", "print_config"):
            used.append(key.removesuffix("+"))
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for key in used:
        is_open = any(key == name or key.startswith(f"{name}.") for name in _OPEN)
        if key not in known and key not in sections and not is_open:
            raise ValueError(f"{key!r} is not a setting{nearest(key, list(known))}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in _OPEN:
            yield from _flat(value, f"{key}.")
        else:
            yield key


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
