"""The long runs of the planner's tests are asked for by name: ``pytest -m slow tests/planner``."""

import pytest


def pytest_collection_modifyitems(config, items):
    if "slow" in (config.getoption("markexpr") or ""):
        return
    for item in items:
        if item.get_closest_marker("slow") and "tests/planner" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="long; run with -m slow"))
