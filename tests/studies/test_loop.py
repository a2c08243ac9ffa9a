"""Pairing is real: same model, same batches; and the loop is the training that it claims to be."""

import math
from dataclasses import replace

import pytest
import torch

from lrmoe.studies import loop, texts
from lrmoe.studies.settings import Arm
from lrmoe.studies.texts import study_text
from tests.studies.grids import protocol, run

SAMPLED = {"rate": 0.5}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rows(cache):
    arms = {"exact": None, "sampled": SAMPLED, "top": {"rate": 0.5, "selection": "top"}}
    return {name: loop.train(run(arm=arm), cache) for name, arm in arms.items()}


def test_paired_runs_share_text_model_and_order(rows, cache):
    shared = ("text_fingerprint", "initial_fingerprint", "order_fingerprint")
    exact = [rows["exact"][key] for key in shared]
    assert [rows["sampled"][key] for key in shared] == exact
    assert [rows["top"][key] for key in shared] == exact
    other = loop.train(run(seed=1), cache)
    assert other["text_fingerprint"] == exact[0]
    assert other["initial_fingerprint"] != exact[1]
    assert other["order_fingerprint"] != exact[2]


def test_paired_runs_see_the_same_batches_and_loss_before_the_first_step(monkeypatch, cache):
    seen = []
    backward = loop.backward

    def spy(model, ids_BS, bf16=False):
        loss = backward(model, ids_BS, bf16)
        seen.append((ids_BS.clone(), loss))
        return loss

    monkeypatch.setattr(loop, "backward", spy)
    loop.train(run(), cache)
    loop.train(run(arm=SAMPLED), cache)
    exact, sampled = seen[:4], seen[4:]
    for (ids, _), (other, _) in zip(exact, sampled, strict=True):
        assert torch.equal(ids, other)
    assert exact[0][1] == sampled[0][1]
    assert exact[2][1] != sampled[2][1]  # the first step of the warm-up has learning rate 0


def test_a_row_says_what_was_done(rows):
    assert rows["exact"]["backward_fraction"] == 1.0
    assert 0.5 <= rows["sampled"]["backward_fraction"] < 0.56  # at least one pair per expert
    assert rows["top"]["score_mass"] > rows["sampled"]["score_mass"] > 0.5
    for row in rows.values():
        assert row["ppl"] == pytest.approx(math.exp(row["val_loss"]))
        assert row["curve"][-1][0] == row["steps"] == 4
        assert row["val_loss_quantiles"] == sorted(row["val_loss_quantiles"])
        assert row["step_ms"] > 0 < row["moe_ms"]
    losses = {row["val_loss"] for row in rows.values()}
    assert len(losses) == 3


def test_the_same_run_again_is_the_same(rows, cache):
    again = loop.train(run(arm=SAMPLED), cache)
    assert again["val_loss"] == rows["sampled"]["val_loss"]
    assert again["curve"] == rows["sampled"]["curve"]


def test_one_step_is_that_of_plain_autograd_and_the_optimizer(cache):
    """Exact run: Hugging Face's own loss and experts, torch's optimizer, the same learning rate."""
    its = run(steps=1, warmup_steps=0, max_grad_norm=0.0, schedule="constant_with_warmup")
    text = study_text(its.protocol)
    model = loop.initial_model(its, text, cache)
    for _ in loop.Loop(its, model, text).steps():
        pass
    plain = loop.initial_model(its, text, cache)
    decay = [p for p in plain.parameters() if p.dim() > 1]
    rest = [p for p in plain.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=2e-3
    )
    ids_BS = loop.block_ids(text.train, next(loop.batches(its, len(text.train))))
    plain(input_ids=ids_BS, labels=ids_BS, output_router_logits=True).loss.backward()
    optimizer.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        # The first step of Adam is the sign of the gradient: only tiny ones may differ.
        assert (a - b).abs().median() < 1e-6, name


