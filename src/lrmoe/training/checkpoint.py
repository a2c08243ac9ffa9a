"""Checkpoints that are whole or absent, and resume exactly.

A checkpoint is written to a hidden directory, forced to disk, and renamed: the rename is the moment
it exists. So a crash at any time leaves the last good one, and a name in ``checkpoints/`` without
a leading dot is always complete.

    step-00000100/
      manifest.json        step, layout, what the run must agree with, every file's size
      tensors/             model and optimizer, torch.distributed.checkpoint, any layout can load it
      scheduler.pt
      trainer_state.json
      rank-00000.pt        random state and counters of one rank
    latest                 link to the newest of them, for people and scripts
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

# DCP writes one rectangle per shard and cannot describe the strided shards of experts that are
# split over EP and FSDP; transformers moves them to plain shards and back.
from transformers.distributed.checkpoint import _redistribute_state_dict

from lrmoe.training.ranks import Ranks

_NAME = re.compile(r"step-(\d{8})")
_FORMAT = 1
# Keys by parameter name, so that the state fits any grouping of the parameters.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a checkpoint directory holds."""

    newest: Path | None
    """The newest complete checkpoint."""
    ignored: list[str]
    """Sentences about what was not used and why."""


def find_newest(directory: Path) -> Found:
    """The newest complete checkpoint; unfinished and damaged ones are named, not used."""
    ignored = []
    complete = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.name.startswith("."):
            ignored.append(f"{path.name} is unfinished")
        elif _NAME.fullmatch(path.name):
            complete.append(path)
    for path in reversed(complete):
        damage = _damage(path)
        if damage is None:
            return Found(newest=path, ignored=ignored)
        ignored.append(f"{path.name} is damaged: {damage}")
    return Found(newest=None, ignored=ignored)


def _damage(path: Path) -> str | None:
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return "manifest.json is missing"
    for name, size in json.loads(manifest.read_text())["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, expected {size}"
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"{path.name}: format {manifest['format']} is unknown, expected {_FORMAT}")
    return manifest


def save(
    directory: Path,
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler_state: dict[str, Any],
    rank_state: dict[str, Any],
    manifest: dict[str, Any],
    save_trainer_state: Callable[[Path], None],
    ranks: Ranks,
    keep_last: int,
) -> Path:
    """Writes a checkpoint and deletes those beyond the last ``keep_last``.

    Collective: every rank calls it. Returns when the checkpoint is on disk.
    """
    final = directory / f"step-{step:08d}"
    if ranks.on_first(lambda: final.exists() and _damage(final) is None):
        return final
    hidden = directory / f".unfinished-{final.name}"
    ranks.on_first(lambda: _make_empty(hidden))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }
    dcp_save(_redistribute_state_dict(state), checkpoint_id=hidden / "tensors")
    torch.save({**rank_state, "random": random_state()}, hidden / f"rank-{ranks.rank:05d}.pt")
    if ranks.is_first:
        torch.save(scheduler_state, hidden / "scheduler.pt")
        save_trainer_state(hidden / "trainer_state.json")
    ranks.barrier()
    if ranks.is_first:
        sizes = {str(p.relative_to(hidden)): p.stat().st_size for p in _files(hidden)}
        record = {"format": _FORMAT, "step": step, "world_size": ranks.world_size, **manifest}
        (hidden / "manifest.json").write_text(json.dumps({**record, "files": sizes}, indent=1))
        _force_to_disk(hidden)
        if final.exists():  # damaged, and not what this run was resumed from
            final.rename(directory / f".deleted-{final.name}")
        hidden.rename(final)
        _force_to_disk_one(directory)
        point_latest(final)
        _delete_old(directory, keep_last)
    ranks.barrier()
    return final


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Replaces the model's parameters and buffers. Collective."""
    original = get_model_state_dict(model)
    state = _redistribute_state_dict(original)
    dcp_load({"model": state}, checkpoint_id=path / "tensors")
    set_model_state_dict(model, _redistribute_state_dict(state, reference_state_dict=original))


def load_optimizer(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the optimizer's state. Collective."""
    original = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    state = _redistribute_state_dict(original)
    dcp_load({"optimizer": state}, checkpoint_id=path / "tensors")
    state = _redistribute_state_dict(state, reference_state_dict=original)
    set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def load_scheduler_state(path: Path, num_groups: int) -> dict[str, Any]:
    """The learning-rate scheduler's state, for an optimizer with ``num_groups`` parameter groups.

    Another layout has another number of groups, one per mesh. They all have the same rate.
    """
    state: dict[str, Any] = torch.load(path / "scheduler.pt", weights_only=True)
    for name, per_group in state.items():
        if isinstance(per_group, list) and len(per_group) != num_groups:
            if any(value != per_group[0] for value in per_group):
                raise ValueError(
                    f"scheduler {name}={per_group!r}: groups with different values cannot be "
                    f"moved to a layout with {num_groups} groups"
                )
            state[name] = per_group[:1] * num_groups
    return state


def load_rank_state(path: Path, rank: int) -> dict[str, Any] | None:
    """What rank ``rank`` stored, or ``None`` if the saving run had fewer ranks."""
    file = path / f"rank-{rank:05d}.pt"
    if not file.exists():
        return None
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def random_state() -> dict[str, Any]:
    """The random generators of this process."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.random.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _make_empty(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def _force_to_disk(path: Path) -> None:
    """Flushes a tree: a rename must not reach the disk before what it names."""
    for entry in (*_files(path), *(p for p in path.rglob("*") if p.is_dir()), path):
        _force_to_disk_one(entry)


def _force_to_disk_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_latest(target: Path) -> None:
    """Makes ``latest`` name a complete checkpoint, in one step."""
    link = target.parent / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(target.parent / "latest")


def _delete_old(directory: Path, keep_last: int) -> None:
    """Keeps the newest; what is deleted loses its name first, so that no half of it counts."""
    complete = sorted(p for p in directory.iterdir() if _NAME.fullmatch(p.name))
    for path in complete[:-keep_last]:
        path.rename(directory / f".deleted-{path.name}")
    for path in directory.iterdir():
        if path.name.startswith(".") and path.is_dir():
            shutil.rmtree(path)
