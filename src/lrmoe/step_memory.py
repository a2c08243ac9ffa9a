"""What the MoE layers of a model hold beside the call that runs, for budgets on a whole step.

While a layer runs, the others hold their weights and gradients, and those before it what their
forward passes saved. It may use what is left; what it saves itself must leave room for what the
later layers are expected to save. Bytes are those of the tensors that exist, so that a rank which
frees a graph early, or late, is never guessed at.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any


class StepMemory:
    """Bytes of this rank by layer; shared by the layers of one model.

    Args:
        resting: weights and gradients of every layer between its calls.
    """

    def __init__(self, resting: Mapping[int, int] | None = None) -> None:
        self.resting = dict(resting or {})
        self._saved: dict[int, int] = {}
        self._expected: dict[int, int] = {}

    def hold(self, layer: int, call: Any, num_bytes: int) -> None:
        """A call (an object with an ``id``) saved so much for its backward pass."""
        self._expected[layer] = num_bytes
        self._saved[call.id] = num_bytes
        # A graph that is dropped without a backward pass takes what it saved with it.
        weakref.finalize(call, self._saved.pop, call.id, None).atexit = False

    def release(self, call: Any) -> None:
        """The backward pass of a call is over."""
        self._saved.pop(call.id, None)

    def of_others(self, layer: int, call: Any = None) -> int:
        """Bytes of all other layers, and of all other calls whose backward pass is to come."""
        saved = sum(self._saved.values())
        if call is not None:
            saved -= self._saved.get(call.id, 0)
        return saved + sum(n for other, n in self.resting.items() if other != layer)

    def of_later(self, layer: int) -> tuple[int, int]:
        """Bytes that later layers saved in their last calls, and how many have had none yet."""
        later = [other for other in self.resting if other > layer]
        expected = sum(self._expected.get(other, 0) for other in later)
        return expected, sum(other not in self._expected for other in later)
