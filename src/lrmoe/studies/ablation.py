"""``lrmoe study ablation``: scores, router gradients, draws and the other settings of the layer."""

from __future__ import annotations

from collections.abc import Sequence

from lrmoe.studies import convergence


def main(arguments: Sequence[str]) -> int:
    """Runs what is missing of the grid, then shows all rows; returns the exit code.

    Raises:
        ValueError: for a mistake of the user.
    """
    return convergence.main(arguments, "ablation")
