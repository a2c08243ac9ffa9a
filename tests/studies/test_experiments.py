import numpy as np
import pytest
import torch

from lrmoe import Recalibration, recalibrate
from lrmoe.studies import loop
from lrmoe.studies.experiments import EXPERIMENTS, Predicted, make, pooled, selecting, shared_quotas
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


def test_an_experiment_ends_with_its_context():
    original, rule = recalibrate._select, make("pooled")
    with selecting(rule):
        assert recalibrate._select is rule
    assert recalibrate._select is original
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
