"""Coefficients of a GPU from rows of the check, made from coefficients that are known."""

import json
from dataclasses import replace

import pytest

from lrmoe.bench import calibrate
from lrmoe.bench.calibrate_gpu import fit_gpu, read_rows
from lrmoe.cluster.hardware import load_hardware

KNOWN = replace(
    load_hardware("h200"), forward_flops=4e14, backward_flops=3e14, weight_bytes_per_s=4e12,
    group_s=1e-6, pair_s=2e-9, row_bytes_per_s=3.5e12, select_s=5e-10, peak_flops=7e14,
)  # fmt: skip
ABOUT = {
    "device": "A card", "small": False, "torch": "2", "date": "2026-01-01", "commit": "abc",
}  # fmt: skip
STAGES = {
    "restore_pairs": 0.02,
    "announce_kept": 0.03,
    "norms_and_codes": 0.01,
    "pair_lrm": 0.01,
    "choose_pairs": 0.02,
}
PAIRS = 8192 * 8
BOOKKEEPING = 0.05e-3 / PAIRS


def expert_work(hardware, hidden, ffn, groups, pairs, rows):
    """The model's own words: cost.py, rules 1 and 2."""
    for b, phase in enumerate(("fwd", "bwd")):
        rate = (hardware.forward_flops, hardware.backward_flops)[b]
        seconds = pairs * ((6, 12)[b] * hidden * ffn / rate + hardware.pair_s)
        weights = (1 + b) * 6 * hidden * ffn / hardware.weight_bytes_per_s
        seconds += groups * (hardware.group_s + weights)
        seconds += 2 * rows * 2 * hidden / hardware.row_bytes_per_s
        yield {
            "kind": "expert_work", "hidden": hidden, "ffn": ffn, "phase": phase, "groups": groups,
            "pairs": pairs, "rows": rows, "ms": 1e3 * seconds,
        }  # fmt: skip


def made_rows():
    rows = [
        row
        for hidden, ffn in ((2048, 768), (4096, 1408))
        for groups in (4, 16)
        for pairs in (256, 1024, 8192, 65536)
        for row in expert_work(KNOWN, hidden, ffn, groups, pairs, 2 * pairs // 3)
    ]
    rows += [{"kind": "limit", "name": "copy", "bytes_per_s": 4.3e12},
             {"kind": "limit", "name": "dense_bf16", "flops": 7e14, "size": 8192}]  # fmt: skip
    rows += [{"kind": "kernel", "name": name, "bytes": size, "ms": 1e3 * size / 3.5e12}
             for name, size in (("gather_rows", 3e8), ("sum_rows", 5e8))]  # fmt: skip
    rows += [{"kind": "kernel", "name": "sort_pairs", "bytes": None, "ms": 1.0}]
    rows += [{"kind": "layer", "tokens": 8192, "top_k": 8, "stages_ms": STAGES},
             {"kind": "layer", "missing": "not importable"}]  # fmt: skip
    return [row | ABOUT for row in rows]


def test_coefficients_are_found_from_the_times_they_make():
    found = fit_gpu(made_rows(), "mine", "h200")
    for name in ("forward_flops", "backward_flops", "weight_bytes_per_s", "row_bytes_per_s",
                 "group_s", "peak_flops"):  # fmt: skip
        assert getattr(found.hardware, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
    assert found.hardware.pair_s == pytest.approx(KNOWN.pair_s + BOOKKEEPING, rel=1e-3)
    assert found.hardware.select_s == pytest.approx(0.04e-3 / PAIRS)
    assert max(found.errors) < 1e-6
    assert found.hardware.clock == "gpu"
    for name in ("intra_bytes_per_s", "inter_bytes_per_s", "collective_s", "memory_bytes"):
        assert getattr(found.hardware, name) == getattr(KNOWN, name)
    assert "not measured, as h200" in found.sources["intra_bytes_per_s"]
    assert "A card, 2026-01-01, commit abc" in found.sources["forward_flops"]


def test_the_command_writes_what_replay_reads(tmp_path, capsys):
    pytest.importorskip("jsonargparse")
    rows, out = tmp_path / "gpu.jsonl", tmp_path / "mine.json"
    rows.write_text("\n".join(json.dumps(row) for row in made_rows()))
    arguments = ["--gpu_rows", str(rows), "--name", "mine", "--out", str(out)]
    assert calibrate.main(arguments) == 0
    assert "forward_flops        4e+14" in capsys.readouterr().out
    assert load_hardware(str(out)) == fit_gpu(made_rows(), "mine", "h200").hardware


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "measures no GPU"),
        ({"small": True}, "measures no GPU"),
    ],
)
def test_rows_that_measure_no_gpu_are_refused(tmp_path, changes, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row | changes) for row in made_rows()))
    with pytest.raises(ValueError, match=message):
        read_rows(str(path))


def test_what_is_no_file_of_the_check_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    for text, message in (
        ("{", "is not a file of JSON lines"),
        ("", "is not a file of benchmarks/gpu/check.sh"),
        ('{"a": 1}', "is not a file of benchmarks/gpu/check.sh"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_rows(str(path))
    mixed = made_rows()
    mixed[0] |= {"device": "Another"}
    path.write_text("\n".join(map(json.dumps, mixed)))
    with pytest.raises(ValueError, match="of several devices"):
        read_rows(str(path))


@pytest.mark.parametrize("kind", ["expert_work", "limit", "kernel", "layer"])
def test_rows_of_every_kind_are_needed(kind):
    with pytest.raises(ValueError, match=f"no row of kind '{kind}'"):
        fit_gpu([row for row in made_rows() if row["kind"] != kind], "mine", "h200")
