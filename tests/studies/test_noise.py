"""The formula of the variance against plain autograd and against the real sampler."""

import itertools

import numpy as np
import pytest
import torch

from lrmoe.select import Segments, select_sampled
from lrmoe.studies import loop, noise
from lrmoe.studies.texts import study_text
from tests.studies.grids import lines, run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    its = run()
    return loop.initial_model(its, study_text(its.protocol), tmp_path_factory.mktemp("cache"))


def batch():
    return loop.block_ids(study_text(run().protocol).validation, [0, 1])


def test_the_sums_are_the_gradients_of_plain_autograd(model):
    layers = noise.layer_pairs(model, batch())
    model.set_experts_implementation("eager")
    model.zero_grad()
    model(input_ids=batch(), labels=batch(), output_router_logits=True).loss.backward()
    named = dict(model.named_parameters())
    for i, pairs in enumerate(layers):
        for group, name in {"down": "down_proj", "gate_up": "gate_up_proj"}.items():
            grad = named[f"model.layers.{i}.mlp.experts.{name}"].grad
            assert pairs.whole[group] == pytest.approx(float(grad.square().sum()), rel=1e-3)
        assert pairs.count_E.sum() == len(pairs.p_N) == 2 * 32 * 2


def test_probabilities_fill_the_quotas(model):
    (pairs, *_) = noise.layer_pairs(model, batch())
    sizes = noise.SIZES["p |G| |h|"](pairs)
    for is_pooled in (False, True):
        pi_N = noise.probabilities(sizes, pairs, 0.5, is_pooled)
        assert float(pi_N.sum()) == pytest.approx(np.ceil(0.5 * pairs.count_E).sum())
        assert 0 < float(pi_N.min()) <= float(pi_N.max()) <= 1
    by_count = noise.probabilities(torch.ones_like(sizes), pairs, 0.5, False)
    per_expert = [float(part.sum()) for part in by_count.split(pairs.count_E.tolist())]
    assert per_expert == pytest.approx(list(np.ceil(0.5 * pairs.count_E)))


def test_the_formula_is_the_variance_of_the_sampler_up_to_its_fixed_number():
    torch.manual_seed(0)
    count_E = np.array([400])
    segments = Segments(count_E, torch.device("cpu"))
    size_N = 0.2 + torch.rand(400, dtype=torch.float64)
    # Directions at random: what a fixed number of pairs takes off the variance is then small.
    g_ND = size_N[:, None] * torch.nn.functional.normalize(torch.randn(400, 50).double(), dim=1)
    quota = np.array([200])
    pi_N = noise.inclusion_probabilities(size_N / size_N.mean(), segments, quota) / noise.ONE
    formula = float(((1 / pi_N - 1) * g_ND.square().sum(1)).sum())
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(500):
        chosen = select_sampled(size_N / size_N.mean(), segments, quota, generator)
        estimate_D = chosen.weight_P.double() @ g_ND[chosen.kept_P]
        errors.append(float((estimate_D - g_ND.sum(0)).square().sum()))
    assert np.mean(errors) == pytest.approx(formula, rel=0.1)


def test_better_sizes_leave_less_noise(model):
    rows = list(noise.compare(noise.layer_pairs(model, batch())))
    found = {(r["rate"], r["sizes"], r["is_pooled"]): r["noise"]["down"] for r in rows}
    assert len(rows) == len(noise.RATES) * len(noise.SIZES) * 2
    for rate in noise.RATES:
        lrm, uniform = found[rate, "p |G| |h|", False], found[rate, "uniform", False]
        assert found[rate, "p |G| |h|", True] < lrm < uniform


def test_drawn_noise_is_the_formula_without_strata_and_less_with_them(model):
    layers = noise.layer_pairs(model, batch())
    assert noise.drawn_noise(layers[0], 0.0, "gradient", torch.Generator()) == {
        "down": 0.0,
        "gate_up": 0.0,
    }
    expected = {
        r["rate"]: r["noise"]
        for r in noise.compare(layers)
        if r["sizes"] == "p |G| |h|" and not r["is_pooled"]
    }
    drawn = {(r["rate"], r["strata"]): r["noise"] for r in noise.compare_strata(layers)}
    assert set(drawn) == set(itertools.product(noise.RATES, noise.STRATA))
    for group in ("down", "gate_up"):
        at_random = drawn[0.5, "none"][group]
        assert at_random == pytest.approx(expected[0.5][group], rel=0.2)
        for strata in ("gradient", "neighbors", "text"):
            assert drawn[0.5, strata][group] < at_random
        assert drawn[0.5, "neighbors"][group] != drawn[0.5, "gradient"][group]


def test_rows_are_written_once(tmp_path, capsys):
    path = tmp_path / "noise.jsonl"
    noise.measure(run(), (2,), path, tmp_path)
    assert {row["step"] for row in lines(path)} == {2}
    before = path.read_text()
    assert noise.main(["--rows", str(path)]) == 0
    assert path.read_text() == before
    assert "oracle: down, gate_up" in capsys.readouterr().out
