"""The layer over several ranks: kept pairs, gradients and traffic against the oracles.

Shape letters: W ranks, E experts; of a pair or row, the source rank comes first.
"""

import itertools
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lrmoe import AutoRate, LayerState, Recalibration, exchange, experts, select
from lrmoe.auto import RATES
from lrmoe.planner import quotas as planner_quotas
from tests import oracle
from tests.layers import (
    RULES,
    TENSORS,
    TOLERANCE,
    Case,
    Run,
    Starts,
    all_configs,
    expected_kept,
    gradient_errors,
    make_case,
    oracle_gradients,
    quotas,
    run_layer,
    worst,
)
from tests.errors import relative_error
from tests.ranks import rank_device, run_ranks

pytestmark = pytest.mark.dist


class Job(NamedTuple):
    """One layer call on every rank."""

    cases: list[Case]  # one per rank, each with all experts
    config: Recalibration
    losses: list[torch.Tensor]
    frozen: tuple[str, ...] = ()


class Done(NamedTuple):
    """What one rank has of a job."""

    run: Run
    collectives: Counter


def make_job(
    num_tokens: Sequence[int],
    config: Recalibration,
    dtype: torch.dtype = torch.float32,
    num_experts: int = 6,
    frozen: tuple[str, ...] = (),
    quiet_rank: int | None = None,
    is_tied: bool = False,
    **shape: Any,
) -> Job:
    """Return a job with these tokens per rank.

    Args:
        quiet_rank: its gradients are tiny.
        is_tied: all tokens of all ranks are the same one, so that pair ids decide.
    """
    cases = [
        make_case(n, num_experts=num_experts, seed=rank, dtype=dtype, **shape)
        for rank, n in enumerate(num_tokens)
    ]
    cases = [c._replace(gate_up=cases[0].gate_up, down=cases[0].down) for c in cases]
    if quiet_rank is not None:
        cases[quiet_rank].grad.mul_(1e-6)
    if is_tied:
        first = {n: getattr(cases[0], n)[:1] for n in ("x", "expert", "p", "grad")}
        cases = [
            c._replace(**{name: a.repeat(len(c.x), 1) for name, a in first.items()}) for c in cases
        ]
    losses = [torch.zeros(n) if is_tied else torch.randn(n) for n in num_tokens]
    return Job(cases, config, losses, frozen)


def local(case: Case, rank: int, world_size: int) -> Case:
    """Return the case with this rank's experts only, where the rank computes."""
    gate_up, down = (t.chunk(world_size)[rank] for t in (case.gate_up, case.down))
    return case._replace(gate_up=gate_up, down=down).on(rank_device())


def union(cases: Sequence[Case]) -> Case:
    """Return all ranks' tokens as one rank's."""
    parts = zip(*((c.x, c.expert, c.p, c.grad) for c in cases), strict=True)
    x, expert, p, grad = (torch.cat(part) for part in parts)
    return Case(x, expert, p, cases[0].gate_up, cases[0].down, grad)


@contextmanager
def counted_collectives() -> Iterator[Counter]:
    """Count the calls of torch.distributed's collectives inside."""
    counts: Counter = Counter()
    places = [(exchange, "_all_gather"), (dist, "all_to_all_single")]
    real = [getattr(*place) for place in places]

    def counting(i: int, *args: Any, **kwargs: Any) -> Any:
        counts[places[i][1]] += 1
        return real[i](*args, **kwargs)

    for i, place in enumerate(places):
        setattr(*place, partial(counting, i))
    yield counts
    for place, fn in zip(places, real, strict=True):
        setattr(*place, fn)


def run_jobs(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Done]:
    """As one rank: run the jobs."""
    done = []
    for job in jobs:
        with counted_collectives() as collectives:
            run = run_layer(
                local(job.cases[rank], rank, world_size),
                job.config,
                frozen=job.frozen,
                loss=job.losses[rank],
                group=dist.group.WORLD,
            )
        done.append(Done(run, collectives))
    return done


# ---- what a job must have done -----------------------------------------------------------------


def check_job(job: Job, done: Sequence[Done]) -> None:
    """Assert everything that is known of a job: pairs, gradients, traffic, report."""
    W, config, whole = len(done), job.config, union(job.cases)
    E = len(whole.gate_up)
    runs = [d.run for d in done]
    records = [run.records[0] for run in runs]
    assert all(d.collectives == done[0].collectives for d in done), [d.collectives for d in done]

    for case, record in zip(job.cases, records, strict=True):
        home = case.expert // (E // W)
        assert torch.equal(record.expert, case.expert)
        assert torch.equal(record.forward_rank, home)
        assert torch.equal(record.backward_rank, torch.where(record.kept, home, -1))
        assert torch.equal(record.kept, record.weight > 0)
    _check_selection(job, records)

    tolerance = TOLERANCE[whole.x.dtype]
    output = torch.cat([run.output for run in runs])
    if len(output):
        want = oracle.moe_forward(*whole.to(torch.float64)[:5])
        assert relative_error(output, want) <= tolerance
    want = oracle_gradients(whole, torch.cat([record.weight for record in records]), config)
    got = {
        name: torch.cat([run.grads[name] for run in runs])
        for name in TENSORS
        if name not in job.frozen
    }
    assert all(run.grads[name] is None for run in runs for name in job.frozen)
    want = {name: grad for name, grad in want.items() if name in got}
    errors = gradient_errors(whole, got, want, config.router_grad)
    assert worst(errors)[0] <= tolerance, worst(errors)
    _check_reports(job, runs)


