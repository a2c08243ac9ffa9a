"""``rate="auto"``: predicted noise against exact expectations, and what is chosen from it.

Shape letters: N = pairs in expert-major order, e = experts, A = candidate rates, B = A + 1 sums,
W = ranks.
"""

import copy
import io
import math
import pickle
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from lrmoe import AutoRate, Budget, LayerState, Recalibration, experts, select
from lrmoe.auto import NUM_SUMS, RATES, NoiseMeter, choose_rate
from lrmoe.config import UNBIASED_RULES
from lrmoe.select import Segments, sampling_noise, sampling_sizes
from tests import oracle
from tests.layers import TENSORS, Starts, make_case, oracle_gradients, run_layer

CPU = torch.device("cpu")
ALWAYS = AutoRate(target=1e9, high=0.5, warmup_steps=0)


def exact_noise(sizes, scores, quota):
    """``sum (1 / pi - 1) score`` of one expert, in exact arithmetic."""
    units = [max(round(size * 2**20), 1) for size in sizes]
    pi = oracle.inclusion_probabilities(units, quota)
    return float(sum((1 / p - 1) * Fraction(s) for p, s in zip(pi, scores, strict=True)))


# ---- the prediction ----------------------------------------------------------------------------

some_scores = st.one_of(st.sampled_from([0.0, 1.0, 1e-12, 1e12]), st.floats(0, 1e6, width=32))


@st.composite
def experts_and_quotas(draw):
    """Drawn-by and actual scores of up to five experts, some empty; three rows of quotas."""
    pair = st.tuples(some_scores, some_scores)
    pairs_e = draw(st.lists(st.lists(pair, max_size=8), min_size=1, max_size=5))
    quota_3e = [
        [
            draw(st.fractions(0, len(pairs), max_denominator=4).filter(bool)) if pairs else 0
            for pairs in pairs_e
        ]
        for _ in range(3)
    ]
    return pairs_e, quota_3e


@settings(max_examples=200)
@given(experts_and_quotas(), st.sampled_from([0.0, 0.1, 1.0]))
def test_the_noise_of_any_quotas_equals_the_exact_sum(case, rho):
    pairs_e, quota_3e = case
    segments = Segments(np.array([len(pairs) for pairs in pairs_e]), CPU)
    drawn_by_N, score_N = (
        torch.tensor([pair[i] for pairs in pairs_e for pair in pairs], dtype=torch.float64)
        for i in (0, 1)
    )
    size_N = sampling_sizes(drawn_by_N, segments, rho)
    got_3 = sampling_noise(size_N, score_N, segments, np.array(quota_3e, dtype=np.float64))
    size_e, score_e = (torch.split(t, segments.count_e.tolist()) for t in (size_N, score_N))
    for got, quota_e in zip(got_3.tolist(), quota_3e, strict=True):
        want = math.fsum(
            exact_noise(sizes.tolist(), scores.tolist(), quota)
            for sizes, scores, quota in zip(size_e, score_e, quota_e, strict=True)
        )
        # An expert's sums are differences of running ones, so the error is that of the whole.
        largest = float((score_N / size_N.clamp_min(2**-20)).sum() * size_N.clamp_min(1).sum())
        assert got == pytest.approx(want, rel=1e-9, abs=1e-13 * largest)


@pytest.mark.parametrize("selection", UNBIASED_RULES)
@pytest.mark.parametrize("draw", ["backward", "forward"])
@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_integrated_over_the_start_the_error_of_the_gradient_is_the_predicted_noise(
    selection, draw, scope, rate, monkeypatch
):
    # Tokens with orthogonal gradients: then the pairs' terms are orthogonal, whatever is drawn
    # together. The draws of different experts may share a start: their gradients are apart.
    case = make_case(num_tokens=10, top_k=3, hidden=16)
    rows = torch.linalg.qr(case.grad.T)[0].T
    case = case._replace(grad=rows * case.grad.norm(dim=1, keepdim=True))
    config = Recalibration(rate="auto", selection=selection, draw=draw, scope=scope)
    state = LayerState(config)
    run_layer(case, state=state)
    *noise_A, score = state.noise.state_dict()["sums"]

    starts = Starts()
    monkeypatch.setattr(select, "sample_pairs", starts.sample_pairs)
    fixed = Recalibration(rate=rate, selection=selection, draw=draw, scope=scope)
    run_layer(case, fixed)
    exact = oracle_gradients(case, torch.ones_like(case.p))["down"]
    error = 0.0
    for share in starts.stretches():
        drawn = run_layer(case, fixed).grads["down"]
        error += (drawn - exact).square().sum().item() * share
    assert len(starts.cuts) > 1
    assert noise_A[RATES.index(Fraction(str(rate)))] == pytest.approx(error, rel=1e-5)
    assert score == pytest.approx(exact.square().sum().item(), rel=1e-9)


