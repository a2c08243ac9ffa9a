"""Traces: what is written is read, and what is not whole is refused."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrmoe.cluster.trace import (
    Calls,
    RankPairs,
    Trace,
    TraceInfo,
    read_megatron,
    read_trace,
    write_trace,
)

W, E, K = 2, 6, 2
INFO = TraceInfo(
    ranks=4, ep_size=W, experts=E, top_k=K, has_pairs=True, has_directions=True,
    settings={"rate": 0.2},
)  # fmt: skip


def make_trace(info=INFO, seed=0):
    rng = np.random.default_rng(seed)
    calls = []
    for group in range(info.ranks // W):
        for layer in (0, 3):
            pairs_CW = [
                [
                    RankPairs(
                        expert_TK=np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(
                            np.int16
                        ),
                        score_TK=rng.random((tokens, K), dtype=np.float32),
                        direction_T=(
                            rng.integers(-(1 << 63), (1 << 63) - 1, tokens)
                            if info.has_directions
                            else None
                        ),
                    )
                    for tokens in (5, 3)
                ]
                for _ in range(3)
            ]
            counts = [
                [np.bincount(p.expert_TK.ravel(), minlength=E) for p in of_call]
                for of_call in pairs_CW
            ]
            calls.append(
                Calls(
                    layer=layer,
                    group=group,
                    step_C=np.array([0, 0, 1]),
                    micro_batch_C=np.array([0, 1, 0]),
                    counts_CWE=np.array(counts),
                    pairs_CW=pairs_CW if info.has_pairs else None,
                )
            )
    return Trace(info=info, calls=calls)


def assert_equal(a, b):
    assert a.info == b.info
    assert len(a.calls) == len(b.calls)
    for x, y in zip(a.calls, b.calls, strict=True):
        assert (x.layer, x.group) == (y.layer, y.group)
        for name in ("step_C", "micro_batch_C", "counts_CWE"):
            assert np.array_equal(getattr(x, name), getattr(y, name))
        assert (x.pairs_CW is None) == (y.pairs_CW is None)
        flat = [list(itertools.chain(*(calls.pairs_CW or []))) for calls in (x, y)]
        for p, q in zip(*flat, strict=True):
            assert np.array_equal(p.expert_TK, q.expert_TK)
            assert np.array_equal(p.score_TK, q.score_TK)
            assert np.array_equal(p.direction_T, q.direction_T)


@pytest.mark.parametrize(
    ("has_pairs", "has_directions"), [(True, True), (True, False), (False, False)]
)
def test_what_is_written_is_read(tmp_path, has_pairs, has_directions):
    info = replace(INFO, has_pairs=has_pairs, has_directions=has_directions)
    trace = make_trace(info)
    write_trace(tmp_path / "t.parquet", trace)
    assert_equal(read_trace(tmp_path / "t.parquet"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_the_order_of_rows_in_the_file_does_not_matter(tmp_path):
    write_trace(tmp_path / "t.parquet", make_trace())
    table = pq.read_table(tmp_path / "t.parquet")
    shuffled = table.take(np.random.default_rng(1).permutation(len(table)))
    pq.write_table(shuffled.replace_schema_metadata(table.schema.metadata), tmp_path / "s.parquet")
    assert_equal(read_trace(tmp_path / "s.parquet"), make_trace())


def test_foreign_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "text").write_text("layer,step\n0,1\n")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        read_trace(tmp_path / "text")
    pq.write_table(pa.table({"layer": [1]}), tmp_path / "other")
    with pytest.raises(ValueError, match="not a trace written by lrmoe"):
        read_trace(tmp_path / "other")


def test_every_damaged_byte_of_the_data_is_noticed(tmp_path):
    path = tmp_path / "t.parquet"
    write_trace(path, make_trace())
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="its end is missing"):
        read_trace(_with(tmp_path, whole[: len(whole) // 2]))
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    original = make_trace()
    refused = 0
    for at in range(4, len(whole) - footer, 37):
        broken = bytearray(whole)
        broken[at] ^= 0x40
        try:
            read = read_trace(_with(tmp_path, bytes(broken)))
        except ValueError:
            refused += 1
        else:  # a byte of a page header that nobody reads
            assert_equal(read, original)
    assert refused > 10


def _with(tmp_path, data):
    path = tmp_path / "broken"
    path.write_bytes(data)
    return path


def rewritten(tmp_path, change, metadata=None):
    """A trace whose rows or metadata were changed."""
    path = tmp_path / "t.parquet"
    write_trace(path, make_trace())
    table = pq.read_table(path)
    rows, schema = change(table.to_pylist()), table.schema
    if metadata is not None:
        schema = schema.with_metadata({b"lrmoe.trace": json.dumps(metadata).encode()})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def test_contradictions_are_refused(tmp_path):
    def lose(rows):
        return rows[1:]

    def twice(rows):
        return [*rows, rows[0]]

    def other_counts(rows):
        counts = list(rows[0]["counts"])
        counts[0] += 1
        return [rows[0] | {"counts": counts}, *rows[1:]]

    def short(rows):
        return [rows[0] | {"counts": rows[0]["counts"][:-1]}, *rows[1:]]

    def wrong_rank(rows):
        return [rows[0] | {"rank": 9}, *rows[1:]]

    def lost_score(rows):
        return [rows[0] | {"scores": rows[0]["scores"][:-1]}, *rows[1:]]

    def lost_direction(rows):
        return [rows[0] | {"directions": rows[0]["directions"][:-1]}, *rows[1:]]

    def wrong_id(rows):
        return [rows[0] | {"experts": [E] * len(rows[0]["experts"])}, *rows[1:]]

    for change, message in (
        (lose, "exactly one row of every rank"),
        (twice, "exactly one row of every rank"),
        (other_counts, "do not add up to the counts"),
        (short, "another number of experts"),
        (wrong_rank, "a rank that does not exist"),
        (lost_score, "not one score each"),
        (lost_direction, "not one direction per token"),
        (wrong_id, "outside 0 <= id < 6"),
        (lambda rows: [], "it has no layer call"),
    ):
        with pytest.raises(ValueError, match=message):
            read_trace(rewritten(tmp_path, change))


def test_another_version_is_refused(tmp_path):
    for version in (2, 4):
        metadata = {"version": version, "ranks": 4, "ep_size": 2, "experts": E, "top_k": K}
        with pytest.raises(ValueError, match=f"version {version}; this lrmoe reads versions 1 and"):
            read_trace(rewritten(tmp_path, lambda rows: rows, metadata))
    metadata = {"version": 1, "ranks": 3, "ep_size": 2, "experts": E, "top_k": K}
    with pytest.raises(ValueError, match="ep_size=2: must divide ranks=3"):
        read_trace(rewritten(tmp_path, lambda rows: rows, metadata))
    with pytest.raises(ValueError, match="is damaged"):
        read_trace(rewritten(tmp_path, lambda rows: rows, {"version": 1, "colour": 3}))


def test_a_file_of_the_first_version_has_no_directions(tmp_path):
    metadata = {"version": 1, "ranks": 4, "ep_size": W, "experts": E, "top_k": K, "has_pairs": True}
    old = read_trace(rewritten(tmp_path, lambda rows: rows, metadata))
    assert not old.info.has_directions
    for calls in old.calls:
        assert all(pairs.direction_T is None for of_call in calls.pairs_CW for pairs in of_call)


def megatron_lines(rank, rng, steps=2, micro_batches=2):
    lines, ids = [], {}
    for step in range(steps):
        for micro in range(micro_batches):
            for block, layer, extra in (
                ("decoder", 2, {}), ("decoder", 1, {}), ("mtp", 1, {"mtp_idx": 0}),
            ):  # fmt: skip
                top = np.stack([rng.permutation(E)[:K] for _ in range(3 + rank)])
                ids[block, layer, step, micro] = top
                record = {
                    "step": step, "stage": "pre_dispatch", "block": block, "layer": layer,
                    "rank": rank, "num_tokens": len(top), "topk": K,
                    "top_indices": top.tolist(), **extra,
                }  # fmt: skip
                lines.append(json.dumps(record))
    return lines, ids


def test_megatron_traces_become_counts(tmp_path):
    rng = np.random.default_rng(0)
    ids = []
    for rank in range(2):
        lines, of_rank = megatron_lines(rank, rng)
        (tmp_path / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
        ids.append(of_rank)
    trace = read_megatron([tmp_path], experts=E)
    assert (trace.info.ranks, trace.info.ep_size, trace.info.top_k) == (2, 2, K)
    names = [("decoder", 1), ("decoder", 2), ("mtp", 1)]
    assert [calls.layer for calls in trace.calls] == [0, 1, 2]
    for name, calls in zip(names, trace.calls, strict=True):
        assert calls.step_C.tolist() == [0, 0, 1, 1]
        assert calls.micro_batch_C.tolist() == [0, 1, 0, 1]
        for c, (step, micro) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            for rank in range(2):
                expected = np.zeros(E, np.int64)
                for row in ids[rank][(*name, step, micro)]:
                    for expert in row:
                        expected[expert] += 1
                assert np.array_equal(calls.counts_CWE[c, rank], expected)
    halves = read_megatron([tmp_path], experts=E, ep_size=1)
    assert [calls.group for calls in halves.calls] == [0, 0, 0, 1, 1, 1]
    write_trace(tmp_path / "t.parquet", trace)  # and it is a trace like any other
    assert_equal(read_trace(tmp_path / "t.parquet"), trace)


def test_bad_megatron_files_name_the_line(tmp_path):
    lines, _ = megatron_lines(0, np.random.default_rng(0))
    path = tmp_path / "router_trace_rank0.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        read_megatron([path], experts=E)
    path.write_text("\n".join([lines[0], "{}"]))
    with pytest.raises(ValueError, match=r"rank0.jsonl:2: is not a record"):
        read_megatron([path], experts=E)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"rank0.jsonl:\d+: an expert id outside"):
        read_megatron([path], experts=E - 1)
    other = tmp_path / "router_trace_rank1.jsonl"
    other.write_text("\n".join(megatron_lines(1, np.random.default_rng(1))[0][:-1]))
    with pytest.raises(ValueError, match=r"ranks \[1\] have no record of block 'mtp'"):
        read_megatron([tmp_path], experts=E)
