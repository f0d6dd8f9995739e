"""The output folder: written beside its final place, complete or not there at all, resumable after any kill.

    .OUT.lowbit-staging/ledger     which units are written, and where; its first line is the plan key
    .OUT.lowbit-staging/files/     what becomes OUT
    .OUT.lowbit-staging/odd        tensors whose size is no multiple of 8
    .OUT.lowbit-staging/old/       the folder that --overwrite replaces, between two renames

Tensors are appended to the current shard as they come, whatever they turn out to be: a solver may still
change a layer's dtype or leave it as it is, so names and offsets are only known when a shard is full. Its
header comes first in the file, hence room for it is kept: as much as the announced units are likely to need,
and when the room is used up the shard counts as full. So nothing is ever moved or written twice, and any
announcement, or none, gives a valid checkpoint. The unused rest is spaces, which the format allows.

Every tensor starts at a multiple of 8, and the format allows no holes: tensors of other sizes wait in `odd`
and end the last shard, largest elements first, so that they are aligned to their elements.

The SHA-256 of a shard is computed when it is full, while the next one fills: its header is hashed first and
known last. The last shard is hashed while the disk takes it in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.header import DTYPES, TORCH_NAMES, entry_text, header_bytes
from lowbit.checkpoint.ledger import Ledger, read_ledger
from lowbit.decode import file_checksum
from lowbit.errors import OutputError, SourceError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# What a shard holds at least and at most; sixteen in between. The last one is hashed when all else is done.
LEAST_SHARD, MOST_SHARD, SHARDS = 1_000_000_000, 5_000_000_000, 16
# room for a header: for each announced unit four tensors, of ~150 bytes and the unit's name; but no more than
# some 25 000 tensors need
UNIT_ROOM, MOST_ROOM, UNANNOUNCED_ROOM = 600, 1 << 22, 1 << 20
# an offset no file reaches: entries with it are as long as entries get
FAR = 10**15
COPY_BYTES = 1 << 22
# --overwrite replaces a folder that holds one of these, or a safetensors file
CHECKPOINT = ("config.json", "lowbit.json")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Stored:
    """A tensor in a data file: bytes [begin, end), counted from the end of the header's room."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def entry_size(self) -> int:
        """No less than what the header needs for it, wherever it ends up."""
        return len(entry_text(self.name, self.dtype, self.shape, FAR, FAR)) + 1


@dataclass
class DataFile:
    """A shard, or `odd`: `room` bytes for the header (0 in `odd`), then tensors, the last one up to `end`."""

    path: Path
    fd: int
    room: int
    tensors: list[Stored] = field(default_factory=list)
    end: int = 0
    header_size: int = 64

    def append(self, name: str, dtype: str, shape: Sequence[int], data: np.ndarray) -> Stored:
        """Write a tensor's [n] uint8 after the last one."""
        buffer, at = data.data, self.room + self.end
        while len(buffer):
            done = os.pwrite(self.fd, buffer[: 1 << 30], at)
            buffer, at = buffer[done:], at + done
        stored = Stored(name, dtype, tuple(shape), self.end, self.end + len(data))
        self.add(stored)
        return stored

    def add(self, stored: Stored) -> None:
        """Count a tensor that is in the file."""
        self.tensors.append(stored)
        self.end = stored.end
        self.header_size += stored.entry_size

    def write_header(self) -> None:
        entries = (entry_text(t.name, t.dtype, t.shape, t.begin, t.end) for t in self.tensors)
        os.pwrite(self.fd, header_bytes(entries, self.room), 0)

    def sha256(self) -> str:
        digest, at = hashlib.sha256(), 0
        while block := os.pread(self.fd, COPY_BYTES, at):
            digest.update(block)
            at += len(block)
        return digest.hexdigest()


