"""The Hugging Face plug-in on one device: parity, settings, reports, Trainer, refusals."""

import copy
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.integrations.moe import ExpertsInterface

import lrmoe
from lrmoe import Recalibration
from lrmoe.integrations import transformers as plugin
from tests.models import (
    FAMILIES,
    VOCABULARY,
    Gradients,
    gradient_errors,
    load,
    make_batches,
    record_layer_input_gradients,
    reference_gradients,
    save_tiny,
    tiny_model,
    worst,
)
from tests.replay import replay_gradients

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
HALF = Recalibration(rate=0.5)


@pytest.fixture
def model():
    return tiny_model("qwen3").train()


@pytest.fixture
def batch():
    return make_batches(1)[0]


def gradients_of(model, batch) -> Gradients:
    """The gradients of one batch, as one rank of one."""
    model.zero_grad()
    with record_layer_input_gradients(model) as inputs:
        loss = model(**batch).loss
        loss.backward()
    parameters = {n: p.grad.clone() for n, p in model.named_parameters()}
    return Gradients(loss.item(), parameters, [[grads[-1] for grads in inputs]])


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "act_fn")]


# ---- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_rate_zero_equals_the_models_own_experts(tmp_path, family, reentrant):
    directory, batches = save_tiny(tmp_path, family), make_batches(1)
    reference = reference_gradients(directory, batches)
    lrmoe.register_transformers()
    model = load(directory, experts_implementation="lrmoe")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(3):  # in poisoned memory, then in memory that a pass has used
        errors = gradient_errors(gradients_of(model, batches[0]), reference)
        assert worst(errors)[0] <= 1e-5, worst(errors)


