"""``lrmoe check`` passes here, and notices a layer that computes something else."""

import json

import pytest

from lrmoe import check, cli
from lrmoe.kernels import gated


def test_passes_and_writes_json(tmp_path, capsys):
    file = tmp_path / "check.json"
    assert cli.main(["check", "--json", str(file)]) == 0
    assert "C0 parity, glm4_moe" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert {row["check"] for row in rows} >= {"torch", "device", "C0 parity, qwen3_moe"}


def test_fails_when_a_gradient_is_wrong(monkeypatch, capsys):
    def wrong(*args):
        grad_gate_up, scaled, inner = gated.gated_backward_reference(*args)
        return grad_gate_up, 1.001 * scaled, inner

    monkeypatch.setattr("lrmoe.compute.gated_backward", wrong)
    row = check.parity("qwen3_moe")
    assert not row["ok"]
    assert "down_proj" in row["result"]
    assert check.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_refuses_a_directory_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"--model=.*no config.json"):
        check.main(["--model", str(tmp_path)])
