"""``lrmoe study``: the experiments of the paper and ours, from settings to table and figure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# What is studied -> the module whose ``main`` runs it, and a line for the help.
STUDIES = {
    "memory": ("lrmoe.studies.memory", "simulated: where the memory of a layer call goes"),
    "systems": ("lrmoe.studies.systems", "simulated: throughput, memory and time at cluster scale"),
    "convergence": ("lrmoe.studies.convergence", "does it train as well? rules and rates"),
    "ablation": ("lrmoe.studies.ablation", "scores, router gradients, draws and other settings"),
    "gradient": ("lrmoe.studies.gradient", "bias and variance of each rule's gradient"),
    "noise": ("lrmoe.studies.noise", "the variance that a choice of sizes and quotas leaves"),
    "figures": ("lrmoe.studies.figures", "figures and tables of these studies from their rows"),
    "time-to-loss": ("lrmoe.studies.time_to_loss", "MoE-layer time until a fixed loss is reached"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs ``lrmoe study WHAT ...``; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:13} {line}" for name, (_, line) in STUDIES.items()]
        sys.stdout.write("usage: lrmoe study WHAT [--help]\n\n" + "\n".join(lines) + "\n")
        return 0
    what, *rest = arguments
    if what not in STUDIES:
        raise ValueError(f"study {what!r}: allowed are {', '.join(map(repr, STUDIES))}")
    try:
        module = importlib.import_module(STUDIES[what][0])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lrmoe"):
            raise
        raise ValueError(
            f"study {what} needs {error.name}; install it with: pip install 'lrmoe[train]'"
        ) from error
    code: int = module.main(rest)
    return code
