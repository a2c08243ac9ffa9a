"""What of the row kernels is a loop on CPUs, compiled by numba; called through ``kernels.rows``."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

f32, f64, u32 = np.float32, np.float64, np.uint32


@njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, cache=True)
def row_norm_sq(bits, shift, norm_sq, is_bad):
    """Fill the last two; see :func:`lrmoe.kernels.rows.row_norm_sq`. Sums are of float64.

    Args:
        bits: of float32 (shift 0) or bfloat16 (shift 16): the upper half of a float32.
    """
    T, D = bits.shape
    for t in range(T):
        total = f64(0.0)
        bad = u32(0)
        for j in range(D):
            whole = u32(u32(bits[t, j]) << u32(shift))
            x = f64(whole.view(f32))
            total += x * x
            bad |= u32((whole & u32(0x7F800000)) == u32(0x7F800000))
        norm_sq[t] = total
        is_bad[t] = bad != 0
