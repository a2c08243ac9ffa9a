"""The layer inside a compiled model: one graph break per layer call, the same numbers."""

import pytest
import torch
from torch import nn

import lrmoe


class Block(nn.Module):
    """A router and a recalibrated layer around a residual."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 4)
        self.gate_up = nn.Parameter(torch.randn(4, 16, 16) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 16, 8) * 0.3)
        self.state = lrmoe.LayerState(lrmoe.Recalibration(rate=0.4), layer)

    def forward(self, x):
        h = self.norm(x)
        p, expert = self.router(h).softmax(-1).topk(2)
        return x + lrmoe.experts(h, expert, p, self.gate_up, self.down, state=self.state)


@pytest.fixture
def model():
    torch._dynamo.reset()
    model = nn.Sequential(Block(0), Block(1), nn.Linear(16, 3))
    model(torch.randn(2, 16))  # the first call of a process imports the compiler: a break more
    for block in model[:2]:
        block.state = lrmoe.LayerState(block.state.config, block.state.layer)
    return model


def test_there_is_one_graph_break_per_layer(model):
    explained = torch._dynamo.explain(model)(torch.randn(8, 16))
    assert len(explained.break_reasons) == 2
    assert all("torch.compiler.disable" in b.reason for b in explained.break_reasons)


def test_a_compiled_model_trains_alike(model):
    def gradients(run):
        model.zero_grad()
        for block in model[:2]:
            block.state = lrmoe.LayerState(block.state.config, block.state.layer)
        for seed in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            run(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients(model)
    got = gradients(torch.compile(model, backend="aot_eager"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
