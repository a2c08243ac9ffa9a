"""Interrupted and resumed equals uninterrupted."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lrmoe import Recalibration
from lrmoe.training import checkpoint, launch
from tests.train.runs import HERE, load_tensors, rows_without_times, train, with_

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def run_until_killed(settings, die_at, monkeypatch):
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), path))))
    monkeypatch.setenv("DIE_AT", die_at)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(launch.RanksFailedError, match="-9"):
        launch.launch(settings, 2, worker="dying_worker")


def test_a_run_killed_twice_ends_bitwise_like_an_undisturbed_one(
    tiny, recalibrated_run, tmp_path, monkeypatch
):
    settings = replace(tiny, run_dir=str(tmp_path / "run"))
    checkpoints = Path(settings.run_dir) / "checkpoints"

    run_until_killed(settings, "0:save:8", monkeypatch)
    names = {p.name for p in checkpoints.iterdir()}
    assert names == {"step-00000004", ".unfinished-step-00000008", "latest"}

    settings = replace(settings, resume=True)
    run_until_killed(settings, "1:step:10", monkeypatch)
    assert (checkpoints / "latest").resolve().name == "step-00000008"
    output = train(settings, 2)
    assert "resuming from step-00000008" in output

    expected = load_tensors(recalibrated_run / "checkpoints/step-00000012", tmp_path)
    actual = load_tensors(checkpoints / "step-00000012", tmp_path)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name
    for rank in range(2):
        states = [
            checkpoint.load_rank_state(root / "checkpoints/step-00000012", rank)
            for root in (checkpoints.parent, recalibrated_run)
        ]
        random = [state["random"] for state in states]
        assert torch.equal(random[0].pop("torch"), random[1].pop("torch"))
        assert random[0] == random[1]
        assert states[0]["layers"] == states[1]["layers"]
        assert states[0]["loss_sum"] == states[1]["loss_sum"]
    for log in ("metrics.jsonl", "eval.jsonl", "expert_load.jsonl"):
        assert rows_without_times(checkpoints.parent / log) == rows_without_times(
            recalibrated_run / log
        )


def test_state_survives_other_layouts(exact_run, tiny, tmp_path):
    """From fsdp/ep 2/2 to 2/1, to one rank, and back: the parameters of 12 undisturbed steps."""
    root = tmp_path / "run"
    shutil.copytree(exact_run, root, symlinks=True)
    shutil.rmtree(root / "checkpoints/step-00000012")
    exact = replace(tiny, run_dir=str(root), resume=True, recalibration=Recalibration(rate=0))

    output = train(with_(exact, parallel={"ep_size": 1}, training={"max_steps": 10}), 2)
    assert "resuming from step-00000008" in output
    alone = {"gradient_accumulation_steps": 4, "max_steps": 11}
    assert "resuming from step-00000010" in train(with_(exact, training=alone), 1)
    assert "resuming from step-00000011" in train(exact, 2)

    expected = load_tensors(exact_run / "checkpoints/step-00000012", tmp_path)
    actual = load_tensors(root / "checkpoints/step-00000012", tmp_path)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.norm() > 0:
            error = (actual[name] - value).norm() / value.norm()
            assert error < 1e-4 if "exp_avg" in name else error < 1e-5, (name, error)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name
    rows = {row["step"]: row for row in rows_without_times(root / "metrics.jsonl")}
    assert list(rows) == [3, 6, 9, 10, 11, 12]  # each piece logs its last step
    for row in rows_without_times(exact_run / "metrics.jsonl")[:3]:
        assert rows[row["step"]]["loss"] == pytest.approx(row["loss"], rel=1e-5)
