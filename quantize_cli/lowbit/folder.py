"""A checkpoint folder as it lies on disk: headers, index, config and manifest, none of them trusted.

Whatever is wrong is collected as faults, so that a report can list everything at once. Tensors are read with
pread into fresh memory; nothing stays mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.formats import format_of
from lowbit.checkpoint.header import (
    DTYPES,
    NARROW,
    Rows,
    TensorInfo,
    allocate,
    is_special,
    part_of,
    pread_into,
    read_header,
    read_json,
)
from lowbit.checkpoint.source import check_config
from lowbit.decode import PARTS, LayerCodes, dequantize, open_layer
from lowbit.errors import SourceError
from lowbit.manifest import check_folder, complaint
from lowbit.scheme import PackedTensor, QuantScheme, ScaleDtype
from lowbit_kernels.layout import pack_words

INDEX = "model.safetensors.index.json"
MANIFEST = "lowbit.json"
# what quantize leaves untuned and `lowbit tune` writes anew
KERNELS = "lowbit_kernels.json"
EVALUATION = "lowbit_eval.json"
REPORT = "report.html"
# what commands add to a folder that quantize has written, or write anew
LATER_FILES = {MANIFEST, KERNELS, EVALUATION, REPORT}
CPU = torch.device("cpu")
SCALE_DTYPES: dict[str, ScaleDtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. check: which proof failed.  where: the file, tensor or layer."""

    check: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class StoredLayer:
    """A quantized linear: shape (N, K) and scheme, and its stored tensors by suffix."""

    name: str
    format: str
    shape: tuple[int, int]
    scheme: QuantScheme
    parts: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.parts.values())


@dataclass(frozen=True)
class Folder:
    """What open_folder found; faults is empty if all of it is consistent.

    entries: in file and offset order, their files relative to path.
    format: a name in FORMATS, None for a model that is not quantized.
    scheme_of: what config.json says of (module name, class name), None for a dense one.
    """

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any] | None
    entries: dict[str, TensorInfo]
    layers: dict[str, StoredLayer]
    format: str | None
    scheme_of: Callable[[str, str], QuantScheme | None]
    faults: tuple[Fault, ...]

    @property
    def dense(self) -> dict[str, TensorInfo]:
        """The entries that belong to no quantized layer."""
        packed = {entry.name for layer in self.layers.values() for entry in layer.parts.values()}
        return {name: entry for name, entry in self.entries.items() if name not in packed}

    @property
    def shards(self) -> list[str]:
        return sorted({entry.file for entry in self.entries.values()})

    def read(self, name: str) -> Tensor:
        """Return one stored tensor in fresh memory."""
        info = self.entries[name]
        return as_tensor(read_span(self.path / info.file, info), info)

    def read_part(self, info: TensorInfo, rows: slice) -> Tensor:
        """Return a range of the first dimension of a stored tensor."""
        part = part_of(info, rows)
        return as_tensor(read_span(self.path / info.file, part), part)

    def parts(self, layer: str) -> dict[str, Tensor]:
        """Return the stored tensors of a quantized layer by suffix."""
        return {suffix: self.read(info.name) for suffix, info in self.layers[layer].parts.items()}


@dataclass(frozen=True)
class DenseView:
    """A folder read as if it had never been quantized: layers are decoded to `dtype` when they are read, and
    put together as the source had them, transposed or stacked by expert.

    name, path, config, tensors, read and rows_of are what lowbit.skeleton asks of a source; config has no
    quantization_config.  device: where layers are decoded.
    """

    folder: Folder
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    @property
    def name(self) -> str:
        return str(self.folder.path)

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in self.folder.config.items() if key != "quantization_config"}

    @cached_property
    def origins(self) -> dict[str, list[dict[str, Any]]]:
        """The manifest's rows of quantized layers by the source tensor that held them; without a manifest
        every layer comes from NAME.weight."""
        rows = {row["name"]: row for row in (self.folder.manifest or {}).get("layers", [])}
        found: dict[str, list[dict[str, Any]]] = {}
        for name in self.folder.layers:
            row = {"name": name, "source": f"{name}.weight"} | rows.get(name, {})
            found.setdefault(row["source"], []).append(row)
        return found

    @property
    def tensors(self) -> Mapping[str, TensorInfo | None]:
        """Names of the original model; what is quantized has no header entry of its own."""
        return dict.fromkeys(self.origins) | self.folder.dense

    def read(self, name: str) -> Tensor:
        """Return one tensor of the original model, in its shape; SourceError if stored parts do not fit."""
        if name not in self.origins:
            return self.folder.read(name)
        pieces: dict[int | None, list[tuple[int, Tensor]]] = {}
        for row in self.origins[name]:
            first = (row.get("rows") or [0])[0]
            pieces.setdefault(row.get("expert"), []).append((first, self.layer(row["name"])))
        turned = self.origins[name][0].get("transposed", False)
        matrices = {}
        for expert, parts in pieces.items():
            inside = [values for _, values in sorted(parts, key=lambda part: part[0])]
            whole = torch.cat(inside) if len(inside) > 1 else inside[0]
            matrices[expert] = whole.T.contiguous() if turned else whole
        if None in matrices:
            return matrices[None]
        experts = sorted(expert for expert in matrices if expert is not None)
        return torch.stack([matrices[expert] for expert in experts])

    def rows_of(self, name: str) -> Rows:
        """Return a tensor of the original model to be read in parts; what is put together is read here."""
        if name not in self.origins:
            info = self.folder.entries[name]
            return Rows(info.shape, lambda rows: self.folder.read_part(info, rows))
        [row, *others] = self.origins[name]
        if others or row.get("transposed") or row.get("expert") is not None:
            whole = self.read(name)
            return Rows(tuple(whole.shape), whole.__getitem__)
        layer = self._open(row["name"])
        return Rows(layer.shape, partial(self._decode, layer))

    def layer(self, name: str) -> Tensor:
        """Return the weight [N, K] of one quantized layer."""
        return self._decode(self._open(name), slice(None))

    def _open(self, name: str) -> LayerCodes:
        parts = {suffix: tensor.to(self.device) for suffix, tensor in self.folder.parts(name).items()}
        return decode(self.folder.layers[name], parts)

    def _decode(self, layer: LayerCodes, rows: slice) -> Tensor:
        values = dequantize(layer.rows(rows), self.dtype)
        return values if layer.order is None else torch.empty_like(values).index_copy_(1, layer.order, values)


