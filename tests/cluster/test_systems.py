"""The systems study on a small cluster: every section, its tables and figures."""

import json
from pathlib import Path

import pytest

from lrmoe.studies import main, systems
from lrmoe.studies.systems import SECTIONS, Systems

SMALL = [
    "--tokens", "256", "--steps", "2", "--layers", "1", "--seeds", "0,1", "--pressures", "1,20000",
    "--imbalances", "1,2", "--drifts", "0", "--jitters", "0.3", "--slot_counts", "0,1",
    "--scales", "8,16",
]  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    assert main(["systems", *SMALL, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return out, rows


def test_every_section_has_rows_and_a_table(study):
    out, rows = study
    assert {row["section"] for row in rows} == set(SECTIONS)
    assert all(row["simulated"] for row in rows)
    text = (out / "tables.md").read_text()
    assert text.count("(simulated)") == 1 + 2 + 1 + 6
    assert "ultraep" in text
    images = {path.name for path in Path(out).glob("*.png")}
    names = ("latency", "memory", "pressure", "sensitivity", "scaling")
    assert images == {f"systems_{name}.png" for name in names}


def test_what_the_rows_say(study):
    _, rows = study
    main_rows = [row for row in rows if row["section"] == "main"]
    assert {row["model"] for row in main_rows} == {"qwen3-30b-a3b", "glm4.5-106b-a12b"}
    assert {row["seed"] for row in main_rows} == {0, 1}
    of_pressure = [row for row in rows if row["section"] == "pressure" and row["rate"] == 0]
    fits = {
        p: [row["effective_throughput"] for row in of_pressure if row["pressure"] == p]
        for p in (1, 20_000)
    }
    assert min(fits[1]) == 1.0 > max(fits[20_000])
    free = [row for row in rows if row["hardware"] == "h100, GEMMs alone"]
    assert all(row["comm_ms"] == pytest.approx(0, abs=1e-3) for row in free)
    assert {row["ranks"] for row in rows if row["section"] == "scaling"} == {8, 16}


def row_of(policy, rate, seed, ms):
    return {"policy": policy, "rate": rate, "quotas": "rate", "draw": "backward", "seed": seed,
            "bwd_ms": ms}  # fmt: skip


def test_comparisons_by_hand():
    rows = [
        row_of("fixed", 0.0, 0, 10.0), row_of("recalibrated", 0.2, 0, 4.0),
        row_of("fixed", 0.0, 1, 20.0), row_of("recalibrated", 0.2, 1, 10.0),
    ]  # fmt: skip
    ours = ("recalibrated", 0.2, "rate", "backward")
    assert systems.below(rows, "bwd_ms", ours, "fixed") == pytest.approx((0.55, 0.05))
    found = systems.means(rows, ("policy",))
    assert found[("fixed",)]["bwd_ms"] == 15
    assert found[("recalibrated",)]["policy"] == "recalibrated"


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="sections='speed': allowed are 'main'"):
        Systems(sections=("speed",))
    with pytest.raises(ValueError, match="study 'speed': allowed are"):
        main(["speed"])
