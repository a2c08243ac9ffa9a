import pytest
import yaml

from lrmoe.studies.gradient import read_studies
from lrmoe.studies.grid import DEFAULT_GRID, chosen, read_stages, unique_runs
from lrmoe.studies.settings import Arm, Run
from tests.studies.grids import run, stage, write_grid


@pytest.mark.parametrize("section", ["convergence", "ablation", "finalists"])
def test_the_committed_grid_reads(section):
    stages = read_stages(DEFAULT_GRID, section)
    assert all(stage.arms[0].is_exact for stage in stages)
    assert read_studies(DEFAULT_GRID)


def test_the_finalists_have_the_seeds_and_steps_the_bars_ask_for():
    stages = read_stages(DEFAULT_GRID, "finalists")
    finals = [s for s in stages if s.name.startswith("final-")]
    assert len({(s.protocol.model, s.protocol.text) for s in finals}) == 3
    assert all(len(s.seeds) >= 5 and s.protocol.steps >= 2000 for s in finals)


def test_runs_go_seed_by_seed_with_the_exact_one_first(tmp_path):
    (only,) = read_stages(write_grid(tmp_path / "grid.yaml", [stage()]), "convergence")
    names = [(r.seed, r.arm.name) for r in only.runs()]
    assert names == [(s, a) for s in (0, 1) for a in ("C0", "sampled C50", "top C50")]


def test_a_run_that_two_stages_share_is_made_once(tmp_path):
    grid = write_grid(tmp_path / "grid.yaml", [stage(), stage(name="again", seeds=[1, 2])])
    runs = unique_runs(read_stages(grid, "convergence"))
    assert [r.seed for r in runs] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_run_survives_its_row():
    arm = {"rate": ((0, 0.0), (10, 0.5)), "draw": "forward", "exact_layers": [0, -1]}
    its = run(seed=3, arm=arm, text="prose", optimizer="adafactor")
    again = Run.from_dict(its.to_dict())
    assert again == its
    assert again.key == its.key
    assert its.arm.name == "sampled C0@0-50@10 draw=forward exact_layers=[0, -1]"


def test_arms_that_choose_their_rate_say_so():
    arm = Arm.from_dict({"rate": "auto", "draw": "forward", "auto": {"target": 0.1, "high": 0.9}})
    assert arm.name == "sampled auto target=0.1 high=0.9 draw=forward"
    assert Arm.from_dict({"rate": "auto"}).name == "sampled auto"
    assert not arm.is_exact
    assert Arm.from_dict(arm.to_dict()) == arm


def test_rows_of_earlier_versions_mean_the_same():
    """A setting added later takes its default."""
    values = run(arm={"rate": 0.5}).to_dict()
    del values["protocol"]["bf16"], values["arm"]["save"], values["arm"]["auto"]
    assert Run.from_dict(values).key == run(arm={"rate": 0.5}).key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": {"step": 5}}, "protocol 'step' is not a setting; the nearest is 'steps'"),
        ({"protocol": {"text": "poems"}}, "text='poems': allowed are 'code', 'prose'"),
        ({"protocol": {"model": "qwen"}}, "model.preset='qwen': allowed are"),
        ({"protocol": {"overrides": {"experts": 4}}}, "model.overrides.experts=4"),
        ({"protocol": {"steps": 0}}, "steps=0: must be at least 1"),
        ({"arms": [{"rate": 0.5}]}, "the first arm must have rate 0"),
        ({"arms": [{"selection": "top"}]}, "has no rate"),
        ({"arms": [{"rate": 0.0, "seed": 1}]}, "seeds belong to the stage"),
        ({"arms": [{"rate": 0.0}, {"rate": 0.5, "selection": "best"}]}, "selection='best'"),
        ({"arms": [{"rate": 0.0, "rho": 0.1}]}, "'rho' is unknown"),
        ({"seeds": [1, 1]}, "must be one or more different ones"),
        ({"colour": "blue"}, "needs exactly"),
    ],
)
def test_a_wrong_stage_is_named_with_what_is_wrong(tmp_path, changes, message):
    grid = write_grid(tmp_path / "grid.yaml", [stage(**changes)])
    with pytest.raises(ValueError, match="stage 'tiny'") as error:
        read_stages(grid, "convergence")
    assert message in str(error.value)


def test_wrong_files_and_names(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_stages(tmp_path / "none.yaml", "convergence")
    grid = write_grid(tmp_path / "grid.yaml", [stage()])
    with pytest.raises(ValueError, match="has no section 'ablation'"):
        read_stages(grid, "ablation")
    with pytest.raises(ValueError, match="stage='big': allowed are 'tiny'"):
        chosen(read_stages(grid, "convergence"), ["big"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": 1}, "batches=1: must be at least 2"),
        ({"at_steps": [9]}, "at_steps=[9]"),
        ({"arms": [{"rate": 0.0}]}, "each with a rate above 0"),
        ({"many": 1}, "many"),
    ],
)
def test_a_wrong_gradient_study_is_named(tmp_path, changes, message):
    own = {"name": "g", "protocol": {"steps": 4}, "at_steps": [0], "arms": [{"rate": 0.5}]}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"gradient": [{**own, **changes}]}))
    with pytest.raises(ValueError, match="gradient study 'g'") as error:
        read_studies(path)
    assert message in str(error.value)


def test_an_arm_without_a_default_keeps_its_meaning():
    assert Arm.from_dict(Arm().to_dict()) == Arm()
