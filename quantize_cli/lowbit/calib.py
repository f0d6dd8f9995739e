"""Calibration text: from a file, a dataset or the text shipped in the package to rows of token ids.

Documents are tokenized, joined with the end-of-text token between them and cut into rows that are spread
evenly over the whole; no row is padded, so that every token that enters a Hessian is a real one.
"""

from __future__ import annotations

import bz2
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import CalibrationError, SourceError, one_line
from lowbit.plan import text_config

if TYPE_CHECKING:
    from torch import Tensor

SHIPPED = "calibration.txt.bz2"
FILES = (".txt", ".jsonl", ".json", ".parquet")

# columns that hold what a model would read, the first that exists is taken
TEXT_COLUMNS = ("messages", "conversations", "conversation", "text", "content", "document", "prompt")
# how ShareGPT-like files spell the roles
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}

# fewer tokens than this say nothing about a layer
TOKEN_FLOOR = 64

# text read for each token wanted: rows are spread over it, and a token is seldom longer than 8 characters
_CHARS_PER_TOKEN = 16
_CHARS_AT_LEAST = 1 << 18


@dataclass(frozen=True)
class CalibrationRows:
    """Token ids to calibrate on.

    rows: [R, T] int64.  asked: the number of tokens wanted.  origin: where the text is from.
    notes: shortages and caps, for the user.
    """

    rows: Tensor
    asked: int
    origin: str
    notes: tuple[str, ...] = ()

    @property
    def got(self) -> int:
        return self.rows.numel()

    def to_json(self) -> dict[str, Any]:
        """What the manifest says of it."""
        count, length = self.rows.shape
        return {
            "origin": self.origin,
            "rows": count,
            "seqlen": length,
            "asked_tokens": self.asked,
            "tokens": self.got,
        }