def test_noise_rises_with_the_rate_and_is_measured_whatever_is_kept():
    case = make_case(num_tokens=60)
    sums = []
    for target in (0.0, 1e9):
        auto = AutoRate(target=target, low=0.0, high=0.9, warmup_steps=0)
        state = LayerState(Recalibration(rate="auto", auto=auto))
        for _ in range(2):
            run_layer(case, state=state)
            state.finish_step()
        sums.append(state.noise.state_dict()["sums"])
        assert state.report().rate == (0.9 if target else 0.0)
    assert sums[0] == sums[1]
    assert sums[0][:-1] == sorted(sums[0][:-1])


# ---- the choice --------------------------------------------------------------------------------


def bits(*sums_WB):
    return np.array(sums_WB, dtype=np.float64).view(np.int64)


def line(slope, score=1.0):
    """Sums whose noise is ``slope`` times the rate."""
    return [*(slope * float(rate) * score for rate in RATES), score]


def auto(**changes):
    return AutoRate(**{"target": 0.1, "low": 0.0, "high": 0.95, "warmup_steps": 0, **changes})


@pytest.mark.parametrize(
    ("slope", "changes", "want"),
    [
        (0.5, {}, "0.2"),  # on a candidate
        (0.4, {"target": 0.09}, "0.225"),  # between two
        (0.3, {}, "0.333"),  # rounded down
        (10.0, {}, "0.01"),  # before the first
        (0.1, {}, "0.95"),  # beyond the last
        (0.1, {"high": 0.6}, "0.6"),
        (10.0, {"low": 0.3}, "0.3"),
        (0.5, {"target": 0}, "0"),
        (0.1, {"low": 0.4, "high": 0.4}, "0.4"),
    ],
)
def test_the_largest_rate_within_target_and_bounds_is_chosen(slope, changes, want):
    chosen = choose_rate(bits(line(slope)), 0, auto(**changes))
    assert abs(chosen - Fraction(want)) <= Fraction(1, 1000)
    assert chosen <= Fraction(want)
    assert chosen.denominator in {1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 125, 200, 250, 500, 1000}


def test_a_choice_in_a_convex_curve_does_not_exceed_the_target():
    curve = [*(float(r) ** 3 for r in RATES), 1.0]
    for target in (0.0001, 0.01, 0.1, 0.5):
        chosen = float(choose_rate(bits(curve), 0, auto(target=target)))
        assert chosen**3 <= target
        assert (chosen + 0.05) ** 3 > target


def test_ranks_count_by_their_scores_not_alike():
    both = bits(line(1.0, score=9.0), line(0.0, score=1.0))
    assert choose_rate(both, 0, auto(target=0.18)) == Fraction(1, 5)
    assert choose_rate(both[::-1], 0, auto(target=0.18)) == Fraction(1, 5)
    silent = bits(line(1.0), [0.0] * NUM_SUMS)
    assert choose_rate(silent, 0, auto()) == choose_rate(bits(line(1.0)), 0, auto())


def test_during_warmup_and_without_scores_the_lowest_rate_is_taken():
    settings_ = auto(low=0.1, warmup_steps=3)
    chosen = [choose_rate(bits(line(0.2)), step, settings_) for step in range(5)]
    assert [float(rate) for rate in chosen] == [0.1, 0.1, 0.1, 0.5, 0.5]
    assert choose_rate(bits([0.0] * NUM_SUMS), 9, settings_) == Fraction(1, 10)


def test_old_steps_fade_and_non_finite_gradients_leave_nothing():
    meter = NoiseMeter()
    assert not meter.bits(CPU).any()
    ones = torch.ones(NUM_SUMS, dtype=torch.float64)
    meter.add(0, ones)
    meter.add(0, 2 * ones)  # another micro-batch
    assert meter.state_dict()["sums"] == [3.0] * NUM_SUMS
    meter.add(2, ones)
    assert meter.state_dict()["sums"] == pytest.approx([1 + 3 * 0.81] * NUM_SUMS, rel=1e-15)
    before = meter.state_dict()["sums"]
    for bad in (math.nan, math.inf):
        meter.add(2, torch.cat([ones[1:], ones[:1] * bad]))
    assert meter.state_dict()["sums"] == before
    assert meter.bits(CPU).view(torch.float64).tolist() == before


