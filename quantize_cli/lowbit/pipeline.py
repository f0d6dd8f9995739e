"""The straight line: source, plan, solve, pack, validate, write.

Data-free methods stream tensors. A few workers read, quantize, pack and prove one unit each while the main
thread writes finished units in plan order, so that reading, solving and writing overlap, memory holds a
handful of tensors whatever the model's size, and the bytes do not depend on the number of workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowbit
from lowbit import events
from lowbit.ahead import ahead
from lowbit.checkpoint.formats import FORMATS
from lowbit.checkpoint.sink import Sink
from lowbit.checkpoint.source import Source, check_finite, open_source
from lowbit.decode import checksum, checksums, decode_packed
from lowbit.device import pick_device
from lowbit.hub import model_card
from lowbit.plan import CopyPlan, LayerPlan, Plan, make_plan
from lowbit.recipe import Recipe
from lowbit.scheme import PackedTensor, QuantizedTensor
from lowbit.solvers import SOLVERS, make_options
from lowbit.validate import check_layer, measure
from lowbit_kernels.layout import pack_words

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def quantize(
    model: str | Path,
    out: str | Path | None = None,
    recipe: Recipe | None = None,
    *,
    resume: bool = True,
    overwrite: bool = False,
    revision: str | None = None,
    on_event: events.OnEvent = events.ignore,
) -> dict[str, Any]:
    """Quantize a model and write the checkpoint folder `out`; return the summary that Done carries.

    model: local folder, Hub id, .gguf file or "demo".  out: default_out(model, recipe) if None.
    Raises LowbitError for bad input before anything is written, GateError if a layer fails its proof.
    """
    recipe = recipe or Recipe()
    started = time.monotonic()
    out = Path(out) if out is not None else default_out(str(model), recipe)
    device = pick_device(recipe.device)
    with open_source(str(model), trust_remote_code=recipe.trust_remote_code, revision=revision) as source:
        plan = make_plan(source, recipe)
        on_event(events.PlanReady(plan))
        for note in plan.notes:
            on_event(events.Note(note))
        units = make_units(plan, source.tensors)
        with Sink(
            out,
            run_key(source, recipe, device),
            source=source.path,
            inputs=source.files,
            units=[unit.name for unit in units],
            expected_bytes=plan.output_bytes,
            overwrite=overwrite,
            resume=resume,
        ) as sink:
            source.start_sha256()
            if sink.done:
                on_event(events.Note(f"resuming: {len(sink.done)} tensors are already written"))
            on_event(events.Stage("quantize", total_bytes=plan.source_bytes))
            rows = solve_data_free(source, plan, units, sink, device, on_event)
            on_event(events.Stage("finish"))
            manifest = make_manifest(source, plan, rows, source.sha256())
            write_side_files(source, plan, manifest, sink)
            files = sink.finish(manifest)
    summary = summarize(plan, manifest, out, files, time.monotonic() - started)
    on_event(events.Done(summary))
    return summary


def default_out(model: str, recipe: Recipe) -> Path:
    """The folder name that tells what it holds: smollm2-int4-g128, in the working directory."""
    stem = Path(model).name.removesuffix(".gguf") or Path(model).resolve().name
    group = "row" if recipe.group == -1 else f"g{recipe.group}"
    return Path(f"{stem}-int{recipe.bits}-{group}")


# ---- units: what is read, solved and written together


@dataclass(frozen=True)
class Unit:
    """One source tensor, or one expert of a fused tensor: a copy, or the layers in it."""

    name: str
    tensor: str
    nbytes: int
    copy: CopyPlan | None = None
    layers: tuple[LayerPlan, ...] = ()
    expert: int | None = None


def make_units(plan: Plan, order: Iterable[str]) -> list[Unit]:
    """All units of a plan, in the order of the source's tensors."""
    layers: dict[str, dict[int | None, list[LayerPlan]]] = {}
    for layer in plan.layers:
        layers.setdefault(layer.source, {}).setdefault(layer.expert, []).append(layer)
    copies = {copy.name: copy for copy in plan.copies}
    units = []
    for name in order:
        if name in copies:
            units.append(Unit(name, name, copies[name].nbytes, copy=copies[name]))
        for expert, members in layers.get(name, {}).items():
            unit = name if expert is None else f"{name}[{expert}]"
            nbytes = sum(layer.source_bytes for layer in members)
            units.append(Unit(unit, name, nbytes, layers=tuple(members), expert=expert))
    return units


