"""The examples run as a user would start them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_sft_with_lora_on_the_experts(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "sft_lora.py", "--out", tmp_path, "--rate", "0.5"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fractions = [
        float(part.split("'")[1]) for part in done.stdout.split("'backward_fraction': ")[1:]
    ]
    assert len(fractions) == 5
    assert all(0.5 <= fraction < 0.65 for fraction in fractions)
    # lora_B starts at zero: it moves only if gradients reach the adapters of the experts.
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moved = [tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name]
    assert len(moved) == 4
    assert all(moved)