def _check_selection(job: Job, records: Sequence[Any]) -> None:
    config, E = job.config, len(job.cases[0].gate_up)
    tables = [case.expert for case in job.cases]
    quota_E = quotas(tables, E, config)
    kept_WE = [
        torch.bincount(t[r.kept], minlength=E).tolist()
        for t, r in zip(tables, records, strict=True)
    ]
    assert [sum(column) for column in zip(*kept_WE, strict=True)] == quota_E
    if not config.is_unbiased:
        assert all((record.weight[record.kept] == 1).all() for record in records)
        want = expected_kept(job.cases, records, config, job.losses)
        for record, kept in zip(records, want or [], strict=False):
            assert torch.equal(record.kept, kept)
        return
    # Groups of pairs that one draw chooses from: (pairs' ranks, their quota, P(quota >= 1)).
    for e, quota in enumerate(quota_E):
        counts = [int((table == e).sum()) for table in tables]
        if config.effective_scope == "global":
            groups = [(range(len(tables)), quota, 1.0)]
        else:
            groups = []
            for rank, n in enumerate(counts):
                share, total = kept_WE[rank][e], max(sum(counts), 1)
                assert share in (quota * n // total, -(-quota * n // total))
                groups.append(([rank], share, min(1.0, quota * n / total)))
        for ranks, share, probability in groups:
            scores = [_sizes_from(job, records, r)[tables[r] == e].tolist() for r in ranks]
            weights = [records[r].weight[tables[r] == e].tolist() for r in ranks]
            scores, weights = (list(itertools.chain(*part)) for part in (scores, weights))
            if not share:
                assert not any(weights)
                continue
            sizes = oracle.sampled_sizes(scores, config.min_inclusion)
            pi = oracle.inclusion_probabilities(sizes, share)
            for weight, p in zip(weights, pi, strict=True):
                assert not weight or weight * float(p) * probability == pytest.approx(1, rel=1e-3)


def _sizes_from(job: Job, records: Sequence[Any], rank: int) -> torch.Tensor:
    """What an unbiased rule takes the squared sizes from, [T, K]."""
    if job.config.selection == "random_unbiased":
        return torch.zeros_like(records[rank].score)
    if job.config.draw == "backward":
        return records[rank].score
    case = job.cases[rank].to(torch.float64)
    h, _ = oracle.pair_outputs(case.x, case.expert, case.gate_up, case.down)
    return case.p.square() * h.square().sum(2)


def _check_reports(job: Job, runs: Sequence[Run]) -> None:
    W, config, E = len(runs), job.config, len(job.cases[0].gate_up)
    tables = [case.expert for case in job.cases]
    kept = [run.records[0].kept for run in runs]
    forward = oracle.unique_rows(tables, None, W, E)
    backward = oracle.unique_rows(tables, kept, W, E)
    pairs_WW, kept_WW = (
        torch.stack(
            [
                torch.bincount(t[m] // (E // W), minlength=W)
                for t, m in zip(tables, masks, strict=True)
            ]
        )
        for masks in ([torch.ones_like(k) for k in kept], kept)
    )
    sent_rows_WW = backward.unique_WW
    if config.rows == "static":
        sent_rows_WW = torch.minimum(forward.unique_WW, kept_WW)
    num_pairs, num_kept = int(pairs_WW.sum()), int(kept_WW.sum())
    counts_E = torch.bincount(torch.cat(tables).flatten(), minlength=E)

    def imbalance(load_W: torch.Tensor) -> float:
        return int(load_W.max()) * W / int(load_W.sum()) if load_W.sum() else 1.0

    for rank, run in enumerate(runs):
        report = run.report
        others = [r for r in range(W) if r != rank]
        assert report.payload_rows_fwd == forward.unique_WW[rank, others].sum()
        assert report.payload_rows_bwd == sent_rows_WW[rank, others].sum()
        padding_W = (sent_rows_WW - backward.unique_WW)[rank]
        assert report.rows_slack == padding_W[others].sum()
        assert report.gemm_rows_fwd == forward.pairs_W[rank]
        assert report.gemm_rows_bwd == backward.pairs_W[rank]
        assert (report.bytes_fwd, report.bytes_bwd) == _expected_bytes(
            job, rank, forward.unique_WW, pairs_WW, sent_rows_WW, kept_WW
        )
        assert (report.pairs, report.kept_pairs) == (num_pairs, num_kept)
        assert report.backward_fraction == pytest.approx(num_kept / max(num_pairs, 1))
        assert report.imbalance_home == report.imbalance_fwd == imbalance(forward.pairs_W)
        assert report.imbalance_bwd == imbalance(backward.pairs_W)
        assert report.max_vio == report.imbalance_fwd - 1
        assert report.expert_load == counts_E.tolist()
        assert report.dead_experts == int((counts_E == 0).sum())
        score = run.records[0].score.double()
        mass = score[run.records[0].kept].sum() / score.sum() if score.sum() else 1.0
        assert report.score_mass == pytest.approx(float(mass), rel=1e-5)
        assert report.replicas == report.moved_rows == report.nonfinite_tokens == 0


def _expected_bytes(
    job: Job,
    rank: int,
    rows_WW: torch.Tensor,
    pairs_WW: torch.Tensor,
    kept_rows_WW: torch.Tensor,
    kept_WW: torch.Tensor,
) -> tuple[int, int]:
    """Return the bytes a rank sends to others, forward and backward."""
    config, x = job.config, job.cases[0].x
    others = [r for r in range(len(rows_WW)) if r != rank]
    sent, received = {}, {}
    for name, matrix in (
        ("rows", rows_WW),
        ("pairs", pairs_WW),
        ("kept rows", kept_rows_WW),
        ("kept", kept_WW),
    ):
        sent[name] = int(matrix[rank, others].sum())
        received[name] = int(matrix[others, rank].sum())
    word = 8 if x.dtype == torch.float64 else 4
    row = x.shape[1] * x.element_size()
    is_exact = config.router_grad == "exact"

    forward = sent["rows"] * row + sent["pairs"] * (4 + word)
    forward += received["pairs" if is_exact else "rows"] * row + received["pairs"] * word
    # each kept pair is announced: place and row as int32, and its coefficient
    choosing = sent["kept"] * (8 + word)
    if config.effective_scope == "global" and kept_WW.sum() != pairs_WW.sum():
        score = 4 if config.selection == "random" else word
        choosing += (sent["pairs"] + received["pairs"]) * score
        choosing += sent["pairs"] * 8 * config.is_stratified
    backward = sent["kept rows"] * row
    backward += received["kept rows"] * row if "x" not in job.frozen else 0
    backward += received["kept"] * word if "p" not in job.frozen else 0
    if config.draw == "forward":
        return forward + choosing, backward
    return forward, backward + choosing


# ---- two ranks: every setting, every routing ---------------------------------------------------

ROUTINGS: dict[str, dict[str, Any]] = {
    "ragged": {"num_tokens": (16, 5)},
    "no tokens on one rank": {"num_tokens": (0, 9)},
    "no tokens on the other": {"num_tokens": (9, 0)},
    "no tokens": {"num_tokens": (0, 0)},
    "one rank's experts get no row": {"num_tokens": (8, 8), "used": (0, 1, 2)},
    "the other rank's experts get no row": {"num_tokens": (8, 5), "used": (3, 4, 5)},
    "all tokens to one expert": {"num_tokens": (7, 8), "used": (4,), "top_k": 1},
    "one rank has no kept pair": {
        "num_tokens": (12, 4),
        "quiet_rank": 1,
        "top_k": 1,
        "used": (1, 4),
    },
    "every expert of every token": {"num_tokens": (3, 4), "top_k": 6, "used": range(6)},
    "the same token everywhere": {"num_tokens": (4, 5), "is_tied": True},
    "wide": {"num_tokens": (6, 11), "hidden": 16, "width": 12, "top_k": 3},
}


def _settings() -> dict[str, list[Job]]:
    """Every setting of every rule, over the routings and dtypes in turn."""
    dtypes = itertools.cycle((torch.float32, torch.float64, torch.float32))
    routings = itertools.cycle(ROUTINGS.values())
    return {
        rule: [
            make_job(config=config, dtype=next(dtypes), **next(routings))
            for config in all_configs(rule, (0.6,))
        ]
        for rule in RULES
    }


def _routings() -> dict[str, list[Job]]:
    """Every routing under a few settings, in both dtypes."""
    configs = (
        Recalibration(rate=0.0, selection="top"),
        Recalibration(rate=0.9, selection="top"),
        Recalibration(rate=0.5, selection="top", scope="local", rows="static"),
        Recalibration(rate=0.5),
        Recalibration(rate=0.5, draw="forward", save="inputs", router_grad="completed"),
        Recalibration(rate=0.5, draw="forward", scope="global", router_grad="exact"),
        Recalibration(rate=0.7, rows="static", draw="forward"),
        Recalibration(rate=0.5, strata="gradient"),
        Recalibration(rate=0.5, strata="gradient", scope="global", router_grad="completed"),
        Recalibration(rate=0.5, strata="neighbors"),
        Recalibration(rate=0.5, strata="neighbors", scope="global", router_grad="completed"),
    )
    return {
        name: [
            make_job(config=config, dtype=dtype, **routing)
            for config in configs
            for dtype in (torch.float32, torch.float64)
        ]
        for name, routing in ROUTINGS.items()
    }


def _frozen() -> list[Job]:
    subsets = [
        tuple(n for i, n in enumerate(TENSORS) if mask >> i & 1)
        for mask in range(2 ** len(TENSORS) - 1)
    ]
    configs = (
        Recalibration(rate=0.5, router_grad="completed"),
        Recalibration(rate=0.5, draw="forward", router_grad="exact"),
    )
    return [make_job((9, 6), c, frozen=frozen) for frozen in subsets for c in configs]


@pytest.fixture(scope="module")
def spawned() -> "Spawned":
    """Everything that two ranks do, in one go."""
    groups = {**_settings(), **_routings(), "frozen": _frozen()}
    jobs = [job for group in groups.values() for job in group]
    ranks = run_ranks(_two, 2, jobs, _unbiased_jobs(), timeout=150)
    results = iter(zip(jobs, zip(*(done for done, _, _ in ranks), strict=True), strict=True))
    return Spawned(
        {name: [next(results) for _ in group] for name, group in groups.items()},
        [behaviours for _, behaviours, _ in ranks],
        [means for _, _, means in ranks],
    )


@pytest.fixture(scope="module")
def two_ranks(spawned) -> dict[str, list[tuple[Job, Sequence[Done]]]]:
    """Groups of jobs, each with what both ranks have of it."""
    return spawned.jobs


@pytest.mark.parametrize("group", [*RULES, *ROUTINGS, "frozen"])
def test_two_ranks(two_ranks, group):
    for job, done in two_ranks[group]:
        try:
            check_job(job, done)
        except AssertionError as error:
            sizes = [len(case.x) for case in job.cases]
            raise AssertionError(f"{job.config}, {sizes} tokens, frozen {job.frozen}") from error


def test_a_rank_without_a_kept_pair_is_among_the_cases(two_ranks):
    for job, done in two_ranks["one rank has no kept pair"]:
        if job.config.selection == "top" and job.config.rate == 0.9:
            assert not done[1].run.records[0].kept.any()
            assert (done[1].run.grads["x"] == 0).all()


def test_static_rows_have_slack_and_exact_rows_none(two_ranks):
    slack = {"exact": 0, "static": 0}
    for group in two_ranks.values():
        for job, done in group:
            slack[job.config.rows] += sum(d.run.report.rows_slack for d in done)
    assert slack["exact"] == 0
    assert slack["static"] > 0


def test_two_ranks_at_rate_zero_equal_one(two_ranks):
    for job, done in two_ranks["ragged"]:
        if job.config.rate == 0:
            whole = union(job.cases)
            one = run_layer(whole, job.config)
            tolerance = 1e-12 if whole.x.dtype == torch.float64 else 1e-6
            for name in TENSORS:
                got = torch.cat([d.run.grads[name] for d in done])
                assert relative_error(got, one.grads[name]) < tolerance, name


# ---- two ranks: how the layer is called --------------------------------------------------------


def _call(case: Case, state: LayerState, x: torch.Tensor, **changes: Any) -> torch.Tensor:
    case = case._replace(**changes)
    return experts(x, *case[1:5], group=dist.group.WORLD, state=state)


def _message(kind: type[Exception], fn: Any) -> str:
    """The message of the error that the call must raise."""
    try:
        fn()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def invalid_ids(rank: int, case: Case) -> Any:
    """One rank's ids are out of range, on either side; the next call works."""
    messages = []
    for bad_rank, bad in ((1, 6), (0, -1), (1, 1 << 32)):
        expert = case.expert.clone()
        if rank == bad_rank:
            expert[2, 1] = bad
        call = partial(_call, case, LayerState(), case.x, expert=expert)
        messages.append(_message(ValueError, call))
    return messages, _call(case, LayerState(), case.x).shape


def gradient_mismatch(rank: int, case: Case) -> Any:
    """One rank needs gradients that the other does not; the next call works."""
    messages = []
    for changed in ("grad mode", "x", "p"):
        leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
        if rank == 1 and changed in leaves:
            leaves[changed].requires_grad_(False)
        x = leaves.pop("x")
        with torch.set_grad_enabled(not (rank == 1 and changed == "grad mode")):
            messages.append(_message(ValueError, partial(_call, case, LayerState(), x, **leaves)))
    return messages, _call(case, LayerState(), case.x).shape


def frozen_experts_of_one_rank(rank: int, case: Case) -> Any:
    """What a rank's own experts need is its own business."""
    leaves = {n: getattr(case, n).clone().requires_grad_() for n in TENSORS}
    if rank == 1:
        leaves["down"].requires_grad_(False)
    x = leaves.pop("x")
    _call(case, LayerState(), x, **leaves).backward(case.grad)
    return [leaves["gate_up"].grad is not None, leaves["down"].grad is not None]


def bad_arguments_of_one_rank(rank: int, case: Case) -> Any:
    """One rank's arguments are refused: the other must not wait for it."""
    changes = {"p": case.p[:, :1]} if rank == 1 else {}
    message = _message(ValueError, lambda: _call(case, LayerState(), case.x, **changes))
    return message, _call(case, LayerState(), case.x).shape


def mismatched_recomputation(rank: int, case: Case) -> Any:
    """Only rank 1's router drifts between forward and recomputation."""
    messages = []
    for draw in ("backward", "forward"):
        state, calls = LayerState(Recalibration(rate=0.5, draw=draw)), []

        def drifting(x: torch.Tensor, state: LayerState = state, calls: list = calls) -> Any:
            calls.append(1)
            drifts = rank == 1 and len(calls) > 1
            return _call(case, state, x, expert=case.expert.flip(0) if drifts else case.expert)

        output = checkpoint(drifting, case.x.clone().requires_grad_(), use_reentrant=False)
        messages.append(_message(RuntimeError, output.sum().backward))
    return messages, _call(case, LayerState(), case.x).shape


CHECKPOINTED = (
    Recalibration(rate=0.5),
    Recalibration(rate=0.5, selection="top", router_grad="completed"),
    Recalibration(rate=0.5, draw="forward", router_grad="exact"),
    Recalibration(rate=0.5, draw="forward", rows="static", save="inputs"),
    Recalibration(rate=0.5, draw="forward", scope="global"),
)


def checkpointing(rank: int, case: Case) -> Any:
    """Both kinds against none: gradients, and what is counted."""
    different = []
    for config, reentrant in itertools.product(CHECKPOINTED, (False, True)):
        plain, got = (
            run_layer(case, config, group=dist.group.WORLD, through=through)
            for through in (
                lambda fn, *args: fn(*args),
                partial(checkpoint, use_reentrant=reentrant),
            )
        )
        same = all(torch.equal(plain.grads[n], got.grads[n]) for n in TENSORS)
        times = {"plan_us", "fwd_ms", "bwd_ms", "recompute_ms", "bytes_recompute", "memory"}
        counted = [
            {k: v for k, v in asdict(run.report).items() if k not in times} for run in (plain, got)
        ]
        repeated = got.report.bytes_recompute > 0
        if not same or counted[0] != counted[1] or repeated == reentrant:
            different.append((config, reentrant, same, counted, repeated))
    return different


def two_forwards(rank: int, case: Case) -> Any:
    """Two checkpointed calls before any backward pass, one of them routed alike on rank 0.

    Rank 0 cannot tell the calls apart by their routing, rank 1 can: both must replay the same.
    """
    results = []
    for draw, same_everywhere, reentrant, first_first in itertools.product(
        ("backward", "forward"), (False, True), (False, True), (False, True)
    ):
        if draw == "forward" and same_everywhere and first_first and not reentrant:
            continue  # nothing tells these calls apart; torch refuses the wrong one's sizes
        state = LayerState(Recalibration(rate=0.5, draw=draw))
        state.captured = []
        other = make_case(len(case.x), num_experts=6, seed=50 + rank, dtype=case.x.dtype)
        other = other.on(rank_device())
        same = rank == 0 or same_everywhere
        cases = [case, case._replace(x=other.x, expert=case.expert if same else other.expert)]
        weights = [case.gate_up.clone().requires_grad_(), case.down.clone().requires_grad_()]
        xs = [c.x.clone().requires_grad_() for c in cases]
        outputs = [
            checkpoint(
                lambda x, c=c, state=state, w=weights: _call(c, state, x, gate_up=w[0], down=w[1]),
                x,
                use_reentrant=reentrant,
            )
            for c, x in zip(cases, xs, strict=True)
        ]
        with torch.no_grad():
            _call(case, state, case.x)
        order = (0, 1) if first_first else (1, 0)
        for i in order:
            outputs[i].backward(case.grad)
        # Recorded in the order of the calls. Reentrant checkpointing calls in the backward pass; of
        # two calls that are alike, the other kind takes the last for the first to be recomputed.
        is_reversed = not first_first if reentrant else first_first and same_everywhere
        records = state.captured[::-1] if is_reversed else state.captured
        results.append(
            (
                [c.expert for c in cases],
                [c.x for c in cases],
                [x.grad for x in xs],
                [w.grad for w in weights],
                [r.weight for r in records],
            )
        )
    return results


def skewed_steps(rank: int, case: Case) -> Any:
    """Twenty steps of one layer with whatever routing comes; all ranks issue the same calls."""
    del case
    generator = torch.Generator().manual_seed(rank)
    settings = [c for rule in RULES for c in all_configs(rule, (0.3, 0.8))]
    shared = np.random.default_rng(0)  # the same on every rank
    state, weights = LayerState(), make_case(num_experts=6, seed=9)
    counts, finite = [], True
    for _ in range(20):
        state.config = settings[shared.integers(len(settings))]
        num_tokens = int(torch.randint(0, 30, (), generator=generator)) * int(shared.integers(2))
        hot = sorted(shared.choice(6, size=shared.integers(2, 7), replace=False).tolist())
        one = make_case(num_tokens, num_experts=6, seed=int(shared.integers(99)), used=hot)
        one = local(one._replace(gate_up=weights.gate_up, down=weights.down), rank, 2)
        with counted_collectives() as collectives:
            run = run_layer(one, state=state, group=dist.group.WORLD, loss=torch.randn(num_tokens))
        state.finish_step()
        counts.append(collectives)
        finite &= all(grad.isfinite().all().item() for grad in run.grads.values())
    return counts, finite


def repeated(rank: int, case: Case) -> Any:
    """The same call twice, bit for bit; and draws of other ranks' and seeds' streams.

    Both ranks have the same tokens, so that only their streams differ.
    """
    same_tokens = make_case(40, num_experts=6).on(rank_device())
    case = same_tokens._replace(gate_up=case.gate_up, down=case.down)
    configs = [
        Recalibration(rate=0.5, selection=rule, seed=seed)
        for rule in ("sampled", "random", "random_unbiased")
        for seed in (0, 0, 1)
    ]
    runs = [run_layer(case, config, group=dist.group.WORLD) for config in configs]
    same = all(
        torch.equal(a.grads[n], b.grads[n])
        for a, b in zip(runs[::3], runs[1::3], strict=True)
        for n in TENSORS
    )
    return same, [run.records[0].kept for run in runs]


AUTO = AutoRate(target=0.05, high=0.9, warmup_steps=2)


def chosen_rates(rank: int, case: Case) -> Any:
    """Six steps of two micro-batches at rates that the layer chooses; at times without tokens.

    What each call requested and had, and whether a fixed rate issues the same collectives.
    """
    state, fixed = LayerState(Recalibration(rate="auto", auto=AUTO)), LayerState()
    calls, collectives = [], []
    for step, micro_batch in itertools.product(range(6), range(2)):
        num_tokens = 0 if (step, rank) in ((1, 1), (3, 0)) else 40
        one = make_case(num_tokens, num_experts=6, seed=10 * step + 2 * micro_batch + rank)
        one = one._replace(gate_up=case.gate_up, down=case.down, grad=one.grad * (1 + 3 * rank))
        with counted_collectives() as counted:
            record = run_layer(one, state=state, group=dist.group.WORLD).records[0]
        calls.append((step, state.tally.rate, record.expert, record.score, record.kept))
        fixed.config = Recalibration(rate=state.tally.rate)
        with counted_collectives() as counted_fixed:
            run_layer(one, state=fixed, group=dist.group.WORLD)
        collectives.append(counted == counted_fixed)
        if micro_batch:
            state.finish_step()
            fixed.finish_step()
    return calls, all(collectives)


def chosen_rate_after_a_refused_call(rank: int, case: Case) -> Any:
    """One rank's arguments are refused; the other must not take its answer for noise."""
    state = LayerState(Recalibration(rate="auto", auto=AUTO))
    state.step = 9
    run_layer(case, state=state, group=dist.group.WORLD)
    changes = {"p": case.p[:, :1]} if rank == 1 else {}
    message = _message(ValueError, lambda: _call(case, state, case.x, **changes))
    run_layer(case, state=state, group=dist.group.WORLD)
    return message, state.tally.rate


def lost_state_of_one_rank(rank: int, case: Case) -> Any:
    """One rank has forgotten what it measured: the ranks still agree."""
    state = LayerState(Recalibration(rate="auto", auto=AUTO))
    state.step = 9
    run_layer(case, state=state, group=dist.group.WORLD)
    if rank == 1:
        state.noise.load_state_dict({})
    record = run_layer(case, state=state, group=dist.group.WORLD).records[0]
    return state.tally.rate, int(record.kept.sum())


BEHAVIOURS = {
    fn.__name__: fn
    for fn in (
        invalid_ids,
        gradient_mismatch,
        frozen_experts_of_one_rank,
        bad_arguments_of_one_rank,
        mismatched_recomputation,
        checkpointing,
        two_forwards,
        skewed_steps,
        repeated,
        chosen_rates,
        chosen_rate_after_a_refused_call,
        lost_state_of_one_rank,
    )
}


def _behave(rank: int, world_size: int) -> dict[str, Any]:
    """As one rank: every behaviour in turn; an error becomes its traceback."""
    results = {}
    for name, fn in BEHAVIOURS.items():
        case = make_case(12, num_experts=6, seed=rank)
        weights = make_case(num_experts=6)
        case = local(case._replace(gate_up=weights.gate_up, down=weights.down), rank, world_size)
        try:
            results[name] = fn(rank, case)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture
def behaviour(spawned):
    """What both ranks have of one behaviour, by name."""

    def look(name: str) -> list[Any]:
        both = [results[name] for results in spawned.behaviours]
        for result in both:
            assert not isinstance(result, str), result
        return both

    return look


def test_invalid_ids_on_one_rank_are_refused_on_both(behaviour):
    for messages, shape in behaviour("invalid_ids"):
        for message, outside in zip(messages, ([0, 1], [1, 0], [0, 1]), strict=True):
            assert "top_k_index: allowed are expert ids 0 <= id < 6" in message
            assert str(outside) in message
        assert shape == (12, 8)


def test_ranks_that_disagree_on_gradients_are_refused_on_both(behaviour):
    for messages, shape in behaviour("gradient_mismatch"):
        assert len(messages) == 3
        assert all("all ranks must do the same" in message for message in messages)
        assert shape == (12, 8)


def test_frozen_experts_of_one_rank_are_its_own_business(behaviour):
    assert behaviour("frozen_experts_of_one_rank") == [[True, True], [True, False]]


def test_bad_arguments_of_one_rank_end_the_other_too(behaviour):
    (other, shape), (own, _) = behaviour("bad_arguments_of_one_rank")
    assert "top_k_weights.shape=(12, 1)" in own
    assert "[1]" in other
    assert shape == (12, 8)


def test_a_recomputation_that_drifts_on_one_rank_ends_both(behaviour):
    for messages, shape in behaviour("mismatched_recomputation"):
        assert all("routes differently from the first forward" in m for m in messages)
        assert shape == (12, 8)


def test_checkpointing_of_both_kinds_changes_nothing(behaviour):
    assert behaviour("checkpointing") == [[], []]


def test_two_forwards_before_a_backward_replay_the_same_call_on_every_rank(behaviour):
    weights = make_case(num_experts=6)
    cases = [make_case(12, num_experts=6, seed=rank) for rank in (0, 1)]
    for both in zip(*behaviour("two_forwards"), strict=True):
        experts_W, xs_W, x_grads_W, weight_grads_W, weights_W = zip(*both, strict=True)
        total = {"gate_up": 0, "down": 0}
        for call in (0, 1):
            one = union(
                [
                    c._replace(
                        x=xs_W[r][call],
                        expert=experts_W[r][call],
                        gate_up=weights.gate_up,
                        down=weights.down,
                    )
                    for r, c in enumerate(cases)
                ]
            )
            want = oracle_gradients(one, torch.cat([w[call] for w in weights_W]))
            assert relative_error(torch.cat([g[call] for g in x_grads_W]), want["x"]) < 1e-10
            total = {name: total[name] + want[name] for name in total}
        for i, name in enumerate(total):
            got = torch.cat([grads[i] for grads in weight_grads_W])
            assert relative_error(got, total[name]) < 1e-10


def test_twenty_skewed_steps_end_and_issue_the_same_collectives(behaviour):
    (first, finite), (second, finite_too) = behaviour("skewed_steps")
    assert first == second
    assert finite
    assert finite_too


def test_draws_repeat_and_differ_between_ranks_and_seeds(behaviour):
    both = behaviour("repeated")
    assert all(same for same, _ in both)
    for a, b in zip(*(kept for _, kept in both), strict=True):
        assert not torch.equal(a, b)
    for _, kept in both:
        for again, other in zip(kept[::3], kept[2::3], strict=True):
            assert not torch.equal(again, other)


def _slow_sums(tables: Sequence[torch.Tensor], scores: torch.Tensor, rank: int) -> np.ndarray:
    """A rank's noise at every candidate rate, and the sum of its scores, pair by pair."""
    counts_WE = [torch.bincount(t.flatten(), minlength=6).tolist() for t in tables]
    sums = np.zeros(len(RATES) + 1)
    sums[-1] = scores.double().sum()
    for a, rate in enumerate(RATES):
        quota_E = oracle.rate_quotas(counts_WE, float(rate))
        for e, quota in enumerate(quota_E):
            of_expert = scores[tables[rank] == e].tolist()
            share = Fraction(counts_WE[rank][e] * quota, max(sum(c[e] for c in counts_WE), 1))
            pi = oracle.inclusion_probabilities(oracle.sampled_sizes(of_expert, 0.1), share)
            sums[a] += sum(float(1 / p - 1) * s for p, s in zip(pi, of_expert, strict=True))
    return sums


def _slow_rate(sums: np.ndarray) -> float:
    """The largest thousandth whose noise, on straight lines between candidates, is in the limit."""
    noise = np.array([0.0, *(sums[:-1] / sums[-1])])
    thousandths = np.arange(901) / 1000
    fits = np.interp(thousandths, [0.0, *map(float, RATES)], noise) <= AUTO.target
    return float(thousandths[fits].max())


def test_ranks_choose_the_same_rates_from_what_both_measured(behaviour):
    (first, same), (second, same_too) = behaviour("chosen_rates")
    assert same
    assert same_too
    past = np.zeros(len(RATES) + 1)
    before, rates = 0, []
    for (step, rate, *mine), (_, rate_too, *others) in zip(first, second, strict=True):
        assert rate == rate_too
        rates.append(rate)
        if step < AUTO.warmup_steps:
            assert rate == 0
        else:
            assert abs(rate - _slow_rate(past)) < 0.0015
        tables = [mine[0], others[0]]
        past *= 0.9 ** (step - before)
        past += _slow_sums(tables, mine[1], 0) + _slow_sums(tables, others[1], 1)
        before = step
        kept = int(mine[2].sum()) + int(others[2].sum())
        counts = [torch.bincount(table.flatten(), minlength=6).tolist() for table in tables]
        assert kept == sum(oracle.rate_quotas(counts, rate))
    assert len(set(rates)) > 6


def test_a_refused_call_leaves_the_choices_alone(behaviour):
    (other, rate), (own, rate_too) = behaviour("chosen_rate_after_a_refused_call")
    assert "top_k_weights.shape=(12, 1)" in own
    assert "[1]" in other
    assert rate == rate_too > 0


def test_ranks_agree_on_the_rate_whatever_each_remembers(behaviour):
    (rate, kept), (rate_too, kept_too) = behaviour("lost_state_of_one_rank")
    assert rate == rate_too > 0
    assert kept + kept_too < 48


# ---- two ranks: unbiased -----------------------------------------------------------------------


def _mean_gradients(rank: int, world_size: int, job: Job) -> dict[str, torch.Tensor]:
    """The gradients' exact mean over the starts of the shares and of the samples.

    Draws of different experts may share a start: the gradient is linear in the weights.
    """
    now = {"share": 0}
    starts = Starts()

    class Generator:
        """A random generator whose integers are the start of the moment."""

        def __init__(self, _: Any) -> None:
            pass

        def integers(self, low: int, high: np.ndarray) -> np.ndarray:
            return np.minimum(now["share"], high - 1)

    patch = pytest.MonkeyPatch()
    patch.setattr(select, "sample_pairs", starts.sample_pairs)
    patch.setattr(planner_quotas.np.random, "Generator", Generator)
    case = local(job.cases[rank], rank, world_size)
    mean = {name: torch.zeros_like(getattr(case, name)) for name in TENSORS}
    counts = torch.bincount(torch.cat([c.expert for c in job.cases]).flatten())
    total = int(counts.max())
    assert (counts == total).all()  # so that one start serves every expert
    for now["share"] in range(total):
        starts.cuts.clear()
        run_layer(case, job.config, group=dist.group.WORLD)
        everywhere: list = [None] * world_size
        dist.all_gather_object(everywhere, starts.cuts)
        for length in starts.stretches(*everywhere):
            run = run_layer(case, job.config, group=dist.group.WORLD)
            for name in TENSORS:
                mean[name] += run.grads[name] * (length / total)
    patch.undo()
    return mean


def _unbiased_jobs() -> list[Job]:
    """Tables whose two experts have as many pairs as each other, and shares that are fractions."""
    configs = [
        Recalibration(rate=0.5),
        Recalibration(rate=0.5, draw="forward"),
        Recalibration(rate=0.5, strata="gradient"),
        Recalibration(rate=0.5, strata="neighbors"),
        Recalibration(rate=0.5, draw="forward", strata="text"),
    ]
    shape = {"num_experts": 2, "used": (0, 1), "dtype": torch.float64}
    return [make_job((1, 4), config, **shape) for config in configs]


@pytest.mark.parametrize("index", range(5))
def test_integrated_over_shares_and_starts_the_gradient_is_the_exact_one(spawned, index):
    whole = union(_unbiased_jobs()[index].cases)
    exact = oracle_gradients(whole, torch.ones_like(whole.p))
    for name in TENSORS:
        mean = torch.cat([means[index][name] for means in spawned.means])
        assert relative_error(mean, exact[name]) < 1e-10, name


# ---- all that two ranks do ---------------------------------------------------------------------


class Spawned(NamedTuple):
    """What two ranks did."""

    jobs: dict[str, list[tuple[Job, Sequence[Done]]]]
    behaviours: list[dict[str, Any]]  # [rank]
    means: list[list[dict[str, torch.Tensor]]]  # [rank][job]


def _two(
    rank: int, world_size: int, jobs: Sequence[Job], unbiased: Sequence[Job]
) -> tuple[list[Done], dict[str, Any], list[dict[str, torch.Tensor]]]:
    return (
        run_jobs(rank, world_size, jobs),
        _behave(rank, world_size),
        [_mean_gradients(rank, world_size, job) for job in unbiased],
    )


# ---- four ranks --------------------------------------------------------------------------------


def _four(rank: int, world_size: int, jobs: Sequence[Job]) -> tuple[list[Done], list[torch.Tensor]]:
    """As one of four ranks: the jobs, and draws in two groups of two that see the same data."""
    done = run_jobs(rank, world_size, jobs)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place = rank % 2
    case = make_case(30, num_experts=6, seed=place)
    configs = [Recalibration(rate=0.5, scope=scope) for scope in ("local", "global")]
    runs = [run_layer(local(case, place, 2), c, group=pairs[rank // 2]) for c in configs]
    return done, [run.records[0].kept for run in runs]


@pytest.mark.slow
def test_four_ranks():
    configs = [
        Recalibration(rate=0.0, selection="top"),
        *(Recalibration(rate=0.5, selection=rule) for rule in RULES),
        Recalibration(rate=0.5, selection="top", scope="local", rows="static", save="inputs"),
        Recalibration(rate=0.5, scope="global", draw="forward", router_grad="exact"),
        Recalibration(rate=0.7, draw="forward", rows="static", router_grad="completed"),
        Recalibration(rate=0.5, strata="gradient", scope="global"),
        Recalibration(rate=0.5, strata="neighbors", scope="global"),
        Recalibration(rate=0.5, strata="text", scope="global", draw="forward"),
    ]
    tokens = [(9, 4, 0, 7), (0, 0, 0, 5), (6, 6, 6, 6)]
    jobs = [
        make_job(t, c, dtype, num_experts=8, used=used)
        for (t, c), dtype, used in zip(
            itertools.product(tokens, configs),
            itertools.cycle((torch.float32, torch.float64)),
            itertools.cycle((range(8), (1, 6, 7), range(5))),
            strict=False,
        )
    ]
    results = run_ranks(_four, 4, jobs, timeout=120)
    by_job = zip(*(done for done, _ in results), strict=True)
    for job, done in zip(jobs, by_job, strict=True):
        check_job(job, done)
    # the same experts, routing and data in another group: the streams must differ
    for one, other in ((0, 2), (1, 3)):
        for a, b in zip(results[one][1], results[other][1], strict=True):
            assert not torch.equal(a, b)
