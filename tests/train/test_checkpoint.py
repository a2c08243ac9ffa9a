"""Which checkpoints count, and what a resume refuses. One rank, in this process."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lrmoe import Recalibration
from lrmoe.training import checkpoint, job
from lrmoe.training.trainer import MoETrainer
from tests.train.runs import rows_without_times, with_

pytestmark = pytest.mark.usefixtures("_without_images")


@pytest.fixture(scope="module")
def short_run(tiny, tmp_path_factory):
    """Settings of a run of 6 steps on one rank, with checkpoints at 2, 4 and 6."""
    root = tmp_path_factory.mktemp("short") / "run"
    training = {"max_steps": 6, "save_steps": 2, "logging_steps": 2}
    settings = with_(replace(tiny, run_dir=str(root)), training=training)
    torch.set_num_threads(1)  # as in the tests: sums depend on it in the last bits
    assert job.run(settings).completed
    return settings


@pytest.fixture
def resumed(short_run, tmp_path):
    """The same, to be resumed in a copy."""
    shutil.copytree(short_run.run_dir, tmp_path / "run", symlinks=True)
    return replace(short_run, run_dir=str(tmp_path / "run"), resume=True)


def checkpoints(settings):
    return Path(settings.run_dir) / "checkpoints"


def test_newest_complete_checkpoint_is_found(short_run):
    found = checkpoint.find_newest(checkpoints(short_run))
    assert found.newest.name == "step-00000006"
    assert found.ignored == []
    assert (checkpoints(short_run) / "latest").resolve() == found.newest.resolve()
    manifest = checkpoint.read_manifest(found.newest)
    assert manifest["step"] == 6
    assert {"scheduler.pt", "trainer_state.json", "rank-00000.pt"} <= manifest["files"].keys()


def test_unfinished_and_damaged_ones_are_named_and_not_used(resumed, capsys):
    directory = checkpoints(resumed)
    (directory / ".unfinished-step-00000008").mkdir()
    (directory / "step-00000006/scheduler.pt").write_bytes(b"cut")
    (directory / "step-00000004/manifest.json").unlink()
    found = checkpoint.find_newest(directory)
    assert found.newest.name == "step-00000002"
    assert any("unfinished" in sentence for sentence in found.ignored)
    assert any("scheduler.pt has 3 bytes" in sentence for sentence in found.ignored)
    assert any("manifest.json is missing" in sentence for sentence in found.ignored)

    assert job.run(resumed).completed
    output = capsys.readouterr().out
    assert "ignored: checkpoints/step-00000006 is damaged" in output
    assert "resuming from step-00000002" in output
    # The damaged ones were written anew and what was unfinished is gone.
    assert sorted(p.name for p in directory.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    assert checkpoint.find_newest(directory).newest.name == "step-00000006"


def test_only_the_last_are_kept(tiny, tmp_path):
    training = {"max_steps": 5, "save_steps": 1, "keep_last": 2, "eval_steps": 0}
    settings = with_(replace(tiny, run_dir=str(tmp_path / "run")), training=training)
    job.run(settings)
    names = sorted(p.name for p in checkpoints(settings).iterdir())
    assert names == ["latest", "step-00000004", "step-00000005"]


def test_training_on_continues_the_logs(resumed, short_run):
    outcome = job.run(with_(resumed, training={"max_steps": 10}))
    assert outcome.summary["steps"] == 10
    rows = rows_without_times(Path(resumed.run_dir) / "metrics.jsonl")
    before = rows_without_times(Path(short_run.run_dir) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert rows[:3] == before


def test_logs_are_cut_back_to_the_checkpoint(resumed, short_run):
    shutil.rmtree(checkpoints(resumed) / "step-00000006")
    metrics = Path(resumed.run_dir) / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 7, "lo')  # what a killed run may leave
    job.run(resumed)
    assert rows_without_times(metrics) == rows_without_times(
        Path(short_run.run_dir) / "metrics.jsonl"
    )


def test_a_run_that_was_killed_before_its_export_gets_it(resumed, short_run, capsys):
    root = Path(resumed.run_dir)
    shutil.rmtree(root / "final")
    (root / "summary.json").unlink()
    assert job.run(resumed).completed
    assert "the run has already reached step 6 of 6" in capsys.readouterr().out
    for name in ("final/model.safetensors", "metrics.jsonl", "config.yaml"):
        expected = (Path(short_run.run_dir) / name).read_bytes()
        if name == "config.yaml":
            expected = expected.replace(short_run.run_dir.encode(), str(root).encode())
        assert (root / name).read_bytes() == expected
    assert (root / "summary.json").is_file()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training": {"seed": 1}}, "training.seed=1: the checkpoint step-00000006 was"),
        ({"training": {"learning_rate": 1.0}}, "training.learning_rate=1.0"),
        ({"training": {"per_device_train_batch_size": 4}}, "blocks per step"),
        ({"data": {"block_size": 16}}, "data.block_size=16"),
        ({"data": {"validation_share": 0.5}}, "fingerprint of the tokens"),
        ({"model": {"preset": "glm4-moe-small", "overrides": {}}}, "model ("),
        ({"recalibration": Recalibration(rate=0.2)}, "recalibration.rate=0.2"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused_by_name(resumed, changes, sentence):
    changes = {**changes, "training": {"max_steps": 8, **changes.get("training", {})}}
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        job.run(with_(resumed, **changes))
    assert sentence in str(refused.value)


def test_a_checkpoint_from_before_strata_is_one_without(resumed, monkeypatch):
    def forget_strata(path):
        manifest = read(path)
        del manifest["agreement"]["recalibration.strata"]
        return manifest

    read = checkpoint.read_manifest
    monkeypatch.setattr(checkpoint, "read_manifest", forget_strata)
    with pytest.raises(ValueError, match="trained with 'none'; use that value"):
        job.run(with_(resumed, training={"max_steps": 8}))
    now = replace(resumed.recalibration, strata="none")
    assert job.run(with_(resumed, training={"max_steps": 7}, recalibration=now)).completed


def test_nothing_to_resume_is_refused(tiny, tmp_path):
    missing = replace(tiny, run_dir=str(tmp_path / "nowhere"), resume=True)
    with pytest.raises(ValueError, match="does not exist, so there is nothing to resume"):
        job.run(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        job.run(replace(missing, run_dir=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    "moment", ["_make_empty", "random_state", "_files", "_force_to_disk", "point_latest"]
)
def test_a_crash_at_any_moment_of_a_save_leaves_a_good_checkpoint(
    resumed, short_run, moment, monkeypatch
):
    """The call in the middle of the save at step 8 raises, as a full disk would."""

    def crash(*args):
        raise OSError("no space left on device")

    def crash_at_step_8(self, model, trial, save=MoETrainer._save_checkpoint):
        if self.state.global_step == 8:
            monkeypatch.setattr(checkpoint, moment, crash)
        save(self, model, trial)

    monkeypatch.setattr(MoETrainer, "_save_checkpoint", crash_at_step_8)
    longer = with_(resumed, training={"max_steps": 10})
    with pytest.raises(OSError, match="no space left"):
        job.run(longer)
    monkeypatch.undo()

    newest = checkpoint.find_newest(checkpoints(resumed)).newest
    assert newest.name in ("step-00000006", "step-00000008")
    assert (checkpoints(resumed) / "latest").resolve().is_dir()
    assert job.run(longer).summary["steps"] == 10


def test_epochs_instead_of_steps(tiny, tmp_path):
    training = {
        "max_steps": None,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 64,
        "logging_steps": 1,
        "eval_steps": 0,
    }
    settings = with_(replace(tiny, run_dir=str(tmp_path / "run")), training=training)
    summary = job.run(settings).summary
    # 928 blocks, 2 * 64 per step: 7 steps and a rest that is dropped, twice.
    assert summary["steps"] == 14
    rows = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [14]
