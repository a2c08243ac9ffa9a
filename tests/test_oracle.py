"""The oracles against each other, against hand-computed cases and against exact expectations."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle

TINY = {"rtol": 1e-12, "atol": 1e-14}

scores_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.just(1e12)), min_size=1, max_size=12
)


def _case(num_tokens=5, top_k=3, num_experts=6, hidden=4, width=3, seed=0):
    """A float64 layer whose last expert has no pair: (x, expert, p, gate_up, down, grad)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    expert_TK = torch.stack(
        [torch.randperm(num_experts - 1, generator=generator)[:top_k] for _ in range(num_tokens)]
    )
    return (
        normal(num_tokens, hidden),
        expert_TK,
        normal(num_tokens, top_k).softmax(1),
        normal(num_experts, 2 * width, hidden),
        normal(num_experts, hidden, width),
        normal(num_tokens, hidden),
    )


def _gradients(forward, x, expert, p, gate_up, down, grad, *args):
    """Gradients of (x, p, gate_up, down) for the output gradient `grad`."""
    leaves = [a.clone().requires_grad_() for a in (x, p, gate_up, down)]
    out = forward(leaves[0], expert, *leaves[1:], *args)
    return torch.autograd.grad(out, leaves, grad)


# ---- the layer ---------------------------------------------------------------------------------


def test_forward_and_gradients_by_hand_with_one_number_everywhere():
    # h = gate * up = (2 * 5) * (3 * 5) = 150, y = 0.1 h = 15, out = p y = 7.5 (K = 1, act = id)
    number = {"dtype": torch.float64}
    x, p = torch.tensor([[5.0]], **number), torch.tensor([[0.5]], **number)
    expert = torch.tensor([[1]])
    gate_up = torch.tensor([[[7.0], [7.0]], [[2.0], [3.0]]], **number)
    down = torch.tensor([[[7.0]], [[0.1]]], **number)

    def forward(*args):
        return oracle.moe_forward(*args, lambda gate: gate)

    torch.testing.assert_close(
        forward(x, expert, p, gate_up, down), torch.tensor([[7.5]], **number)
    )
    dx, dp, dgate_up, ddown = _gradients(
        forward, x, expert, p, gate_up, down, torch.tensor([[2.0]], **number)
    )
    # G = 2: dp = G y; ddown = p G h; dh = p G 0.1; dgate = dh up x; dup = dh gate x; dx: both ways
    assert dp.item() == pytest.approx(30)
    assert ddown.flatten().tolist() == pytest.approx([0, 150])
    assert dgate_up.flatten().tolist() == pytest.approx([0, 0, 0.1 * 15 * 5, 0.1 * 10 * 5])
    assert dx.item() == pytest.approx(0.1 * (15 * 2 + 10 * 3))


@pytest.mark.parametrize("shape", [{}, {"top_k": 1}, {"num_tokens": 0}])
def test_forward_agrees_with_dense_einsum(shape):
    if shape.get("num_tokens") == 0:
        x, expert, p, gate_up, down, _ = _case()
        assert oracle.moe_forward(x[:0], expert[:0], p[:0], gate_up, down).shape == (0, 4)
        return
    x, expert, p, gate_up, down, _ = _case(**shape)
    gate_TEF, up_TEF = torch.einsum("td,egd->teg", x, gate_up).chunk(2, dim=2)
    y_TED = torch.einsum("tef,edf->ted", F.silu(gate_TEF) * up_TEF, down)
    p_TE = torch.zeros(x.shape[0], down.shape[0], dtype=p.dtype).scatter(1, expert, p)
    out = oracle.moe_forward(x, expert, p, gate_up, down)
    torch.testing.assert_close(out, torch.einsum("te,ted->td", p_TE, y_TED), **TINY)


