"""Proof, from the written files, that a quantized checkpoint holds what it should.

    structure   headers fill their files; index, headers and manifest name the same tensors, shapes and dtypes
    config      config.json gives every layer the scheme that its tensors have
    hash        SHA-256 of every file, as the manifest recorded it
    numbers     every layer decoded by a second route (lowbit.decode); its codes, scales and zero-points
                summed exactly and compared with what the solver returned; copied tensors and side files too
    source      every layer against the weight it came from; copied tensors, side files and settings equal
    kernel      the W4A16 kernel on the stored words against the decoded weight
    forward     the whole model on a few tokens: all hidden states are finite

hash, numbers and forward can be switched off, and each finds its own faults without the others. Files are
read once, in order; memory holds the tensors of a few layers.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lowbit import events
from lowbit.ahead import ahead
from lowbit.checkpoint.header import Rows, TensorInfo, allocate, pread_into
from lowbit.checkpoint.source import Source, open_source
from lowbit.decode import PARTS, Checksum, LayerCodes, checksum, file_checksum, grid_checksums
from lowbit.device import pick_device
from lowbit.errors import LowbitError, PlanError
from lowbit.evaluate import first_nonfinite
from lowbit.folder import (
    LATER_FILES,
    DenseView,
    Fault,
    Folder,
    StoredLayer,
    as_tensor,
    decode,
    for_kernel,
    open_quantized,
)
from lowbit.scheme import QuantScheme
from lowbit.validate import (
    CHUNK_WEIGHTS,
    KERNEL_TOLERANCE,
    LayerErrors,
    compare,
    complaints,
    kernel_error,
    kernel_rows,
)

# side files that lowbit writes or extends itself
OWN_FILES = {"config.json", "README.md", "quantize_config.json", "model.safetensors.index.json"}

HASH_CHUNK = 16 << 20

# Source and output are decoded exactly as at quantization time; only the order of fp32 sums may differ
# between devices, which moves a norm by about sqrt(K) * 2^-24 of itself: 1e-5 for K = 28672.
RECORDED_TOLERANCE = 1e-4


@dataclass(frozen=True)
class LayerCheck:
    """What was measured on one layer.

    errors: the fields of validate.LayerErrors; without the source weight, only kernel_error.
    recorded: the same from the manifest, measured when the layer was quantized.
    """

    name: str
    scheme: str
    shape: tuple[int, int]
    errors: dict[str, float]
    recorded: dict[str, float]

    @property
    def output_error(self) -> float:
        """Relative output error measured now, else the recorded one, else nan."""
        return {**self.recorded, **self.errors}.get("output_error", math.nan)

    @property
    def snr_db(self) -> float:
        return {**self.recorded, **self.errors}.get("snr_db", math.nan)


@dataclass(frozen=True)
class VerifyReport:
    """The outcome.

    checks: for each check "ok", "failed" or why it was not made.  files: how many were hashed.
    """

    path: str
    format: str | None
    source: str | None
    layers: tuple[LayerCheck, ...]
    failures: tuple[Fault, ...]
    checks: dict[str, str]
    files: int
    bytes_read: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def gib_per_second(self) -> float:
        """Source and output bytes read, over the time everything took."""
        return self.bytes_read / 2**30 / max(self.seconds, 1e-9)

    def worst(self, count: int = 10) -> list[LayerCheck]:
        """The layers with the largest relative output error, worst first."""
        known = [layer for layer in self.layers if not math.isnan(layer.output_error)]
        return sorted(known, key=lambda layer: -layer.output_error)[:count]

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self), "worst": [layer.name for layer in self.worst()]}


def verify(
    path: str | Path,
    source: str | Path | None = None,
    *,
    hash: bool = True,
    numeric: bool = True,
    forward: bool = True,
    device: str = "auto",
    on_event: events.OnEvent = events.ignore,
) -> VerifyReport:
    """Check a checkpoint folder. Every finding is in the report; report.ok says that there was none.

    source: the model it was made from; None takes the manifest's if it lies on this machine.
    Raises SourceError if path is not a quantized folder or the given source cannot be opened.
    """
    started = time.monotonic()
    folder = open_quantized(path, "verify")
    faults = [*folder.faults, *check_structure(folder), *check_config(folder)]
    checks = {"structure": "ok", "config": "ok", "hash": "ok", "numbers": "ok", "kernel": "ok"}
    layers: list[LayerCheck] = []
    with ExitStack() as stack:
        origin = None
        if numeric:
            origin, checks["source"] = reach_source(folder, source, stack)
        else:
            checks |= dict.fromkeys(("numbers", "source", "kernel"), "switched off")
        if not hash:
            checks["hash"] = "switched off"
        elif not _recorded(folder, "files"):
            checks["hash"] = "the manifest records none" if folder.manifest else "no manifest"
        reader = Reader(folder, hash)
        on_event(events.Stage("verify", str(path), sum(info.nbytes for info in folder.entries.values())))
        if numeric:
            bench = Bench(folder, origin, pick_device(device))
            faults += check_rest(folder, origin)
            for job, (layer, found) in ahead(bench.check, reader.jobs(), Job.size):
                layers += [layer] if layer else []
                faults += found
                on_event(events.LayerDone(job.name, reader.bytes_read, layer.errors if layer else {}))
        elif hash:
            for _ in reader.jobs():
                pass
        if hash:
            faults += reader.check_hashes()
        read = reader.bytes_read + (bench.source_bytes if numeric else 0)
    checks["forward"] = "ok" if forward else "switched off"
    if forward and faults:
        checks["forward"] = "not run, because other checks failed"
    elif forward:
        found, checks["forward"] = check_forward(folder, pick_device(device))
        faults += found
    checks |= {fault.check: "failed" for fault in faults}
    report = VerifyReport(
        path=str(path),
        format=folder.format,
        source=origin.name if origin else None,
        layers=tuple(layers),
        failures=tuple(faults),
        checks=checks,
        files=len(reader.hashes),
        bytes_read=read,
        seconds=time.monotonic() - started,
    )
    on_event(events.Done(report.to_json()))
    return report


# ---- what headers, config and manifest say


def check_structure(folder: Folder) -> Iterator[Fault]:
    """Compare tensors and files with the manifest's rows; without a manifest there is nothing to compare."""
    if folder.manifest is None:
        return
    expected: set[str] = set()
    for row in folder.manifest["layers"]:
        wanted = parts_of(folder.format, row["scheme"]["symmetric"])
        expected |= {f"{row['name']}.{suffix}" for suffix in wanted}
        stored = folder.layers.get(row["name"])
        if stored is None:
            yield Fault("structure", row["name"], "is in the manifest but not packed in the files")
            continue
        for suffix in wanted:
            if suffix not in stored.parts:
                yield Fault("structure", f"{row['name']}.{suffix}", "is missing")
        if list(stored.shape) != row["shape"]:
            yield Fault(
                "structure", row["name"], f"is {list(stored.shape)}, the manifest says {row['shape']}"
            )
        scale = stored.parts["weight_scale" if "weight_scale" in stored.parts else "scales"]
        if stored.scheme.scale_dtype != row["scheme"]["scale_dtype"]:
            yield Fault("structure", scale.name, f"is {scale.dtype}, not {row['scheme']['scale_dtype']}")
    for row in folder.manifest["copied"]:
        info = folder.entries.get(row["name"])
        if info is None:
            yield Fault("structure", row["name"], "is missing")
        elif (list(info.shape), info.dtype) != (row["shape"], row["dtype"]):
            yield Fault(
                "structure",
                row["name"],
                f"is {info.dtype} {list(info.shape)}, the manifest says {row['dtype']} {row['shape']}",
            )
        expected.add(row["name"])
    for name in sorted(folder.entries.keys() - expected):
        yield Fault("structure", name, f"is in {folder.entries[name].file} but not in the manifest")
    listed = set(_recorded(folder, "files"))
    present = {file.relative_to(folder.path).as_posix() for file in folder.path.rglob("*") if file.is_file()}
    for name in sorted(listed - present):
        yield Fault("structure", name, "is missing from the folder")
    # hidden files are git's and the Hub client's own (.gitattributes, .cache/huggingface), in every download
    present = {name for name in present if "/." not in f"/{name}"}
    for name in sorted(present - listed - LATER_FILES) if listed else ():
        yield Fault("structure", name, "is in the folder but not in the manifest")