def test_exact_layers_keep_everything(cache):
    row = loop.train(run(arm={"rate": 0.5, "exact_layers": [-1]}), cache)
    assert row["score_mass_by_layer"][1] == 1.0 > row["score_mass_by_layer"][0]
    with pytest.raises(ValueError, match="exact_layers"):
        loop.train(run(arm={"rate": 0.5, "exact_layers": [2]}), cache)


def test_rows_show_the_rates_of_the_layers(cache):
    auto = {"target": 1e9, "high": 0.5, "warmup_steps": 2}
    row = loop.train(run(arm={"rate": "auto", "auto": auto, "exact_layers": [1]}), cache)
    assert row["arm"].startswith("sampled auto target=1000000000.0 warmup_steps=2")
    assert row["rate"] == "auto"
    assert row["rates"] == [[1, 0.0, 0.0], [2, 0.0, 0.0], [3, 0.5, 0.0], [4, 0.5, 0.0]]
    assert 0.75 < row["backward_fraction"] < 1


def test_token_losses_reach_the_rule(cache):
    row = loop.train(run(arm={"rate": 0.5, "selection": "token_loss"}), cache)
    assert math.isfinite(row["val_loss"])


def test_text_goes_round_in_another_order():
    its = run(steps=5, blocks_per_step=4)
    orders = list(loop.batches(its, num_blocks=8))
    assert sorted(orders[0] + orders[1]) == sorted(orders[2] + orders[3]) == list(range(8))
    assert orders[0] + orders[1] != orders[2] + orders[3]


def test_continued_runs_start_from_one_trained_checkpoint(cache):
    changes = {"regime": "continued", "pretraining_steps": 3, "model": "glm4-moe-small"}
    overrides = {**run().protocol.overrides, "n_routed_experts": 8}
    overrides.pop("num_experts")
    first, second = (
        loop.train(run(seed=seed, overrides=overrides, **changes), cache) for seed in (0, 1)
    )
    assert first["initial_fingerprint"] == second["initial_fingerprint"]
    assert first["order_fingerprint"] != second["order_fingerprint"]
    fresh = loop.train(run(seed=0, overrides=overrides, model="glm4-moe-small"), cache)
    assert fresh["initial_fingerprint"] != first["initial_fingerprint"]


def test_a_run_that_diverges_is_a_result(monkeypatch, cache):
    backward = loop.backward

    def overflow(*arguments):
        backward(*arguments)
        return math.inf

    monkeypatch.setattr(loop, "backward", overflow)
    row = loop.train(run(), cache)
    assert row["val_loss"] is None
    assert row["ppl"] is None


@pytest.fixture
def little_prose(monkeypatch):
    """Docstrings of a few modules: parsing them all takes seconds."""
    files = texts.standard_library_files()[:30]
    monkeypatch.setattr(texts, "standard_library_files", lambda: files)
    texts._load.cache_clear()
    yield
    texts._load.cache_clear()


def test_prose_has_both_kinds_of_documents(little_prose):
    names = [name for name, _ in texts.prose_documents()]
    assert "topic assert" in names
    assert any(name.startswith("module") for name in names)
    data = study_text(protocol(text="prose", block_size=64, validation_blocks=64))
    assert len(data.train) > 5 * len(data.validation) == 5 * 64


def test_other_optimizers_and_bf16_train(cache, little_prose):
    row = loop.train(run(arm=SAMPLED, optimizer="adafactor", bf16=True, text="prose"), cache)
    assert math.isfinite(row["val_loss"])
    assert row["text_fingerprint"] != loop.train(run(), cache)["text_fingerprint"]


def test_the_seed_of_the_draws_is_that_of_the_run(cache):
    its = run(seed=5, arm=SAMPLED)
    model = loop.initial_model(its, study_text(its.protocol), cache)
    handle = loop.configure(model, replace(its.arm), seed=5)
    assert {state.config.seed for state in handle.states} == {5}
    assert Arm().recalibration.rate == 0.0
