"""``lrmoe study memory``: rows add up, and every step changes what it says it changes."""

import json

import pytest

from lrmoe.cli import main
from lrmoe.studies.memory import ITEMS, STEPS, MemoryStudy, run

SMALL = MemoryStudy(tokens=512, layers=1, seeds=(0,))


@pytest.fixture(scope="module")
def rows():
    return run(SMALL)


def test_items_add_up_to_the_layer_call(rows):
    for row in rows:
        total = sum(row[f"{name}_bytes"] for name in ITEMS)
        assert total == pytest.approx(row["layer_call_bytes"]), row["name"]
        assert row["bound_layer_call_bytes"] <= row["layer_call_bytes"]


def test_each_step_takes_something_off_what_it_is_about(rows):
    by_name = {row["name"]: row for row in rows}
    per_pair, per_token, level, fifth, half, early, inputs = (by_name[arm.name] for arm in STEPS)
    assert per_token["dispatch_rows_bytes"] < 0.6 * per_pair["dispatch_rows_bytes"]
    assert level["saved_state_bytes"] < 0.7 * per_token["saved_state_bytes"]
    assert level["replicas"] > 0
    assert level["layer_call_bytes"] > fifth["layer_call_bytes"] >= half["layer_call_bytes"]
    assert early["whole_step_bytes"] < 0.995 * half["whole_step_bytes"]
    assert inputs["whole_step_bytes"] < early["whole_step_bytes"]


def test_command_prints_a_table_and_refuses_mistakes(tmp_path, capsys):
    target = tmp_path / "rows.json"
    arguments = ["--tokens", "256", "--layers", "1", "--seeds", "0", "--json", str(target)]
    assert main(["study", "memory", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "simulated" in printed
    assert "+ balance (recalibrated)" in printed
    result = json.loads(target.read_text())
    assert result["command"] == "study memory"
    assert [row["section"] for row in result["rows"]][: len(STEPS)] == ["step"] * len(STEPS)
    assert main(["study", "memory", "--family", "flat"]) == 2
    assert "family='flat': allowed are" in capsys.readouterr().err