class Sink:
    """Writes one checkpoint. Entering checks the output folder and finds what a killed run left; leaving
    without `finish` keeps what is written for the next run.

    done: unit -> record, of this run and of the one it continues.
    """

    def __init__(
        self,
        out: Path,
        plan_key: Mapping[str, Any],
        *,
        source: Path | None = None,
        inputs: Sequence[Path] = (),
        units: Sequence[str] = (),
        overwrite: bool = False,
        resume: bool = True,
        expected_bytes: int = 0,
        shard_bytes: int | None = None,
    ) -> None:
        """Touch nothing yet.

        plan_key: all that decides the bytes, as JSON; a killed run continues only under the same.
        source: the model's folder; copy_file keeps paths inside it.  inputs: more files that must survive.
        units: what will be written, to size headers.  expected_bytes: what must be free on the disk.
        shard_bytes: the most that a shard holds; by expected_bytes if None.
        """
        with _explained(out):
            self.out = Path(os.path.realpath(out))
        self.staging = self.out.parent / f".{self.out.name}.lowbit-staging"
        self.done: dict[str, Any] = {}
        self._files, self._old = self.staging / "files", self.staging / "old"
        self._key = json.loads(json.dumps(plan_key))
        self._source = Path(os.path.realpath(source)) if source else None
        self._inputs = inputs
        self._overwrite, self._resume = overwrite, resume
        self._expected_bytes = expected_bytes
        self._shard_bytes = shard_bytes or min(MOST_SHARD, max(LEAST_SHARD, expected_bytes // SHARDS))
        self._room = _room(units)
        self._shards: list[DataFile] = []
        self._names: set[str] = set()
        self._file_hashes: dict[str, str] = {}
        self._shard_hashes: list[Future[str]] = []
        self._hashers = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Sink:
        try:
            with _explained(self.out):
                self._check_place()
                self._lock()
                self._restore_old()
                self._check_out()
                self._open_files()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    # What the pipeline calls.

    def write(self, unit: str, tensors: Mapping[str, Tensor], record: Any) -> None:
        """Append the tensors of one unit and record it; after a kill all of them are there, or none.

        record: JSON, kept in `done`.  Raises OutputError if the disk is full; the run can then be continued.
        """
        assert unit not in self.done, f"{unit} is written already"
        assert self._names.isdisjoint(tensors), f"{unit}: a tensor of that name is written already"
        arrays = {name: _as_bytes(tensor) for name, tensor in tensors.items()}
        even = [name for name, data in arrays.items() if len(data) % 8 == 0]
        with _explained(self.out):
            if even:
                self._make_room({name: tensors[name] for name in even})
            files = {"even": self._shards[-1] if self._shards else self._odd, "odd": self._odd}
            stored: dict[str, list[Stored]] = {kind: [] for kind in files}
            try:
                for name, tensor in tensors.items():
                    kind = "even" if name in even else "odd"
                    stored[kind].append(files[kind].append(name, _dtype(tensor), tensor.shape, arrays[name]))
            except OSError:
                # gives the ledger the room to commit the units before this one
                for kind, file in files.items():
                    os.ftruncate(file.fd, file.room + (stored[kind][0].begin if stored[kind] else file.end))
                raise
            entry = {
                "unit": unit,
                "record": record,
                "shard": [len(self._shards), files["even"].room],
                **{kind: [asdict(place) for place in places] for kind, places in stored.items()},
            }
            self._ledger.append(entry, {file.fd for file in files.values()})
        self._names |= set(tensors)
        self.done[unit] = record

    def copy_file(self, path: Path) -> None:
        """Copy a file byte for byte, under its path inside the source folder, or else its name."""
        whole = path.parent.resolve() / path.name
        inside = self._source is not None and whole.is_relative_to(self._source)
        name = whole.relative_to(self._source).as_posix() if self._source and inside else path.name
        try:
            file = path.open("rb")
        except OSError as e:
            raise SourceError(f"{path}: {e.strerror}; check its permissions") from None
        with file:
            self._write_file(name, iter(lambda: file.read(COPY_BYTES), b""))

    def write_text(self, name: str, text: str, *, replaceable: bool = False) -> None:
        """Write a UTF-8 file; what is not UTF-8, from a file name, appears escaped.

        replaceable: it may be written anew in the finished folder, so that its hash is nobody's promise.
        """
        self._write_file(name, [text.encode("utf-8", "backslashreplace")])
        if replaceable:
            del self._file_hashes[name]

    def finish(self, manifest: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Complete the files and put them in place; return name -> SHA-256 of every file.

        manifest: written as lowbit.json, with the hashes of all other files as ["output"]["files"] and the
        checksums of those that hold no tensors as ["output"]["checksums"].
        """
        with _explained(self.out):
            self._ledger.flush()
            names = self._finish_shards()
            _sync_tree(self._files)
            self._file_hashes |= {
                name: future.result() for name, future in zip(names, self._shard_hashes, strict=True)
            }
            if manifest is not None:
                output = {
                    "output": {
                        "files": dict(sorted(self._file_hashes.items())),
                        "checksums": self._checksums(),
                    }
                }
                self.write_text("lowbit.json", json.dumps({**manifest, **output}, indent=2))
                _sync_tree(self._files)
            if self.out.exists():
                self.out.rename(self._old)
            self._files.rename(self.out)
            _sync(self.out.parent)
        return dict(sorted(self._file_hashes.items()))

    def _checksums(self) -> dict[str, str]:
        names = sorted(name for name in self._file_hashes if not name.endswith(".safetensors"))
        return {name: file_checksum(self._files / name) for name in names}

    # Entering.

    def _check_place(self) -> None:
        """Refuse an output folder that cannot be made, or that would take the source with it."""
        parent = self.out.parent
        if not parent.is_dir():
            raise OutputError(f"{self.out}: the folder {parent} does not exist; create it first")
        in_use = [Path.cwd(), Path(os.path.realpath(os.environ.get("HOME", "")))]
        if self.out.is_mount() or any(place.is_relative_to(self.out) for place in in_use):
            raise OutputError(f"{self.out}: a folder in use cannot be replaced; choose a new one inside it")
        inputs = [*self._inputs]
        if self._source:
            inputs += [self._source, *self._source.iterdir()]
        for path in inputs:
            if Path(os.path.realpath(path)).is_relative_to(self.out):
                raise OutputError(f"{self.out}: holds the source ({path}); choose another --out")

    def _lock(self) -> None:
        """Make the staging folder ours until we leave; another run to the same output is refused."""
        while True:
            self.staging.mkdir(exist_ok=True)
            fd = os.open(self.staging, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # a run that ended in between has taken the folder away that we locked
                if os.path.samestat(os.fstat(fd), self.staging.stat()):
                    break
            except BlockingIOError:
                os.close(fd)
                raise OutputError(f"{self.out}: another run is writing it; wait for it or stop it") from None
            except FileNotFoundError:
                pass
            except OSError as e:
                # some network file systems have no locks; going on without is better than not at all
                if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                break
            os.close(fd)
        self._resources.callback(os.close, fd)
        self._resources.callback(self._clean_up)

    def _clean_up(self) -> None:
        """Leave behind either a resumable staging folder or none."""
        self._restore_old()
        ledger = self.staging / "ledger"
        if not (self._files.is_dir() and ledger.is_file() and len(read_ledger(ledger)[0]) > 1):
            shutil.rmtree(self.staging, ignore_errors=True)

    def _restore_old(self) -> None:
        """Put back the folder that a run was about to replace, or remove it if it was replaced."""
        if self._old.exists():
            if self.out.exists():
                shutil.rmtree(self._old)
            else:
                self._old.rename(self.out)

    def _check_out(self) -> None:
        if self.out.is_symlink() or (self.out.exists() and not self.out.is_dir()):
            raise OutputError(f"{self.out}: not a folder; choose another --out")
        held = sorted(path.name for path in self.out.iterdir()) if self.out.exists() else []
        if held and not self._overwrite:
            raise OutputError(
                f"{self.out}: not empty; pass --overwrite to replace it, or choose another --out"
            )
        if held and not any(name in CHECKPOINT or name.endswith(".safetensors") for name in held):
            raise OutputError(
                f"{self.out}: holds no checkpoint to replace, but {held[0]}; choose another --out"
            )
        written = sum(path.stat().st_size for path in self.staging.rglob("*.shard")) if self._resume else 0
        free = shutil.disk_usage(self.staging).free + written
        if self._expected_bytes > free:
            raise OutputError(
                f"{self.out}: needs {_size(self._expected_bytes)}, {_size(free)} are free; "
                "make room or choose another --out"
            )

    def _open_files(self) -> None:
        """Continue after the last committed unit of a killed run, or begin."""
        path = self.staging / "ledger"
        entries, size = read_ledger(path) if path.is_file() and self._files.is_dir() else ([], 0)
        begun = self._resume and len(entries) > 1
        if begun:
            with _as_written(path):
                before = entries[0]["key"]
            if before != self._key:
                raise OutputError(
                    f"{self.out}: an interrupted run differs in {_difference(before, self._key)}; "
                    "run as before to continue it, or pass --no-resume to discard it"
                )
        else:
            _empty(self.staging)
            self._files.mkdir()
        # closed after the ledger, which still syncs them
        self._descriptors = self._resources.enter_context(contextlib.ExitStack())
        self._ledger = Ledger(path, size if begun else 0)
        self._resources.callback(self._ledger.close)
        self._resources.callback(self._hashers.shutdown, cancel_futures=True)
        self._odd = self._open_data(self.staging / "odd", room=0)
        if begun:
            with _as_written(path):
                self._replay(entries[1:])
        else:
            self._ledger.append({"key": self._key})

    def _replay(self, units: list[Any]) -> None:
        """Take up what the ledger lists and throw away the rest: half a unit, or the end of a finish."""
        for path in sorted(self._files.iterdir()):
            # names that shards get when all are written
            if final := re.fullmatch(r"model(?:-(\d+)-of-\d+)?\.safetensors", path.name):
                path.rename(self._shard_path(int(final[1] or 1)))
            elif path.suffix != ".shard":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for entry in units:
            number, room = entry["shard"]
            if number > len(self._shards):
                self._shards.append(self._open_data(self._shard_path(number), room))
            for kind, files in (("even", self._shards), ("odd", [self._odd])):
                for stored in entry[kind]:
                    files[-1].add(Stored(**{**stored, "shape": tuple(stored["shape"])}))
                    self._names.add(stored["name"])
            if entry["unit"] in self.done:
                raise ValueError(entry["unit"])
            self.done[entry["unit"]] = entry["record"]
        for file in [*self._shards, self._odd]:
            if file.end and os.fstat(file.fd).st_size < file.room + file.end:
                raise OutputError(
                    f"{file.path}: cut short since it was written; pass --no-resume to begin anew"
                )
            os.ftruncate(file.fd, file.room + file.end)
        for path in self._files.glob("*.shard"):
            if path not in [shard.path for shard in self._shards]:
                path.unlink()
        for shard in self._shards[:-1]:
            self._close_shard(shard)

    # Shards.

    def _shard_path(self, number: int) -> Path:
        # hidden, as no side file is
        return self._files / f".{number:05}.shard"

    def _open_data(self, path: Path, room: int) -> DataFile:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._descriptors.callback(os.close, fd)
        return DataFile(path, fd, room)

    def _new_shard(self, room: int) -> None:
        """Begin a shard; the one before is full."""
        if self._shards:
            self._close_shard(self._shards[-1])
        self._shards.append(self._open_data(self._shard_path(len(self._shards) + 1), room))

    def _close_shard(self, shard: DataFile) -> None:
        shard.write_header()
        self._shard_hashes.append(self._hashers.submit(shard.sha256))

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin a new shard if these tensors, or their header entries, do not fit into the last one."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        entries = sum(Stored(name, _dtype(t), tuple(t.shape), 0, 0).entry_size for name, t in tensors.items())
        if not self._fits(size, entries):
            self._new_shard(max(self._room, _aligned(DataFile.header_size + entries)))

    def _fits(self, size: int, entries: int) -> bool:
        if not self._shards:
            return False
        last = self._shards[-1]
        return last.end + size <= self._shard_bytes and last.header_size + entries <= last.room - 8

    def _finish_shards(self) -> list[str]:
        """Append the odd tensors, write the last header, give the shards their names, write the index."""
        if self._odd.tensors:
            if not self._fits(self._odd.end, self._odd.header_size):
                self._new_shard(_aligned(self._odd.header_size))
            for stored in sorted(self._odd.tensors, key=lambda t: -DTYPES[t.dtype][1]):
                _append_copy(self._shards[-1], self._odd, stored)
        if self._shards:
            self._close_shard(self._shards[-1])
        count = len(self._shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for shard, name in zip(self._shards, names, strict=True):
            shard.path.rename(self._files / name)
        if count > 1:
            stored_in = [
                (t, name) for shard, name in zip(self._shards, names, strict=True) for t in shard.tensors
            ]
            index = {
                "metadata": {"total_size": sum(t.end - t.begin for t, _ in stored_in)},
                "weight_map": {t.name: name for t, name in sorted(stored_in, key=lambda pair: pair[0].name)},
            }
            self.write_text("model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        return names

    def _write_file(self, name: str, blocks: Iterable[bytes]) -> None:
        assert name not in self._file_hashes, f"{name} is written already"
        path, digest = self._files / name, hashlib.sha256()
        with _explained(self.out):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for block in blocks:
                    digest.update(block)
                    file.write(block)
        self._file_hashes[name] = digest.hexdigest()


def _append_copy(shard: DataFile, odd: DataFile, stored: Stored) -> None:
    """Append one of the odd tensors to a shard, a block at a time."""
    for at in range(stored.begin, stored.end, COPY_BYTES):
        block = os.pread(odd.fd, min(COPY_BYTES, stored.end - at), at)
        os.pwrite(shard.fd, block, shard.room + shard.end + at - stored.begin)
    size = stored.end - stored.begin
    shard.add(Stored(stored.name, stored.dtype, stored.shape, shard.end, shard.end + size))


def _as_bytes(tensor: Tensor) -> np.ndarray:
    """Return the elements of a tensor on any device as [n] uint8, without a copy where they are in place."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _dtype(tensor: Tensor) -> str:
    return TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")]


def _room(units: Sequence[str]) -> int:
    wanted = sum(UNIT_ROOM + 4 * len(unit) for unit in units) if units else UNANNOUNCED_ROOM
    return _aligned(min(MOST_ROOM, wanted))


def _aligned(size: int) -> int:
    """Room for a header of that size and its length, so that data begins at a multiple of 64."""
    return -(-(size + 8) // 64) * 64


def _difference(old: Any, new: Any, where: str = "") -> str:
    """Name the first few keys whose values are not the same, with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{where} ({json.dumps(old)}, now {json.dumps(new)})"
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(_difference(old.get(k), new.get(k), f"{where}.{k}" if where else k) for k in keys[:3])


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


@contextlib.contextmanager
def _as_written(ledger: Path) -> Iterator[None]:
    """Refuse a ledger whose lines are whole but say something else than this version writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError):
        raise OutputError(f"{ledger}: not as it was written; pass --no-resume to begin anew") from None


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turn what the operating system says into one line for the user."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise OutputError(
                f"{out}: no room left ({e.strerror}); make room and run again, it continues where it stopped"
            ) from None
        where = e.filename or out
        raise OutputError(f"{where}: {e.strerror}; choose an --out that can be written") from None
