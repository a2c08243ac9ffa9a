"""The shapes of whole models: presets, and any Hugging Face config.json of the same families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lrmoe.planner.memory import LayerShape

_BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the work and the memory of a model depend on.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    name: str
    hidden: int
    layers: int
    dense_layers: int
    """Leading layers without experts."""
    experts: int
    top_k: int
    ffn: int
    """Width of an expert."""
    shared_ffn: int
    """Width of the shared expert, 0 for none."""
    dense_ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    has_qkv_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """Whether the output embedding is the input embedding."""

    def __post_init__(self) -> None:
        positive = ("hidden", "layers", "experts", "top_k", "ffn", "heads", "kv_heads", "vocab")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"dense_layers={self.dense_layers}: allowed is 0 <= dense_layers < {self.layers}"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: allowed is <= experts={self.experts}")

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def expert_parameters(self) -> int:
        """All routed experts of the model."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.ffn

    @property
    def attention_parameters(self) -> int:
        """One layer's attention, without its norm."""
        D, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        size = 2 * D * q + 2 * D * kv
        if self.has_qkv_bias:
            size += q + 2 * kv
        if self.has_qk_norm:
            size += 2 * self.head_dim
        return size

    @property
    def other_parameters(self) -> int:
        """Everything that is not a routed expert."""
        D = self.hidden
        per_layer = self.attention_parameters + 2 * D
        dense = self.dense_layers * 3 * D * self.dense_ffn
        moe = self.moe_layers * (D * self.experts + 3 * D * self.shared_ffn)
        embeddings = self.vocab * D * (1 if self.is_tied else 2)
        return self.layers * per_layer + dense + moe + embeddings + D

    def layer_shape(self, ranks: int, tokens: int, **changes: Any) -> LayerShape:
        """One MoE layer of the model for the memory model of the planner."""
        return LayerShape(
            hidden=self.hidden,
            ffn=self.ffn,
            experts=self.experts,
            top_k=self.top_k,
            ranks=ranks,
            tokens=tokens,
            layers=self.moe_layers,
            dtype_bytes=_BF16,
            **changes,
        )


# Published architectures; the defaults of transformers' config classes are those of other models.
QWEN3_30B_A3B = ModelShape(
    name="qwen3-30b-a3b",
    hidden=2048,
    layers=48,
    dense_layers=0,
    experts=128,
    top_k=8,
    ffn=768,
    shared_ffn=0,
    dense_ffn=6144,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    has_qkv_bias=False,
    has_qk_norm=True,
    is_tied=False,
)
GLM45_106B_A12B = ModelShape(
    name="glm4.5-106b-a12b",
    hidden=4096,
    layers=46,
    dense_layers=1,
    experts=128,
    top_k=8,
    ffn=1408,
    shared_ffn=1408,
    dense_ffn=10_944,
    heads=96,
    kv_heads=8,
    head_dim=128,
    vocab=151_552,
    has_qkv_bias=True,
    has_qk_norm=False,
    is_tied=False,
)
PRESETS = {model.name: model for model in (QWEN3_30B_A3B, GLM45_106B_A12B)}
PRESETS["glm-4.5-air"] = GLM45_106B_A12B  # the name of its weights


def model_shape(model: str) -> ModelShape:
    """A preset by its name, or the model of a config.json (or of the directory that holds one).

    Raises:
        ValueError: if there is no such preset or file, or the config misses something.
    """
    if model.lower() in PRESETS:
        return PRESETS[model.lower()]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model={model!r}: neither a file, a directory with a config.json, nor a preset; "
            f"presets are {', '.join(map(repr, PRESETS))}"
        )
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model={model!r}: is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"model={model!r}: must hold settings by name")
    return replace(from_config(values, model), name=path.parent.name or path.name)


def from_config(values: Mapping[str, Any], source: str) -> ModelShape:
    """The shape in a Hugging Face config of type ``qwen3_moe`` or ``glm4_moe``.

    Raises:
        ValueError: for another type, and for a missing size: a library's default would be silently
            that of another model.
    """

    def need(key: str, *others: str) -> int:
        for name in (key, *others):
            if isinstance(values.get(name), int):
                return int(values[name])
        raise ValueError(f"model={source!r}: {key}={values.get(key)!r} must be an integer")

    kind = values.get("model_type")
    if kind not in ("qwen3_moe", "glm4_moe"):
        raise ValueError(
            f"model={source!r}: model_type={kind!r}: allowed are 'qwen3_moe', 'glm4_moe'"
        )
    is_qwen = kind == "qwen3_moe"
    if is_qwen and (values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1):
        raise ValueError(
            f"model={source!r}: mlp_only_layers and decoder_sparse_step other than every layer "
            "with experts are not supported"
        )
    ffn = need("moe_intermediate_size")
    return ModelShape(
        name=source,
        hidden=need("hidden_size"),
        layers=need("num_hidden_layers"),
        dense_layers=0 if is_qwen else need("first_k_dense_replace"),
        # transformers 5 writes its own name for Qwen's.
        experts=need("num_experts", "num_local_experts") if is_qwen else need("n_routed_experts"),
        top_k=need("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=0 if is_qwen else need("n_shared_experts") * ffn,
        dense_ffn=need("intermediate_size"),
        heads=need("num_attention_heads"),
        kv_heads=need("num_key_value_heads"),
        head_dim=need("head_dim"),
        vocab=need("vocab_size"),
        has_qkv_bias=bool(values.get("attention_bias", False)),
        has_qk_norm=is_qwen or bool(values.get("use_qk_norm", False)),
        is_tied=bool(values.get("tie_word_embeddings", False)),
    )
