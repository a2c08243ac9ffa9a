"""``lrmoe plan``: what fits, what does not, and why."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lrmoe.cluster import fit
from lrmoe.cluster.fit import ITEMS, PlanSettings
from lrmoe.cluster.models import QWEN3_30B_A3B
from lrmoe.planner.memory import LayerShape

SETTINGS = PlanSettings(model="qwen3-30b-a3b", samples=3)
GIB = 1 << 30


def test_the_issue_s_example_fits_with_exit_code_0(capsys, tmp_path):
    target = tmp_path / "plan.json"
    arguments = ["--model", "qwen3-30b-a3b", "--ranks", "8", "--tokens", "8192"]
    arguments += ["--memory", "80GiB", "--skew", "2.0"]
    assert fit.main([*arguments, "--samples", "2", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "simulated" in out
    assert "recommended: ep 8, fsdp 8" in out
    expected, worst = json.loads(target.read_text())["rows"]
    assert expected["fits"] is True
    assert worst["skew"] == 4.0
    for row in (expected, worst):
        assert row["total_bytes"] == sum(row[f"{item}_bytes"] for item in ITEMS)
        for key in ("model", "ranks", "tokens", "rate", "reason", "replicas", "recommendation"):
            assert key in row


def test_what_cannot_fit_has_exit_code_3_and_a_reason(capsys):
    assert fit.main(["--model", "glm-4.5-air", "--ranks", "8", "--samples", "1"]) == 3
    out = capsys.readouterr().out
    assert "before any token is routed" in out
    assert "fit from 25 ranks on" in out
    assert "No micro-batch, EP size or recomputation" in out


def test_items_of_the_state_by_hand():
    items = fit._state_items(SETTINGS, QWEN3_30B_A3B, 8)
    total = QWEN3_30B_A3B.expert_parameters + QWEN3_30B_A3B.other_parameters
    assert items["weights"] == items["gradients"] == 2 * total // 8
    assert items["optimizer"] == 12 * total // 8
    assert items["reserve"] == 2 * GIB
    T, D, V = 8192, 2048, 151_936
    attention = T * (2 * 32 + 2 * 4) * 128 * 2
    checkpointed = 48 * T * D * 2 + attention + 12 * T * D * 2 + T * V * 6
    assert items["activations"] == checkpointed
    whole = fit._state_items(replace(SETTINGS, checkpointing=False), QWEN3_30B_A3B, 8)
    assert whole["activations"] == 48 * (12 * T * D * 2 + attention) + T * V * 6
    # one expert layer is gathered as soon as fewer ranks share the experts than the parameters
    half = fit._state_items(SETTINGS, QWEN3_30B_A3B, 4)
    assert half["gathered"] - items["gathered"] == 2 * 2 * 32 * 3 * D * 768
    single = fit._state_items(replace(SETTINGS, ranks=1), QWEN3_30B_A3B, 1)
    assert single["gathered"] == 0


def _with_room(room_bytes, **changes):
    """Settings whose GPU has this much room beside the state."""
    settings = replace(SETTINGS, **changes)
    state = sum(fit._state_items(settings, QWEN3_30B_A3B, 8).values())
    return replace(settings, memory=str(state + room_bytes))


def test_memory_forces_drops_up_to_c_max_and_no_further():
    plenty = fit.fit(_with_room(20 * GIB), QWEN3_30B_A3B, 2.0)
    assert (plenty.fits, plenty.rate) == (True, 0.0)
    # The planner's bound counts a token row for every pair, up to the tokens: more than is needed.
    needed = plenty.items["token_buffers"] + plenty.items["replicas"]
    needed = next(
        room
        for room in np.linspace(1.0, 2.0, 51) * needed
        if fit.fit(_with_room(int(room), c_max=0.0), QWEN3_30B_A3B, 2.0).fits
    )
    tight = fit.fit(_with_room(int(0.93 * needed), c_max=0.5), QWEN3_30B_A3B, 2.0)
    assert tight.fits
    assert 0 < tight.rate <= 0.5
    stuck = fit.fit(_with_room(int(0.93 * needed), c_max=0.0), QWEN3_30B_A3B, 2.0)
    assert not stuck.fits
    assert "memory_bytes" in stuck.reason or "pairs" in stuck.reason


def test_skew_costs_memory_where_nothing_levels_it():
    fixed = [
        fit.fit(_with_room(60 * GIB, placement="fixed"), QWEN3_30B_A3B, skew).items["token_buffers"]
        for skew in (1.0, 2.0, 3.0)
    ]
    assert fixed[0] < fixed[1] < fixed[2]
    assert fixed[2] > 2.3 * fixed[0]
    level = fit.fit(_with_room(60 * GIB), QWEN3_30B_A3B, 3.0)
    assert level.items["token_buffers"] < 1.5 * fixed[0]
    assert level.replicas > 0


def test_without_checkpointing_every_layer_s_state_is_alive():
    one = fit.fit(_with_room(200 * GIB), QWEN3_30B_A3B, 1.0).items["token_buffers"]
    every = fit.fit(_with_room(200 * GIB, checkpointing=False), QWEN3_30B_A3B, 1.0)
    shape = LayerShape(hidden=2048, ffn=768, experts=128, top_k=8, ranks=8, tokens=8192)
    saved = every.items["token_buffers"] - one
    per_pair = shape.saved_pair_bytes + shape.row_bytes / 8
    assert saved > 0.9 * 47 * 8 * 8192 * per_pair


def test_what_is_recommended_fits():
    settings = PlanSettings(model="qwen3-30b-a3b", tokens=32_768, samples=2)
    assert not fit.fit(settings, QWEN3_30B_A3B, 2.0).fits
    choice = fit.recommend(settings, QWEN3_30B_A3B)
    assert choice["tokens"] * choice["accumulation"] == 32_768
    changed = replace(
        settings, **{name: choice[name] for name in ("ep", "tokens", "checkpointing", "save")}
    )
    assert fit.fit(changed, QWEN3_30B_A3B, 2.0).fits


def test_mistakes_are_named():
    for changes, message in (
        ({"ep": 3}, "ep=3: must divide ranks=8"),
        ({"skew": 5.0}, "skew=5.0, worst_skew=4.0: allowed is"),
        ({"c_max": 1.0}, "c_max=1.0: allowed is 0 <= c_max < 1"),
        ({"placement": "best"}, "placement='best': allowed are"),
        ({"memory": "0"}, "memory='0': allowed is > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SETTINGS, **changes)
    odd = replace(SETTINGS, ranks=24, ep=24)
    with pytest.raises(ValueError, match="ep=24: must divide the model's 128 experts"):
        fit.fit(odd, QWEN3_30B_A3B, 2.0)
    assert fit.resolved_ep(replace(odd, ep=None), QWEN3_30B_A3B) == 8
