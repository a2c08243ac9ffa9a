"""A replay of a trace with pair ids against the run that was traced, field by field."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lrmoe
import lrmoe.state
from lrmoe import Budget, LayerState, Recalibration, select
from lrmoe.cluster.cost import Rows
from lrmoe.cluster.exact import planned_problem, replay_pairs, totals
from lrmoe.cluster.trace import Recorder, TraceInfo, join, read_trace, write_trace
from lrmoe.pairs import forward_instances, sort_pairs
from lrmoe.planner import Costs, plan
from lrmoe.select import ONE, Segments, inclusion_probabilities, sampling_sizes
from lrmoe.state import pairs_by_rank
from tests import oracle
from tests.ranks import run_ranks

D, F, E, K, LAYERS, STEPS, MICRO = 8, 4, 8, 3, 2, 2, 2
TOKENS = (37, 90)  # by rank
CONFIGS = [
    Recalibration(rate=0.0),
    Recalibration(rate=0.3, seed=3),
    Recalibration(rate=0.4, placement="recalibrated", budget=Budget(slots=2)),
    Recalibration(rate=0.0, placement="recalibrated", budget=Budget(slots=2)),
    Recalibration(rate=0.3, placement="symi", budget=Budget(slots=2)),
    Recalibration(rate=0.5, selection="top"),
    Recalibration(rate=0.5, selection="top", placement="recalibrated", quotas="makespan"),
    Recalibration(rate=0.25, selection="top", scope="local", router_grad="exact"),
    Recalibration(rate=0.3, selection="random", scope="local", save="inputs"),
    Recalibration(rate=0.3, selection="random_unbiased", placement="llep"),
    Recalibration(rate=0.4, strata="gradient", placement="recalibrated", budget=Budget(slots=2)),
    Recalibration(rate=0.4, strata="gradient", scope="global"),
    Recalibration(rate=0.4, strata="neighbors", placement="recalibrated", budget=Budget(slots=2)),
    Recalibration(rate=0.4, strata="neighbors", scope="global"),
]


def skewed_ids(generator, tokens):
    logits = torch.randn(tokens, E, generator=generator) + torch.linspace(2, 0, E)
    return logits.topk(K).indices


def free_links(*_):
    """So few pairs would never pay for an expert's weights."""
    return Costs()


@pytest.fixture(autouse=True)
def _free_links(monkeypatch):
    monkeypatch.setattr(lrmoe.state, "link_costs", free_links)


def traced_run(rank, world_size, directory):
    """Reports and records of every config on this rank; writes one trace per config."""
    lrmoe.state.link_costs = free_links
    outcome = []
    for i, config in enumerate(CONFIGS):
        path = Path(directory) / f"{i}.parquet"
        info = TraceInfo(
            ranks=world_size, ep_size=world_size, experts=E, top_k=K, hidden=D, ffn=F,
            dtype_bytes=4, has_pairs=True, has_directions=True,
            settings=config.to_dict(),
        )  # fmt: skip
        recorder = Recorder(path, info, rank)
        states = [LayerState(config, layer) for layer in range(LAYERS)]
        for state in states:
            state.recorder, state.captured = recorder, []
        generator = torch.Generator().manual_seed(100 * i + rank)
        e = E // world_size
        weights = [
            (
                torch.randn(e, 2 * F, D, generator=generator).requires_grad_(),
                torch.randn(e, D, F, generator=generator).requires_grad_(),
            )
            for _ in states
        ]
        reports = []
        for _ in range(STEPS):
            for _ in range(MICRO):
                x = torch.randn(TOKENS[rank], D, generator=generator).requires_grad_()
                for state, (gate_up, down) in zip(states, weights, strict=True):
                    p = torch.rand(TOKENS[rank], K, generator=generator).requires_grad_()
                    ids = skewed_ids(generator, TOKENS[rank])
                    y = lrmoe.experts(x, ids, p, gate_up, down, group=dist.group.WORLD, state=state)
                    x = x + y
                x.square().sum().backward()
            for state in states:
                state.finish_step()
            reports.append([state.report() for state in states])
        recorder.close()
        dist.barrier()
        if rank == 0:
            join(path, info)
        outcome.append((reports, [state.captured for state in states]))
    return outcome


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("traces")
    return directory, run_ranks(traced_run, 2, str(directory), timeout=120)