def decode(layer: StoredLayer, parts: dict[str, Tensor]) -> LayerCodes:
    """Return open_layer of parts that were already read; SourceError names what does not fit."""
    return open_layer(layer.format, parts, layer.scheme, layer.shape)


def for_kernel(parts: dict[str, Tensor], layer: LayerCodes, rows: slice) -> PackedTensor:
    """Return rows of a layer in the words that kernels read: the stored ones where they are the same."""
    part = layer.rows(rows)
    stored = parts.get("weight_packed")
    words = pack_words(part.codes, layer.scheme.bits) if stored is None else stored[rows].contiguous()
    return PackedTensor(words, part.scale, part.zero_point, layer.scheme, in_features=layer.shape[1])


def open_folder(path: str | Path) -> Folder:
    """Read config, manifest, index and every header of a checkpoint folder, quantized or not.

    Raises SourceError if path is not a folder with a config.json; anything less is a fault of the result.
    """
    path = Path(path)
    check_folder(path)
    # whoever opens a pipe waits
    odd = [file.name for file in sorted(path.iterdir()) if is_special(file)]
    faults = [Fault("structure", name, "is not a regular file") for name in odd]
    config = _read_json(path / "config.json", faults) or {}
    try:
        check_config(path / "config.json", config)
    except SourceError as e:
        faults.append(Fault("config", "config.json", str(e).removeprefix(f"{path / 'config.json'}: ")))
        config = {}
    manifest = None
    if (path / MANIFEST).exists() and MANIFEST not in odd:
        manifest = _read_json(path / MANIFEST, faults)
    wrong = complaint(manifest) if manifest is not None else None
    if wrong is not None:
        faults.append(Fault("structure", MANIFEST, wrong))
        manifest = None
    entries: dict[str, TensorInfo] = {}
    for file in sorted(file for file in path.glob("*.safetensors") if file.name not in odd):
        try:
            found = read_header(file)
        except SourceError as e:
            faults.append(Fault("structure", file.name, str(e).removeprefix(f"{file}: ")))
            continue
        for entry in found:
            if entry.name in entries:
                faults.append(
                    Fault("structure", entry.name, f"is in {entries[entry.name].file} and {file.name}")
                )
            entries[entry.name] = replace(entry, file=file.name)
    faults += _check_index(path, entries)
    format, scheme_of = _read_quantization(path, config, faults)
    layers = {} if format is None else _find_layers(path, format, scheme_of, entries, faults)
    if format is None:
        packed = [name for name in entries if name.endswith((".weight_packed", ".qweight"))]
        if packed:
            faults.append(Fault("config", "config.json", f"no quantization_config, yet there is {packed[0]}"))
    return Folder(path, config, manifest, entries, layers, format, scheme_of, tuple(faults))


def open_quantized(path: str | Path, command: str) -> Folder:
    """Return open_folder(path), if anything in the folder says that it was ever quantized: a manifest, a
    quantization_config, packed tensors, or a config.json that cannot be read.

    Raises SourceError, naming the command, if nothing does.
    """
    folder = open_folder(path)
    claims = "quantization_config" in folder.config or (folder.path / MANIFEST).exists()
    if not claims and not any(fault.where == "config.json" for fault in folder.faults):
        raise SourceError(f"{path}: not quantized; {command} takes a folder that lowbit quantize wrote")
    return folder


