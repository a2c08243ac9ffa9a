"""What the parts of the check share: their arguments, and the rows that they write."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lrmoe.kernels.grouped_gemm import LIBRARY

_RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the check while it runs."""

    device: torch.device
    is_small: bool
    """Tiny shapes and few rounds: whether the part works, not how fast anything is."""
    out: Path | None
    about: dict[str, Any]
    """What every row says of the machine and the code."""

    @property
    def rounds(self) -> int:
        """Measured rounds of every timing."""
        return 2 if self.is_small else 15

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a row to the file, so that a part which is stopped leaves those before."""
        row = {"kind": kind, **values, **self.about}
        line = json.dumps(row)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")
        return row


def start(description: str, arguments: Sequence[str] | None = None) -> Part:
    """The part that a command line asks for.

    Raises:
        ValueError: if rows of a CPU would go among the committed results.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to test the program")
    parser.add_argument("--out", type=Path, help="file that rows are appended to, as JSON lines")
    options = parser.parse_args(arguments)
    if options.out is not None and options.device == "cpu" and _is_committed(options.out):
        raise ValueError(f"out={str(options.out)!r}: rows of a CPU do not belong in {_RESULTS}")
    torch.set_float32_matmul_precision("highest")  # float32 is the yardstick, so no TF32
    return Part(
        device=torch.device(options.device),
        is_small=options.small,
        out=options.out,
        about=_about(options.device, options.small),
    )


def _is_committed(path: Path) -> bool:
    return _RESULTS in path.resolve().parents


def _about(device: str, is_small: bool) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "small": is_small,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "grouped_gemm": LIBRARY,
        "transformers": _version("transformers"),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checked-out commit; where there is no git, what ``COMMIT`` says."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
