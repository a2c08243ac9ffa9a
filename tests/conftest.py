"""What every test gets: a seed, one thread, poisoned memory; ``gpu`` tests skip without a GPU."""

import random

import hypothesis
import pytest
import torch

# Time depends on what else the machine does; a test that hangs meets pytest's own limit.
hypothesis.settings.register_profile("lrmoe", deadline=None)
hypothesis.settings.load_profile("lrmoe")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _reproducible():
    """Seed, use one thread, and fill uninitialised memory with NaN so that reading it shows."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_num_threads(threads)
