"""The same codes in another format: nothing is quantized again, and nothing is lost.

stored tensors -> decode -> encode -> decode again, compared bit for bit -> written
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowbit import events
from lowbit.checkpoint.formats import FORMATS, Format, format_of
from lowbit.checkpoint.sink import Sink
from lowbit.errors import GateError, OutputError, PlanError, RecipeError, SourceError
from lowbit.folder import INDEX, KERNELS, LATER_FILES, MANIFEST, Folder, open_quantized
from lowbit.hub import restate_card
from lowbit.plan import LayerPlan

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.scheme import PackedTensor


def convert(
    path: str | Path,
    format: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    on_event: events.OnEvent = events.ignore,
) -> dict[str, Any]:
    """Write the checkpoint folder `path` in another format of FORMATS, bit for bit the same weights.

    out: PATH-FORMAT beside it if None.  Dense tensors and side files are copied; config.json, the manifest
    and the model card state the new format.
    Returns out, format, layers, files and bytes.
    Raises RecipeError for an unknown format, PlanError for a layer that it cannot hold, SourceError for a
    folder that is damaged or was not written by lowbit; all before anything is written.
    """
    if format not in FORMATS:
        raise RecipeError(f"--format {format}: use one of {', '.join(FORMATS)}")
    folder = open_quantized(path, "convert")
    if folder.faults:
        raise SourceError(f"{folder.path}: {folder.faults[0]}; run `lowbit verify {folder.path}`")
    if folder.manifest is None or not folder.layers:
        raise SourceError(
            f"{folder.path}: no quantized layers with a {MANIFEST}; convert takes lowbit's folders"
        )
    was, to = format_of(folder.config["quantization_config"]), FORMATS[format]
    for layer in folder.layers.values():
        if reason := to.accepts(layer.scheme) or to.accepts_layer(layer.scheme, *layer.shape):
            raise PlanError(f"{layer.name}: {reason}")
    quantization = to.quantization_config(*_plan(folder, folder.manifest))
    out = (
        Path(out)
        if out is not None
        else folder.path.resolve().parent / f"{folder.path.resolve().name}-{format}"
    )
    if folder.path.resolve() in out.resolve().parents:
        raise OutputError(
            f"{out}: inside {path}, which would hold more than its manifest; choose another --out"
        )

    key = {
        "convert": str(folder.path.resolve()),
        "format": format,
        "files": folder.manifest["output"]["files"],
    }
    manifest = _restate(folder.manifest, was, to)
    units = _units(folder)
    total = sum(units.values())
    with Sink(
        out, key, source=folder.path, units=list(units), overwrite=overwrite, expected_bytes=total
    ) as sink:
        on_event(events.Stage("convert", format, total))
        done_bytes = 0
        for name, nbytes in units.items():
            if name not in sink.done:
                sink.write(name, _convert_unit(folder, name, was, to), None)
            done_bytes += nbytes
            on_event(events.LayerDone(name, done_bytes))
        _write_side_files(folder, sink, quantization, manifest, was, to)
        files = sink.finish(manifest)
    summary = {
        "out": str(out),
        "format": format,
        "layers": len(folder.layers),
        "files": len(files),
        "bytes": sum((out / name).stat().st_size for name in files),
    }
    on_event(events.Done(summary))
    return summary


def _plan(folder: Folder, manifest: dict[str, Any]) -> tuple[list[LayerPlan], list[str]]:
    """Layers and dense linears as quantization_config takes them."""
    methods = {row["name"]: row["method"] for row in manifest["layers"]}
    layers = [
        LayerPlan(
            layer.name, layer.shape, layer.scheme, methods.get(layer.name, ""), layer.name, layer.nbytes
        )
        for layer in folder.layers.values()
    ]
    return layers, [row["name"].removesuffix(".weight") for row in manifest["copied"] if row["linear"]]


def _units(folder: Folder) -> dict[str, int]:
    """Names of layers and of dense tensors in the order of the files, and their bytes."""
    owner = {entry.name: layer.name for layer in folder.layers.values() for entry in layer.parts.values()}
    units: dict[str, int] = {}
    for entry in folder.entries.values():
        name = owner.get(entry.name, entry.name)
        units[name] = units.get(name, 0) + entry.nbytes
    return units


def _convert_unit(folder: Folder, name: str, was: Format, to: Format) -> dict[str, Tensor]:
    """The tensors of one layer in the new format, read back and compared; a dense tensor as it is."""
    if name not in folder.layers:
        return {name: folder.read(name)}
    layer = folder.layers[name]
    stored = {f"{name}.{suffix}": tensor for suffix, tensor in folder.parts(name).items()}
    packed = was.decode(name, stored.__getitem__, layer.scheme, layer.shape)
    encoded = to.encode(name, packed)
    if not _equal(packed, to.decode(name, encoded.__getitem__, layer.scheme, layer.shape)):
        raise GateError(f"{name}: {to.name} does not give back the same codes, scales and zero-points")
    return encoded


def _equal(a: PackedTensor, b: PackedTensor) -> bool:
    if a.zero_point is None or b.zero_point is None:
        same_zeros = a.zero_point is b.zero_point
    else:
        same_zeros = torch.equal(a.zero_point, b.zero_point)
    return same_zeros and torch.equal(a.words, b.words) and torch.equal(a.scale, b.scale)


def _restate(manifest: dict[str, Any], was: Format, to: Format) -> dict[str, Any]:
    """The manifest with the new format; the sink replaces the hashes of the output."""
    recipe = manifest["recipe"] | {"format": to.name}
    notes = [*manifest["notes"], f"converted from {was.name} to {to.name} with the same codes"]
    return manifest | {"recipe": recipe, "notes": notes}


def _write_side_files(
    folder: Folder,
    sink: Sink,
    quantization: dict[str, Any],
    manifest: dict[str, Any],
    was: Format,
    to: Format,
) -> None:
    """config.json, model card and the new format's own files; everything else as it is."""
    old = folder.config["quantization_config"]
    own = {*LATER_FILES, INDEX, "config.json", "README.md", *folder.shards, *was.extra_files(old)}
    for file in sorted(folder.path.rglob("*")):
        if file.is_file() and file.relative_to(folder.path).as_posix() not in own:
            sink.copy_file(file)
    config = folder.config | {"quantization_config": quantization}
    sink.write_text("config.json", json.dumps(config, indent=2) + "\n")
    for name, text in to.extra_files(quantization).items():
        sink.write_text(name, text)
    kernels = folder.path / KERNELS
    if kernels.is_file():
        sink.write_text(KERNELS, kernels.read_text(encoding="utf-8", errors="replace"), replaceable=True)
    card = folder.path / "README.md"
    if card.is_file():
        sink.write_text(
            "README.md", restate_card(manifest, card.read_text(encoding="utf-8", errors="replace"), was.name)
        )
