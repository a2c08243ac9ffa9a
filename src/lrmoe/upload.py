"""Small arrays of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on a device, without a device sync. On the CPU it may share the array's memory.

    Pageable memory is copied before the call returns, so the array may be changed after it.
    """
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
