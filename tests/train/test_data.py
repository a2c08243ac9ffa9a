"""Text to blocks: packing, splits, order, and what is refused."""

import json
from dataclasses import replace
from itertools import chain

import datasets
import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from lrmoe.training.data import (
    BYTE_SEPARATOR,
    RankBatches,
    load_text,
    standard_library_files,
)
from lrmoe.training.settings import DataSettings

ROWS = [{"text": f"row {i} " * 20, "n": i} for i in range(40)]


def stream(blocks):
    return torch.cat([item["input_ids"] for item in blocks])


def test_default_text_is_the_standard_library():
    files = standard_library_files()
    names = [f.name for f in files]
    assert "argparse.py" in names
    assert not any("site-packages" in f.parts or "test" in f.parts for f in files)
    data = load_text(DataSettings(block_size=512))
    assert data.vocabulary == 256
    assert 5e6 < len(data.train) * 512 < 40e6
    assert bytes(stream(data.train)[:1000].tolist()) in b"\0".join(
        f.read_bytes() for f in files[:3]
    )


def test_documents_are_packed_one_after_another(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 9)
    data = load_text(DataSettings(path=str(tmp_path), block_size=10, validation_share=0.25))
    closed = [[ord(str(i))] * 9 + [BYTE_SEPARATOR] for i in range(4)]
    assert stream(data.train).tolist() == list(chain(*closed[:3]))
    assert stream(data.validation).tolist() == closed[3]
    item = data.train[1]
    assert item["input_ids"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"])


def test_a_single_document_is_cut(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(32, 127)) * 20)
    data = load_text(DataSettings(path=str(file), block_size=10, validation_share=0.1))
    assert len(data.train) == 171
    assert len(data.validation) == 19


def test_evaluation_blocks_are_spread_evenly(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("".join(chr(65 + i // 10) for i in range(260)))
    settings = DataSettings(
        path=str(tmp_path), block_size=10, validation_share=0.5, validation_blocks=4
    )
    firsts = [chr(item["input_ids"][0]) for item in load_text(settings).validation]
    assert firsts == ["A", "G", "N", "T"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "saved"])
def test_every_kind_of_table_gives_the_same_blocks(kind, tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        table.to_parquet(str(file))
    elif kind == "arrow":
        with datasets.arrow_writer.ArrowWriter(path=str(file)) as writer:
            writer.write_table(table.data.table)
            writer.finalize()
    else:
        table.save_to_disk(str(file))
    data = load_text(DataSettings(path=str(file), block_size=16))
    text = "".join(row["text"] + "\0" for row in ROWS[:38]).encode()
    assert bytes(stream(data.train).tolist()) == text[: len(text) // 16 * 16]


def test_a_tokenizer_directory(tmp_path):
    vocabulary = {"[UNK]": 0, "</s>": 1, **{f"w{i}": i + 2 for i in range(300)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="[UNK]"
    ).save_pretrained(tmp_path / "tokenizer")
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(2):
        (texts / f"{i}.txt").write_text("w0 w299 w5 " * 3)
    settings = DataSettings(
        path=str(texts), tokenizer=str(tmp_path / "tokenizer"), block_size=5, validation_share=0.5
    )
    data = load_text(settings)
    assert data.vocabulary == 302
    assert stream(data.train).tolist() == [2, 301, 7] * 3 + [1]


def test_the_fingerprint_follows_the_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("abc " * 200)
    settings = DataSettings(path=str(file), block_size=8)
    before = load_text(settings).fingerprint
    assert load_text(settings).fingerprint == before
    file.write_text("abd " + "abc " * 199)
    assert load_text(settings).fingerprint != before
    file.write_text("abc " * 200)
    assert load_text(replace(settings, validation_share=0.5)).fingerprint != before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"path": "nowhere"}, "data.path='nowhere': does not exist"),
        ({"path": "{tmp}/empty"}, "no files of a known kind; allowed are .txt"),
        ({"path": "{tmp}/mixed"}, "files of several kinds"),
        ({"path": "{tmp}/rows.jsonl", "text_field": "body"}, "the columns of"),
        ({"path": "{tmp}/rows.jsonl", "text_field": "n"}, "a value is of type int"),
        ({"path": "{tmp}/short.txt"}, "has only"),
        ({"path": "{tmp}/short.txt", "tokenizer": "gpt2"}, "must be a directory"),
    ],
)
def test_bad_text_is_refused_by_name(changes, sentence, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/a.txt").write_text("a")
    (tmp_path / "mixed/b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    changes = {k: v.format(tmp=tmp_path) for k, v in changes.items()}
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        load_text(DataSettings(**changes))


def batches(rank, world_size, accumulation=1, batch_size=2, seed=0, epoch=0):
    sampler = RankBatches(
        50,
        batch_size=batch_size,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_step_takes_the_same_blocks_however_ranks_share_them():
    def steps(world_size, accumulation):
        per_rank = [batches(r, world_size, accumulation) for r in range(world_size)]
        count = len(per_rank[0]) // accumulation
        return [
            sorted(
                i
                for rank in per_rank
                for batch in rank[s * accumulation : (s + 1) * accumulation]
                for i in batch
            )
            for s in range(count)
        ]

    assert steps(4, 1) == steps(2, 2) == steps(1, 4)
    seen = [i for step in steps(4, 1) for i in step]
    assert len(seen) == len(set(seen)) == 48


def test_the_order_follows_seed_and_epoch():
    assert batches(0, 2) == batches(0, 2)
    assert batches(0, 2) != batches(0, 2, seed=1)
    assert batches(0, 2) != batches(0, 2, epoch=1)
    assert np.array(batches(0, 2)).shape == (12, 2)


def test_too_little_text_for_a_step_is_refused():
    with pytest.raises(ValueError, match="a step takes 64 blocks"):
        batches(0, 4, accumulation=4, batch_size=4)