def test_selected_moe_keeps_the_output_and_scales_each_pairs_gradient():
    case = _case()
    x, expert, p, gate_up, down, grad = case
    weight = torch.rand(expert.shape, dtype=torch.float64) * 3
    weight[0] = 0
    weight[2, 1] = 0
    out = oracle.selected_moe(x, expert, p, gate_up, down, weight)
    assert torch.equal(out, oracle.moe_forward(x, expert, p, gate_up, down))

    got = _gradients(oracle.selected_moe, *case, weight)
    # by linearity, and by another route: one pair at a time through the complete layer
    want = [torch.zeros_like(a) for a in (x, p, gate_up, down)]
    for t, j in torch.cartesian_prod(torch.arange(5), torch.arange(3)).tolist():
        one = [a[t : t + 1] for a in (x, expert, p)]
        one[1:] = [a[:, j : j + 1] for a in one[1:]]
        dx, dp, dgate_up, ddown = _gradients(
            oracle.moe_forward, *one, gate_up, down, grad[t : t + 1]
        )
        want[0][t] += weight[t, j] * dx[0]
        want[1][t, j] += weight[t, j] * dp[0, 0]
        want[2] += weight[t, j] * dgate_up
        want[3] += weight[t, j] * ddown
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **TINY)
    assert got[0][0].abs().max() == 0  # a token without a kept pair
    assert got[3][-1].abs().max() == 0  # an expert without a pair: zero, not None


def test_weight_one_everywhere_is_the_exact_gradient():
    case = _case(top_k=1)
    got = _gradients(oracle.selected_moe, *case, torch.ones_like(case[2]))
    for a, b in zip(got, _gradients(oracle.moe_forward, *case), strict=True):
        assert torch.equal(a, b)


# ---- router gradients --------------------------------------------------------------------------


def test_router_gradient_exact_and_kept_equal_autograd():
    case = _case()
    x, expert, p, gate_up, down, grad = case
    weight = torch.rand(p.shape, dtype=p.dtype) * (torch.rand(p.shape) < 0.6)
    _, y = oracle.pair_outputs(x, expert, gate_up, down)
    exact = oracle.router_gradient("exact", p, y, grad, weight)
    kept = oracle.router_gradient("kept", p, y, grad, weight)
    torch.testing.assert_close(exact, _gradients(oracle.moe_forward, *case)[1], **TINY)
    torch.testing.assert_close(kept, _gradients(oracle.selected_moe, *case, weight)[1], **TINY)
    with pytest.raises(ValueError, match="mode is 'none'"):
        oracle.router_gradient("none", p, y, grad, weight)


@pytest.mark.parametrize("unbiased", [False, True])
def test_router_gradient_modes_agree_when_every_pair_is_kept(unbiased):
    x, expert, p, gate_up, down, grad = _case()
    _, y = oracle.pair_outputs(x, expert, gate_up, down)
    ones = torch.ones_like(p)
    exact = oracle.router_gradient("exact", p, y, grad, ones)
    for mode in ("kept", "completed"):
        got = oracle.router_gradient(mode, p, y, grad, ones, unbiased)
        torch.testing.assert_close(got, exact, **TINY)


