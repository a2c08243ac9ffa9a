import math

import numpy as np
import pytest
from scipy import stats

from lrmoe.studies.statistics import (
    estimate,
    paired,
    race_ratios,
    strata_differences,
    t_quantile_95,
)
from tests.studies.grids import row

SAMPLED = {"rate": 0.5}
TOP = {"rate": 0.5, "selection": "top"}
STRATA = {"rate": 0.5, "strata": "gradient"}


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 29, 30, 31, 45, 100, 1000])
def test_quantiles_are_those_of_scipy(degrees):
    assert t_quantile_95(degrees) == pytest.approx(stats.t.ppf(0.95, degrees), rel=5e-5)


def test_an_estimate_is_the_mean_its_error_and_a_one_sided_bound():
    values = [0.3, -0.1, 0.8, 0.2, 0.45]
    found = estimate(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.standard_error == pytest.approx(stats.sem(values))
    low_tail = stats.t.interval(0.9, len(values) - 1, np.mean(values), stats.sem(values))
    assert found.bound == pytest.approx(low_tail[1], rel=1e-4)


def test_the_bound_rejects_as_often_as_a_paired_t_test():
    """Below zero exactly if scipy's one-sided test of "mean >= 0" has p < 0.05."""
    generator = np.random.default_rng(0)
    decisions = []
    for _ in range(200):
        exact = generator.normal(2, 0.1, 5)
        other = exact + generator.normal(-0.03, 0.04, 5)
        p = stats.ttest_rel(other, exact, alternative="less").pvalue
        decisions.append((p < 0.05, estimate(list(other - exact)).bound < 0))
    assert {a == b for a, b in decisions} == {True}
    assert {a for a, _ in decisions} == {True, False}


def test_one_seed_has_no_error():
    found = estimate([0.2])
    assert (found.mean, found.standard_error, found.bound, found.count) == (0.2, None, None, 1)


def test_differences_are_taken_within_a_seed():
    rows = [row(0, loss=2.0), row(1, loss=4.0), row(0, SAMPLED, 2.02), row(1, SAMPLED, 4.04)]
    exact, sampled = paired(rows)
    assert exact["arm"].is_exact
    assert sampled["excess"].mean == pytest.approx(1.0)
    assert sampled["excess"].standard_error == pytest.approx(0.0, abs=1e-9)
    assert sampled["loss"].mean == pytest.approx(3.03)


def test_seeds_without_an_exact_run_do_not_count():
    rows = [row(0), row(0, SAMPLED, 2.1), row(1, SAMPLED, 9.0), row(2, TOP, 9.0)]
    exact, sampled = paired(rows)
    assert sampled["excess"].count == 1
    assert sampled["excess"].mean == pytest.approx(5.0)
    assert exact["loss"].count == 1


def test_a_diverged_run_is_not_averaged_away():
    rows = [row(0), row(1), row(0, TOP, 2.1), row(1, TOP, None)]
    assert math.isinf(paired(rows)[1]["excess"].mean)


@pytest.mark.parametrize(
    "key", ["text_fingerprint", "initial_fingerprint", "order_fingerprint", "torch", "system"]
)
def test_rows_of_different_settings_are_not_compared(key):
    with pytest.raises(ValueError, match=f"{key}='another'"):
        paired([row(0), row(0, SAMPLED, 2.1, **{key: "another"})])


def test_a_run_counts_once():
    with pytest.raises(ValueError, match="two rows of one run: sampled C50"):
        paired([row(0), row(0, SAMPLED), row(0, SAMPLED)])


def test_strata_are_set_against_the_same_arm_without():
    plain = {"rate": 0.5, "strata": "none"}
    other = {"rate": 0.2, "strata": "none"}
    rows = [
        *(row(seed, plain, 2.0) for seed in (0, 1)),
        *(row(seed, STRATA, 2.0 + 0.02 * (1 + seed)) for seed in (0, 1, 2)),  # 2 has no partner
        row(0, other, 1.0),
        row(0),
        row(0, {**STRATA, "rate": 0.3}),
    ]
    (found,) = strata_differences(rows)
    assert found["arm"].name == "sampled C50 strata=gradient"
    assert found["difference"].count == 2
    assert found["difference"].mean == pytest.approx(1.5)
    with pytest.raises(ValueError, match="torch='another'"):
        strata_differences([*rows[:2], row(0, STRATA, torch="another")])


@pytest.mark.parametrize("losses", [(None, 2.0), (2.0, None), (None, None)])
def test_a_difference_of_a_run_that_diverged_is_not_a_number(losses):
    with_strata, without = losses
    rows = [row(0, STRATA, with_strata), row(0, {"rate": 0.5, "strata": "none"}, without)]
    rows += [row(1, STRATA), row(1, {"rate": 0.5, "strata": "none"})]
    (found,) = strata_differences(rows)
    assert math.isnan(found["difference"].mean)
    assert found["difference"].bound is None


def race_row(arm, seed, ms, target=2.0):
    return {"arm": arm, "seed": seed, "target_loss": target, "ms_to_target": ms}


def test_race_ratios_pair_runs_of_one_seed():
    rows = [race_row("ours", 0, 3.0), race_row("peer", 1, 8.0), race_row("peer", 0, 4.0)]
    rows += [
        race_row("ours", 1, 2.0),
        race_row("ours", 1, None, 1.0),
        race_row("peer", 1, 9.0, 1.0),
    ]
    assert race_ratios(rows, "ours", "peer", 2.0) == [0.75, 0.25]
    assert race_ratios(rows, "ours", "peer", 1.0) is None  # one did not get there
    assert race_ratios([*rows, race_row("ours", 2, 1.0)], "ours", "peer", 2.0) is None  # no peer
    assert race_ratios(rows, "other", "peer", 2.0) is None
