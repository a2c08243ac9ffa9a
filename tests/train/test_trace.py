"""``lrmoe train --trace --trace-pairs``: the run's own log, again from the trace alone."""

import json
from dataclasses import replace

import pytest

from lrmoe import Budget, Recalibration
from lrmoe.cli import main
from lrmoe.cluster.exact import replay_pairs, totals
from lrmoe.cluster.trace import read_trace
from lrmoe.training import job
from tests.train.runs import TINY, train, with_

pytestmark = pytest.mark.usefixtures("_without_images")
CONFIG = Recalibration(rate=0.4, placement="recalibrated", budget=Budget(slots=1))


@pytest.mark.dist
def test_a_traced_run_is_reproduced(tiny, tmp_path):
    path = tmp_path / "trace.parquet"
    settings = replace(
        with_(
            tiny,
            # Enough pairs that a replica pays for its weights.
            model={"overrides": TINY | {"hidden_size": 64, "moe_intermediate_size": 128}},
            data={"block_size": 256, "validation_blocks": 2},
            training={
                "max_steps": 3, "logging_steps": 3, "eval_steps": 0,
                "per_device_train_batch_size": 8,
            },
        ),
        run_dir=str(tmp_path / "run"), trace=str(path), trace_pairs=True, recalibration=CONFIG,
    )  # fmt: skip
    train(settings, 2)
    trace = read_trace(path)
    assert [file.name for file in tmp_path.glob("trace*")] == ["trace.parquet"]
    assert (trace.info.ranks, trace.info.ep_size, trace.info.experts) == (2, 2, 8)
    assert trace.layers == 2
    assert [calls.counts_CWE.shape for calls in trace.calls] == [(6, 2, 8)] * 2
    (logged,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    again = totals(list(replay_pairs(trace)))
    assert again["replicas"] > 0
    for key in ("bytes_fwd", "bytes_bwd", "replicas"):  # per step
        assert logged[key] == pytest.approx(again[key] / 3), key
    assert logged["backward_fraction"] == pytest.approx(again["backward_fraction"])
    target = tmp_path / "rows.json"
    assert main(["replay", "--trace", str(path), "--own", "true", "--json", str(target)]) == 0
    *_, own = json.loads(target.read_text())["rows"]
    assert own["bytes_bwd"] == again["bytes_bwd"]


def test_a_recomputed_forward_pass_is_recorded_once(tiny, tmp_path):
    path = tmp_path / "trace.parquet"
    training = {"max_steps": 2, "activation_checkpointing": True, "eval_steps": 1}
    settings = replace(
        with_(tiny, training=training), run_dir=str(tmp_path / "run"), trace=str(path)
    )
    job.run(settings)
    trace = read_trace(path)
    assert [calls.step_C.tolist() for calls in trace.calls] == [[0, 0, 1, 1]] * 2
    assert [calls.micro_batch_C.tolist() for calls in trace.calls] == [[0, 1, 0, 1]] * 2
    trace = replace(trace, info=replace(trace.info, has_pairs=True))
    with pytest.raises(ValueError, match="rate='auto': a trace does not say"):
        next(replay_pairs(trace, Recalibration(rate="auto")))
    with pytest.raises(ValueError, match="must be a new file"):
        job.run(replace(settings, run_dir=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_mistakes_are_one_line(capsys):
    for arguments, message in (
        (["--trace-pairs"], "trace_pairs=True with trace=None: name the file"),
        (
            ["--trace", "t", "--parallel.ep_implementation", "all_to_all"],
            "only parallel.ep_implementation='lrmoe' can be traced",
        ),
    ):
        assert main(["train", *arguments]) == 2
        assert message in capsys.readouterr().err