def test_completed_for_top_is_exact_with_one_dropped_pair_and_keeps_the_weighted_sum():
    x, expert, p, gate_up, down, grad = _case()
    _, y = oracle.pair_outputs(x, expert, gate_up, down)
    weight = torch.ones_like(p)
    weight[0, 1] = 0  # one dropped
    weight[1, :2] = 0  # two dropped: they share one value
    weight[2] = 0  # all dropped
    got = oracle.router_gradient("completed", p, y, grad, weight)
    exact = oracle.router_gradient("exact", p, y, grad, weight)
    torch.testing.assert_close(got[[0, 3, 4]], exact[[0, 3, 4]], rtol=1e-10, atol=1e-12)
    assert got[1, 0] == got[1, 1]
    assert got[1, 2] == exact[1, 2]
    torch.testing.assert_close((p * got).sum(1), (p * exact).sum(1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_completed_falls_back_to_kept_where_the_routing_weights_vanish(unbiased):
    x, expert, p, gate_up, down, grad = _case()
    p[0] = 0  # the whole token
    p[1, 0] = 0  # only the dropped pair
    weight = torch.ones_like(p)
    weight[:2, 0] = 0
    _, y = oracle.pair_outputs(x, expert, gate_up, down)
    got = oracle.router_gradient("completed", p, y, grad, weight, unbiased)
    kept = oracle.router_gradient("kept", p, y, grad, weight)
    assert torch.equal(got[0], kept[0])
    assert got.isfinite().all()
    if not unbiased:
        assert torch.equal(got[1], kept[1])


# ---- the score ---------------------------------------------------------------------------------


def test_lrm_equals_the_brute_force_norm():
    x, expert, p, gate_up, down, grad = _case(num_tokens=8, seed=3)
    p[0, 0], grad[1] = 0, 0
    h, _ = oracle.pair_outputs(x, expert, gate_up, down)
    closed = oracle.lrm(p, (grad**2).sum(1), (h**2).sum(2))
    brute = oracle.lrm_brute(x, expert, p, gate_up, down, grad)
    torch.testing.assert_close(closed, brute, rtol=1e-10, atol=0)
    assert brute[0, 0] == 0
    assert brute[1].max() == 0


def test_lrm_is_the_squared_change_from_dropping_the_pair_alone():
    case = _case()
    brute = oracle.lrm_brute(*case)
    exact = _gradients(oracle.moe_forward, *case)[3]
    for t, j in ((0, 0), (3, 2)):
        weight = torch.ones_like(case[2])
        weight[t, j] = 0
        dropped = _gradients(oracle.selected_moe, *case, weight)[3]
        change = ((exact - dropped) ** 2).sum()
        torch.testing.assert_close(change, brute[t, j], rtol=1e-9, atol=0)


# ---- quotas ------------------------------------------------------------------------------------


def test_rate_quotas_by_hand():
    n_WE = [[5, 0, 1, 10], [5, 0, 0, 0]]
    assert oracle.rate_quotas(n_WE, 0.2) == [8, 0, 1, 8]
    assert oracle.rate_quotas(n_WE, 0) == [10, 0, 1, 10]
    assert oracle.rate_quotas(n_WE, 1.0) == [1, 0, 1, 1]
    assert oracle.rate_quotas(torch.tensor(n_WE), 0.35) == [7, 0, 1, 7]


def test_rate_quotas_are_exact_where_floats_are_not():
    assert math.ceil((1 - 0.7) * 10) == 4  # what float64 makes of it
    assert oracle.rate_quotas([[10]], 0.7) == [3]
    assert oracle.rate_quotas([[100]], 0.9) == [10]


def test_apportion_by_hand():
    assert oracle.apportion([5, 5], 5) == [3, 2]  # tie: the lower rank
    assert oracle.apportion([1, 2, 7], 5) == [1, 1, 3]  # shares 0.5, 1, 3.5: tie again
    assert oracle.apportion([3, 97], 10) == [0, 10]
    assert oracle.apportion([0, 4], 1) == [0, 1]
    assert oracle.apportion([0, 0], 0) == [0, 0]
    with pytest.raises(ValueError, match="q is 3"):
        oracle.apportion([1, 1], 3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_apportion_properties(n_W, data):
    q = data.draw(st.integers(0, sum(n_W)))
    quota_W = oracle.apportion(n_W, q)
    assert sum(quota_W) == q
    for n, quota in zip(n_W, quota_W, strict=True):
        assert 0 <= quota <= n
        assert not n or abs(quota - Fraction(q * n, sum(n_W))) < 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any), st.data())
def test_systematic_apportion_has_the_shares_as_its_mean(n_W, data):
    q, total = data.draw(st.integers(1, sum(n_W))), sum(n_W)
    draws = [oracle.systematic_apportion(n_W, q, start) for start in range(total)]
    for draw in draws:
        assert sum(draw) == q
        for n, quota in zip(n_W, draw, strict=True):
            assert quota in (q * n // total, -(-q * n // total))
    for column, n in zip(zip(*draws, strict=True), n_W, strict=True):
        assert Fraction(sum(column), total) == Fraction(q * n, total)


# ---- top ---------------------------------------------------------------------------------------


def test_select_top_by_hand():
    nan, inf = math.nan, math.inf
    ids = [(1, 0), (0, 7), (0, 2), (1, 3), (0, 0), (0, 1)]
    experts = [0, 0, 0, 0, 2, 2]
    scores = [1.0, 1.0, 1.0, 2.0, 0.0, 0.0]
    # expert 0: the 2.0, then the tie goes to (0, 2); expert 1 has no pair; expert 2: id (0, 0)
    kept = oracle.select_top(scores, experts, ids, [2, 0, 1])
    assert kept == [False, False, True, True, True, False]
    assert oracle.select_top(scores, experts, ids, [4, 0, 2]) == [True] * 6
    # non-finite scores come first, and tie among themselves
    scores = [nan, 1e30, inf, nan, 0.0, nan]
    kept = oracle.select_top(scores, experts, ids, [2, 0, 1])
    assert kept == [True, False, True, False, False, True]
    assert oracle.select_top([], [], [], [0, 0]) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_select_top_keeps_the_largest_sum(scores, data):
    q = data.draw(st.integers(0, len(scores)))
    pair_ids = oracle.global_pair_ids(0, len(scores), 1)
    kept = oracle.select_top(scores, [0] * len(scores), pair_ids, [q])
    assert sum(kept) == q
    assert sum(s for s, k in zip(scores, kept, strict=True) if k) == max(
        sum(some) for some in combinations(scores, q)
    )


def test_global_pair_ids_are_token_major():
    assert oracle.global_pair_ids(3, 2, 2) == [(3, 0), (3, 1), (3, 2), (3, 3)]


# ---- sampled -----------------------------------------------------------------------------------


def _bisected(sizes, q):
    """The probabilities by bisection on c: slow, and nothing in common with capping."""
    low, high = 0.0, q / min(sizes) + 1
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * a) for a in sizes) < q else (low, c)
    return [min(1.0, low * a) for a in sizes]


