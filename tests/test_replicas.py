"""Gradients of replicas on their way home, without processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lrmoe import replicas


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [[], [2], [3, 0], [2, 2], [0, 3, 0, 1, 0]])
def test_gradients_of_replicas_are_summed_in_float32_and_rounded_once(dtype, experts, monkeypatch):
    routes = replicas.Routes(
        send_expert_n=np.array(experts, np.int64),
        send_W=[0, len(experts)],
        receive_slot_n=np.empty(0, np.int64),
        receive_W=[0, 0],
    )
    monkeypatch.setattr(replicas.Routes, "of", lambda *_: routes)
    # Multiples of 1/8, whose sums are exact in float32.
    grads = (torch.randint(-99, 99, (4, 6, 5)) / 8).to(dtype)
    returned = (torch.randint(-99, 99, (len(experts), 6, 5)) / 8).to(dtype)
    exchange = SimpleNamespace(all_to_all=lambda sent, *_: returned)
    want = grads.double()
    for expert, part in zip(experts, returned.double(), strict=True):
        want[expert] += part
    got = replicas.add_replica_gradients(grads, None, None, None, exchange)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want, rtol=1.001 * 2**-9 if dtype == torch.bfloat16 else 0, atol=0
    )
