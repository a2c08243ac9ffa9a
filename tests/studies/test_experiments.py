from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lrmoe import Recalibration, layer, recalibrate
from lrmoe.select import STRATUM_BITS
from lrmoe.studies import experiments, loop
from lrmoe.studies.experiments import (
    EXPERIMENTS,
    Covering,
    Predicted,
    covering,
    make,
    pooled,
    selecting,
    shared_quotas,
)
from lrmoe.studies.settings import Arm
from tests.studies.grids import run

COUNT, QUOTA = np.array([6, 0, 10]), np.array([3, 0, 5])
CONFIG = Recalibration(rate=0.5, scope="global", min_inclusion=0.1)


def draw(seed, score_N, normalised=0.0, config=CONFIG):
    generator = torch.Generator().manual_seed(seed)
    return pooled(score_N, COUNT, QUOTA, None, config, generator, normalised=normalised)


@pytest.mark.parametrize("normalised", [0.0, 0.5, 1.0])
def test_pooled_quotas_keep_the_total_and_are_unbiased(normalised):
    torch.manual_seed(3)
    score_N = torch.rand(16) ** 6
    value_N = torch.randn(16, dtype=torch.float64)
    sums = []
    for seed in range(1000):
        chosen = draw(seed, score_N, normalised)
        assert len(chosen.kept_P) == 8
        assert torch.equal(chosen.kept_P, chosen.kept_P.unique())
        sums.append(float(value_N[chosen.kept_P] @ chosen.weight_P.double()))
    error = np.std(sums) / len(sums) ** 0.5
    assert abs(np.mean(sums) - float(value_N.sum())) < 4 * error


def test_pooled_quotas_follow_the_scores_across_experts():
    score_N = torch.cat([torch.full((6,), 1e-4), torch.ones(10)])
    kept = [int((draw(seed, score_N).kept_P < 6).sum()) for seed in range(200)]
    assert np.mean(kept) < 1.5  # by count it would be 3
    same = [int((draw(seed, score_N, 1.0).kept_P < 6).sum()) for seed in range(200)]
    assert np.mean(same) == pytest.approx(3, abs=0.2)


def test_all_zero_scores_are_drawn_uniformly():
    assert len(draw(0, torch.zeros(16)).kept_P) == 8


@pytest.mark.parametrize("strata", ["gradient", "neighbors", "text"])
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_experiments_are_laid_out_by_their_own_pairs_codes(name, strata, monkeypatch):
    """What the draw is given: of every expert's pairs their codes, in the order of their sizes."""
    given = []
    real = experiments.select_sampled
    monkeypatch.setattr(
        experiments,
        "select_sampled",
        lambda *arguments: given.append(arguments) or real(*arguments),
    )
    score_N = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.1
    code_N = torch.arange(16) << 48 if strata == "neighbors" else torch.arange(16)
    config = replace(CONFIG, strata=strata)
    rule = make(name)
    if isinstance(rule, Covering):
        rule._token_N = torch.arange(16) // 2
    arguments = (score_N, COUNT, QUOTA, None, config, torch.Generator(), code_N)
    if strata == "neighbors" and name.startswith("pooled"):
        with pytest.raises(ValueError, match="strata='neighbors'"):
            rule(*arguments)
        return
    chosen = rule(*arguments)
    ((size_n, _, _, _, _, stratum_n, *rest),) = given
    direction_n = rest[0] if rest else None
    got_n = stratum_n if direction_n is None else direction_n
    assert (stratum_n is None) == (strata == "neighbors")
    drawn = set(range(16))
    if isinstance(rule, Covering):  # those kept for certain are not drawn
        certain = covering(score_N, rule._token_N, COUNT, np.array([2, 0, 4]))
        drawn -= set(certain.nonzero().squeeze(1).tolist())
    want = code_N
    if name.startswith("pooled"):
        want = (torch.tensor([0] * 6 + [2] * 10) * 2**STRATUM_BITS + want) // 3
    assert got_n.tolist() == want[sorted(drawn)].tolist()
    assert len(size_n) == len(drawn)
    assert len(chosen.kept_P) == QUOTA.sum()


def test_an_experiment_ends_with_its_context():
    original, rule = recalibrate._select, make("pooled")
    with selecting(rule):
        assert recalibrate._select is rule
    assert recalibrate._select is original
    choice = layer.choose_pairs
    with selecting(make("covering")):
        assert layer.choose_pairs is not choice
    assert layer.choose_pairs is choice
    with selecting(make(None)):
        assert recalibrate._select is original


def test_shared_quotas_keep_the_total_within_bounds():
    generator = np.random.default_rng(0)
    for _ in range(200):
        count_E = generator.integers(0, 40, 8)
        quota_E = np.minimum(np.maximum(1, np.ceil(count_E / 2)), count_E).astype(np.int64)
        found_E = shared_quotas(generator.exponential(size=8) ** 4, count_E, quota_E)
        assert found_E.sum() == quota_E.sum()
        assert (found_E <= count_E).all()
        assert (found_E >= np.minimum(count_E, 1)).all()


