"""Text to fixed-length blocks of tokens.

By default the text is the source of the running Python's standard library, as bytes: real text that
is on every machine, without a download.

Shape letters: S = tokens per block, N = tokens of a split.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lrmoe.training.settings import DataSettings

BYTE_VOCABULARY = 256
# NUL does not occur in text files, so as a byte it can mark the end of a document.
BYTE_SEPARATOR = 0

_TEXT_SUFFIXES = (".txt", ".py", ".md")
# Suffix -> builder of Hugging Face datasets.
_TABLE_SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of S tokens of one packed stream; a last, shorter piece is dropped.

    An item holds ``input_ids`` and ``labels``, both int64 [S]; the model shifts the labels itself.
    """

    def __init__(self, tokens_N: np.ndarray, block_size: int, blocks: np.ndarray | None = None):
        self._tokens_N = tokens_N
        self._block_size = block_size
        # int64: which block of the stream each item is.
        self._blocks = np.arange(len(tokens_N) // block_size) if blocks is None else blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self._blocks[index]) * self._block_size
        block_S = torch.from_numpy(
            self._tokens_N[start : start + self._block_size].astype(np.int64)
        )
        return {"input_ids": block_S, "labels": block_S.clone()}

    def spread(self, count: int) -> TokenBlocks:
        """At most ``count`` of the blocks, spread evenly over the stream."""
        if len(self) <= count:
            return self
        chosen = self._blocks[np.arange(count) * len(self) // count]
        return TokenBlocks(self._tokens_N, self._block_size, chosen)


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Both splits of a text."""

    train: TokenBlocks
    validation: TokenBlocks
    vocabulary: int
    """Ids are below this number; the model's vocabulary must not be smaller."""
    fingerprint: str
    """Changes when any token of either split changes."""
    tokenizer: Any = None
    """The tokenizer of Hugging Face, or ``None`` for bytes."""


def load_text(settings: DataSettings) -> TextData:
    """Reads, tokenizes and packs the text; the same files give the same blocks in the same order.

    Raises:
        ValueError: if the path, the files, the text column or the tokenizer are not usable, or a
            split is shorter than one block.
    """
    settings.check_files()
    documents = list(_documents(settings))
    if len(documents) > 1:
        held_out = max(1, round(len(documents) * settings.validation_share))
        train, validation = documents[:-held_out], documents[-held_out:]
    else:
        text = documents[0]
        cut = len(text) - max(1, round(len(text) * settings.validation_share))
        train, validation = [text[:cut]], [text[cut:]]

    tokenizer = None if settings.tokenizer is None else _load_tokenizer(settings.tokenizer)
    digest = hashlib.sha256()
    splits = {}
    for name, texts in (("training", train), ("validation", validation)):
        tokens_N = _pack_bytes(texts) if tokenizer is None else _pack_tokens(texts, tokenizer)
        if len(tokens_N) < settings.block_size:
            raise ValueError(
                f"data.block_size={settings.block_size}: the {name} text has only "
                f"{len(tokens_N)} tokens; take a smaller block or more text"
            )
        digest.update(len(tokens_N).to_bytes(8, "little"))
        digest.update(tokens_N.tobytes())
        splits[name] = TokenBlocks(tokens_N, settings.block_size)
    return TextData(
        train=splits["training"],
        validation=splits["validation"].spread(settings.validation_blocks),
        vocabulary=BYTE_VOCABULARY if tokenizer is None else len(tokenizer),
        fingerprint=digest.hexdigest()[:16],
        tokenizer=tokenizer,
    )


def _documents(settings: DataSettings) -> Iterator[str | bytes]:
    if settings.path is None:
        files = standard_library_files()
        if not files:
            raise ValueError(
                f"data.path=None: no source files in {sysconfig.get_path('stdlib')}; set data.path"
            )
        yield from (file.read_bytes() for file in files)
        return
    root = Path(settings.path)
    if root.is_dir() and (root / "dataset_info.json").is_file():
        yield from _column(_load_saved_dataset(root), settings)
        return
    allowed = (*_TEXT_SUFFIXES, *_TABLE_SUFFIXES)
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in allowed)
    if not files or files[0].suffix not in allowed:
        raise ValueError(
            f"data.path={settings.path!r}: no files of a known kind; allowed are "
            f"{', '.join(allowed)}, or a directory that datasets.save_to_disk wrote"
        )
    suffixes = {p.suffix for p in files}
    tables = suffixes & set(_TABLE_SUFFIXES)
    if not tables:
        yield from (file.read_bytes() for file in files)
        return
    if len(suffixes) > 1:
        raise ValueError(
            f"data.path={settings.path!r}: holds files of several kinds, {sorted(suffixes)}; "
            "name one file, or a directory with one kind"
        )
    yield from _column(_load_tables(files, _TABLE_SUFFIXES[tables.pop()]), settings)


def standard_library_files() -> list[Path]:
    """The ``*.py`` files of the running Python's standard library, sorted by name.

    Its test suites are left out: many distributions do not ship them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    return [root / name for name in names if skipped.isdisjoint(name.split("/"))]


def _load_saved_dataset(root: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(root))


def _load_tables(files: list[Path], builder: str) -> Any:
    import datasets

    return datasets.load_dataset(builder, data_files=[str(p) for p in files], split="train")


def _column(dataset: Any, settings: DataSettings) -> Iterator[str]:
    if settings.text_field not in dataset.column_names:
        raise ValueError(
            f"data.text_field={settings.text_field!r}: the columns of {settings.path!r} are "
            f"{dataset.column_names}"
        )
    if len(dataset) == 0:
        raise ValueError(f"data.path={settings.path!r}: holds no rows")
    for text in dataset[settings.text_field]:
        if not isinstance(text, str):
            raise ValueError(
                f"data.text_field={settings.text_field!r}: a value is of type "
                f"{type(text).__name__}, expected text"
            )
        yield text


def _load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _pack_bytes(texts: list[str | bytes]) -> np.ndarray:
    """uint8 [N]: the documents one after another, each closed by a separator."""
    encoded = (t.encode() if isinstance(t, str) else t for t in texts)
    joined = b"".join(part + bytes([BYTE_SEPARATOR]) for part in encoded)
    return np.frombuffer(joined, dtype=np.uint8)


def _pack_tokens(texts: list[str | bytes], tokenizer: Any) -> np.ndarray:
    """uint32 [N]: the documents' ids one after another, each closed by the end token if any."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = []
    for text in texts:
        words = text.decode(errors="replace") if isinstance(text, bytes) else text
        ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        pieces.append(np.asarray(ids + end, dtype=np.uint32))
    return np.concatenate(pieces)


class RankBatches(BatchSampler):
    """The micro-batches of one rank, in a random order that the seed and the epoch fix.

    A step takes the next ``world_size * accumulation * batch_size`` blocks of the order, whichever
    rank gets which of them: the blocks of a step do not depend on how many ranks share them. What
    does not fill a whole step is dropped.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
    ):
        blocks_per_step = batch_size * accumulation * world_size
        if num_blocks < blocks_per_step:
            raise ValueError(
                f"training.per_device_train_batch_size={batch_size}: a step takes "
                f"{blocks_per_step} blocks ({world_size} ranks, {accumulation} micro-batches), but "
                f"the text has {num_blocks}"
            )
        self.batch_size = batch_size
        self.drop_last = True
        self._num_blocks = num_blocks
        self._num_batches = num_blocks // blocks_per_step * accumulation
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; called by the trainer before each pass."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self._seed, self._epoch]).permutation(self._num_blocks)
        for i in range(self._num_batches):
            start = (i * self._world_size + self._rank) * self.batch_size
            yield order[start : start + self.batch_size].tolist()


class BlockLoader(DataLoader[dict[str, torch.Tensor]]):
    """A ``DataLoader`` over :class:`RankBatches` that passes the epoch on."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the coming pass."""
        assert isinstance(self.batch_sampler, RankBatches)
        self.batch_sampler.set_epoch(epoch)
