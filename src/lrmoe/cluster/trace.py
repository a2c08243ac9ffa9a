"""Routing traces: recorded in training, kept in a Parquet file, read back whole or not at all.

A file has one row per (layer, step, micro-batch, rank): the rank's pairs of every expert, and with
pairs every token's expert ids and scores and the direction of its gradient, in the order of its
tokens, so that a pair's id is its place. What all rows share is JSON in the file's metadata.

Shape letters: C = layer calls of one expert-parallel group, W = ranks of it, E = experts, T =
tokens, K = top-k.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from lrmoe.planner.problem import Int
from lrmoe.score import direction
from lrmoe.state import CallRecord

VERSION = 3
_READABLE = (1, 3)  # 1 had no directions; 2, which was never released, had 16 bits of them
_KEY = b"lrmoe.trace"
_KEYS = ("layer", "step", "micro_batch", "rank")
_COUNTS = [(name, pa.int32()) for name in _KEYS] + [("counts", pa.list_(pa.int32()))]
_PAIRS = [("experts", pa.list_(pa.int16())), ("scores", pa.list_(pa.float32()))]
_DIRECTIONS = [("directions", pa.list_(pa.int64()))]
_MAX_IDS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """What all calls of a trace share.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    ranks: int
    """Of all expert-parallel groups together."""
    ep_size: int
    experts: int
    top_k: int
    hidden: int = 0
    """Model dim, expert width and bytes of a value, 0 where unknown; they size rows and weights."""
    ffn: int = 0
    dtype_bytes: int = 0
    device: str = "cpu"
    """Kind of device, which decides what the planner takes a link to cost."""
    has_pairs: bool = False
    has_directions: bool = False
    """Of the pairs' tokens (:func:`lrmoe.score.direction`), which samples are laid out by."""
    source: str = "lrmoe train"
    settings: dict[str, Any] = field(default_factory=dict)
    """``Recalibration`` of the run, empty where it was not ours."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ep_size", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        if self.ranks % self.ep_size:
            raise ValueError(f"ep_size={self.ep_size}: must divide ranks={self.ranks}")
        if self.has_directions and not self.has_pairs:
            raise ValueError("has_directions=True: they are those of pairs; allowed with has_pairs")
        if self.has_pairs and self.experts > _MAX_IDS:
            raise ValueError(f"experts={self.experts}: with pairs at most {_MAX_IDS}")

    def to_metadata(self) -> dict[bytes, bytes]:
        """As the file carries it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {_KEY: json.dumps({"version": VERSION, **values}).encode()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPairs:
    """The pairs of one rank in one layer call."""

    expert_TK: NDArray[np.int16]
    score_TK: NDArray[np.float32]  # LRM
    direction_T: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one layer in one expert-parallel group, in the order they were made."""

    layer: int
    group: int
    step_C: Int
    micro_batch_C: Int
    counts_CWE: Int
    pairs_CW: list[list[RankPairs]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole trace."""

    info: TraceInfo
    calls: list[Calls]
    """By group, then layer."""

    @property
    def layers(self) -> int:
        """MoE layers."""
        return len({calls.layer for calls in self.calls})


class TraceWriter:
    """Writes rows, one row group per :meth:`write`; the file appears when it is closed."""

    def __init__(self, path: Path, info: TraceInfo) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")
        columns = _COUNTS + (_PAIRS if info.has_pairs else [])
        columns += _DIRECTIONS if info.has_directions else []
        self._schema = pa.schema(columns, metadata=info.to_metadata())
        self._writer = pq.ParquetWriter(
            self._part, self._schema, compression="zstd", write_page_checksum=True
        )

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows: the keys, ``counts``, and with pairs flat ``experts`` and ``scores``."""
        if rows:
            self._writer.write_table(pa.Table.from_pylist(list(rows), schema=self._schema))

    def write_table(self, table: pa.Table) -> None:
        """Append the rows of another trace."""
        self._writer.write_table(table.cast(self._schema))

    def close(self) -> None:
        """End the file and give it its name."""
        self._writer.close()
        self._part.replace(self._path)


class Recorder:
    """Collects one rank's calls; every layer's state of the rank has it as ``recorder``.

    Each rank writes a file of its own, so that training exchanges nothing; :func:`join` makes one
    of them.
    """

    def __init__(self, path: Path, info: TraceInfo, rank: int) -> None:
        self._info, self._rank = info, rank
        self._writer = TraceWriter(part_of(path, rank), info)
        self._rows: dict[tuple[int, int, int], dict[str, Any]] = {}

    def add_call(self, layer: int, call: CallRecord, rank_in_group: int) -> None:
        """Note the counts of a differentiable call."""
        if any(step < call.step for _, step, _ in self._rows):
            self._flush()
        key = (layer, call.step, call.micro_batch)
        counts_E = call.counts_WE[rank_in_group]
        self._rows[key] = dict(zip(_KEYS, (*key, self._rank), strict=True)) | {"counts": counts_E}

    def add_pairs(
        self, layer: int, call: CallRecord, score_TK: torch.Tensor, grad_TD: torch.Tensor
    ) -> None:
        """Note the ids and scores of a call's pairs, and where their gradients point."""
        row = self._rows.get((layer, call.step, call.micro_batch))
        if self._info.has_pairs and row is not None:
            row["experts"] = call.top_k_index_TK.reshape(-1).to(torch.int16).cpu().numpy()
            row["scores"] = score_TK.reshape(-1).float().cpu().numpy()
            if self._info.has_directions:
                row["directions"] = direction(grad_TD).cpu().numpy()

    def close(self) -> None:
        """Write what is left and end this rank's file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        # A call whose backward pass never came (the run was stopped) has no scores.
        self._writer.write(
            [row for row in self._rows.values() if not self._info.has_pairs or "scores" in row]
        )
        self._rows.clear()


def part_of(path: Path, rank: int) -> Path:
    """Where a rank writes its part of a trace."""
    return path.with_name(f"{path.name}.rank{rank}")


def join(path: Path, info: TraceInfo) -> None:
    """One trace of the files of all ranks, which are then deleted."""
    writer = TraceWriter(path, info)
    parts = [part_of(path, rank) for rank in range(info.ranks)]
    for part in parts:
        with pq.ParquetFile(part) as file:
            for i in range(file.num_row_groups):
                writer.write_table(file.read_row_group(i))
    writer.close()
    for part in parts:
        part.unlink()


def write_trace(path: Path, trace: Trace) -> None:
    """Write a whole trace."""
    writer = TraceWriter(path, trace.info)
    for calls in trace.calls:
        writer.write(list(_rows_of(calls)))
    writer.close()


def _rows_of(calls: Calls) -> Iterator[dict[str, Any]]:
    W = calls.counts_CWE.shape[1]
    for c, counts_WE in enumerate(calls.counts_CWE):
        for r, counts_E in enumerate(counts_WE):
            row: dict[str, Any] = {
                "layer": calls.layer,
                "step": int(calls.step_C[c]),
                "micro_batch": int(calls.micro_batch_C[c]),
                "rank": calls.group * W + r,
                "counts": counts_E,
            }
            if calls.pairs_CW is not None:
                pairs = calls.pairs_CW[c][r]
                row["experts"] = pairs.expert_TK.reshape(-1)
                row["scores"] = pairs.score_TK.reshape(-1)
                if pairs.direction_T is not None:
                    row["directions"] = pairs.direction_T
            yield row


def read_trace(path: str | Path) -> Trace:
    """The trace in a file.

    Raises:
        ValueError: if the file is no trace, is of a newer version, is damaged, or contradicts
            itself; nothing of it is returned then.
    """
    if not Path(path).is_file():
        raise ValueError(f"trace={str(path)!r}: no such file")

    def refuse(why: str) -> ValueError:
        return ValueError(f"trace={str(path)!r}: {why}")

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise refuse("is not a Parquet file, or its end is missing") from error
    if _KEY not in (schema.metadata or {}):
        raise refuse("is a Parquet file, but not a trace written by lrmoe")
    try:
        values = json.loads(schema.metadata[_KEY])
        version = values.pop("version")
        if version not in _READABLE:
            known = " and ".join(map(str, _READABLE))
            raise refuse(f"has version {version}; this lrmoe reads versions {known}")
        info = TraceInfo(**values)
        table = pq.read_table(path, page_checksum_verification=True)
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        calls = _assemble(info, columns)
    except (pa.ArrowException, OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise refuse(f"is damaged ({' '.join(str(error).split())[:160]})") from error
    except _Contradiction as error:
        raise refuse(f"contradicts itself: {error}") from error
    return Trace(info=info, calls=calls)


class _Contradiction(Exception):  # noqa: N818 - a step on the way to the ValueError above
    pass


def _assemble(info: TraceInfo, columns: dict[str, Any]) -> list[Calls]:
    W, E = info.ep_size, info.experts
    layer_N, step_N, micro_N, rank_N = (
        columns[name].to_numpy(zero_copy_only=False).astype(np.int64) for name in _KEYS
    )
    lists = columns["counts"]
    if len(rank_N) == 0:
        raise _Contradiction("it has no layer call")
    if np.any(np.asarray(lists.value_lengths()) != E):
        raise _Contradiction(f"a row has another number of experts than {E}")
    counts_NE = np.asarray(lists.flatten(), dtype=np.int64).reshape(-1, E)
    if counts_NE.min() < 0 or rank_N.min() < 0 or rank_N.max() >= info.ranks:
        raise _Contradiction("a negative count, or a rank that does not exist")
    group_N = rank_N // W
    order_N = np.lexsort((rank_N, micro_N, step_N, layer_N, group_N))
    key_N4 = np.stack([group_N, layer_N, step_N, micro_N], 1)[order_N]
    is_whole = len(order_N) % W == 0
    if is_whole:
        key_CW4 = key_N4.reshape(-1, W, 4)
        rank_CW = rank_N[order_N].reshape(-1, W) % W
        is_whole = bool((key_CW4 == key_CW4[:, :1]).all() and (rank_CW == np.arange(W)).all())
    if not is_whole:
        raise _Contradiction("a layer call without exactly one row of every rank")
    pairs = _pairs_of(info, columns, counts_NE) if info.has_pairs else None
    key_C4 = key_CW4[:, 0]
    starts = np.flatnonzero(np.r_[True, (np.diff(key_C4[:, :2], axis=0) != 0).any(1)])
    counts_CWE = counts_NE[order_N].reshape(-1, W, E)
    result = []
    for start, end in zip(starts, [*starts[1:], len(key_C4)], strict=True):
        here = slice(int(start), int(end))
        result.append(
            Calls(
                group=int(key_C4[start, 0]),
                layer=int(key_C4[start, 1]),
                step_C=key_C4[here, 2],
                micro_batch_C=key_C4[here, 3],
                counts_CWE=counts_CWE[here],
                pairs_CW=None
                if pairs is None
                else [
                    [pairs[order_N[c * W + r]] for r in range(W)]
                    for c in range(here.start, here.stop)
                ],
            )
        )
    return result


def _pairs_of(info: TraceInfo, columns: dict[str, Any], counts_NE: Int) -> list[RankPairs]:
    """The pairs of every row of the file."""
    K, E = info.top_k, info.experts
    experts, scores = columns["experts"], columns["scores"]
    length_N = np.asarray(experts.value_lengths())
    if np.any(length_N % K) or np.any(length_N != np.asarray(scores.value_lengths())):
        raise _Contradiction(f"pairs that are not {K} per token, or not one score each")
    end_N = length_N.cumsum()
    expert_P = np.asarray(experts.flatten(), dtype=np.int16)
    score_P = np.asarray(scores.flatten(), dtype=np.float32)
    if len(expert_P) and (expert_P.min() < 0 or expert_P.max() >= E):
        raise _Contradiction(f"an expert id outside 0 <= id < {E}")
    direction_Q = None
    if info.has_directions:
        directions = columns["directions"]
        if np.any(np.asarray(directions.value_lengths()) * K != length_N):
            raise _Contradiction("not one direction per token")
        direction_Q = np.asarray(directions.flatten(), dtype=np.int64)
    result = []
    for n, (end, length) in enumerate(zip(end_N, length_N, strict=True)):
        mine = slice(int(end - length), int(end))
        if np.any(np.bincount(expert_P[mine], minlength=E) != counts_NE[n]):
            raise _Contradiction("expert ids that do not add up to the counts")
        result.append(
            RankPairs(
                expert_TK=expert_P[mine].reshape(-1, K),
                score_TK=score_P[mine].reshape(-1, K),
                direction_T=(
                    None if direction_Q is None else direction_Q[mine.start // K : mine.stop // K]
                ),
            )
        )
    return result


def read_megatron(
    paths: Sequence[str | Path], *, experts: int, ep_size: int | None = None
) -> Trace:
    """The routing traces that Megatron-LM writes with ``--moe-routing-trace-path``.

    One JSONL file per rank, a record per step, block, layer and micro-batch (those of one key in
    the order of the file), with the expert ids of every token; format of
    https://github.com/NVIDIA/Megatron-LM, ``megatron/core/transformer/moe/router_trace.py``. Layers
    of multi-token prediction become further layers after the decoder's. The files do not say how
    many experts there are, nor hold scores: the result has counts alone.

    Args:
        paths: files, or directories of ``router_trace_rank*.jsonl``.
        ep_size: ranks of an expert-parallel group; ``None``: all ranks.

    Raises:
        ValueError: naming the file and line that is not such a record, or the call that some rank
            lacks.
    """
    counts: dict[tuple[Any, ...], dict[int, Int]] = {}
    top_ks: set[int] = set()
    for file in _megatron_files(paths):
        seen: dict[tuple[Any, ...], int] = {}
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                key, rank, counts_E, top_k = _megatron_record(f"{file}:{number}", line, experts)
                top_ks.add(top_k)
                micro_batch = seen.get((*key, rank), 0)
                seen[(*key, rank)] = micro_batch + 1
                counts.setdefault((*key, micro_batch), {})[rank] = counts_E
    if len(top_ks) != 1:
        raise ValueError(f"Megatron trace: top-k of its records is {sorted(top_ks)}; must be one")
    ranks = 1 + max(rank for of_call in counts.values() for rank in of_call)
    W = ranks if ep_size is None else ep_size
    info = TraceInfo(
        ranks=ranks, ep_size=W, experts=experts, top_k=top_ks.pop(), source="Megatron-LM"
    )
    layers = sorted({key[:3] for key in counts})
    result = []
    for group in range(ranks // W):
        members = range(group * W, (group + 1) * W)
        for layer, name in enumerate(layers):
            keys = sorted(key for key in counts if key[:3] == name)
            for key in keys:
                missing = [rank for rank in members if rank not in counts[key]]
                if missing:
                    raise ValueError(
                        f"Megatron trace: ranks {missing} have no record of block {key[0]!r}, "
                        f"layer {key[2]}, step {key[3]}, micro-batch {key[4]}"
                    )
            result.append(
                Calls(
                    group=group,
                    layer=layer,
                    step_C=np.array([key[3] for key in keys]),
                    micro_batch_C=np.array([key[4] for key in keys]),
                    counts_CWE=np.stack(
                        [np.stack([counts[key][rank] for rank in members]) for key in keys]
                    ),
                    pairs_CW=None,
                )
            )
    return Trace(info=info, calls=result)


def _megatron_files(paths: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("router_trace_rank*.jsonl")) if path.is_dir() else [path]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"Megatron trace: no such file: {missing or list(map(str, paths))}")
    return files


def _megatron_record(where: str, line: str, experts: int) -> tuple[tuple[Any, ...], int, Int, int]:
    """(block, index of prediction, layer, step), rank, counts and top-k of a line."""
    try:
        record = json.loads(line)
        ids_TK = np.array(record["top_indices"], dtype=np.int64)
        tokens, top_k = int(record["num_tokens"]), int(record["topk"])
        key = (
            str(record.get("block", "decoder")),
            int(record.get("mtp_idx", -1)),
            int(record["layer"]),
            int(record["step"]),
        )
        rank = int(record["rank"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: is not a record of a Megatron routing trace") from error
    ids_TK = ids_TK.reshape(tokens, -1) if ids_TK.size else np.empty((0, top_k), np.int64)
    if ids_TK.shape != (tokens, top_k):
        raise ValueError(f"{where}: top_indices is {ids_TK.shape}, expected ({tokens}, {top_k})")
    if ids_TK.size and not 0 <= ids_TK.min() <= ids_TK.max() < experts:
        raise ValueError(f"{where}: an expert id outside 0 <= id < experts={experts}")
    return key, rank, np.bincount(ids_TK.ravel(), minlength=experts), top_k
