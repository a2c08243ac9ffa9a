"""``lrmoe bench``: timings beside the peers that run on this machine, in one process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe bench WHAT ...``; returns the exit code: 1 if gradients disagree.

    Raises:
        ValueError: for a mistake of the user.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: lrmoe bench layer [CONFIG.yaml] [--key value ...] [--json FILE]\n"
            "       lrmoe bench planner --help\n"
            "       lrmoe bench calibrate [CONFIG.yaml] [--key value ...] [--json FILE]\n"
        )
        return 0
    what, *rest = arguments
    if what == "planner":
        from lrmoe.bench import planner

        return planner.main(rest)
    if what == "calibrate":
        from lrmoe.bench import calibrate

        return calibrate.main(rest)
    if what != "layer":
        raise ValueError(f"bench {what!r}: allowed are 'calibrate', 'layer', 'planner'")
    return _layer(rest)


def _layer(arguments: Sequence[str]) -> int:
    from lrmoe.cli import EXIT_FAILED, write_json

    try:
        from lrmoe.bench import layer, table
        from lrmoe.bench.arguments import parse
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lrmoe"):
            raise
        raise ValueError(
            f"bench layer needs {error.name}; install it with: pip install 'lrmoe[train]'"
        ) from error
    parsed = parse(arguments)
    if parsed is None:
        return 0
    bench, json_file = parsed
    try:
        rows = layer.run(bench)
    except layer.GradientMismatchError as error:
        sys.stderr.write(f"lrmoe: {error}; nothing was timed\n")
        return EXIT_FAILED
    if os.environ.get("RANK", "0") != "0":
        return 0
    table.print_rows(bench, rows)
    if json_file is not None:
        write_json(json_file, "bench layer", bench.to_dict(), rows)
    return 0
