"""The Hugging Face plug-in under expert parallelism and FSDP2, against one process."""

import itertools
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import lrmoe
import lrmoe.state
from lrmoe import Recalibration
from lrmoe.planner import PLACEMENTS, Costs
from tests.models import (
    FAMILIES,
    gather_full_gradients,
    gradient_errors,
    load,
    make_batches,
    reference_gradients,
    save_tiny,
    sharded_gradients,
    worst,
)
from tests.ranks import run_ranks
from tests.replay import replay_gradients

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# Policies whose own rules may see no gain at this size.
MAY_IDLE = ("fastermoe", "llep")
KINDS = {"plain": None, "non-reentrant": False, "reentrant": True}
SETTINGS = {
    "sampled": (Recalibration(rate=0.5), "plain"),
    "sampled forward": (Recalibration(rate=0.5, draw="forward", save="inputs"), "non-reentrant"),
    "top": (Recalibration(rate=0.5, selection="top"), "non-reentrant"),
    "top local": (
        Recalibration(rate=0.7, selection="top", scope="local", rows="static"),
        "reentrant",
    ),
}


def _load(directory: str, fsdp: int, ep: int, kind: str) -> Any:
    lrmoe.register_transformers()
    model = load(directory, fsdp, ep, "lrmoe")
    if KINDS[kind] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": KINDS[kind]})
    return model


def _parity(cases: list) -> list:
    """The worst error over the passes of each (directory, batches, reference, fsdp, ep, kind).

    The second finds memory that the first has used. With a placement (the last of a case) there is
    a third, and replicas must have been at work.
    """
    results = []
    for directory, batches, reference, fsdp, ep, kind, placement in cases:
        model = _load(directory, fsdp, ep, kind)
        lrmoe.state.link_costs = lambda *_: Costs()  # so few pairs would never pay for weights
        handle = lrmoe.configure(
            model, Recalibration(rate=0, placement=placement, budget=lrmoe.Budget(slots=2))
        )
        errors = {}
        for step in range(2 if placement == "fixed" else 3):
            model.zero_grad()
            got = sharded_gradients(model, batches)
            errors |= {f"pass {step}: {k}": v for k, v in gradient_errors(got, reference).items()}
        handle.finish_step()
        replicas = sum(report.replicas for report in handle.reports())
        if placement not in MAY_IDLE:
            assert (replicas > 0) == (placement != "fixed"), (placement, replicas)
        results.append(worst(errors))
    return results


def _captured(directory: str, batches: list, fsdp: int, ep: int) -> dict:
    """Gradients, records and reports of every setting; parameters keep their identity."""
    results = {}
    for name, (config, kind) in SETTINGS.items():
        model = _load(directory, fsdp, ep, kind)
        before = dict(model.named_parameters())
        handle = lrmoe.configure(model, config)
        after = dict(model.named_parameters())
        same = before.keys() == after.keys() and all(after[n] is p for n, p in before.items())
        with lrmoe.capture(model) as records:
            got = sharded_gradients(model, batches)
        handle.finish_step()
        results[name] = (got, [layer[0] for layer in records], handle.reports(), same)
    return results


def _clipped(directory: str, batches: list, fsdp: int, ep: int) -> tuple:
    """The norm, and the gradients after clipping to half of it and to more than it."""
    model = _load(directory, fsdp, ep, "plain")
    sharded_gradients(model, batches)
    norm = lrmoe.clip_grad_norm_(model, 1e9)
    untouched = gather_full_gradients(model)
    lrmoe.clip_grad_norm_(model, norm.item() / 2)
    is_plain = not isinstance(norm, DTensor)
    return norm.item(), untouched, gather_full_gradients(model), is_plain


def _message(fn: Any) -> str:
    try:
        fn()
    except ValueError as error:
        return str(error)
    return "no ValueError"


def _refused(directory: str, batches: list) -> dict[str, str]:
    """What each unsupported combination is told."""
    batch = batches[dist.get_rank()]

    def inside_another():
        model = load(directory, 2, 2, "all_to_all", experts_implementation="lrmoe")
        model(**batch)

    def wrong_implementation():
        lrmoe.configure(load(directory, 2, 2, "all_to_all"), Recalibration())

    def tensor_parallel():
        from transformers import AutoModelForCausalLM

        config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="lrmoe")
        AutoModelForCausalLM.from_pretrained(directory, distributed_config=config)

    lrmoe.register_transformers()
    checks = (inside_another, wrong_implementation, tensor_parallel)
    return {check.__name__: _message(check) for check in checks}


def _two(rank: int, world_size: int, cases: list, directory: str, batches: list) -> dict:
    del rank
    jobs = {
        "parity": lambda: _parity(cases),
        "captured": lambda: _captured(directory, batches, world_size, world_size),
        "clipped": lambda: _clipped(directory, batches, world_size, world_size),
        "refused": lambda: _refused(directory, batches),
    }
    results = {}
    for name, job in jobs.items():
        try:
            results[name] = job()
        except Exception:
            results[name] = traceback.format_exc()
    return results


