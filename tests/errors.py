"""How far a tensor is from what it should be."""

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return norm of difference / norm of reference; the former alone for a zero reference."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    scale = want.norm().item()
    return (got - want).norm().item() / (scale or 1.0)
