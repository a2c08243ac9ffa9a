"""Coefficients: each has a source, and what is no coefficient is refused."""

import json
import re
from dataclasses import replace

import pytest

from lrmoe.cluster.hardware import load_hardware, sources


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_every_published_coefficient_names_its_source(name):
    hardware = load_hardware(name)
    of = sources(name)
    for field in hardware.__slots__:
        if field in ("name", "clock", "select_s"):  # selecting is counted by its bytes on a GPU
            continue
        assert len(of[field]) > 5, field
        if getattr(hardware, field) and field not in ("collective_s",):
            assert re.search("http|arXiv|as above|h100", of[field]), field
    assert hardware.backward_flops < hardware.forward_flops < hardware.peak_flops
    assert hardware.inter_bytes_per_s < hardware.intra_bytes_per_s < hardware.weight_bytes_per_s


def test_the_cited_measurements_follow_from_the_coefficients():
    """10.218 ms for Qwen3's layer on H100; 528 and 1,190 us for the table on H200."""
    for name, hidden, ffn, tokens, seconds, within in (
        ("h100", 2048, 768, 32_768, 10.218e-3, 0.01),
        ("h200", 2816, 704, 1024, 528.4e-6, 0.05),
        ("h200", 2816, 704, 4096, 1189.6e-6, 0.02),
    ):
        hardware = load_hardware(name)
        weights = 128 * 3 * hidden * ffn * 2 / hardware.weight_bytes_per_s
        work = 8 * tokens * 6 * hidden * ffn / hardware.forward_flops
        assert weights + work == pytest.approx(seconds, rel=within)


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "hardware.json"
    with pytest.raises(ValueError, match="neither a file nor one of 'a100', 'h100', 'h200'"):
        load_hardware("b300")
    for text in ("{", "[]", "{}", '{"a": {"clock": "gpu"}}', '{"a": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a file of coefficients"):
            load_hardware(str(path))
    good = load_hardware("h100")
    for field, value, message in (
        ("intra_bytes_per_s", 0, "allowed are numbers > 0"),
        ("collective_s", -1.0, "allowed are numbers >= 0"),
        ("clock", "sun", "clock='sun': allowed are 'gpu', 'cpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(good, **{field: value})
    entry = {n: [getattr(good, n), "s"] for n in good.__slots__ if n not in ("name", "clock")}
    path.write_text(json.dumps({"mine": {"clock": "gpu", **entry}}))
    assert load_hardware(str(path)) == replace(good, name="mine")