def test_sampled_sizes_by_hand():
    # roots 0, 1, 3, mean 4/3
    assert oracle.sampled_sizes([0.0, 1.0, 9.0], 0.0) == pytest.approx([0, 0.75, 2.25])
    assert oracle.sampled_sizes([0.0, 1.0, 9.0], 0.1) == pytest.approx([0.1, 0.775, 2.125])
    assert oracle.sampled_sizes([0.0, 0.0], 0.1) == [1, 1]
    assert oracle.sampled_sizes([math.nan, 1.0, math.inf], 0.1) == pytest.approx([1, 1, 1])
    assert oracle.sampled_sizes([math.nan, 0.0], 0.1) == [1, 1]
    assert oracle.sampled_sizes([], 0.1) == []


def test_inclusion_probabilities_by_hand():
    third = Fraction(1, 3)
    assert oracle.inclusion_probabilities([1, 1, 1], 1) == [third] * 3
    assert oracle.inclusion_probabilities([3, 1, 2], 1) == [third * 3 / 2, third / 2, third]
    assert oracle.inclusion_probabilities([1e30, 1, 1], 2) == [1, Fraction(1, 2), Fraction(1, 2)]
    assert oracle.inclusion_probabilities([5, 0, 1], 3) == [1, 1, 1]  # q = n: exactly one
    assert oracle.inclusion_probabilities([5, 0, 0], 2) == [1, Fraction(1, 2), Fraction(1, 2)]
    assert oracle.inclusion_probabilities([5, 0], 0) == [0, 0]
    assert oracle.inclusion_probabilities([], 0) == []
    with pytest.raises(ValueError, match="q is 2"):
        oracle.inclusion_probabilities([1], 2)


def test_capping_may_take_many_rounds():
    sizes = [math.factorial(9 - i) for i in range(10)]  # each round caps one more
    pi = oracle.inclusion_probabilities(sizes, 9)
    assert sum(pi) == 9
    assert [float(x) for x in pi] == pytest.approx(_bisected(sizes, 9), abs=1e-12)


@given(scores_lists, st.sampled_from([0.1, 0.5, 1.0]), st.data())
def test_inclusion_probabilities_solve_their_equation(scores, rho, data):
    q = data.draw(st.integers(1, len(scores)))
    sizes = oracle.sampled_sizes(scores, rho)
    pi = oracle.inclusion_probabilities(sizes, q)
    assert sum(pi) == q
    assert all(0 < x <= 1 for x in pi)
    assert [float(x) for x in pi] == pytest.approx(_bisected(sizes, q), rel=1e-9)
    # rho bounds the weights: pi >= min(1, rho q / n), as the sizes' mean is one
    assert float(min(pi)) >= min(1, rho * q / len(scores)) * (1 - 1e-9)


