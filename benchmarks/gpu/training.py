"""Thirty steps of a small model on the device and on the CPU, from the same initial numbers.

A byte-level transformer in plain PyTorch around ``lrmoe.experts``, in float32, on the source text
of the running Python's standard library. At C0 both should give the same losses for as long as
rounding does not change a routing decision. Whether C20 and C50 train well is a question for
``docs/convergence.md``; here they show that such a run works on the device.

Shape letters: B = sequences, S = their length, T = B * S tokens, D = model dim.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lrmoe
from benchmarks.gpu.part import Part, start

_BYTES = 256  # the vocabulary
_TEXT_BYTES = 1 << 20
RATES = (0.0, 0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The model and how long it is trained."""

    hidden: int = 128
    ffn: int = 64
    experts: int = 32
    top_k: int = 4
    layers: int = 2
    heads: int = 4
    sequences: int = 8
    length: int = 256
    steps: int = 30
    learning_rate: float = 1e-3


class Block(nn.Module):
    """Causal attention, then experts behind a softmax router."""

    def __init__(self, run: Run, rate: float, layer: int) -> None:
        super().__init__()
        D, E = run.hidden, run.experts
        self.run = run
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * run.ffn, D) * D**-0.5)
        self.down = nn.Parameter(torch.randn(E, D, run.ffn) * run.ffn**-0.5)
        self.state = lrmoe.LayerState(lrmoe.Recalibration(rate=rate), layer)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Both residual branches."""
        heads = self.qkv(self.norms[0](x_BSD)).unflatten(-1, (3, self.run.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).flatten(2))
        h_TD = self.norms[1](x_BSD).flatten(0, 1)
        p_TK, expert_TK = self.router(h_TD).softmax(1).topk(self.run.top_k)
        p_TK = p_TK / p_TK.sum(1, keepdim=True)
        y_TD = lrmoe.experts(h_TD, expert_TK, p_TK, self.gate_up, self.down, state=self.state)
        return x_BSD + y_TD.view_as(x_BSD)


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, run: Run, rate: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(_BYTES, run.hidden)
        self.place = nn.Embedding(run.length, run.hidden)
        self.blocks = nn.ModuleList(Block(run, rate, layer) for layer in range(run.layers))
        self.norm = nn.RMSNorm(run.hidden)
        self.head = nn.Linear(run.hidden, _BYTES, bias=False)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Logits of every position."""
        x_BSD = self.embed(ids_BS) + self.place.weight[: ids_BS.shape[1]]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))


def read_text() -> torch.Tensor:
    """A megabyte of the standard library's source."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(run: Run, rate: float, device: torch.device, text: torch.Tensor) -> list[float]:
    """The loss of every step; initial numbers and batches do not depend on device or rate."""
    torch.manual_seed(0)
    model = Model(run, rate).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(run.steps):
        begin_B = torch.randint(len(text) - run.length - 1, (run.sequences,), generator=generator)
        batch = torch.stack([text[b : b + run.length + 1] for b in begin_B.tolist()]).to(device)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for block in model.blocks:
            block.state.finish_step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def measure(part: Part) -> None:
    """A row for every rate on the device; C0 with the CPU's losses beside it."""
    run = (
        Run(hidden=32, ffn=16, experts=8, sequences=2, length=32, steps=5)
        if part.is_small
        else Run()
    )
    text = read_text()
    # The layer's activation on CPUs is compiled by numba.
    on_cpu = train(run, 0.0, torch.device("cpu"), text) if find_spec("numba") else None
    for rate in RATES:
        losses = train(run, rate, part.device, text)
        difference = None
        if rate == 0 and on_cpu is not None:
            difference = max(abs(a / b - 1) for a, b in zip(losses, on_cpu, strict=True))
        part.write(
            "training",
            impl="lrmoe",
            rate=rate,
            selection="sampled",
            dtype="fp32",
            steps=run.steps,
            first_loss=losses[0],
            last_loss=losses[-1],
            last_loss_cpu=on_cpu[-1] if rate == 0 and on_cpu is not None else None,
            largest_difference=difference,
            losses=losses,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """C0, C20 and C50."""
    measure(start("A short training run on the device and on the CPU.", arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
