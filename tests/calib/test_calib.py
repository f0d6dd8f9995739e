"""Calibration rows: from every kind of text, without padding, refused before a weight is read (CASES B)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lowbit import calib
from lowbit.calib import CalibrationRows, load_rows
from lowbit.errors import CalibrationError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "while",
    "seven",
    "wise",
    "owls",
    "watch",
]
CHAT = [{"role": "user", "content": "where are the owls"}, {"role": "assistant", "content": "in the old oak"}]
CONFIG = {"vocab_size": 512, "max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def folder(build_llama: Callable[..., Path]) -> Path:
    return build_llama()


def prose(words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def rows_of(folder: Path, spec: str | Path | None, **options: Any) -> CalibrationRows:
    wanted: dict[str, Any] = {"samples": 8, "seqlen": 64, "seed": 0, "config": CONFIG} | options
    return load_rows(None if spec is None else str(spec), folder, **wanted)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(path: Path, records: list[Any]) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def parquet(path: Path, records: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def saved_dataset(path: Path, records: list[Any]) -> Path:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(records)}).save_to_disk(str(path))
    return path


def folder_of_files(path: Path, records: list[Any]) -> Path:
    path.mkdir()
    jsonl(path / "train.jsonl", records)
    return path


DOCUMENTS = [{"text": prose(60, seed)} for seed in range(20)]
KINDS: dict[str, Callable[[Path], Path]] = {
    "txt": lambda tmp: write(tmp / "a.txt", "\n\n".join(d["text"] for d in DOCUMENTS)),
    "jsonl": lambda tmp: jsonl(tmp / "a.jsonl", DOCUMENTS),
    "json": lambda tmp: write(tmp / "a.json", json.dumps(DOCUMENTS)),
    "parquet": lambda tmp: parquet(tmp / "a.parquet", DOCUMENTS),
    "saved dataset": lambda tmp: saved_dataset(tmp / "saved", DOCUMENTS),
    "dataset folder": lambda tmp: folder_of_files(tmp / "files", DOCUMENTS),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_text_gives_full_rows(kind: str, folder: Path, tmp_path: Path) -> None:
    found = rows_of(folder, KINDS[kind](tmp_path))
    assert found.rows.shape == (8, 64)
    assert found.rows.dtype == torch.int64
    assert (found.asked, found.got, found.notes) == (512, 512, ())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # what the rows say is a stretch of the text: documents joined by </s>, no other special token, no padding
    whole = (
        "</s>".join(d["text"] for d in DOCUMENTS)
        if kind != "txt"
        else "\n\n".join(d["text"] for d in DOCUMENTS)
    )
    for row in found.rows:
        assert tokenizer.decode(row) in whole


def test_the_text_in_the_package_is_enough_for_the_defaults(folder: Path) -> None:
    found = rows_of(folder, None, samples=128, seqlen=2048)
    assert found.rows.shape == (128, 2048)
    assert not found.notes
    assert len({tuple(row.tolist()) for row in found.rows}) == 128
    assert (Path(calib.__file__).parent / "data/LICENSES.txt").is_file()


def test_rows_are_spread_over_the_whole_text(folder: Path, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", " ".join(f"{i:05d}" for i in range(20_000)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for seed in range(3):
        found = rows_of(folder, text, seed=seed)
        firsts = [int(tokenizer.decode(row).split()[1]) for row in found.rows]
        assert firsts == sorted(firsts)
        # one in each eighth
        assert [first * 8 // 20_000 for first in firsts] == list(range(8))


def test_a_text_far_too_long_is_read_all_over_and_not_tokenized_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calib, "_CHARS_AT_LEAST", 1000)
    monkeypatch.setattr(calib, "_CHARS_PER_TOKEN", 16)
    text = write(tmp_path / "a.txt", " ".join(f"{i:05d}" for i in range(200_000)))
    lengths = []
    tokenize = calib._tokenize
    monkeypatch.setattr(
        calib, "_tokenize", lambda texts, t: lengths.extend(map(len, texts)) or tokenize(texts, t)
    )
    found = rows_of(folder, text)
    assert sum(lengths) <= 16 * 512 + 64
    tokenizer = AutoTokenizer.from_pretrained(folder)
    firsts = [int(tokenizer.decode(row).split()[1]) for row in found.rows]
    assert firsts[0] < 50_000
    assert firsts[-1] > 150_000


def test_short_texts_are_packed(folder: Path, tmp_path: Path) -> None:
    """CASES 12: 32 texts of about 10 tokens, seqlen 64."""
    found = rows_of(folder, jsonl(tmp_path / "a.jsonl", [{"text": prose(10, i)} for i in range(32)]))
    tokens = len(AutoTokenizer.from_pretrained(folder)("".join(prose(10, i) for i in range(32)))["input_ids"])
    assert found.rows.shape == (min(8, (tokens + 31) // 64), 64)


def test_a_shortage_is_told_and_strict_refuses_it(folder: Path, tmp_path: Path) -> None:
    """CASES 13."""
    file = write(tmp_path / "a.txt", prose(150))
    found = rows_of(folder, file, samples=128)
    assert found.got == found.rows.numel() < found.asked == 128 * 64
    (note,) = found.notes
    assert f"{128 * 64} tokens" in note
    assert str(found.got) in note
    with pytest.raises(CalibrationError, match=r"asked for 128 rows .*--strict"):
        rows_of(folder, file, samples=128, strict=True)


def test_a_text_shorter_than_a_row_is_one_short_row(folder: Path, tmp_path: Path) -> None:
    found = rows_of(folder, write(tmp_path / "a.txt", prose(100)), seqlen=2048)
    assert found.rows.shape[0] == 1
    assert 64 <= found.rows.shape[1] < 2048
    assert found.notes


def test_seqlen_is_capped_at_the_models_positions(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", prose(2000))
    found = rows_of(folder, file, seqlen=64, config=CONFIG | {"max_position_embeddings": 32})
    assert found.rows.shape == (8, 32)
    assert any("32 positions" in note for note in found.notes)


EMPTY = {
    "empty file": ("a.txt", ""),
    "blank lines": ("a.txt", "\n \n\t\n"),
    "no records": ("a.jsonl", ""),
    "empty texts": ("a.jsonl", '{"text": ""}\n{"text": "  "}\n'),
    "null texts": ("a.jsonl", '{"text": null}\n'),
    "empty chats": ("a.jsonl", '{"messages": [{"role": "user", "content": " "}]}\n'),
    "too short": ("a.txt", "four words are few"),
}


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_nothing_to_calibrate_on_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    """CASES 14 and the floor of 12."""
    name, text = EMPTY[case]
    with pytest.raises(CalibrationError, match=r"no text in it|needs at least 64"):
        rows_of(folder, write(tmp_path / name, text))


DAMAGED = {
    "half a line of JSON": (
        lambda tmp: write(tmp / "a.jsonl", '{"text": "a"}\n{"te'),
        r"a\.jsonl:2: not JSON",
    ),
    "nesting without an end": (lambda tmp: write(tmp / "a.jsonl", "[" * 100_000), r"a\.jsonl:1: not JSON"),
    "a number of 5000 digits": (lambda tmp: write(tmp / "a.jsonl", "9" * 5000), r"a\.jsonl:1: not JSON"),
    "a number": (lambda tmp: write(tmp / "a.jsonl", "3\n"), "expected objects"),
    "no such column": (lambda tmp: jsonl(tmp / "a.jsonl", [{"body": "x"}]), "it has body"),
    "not Parquet": (lambda tmp: write(tmp / "a.parquet", "text"), "not a readable Parquet file"),
    "Latin-1": (lambda tmp: (tmp / "a.txt").write_bytes(b"caf\xe9") and tmp / "a.txt", r"not UTF-8 .*byte 3"),
    "a chat without content": (
        lambda tmp: jsonl(tmp / "a.jsonl", [{"messages": [{"role": "user"}]}]),
        "content",
    ),
    "a column of numbers": (lambda tmp: jsonl(tmp / "a.jsonl", [{"text": 3}]), "expected text or messages"),
}


@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_damaged_files_are_named(case: str, folder: Path, tmp_path: Path) -> None:
    make, message = DAMAGED[case]
    with pytest.raises(CalibrationError, match=message) as found:
        rows_of(folder, make(tmp_path))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "spec", ["none.txt", "./none", "/none/at/all", "~/none.jsonl", "a/b/c", "none", "none.parquet:train:text"]
)
def test_a_missing_path_is_no_dataset_id(
    spec: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 18: said at once, without the network (which conftest would refuse with another message)."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibrationError, match="no such file"):
        rows_of(folder, spec)


def test_a_local_path_wins_over_a_dataset_id(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    folder_of_files(tmp_path / "org/name", DOCUMENTS)
    monkeypatch.chdir(tmp_path)
    assert rows_of(folder, "org/name").got == 512


def test_split_and_column_are_chosen_after_the_name(folder: Path, tmp_path: Path) -> None:
    records = [{"text": "wrong " * 50, "body": prose(60, i)} for i in range(20)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for spec in (
        f"{saved_dataset(tmp_path / 'saved', records)}:train:body",
        f"{parquet(tmp_path / 'a.parquet', records)}:train:body",
        f"{jsonl(tmp_path / 'a.jsonl', records)}:body",
    ):
        assert all("wrong" not in tokenizer.decode(row) for row in rows_of(folder, spec).rows)
    with pytest.raises(CalibrationError, match=r"nosplit"):
        rows_of(folder, f"{tmp_path / 'saved'}:nosplit")


@pytest.mark.parametrize("spelling", ["messages", "conversations"])
def test_chats_go_through_the_template(spelling: str, folder: Path, tmp_path: Path) -> None:
    chat: list[dict[str, str]] = CHAT
    if spelling == "conversations":
        chat = [
            {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT
        ]
    found = rows_of(folder, jsonl(tmp_path / "a.jsonl", [{spelling: chat}] * 40))
    text = AutoTokenizer.from_pretrained(folder).decode(found.rows[0])
    assert "<s>user: where are the owls</s><s>assistant: in the old oak</s>" in text


def test_chats_need_a_template(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(CalibrationError, match="has none"):
        rows_of(plain, jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}]))


def test_a_model_without_a_tokenizer_is_told_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no usable tokenizer"):
        rows_of(tmp_path, write(tmp_path / "a.txt", prose(500)))


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="belongs to another model"):
        rows_of(folder, write(tmp_path / "a.txt", prose(500)), config={"vocab_size": 20})


def test_a_tokenizer_that_begins_texts_begins_rows(folder: Path, tmp_path: Path) -> None:
    begins = tmp_path / "begins"
    shutil.copytree(folder, begins)
    backend = json.loads((begins / "tokenizer.json").read_text())
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (begins / "tokenizer.json").write_text(json.dumps(backend))
    rows = rows_of(begins, write(tmp_path / "a.txt", prose(3000))).rows
    assert rows.shape == (8, 64)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:] != 0).all()


def test_the_same_seed_gives_the_same_rows_and_leaves_the_callers_alone(folder: Path, tmp_path: Path) -> None:
    """CASES 21."""
    file = write(tmp_path / "a.txt", prose(5000))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first, again, other = (rows_of(folder, file, seed=seed).rows for seed in (1, 1, 2))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert before == after


def test_impossible_sizes_are_refused(folder: Path) -> None:
    with pytest.raises(CalibrationError, match="--samples 0"):
        rows_of(folder, None, samples=0)