def test_systematic_sample_by_hand():
    pi = [Fraction(1, 2), Fraction(1, 4), Fraction(1), Fraction(1, 4)]
    # order 3, 0, 2, 1: stretches [0, 1/4) [1/4, 3/4) [3/4, 7/4) [7/4, 2)
    order = [3, 0, 2, 1]
    assert oracle.systematic_sample(pi, order, 0) == [2, 3]
    assert oracle.systematic_sample(pi, order, 0.25) == [0, 2]
    assert oracle.systematic_sample(pi, order, 0.75) == [1, 2]
    assert oracle.integrate_over_start(pi, order) == [
        (Fraction(1, 4), [2, 3]),
        (Fraction(1, 2), [0, 2]),
        (Fraction(1, 4), [1, 2]),
    ]
    assert oracle.systematic_sample([Fraction(1)] * 3, [2, 0, 1], 0.5) == [0, 1, 2]
    assert oracle.integrate_over_start([], []) == [(1, [])]
    for bad in ([Fraction(1, 2)], order, 0), (pi, [0, 0, 1, 2], 0), (pi, order, 1.0):
        with pytest.raises(ValueError, match="pi must sum"):
            oracle.systematic_sample(*bad)


@given(scores_lists, st.sampled_from([0.0, 0.1]), st.randoms(use_true_random=False), st.data())
def test_systematic_sampling_draws_q_and_reaches_pi_exactly(scores, rho, random, data):
    q = data.draw(st.integers(1, len(scores)))
    pi = oracle.inclusion_probabilities(oracle.sampled_sizes(scores, rho), q)
    order = list(range(len(scores)))
    random.shuffle(order)
    draws = oracle.integrate_over_start(pi, order)
    assert sum(length for length, _ in draws) == 1
    reached = [Fraction(0)] * len(scores)
    for length, picked in draws:
        assert len(picked) == len(set(picked)) == q
        for i in picked:
            reached[i] += length
    assert reached == pi


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_sampled_gradients_integrate_to_the_exact_ones(seed, q):
    case = _case(num_tokens=6, top_k=2, num_experts=3, seed=seed)
    expert, p = case[1:3]
    exact = _gradients(oracle.moe_forward, *case)
    # one expert at a time: the gradient is linear in the weights, so the draws need no joint sum
    scores = oracle.lrm_brute(*case).flatten()
    flat = expert.flatten()
    mean_weight = torch.zeros(flat.shape[0], dtype=torch.float64)
    for e in range(3):
        mine = (flat == e).nonzero().flatten()
        quota = min(q, len(mine))
        sizes = oracle.sampled_sizes(scores[mine].tolist(), 0.1)
        pi = oracle.inclusion_probabilities(sizes, quota)
        order = torch.randperm(len(mine)).tolist()
        for length, picked in oracle.integrate_over_start(pi, order):
            for i in picked:
                mean_weight[mine[i]] += float(length / pi[i])
    torch.testing.assert_close(mean_weight, torch.ones_like(mean_weight), rtol=0, atol=1e-12)
    got = _gradients(oracle.selected_moe, *case, mean_weight.view_as(p))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_completed_router_gradient_for_sampled_by_hand():
    # dp = (4, 1); <G, out> = 0.5 * 4 + 0.25 * 1 = 2.25; m = 2.25 / 0.75 = 3
    p, grad = torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0]])
    y, weight = torch.tensor([[[4.0], [1.0]]]), torch.tensor([[2.0, 0.0]])
    got = oracle.router_gradient("completed", p, y, grad, weight, unbiased=True)
    assert got.tolist() == [[3 + 2 * (4 - 3), 3]]


