"""What every test gets: a seed, one thread, poisoned memory; ``gpu`` tests skip without a GPU."""

import gc
import os
import random
from importlib.util import find_spec

import pytest
import torch

try:
    import hypothesis
except ModuleNotFoundError:  # a GPU machine that runs the GPU tests alone
    pass
else:
    # Time depends on what else the machine does; a test that hangs meets pytest's own limit.
    hypothesis.settings.register_profile("lrmoe", deadline=None)
    hypothesis.settings.load_profile("lrmoe")

# Fixtures of modules compute before those of tests: with more threads than idle cores, slowly.
torch.set_num_threads(1)

collect_ignore = [] if find_spec("triton") else ["test_triton.py"]
if not torch.cuda.is_available():
    # Triton's own functions are made for the interpreter when it is imported, by whomever.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """What was imported stays: a collection of garbage need not look at it every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _reproducible(request):
    """Seed, use one thread, and fill uninitialised memory with NaN so that reading it shows."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # On a GPU not every operation has a deterministic kernel; memory is poisoned all the same.
    on_gpu = request.node.get_closest_marker("gpu") is not None
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_num_threads(threads)
