"""``lrmoe COMMAND [CONFIG.yaml] [--section.key value ...] [--json FILE]``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXIT_USAGE = 2
EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code.

    A user's mistake is one line on stderr and exit code 2, whichever command finds it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"lrmoe {_version()}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        from lrmoe.training.settings import nearest

        return _complain(f"{command!r} is not a command{nearest(command, list(COMMANDS))}")
    run, _ = COMMANDS[command]
    try:
        return run(rest)
    except ValueError as error:
        return _complain(str(error))


def train(arguments: Sequence[str]) -> int:
    """Trains or fine-tunes an MoE model under expert parallelism."""
    from lrmoe.training import arguments as parsing
    from lrmoe.training.run_dir import default_run_dir

    json_file, arguments = _take_json(arguments)
    arguments = ["--trace_pairs=true" if a == "--trace-pairs" else a for a in arguments]
    settings = parsing.parse(arguments)
    if settings is None:
        return 0
    in_torchrun = "RANK" in os.environ
    if in_torchrun and settings.nproc is not None:
        raise ValueError(
            f"nproc={settings.nproc}: torchrun has already started the ranks; leave it out"
        )

    if settings.run_dir is None and not in_torchrun:
        settings = dataclasses.replace(settings, run_dir=default_run_dir())
    if settings.nproc is None:
        from lrmoe.training.job import run

        run(settings)
    else:
        from lrmoe.training.launch import RanksFailedError, launch

        try:
            launch(settings, settings.nproc)
        except RanksFailedError as error:
            print(f"lrmoe: {error}", file=sys.stderr)
            if (Path(settings.run_dir or "") / "checkpoints").is_dir():
                print(
                    f"lrmoe: continue from the last checkpoint with: lrmoe train "
                    f"{settings.run_dir}/config.yaml --resume true --nproc {settings.nproc}",
                    file=sys.stderr,
                )
            return EXIT_FAILED
    summary = Path(settings.run_dir or "") / "summary.json"
    if json_file is not None and summary.is_file() and os.environ.get("RANK", "0") == "0":
        rows = [json.loads(summary.read_text())]
        write_json(json_file, "train", settings.to_dict(), rows)
    return 0


def report(arguments: Sequence[str]) -> int:
    """Writes one HTML page that compares run directories."""
    from lrmoe.report_page import write_page

    parser = argparse.ArgumentParser(prog="lrmoe report", description=report.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("--out", default="report.html", help="the page (default: %(default)s)")
    options = parser.parse_args(arguments)
    path = write_page([Path(run) for run in options.runs], Path(options.out))
    print(path)
    return 0


def _in_module(name: str) -> Callable[[Sequence[str]], int]:
    def run(arguments: Sequence[str]) -> int:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("lrmoe"):
                raise
            raise ValueError(
                f"this command needs {error.name}; install it with: pip install 'lrmoe[train]'"
            ) from error
        code: int = module.main(arguments)
        return code

    return run


# Command -> function of its arguments, and a line for the help.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train or fine-tune an MoE model under expert parallelism"),
    "plan": (_in_module("lrmoe.cluster.fit"), "does a training job fit its GPUs, and at which C"),
    "replay": (
        _in_module("lrmoe.cluster.command"),
        "simulated: routing through policies and rates",
    ),
    "bench": (_in_module("lrmoe.bench"), "timings beside the peers that run on this machine"),
    "study": (_in_module("lrmoe.studies"), "the paper's experiments and ours"),
    "check": (_in_module("lrmoe.check"), "environment, versions, and a parity self-check"),
    "report": (report, "one HTML page that compares run directories"),
}


def write_json(path: str, command: str, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the machine-readable result of a command as one object."""
    result = {
        "command": command,
        "version": _version(),
        "machine": machine(),
        "config": config,
        "rows": rows,
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the figures of a command were measured on."""
    import torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _take_json(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json")
    known, rest = parser.parse_known_args(arguments)
    return known.json, rest


def _version() -> str:
    from importlib.metadata import version

    return version("lrmoe")


def _usage() -> str:
    lines = [(__doc__ or "").strip(), "", "commands:"]
    lines += [f"  {name:8} {line}" for name, (_, line) in COMMANDS.items()]
    lines += ["", "lrmoe COMMAND --help lists a command's settings."]
    return "\n".join(lines)


def _complain(sentence: str) -> int:
    print(f"lrmoe: error: {sentence}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
