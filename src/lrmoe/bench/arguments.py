"""Command lines of flat settings: a YAML file and overrides to a dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from lrmoe.bench.settings import LayerBench

S = TypeVar("S")


def parse(arguments: Sequence[str]) -> tuple[LayerBench, str | None] | None:
    """The settings of ``lrmoe bench layer`` and the file of ``--json``; see :func:`parse_settings`.

    Raises:
        ValueError: for an unknown key, naming the nearest valid one, and for a bad value.
    """
    return parse_settings(
        LayerBench,
        "lrmoe bench layer",
        "The layer beside Hugging Face's all_to_all and grouped_mm.",
        arguments,
    )


def parse_settings(
    settings: type[S], prog: str, description: str, arguments: Sequence[str]
) -> tuple[S, str | None] | None:
    """The settings and the file of ``--json``, or ``None`` when only help was asked for.

    Args:
        settings: a dataclass; its tuples are comma-separated lists on the command line.

    Raises:
        ValueError: for an unknown key, naming the nearest valid one, and for a bad value.
    """
    lists = [f.name for f in fields(settings) if str(f.type).startswith("tuple")]  # type: ignore[arg-type]
    arguments = _with_lists(arguments, lists)
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--config", arguments[0]]
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        description=f"{description} Lists are comma-separated.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file; also as first argument")
    parser.add_argument("--json", type=str, default=None, help="file for the result as JSON")
    parser.add_class_arguments(settings)
    _refuse_unknown(arguments, [f.name for f in fields(settings)])  # type: ignore[arg-type]
    try:
        values: dict[str, Any] = parser.parse_args(arguments).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except SystemExit as leaving:
        if leaving.code:
            raise
        return None
    values.pop("config", None)
    json_file: str | None = values.pop("json", None)
    return settings(**values), json_file


def _with_lists(arguments: Sequence[str], lists: Sequence[str]) -> list[str]:
    """``--rates 0,0.5`` and ``--rates=0,0.5`` as the YAML lists that jsonargparse takes."""
    result: list[str] = []
    is_list = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if is_list and not argument.startswith("["):
            argument = f"[{argument}]"
        elif name.removeprefix("--") in lists and equals and not value.startswith("["):
            argument = f"{name}=[{value}]"
        is_list = argument.removeprefix("--") in lists
        result.append(argument)
    return result


def _refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """jsonargparse refuses unknown keys too, but does not say which one was meant."""
    used = [a[2:].partition("=")[0] for a in arguments if a.startswith("--")]
    if "--config" in arguments[:-1]:
        path = Path(arguments[arguments.index("--config") + 1])
        if not path.is_file():
            raise ValueError(f"config={str(path)!r}: no such file")
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"config={str(path)!r}: must hold settings by name")
        used += content
    for key in used:
        if key not in (*known, "config", "json", "help", "print_config"):
            near = get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{key!r} is not a setting; the nearest valid one is {near!r}")