@pytest.mark.dist
@pytest.mark.parametrize("i", range(len(CONFIGS)))
def test_a_trace_with_pairs_reproduces_its_run_exactly(run, i):
    directory, of_rank = run
    trace = read_trace(directory / f"{i}.parquet")
    replays = list(replay_pairs(trace))
    assert len(replays) == LAYERS * STEPS * MICRO
    for rank, outcome in enumerate(of_rank):
        reports, captured = outcome[i]
        for layer in range(LAYERS):
            mine = [r for r in replays if r.layer == layer]
            for record, made in zip(captured[layer], mine, strict=True):
                assert torch.equal(record.kept, made.kept_W[rank])
                assert torch.equal(record.weight, made.weight_W[rank])
                assert record.kept.sum() == made.kept_WV[rank].sum()
            for step in range(STEPS):
                report, of_step = reports[step][layer], [r for r in mine if r.step == step]
                W = len(of_rank)
                others = [r for r in range(W) if r != rank]
                assert report.kept_pairs == sum(r.kept_WV.sum() for r in of_step)
                assert report.replicas == sum(r.plan.num_replicas for r in of_step)
                assert report.moved_rows == sum(r.moved_W[rank] for r in of_step)
                for b, phase in enumerate(("fwd", "bwd")):
                    rows = sum(r.rows_2WW[b, rank, others].sum() for r in of_step)
                    assert getattr(report, f"payload_rows_{phase}") == rows
                    assert getattr(report, f"bytes_{phase}") == sum(
                        r.bytes_2W[b, rank] for r in of_step
                    )
                    load = [r.plan.forward_WV if b == 0 else r.kept_WV for r in of_step]
                    load_W = sum(
                        pairs_by_rank(r.plan, pairs).sum(0)
                        for r, pairs in zip(of_step, load, strict=True)
                    )
                    assert getattr(report, f"gemm_rows_{phase}") == load_W[rank]


def is_spread(kept, score, direction, quota, strata):
    """Whether of every run of the order as many pairs are kept as their probabilities say, to 1."""
    segments = Segments(np.array([len(score)]), score.device)
    sizes = sampling_sizes(score, segments, Recalibration().min_inclusion)
    pi = inclusion_probabilities(sizes, segments, np.array([quota]))
    if strata == "neighbors":
        order = oracle.neighbors(direction.tolist())
    else:
        place = [oracle.gray_place(code) for code in direction.tolist()]
        order = sorted(range(len(place)), key=place.__getitem__)
    off = (kept[order].long() * ONE - pi[order]).cumsum(0)
    return bool((off.abs() < ONE).all())


@pytest.mark.dist
@pytest.mark.parametrize("strata", ["gradient", "neighbors"])
def test_directions_reach_the_draw_beside_their_own_pairs(run, strata, monkeypatch):
    """Over both ranks in global scope; at each instance of a rank with replicas."""
    directory, _ = run
    # Of tokens with one place the first comes first, and not one at random.
    monkeypatch.setattr(select, "_mixed", torch.zeros_like)
    config = CONFIGS.index(Recalibration(rate=0.4, strata=strata, scope="global"))
    trace, found = read_trace(directory / f"{config}.parquet"), []
    for calls, replay in of_calls(trace):
        flat = [
            (torch.from_numpy(pairs.expert_TK.astype(np.int64)).reshape(-1), made.reshape(-1),
             torch.from_numpy(pairs.score_TK.copy()).reshape(-1),
             torch.from_numpy(pairs.direction_T.copy()).repeat_interleave(K))
            for pairs, made in zip(calls, replay.kept_W, strict=True)
        ]  # fmt: skip
        expert, kept, score, code = map(torch.cat, zip(*flat, strict=True))
        for e in range(E):
            mine, quota = expert == e, replay.plan.quota_E[e]
            found.append(is_spread(kept[mine], score[mine], code[mine], quota, strata))
    assert len(found) == LAYERS * STEPS * MICRO * E
    assert all(found)

    config = next(i for i, c in enumerate(CONFIGS) if c.is_stratified and c.placement != "fixed"
                  and c.strata == strata and c.rate == 0.4)  # fmt: skip
    trace, found = read_trace(directory / f"{config}.parquet"), []
    for calls, replay in of_calls(trace):
        for rank, (pairs, made) in enumerate(zip(calls, replay.kept_W, strict=True)):
            table = sort_pairs(torch.from_numpy(pairs.expert_TK.astype(np.int64)), E)
            pairs_V = replay.plan.forward_WV[rank]
            instance_N = forward_instances(replay.plan, pairs_V, torch.device("cpu"))
            if instance_N is None:
                continue
            kept_N = made.reshape(-1)[table.flat_N]
            score_N = torch.from_numpy(pairs.score_TK.copy()).reshape(-1)[table.flat_N]
            code_N = torch.from_numpy(pairs.direction_T.copy())[table.token_N]
            for v, quota in enumerate(replay.plan.backward_WV[rank]):
                mine = instance_N == v
                found.append(is_spread(kept_N[mine], score_N[mine], code_N[mine], quota, strata))
    assert len(found) > E
    assert all(found)