def test_levelled_quotas_let_hot_experts_drop_more():
    count_e, quota_e = np.array([4, 0, 28]), np.array([2, 0, 14])
    kept = {}
    for name in ("levelled", "levelled-half"):
        rule, generator = make(name), torch.Generator().manual_seed(0)
        chosen = rule(torch.rand(32), count_e, quota_e, None, CONFIG, generator)
        kept[name] = int((chosen.kept_P < 4).sum())
        assert len(chosen.kept_P) == 16
    assert kept == {"levelled": 4, "levelled-half": 4}


def test_predicted_quotas_follow_what_earlier_steps_had():
    score_N = torch.cat([torch.full((6,), 1e-4), torch.ones(10)])
    rule = Predicted(normalised=0.0)
    kept = []
    for step in range(3):
        rule.begin_step()
        for scores in (score_N, score_N.flip(0)):  # two layers with their own memory
            generator = torch.Generator().manual_seed(step)
            chosen = rule(scores, COUNT, QUOTA, None, CONFIG, generator)
            kept.append(int((chosen.kept_P < 6).sum()))
    assert kept[:2] == [3, 3]  # nothing is known yet: by count
    assert kept[2] < 3 < kept[3]
    assert kept[4] < 3 < kept[5]


def _some_pairs(num_tokens, top_k, num_experts, seed):
    """Tokens of the pairs in expert-major order, pairs of each expert, and scores."""
    generator = torch.Generator().manual_seed(seed)
    expert_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    order = expert_TK.flatten().sort(stable=True).indices
    score_N = torch.rand(num_tokens * top_k, generator=generator) ** 6
    count_e = torch.bincount(expert_TK.flatten(), minlength=num_experts).numpy()
    return order // top_k, count_e, score_N


def test_covered_tokens_keep_a_pair_and_the_estimate_is_unbiased():
    token_N, count_e, score_N = _some_pairs(12, 4, 6, seed=0)
    quota_e, value_N = count_e - count_e // 2, torch.randn(48, dtype=torch.float64)
    expert_N = torch.from_numpy(np.repeat(np.arange(6), count_e))
    rule, sums, is_reached_N = Covering(), [], torch.zeros(48, dtype=torch.bool)
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        draw_now = partial(rule, score_N, count_e, quota_e, None, CONFIG, generator)
        pairs = SimpleNamespace(token_N=token_N)
        chosen = rule.note_tokens(lambda *_, now=draw_now: now(), None, None, None, pairs)
        assert torch.bincount(expert_N[chosen.kept_P]).tolist() == quota_e.tolist()
        assert len(token_N[chosen.kept_P].unique()) == 12
        is_reached_N[chosen.kept_P] = True
        sums.append(float(value_N[chosen.kept_P] @ chosen.weight_P.double()))
    error = np.std(sums) / len(sums) ** 0.5
    assert abs(np.mean(sums) - float(value_N.sum())) < 4 * error
    assert is_reached_N.all()


def test_covering_equals_a_loop():
    for seed in range(30):
        token_N, count_e, score_N = _some_pairs(9, 3, 5, seed)
        score_N = (score_N * 4).round()  # ties
        room_e = np.random.default_rng(seed).integers(0, 4, 5)
        expert_N = np.repeat(np.arange(5), count_e)
        want, open_tokens, room = set(), set(range(9)), room_e.tolist()
        for turn in range(3):
            asking = []
            for token in open_tokens:
                mine = [n for n in range(27) if token_N[n] == token]
                asking.append(sorted(mine, key=lambda n: (-score_N[n].item(), n))[turn])
            for n in sorted(asking, key=lambda n: (-score_N[n].item(), int(token_N[n]))):
                if room[expert_N[n]]:
                    room[expert_N[n]] -= 1
                    want.add(n)
            open_tokens -= {int(token_N[n]) for n in want}
        got = covering(score_N, token_N, count_e, room_e)
        assert set(got.nonzero().flatten().tolist()) == want


@pytest.mark.parametrize(
    ("name", "draw"),
    [*((name, "backward") for name in EXPERIMENTS), ("predicted-half", "forward")],
)
def test_every_experiment_trains(name, draw, tmp_path):
    arm = {"rate": 0.5, "scope": "global", "experiment": name, "draw": draw}
    row = loop.train(run(arm=arm), tmp_path)
    assert row["backward_fraction"] == pytest.approx(0.5, abs=0.03)
    assert row["arm"].startswith(f"{name} C50")


def test_what_it_cannot_run_in_is_refused(tmp_path):
    with pytest.raises(ValueError, match="experiment='best': allowed are"):
        Arm.from_dict({"rate": 0.5, "experiment": "best"})
    with pytest.raises(ValueError, match="need an unbiased rule and scope='global'"):
        draw(0, torch.ones(16), config=Recalibration(rate=0.5, selection="top"))
