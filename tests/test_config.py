"""What a user may set: every bad value is refused by name, and rates are the decimals one wrote."""

from dataclasses import fields, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrmoe import AutoRate, Budget, Recalibration
from lrmoe.config import SCORED_RULES, UNBIASED_RULES

BAD = [
    ("rate", 1.0, "0 <= rate < 1"),
    ("rate", -0.1, "0 <= rate < 1"),
    ("rate", float("nan"), "0 <= rate < 1"),
    ("rate", float("inf"), "0 <= rate < 1"),
    ("rate", True, "must be a number"),
    ("rate", None, "must be a number"),
    ("rate", "0.2", "must be a number"),
    ("rate", "automatic", "or 'auto'"),
    ("rate", [], "non-empty sequence"),
    ("rate", [0.1, 0.2], "non-empty sequence"),
    ("rate", [(0, 0.1, 0.2)], "non-empty sequence"),
    ("rate", [(0.5, 0.1)], "steps of a schedule are integers"),
    ("rate", [(-1, 0.1)], "steps of a schedule are integers"),
    ("rate", [(5, 0.1), (5, 0.2)], "must increase"),
    ("rate", [(5, 0.1), (4, 0.2)], "must increase"),
    ("rate", [(0, 0.1), (5, 1.0)], "0 <= rate < 1"),
    ("rate", [(0, 0.1), (5, "x")], "must be a number"),
    ("selection", "best", "'top'"),
    ("selection", None, "'sampled'"),
    ("scope", "world", "'global', 'local'"),
    ("quotas", "all", "'rate'"),
    ("placement", "moved", "'fixed'"),
    ("router_grad", "none", "'kept', 'completed', 'exact'"),
    ("draw", "never", "'backward', 'forward'"),
    ("rows", "padded", "'exact', 'static'"),
    ("save", "nothing", "'activations', 'inputs'"),
    ("min_inclusion", -0.1, "0 <= value <= 1"),
    ("min_inclusion", 1.5, "0 <= value <= 1"),
    ("min_inclusion", float("nan"), "0 <= value <= 1"),
    ("min_inclusion", "0.1", "0 <= value <= 1"),
    ("min_inclusion", None, "0 <= value <= 1"),
    ("min_inclusion", True, "0 <= value <= 1"),
    ("strata", "direction", "'none', 'gradient', 'neighbors', 'text'"),
    ("seed", 0.5, "integer"),
    ("seed", True, "integer"),
    ("seed", None, "integer"),
    ("auto", True, "AutoRate"),
    ("auto", None, "AutoRate"),
    ("auto", {"target": 0.1}, "AutoRate"),
    ("budget", 8, "Budget"),
    ("budget", None, "Budget"),
    ("budget", {"memory": 1}, "Budget"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_is_refused_by_field_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(ValueError, match=name) as error:
        Recalibration(**{name: value})
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)


def test_every_field_has_a_bad_value_above():
    assert {name for name, _, _ in BAD} == {f.name for f in fields(Recalibration)}


@pytest.mark.parametrize("selection", SCORED_RULES)
def test_the_forward_draw_is_for_unbiased_rules(selection):
    with pytest.raises(ValueError, match=f"draw='forward' with selection='{selection}'.*sampled"):
        Recalibration(selection=selection, draw="forward")
    for unbiased in UNBIASED_RULES:
        assert Recalibration(selection=unbiased, draw="forward").is_unbiased


def test_static_rows_need_local_scope():
    for setting in ({"selection": "top"}, {"selection": "sampled", "scope": "global"}):
        with pytest.raises(ValueError, match=r"rows='static' with scope='global'.*scope='local'"):
            Recalibration(rows="static", **setting)
    Recalibration(rows="static", selection="sampled")
    Recalibration(rows="static", selection="top", scope="local")


def test_scope_none_is_global_for_weight_one_rules_and_local_for_unbiased_ones():
    for selection in SCORED_RULES:
        assert Recalibration(selection=selection).effective_scope == "global"
        assert Recalibration(selection=selection, scope="local").effective_scope == "local"
    for selection in UNBIASED_RULES:
        assert Recalibration(selection=selection).effective_scope == "local"
        assert Recalibration(selection=selection, scope="global").effective_scope == "global"


@pytest.mark.parametrize("name", ["memory", "link_bytes"])
def test_budgets_do_not_go_with_outputs_that_return_pair_by_pair(name):
    with pytest.raises(ValueError, match=f"router_grad='exact' with budget.{name}"):
        Recalibration(router_grad="exact", budget=Budget(**{name: 100}))


@pytest.mark.parametrize("name", ["memory", "staging", "link_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "80GiB"])
def test_budgets_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"budget.{name}={value!r}: must be"):
        Budget(**{name: value})
    with pytest.raises(ValueError, match=f"budget.{name}={value!r}"):
        Recalibration.from_dict({"budget": {name: value}})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("slots", -1, "at least 0"),
        ("slots", 1.5, "an integer"),
        ("forward_pairs", True, "an integer"),
        ("c_max", 1, "0 <= c_max < 1"),
        ("c_max", -0.1, "0 <= c_max < 1"),
    ],
)
def test_bad_budgets_are_refused(name, value, allowed):
    with pytest.raises(ValueError, match=f"budget.{name}={value}.*{allowed}"):
        Budget(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("target", -0.1, "0 <= target"),
        ("target", float("inf"), "0 <= target"),
        ("target", float("nan"), "0 <= target"),
        ("target", "0.1", "a number"),
        ("low", -0.1, "0 <= low <= high <= 0.95"),
        ("low", 0.6, "0 <= low <= high <= 0.95"),
        ("low", None, "a number"),
        ("high", 0.96, "0 <= low <= high <= 0.95"),
        ("high", True, "a number"),
        ("warmup_steps", -1, "an integer >= 0"),
        ("warmup_steps", 1.5, "an integer >= 0"),
        ("warmup_steps", True, "an integer >= 0"),
    ],
)
def test_bad_settings_of_the_automatic_rate_are_refused(name, value, allowed):
    with pytest.raises(ValueError, match=f"auto.{name}={value!r}.*{allowed}"):
        AutoRate(**{name: value})
    with pytest.raises(ValueError, match=f"auto.{name}={value!r}"):
        Recalibration.from_dict({"rate": "auto", "auto": {name: value}})


