"""Small arrays of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_LARGEST_PAGEABLE = 1 << 16  # bytes
_ALIGNMENT = 16  # bytes, by which Triton tells pointers apart


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on a device, without a device sync. On the CPU it may share the array's memory.

    The array may be changed after the call: pageable memory is copied before it returns, and the
    driver does that at once for small arrays, while larger ones would make it wait for the device,
    so that those are copied into pinned memory first.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and host.nbytes > _LARGEST_PAGEABLE:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def upload_together(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """:func:`upload` of several arrays of one dimension, in one copy."""
    if device.type == "cpu":
        return [upload(array, device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = np.zeros(sum(sizes) or _ALIGNMENT, np.uint8)  # views of nothing have no stride
    parts, start = [], 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        )
        parts.append(slice(start, start + array.nbytes))
        start += size
    there = upload(packed, device)
    dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    return [there[part].view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