@dataclass(frozen=True)
class Solved:
    """What a unit becomes: output tensors by name, and its rows of the manifest."""

    tensors: dict[str, Tensor]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """What solving a unit needs. tiles: one layer of each scheme, on which the kernel itself is tried."""

    source: Source
    recipe: Recipe
    device: torch.device
    tiles: frozenset[str]


def solve_data_free(
    source: Source,
    plan: Plan,
    units: list[Unit],
    sink: Sink,
    device: torch.device,
    on_event: events.OnEvent,
) -> list[dict[str, Any]]:
    """Solve and write every unit that is not done yet; return the manifest rows of all units in order."""
    rows: list[dict[str, Any]] = []
    done_bytes = 0
    tried = {layer.scheme: layer.name for layer in reversed(plan.layers)}
    job = Job(source, plan.recipe, device, frozenset(tried.values()))

    def solve(unit: Unit) -> Solved | None:
        return None if unit.name in sink.done else solve_unit(job, unit)

    for unit, solved in ahead(solve, units, lambda unit: unit.nbytes):
        if solved is not None:
            sink.write(unit.name, solved.tensors, {"rows": solved.rows})
        added = sink.done[unit.name]["rows"] if solved is None else solved.rows
        rows += added
        done_bytes += unit.nbytes
        errors = {row["name"]: row["errors"]["output_error"] for row in added if row.get("errors")}
        on_event(events.LayerDone(unit.name, done_bytes, errors))
    return rows


def solve_unit(job: Job, unit: Unit) -> Solved:
    """Read one unit and quantize, pack, prove and encode its layers, or pass its tensor through."""
    read = job.source.read if unit.expert is None else partial(job.source.read_rows, index=unit.expert)
    tensor = read(unit.tensor)
    if unit.copy is not None:
        check_finite(unit.name, tensor)
        return Solved({unit.tensor: tensor}, [asdict(unit.copy) | {"checksum": checksum(tensor)}])
    solved = Solved({}, [])
    tensor = tensor.to(job.device)
    check_finite(unit.name, tensor)
    for layer in unit.layers:
        weight = take_layer(tensor, layer)
        solver = SOLVERS[layer.method]
        if weight.is_cuda and solver.solve_packed is not None:
            packed = solver.solve_packed(weight, layer.scheme)
            quantized = decode_packed(packed)
        else:
            options = make_options(layer.method, job.recipe.solver)
            quantized = solver.solve(weight, layer.scheme, None, options)
            packed = pack(quantized)
        solved.rows.append(prove_layer(job, layer, quantized, packed, weight))
        solved.tensors.update(encode_layer(layer, packed, job.recipe))
    return solved


def take_layer(tensor: Tensor, layer: LayerPlan) -> Tensor:
    """The layer's weight [out_features, in_features] in its source tensor (an expert's slice, or Conv1D)."""
    weight = tensor.T.contiguous() if layer.transposed else tensor
    return weight if layer.rows is None else weight[slice(*layer.rows)]


def pack(quantized: QuantizedTensor) -> PackedTensor:
    """Fold the codes into stored words."""
    words = pack_words(quantized.codes, quantized.scheme.bits)
    return PackedTensor(words, quantized.scale, quantized.zero_point, quantized.scheme, quantized.shape[1])