def read_span(path: Path, info: TensorInfo) -> Tensor:
    """Return the bytes of one tensor as uint8, in fresh memory."""
    data = allocate(info.nbytes)
    with path.open("rb", buffering=0) as file:
        pread_into(file.fileno(), data.numpy(), info.offset, path)
    return data


def as_tensor(data: Tensor, info: TensorInfo) -> Tensor:
    """Return bytes as the tensor that info describes, without a copy; FP8 and narrower stay bytes."""
    if info.dtype in NARROW:
        return data
    return data.view(getattr(torch, DTYPES[info.dtype][0])).view(info.shape)


def _read_json(file: Path, faults: list[Fault]) -> dict[str, Any] | None:
    try:
        return read_json(file)
    except SourceError as e:
        faults.append(Fault("structure", file.name, str(e).removeprefix(f"{file}: ")))
        return None


def _check_index(path: Path, entries: dict[str, TensorInfo]) -> Iterator[Fault]:
    """Compare the index, if there is one, with the headers."""
    files = {entry.file for entry in entries.values()}
    if not (path / INDEX).exists():
        if files - {"model.safetensors"}:
            yield Fault(
                "structure", INDEX, f"is missing, though there is {min(files - {'model.safetensors'})}"
            )
        elif not files:
            yield Fault("structure", "model.safetensors", "there is no readable safetensors file")
        return
    faults: list[Fault] = []
    index = _read_json(path / INDEX, faults) or {}
    yield from faults
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        yield Fault("structure", INDEX, "has no weight_map of tensors to files")
        return
    for file in sorted(set(listed.values())):
        if not (path / file).exists():
            yield Fault("structure", file, "is in the index but not in the folder")
    for file in sorted(files - set(listed.values())):
        yield Fault("structure", file, "is in the folder but not in the index")
    for name, file in listed.items():
        if name not in entries:
            if (path / file).exists():
                yield Fault("structure", name, f"is missing from {file}")
        elif entries[name].file != file:
            yield Fault("structure", name, f"is in {entries[name].file}, the index says {file}")
    for name in sorted(entries.keys() - listed.keys()):
        yield Fault("structure", name, f"is in {entries[name].file} but not in the index")


def _read_quantization(
    path: Path, config: dict[str, Any], faults: list[Fault]
) -> tuple[str | None, Callable[[str, str], QuantScheme | None]]:
    """The format that config.json names, and its scheme of each module; SourceError for an unknown one."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None, lambda name, kind: None
    try:
        format = format_of(quantization)
    except SourceError as e:
        raise SourceError(f"{path / 'config.json'}: {e}") from None
    try:
        return format.name, format.read_config(quantization)
    except SourceError as e:
        faults.append(Fault("config", "config.json", str(e)))
        return format.name, lambda name, kind: None


def _find_layers(
    path: Path,
    format: str,
    scheme_of: Callable[[str, str], QuantScheme | None],
    entries: dict[str, TensorInfo],
    faults: list[Fault],
) -> dict[str, StoredLayer]:
    """Group the stored parts of layers; shape and scale dtype from the parts, the scheme from config."""
    always, sometimes = PARTS[format]
    parts: dict[str, dict[str, TensorInfo]] = {}
    for entry in entries.values():
        module, _, suffix = entry.name.rpartition(".")
        if suffix in always + sometimes:
            parts.setdefault(module, {})[suffix] = entry
    layers: dict[str, StoredLayer] = {}
    for module, found in parts.items():
        scheme = scheme_of(module, "Linear")
        missing = [suffix for suffix in always if suffix not in found]
        if missing:
            beside = next(iter(found.values())).name
            faults.append(Fault("structure", f"{module}.{missing[0]}", f"is missing beside {beside}"))
        elif scheme is None:
            faults.append(Fault("config", module, "is packed, but config.json gives it no scheme"))
        else:
            scales = found["weight_scale" if format == "compressed-tensors" else "scales"]
            dtype = SCALE_DTYPES.get(scales.dtype)
            if dtype is None:
                faults.append(Fault("structure", scales.name, f"is {scales.dtype}, which no engine reads"))
                continue
            shape = _layer_shape(path, format, found, scheme)
            layers[module] = StoredLayer(module, format, shape, replace(scheme, scale_dtype=dtype), found)
    return layers


def _layer_shape(
    path: Path, format: str, parts: dict[str, TensorInfo], scheme: QuantScheme
) -> tuple[int, int]:
    """(N, K) of a layer from its stored tensors."""
    if format == "compressed-tensors":
        entry = parts["weight_shape"]
        n, k = as_tensor(read_span(path / entry.file, entry), entry).reshape(-1)[:2].tolist()
        return n, k
    rows, columns = parts["qweight"].shape
    return (columns * 8, rows) if format == "awq" else (columns, rows * 32 // scheme.bits)
