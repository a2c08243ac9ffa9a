"""Everything that ``lrmoe train`` can be told, as frozen dataclasses with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lrmoe.config import Recalibration


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model is trained."""

    preset: str = "qwen3-moe-small"
    """A model made from its config and initialised at random; ``lrmoe.training.presets`` lists
    them. Not used when ``path`` is set."""
    path: str | None = None
    """Directory of a Qwen3-MoE or GLM-4-MoE checkpoint to continue from."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the preset's model config to change, for example ``num_hidden_layers``."""
    dtype: str = "float32"
    """Type of the parameters: ``float32`` or ``bfloat16``."""
    correction_bias_rate: float = 1e-3
    """Step of GLM's ``e_score_correction_bias`` per optimizer step; 0 leaves it alone."""

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        _at_least("model.correction_bias_rate", self.correction_bias_rate, 0)
        if self.path is not None and self.overrides:
            raise ValueError(
                f"model.overrides={self.overrides!r} with model.path={self.path!r}: a checkpoint's "
                "config is not changed; leave model.overrides empty"
            )

    def check_files(self) -> None:
        """Raises ``ValueError`` if ``path`` is not what it should be."""
        if self.path is not None and not (Path(self.path) / "config.json").is_file():
            raise ValueError(f"model.path={self.path!r}: must be a directory with a config.json")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which text is trained on."""

    path: str | None = None
    """File or directory of txt, py, jsonl, json, parquet or arrow; ``None``: the source files of
    the running Python's standard library."""
    tokenizer: str | None = None
    """Directory of a tokenizer; ``None``: bytes (vocabulary 256)."""
    text_field: str = "text"
    """Column that holds the text in jsonl, json, parquet and arrow files."""
    block_size: int = 256
    """Tokens per training example; documents are packed into blocks of this length."""
    validation_share: float = 0.05
    """Share of the documents, from the end, that is held out. A single document is cut."""
    validation_blocks: int = 64
    """Largest number of held-out blocks that an evaluation uses, spread evenly."""

    def __post_init__(self) -> None:
        _at_least("data.block_size", self.block_size, 2)
        _at_least("data.validation_blocks", self.validation_blocks, 1)
        if not 0 < self.validation_share < 1:
            raise ValueError(
                f"data.validation_share={self.validation_share!r}: allowed is 0 < share < 1"
            )

    def check_files(self) -> None:
        """Raises ``ValueError`` if ``path`` or ``tokenizer`` is not what it should be."""
        if self.path is not None and not Path(self.path).exists():
            raise ValueError(f"data.path={self.path!r}: does not exist")
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise ValueError(
                f"data.tokenizer={self.tokenizer!r}: must be a directory with a tokenizer"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The knobs people turn, named as in Hugging Face's ``TrainingArguments``."""

    max_steps: int | None = 400
    """Optimizer steps; ``null`` to train for ``num_train_epochs``."""
    num_train_epochs: float | None = None
    """Passes over the text; needs ``max_steps: null``."""
    per_device_train_batch_size: int = 4
    """Blocks per rank and micro-batch."""
    per_device_eval_batch_size: int = 8
    """Blocks per rank in an evaluation."""
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch"
    bf16: bool = False
    """Autocast to bfloat16; parameters stay in ``model.dtype``."""
    activation_checkpointing: bool = False
    logging_steps: int = 10
    eval_steps: int = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    save_steps: int = 100
    """Steps between checkpoints; 0 saves only at the end and on Ctrl-C."""
    keep_last: int = 2
    """Checkpoints kept; older ones are deleted."""
    report_to: str = "tensorboard"
    """Trackers by name, separated by commas: ``tensorboard``, ``wandb``, ``trackio``, ``none``."""
    seed: int = 0
    """Seed of the initial model and of the order of the text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Any other field of ``TrainingArguments``."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            raise ValueError(
                f"training.max_steps={self.max_steps!r} with training.num_train_epochs="
                f"{self.num_train_epochs!r}: set exactly one of the two, the other to null"
            )
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "keep_last",
        ):
            _at_least(f"training.{name}", getattr(self, name), 1)
        for name in ("eval_steps", "save_steps", "warmup_steps", "weight_decay", "max_grad_norm"):
            _at_least(f"training.{name}", getattr(self, name), 0)
        if self.max_steps is not None:
            _at_least("training.max_steps", self.max_steps, 1)
        if self.num_train_epochs is not None and not self.num_train_epochs > 0:
            raise ValueError(
                f"training.num_train_epochs={self.num_train_epochs!r}: must be greater than 0"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How the ranks share the model."""

    fsdp_size: int | None = None
    """Ranks that share the dense parameters; ``None``: all of them."""
    ep_size: int | None = None
    """Ranks that share the experts; divides ``fsdp_size``; ``None``: all of them."""
    ep_implementation: str = "lrmoe"
    """``lrmoe``, or an implementation of transformers such as ``all_to_all`` to train without
    recalibration (``recalibration`` is then not used)."""
    timeout_s: int = 600
    """Seconds after which a collective that some rank never joins ends the run."""

    def __post_init__(self) -> None:
        for name in ("fsdp_size", "ep_size"):
            value = getattr(self, name)
            if value is not None:
                _at_least(f"parallel.{name}", value, 1)
        _at_least("parallel.timeout_s", self.timeout_s, 1)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run."""

    run_dir: str | None = None
    """Directory of the run; ``None``: ``runs/`` and the time of the start."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``run_dir``."""
    nproc: int | None = None
    """Ranks to start on this machine; ``None``: one, or those that torchrun started."""
    trace: str | None = None
    """File for the routing of every layer call (Parquet), as ``lrmoe replay`` reads it."""
    trace_pairs: bool = False
    """Whether the trace also holds the expert ids and scores of all pairs."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    recalibration: Recalibration = field(default_factory=Recalibration)

    def __post_init__(self) -> None:
        if self.nproc is not None:
            _at_least("nproc", self.nproc, 1)
        if self.resume and self.run_dir is None:
            raise ValueError("resume=True with run_dir=None: name the run directory to continue")
        if self.trace_pairs and self.trace is None:
            raise ValueError("trace_pairs=True with trace=None: name the file of the trace")
        if self.trace is not None and self.parallel.ep_implementation != "lrmoe":
            raise ValueError(
                f"trace={self.trace!r}: only parallel.ep_implementation='lrmoe' can be traced"
            )

    def on_ranks(self, world_size: int) -> TrainSettings:
        """The settings with the sizes of the mesh filled in.

        Raises:
            ValueError: if the sizes do not fit the number of ranks.
        """
        fsdp_size = self.parallel.fsdp_size or world_size
        ep_size = self.parallel.ep_size or fsdp_size
        if fsdp_size != world_size:
            raise ValueError(
                f"parallel.fsdp_size={fsdp_size}: must be the number of ranks, {world_size}"
            )
        if fsdp_size % ep_size:
            raise ValueError(f"parallel.ep_size={ep_size}: must divide fsdp_size={fsdp_size}")
        parallel = replace(self.parallel, fsdp_size=fsdp_size, ep_size=ep_size)
        return replace(self, parallel=parallel, nproc=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are stored in ``config.yaml``."""
        values = asdict(self)
        values["recalibration"] = self.recalibration.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: for an unknown key, naming the nearest valid one, and for a bad value.
        """
        sections: dict[str, Any] = {
            "model": ModelSettings,
            "data": DataSettings,
            "training": TrainingSettings,
            "parallel": ParallelSettings,
        }
        _known(values, [f.name for f in fields(cls)], "")
        arguments = dict(values)
        for name, section in sections.items():
            if name in arguments:
                _known(arguments[name], [f.name for f in fields(section)], f"{name}.")
                arguments[name] = section(**arguments[name])
        if "recalibration" in arguments:
            try:
                arguments["recalibration"] = Recalibration.from_dict(arguments["recalibration"])
            except ValueError as error:
                raise ValueError(f"recalibration.{error}") from error
        return cls(**arguments)


def nearest(key: str, known: list[str]) -> str:
    """The end of a sentence about a key that does not exist: the nearest one that does."""
    near = get_close_matches(key, known, n=1, cutoff=0.0)
    return f"; the nearest valid one is {near[0]!r}" if near else ""


def _known(values: Mapping[str, Any], known: list[str], prefix: str) -> None:
    for key in values:
        if key not in known:
            every = [prefix + name for name in known]
            raise ValueError(f"{prefix + key!r} is not a setting{nearest(prefix + key, every)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name}={value!r}: must be at least {least}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
