"""Reusable CPU memory for temporaries that do not outlive one stage of the layer.

A fresh tensor of tens of megabytes costs more in page faults than the copy that fills it: 33 MB
took 19 ms fresh and 2 ms reused on the machine of the README's table. CUDA's caching allocator
already does this, so there this is ``torch.empty``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Scratch(threading.local):
    """Every thread's own: layer calls of two threads run at the same time."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.reuses = True


_scratch = _Scratch()


def scratch(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor that shares memory with every earlier one of this name.

    The caller must be done with the last tensor of the same name, and must not return or save it.
    """
    if device.type != "cpu" or not _scratch.reuses or torch.are_deterministic_algorithms_enabled():
        # Deterministic mode fills uninitialised memory, which tests use to find unwritten rows.
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape)
    buffer = _scratch.buffers.get((name, dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # kept for calls outside of it, which could not write
            buffer = _scratch.buffers[name, dtype] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)


@contextmanager
def scratch_reuse(is_allowed: bool) -> Iterator[None]:
    """Whether temporaries inside keep their memory for the next ones; else that is given back."""
    before, _scratch.reuses = _scratch.reuses, is_allowed
    if not is_allowed:
        release_scratch()
    try:
        yield
    finally:
        _scratch.reuses = before


def scratch_bytes() -> int:
    """Bytes held for temporaries by this thread."""
    return sum(buffer.nbytes for buffer in _scratch.buffers.values())


def release_scratch() -> None:
    """Give the memory of this thread's temporaries back."""
    _scratch.buffers.clear()
