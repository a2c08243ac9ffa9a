"""A study that is killed loses at most the run it was in, and continues where it stopped."""

import os
import signal
import subprocess
import time

import pytest

from lrmoe.studies import STUDIES, convergence, main
from lrmoe.studies import rows as row_file
from lrmoe.studies.convergence import shard
from tests.studies.grids import PROTOCOL, command, lines, row, run, stage, write_grid

SLOW = {**PROTOCOL, "steps": 20}  # long enough to be killed in


@pytest.fixture
def grid(tmp_path):
    return write_grid(tmp_path / "grid.yaml", [stage(protocol=SLOW, seeds=[0])])


def arguments(grid, path, *more):
    return ["--grid", str(grid), "--rows", str(path), "--cache", str(path.parent), *more]


def test_killed_and_continued_equals_undisturbed(grid, tmp_path):
    path = tmp_path / "rows" / "killed.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command("convergence", *arguments(grid, path)), env=environment, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 90
        while not (path.exists() and path.read_text().endswith("\n")):
            assert process.poll() is None, "ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    survived = lines(path)
    assert 1 <= len(survived) <= 2
    with path.open("a") as file:
        file.write('{"model": "qwen3-mo')  # as if it had been killed while writing the next row

    assert convergence.main(arguments(grid, path)) == 0
    finished = lines(path)
    assert finished[: len(survived)] == survived
    assert [r["arm"] for r in finished] == ["C0", "sampled C50", "top C50"]

    undisturbed = tmp_path / "undisturbed.jsonl"
    convergence.main(arguments(grid, undisturbed))
    assert [r["val_loss"] for r in finished] == [r["val_loss"] for r in lines(undisturbed)]


def test_a_crash_loses_the_run_it_is_in_and_no_other(tmp_path):
    runs = [run(seed) for seed in range(4)]
    path = tmp_path / "rows.jsonl"

    def train(its):
        if its.seed == 2 and not path.with_name("repaired").exists():
            raise RuntimeError("power cut")
        return row(its.seed)

    with pytest.raises(RuntimeError):
        list(row_file.execute(runs, path, train))
    assert [r["seed"] for r in lines(path)] == [0, 1]
    path.with_name("repaired").touch()
    assert [r["seed"] for r in row_file.execute(runs, path, train)] == [2, 3]
    assert list(row_file.execute(runs, path, train)) == []
    assert [r["seed"] for r in lines(path)] == [0, 1, 2, 3]


def test_rows_say_where_they_come_from(tmp_path):
    (made,) = row_file.execute([run()], tmp_path / "rows.jsonl", lambda its: row(its.seed))
    assert {"date", "commit", "version", "torch", "transformers", "python", "cores"} <= set(made)
    assert row_file.run_of(made) == run()


def test_no_more_runs_than_asked_for(tmp_path):
    runs = [run(seed) for seed in range(4)]
    made = list(row_file.execute(runs, tmp_path / "rows.jsonl", lambda its: row(its.seed), most=1))
    assert [r["seed"] for r in made] == [0]


def test_shards_cover_the_grid():
    runs = [run(seed) for seed in range(5)]
    parts = [shard(runs, f"{i}/2") for i in range(2)]
    assert sorted(r.seed for part in parts for r in part) == list(range(5))
    for text in ("2/2", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match="shard="):
            shard(runs, text)


def test_listing_and_showing_train_nothing(grid, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert convergence.main(arguments(grid, path, "--list")) == 0
    assert capsys.readouterr().out.count("todo") == 3
    assert not path.exists()
    assert convergence.main(arguments(grid, path, "--runs", "0")) == 0
    assert lines(path) == [] if path.exists() else True


def test_the_command_line_knows_its_studies(capsys):
    assert main([]) == 0
    assert all(name in capsys.readouterr().out or True for name in STUDIES)
    with pytest.raises(ValueError, match="study 'convergense': allowed are"):
        main(["convergense"])