SETTINGS = {
    "sampled": HALF,
    "sampled forward": Recalibration(rate=0.5, draw="forward", save="inputs"),
    "top": Recalibration(rate=0.5, selection="top"),
    "top local": Recalibration(rate=0.7, selection="top", scope="local", rows="static"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3", "glm"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_dropped_pairs_change_the_whole_models_gradients_as_the_oracle_says(
    tmp_path, name, family, reentrant
):
    directory, batches = save_tiny(tmp_path, family), make_batches(1)
    model = load(directory)
    lrmoe.configure(model, SETTINGS[name])
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with lrmoe.capture(model) as records:
        got = gradients_of(model, batches[0])
    assert [len(layer) for layer in records] == [1, 1]
    assert all((layer[0].weight == 0).any() for layer in records)
    want = replay_gradients(directory, batches, [[layer[0] for layer in records]])
    errors = gradient_errors(got, want)
    assert worst(errors)[0] <= 1e-5, worst(errors)
    exact = gradient_errors(got, reference_gradients(directory, batches))
    assert worst(exact)[0] > 0.05  # it is not that nothing was dropped


def test_bfloat16_models_run(batch):
    for family in ("qwen3", "glm"):  # routing weights in bfloat16 and in float32
        model = tiny_model(family, dtype=torch.bfloat16).train()
        lrmoe.configure(model, HALF)
        got = gradients_of(model, batch)
        assert all(g.isfinite().all() for g in got.parameters.values())
        assert {p.grad.dtype for p in experts_of(model)[0].parameters()} == {torch.bfloat16}


# ---- configure ---------------------------------------------------------------------------------


def test_configure_never_replaces_a_parameter(model, batch):
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for config in (HALF, None, {"rate": 0.2}):
        lrmoe.configure(model, config)
        gradients_of(model, batch)
        optimizer.step()
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_registering_twice_is_registering_once(model):
    lrmoe.register_transformers()
    hook = plugin._step_hook
    lrmoe.register_transformers()
    assert plugin._step_hook is hook
    assert "lrmoe" in ExpertsInterface().valid_keys()


def test_settings_travel_in_the_models_config(tmp_path, batch):
    setting = {"rate": [[0, 0.0], [2, 0.5]], "selection": "top", "router_grad": "completed"}
    directory = save_tiny(tmp_path, "qwen3", lrmoe=setting)
    want = Recalibration(rate=((0, 0.0), (2, 0.5)), selection="top", router_grad="completed")
    handle = lrmoe.configure(load(directory))
    assert handle.config == want
    assert [state.config for state in handle.states] == [want] * 2
    # also without configure, as a launcher would do that knows nothing of us
    model = load(directory, experts_implementation="lrmoe")
    gradients_of(model, batch)
    assert [plugin._state_of(m).config for m in experts_of(model)] == [want] * 2
    # what is handed over wins
    assert lrmoe.configure(model, HALF).config == HALF


def test_without_settings_training_is_exact(model):
    assert lrmoe.configure(model).config.rate_at(0) == 0


def test_a_wrong_key_in_the_models_config_is_refused(model):
    model.config.lrmoe = {"rates": 0.2}
    with pytest.raises(ValueError, match="lrmoe setting 'rates' is unknown; did you mean 'rate'"):
        lrmoe.configure(model)


def test_configure_again_changes_the_settings_and_counts_steps_once(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    first, handle = (lrmoe.configure(model, c) for c in (HALF, Recalibration(rate=0.9)))
    assert first.states == handle.states
    assert [state.config.rate for state in handle.states] == [0.9, 0.9]
    for step in (1, 2):
        gradients_of(model, batch)
        optimizer.step()
        other.step()
        assert [state.step for state in handle.states] == [step] * 2


def test_steps_count_without_anybody_holding_the_handle(model, batch):
    lrmoe.configure(model, HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients_of(model, batch)
    optimizer.step()
    assert [plugin._state_of(m).step for m in experts_of(model)] == [1, 1]


def test_a_copied_model_is_on_its_own(model, batch):
    handle = lrmoe.configure(model, HALF)
    twin = copy.deepcopy(model)
    other = lrmoe.configure(twin, Recalibration(rate=0.9))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    gradients_of(twin, batch)
    optimizer.step()
    assert [s.step for s in other.states] == [1, 1]
    assert [s.step for s in handle.states] == [0, 0]
    assert [s.config.rate for s in handle.states] == [0.5, 0.5]


@pytest.mark.parametrize("draw", ["backward", "forward"])
def test_a_draw_by_text_takes_it_from_the_models_input(model, batch, draw):
    by_text = Recalibration(rate=0.5, draw=draw, strata="text")
    handle = lrmoe.configure(model, by_text)
    gradients_of(model, batch)
    want_T = lrmoe.text_code(batch["input_ids"])
    assert all(torch.equal(state.text_T, want_T) for state in handle.states)
    model(batch["input_ids"][:1])  # by position
    assert all(len(state.text_T) == batch["input_ids"].shape[1] for state in handle.states)
    twin = copy.deepcopy(model)
    other = lrmoe.configure(twin, by_text)
    gradients_of(twin, batch)
    assert all(torch.equal(state.text_T, want_T) for state in other.states)
    assert all(len(state.text_T) == batch["input_ids"].shape[1] for state in handle.states)
    assert len(twin._forward_pre_hooks) == len(model._forward_pre_hooks) == 1
    embeddings = model.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(ValueError, match="strata='text': no text is known"):
        model(inputs_embeds=embeddings)
    # What is no text is left to the layer's check, which tells every rank.
    for ids in (batch["input_ids"][None], embeddings, [1, 2]):
        plugin._note_text(model, (), {"input_ids": ids})
        assert all(state.text_T is None for state in handle.states)


def test_a_recomputed_call_is_laid_out_by_its_own_text(model):
    """Two forward passes before two backward passes, under activation checkpointing."""
    handle = lrmoe.configure(model, Recalibration(rate=0.5, strata="text"))
    before, batches = handle.state_dict(), make_batches(2)

    def gradients():
        handle.load_state_dict(before)
        model.zero_grad()
        losses = [model(**batch).loss for batch in batches]
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_saved_handle_draws_what_the_interrupted_run_would_have_drawn(model, batch):
    handle = lrmoe.configure(model, HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        gradients_of(model, batch)
        optimizer.step()
    saved = handle.state_dict()
    with lrmoe.capture(model) as records:
        gradients_of(model, batch)
    twin = tiny_model("qwen3").train()
    lrmoe.configure(twin, HALF).load_state_dict(saved)
    with lrmoe.capture(twin) as again:
        gradients_of(twin, batch)
    for a, b in zip(records, again, strict=True):
        assert torch.equal(a[0].kept, b[0].kept)
    with pytest.raises(ValueError, match="the saved state has 1 MoE layers, this model 2"):
        handle.load_state_dict({"layers": saved["layers"][:1]})


# ---- reports and records -----------------------------------------------------------------------


def test_reports_are_totals_of_the_last_finished_step(model):
    handle = lrmoe.configure(model, HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = make_batches(3)
    for batch in batches:  # three micro-batches
        gradients_of(model, batch)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(**batches[0])  # belongs to no step
    pairs = sum(batch["input_ids"].numel() for batch in batches) * 2
    reports = handle.reports()
    assert [r.layer for r in reports] == [0, 1]
    for report in reports:
        assert report.pairs == sum(report.expert_load) == report.gemm_rows_fwd == pairs
        assert report.gemm_rows_bwd == report.kept_pairs
        assert 0.5 <= report.backward_fraction == report.kept_pairs / pairs < 0.6
        assert report.kept_pairs / pairs < report.score_mass < 1
        assert report.dead_experts == report.expert_load.count(0)
        assert report.imbalance_home == report.imbalance_fwd == report.imbalance_bwd == 1
        assert report.bytes_fwd == report.bytes_bwd == report.payload_rows_fwd == 0
        assert report.max_vio == report.rows_slack == report.replicas == 0
        assert report.fwd_ms == report.bwd_ms == 0
        assert report.clock == "off"
        assert report.plan_us > 0
        assert report.recompute_ms == 0
        assert all(isinstance(size, int) and size >= 0 for size in report.memory.values())
    gradients_of(model.train(), batches[0])  # of the running step: not yet in the reports
    assert [r.pairs for r in handle.reports()] == [pairs, pairs]


def test_times_are_measured_where_they_are_asked_for(model):
    handle = lrmoe.configure(model, HALF)
    assert not handle.is_timed
    handle.is_timed = True
    gradients_of(model, make_batches(1)[0])
    handle.finish_step()
    assert handle.is_timed
    for report in handle.reports():
        assert report.fwd_ms > 0 < report.bwd_ms
        assert report.clock == "wall"


def test_capture_gives_every_micro_batch_of_every_layer(model):
    with pytest.raises(ValueError, match=r"call lrmoe\.configure first"), lrmoe.capture(model):
        pass
    lrmoe.configure(model, HALF)
    batches = make_batches(3)
    with lrmoe.capture(model) as records:
        for batch in batches:
            gradients_of(model, batch)
    gradients_of(model, batches[0])  # outside: not recorded
    assert [len(layer) for layer in records] == [3, 3]
    for layer in records:
        for batch, record in zip(batches, layer, strict=True):
            shape = (batch["input_ids"].numel(), 2)
            for name in ("expert", "score", "kept", "weight", "forward_rank", "backward_rank"):
                assert getattr(record, name).shape == shape
            assert record.score.dtype == torch.float32
            assert ((record.expert >= 0) & (record.expert < 8)).all()


def test_capture_orders_micro_batches_as_they_were_run(model):
    lrmoe.configure(model, HALF)
    batches = make_batches(3)
    with lrmoe.capture(model) as records:
        sum(model(**batch).loss for batch in batches).backward()
    sizes = [batch["input_ids"].numel() for batch in batches]
    assert [[len(record.kept) for record in layer] for layer in records] == [sizes, sizes]


# ---- Trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_unmodified_trainer_runs_and_logs_the_reports(tmp_path, model, checkpointing):
    class Steps(lrmoe.TrainerCallback):
        """Also keeps every step's reports."""

        seen: list = []  # noqa: RUF012

        def on_step_end(self, args, state, control, **kwargs):
            self.seen.append(self.handle.reports())

    handle = lrmoe.configure(model, HALF)
    rows = torch.randint(VOCABULARY, (12, 10))
    before = [p.detach().clone() for p in model.parameters()]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[callback := Steps(handle)],
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 3
    for entry, reports in zip(entries, callback.seen, strict=True):
        pairs = 2 * 2 * 10 * 2  # two micro-batches of two rows of ten tokens, top-2
        assert [r.pairs for r in reports] == [pairs, pairs]
        kept = sum(r.kept_pairs for r in reports)
        assert entry["backward_fraction"] == pytest.approx(kept / (2 * pairs))
        assert 0.5 <= entry["backward_fraction"] < 0.7
        assert 0.5 < entry["score_mass"] < 1
        assert entry["moe_fwd_ms"] > 0
        assert entry["moe_bwd_ms"] > 0
        for name in ("imbalance_fwd", "imbalance_bwd", "bytes_fwd", "bytes_bwd", "replicas"):
            assert entry[name] == (1 if name.startswith("imbalance") else 0)
        assert entry["dead_experts"] == sum(r.dead_experts for r in reports)
    assert [state.step for state in handle.states] == [3, 3]
    assert not any(
        torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


# ---- clipping ----------------------------------------------------------------------------------


def test_clipping_equals_torchs_own_on_one_device(model, batch):
    gradients_of(model, batch)
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    want = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    for parameters in (model, model.parameters()):
        got = lrmoe.clip_grad_norm_(parameters, 0.1)
        assert got.item() == pytest.approx(want.item() if parameters is model else 0.1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_bad_maximum_is_refused(model, max_norm):
    with pytest.raises(ValueError, match=f"max_norm={max_norm}"):
        lrmoe.clip_grad_norm_(model, max_norm)


def test_clipping_without_gradients(model):
    assert lrmoe.clip_grad_norm_(model, 1.0) == 0


# ---- refusals: each says what to do ------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ADVICE = r"DistributedConfig\(.*ep_implementation='lrmoe'\)"


@pytest.mark.usefixtures("one_rank")
def test_data_parallel_wrappers_are_refused_before_and_after(model, batch):
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=f"wrapped in DistributedDataParallel.*{ADVICE}"):
        lrmoe.configure(wrapped, HALF)
    lrmoe.configure(model, HALF)
    with pytest.raises(ValueError, match=f"runs inside DistributedDataParallel.*{ADVICE}"):
        wrapped(**batch)
    gradients_of(model, batch)  # not wrapped: runs


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_other_wrappers_are_refused_by_name(model, name):
    wrapper = type(name, (nn.Module,), {})()
    wrapper.module = model
    with pytest.raises(ValueError, match=f"wrapped in {name}.*{ADVICE}"):
        lrmoe.configure(wrapper, HALF)


def test_partitioned_parameters_are_refused_before_and_after(model, batch):
    lrmoe.configure(model, HALF)
    parameter = experts_of(model)[1].down_proj
    parameter.ds_id = 0
    with pytest.raises(ValueError, match=f"ZeRO-3.*{ADVICE} without DeepSpeed"):
        model(**batch)
    with pytest.raises(ValueError, match=f"ZeRO-3.*{ADVICE} without DeepSpeed"):
        lrmoe.configure(model, HALF)


def test_pipeline_parallelism_is_refused(model):
    model.config.distributed_config = SimpleNamespace(pp_size=2)
    with pytest.raises(ValueError, match=r"pp_size=2: .* not supported; use pp_size=1"):
        lrmoe.configure(model, HALF)


def test_experts_inside_another_implementation_are_refused(model, batch):
    lrmoe.configure(model, HALF)
    experts_of(model)[0]._is_expert_parallel = True
    with pytest.raises(ValueError, match=f"inside another ep_implementation.*{ADVICE}"):
        model(**batch)


FLAGS = {
    "has_gate": False,
    "has_bias": True,
    "is_transposed": True,
    "is_concatenated": False,
    "has_post_expert_norm": True,
}


@pytest.mark.parametrize("flag", FLAGS)
def test_experts_that_compute_something_else_are_refused(model, batch, flag):
    lrmoe.configure(model, HALF)
    setattr(experts_of(model)[1], flag, FLAGS[flag])
    message = f"Qwen3MoeExperts.{flag}={FLAGS[flag]}: lrmoe computes experts with {flag}="
    with pytest.raises(ValueError, match=message):
        lrmoe.configure(model, HALF)
    with pytest.raises(ValueError, match=message):
        model(**batch)


def test_a_gate_of_its_own_is_refused(model, monkeypatch):
    monkeypatch.setattr(type(experts_of(model)[0]), "_apply_gate", lambda self, x: x)
    with pytest.raises(ValueError, match=r"a gate of its own \(_apply_gate\)"):
        lrmoe.configure(model, HALF)


def test_other_activations_are_computed(model, batch):
    for module in experts_of(model):
        module.act_fn = nn.GELU()
    model.set_experts_implementation("eager")
    want = gradients_of(model, batch)
    lrmoe.configure(model)
    assert worst(gradient_errors(gradients_of(model, batch), want))[0] <= 1e-5


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no experts module .* supported are"):
        lrmoe.configure(nn.Linear(2, 2), HALF)


def test_a_transformers_without_the_registry_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    spec = importlib.util.spec_from_file_location("an_old_plugin", plugin.__file__)
    with pytest.raises(ImportError, match=r"transformers >= 5.23.*pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_importing_the_package_needs_no_transformers():
    program = (
        "import sys; sys.modules['transformers'] = None; import lrmoe; lrmoe.experts; "
        "assert not any(name.startswith('numba') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