def parts_of(format: str | None, symmetric: bool) -> tuple[str, ...]:
    """Suffixes of the tensors that lowbit writes for one layer."""
    if format is None:
        return ()
    always, sometimes = PARTS[format]
    if format == "compressed-tensors":
        return always if symmetric else (*always, "weight_zero_point")
    return (*always, *sometimes)


_BLOCK = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def check_config(folder: Folder) -> Iterator[Fault]:
    """Compare config.json with the tensors and with the schemes that the manifest recorded."""
    text = folder.config.get("text_config") or folder.config
    blocks = {int(found[1]) for name in folder.entries if (found := _BLOCK.search(name))}
    wanted = text.get("num_hidden_layers", text.get("n_layer", text.get("num_layers")))
    if isinstance(wanted, int) and blocks and len(blocks) < wanted:
        yield Fault("config", "config.json", f"names {wanted} decoder blocks, the files hold {len(blocks)}")
    if folder.manifest is None or folder.format is None:
        return
    for row in folder.manifest["layers"]:
        stored, scheme = folder.layers.get(row["name"]), row["scheme"]
        if stored is None:
            continue
        said = (stored.scheme.bits, stored.scheme.group_size, stored.scheme.symmetric)
        if said != (scheme["bits"], scheme["group_size"], scheme["symmetric"]):
            yield Fault(
                "config", row["name"], f"config.json says {stored.scheme}, the manifest {_text(scheme)}"
            )
    for row in folder.manifest["copied"]:
        module = row["name"].removesuffix(".weight")
        if row.get("linear") and folder.scheme_of(module, "Linear") is not None:
            yield Fault("config", module, "is dense, but config.json does not leave it out")