def of_calls(trace):
    """The pairs of every rank in a call, and its replay."""
    pairs = [of_call for calls in trace.calls for of_call in calls.pairs_CW]
    return zip(pairs, replay_pairs(trace), strict=True)


@pytest.mark.dist
def test_the_runs_cover_what_can_go_wrong(run):
    directory, _ = run
    of_config = [
        totals(list(replay_pairs(read_trace(directory / f"{i}.parquet"))))
        for i in range(len(CONFIGS))
    ]
    assert any(t["moved_rows"] for t in of_config)
    assert any(t["replicas"] for t in of_config)
    assert len({t["kept_pairs"] for t in of_config}) > 4


@pytest.mark.dist
def test_other_settings_on_the_same_trace(run, tmp_path):
    directory, _ = run
    trace = read_trace(directory / "0.parquet")
    half = list(replay_pairs(trace, Recalibration(rate=0.5, strata="gradient")))
    for made in half:
        assert made.kept_WV.sum() == made.plan.quota_E.sum() < made.plan.forward_WV.sum()
        assert np.array_equal(sum(k.sum() for k in made.kept_W), made.kept_WV.sum())
    with pytest.raises(ValueError, match="does not say hidden"):
        next(replay_pairs(replace(trace, info=replace(trace.info, hidden=0))))
    counts = replace(trace.info, has_pairs=False, has_directions=False)
    with pytest.raises(ValueError, match="has counts alone"):
        next(replay_pairs(replace(trace, info=counts)))
    write_trace(tmp_path / "bare", replace(trace, info=replace(trace.info, has_directions=False)))
    bare = read_trace(tmp_path / "bare")
    with pytest.raises(ValueError, match="strata='gradient': the trace does not"):
        next(replay_pairs(bare, Recalibration(rate=0.5, strata="gradient")))
    assert next(replay_pairs(bare, Recalibration(rate=0.0))).plan.keeps_all
    with pytest.raises(ValueError, match="selection='router'"):
        next(replay_pairs(trace, replace(CONFIGS[5], selection="router")))


@pytest.mark.dist
@pytest.mark.parametrize("i", range(5))
def test_counts_alone_give_the_same_plans_and_nearly_the_same_rows(run, i):
    """The stated bounds: all but token rows exact; rows within 12 % of every rank and call where
    pairs are drawn at random."""
    directory, _ = run
    trace = read_trace(directory / f"{i}.parquet")
    exact = list(replay_pairs(trace))
    of_layer = {layer: LayerState(CONFIGS[i], layer) for layer in range(LAYERS)}
    n = 0
    for calls in trace.calls:
        state = of_layer[calls.layer]
        for c, counts_WE in enumerate(calls.counts_CWE):
            state.step, state.micro_batch = int(calls.step_C[c]), int(calls.micro_batch_C[c])
            made = plan(planned_problem(trace.info, state, counts_WE, 0))
            state.past_counts.append(counts_WE)
            assert np.array_equal(made.quota_E, exact[n].plan.quota_E)
            assert np.array_equal(made.forward_WV, exact[n].plan.forward_WV)
            assert np.array_equal(made.backward_WV, exact[n].kept_WV)
            rows = Rows.expected(made, counts_WE.sum(1) // K, K, 2)
            known_2W = exact[n].rows_2WW.sum(1)
            assert rows.received_2W == pytest.approx(known_2W, rel=0.12)
            n += 1
