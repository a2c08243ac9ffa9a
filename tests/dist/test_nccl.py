"""The tests of ``test_layer.py`` and ``test_replicas.py`` once more, over NCCL: a GPU for each rank.

``pytest -m nccl``. They have not been run yet: no machine with two GPUs was at hand.
"""

import pytest
import torch

from tests import ranks
from tests.dist.test_layer import *  # noqa: F403
from tests.dist.test_replicas import *  # noqa: F403

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, here are {torch.cuda.device_count()}",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _over_nccl():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "backend", "nccl")
        yield