def _parity_cases(tmp_path: Any, num_ranks: int, layouts: list) -> list:
    """One case per (family, fsdp, ep, kind, placement)."""
    batches, models = make_batches(num_ranks), {}
    for family, *_ in layouts:
        if family not in models:
            directory = save_tiny(tmp_path / family, family)
            models[family] = (directory, batches, reference_gradients(directory, batches))
    return [(*models[family], *layout) for family, *layout in layouts]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks have of everything: (cases, directory, batches, results by rank)."""
    layouts = [(family, 2, 2, kind, "fixed") for family in FAMILIES for kind in KINDS]
    layouts += [("qwen3", 2, 2, kind, "recalibrated") for kind in KINDS]
    layouts += [
        ("glm", 2, 2, kind, name)
        for name, kind in zip(PLACEMENTS[1:-1], itertools.cycle(KINDS), strict=False)
    ]
    cases = _parity_cases(tmp_path_factory.mktemp("two"), 2, layouts)
    directory, batches = cases[0][:2]
    return cases, directory, batches, run_ranks(_two, 2, cases, directory, batches, timeout=150)


@pytest.fixture
def results(two):
    """Both ranks' results of one name."""

    def look(name: str) -> list[Any]:
        both = [result[name] for result in two[3]]
        for result in both:
            assert not isinstance(result, str), result
        return both

    return look


def test_rate_zero_equals_one_process_on_two_ranks(two, results):
    for errors in results("parity"):
        for case, (error, name) in zip(two[0], errors, strict=True):
            assert error <= 1e-5, (name, error, case[3:])


@pytest.mark.parametrize("name", SETTINGS)
def test_dropped_pairs_change_the_gradients_as_the_oracle_says(two, results, name):
    _, directory, batches, _ = two
    both = [result[name] for result in results("captured")]
    records = [records for _, records, _, _ in both]
    want = replay_gradients(directory, batches, records)
    config = SETTINGS[name][0]
    for rank, (got, own, reports, same) in enumerate(both):
        errors = gradient_errors(got, want)
        assert worst(errors)[0] <= 1e-5, worst(errors)
        assert same  # no parameter was replaced
        for layer, (record, report) in enumerate(zip(own, reports, strict=True)):
            pairs = sum(r[layer].kept.numel() for r in records)
            kept = sum(int(r[layer].kept.sum()) for r in records)
            assert (report.layer, report.pairs, report.kept_pairs) == (layer, pairs, kept)
            assert report.backward_fraction == kept / pairs
            assert kept / pairs >= 1 - config.rate
            computed = sum(int((r[layer].backward_rank == rank).sum()) for r in records)
            assert report.gemm_rows_bwd == computed
            assert torch.equal(record.forward_rank, record.expert // 4)
            assert report.bytes_fwd > report.bytes_bwd > 0
            assert sum(report.expert_load) == pairs


def test_clipping_scales_by_the_norm_over_all_meshes(two, results):
    reference = two[0][0][2]
    total = torch.stack([g.norm() for g in reference.parameters.values()]).norm().item()
    for norm, untouched, halved, is_plain in results("clipped"):
        assert is_plain
        assert norm == pytest.approx(total, rel=1e-5)
        for name, grad in reference.parameters.items():
            torch.testing.assert_close(untouched[name], grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(halved[name], untouched[name] / 2, rtol=1e-5, atol=0)


def test_unsupported_combinations_are_told_what_to_do(results):
    for messages in results("refused"):
        advice = "ep_implementation='lrmoe'"
        assert "inside another ep_implementation" in messages["inside_another"]
        assert advice in messages["inside_another"]
        assert "loaded with ep_implementation='all_to_all'" in messages["wrong_implementation"]
        assert advice in messages["wrong_implementation"]
        assert "tp_size=2" in messages["tensor_parallel"]
        assert "allowed is tp_size=1" in messages["tensor_parallel"]


def _four(rank: int, world_size: int, cases: list) -> list:
    del rank, world_size
    return _parity(cases)


def test_rate_zero_equals_one_process_on_four_ranks(tmp_path):
    layouts = [
        ("qwen3", 4, 2, "plain", "fixed"),
        ("qwen3", 4, 4, "reentrant", "fixed"),
        ("glm", 4, 2, "non-reentrant", "fixed"),
        ("glm", 4, 4, "plain", "fixed"),
        ("qwen3", 4, 2, "reentrant", "fixed"),
        ("glm_groups", 4, 4, "non-reentrant", "fixed"),
        ("qwen3", 4, 2, "non-reentrant", "recalibrated"),
        ("qwen3", 4, 4, "plain", "recalibrated"),
        ("glm", 4, 4, "reentrant", "ultraep"),
    ]
    cases = _parity_cases(tmp_path, 4, layouts)
    for errors in run_ranks(_four, 4, cases, timeout=150):
        for case, (error, name) in zip(cases, errors, strict=True):
            assert error <= 1e-5, (name, error, case[3:])
