"""The command line, and what a run leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lrmoe import cli
from lrmoe.training.data import load_text
from lrmoe.training.settings import TrainSettings
from tests.train.runs import environment, start, with_

slow = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "'trian' is not a command; the nearest valid one is 'train'"),
        (["train", "--data.blok_size", "8"], "the nearest valid one is 'data.block_size'"),
        (["train", "--recalibration.rat=1"], "the nearest valid one is 'recalibration.rate'"),
        (["train", "--recalibration.rate", "1.5"], "recalibration.rate=1.5: allowed is"),
        (["train", "--recalibration.auto.low=0.7"], "auto.low=0.7, auto.high=0.5: allowed is"),
        (["train", "--data.block_size", "1"], "data.block_size=1: must be at least 2"),
        (["train", "--nproc", "2", "--parallel.ep_size", "3"], "parallel.ep_size=3: must divide"),
        (
            ["train", "--nproc", "2", "--data.path", "nowhere"],
            "data.path='nowhere': does not exist",
        ),
        (["train", "--nproc", "2", "--model.path", "nowhere"], "a directory with a config.json"),
        (["train", "--resume", "true"], "name the run directory to continue"),
        (["train", "nowhere.yaml"], "no such file"),
    ],
)
def test_mistakes_are_one_line_that_names_the_setting(arguments, sentence, capsys):
    assert cli.main(arguments) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_importing_loads_no_framework():
    code = (
        "import sys, lrmoe, lrmoe.cli; "
        "print({'transformers', 'matplotlib', 'jsonargparse', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_unknown_key_in_a_file_names_the_nearest(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("training: {max_step: 3}\n")
    assert cli.main(["train", str(config)]) == cli.EXIT_USAGE
    sentence = "'training.max_step' is not a setting; the nearest valid one is 'training.max_steps'"
    assert sentence in capsys.readouterr().err


def test_print_config_shows_file_and_overrides(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("training: {max_steps: 3, seed: 5}\nmodel: {overrides: {hidden_size: 8}}\n")
    assert cli.main(["train", str(config), "--training.seed", "7", "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    settings = TrainSettings.from_dict(printed)
    assert settings.training.max_steps == 3
    assert settings.training.seed == 7
    assert settings.model.overrides == {"hidden_size": 8}


class TestRunDirectory:
    pytestmark = slow

    def test_metrics_have_the_documented_keys(self, exact_run):
        rows = [json.loads(line) for line in (exact_run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [3, 6, 9, 12]
        documented = (
            "step loss tokens_per_second moe_ms moe_fwd_ms moe_bwd_ms backward_fraction score_mass "
            "imbalance_fwd imbalance_bwd bytes_fwd bytes_bwd replicas memory_peak dead_experts "
            "moved_weights moved_rows plan_us makespan memory_layer memory_layer_model memory_step"
        )
        for row in rows:
            assert set(documented.split()) <= row.keys()

    def test_summary_and_json_agree(self, exact_run, tiny):
        summary = json.loads((exact_run / "summary.json").read_text())
        result = json.loads(exact_run.with_name("result.json").read_text())
        assert result["command"] == "train"
        assert {"version", "machine", "config", "rows"} <= result.keys()
        assert result["rows"] == [summary]
        assert summary["steps"] == 12
        assert 2 < summary["val_loss"] < 5.6

    def test_config_starts_the_same_run(self, exact_run, tiny):
        stored = TrainSettings.from_dict(yaml.safe_load((exact_run / "config.yaml").read_text()))
        assert stored.run_dir == str(exact_run)
        assert stored.training == tiny.training
        assert (stored.parallel.fsdp_size, stored.parallel.ep_size) == (2, 2)

    def test_table_is_printed(self, exact_run):
        output = exact_run.with_name("output.txt").read_text()
        for label in ("validation loss", "validation perplexity", "tokens/s"):
            assert label in output

    def test_plots_are_drawn(self, exact_run):
        for name in ("loss", "expert_load", "backward_fraction", "time_split", "overview"):
            assert (exact_run / f"plots/{name}.png").read_bytes().startswith(b"\x89PNG")

    def test_export_loads_without_this_package(self, exact_run, tiny):
        model = AutoModelForCausalLM.from_pretrained(exact_run / "final")
        assert model.config.use_cache
        assert not hasattr(model.config, "lrmoe")
        block = load_text(tiny.data).validation[0]["input_ids"][None]
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=block, labels=block).loss
        assert 2 < loss < 5.6

    def test_export_has_the_keys_of_a_fresh_model(self, exact_run, tmp_path):
        final = exact_run / "final"
        model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(final).config)
        model.save_pretrained(tmp_path)
        assert _keys(final / "model.safetensors") == _keys(tmp_path / "model.safetensors")

    def test_a_used_directory_is_refused(self, exact_run, tiny, capsys):
        arguments = ["train", "--run_dir", str(exact_run), "--nproc", "2"]
        assert cli.main(arguments) == cli.EXIT_USAGE
        assert "is not empty" in capsys.readouterr().err


def _keys(file):
    with safe_open(file, framework="pt") as tensors:
        return {(key, tuple(tensors.get_slice(key).get_shape())) for key in tensors.keys()}  # noqa: SIM118


@pytest.mark.dist
@pytest.mark.slow
def test_a_failing_rank_ends_all_and_its_traceback_is_shown(tiny, tmp_path):
    settings = with_(
        replace(tiny, run_dir=str(tmp_path / "run")), training={"lr_scheduler_type": "zigzag"}
    )
    output = start(settings, 2, expect=cli.EXIT_FAILED)
    last = output.split("ended with exit code 1")[1]
    assert "Traceback (most recent call last)" in last
    assert "training_arguments" in last
    assert "zigzag is not a valid SchedulerType" in last
    assert not any((tmp_path / "run").iterdir())  # so that it can be tried again


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "terminate"])
def test_a_signal_saves_and_every_rank_leaves(how, tiny, tmp_path):
    root = tmp_path / "run"
    settings = with_(replace(tiny, run_dir=str(root)), training={"max_steps": 100_000})
    config = tmp_path / "run.json"
    config.write_text(json.dumps(settings.to_dict()))
    process = subprocess.Popen(
        [sys.executable, "-m", "lrmoe.cli", "train", str(config), "--nproc", "2"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for(lambda: (root / "metrics.jsonl").exists(), process)
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole job
        else:
            process.terminate()  # a scheduler sends it to the process that it started
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "checkpoint saved; continue with: lrmoe train" in output
    assert "Traceback" not in output, output
    last = json.loads((root / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    saved = int((root / "checkpoints/latest").resolve().name.removeprefix("step-"))
    assert last <= saved < last + 3
    assert not list((root / "checkpoints").glob(".unfinished*"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def _wait_for(condition, process, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