@pytest.mark.parametrize("selection", SCORED_RULES)
def test_the_automatic_rate_is_for_unbiased_rules(selection):
    with pytest.raises(ValueError, match=f"rate='auto' with selection='{selection}'.*sampled"):
        Recalibration(rate="auto", selection=selection)
    for unbiased in UNBIASED_RULES:
        assert Recalibration(rate="auto", selection=unbiased).is_auto


@pytest.mark.parametrize("quotas", ["planned", "makespan"])
def test_the_automatic_rate_needs_equal_shares_of_the_experts(quotas):
    with pytest.raises(ValueError, match=f"rate='auto' with quotas='{quotas}'.*quotas='rate'"):
        Recalibration(rate="auto", quotas=quotas)


def test_an_automatic_rate_is_not_known_from_the_settings():
    with pytest.raises(ValueError, match="rate='auto': chosen by each layer"):
        Recalibration(rate="auto").rate_at(0)


def test_a_static_payload_needs_home_placement():
    with pytest.raises(ValueError, match="rows='static' with placement='recalibrated'"):
        Recalibration(rows="static", placement="recalibrated")


# ---- rates -------------------------------------------------------------------------------------


@given(st.integers(0, 9_999))
def test_a_rate_is_the_decimal_number_it_prints_as(ten_thousandths):
    rate = ten_thousandths / 10_000
    assert Recalibration(rate=rate).rate_at(7) == Fraction(ten_thousandths, 10_000)


def test_rates_in_scientific_notation_and_as_integers():
    assert Recalibration(rate=1e-05).rate_at(0) == Fraction(1, 100_000)
    assert Recalibration(rate=0).rate_at(0) == 0


def test_a_schedule_is_linear_between_its_points_and_constant_outside():
    config = Recalibration(rate=[(10, 0.1), (20, 0.3), (22, 0.0)])
    assert [config.rate_at(step) for step in (0, 10, 15, 20, 21, 22, 1000)] == [
        Fraction(*ratio) for ratio in ((1, 10), (1, 10), (1, 5), (3, 10), (3, 20), (0, 1), (0, 1))
    ]
    assert Recalibration(rate=[(3, 0.7)]).rate_at(0) == Fraction(7, 10)
    assert config.rate == ((10, 0.1), (20, 0.3), (22, 0.0))


# ---- dictionaries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Recalibration(),
        Recalibration(rate=[(0, 0.0), (5, 0.5)], selection="top", scope="local", rows="static"),
        Recalibration(rate=0, draw="forward", save="inputs", router_grad="completed", seed=-3),
        Recalibration(rate="auto", auto=AutoRate(target=0.1, low=0.1, high=0.9, warmup_steps=0)),
    ],
)
def test_dictionaries_round_trip(config):
    values = config.to_dict()
    assert set(values) == {f.name for f in fields(config)}
    assert Recalibration.from_dict(values) == config
    assert hash(config) == hash(replace(config))


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(ValueError, match="'selecton' is unknown; did you mean 'selection'"):
        Recalibration.from_dict({"selecton": "top"})
    with pytest.raises(ValueError, match=r"'zzz' is unknown; allowed are rate, .*, budget"):
        Recalibration.from_dict({"zzz": 1})
    with pytest.raises(ValueError, match=r"auto 'targt' is unknown; did you mean 'target'"):
        Recalibration.from_dict({"auto": {"targt": 0.1}})
    with pytest.raises(ValueError, match=r"budget.*'memry' is unknown; did you mean 'memory'"):
        Recalibration.from_dict({"budget": {"memry": None}})


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        Recalibration().rate = 0.5