def test_completed_router_gradient_for_sampled_is_unbiased():
    x, _, p, gate_up, down, grad = _case(top_k=2, num_tokens=4)
    expert = torch.tensor([[0, 1]] * 4)  # column j is expert j
    p = p * torch.tensor([[0.2], [0.5], [0.9], [1.0]], dtype=p.dtype)
    _, y = oracle.pair_outputs(x, expert, gate_up, down)
    scores_TK = oracle.lrm_brute(x, expert, p, gate_up, down, grad)
    pi = [
        oracle.inclusion_probabilities(oracle.sampled_sizes(column.tolist(), 0.1), q)
        for column, q in zip(scores_TK.T, (2, 1), strict=True)
    ]
    mean = torch.zeros_like(p)
    for length_0, picked_0 in oracle.integrate_over_start(pi[0], [2, 0, 3, 1]):
        for length_1, picked_1 in oracle.integrate_over_start(pi[1], [0, 1, 2, 3]):
            weight = torch.zeros_like(p)
            for j, picked in enumerate((picked_0, picked_1)):
                for t in picked:
                    weight[t, j] = float(1 / pi[j][t])
            draw = oracle.router_gradient("completed", p, y, grad, weight, unbiased=True)
            mean += float(length_0 * length_1) * draw
    exact = oracle.router_gradient("exact", p, y, grad, torch.ones_like(p))
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-12)


# ---- where deterministic shares and unbiasedness meet ------------------------------------------


def _mean_weights(n_W, q, quotas_of_start, weight):
    """Exact mean weight of a pair on each rank, uniform sizes, over starts 0 .. n - 1."""
    total = sum(n_W)
    mean_W = [Fraction(0)] * len(n_W)
    for start in range(total):
        for r, (n, quota) in enumerate(zip(n_W, quotas_of_start(start), strict=True)):
            if quota:
                # each of the n pairs is picked with probability quota / n
                mean_W[r] += Fraction(quota, n) * weight(r, n, quota) / total
    return mean_W


def test_largest_remainder_shares_are_biased_where_a_share_rounds_to_zero():
    n_W, q = [1] * 5, 4  # C20, five ranks with one pair each
    mean_W = _mean_weights(
        n_W, q, lambda _: oracle.apportion(n_W, q), lambda r, n, k: Fraction(n, k)
    )
    assert mean_W == [1, 1, 1, 1, 0]  # the last rank's pair never gets a gradient; unbiased is 1


@pytest.mark.parametrize(
    ("n_W", "q"), [([1] * 5, 4), ([3, 97], 10), ([2, 0, 5, 1], 3), ([4, 4], 1)]
)
def test_systematic_shares_with_their_own_probability_are_unbiased(n_W, q):
    def weight(r, n, quota):
        return Fraction(n, quota) / min(1, Fraction(q * n, sum(n_W)))

    mean_W = _mean_weights(n_W, q, lambda start: oracle.systematic_apportion(n_W, q, start), weight)
    assert mean_W == [1 if n else 0 for n in n_W]


# ---- what has to travel ------------------------------------------------------------------------


def test_unique_rows_by_hand():
    # 4 experts on 2 ranks: 0, 1 at home on rank 0; 2, 3 on rank 1
    expert = [torch.tensor([[0, 1], [1, 2], [3, 2]]), torch.empty(0, 2, dtype=torch.int64)]
    forward = oracle.unique_rows(expert, None, 2, 4)
    assert forward.unique_WW.tolist() == [[2, 2], [0, 0]]
    assert forward.pairs_W.tolist() == [3, 3]
    kept = [torch.tensor([[1, 0], [0, 0], [1, 1]]).bool(), torch.empty(0, 2).bool()]
    backward = oracle.unique_rows(expert, kept, 2, 4)
    assert backward.unique_WW.tolist() == [[1, 1], [0, 0]]
    assert backward.pairs_W.tolist() == [1, 2]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_unique_rows_agree_with_a_dense_count(seed, num_ranks, top_k):
    generator = torch.Generator().manual_seed(seed)
    num_experts = 4
    experts = [
        torch.stack(
            [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(r + 2)]
        )
        for r in range(num_ranks)
    ]
    kept = [torch.rand(e.shape, generator=generator) < 0.5 for e in experts]
    got = oracle.unique_rows(experts, kept, num_ranks, num_experts)
    for r, (expert, keep) in enumerate(zip(experts, kept, strict=True)):
        home = expert // (num_experts // num_ranks)
        feeds = (F.one_hot(home, num_ranks).bool() & keep[:, :, None]).any(1)
        assert torch.equal(got.unique_WW[r], feeds.sum(0))
    assert got.pairs_W.sum() == sum(int(k.sum()) for k in kept)
    assert (got.unique_WW.sum(0) <= got.pairs_W).all()
