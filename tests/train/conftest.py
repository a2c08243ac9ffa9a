"""Runs that several tests look at, started once: two ranks take about ten seconds to start."""

from dataclasses import replace

import pytest

from lrmoe import Recalibration
from lrmoe.training.settings import DataSettings, ModelSettings, TrainSettings
from tests.train.runs import TINY, TRAINING, start, train, without_images


@pytest.fixture(scope="module")
def _without_images():
    with without_images():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A directory of a few text files."""
    root = tmp_path_factory.mktemp("text")
    for i in range(20):
        words = " ".join(f"w{(i * 7 + j * j) % 101}" for j in range(400))
        (root / f"{i:02d}.txt").write_text(words)
    return root


@pytest.fixture(scope="session")
def tiny(text):
    """Settings of a run of a few seconds; ``run_dir`` is to be set."""
    return TrainSettings(
        run_dir="",
        model=ModelSettings(overrides=TINY),
        data=DataSettings(path=str(text), block_size=32, validation_blocks=8),
        training=TRAINING,
        recalibration=Recalibration(rate=0.5),
    )


@pytest.fixture(scope="session")
def recalibrated_run(tiny, tmp_path_factory):
    """12 uninterrupted steps on two ranks at rate 0.5."""
    root = tmp_path_factory.mktemp("runs") / "recalibrated"
    train(replace(tiny, run_dir=str(root)), 2)
    return root


@pytest.fixture(scope="session")
def exact_run(tiny, tmp_path_factory):
    """12 uninterrupted steps on two ranks at rate 0, and what the command wrote beside it."""
    root = tmp_path_factory.mktemp("runs") / "exact"
    settings = replace(tiny, run_dir=str(root), recalibration=Recalibration(rate=0))
    output = start(settings, 2, json_file=root.with_name("result.json"))
    root.with_name("output.txt").write_text(output)
    return root
