"""The clock of the layers' times, as the environment sets it."""

import os
import subprocess
import sys


def test_a_wrong_clock_is_refused_on_import():
    environment = os.environ | {"LRMOE_CLOCK": "sun"}
    command = [sys.executable, "-c", "import lrmoe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "LRMOE_CLOCK='sun': allowed are 'wall', 'cpu'" in done.stderr
