"""The trained model as a plain Hugging Face directory, which loads without this package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lrmoe.training.ranks import Ranks


def export_final(model: Any, tokenizer: Any, path: Path, ranks: Ranks) -> None:
    """Writes weights, config and tokenizer. Collective: the shards are gathered on rank 0."""
    hidden = path.with_name(f".{path.name}")
    model.save_pretrained(hidden, is_main_process=ranks.is_first)
    ranks.barrier()
    if ranks.is_first:
        _forget_training(hidden / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(hidden)
        shutil.rmtree(path, ignore_errors=True)
        hidden.rename(path)
    ranks.barrier()


def _forget_training(config_file: Path) -> None:
    """Takes out of the config what only this run needed and would slow inference down."""
    config = json.loads(config_file.read_text())
    config.pop("lrmoe", None)
    config["use_cache"] = True
    if "output_router_logits" in config:
        config["output_router_logits"] = False
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