# ---- in the layer ------------------------------------------------------------------------------


def steps(state, cases):
    """A step per case; what each requested and kept."""
    seen = []
    for case in cases:
        run = run_layer(case, state=state)
        state.finish_step()
        seen.append((state.report().rate, run.records[0].kept.tolist()))
    return seen


@pytest.mark.parametrize("draw", ["backward", "forward"])
def test_where_nothing_may_be_dropped_training_is_exact_bit_for_bit(draw):
    case = make_case(num_tokens=40, dtype=torch.float32)
    exact = run_layer(case, Recalibration(rate=0.0))
    state = LayerState(Recalibration(rate="auto", draw=draw, auto=AutoRate(target=0.0)))
    for _ in range(2):
        run = run_layer(case, state=state)
        assert torch.equal(run.output, exact.output)
        assert all(torch.equal(run.grads[n], exact.grads[n]) for n in TENSORS)


@pytest.mark.parametrize("draw", ["backward", "forward"])
def test_a_chosen_rate_gives_the_gradients_of_the_same_rate_set_by_hand(draw):
    case = make_case(num_tokens=40)
    state = LayerState(Recalibration(rate="auto", draw=draw, auto=ALWAYS))
    run_layer(case, state=state)
    chosen = run_layer(case, state=state)
    assert chosen.report.rate == 0.5
    fixed = LayerState(Recalibration(rate=0.5, draw=draw))
    fixed.micro_batch = 1
    want = run_layer(case, state=fixed)
    assert torch.equal(chosen.records[0].weight, want.records[0].weight)
    assert all(torch.equal(chosen.grads[n], want.grads[n]) for n in TENSORS)


def test_a_layer_keeps_to_warmup_and_bounds_and_reports_its_rate():
    config = Recalibration(
        rate="auto", auto=AutoRate(target=0.001, low=0.05, high=0.4, warmup_steps=3)
    )
    state = LayerState(config)
    cases = [make_case(num_tokens=200, seed=seed) for seed in range(8)]
    rates = [rate for rate, _ in steps(state, cases)]
    assert rates[:3] == [0.05] * 3
    assert all(0.05 < rate < 0.4 for rate in rates[3:]), rates
    report = state.report()
    counts = torch.bincount(cases[-1].expert.flatten(), minlength=5).tolist()
    assert report.kept_pairs == sum(oracle.rate_quotas([counts], report.rate))


def test_other_rates_are_reported_too():
    state = LayerState(Recalibration(rate=[(0, 0.0), (2, 0.5)]))
    assert [rate for rate, _ in steps(state, [make_case()] * 3)] == [0.0, 0.25, 0.5]
    assert state.noise.state_dict() == {}


def test_micro_batches_count_from_the_next_call_on():
    case = make_case(num_tokens=40)
    state = LayerState(Recalibration(rate="auto", auto=ALWAYS))
    assert [run_layer(case, state=state).report.rate for _ in range(3)] == [0.0, 0.5, 0.5]
    once = LayerState(Recalibration(rate="auto", auto=ALWAYS))
    run_layer(case, state=once)
    three, one = (s.noise.state_dict()["sums"] for s in (state, once))
    assert three == pytest.approx([3 * value for value in one], rel=1e-12)


def test_two_forwards_before_a_backward_and_evaluation_in_between():
    case = make_case(num_tokens=40)
    state = LayerState(Recalibration(rate="auto", auto=ALWAYS))
    x = case.x.clone().requires_grad_()
    outputs = [experts(x, *case[1:5], state=state) for _ in range(2)]
    for output in outputs:
        output.backward(case.grad)
    with torch.no_grad():
        experts(case.x, *case[1:5], state=state)
    assert run_layer(case, state=state).report.rate == 0.5


