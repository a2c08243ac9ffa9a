"""What links cost a layer call, in forward passes of a pair: defaults for training, where nobody
has measured them.

A pair's forward pass takes ``6 D F`` FLOPs (two for every weight of three projections). With R
FLOP/s and B bytes/s, a byte costs as much as ``R / (B * 6 D F)`` pairs. Only the ratio R / B
matters: the number of pairs above which a replica pays, whatever the size of the expert
(:mod:`lrmoe.planner.recalibrated`).
"""

from __future__ import annotations

from lrmoe.planner.memory import LayerShape
from lrmoe.planner.problem import Costs

# FLOP/s of the experts' products over bytes/s of a rank's link, inside a node and between nodes.
_FLOPS_PER_BYTE = {
    # Hopper: about 400 TFLOP/s in bf16; 450 GB/s inside a node, 50 GB/s between nodes.
    "cuda": (900.0, 8000.0),
    # One core, bf16, and gloo through shared memory: 145 GFLOP/s and about 1 GB/s in `bench layer`.
    "cpu": (150.0, 150.0),
}


def link_costs(shape: LayerShape, device_type: str) -> Costs:
    """Costs whose unit is one pair's forward pass; unknown devices count as ``cuda``."""
    near, far = _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
    flops = 6 * shape.hidden * shape.ffn
    return Costs(
        intra_byte=near / flops,
        inter_byte=far / flops,
        row_bytes=shape.row_bytes,
        expert_bytes=shape.expert_bytes,
        gradient_bytes=shape.expert_bytes,
    )
