"""Turns a result of ``lrmoe bench --json`` into lines for ``results/``: one row per line.

python benchmarks/record.py result.json >> benchmarks/results/layer-cpu.jsonl
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path


def lines(path: Path) -> list[str]:
    """Every row with the machine, the settings and the commit it came from."""
    result = json.loads(path.read_text())
    measured = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    common = {
        "date": f"{measured:%Y-%m-%d}",
        "commit": commit(),
        "command": result["command"],
        "version": result["version"],
        **result["machine"],
    }
    # The lists say what else was measured; a row has its own value of each.
    settings = {k: v for k, v in result["config"].items() if not isinstance(v, list)}
    return [json.dumps({**common, **settings, **row}) for row in result["rows"]]


def commit() -> str:
    """The checked-out commit, marked where the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print("\n".join(lines(Path(file))))
