"""A grid of runs that take a fraction of a second, and ways to run it."""

import json
import sys

import yaml

from lrmoe.studies.settings import Arm, Protocol, Run

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
PROTOCOL = {
    "overrides": MODEL,
    "steps": 4,
    "blocks_per_step": 2,
    "block_size": 32,
    "warmup_steps": 1,
    "validation_blocks": 16,
}


def protocol(**changes):
    return Protocol(**{**PROTOCOL, **changes})


def run(seed=0, arm=None, **changes):
    return Run(protocol=protocol(**changes), arm=Arm.from_dict(arm or {"rate": 0.0}), seed=seed)


def write_grid(path, stages, section="convergence"):
    path.write_text(yaml.safe_dump({"arm_defaults": {}, section: stages}))
    return path


def stage(**changes):
    values = {
        "name": "tiny",
        "protocol": PROTOCOL,
        "seeds": [0, 1],
        "arms": [{"rate": 0.0}, {"rate": 0.5}, {"selection": "top", "rate": 0.5}],
    }
    return {**values, **changes}


def command(*arguments):
    return [sys.executable, "-m", "lrmoe.cli", "study", *map(str, arguments)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(seed=0, arm=None, loss=2.0, **changes):
    """A row as a run would have left it, without the run."""
    values = {
        "val_loss": loss,
        "text_fingerprint": "text",
        "initial_fingerprint": f"initial {seed}",
        "order_fingerprint": f"order {seed}",
        "torch": "2",
        "transformers": "5",
        "system": "Linux",
        "backward_fraction": 1.0,
        "score_mass": 1.0,
        "regime": "scratch",
        "val_loss_quantiles": [0.1, 0.5, 1.0, 2.0, 4.0],
    }
    its = run(seed=seed, arm=arm)
    config = its.arm.recalibration
    head = {
        "arm": its.arm.name,
        "seed": seed,
        "selection": config.selection,
        "rate": config.to_dict()["rate"],
        "settings": its.to_dict(),
    }
    return {**head, **values, **changes}
