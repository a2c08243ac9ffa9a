"""SwiGLU forward and backward for CPUs, compiled by numba; called through ``kernels.gated``.

bfloat16 arrives as uint16 bits; arithmetic is float32. The loops over ``j`` vectorise, which is why
the exponential is a polynomial here and why the error model is numpy's (a check for division by
zero would keep LLVM from it).
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

_OPTIONS = {"error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}, "cache": True}

f32, u32, i32 = np.float32, np.uint32, np.int32


def _load(value):
    """float32 of a stored number."""


def _store(value, like):
    """``value`` in the storage type of ``like``: bfloat16 rounds to nearest, ties to even."""


@overload(_load)
def _load_overload(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: u32(u32(value) << u32(16)).view(f32)


@overload(_store)
def _store_overload(value, like):
    if isinstance(like, types.Float):
        return lambda value, like: value
    return lambda value, like: _bfloat16_bits(value)


@njit(inline="always", **_OPTIONS)
def _bfloat16_bits(value):
    bits = f32(value).view(u32)
    rounded = u32(bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    # Rounding up could carry a NaN's mantissa into the sign: keep it a NaN.
    if value != value:
        rounded = u32(0x7FC0)
    return np.uint16(rounded)


@njit(inline="always", **_OPTIONS)
def _sigmoid(x):
    """1 / (1 + exp(-x)), relative error about 2e-7; NaN stays NaN."""
    t = -x
    t = f32(88.0) if t > f32(88.0) else t
    t = f32(-87.0) if t < f32(-87.0) else t
    # exp(t) = 2^n exp(r) with |r| <= ln(2) / 2; ln(2) in two parts keeps r exact.
    n = np.floor(t * f32(1.44269504) + f32(0.5))
    r = t - n * f32(0.693359375) + n * f32(2.12194440e-4)
    e = f32(1.9875691500e-4)
    e = e * r + f32(1.3981999507e-3)
    e = e * r + f32(8.3334519073e-3)
    e = e * r + f32(4.1665795894e-2)
    e = e * r + f32(1.6666665459e-1)
    e = e * r + f32(5.0000001201e-1)
    e = e * r * r + r + f32(1.0)
    power = u32(u32(i32(n) + i32(127)) << u32(23)).view(f32)
    return f32(1.0) / (f32(1.0) + e * power)


@njit(**_OPTIONS)
def forward(gate_up, scale, scaled, norm_sq):
    """Fill ``scaled`` and ``norm_sq``; see :func:`lrmoe.kernels.gated.gated_forward`."""
    R, F = scaled.shape
    for i in range(R):
        s = scale[i]
        total = f32(0.0)
        for j in range(F):
            g = _load(gate_up[i, j])
            h = g * _sigmoid(g) * _load(gate_up[i, F + j])
            total += h * h
            scaled[i, j] = _store(s * h, scaled[i, j])
        norm_sq[i] = total


@njit(**_OPTIONS)
def backward(gate_up, row_ids, grad_h, coef, grad_gate_up, scaled, inner):
    """Fill the last three; see :func:`lrmoe.kernels.gated.gated_backward`."""
    P, F = grad_h.shape
    for i in range(P):
        r = row_ids[i]
        c = coef[i]
        total = f32(0.0)
        for j in range(F):
            g = _load(gate_up[r, j])
            u = _load(gate_up[r, F + j])
            d = _load(grad_h[i, j])
            s = _sigmoid(g)
            a = g * s
            total += d * a * u
            scaled[i, j] = _store(c * a * u, scaled[i, j])
            grad_gate_up[i, j] = _store(
                c * d * u * s * (f32(1.0) + g * (f32(1.0) - s)), grad_gate_up[i, j]
            )
            grad_gate_up[i, F + j] = _store(c * d * a, grad_gate_up[i, j])
        inner[i] = total