def _text(scheme: dict[str, Any]) -> str:
    group = "row" if scheme["group_size"] == -1 else f"g{scheme['group_size']}"
    return f"int{scheme['bits']} {'sym' if scheme['symmetric'] else 'asym'} {group}"


def _recorded(folder: Folder, key: str) -> dict[str, Any]:
    """The manifest's output files (SHA-256) or checksums by file name; empty if it has none."""
    return {} if folder.manifest is None else folder.manifest["output"].get(key, {})


# ---- reading each file once


@dataclass(frozen=True)
class Job:
    """What is checked together: a quantized layer with its stored parts, or one tensor that was copied."""

    name: str
    tensors: dict[str, Tensor]
    layer: StoredLayer | None = None

    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Reader:
    """Reads the files of a folder once, in order, and hashes them on the way.

    hashes: SHA-256 by file name, complete when jobs() is used up.
    """

    def __init__(self, folder: Folder, hash: bool) -> None:
        self.folder = folder
        self.hash = hash
        self.hashes: dict[str, str] = {}
        self.bytes_read = 0

    def jobs(self) -> Iterator[Job]:
        """Yield every layer as soon as its parts are read, and every other tensor."""
        owner = {
            info.name: (layer, suffix)
            for layer in self.folder.layers.values()
            for suffix, info in layer.parts.items()
        }
        waiting: dict[str, dict[str, Tensor]] = {}
        for file in self.folder.shards:
            infos = [info for info in self.folder.entries.values() if info.file == file]
            for info, tensor in self._tensors(file, infos):
                layer, suffix = owner.get(info.name, (None, ""))
                if layer is None:
                    yield Job(info.name, {"": tensor})
                    continue
                parts = waiting.setdefault(layer.name, {})
                parts[suffix] = tensor
                if len(parts) == len(layer.parts):
                    yield Job(layer.name, waiting.pop(layer.name), layer)
        if self.hash:
            for name in _recorded(self.folder, "files"):
                if name not in self.hashes.keys() | LATER_FILES and (self.folder.path / name).is_file():
                    self.hashes[name] = self._hash_file(self.folder.path / name)

    def check_hashes(self) -> Iterator[Fault]:
        for name, recorded in _recorded(self.folder, "files").items():
            if name in self.hashes and self.hashes[name] != recorded:
                yield Fault("hash", name, "is not the file that was written: its SHA-256 differs")

    def _tensors(self, file: str, infos: list[TensorInfo]) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Yield the tensors of one shard in offset order; they follow the header without gaps."""
        path, sha = self.folder.path / file, hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            if self.hash:
                sha.update(stream.read(infos[0].offset))
            for info in infos:
                data = allocate(info.nbytes)
                pread_into(stream.fileno(), data.numpy(), info.offset, path)
                if self.hash:
                    sha.update(data.numpy().data)
                self.bytes_read += info.nbytes
                yield info, as_tensor(data, info)
        if self.hash:
            self.hashes[file] = sha.hexdigest()

    def _hash_file(self, path: Path) -> str:
        sha = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(HASH_CHUNK):
                sha.update(chunk)
                self.bytes_read += len(chunk)
        return sha.hexdigest()


# ---- numbers


class Bench:
    """Checks one job at a time; several threads may. source_bytes: what was read from the source so far."""

    def __init__(self, folder: Folder, source: Source | None, device: torch.device) -> None:
        manifest = folder.manifest or {}
        self.folder = folder
        self.source = source
        self.device = device
        self.rows = {row["name"]: row for row in manifest.get("layers", [])}
        self.copied = {row["name"]: row for row in manifest.get("copied", [])}
        self.source_bytes = 0
        self.seen: set[QuantScheme] = set()
        self.lock = Lock()

    def check(self, job: Job) -> tuple[LayerCheck | None, list[Fault]]:
        """Every numeric check of one job; LayerCheck is None for a copied tensor or an undecodable layer."""
        if job.layer is None:
            return None, list(self._check_copy(job.name, job.tensors[""]))
        parts = {suffix: tensor.to(self.device) for suffix, tensor in job.tensors.items()}
        try:
            layer = decode(job.layer, parts)
        except LowbitError as e:
            return None, [Fault("numbers", job.name, str(e))]
        row = self.rows.get(job.name, {})
        faults = []
        weight = None if self.source is None else source_rows(self.source, job.name, row)
        if self.source is not None and (weight is None or weight.shape != layer.shape):
            there = "has no such weight" if weight is None else f"has {list(weight.shape)}"
            faults.append(Fault("source", job.name, f"is {list(layer.shape)}, the source {there}"))
            weight = None
        sampled = for_kernel(parts, layer, kernel_rows(layer.shape[0], self.device))
        errors = {"kernel_error": kernel_error(sampled, tile=self._first_of(layer.scheme))}
        codes = Checksum()
        if weight is None:
            for rows in layer.chunks(CHUNK_WEIGHTS[self.device.type]):
                codes.update(layer.unpack(rows))
        else:
            read, order = weight.read, layer.order

            def original(rows: slice) -> Tensor:
                values = read(rows).to(self.device)
                self._count(values.nbytes)
                return values if order is None else values[:, order]

            measured = compare(layer, original, errors["kernel_error"], codes.update)
            faults += _judge(job.name, measured, row)
            errors = asdict(measured)
        faults += _check_sums(job.layer, layer, codes.result(), row)
        if not errors["kernel_error"] <= max(KERNEL_TOLERANCE.values()):
            off = f"{errors['kernel_error']:.1e}"
            faults.append(
                Fault("kernel", job.name, f"the kernel's output is off by {off}, more than rounding")
            )
        recorded = row.get("errors") or {}
        return LayerCheck(job.name, str(layer.scheme), layer.shape, errors, recorded), faults

    def _count(self, nbytes: int) -> None:
        with self.lock:
            self.source_bytes += nbytes

    def _first_of(self, scheme: QuantScheme) -> bool:
        """True once for each scheme: there the kernel itself is run, interpreted where there is no GPU."""
        with self.lock:
            new = scheme not in self.seen
            self.seen.add(scheme)
        return new

    def _check_copy(self, name: str, tensor: Tensor) -> Iterator[Fault]:
        row = self.copied.get(name, {})
        if "checksum" in row and checksum(tensor) != row["checksum"]:
            yield Fault("numbers", name, "is not what was copied: its checksum differs")
        if self.source is not None and name not in self.source.tensors:
            yield Fault("source", name, "is not in the source")
        elif self.source is not None:
            self._count(self.source.tensors[name].nbytes)
            # other tools may cast what they copy
            if not _same_values(self.source, name, tensor, cast=not row):
                yield Fault("source", name, "differs from the source's tensor, though it was copied")
        elif not row and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield Fault("numbers", name, "has values that are not finite")


def source_rows(source: Source, name: str, row: dict[str, Any]) -> Rows | None:
    """The weight in the source of the layer `name`, None if it has no such tensor; row: see source_weight.

    A matrix as it lies in the file is read when its rows are asked for, any other here.
    """
    where = row.get("source", f"{name}.weight")
    moved = row.get("transposed") or row.get("rows") or row.get("expert") is not None
    if where in source.tensors and not moved:
        return source.rows_of(where)
    weight = source_weight(source, name, row)
    return None if weight is None else Rows(tuple(weight.shape), weight.__getitem__)


def source_weight(source: Source, name: str, row: dict[str, Any]) -> Tensor | None:
    """The weight [N, K] in the source of the layer `name`; None if the source has no such tensor.

    row: the layer's row of the manifest, which says where it lies; {} takes name.weight as it is.
    """
    where = row.get("source", f"{name}.weight")
    if where not in source.tensors:
        return None
    expert = row.get("expert")
    if expert is not None and not 0 <= expert < source.tensors[where].shape[0]:
        return None
    tensor = source.read(where) if expert is None else source.read_rows(where, expert)
    weight = tensor.T.contiguous() if row.get("transposed") else tensor
    return weight[slice(*row["rows"])] if row.get("rows") else weight


# what a checksum covers -> the suffix that holds it, by format
HELD_BY = {
    "codes": ("weight_packed", "qweight"),
    "scale": ("weight_scale", "scales"),
    "zero_point": ("weight_zero_point", "qzeros"),
}


def _check_sums(layer: StoredLayer, decoded: LayerCodes, codes: str, row: dict[str, Any]) -> Iterator[Fault]:
    """Compare what a layer holds with what the solver returned; codes: the checksum of all its codes."""
    if not bool(torch.isfinite(decoded.scale).all()):
        yield Fault("numbers", layer.name, "has a scale that is not finite")
    recorded = row.get("checksums")
    if not recorded:
        return
    found = grid_checksums(decoded.scale, decoded.zero_point) | {"codes": codes}
    for what, suffixes in HELD_BY.items():
        if found.get(what) != recorded.get(what):
            held = PARTS[layer.format][0] + PARTS[layer.format][1]
            suffix = next(suffix for suffix in suffixes if suffix in held)
            yield Fault(
                "numbers", f"{layer.name}.{suffix}", f"does not hold the {what} that quantization chose"
            )


def _judge(name: str, errors: LayerErrors, row: dict[str, Any]) -> Iterator[Fault]:
    """What the errors of a layer against its source say against it.

    Without a manifest the method is unknown, and the widest tolerance holds.
    """
    for complaint in complaints(row.get("method", "gptq"), errors):
        yield Fault("source", name, complaint)
    for key in ("weight_error", "output_error"):
        now, then = getattr(errors, key), (row.get("errors") or {}).get(key)
        if then is not None and not math.isclose(now, then, rel_tol=RECORDED_TOLERANCE, abs_tol=1e-9):
            yield Fault("source", name, f"{key} is {now:.6g}, at quantization it was {then:.6g}")


def _same_values(source: Source, name: str, tensor: Tensor, *, cast: bool) -> bool:
    """Whether a tensor holds the bits of the source's; cast: of the source's in the tensor's dtype."""
    info = source.tensors[name]
    if info.shape != tuple(tensor.shape):
        return False
    if not info.shape:
        return _same_bytes(tensor, source.read(name), cast=cast)
    read = source.rows_of(name).read
    step = max(1, CHUNK_WEIGHTS["cpu"] * len(tensor) // max(1, tensor.numel()))
    return all(
        _same_bytes(tensor[start : start + step], read(slice(start, start + step)), cast=cast)
        for start in range(0, len(tensor), step)
    )


def _same_bytes(a: Tensor, b: Tensor, *, cast: bool) -> bool:
    b = b.to(a.dtype) if cast else b
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def reach_source(folder: Folder, given: str | Path | None, stack: ExitStack) -> tuple[Source | None, str]:
    """Open the source model until stack closes; without one, return the reason."""
    if given is not None:
        return stack.enter_context(open_source(str(given))), "ok"
    name = (folder.manifest or {}).get("source", {}).get("name")
    if name is None:
        return None, "no --source given, and no manifest names one"
    if name != "demo" and not _exists(name):
        return None, f"{name} is not on this machine; give --source"
    try:
        return stack.enter_context(open_source(name)), "ok"
    except LowbitError as e:
        return None, f"the manifest's source cannot be opened: {e}"


def _exists(name: str) -> bool:
    """Whether there is such a file or folder; a name that no file can have has none."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def check_rest(folder: Folder, source: Source | None) -> Iterator[Fault]:
    """What no tensor of the folder shows: source tensors that got lost, and files without tensors against
    their recorded checksums and the source's files, byte for byte; settings of config.json likewise.

    Other tools write tokenizer and config anew, so without a manifest there is nothing to say.
    """
    if folder.manifest is None:
        return
    for name, recorded in _recorded(folder, "checksums").items():
        path = folder.path / name
        if path.is_file() and file_checksum(path) != recorded:
            yield Fault("numbers", name, "is not the file that was written: its checksum differs")
    if source is None:
        return
    known = {row["source"] for row in folder.manifest["layers"]} | folder.manifest["dropped"].keys()
    for name in source.tensors:
        if name not in known and name not in folder.entries:
            yield Fault("source", name, "is in the source, and neither quantized, copied nor dropped")
    for original in source.side_files:
        inside = original.is_relative_to(source.path)
        name = original.relative_to(source.path).as_posix() if inside else original.name
        if name in OWN_FILES:
            continue
        if not (folder.path / name).is_file():
            yield Fault("source", name, "is in the source but not in the folder")
        elif (folder.path / name).read_bytes() != original.read_bytes():
            yield Fault("source", name, "differs from the source's file, though it was copied")
    for key in sorted((folder.config.keys() | source.config.keys()) - {"quantization_config"}):
        if folder.config.get(key) != source.config.get(key):
            yield Fault(
                "source",
                "config.json",
                f"{key} is {folder.config.get(key)!r}, in the source {source.config.get(key)!r}",
            )


# ---- the whole model


def check_forward(folder: Folder, device: torch.device) -> tuple[list[Fault], str]:
    """Run a few tokens through the model; return faults, and "ok" or why it was not run."""
    if "auto_map" in folder.config:
        return [], "not run: the model needs its own code"
    try:
        bad = first_nonfinite(DenseView(folder, device=device), device)
    except PlanError as e:
        return [], f"not run: {e}"
    except LowbitError as e:
        return [Fault("forward", str(folder.path), str(e))], "failed"
    return ([], "ok") if bad is None else ([Fault("forward", bad, "is not finite on a few tokens")], "failed")
