"""The two kinds of text that every machine with a Python has: source code and English prose."""

from __future__ import annotations

import ast
import hashlib
import tempfile
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lrmoe.studies.settings import Protocol
from lrmoe.training.data import TextData, load_text, standard_library_files
from lrmoe.training.settings import DataSettings

# Prose is a fifth of the code, so more of it is held out.
_HELD_OUT = {"code": 0.05, "prose": 0.1}


def study_text(protocol: Protocol) -> TextData:
    """Both splits of the protocol's text, as bytes; read once.

    ``code`` is the source of the standard library. ``prose`` is Python's documentation topics and
    the docstrings of the standard library, a document per topic and per module, in an order that
    mixes the two.
    """
    return _load(protocol.text, protocol.block_size, protocol.validation_blocks)


@lru_cache(maxsize=2)
def _load(text: str, block_size: int, validation_blocks: int) -> TextData:
    if text == "code":
        return load_text(_data(text, None, block_size, validation_blocks))
    with tempfile.TemporaryDirectory() as folder:
        path = str(prose_folder(Path(folder)))
        return load_text(_data(text, path, block_size, validation_blocks))


def _data(text: str, path: str | None, block_size: int, validation_blocks: int) -> DataSettings:
    return DataSettings(
        path=path,
        block_size=block_size,
        validation_share=_HELD_OUT[text],
        validation_blocks=validation_blocks,
    )


def prose_folder(folder: Path) -> Path:
    """The folder, with the documents of ``prose`` written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in prose_documents():
        # Documents are read in the order of their names.
        digest = hashlib.sha256(name.encode()).hexdigest()
        (folder / f"{digest}.txt").write_text(document)
    return folder


def prose_documents() -> Iterator[tuple[str, str]]:
    """Names and English texts."""
    from pydoc_data.topics import topics

    yield from ((f"topic {name}", text) for name, text in topics.items())
    for number, file in enumerate(standard_library_files()):
        text = "\n\n".join(_docstrings(file.read_bytes()))
        if text:
            yield f"module {number}", text


def _docstrings(source: bytes) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and samples of broken code
            return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        # Lone surrogates in an example have no bytes.
        if text and text.isascii():
            yield text