def calibration_size(
    samples: int | None, seqlen: int | None, device_type: str, widest: int
) -> tuple[int, int]:
    """Rows and tokens of a row: as given, or what suits the device.

    A GPU sees 128 rows of 2048 in seconds. A CPU takes minutes for 8 rows of 512, and more only where the
    widest input of a layer asks for them: a Hessian of fewer tokens than inputs says little.
    """
    length = seqlen or (2048 if device_type == "cuda" else 512)
    rows = 128 if device_type == "cuda" else max(8, -(-2 * widest // length))
    return samples or rows, length


def load_rows(
    spec: str | None,
    tokenizer_folder: Path,
    *,
    samples: int,
    seqlen: int,
    seed: int,
    config: dict[str, Any],
    strict: bool = False,
    trust_remote_code: bool = False,
) -> CalibrationRows:
    """Return `samples` rows of `seqlen` tokens of what spec names, fewer if it holds fewer.

    spec: a .txt, .jsonl, .json or .parquet file, a local dataset folder, or the id of a dataset, each with
    `:split:column` after it where needed; None is the text in the package. A local path wins over an id.
    config: config.json of the model, for its longest sequence and its vocabulary.
    Raises CalibrationError for what is missing, unreadable, empty or too short; with strict also for less
    than was asked.
    """
    if samples < 1 or seqlen < 2:
        raise CalibrationError(f"--samples {samples} --seqlen {seqlen}: use at least 1 sample of 2 tokens")
    notes = []
    limit = _max_positions(config)
    if limit is not None and seqlen > limit:
        notes.append(
            f"calibration: seqlen {seqlen} is more than the model's {limit} positions; rows of {limit}"
        )
        seqlen = limit
    asked = samples * seqlen
    origin = spec or "the text shipped with lowbit"
    documents = _documents(spec)
    try:
        tokenizer = load_tokenizer(tokenizer_folder, trust_remote_code)
    except SourceError as e:
        raise CalibrationError(f"{e}; calibration needs one, --method rtn or hqq does not") from None
    texts = _texts(documents, tokenizer, origin)
    ids = _tokenize(_enough(texts, asked, origin), tokenizer)
    if len(ids) < TOKEN_FLOOR:
        raise CalibrationError(
            f"{origin}: {len(ids)} tokens of text; calibration needs at least {TOKEN_FLOOR}"
        )
    vocabulary = text_config(config).get("vocab_size")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise CalibrationError(
            f"{tokenizer_folder}: the tokenizer gives id {max(ids)}, the model has {vocabulary} tokens; "
            "it belongs to another model"
        )
    rows = _cut(ids, samples, min(seqlen, len(ids)), seed, _first_token(tokenizer))
    if rows.numel() < asked:
        shortage = (
            f"calibration: asked for {samples} rows of {seqlen} = {asked} tokens, got {rows.shape[0]} of "
            f"{rows.shape[1]} = {rows.numel()} from {origin}"
        )
        if strict:
            raise CalibrationError(f"{shortage}; give more text, lower --samples or drop --strict")
        notes.append(shortage)
    return CalibrationRows(rows, asked, origin, tuple(notes))


def _max_positions(config: dict[str, Any]) -> int | None:
    text = text_config(config)
    keys = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    return next((text[key] for key in keys if isinstance(text.get(key), int)), None)


# ---- documents: strings, or chats as lists of messages


def _documents(spec: str | None) -> Iterator[Any]:
    """The documents that spec names, lazily; what is missing is refused here."""
    if spec is None:
        data = resources.files("lowbit").joinpath("data").joinpath(SHIPPED).read_bytes()
        return iter([bz2.decompress(data).decode("utf-8")])
    path, split, column = _split_spec(spec)
    if path.is_dir():
        return _dataset(str(path), spec, split, column)
    if path.is_file():
        return _file(path, column or split)
    head = spec.partition(":")[0]
    looks_local = path.suffix in FILES or head.startswith(("/", ".", "~")) or head.count("/") != 1
    if looks_local:
        raise CalibrationError(
            f"--calib {spec}: no such file; give a {', '.join(FILES)} file, a dataset's folder or its id"
        )
    return _dataset(head, spec, split, column)


def _split_spec(spec: str) -> tuple[Path, str | None, str | None]:
    """Path (or id), split and column; a path that exists as it is written has no split."""
    whole = Path(spec).expanduser()
    if whole.exists():
        return whole, None, None
    head, *rest = spec.rsplit(":", 2) if spec.count(":") > 1 else spec.split(":")
    split, column = [part or None for part in [*rest, "", ""][:2]]
    return Path(head).expanduser(), split, column


def _file(path: Path, column: str | None) -> Iterator[Any]:
    if path.suffix == ".parquet":
        return _values(_parquet_records(path), column, str(path))
    if path.suffix in (".jsonl", ".json"):
        return _values(_json_records(path), column, str(path))
    return iter([_read_text(path)])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise CalibrationError(f"{path}: not UTF-8 text (byte {e.start}); convert it first") from None
    except OSError as e:
        raise CalibrationError(f"{path}: {e.strerror or e}") from None


def _json_records(path: Path) -> Iterator[Any]:
    text = _read_text(path)
    if path.suffix == ".json":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if isinstance(whole, list):
            yield from whole
            return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            # also numbers and nesting beyond what Python reads
            except (ValueError, RecursionError) as e:
                reason = getattr(e, "msg", None) or e
                raise CalibrationError(f"{path}:{number}: not JSON: {reason}") from None


def _parquet_records(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        for batch in ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as e:
        raise CalibrationError(f"{path}: not a readable Parquet file: {one_line(e, None)}") from None


def _dataset(name: str, spec: str, split: str | None, column: str | None) -> Iterator[Any]:
    """Records of a local dataset folder, or of an id on the Hub, streamed."""
    from datasets import load_dataset, load_from_disk

    local = Path(name).is_dir()
    try:
        if local and any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = load_from_disk(name)
            data = found[split or next(iter(found))] if isinstance(found, dict) else found
        else:
            data = load_dataset(name, split=split or "train", streaming=True)
        records = iter(data)
        first = list(islice(records, 1))
    except Exception as e:
        # datasets raises errors of many libraries; each means that the data could not be had
        reason = one_line(e, 300)
        raise CalibrationError(f"--calib {spec}: {reason or type(e).__name__}") from None
    return _values(chain(first, records), column, spec)


def _values(records: Iterator[Any], column: str | None, origin: str) -> Iterator[Any]:
    """The document in each record."""
    for record in records:
        if isinstance(record, str | list):
            yield record
            continue
        if not isinstance(record, dict):
            raise CalibrationError(
                f"{origin}: expected objects with a text column, found {type(record).__name__}"
            )
        name = column or next((c for c in TEXT_COLUMNS if record.get(c)), None)
        if name is None and column is None and any(c in record for c in TEXT_COLUMNS):
            # the record is there and empty
            continue
        if name not in record:
            wanted = f"no column {name!r}" if name else f"none of the columns {', '.join(TEXT_COLUMNS)}"
            raise CalibrationError(
                f"{origin}: {wanted}; it has {', '.join(map(str, record))}: name one as {origin}:train:COLUMN"
            )
        yield record[name]


def _texts(documents: Iterator[Any], tokenizer: Any, origin: str) -> Iterator[str]:
    """Documents as text: chats through the tokenizer's template; blank ones are left out."""
    for document in documents:
        if isinstance(document, list):
            document = _chat_text(document, tokenizer, origin)
        if document is not None and not isinstance(document, str):
            raise CalibrationError(f"{origin}: expected text or messages, found {type(document).__name__}")
        if document and not document.isspace():
            yield document


def _chat_text(messages: list[Any], tokenizer: Any, origin: str) -> str:
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            raise CalibrationError(
                f"{origin}: a message is {type(message).__name__}, expected role and content"
            )
        role = message.get("role") or message.get("from")
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise CalibrationError(f"{origin}: a message without role and content: {str(message)[:80]}")
        turns.append({"role": ROLES.get(role, role), "content": content})
    if not any(turn["content"].strip() for turn in turns):
        return ""
    if not tokenizer.chat_template:
        raise CalibrationError(f"{origin}: chats need a chat template, and this model's tokenizer has none")
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as e:
        # templates raise what they like
        raise CalibrationError(f"{origin}: the chat template refuses a chat: {one_line(e, None)}") from None


def _enough(texts: Iterator[str], tokens: int, origin: str) -> list[str]:
    """Texts, as many as rows can be spread over; a longer one gives pieces from all over it."""
    budget = max(_CHARS_AT_LEAST, tokens * _CHARS_PER_TOKEN)
    taken: list[str] = []
    left = budget
    for text in texts:
        if len(text) > left:
            text = _thin(text, left)
        taken.append(text)
        left -= len(text)
        if left <= 0:
            break
    if not taken:
        raise CalibrationError(f"{origin}: no text in it (every document is blank)")
    return taken


def _thin(text: str, chars: int, pieces: int = 64) -> str:
    """`chars` characters of text in pieces that are spread evenly over it."""
    size = max(1, chars // pieces)
    step = len(text) // pieces
    return "\n".join(text[i * step : i * step + size] for i in range(pieces))


# ---- tokens


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder; SourceError if there is none that can be used."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError("model_max_length is not a number")
    # a missing file, a value or a class that transformers does not know, or custom code without the flag
    except Exception as e:
        reason = one_line(e)
        raise SourceError(f"{folder}: no usable tokenizer ({reason})") from None
    return tokenizer


def _tokenize(texts: Iterable[str], tokenizer: Any) -> list[int]:
    """All documents in one sequence, the end-of-text token between them."""
    ids: list[int] = []
    for text in texts:
        if ids and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _first_token(tokenizer: Any) -> int | None:
    """The token with which this tokenizer begins every text, None if it begins with the text."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    return tokenizer.bos_token_id if ids and ids[0] == tokenizer.bos_token_id else None


def _cut(ids: list[int], samples: int, seqlen: int, seed: int, first: int | None) -> Tensor:
    """Rows [R, T], one from each of R equal stretches of the sequence, at a place that the seed says."""
    import torch

    body = seqlen if first is None else seqlen - 1
    count = min(samples, max(1, len(ids) // body))
    stretch = len(ids) // count
    draw = random.Random(seed)
    starts = [i * stretch + draw.randrange(stretch - body + 1) for i in range(count)]
    head = [] if first is None else [first]
    return torch.tensor([head + ids[start : start + body] for start in starts], dtype=torch.int64)