def prove_layer(
    job: Job, layer: LayerPlan, quantized: QuantizedTensor, packed: PackedTensor, weight: Tensor
) -> dict[str, Any]:
    """The layer's row of the manifest, after its proof against the source weight.

    Raises GateError if the proof fails.
    """
    row: dict[str, Any] = {
        "name": layer.name,
        "source": layer.source,
        "expert": layer.expert,
        "rows": layer.rows,
        "transposed": layer.transposed,
        "shape": list(layer.shape),
        "scheme": asdict(layer.scheme),
        "method": layer.method,
        "packed_bytes": layer.packed_bytes,
        "fallback": layer.fallback,
        "checksums": checksums(quantized),
        "errors": {},
    }
    if job.recipe.validate_layers:
        errors = measure(packed, weight, tile=layer.name in job.tiles)
        check_layer(layer.name, layer.method, errors)
        row["errors"] = {key: float(f"{value:.6g}") for key, value in asdict(errors).items()}
    return row


def encode_layer(layer: LayerPlan, packed: PackedTensor, recipe: Recipe) -> dict[str, Tensor]:
    """The tensors that stand in the files for the layer's weight, on the CPU."""
    encoded = FORMATS[recipe.format].encode(layer.name, packed)
    return {name: tensor.cpu() for name, tensor in encoded.items()}


# ---- what stands beside the weights


def write_side_files(source: Source, plan: Plan, manifest: dict[str, Any], sink: Sink) -> None:
    """config.json with what loaders need, the format's own files, the model card; the rest byte for byte."""
    chosen = FORMATS[plan.recipe.format]
    quantization = chosen.quantization_config(plan.layers, plan.dense_linears)
    config = source.config | {"quantization_config": quantization}
    sink.write_text("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    for name, text in chosen.extra_files(quantization).items():
        sink.write_text(name, text)
    for path in source.side_files:
        sink.copy_file(path)
    readme = source.path / "README.md"
    card = model_card(manifest, readme.read_text(encoding="utf-8") if readme.is_file() else None)
    sink.write_text("README.md", card)


def run_key(source: Source, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """What must agree for a killed run to continue: recipe, source, versions and kind of device."""
    return {
        "lowbit": lowbit.__version__,
        "recipe": recipe.model_dump(mode="json"),
        "source": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in source.files],
        "versions": versions(),
        "device": device.type,
    }


def versions() -> dict[str, str]:
    """The installed versions that may change the bytes of the output."""
    found = {}
    for name in ("torch", "triton", "transformers", "compressed-tensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_manifest(
    source: Source, plan: Plan, rows: list[dict[str, Any]], source_sha256: dict[str, str]
) -> dict[str, Any]:
    """lowbit.json without the hashes of the output, which the sink adds when it has written the files."""
    return {
        "lowbit": lowbit.__version__,
        "recipe": plan.recipe.model_dump(mode="json"),
        "versions": versions(),
        "seed": plan.recipe.seed,
        "source": {"name": source.name, "files": source_sha256},
        "layers": [row for row in rows if "scheme" in row],
        "copied": [row for row in rows if "scheme" not in row],
        "dropped": plan.dropped,
        "notes": list(plan.notes),
    }


def summarize(
    plan: Plan, manifest: dict[str, Any], out: Path, files: dict[str, str], seconds: float
) -> dict[str, Any]:
    """What the last lines of the command say."""
    measured = [row for row in manifest["layers"] if row["errors"]]
    worst = sorted(measured, key=lambda row: -row["errors"]["output_error"])[:5]
    return {
        "out": str(out),
        "files": len(files),
        "source_bytes": plan.source_bytes,
        "output_bytes": sum((out / name).stat().st_size for name in files),
        "layers": len(plan.layers),
        "copied": len(plan.copies),
        "bits_per_weight": round(plan.bits_per_weight, 3),
        "coverage": round(plan.coverage, 4),
        "seconds": round(seconds, 2),
        "worst": [{"name": row["name"], **row["errors"]} for row in worst],
        "notes": manifest["notes"],
    }