@pytest.mark.parametrize("draw", ["backward", "forward"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_call_counts_once(draw, use_reentrant):
    config = Recalibration(rate="auto", draw=draw, auto=ALWAYS)
    case = make_case(num_tokens=40, dtype=torch.float32)
    plain, through = LayerState(config), LayerState(config)
    again = partial(checkpoint, use_reentrant=use_reentrant)
    for _ in range(3):
        want = run_layer(case, state=plain)
        got = run_layer(case, state=through, through=again)
        assert through.noise.state_dict() == plain.noise.state_dict()
        assert got.report.rate == want.report.rate
        assert all(torch.equal(got.grads[n], want.grads[n]) for n in TENSORS)
        plain.finish_step()
        through.finish_step()
    assert want.report.rate == 0.5


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    resumed = LayerState(state.config, state.layer)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return resumed


@pytest.mark.parametrize(
    "copied", [_through_a_file, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_resumed_or_copied_layer_chooses_what_the_first_would_have_chosen(copied, num_steps):
    cases = [make_case(num_tokens=60, seed=seed) for seed in range(10)]
    config = Recalibration(rate="auto", auto=AutoRate(target=0.02, high=0.9, warmup_steps=2))
    state = LayerState(config, layer=3)
    steps(state, cases[:num_steps])
    twin = copied(state)
    rest = steps(state, cases[num_steps:])
    assert steps(twin, cases[num_steps:]) == rest
    assert len({rate for rate, _ in rest}) > 4  # they depend on what came before


def test_no_tokens_and_no_gradient_choose_the_lowest_rate():
    state = LayerState(Recalibration(rate="auto", auto=ALWAYS))
    empty = make_case(num_tokens=0)
    silent = make_case(num_tokens=8)
    silent = silent._replace(grad=torch.zeros_like(silent.grad))
    assert [rate for rate, _ in steps(state, [empty, empty, silent, silent])] == [0.0] * 4
    assert all(math.isfinite(value) for value in state.noise.state_dict()["sums"])


def test_a_non_finite_gradient_does_not_stop_the_choices():
    case = make_case(num_tokens=40)
    bad = case._replace(grad=case.grad.clone())
    bad.grad[3, 1] = math.nan
    state = LayerState(Recalibration(rate="auto", auto=ALWAYS))
    assert [rate for rate, _ in steps(state, [bad, case, bad, case])] == [0.0, 0.0, 0.5, 0.5]


def test_settings_may_change_between_the_passes_and_between_steps():
    case = make_case(num_tokens=40)
    state = LayerState(Recalibration(rate="auto", auto=ALWAYS))
    x = case.x.clone().requires_grad_()
    output = experts(x, *case[1:5], state=state)
    state.config = Recalibration(rate=0.25)
    output.backward(case.grad)
    assert run_layer(case, state=state).report.rate == 0.25
    state.config = Recalibration(rate="auto", auto=ALWAYS)
    assert run_layer(case, state=state).report.rate == 0.5


def test_budgets_may_drop_up_to_the_highest_rate():
    config = Recalibration(rate="auto", auto=AutoRate(high=0.4), budget=Budget(memory=1 << 30))
    assert config.c_max == 0.4
    assert Recalibration(rate="auto", budget=Budget(c_max=0.3)).c_max == 0.3
    assert Recalibration(rate=0.2).c_max is None
    state = LayerState(config)
    shape = state.shape(_sizes(), 1, 16, 2)
    rate = Fraction(1, 10)
    problem = state.problem(np.array([[4, 4]]), shape, 0, rate=rate)
    assert (problem.rate, problem.c_max) == (rate, Fraction(2, 5))
    run_layer(make_case(num_tokens=16, dtype=torch.float32), config)


def test_layers_leave_room_for_what_later_ones_keep_at_the_highest_rate():
    held_3W, budget = np.array([[0], [0], [2]]), Budget(memory=1 << 30, c_max=0.1)
    reserved = []
    for config in (
        Recalibration(rate="auto", auto=AutoRate(high=0.5), budget=budget),
        Recalibration(rate=0.5, budget=budget),
        Recalibration(rate=0.1, budget=budget),
    ):
        state = LayerState(config)
        shape = state.shape(_sizes(), 1, 64, 2)
        problem = state.problem(
            np.array([[64, 64]]), shape, 0, held_3W=held_3W, rate=Fraction(1, 10)
        )
        reserved.append(problem.reserved_W.tolist())
    assert reserved[0] == reserved[1] != reserved[2]


def _sizes():
    from lrmoe.state import LayerSizes

    return LayerSizes(hidden=8, ffn=4, experts=2, dtype_bytes=4)


def test_a_plan_without_a_chosen_rate_is_refused():
    state = LayerState(Recalibration(rate="auto"))
    with pytest.raises(ValueError, match="rate='auto': chosen by each layer"):
        state.problem(np.array([[4, 4]]), state.shape(_sizes(), 1, 4, 2), 0)
