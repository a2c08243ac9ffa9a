"""The command line of ``lrmoe bench layer``: a YAML file and overrides to settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from lrmoe.bench.settings import LayerBench

_LISTS = ("workloads", "dtypes", "rates", "placements")


def parse(arguments: Sequence[str]) -> tuple[LayerBench, str | None] | None:
    """The settings and the file of ``--json``, or ``None`` when only help was asked for.

    Raises:
        ValueError: for an unknown key, naming the nearest valid one, and for a bad value.
    """
    arguments = _with_lists(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--config", arguments[0]]
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="lrmoe bench layer",
        description="The layer beside Hugging Face's all_to_all and grouped_mm. Lists are "
        "comma-separated: --rates 0,0.5",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file; also as first argument")
    parser.add_argument("--json", type=str, default=None, help="file for the result as JSON")
    parser.add_class_arguments(LayerBench)
    _refuse_unknown(arguments)
    try:
        values = parser.parse_args(arguments).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except SystemExit as leaving:
        if leaving.code:
            raise
        return None
    values.pop("config", None)
    json_file: str | None = values.pop("json", None)
    return LayerBench(**values), json_file


def _with_lists(arguments: Sequence[str]) -> list[str]:
    """``--rates 0,0.5`` and ``--rates=0,0.5`` as the YAML lists that jsonargparse takes."""
    result: list[str] = []
    is_list = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if is_list and not argument.startswith("["):
            argument = f"[{argument}]"
        elif name.removeprefix("--") in _LISTS and equals and not value.startswith("["):
            argument = f"{name}=[{value}]"
        is_list = argument.removeprefix("--") in _LISTS
        result.append(argument)
    return result


def _refuse_unknown(arguments: Sequence[str]) -> None:
    """jsonargparse refuses unknown keys too, but does not say which one was meant."""
    known = [f.name for f in fields(LayerBench)]
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
