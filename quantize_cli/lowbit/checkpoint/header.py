"""The safetensors header, read with every claim checked against the file, and written.

A file is [8 bytes: n, little endian][n bytes: JSON, may be padded with spaces][data]. The JSON maps each
tensor name to {"dtype", "shape", "data_offsets": [begin, end]} relative to the data, which has neither holes
nor overlaps; `__metadata__` maps strings to strings. (github.com/huggingface/safetensors, README, "Format".)

Reading it here, rather than through the library, allows messages that name the tensor and the remedy, and
plain positioned reads whose memory is ours.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import SourceError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# safetensors name -> (torch name, bytes per element); sub-byte types are absent: see NARROW
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
}
TORCH_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
# floats that only occur in models somebody quantized already -> bits per element
NARROW = {
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
# the library's own limit; a larger number is not a header length
MAX_HEADER_BYTES = 100_000_000
# buffers from this size on are worth huge pages
HUGE_FROM = 1 << 22


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor of a model is, known without reading it.

    dtype: safetensors' name, for example "BF16".  file: path of the file that holds it.
    offset: byte of that file at which it starts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int


@dataclass(frozen=True)
class StridedInfo(TensorInfo):
    """A tensor whose elements need not be adjacent: [offset, offset + span) of the file holds them all."""

    stride: tuple[int, ...] = ()
    span: int = 0


@dataclass(frozen=True)
class Rows:
    """A tensor that is read a range of its first dimension at a time; read: range -> that part."""

    shape: tuple[int, ...]
    read: Callable[[slice], Tensor]


def part_of(info: TensorInfo, rows: slice) -> TensorInfo:
    """Where a range of the first dimension of a tensor is."""
    start, stop, _ = rows.indices(info.shape[0])
    count, size = max(0, stop - start), info.nbytes // max(1, info.shape[0])
    return replace(
        info, shape=(count, *info.shape[1:]), nbytes=count * size, offset=info.offset + start * size
    )


def read_json(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object in path (or in text, which came from it).

    Raises SourceError if it is missing, is not JSON, is no object or gives one name two meanings.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for name, value in pairs:
            if name in known and known[name] != value:
                raise SourceError(f"{path}: {name!r} is there twice with different values; remove one")
            known[name] = value
        return known

    _refuse_special(path)
    try:
        found = json.loads(path.read_bytes() if text is None else text, object_pairs_hook=unique)
    except OSError as e:
        raise SourceError(f"{path}: {e.strerror}; it should be in the model folder") from None
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: not JSON ({e}); download it again") from None
    if not isinstance(found, dict):
        raise SourceError(f"{path}: expected a JSON object, found {type(found).__name__}; download it again")
    return found


def is_special(path: Path) -> bool:
    """Whether it is a pipe or device, whose reader may wait for ever."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _refuse_special(path: Path) -> None:
    if is_special(path):
        raise SourceError(f"{path}: not a regular file; replace it by one")


def read_header(path: Path) -> list[TensorInfo]:
    """Return the tensors of a safetensors file in the order of their data.

    Raises SourceError if the file is cut short, too long, malformed, or if two tensors claim the same bytes.
    """
    _refuse_special(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise SourceError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull`")
            if size < 8:
                raise SourceError(f"{path}: only {size} bytes, cut short; download it again")
            if length > MAX_HEADER_BYTES:
                raise SourceError(
                    f"{path}: not a safetensors file (header of {length} bytes); download it again"
                )
            if length > size - 8:
                raise SourceError(f"{path}: cut short inside its header, at {size} bytes; download it again")
            text = file.read(length)
    except OSError as e:
        raise SourceError(f"{path}: {e.strerror}; check the file") from None
    entries = read_json(path, text)
    entries.pop("__metadata__", None)
    tensors = sorted(
        (_parse_entry(path, name, entry, 8 + length) for name, entry in entries.items()),
        key=lambda t: (t.offset, t.nbytes),
    )
    end, last = 8 + length, "the header"
    for tensor in tensors:
        if tensor.offset < end:
            raise SourceError(f"{path}: {tensor.name} overlaps {last}; download it again")
        if tensor.offset > end:
            raise SourceError(
                f"{path}: {tensor.offset - end} bytes before {tensor.name} are no tensor's; download it again"
            )
        end, last = tensor.offset + tensor.nbytes, tensor.name
        if end > size:
            raise SourceError(
                f"{path}: cut short at {size} bytes: {tensor.name} ends at {end}; download it again"
            )
    if end < size:
        raise SourceError(f"{path}: {size - end} bytes after {last} are no tensor's; download it again")
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Return one header entry; its byte range agrees with its dtype and shape."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        well_formed = isinstance(dtype, str) and isinstance(shape, list)
        well_formed = well_formed and all(type(n) is int and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise SourceError(f"{path}: the header entry of {name} is malformed; download it again")
    bits = NARROW.get(dtype) or 8 * DTYPES.get(dtype, ("", 0))[1]
    if not bits:
        raise SourceError(
            f"{path}: {name} has the unknown dtype {dtype}; save the model in bf16, fp16 or fp32"
        )
    nbytes = -(-math.prod(shape) * bits // 8)
    if end - begin != nbytes:
        raise SourceError(
            f"{path}: {name} is {dtype} {shape}, {nbytes} bytes, but has {end - begin}; download it again"
        )
    return TensorInfo(name, dtype, tuple(shape), nbytes, str(path), data_start + begin)


def entry_text(name: str, dtype: str, shape: Iterable[int], begin: int, end: int) -> str:
    """Return the header's JSON for one tensor, `"name":{...}`."""
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return f"{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"


def header_bytes(entries: Iterable[str], room: int) -> bytes:
    """Return the start of a file, exactly `room` bytes: length, JSON of the entries, spaces."""
    text = ",".join(['"__metadata__":{"format":"pt"}', *entries])
    body = ("{" + text + "}").encode()
    assert len(body) <= room - 8, f"header of {len(body)} bytes in {room - 8}"
    return (room - 8).to_bytes(8, "little") + body.ljust(room - 8)


def pread_into(fd: int, array: np.ndarray, offset: int, path: str | os.PathLike[str]) -> None:
    """Fill a [n] uint8 array from byte offset of fd; without the GIL, in any number of threads at once."""
    buffer, done = array.data, 0
    try:
        while done < len(buffer):
            # Linux moves at most 2 GiB - 4 KiB at a time
            got = os.preadv(fd, [buffer[done : done + (1 << 30)]], offset + done)
            if not got:
                raise SourceError(f"{path}: became shorter while it was read; is something writing to it?")
            done += got
    except OSError as e:
        raise SourceError(f"{path}: {e.strerror} at byte {offset + done}; check the disk") from None


def allocate(nbytes: int) -> Tensor:
    """Return [nbytes] uint8 for a read to fill.

    Large buffers come in huge pages where the system has them: faulting in fresh 4 KiB pages costs three
    times as much as the copy from the page cache.
    """
    import torch

    if nbytes < HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # EINVAL from kernels built without them
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
