"""Operators of the library ``lrmoe``: a reference for every device, Triton on CUDA.

Registered with :class:`torch.library.Library` and not with ``custom_op``, whose Python layers cost
eight times as much (14 us a call; ``docs/log.md``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import torch

_LIBRARY: Any = torch.library.Library("lrmoe", "DEF")  # type: ignore[no-untyped-call]


Operator = TypeVar("Operator", bound=Callable[..., Any])


def define(
    triton_module: str,
    *,
    fills: Sequence[str] = (),
    fake: Callable[..., Any] = lambda *arguments: None,
) -> Callable[[Operator], Operator]:
    """Make a function an operator of its name, which nobody differentiates through.

    The function runs everywhere but on CUDA, where the one of the same name in the module of Triton
    kernels does.

    Args:
        triton_module: in ``lrmoe.kernels``; imported on first use.
        fills: arguments that are written.
        fake: returns results without values for the same arguments.
    """

    def wrap(reference: Operator) -> Operator:
        name = reference.__name__

        def on_cuda(*arguments: Any) -> Any:
            kernels = triton_kernels(triton_module)
            if kernels is None:
                return reference(*arguments)
            # Triton launches on the current device.
            with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
                return getattr(kernels, name)(*arguments)

        _LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=fills))
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, on_cuda, "CUDA")
        _LIBRARY.impl(name, fake, "Meta")
        operator: Operator = getattr(torch.ops.lrmoe, name).default
        return operator

    return wrap


@cache
def triton_kernels(module: str) -> ModuleType | None:
    """A module of Triton kernels in ``lrmoe.kernels``; ``None`` and a warning without Triton."""
    try:
        return import_module(f"lrmoe.kernels.{module}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        warnings.warn(
            "triton is not installed: the layer runs in plain PyTorch operations, which is slower",
            stacklevel=3,
        )
        return None
