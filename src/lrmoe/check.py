"""``lrmoe check``: versions, what this machine can run, and whether C0 is exact training here.

The parity check computes one loss and every gradient twice in one process, with the model's own
eager experts and through lrmoe with every pair kept, and compares them parameter by parameter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "numba", "triton")


def main(arguments: Sequence[str]) -> int:
    """Run the checks; 0 if all passed, 1 if not."""
    parser = argparse.ArgumentParser(prog="lrmoe check", description=__doc__)
    parser.add_argument("--model", help="directory of a checkpoint to check instead of tiny models")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    if options.model is not None and not (Path(options.model) / "config.json").is_file():
        raise ValueError(f"--model={options.model!r}: no config.json there; give a checkpoint")

    rows = environment()
    if options.model is not None:
        rows.append(parity(options.model))
    else:
        rows += [parity(family) for family in ("qwen3_moe", "glm4_moe")]
    _show(rows)
    if options.json is not None:
        from lrmoe.cli import write_json

        write_json(options.json, "check", {"model": options.model}, rows)
    return 0 if all(row["ok"] for row in rows) else 1


def environment() -> list[dict[str, Any]]:
    """One row per package and ability of this machine."""
    rows: list[dict[str, Any]] = []
    for name in _PACKAGES:
        try:
            rows.append({"check": name, "result": metadata.version(name), "ok": True})
        except metadata.PackageNotFoundError:
            is_optional = name == "triton"
            result = "not installed" + (" (only GPUs need it)" if is_optional else "")
            rows.append({"check": name, "result": result, "ok": is_optional})
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CPU"
    backends = [b for b in ("nccl", "gloo") if dist.is_backend_available(b)]
    rows.append({"check": "device", "result": gpu, "ok": True})
    rows.append({"check": "process groups", "result": ", ".join(backends), "ok": bool(backends)})
    return rows


def parity(model: str) -> dict[str, Any]:
    """C0 against the model's own eager experts: the worst relative error of any gradient.

    Args:
        model: ``qwen3_moe`` or ``glm4_moe`` for a tiny one, or the directory of a checkpoint.
    """
    import lrmoe

    network = _load(model)
    network.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(network.config.vocab_size, (2, 32), generator=generator)
    reference = _gradients(network, tokens)
    lrmoe.configure(network, lrmoe.Recalibration(rate=0.0))
    got = _gradients(network, tokens)

    errors = {
        name: float((got[name] - wanted).norm() / wanted.norm().clamp(min=1e-30))
        for name, wanted in reference.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    dtype = next(network.parameters()).dtype
    tolerance = TOLERANCE.get(dtype, 3e-2)
    return {
        "check": f"C0 parity, {model}",
        "result": f"{len(errors) - 1} gradients, loss: worst error {errors[worst]:.1e} ({worst})",
        "worst_error": errors[worst],
        "tolerance": tolerance,
        "ok": errors[worst] <= tolerance,
    }


def _load(model: str) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    if model == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=8, **sizes))
    if model == "glm4_moe":
        return Glm4MoeForCausalLM(Glm4MoeConfig(n_routed_experts=8, num_mtp_layers=0, **sizes))
    return AutoModelForCausalLM.from_pretrained(model)


def _gradients(network: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    network.zero_grad()
    loss = network(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {n: p.grad.float() for n, p in network.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **gradients}


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "result", "")
    for row in rows:
        mark = "[green]ok[/]" if row["ok"] else "[red]FAILED[/]"
        table.add_row(row["check"], row["result"], mark)
    Console(file=sys.stdout).print(table)
