"""The straight line: source, plan, calibrate, solve, pack, validate, write.

Data-free methods stream tensors. A few workers read, quantize, pack and prove one unit each while the main
thread writes finished units in plan order, so that reading, solving and writing overlap, memory holds a
handful of tensors whatever the model's size, and the bytes do not depend on the number of workers.

Calibrated methods go block by block: each layer is solved on the activations of the model quantized before
it (blocks.py), and what lies in no block follows as above.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowbit
from lowbit import events, tune
from lowbit.ahead import ahead
from lowbit.calib import CalibrationRows, calibration_size, load_rows
from lowbit.checkpoint.formats import FORMATS
from lowbit.checkpoint.sink import Sink
from lowbit.checkpoint.source import Source, check_finite, open_source
from lowbit.decode import checksum, checksums, decode_packed, dequantize
from lowbit.device import pick_device
from lowbit.errors import CalibrationError, SourceError
from lowbit.folder import KERNELS
from lowbit.hub import model_card
from lowbit.plan import CopyPlan, LayerPlan, Plan, make_plan
from lowbit.recipe import Recipe
from lowbit.scheme import PackedTensor, QuantizedTensor
from lowbit.solvers import SOLVERS, make_options
from lowbit.validate import check_layer, measure
from lowbit_kernels.device import HAS_TRITON
from lowbit_kernels.layout import pack_words
from lowbit_kernels.reference import ScaleError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lowbit.blocks import LayerWork

# Weights of layers that are solved as one.
STACKED_WEIGHTS = {"cpu": 1 << 23, "cuda": 1 << 28}


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
        calibration = load_calibration(source, plan, device)
        units = make_units(plan, source.tensors)
        with Sink(
            out,
            run_key(source, recipe, device, calibration),
            source=source.path,
            inputs=source.files,
            units=[unit.name for unit in units],
            expected_bytes=plan.output_bytes,
            overwrite=overwrite,
            resume=resume,
        ) as sink:
            source.start_sha256()
            on_event(events.PlanReady(plan))
            for note in plan.notes:
                on_event(events.Note(note))
            if not HAS_TRITON:
                on_event(
                    events.Note("Triton is not installed: the kernel itself is not tried", level="warning")
                )
            for note in () if calibration is None else calibration.notes:
                on_event(events.Note(note, level="warning"))
            if sink.done:
                count = f"{len(sink.done)} of {len(units)}"
                on_event(events.Note(f"resuming: {count} tensors are already written", level="status"))
            on_event(events.Stage("quantize", total_bytes=plan.source_bytes))
            job = make_job(source, plan, device, sink, on_event)
            if calibration is not None:
                solve_calibrated(job, units, calibration)
            solve_data_free(job, [unit for unit in units if unit.name not in job.written])
            on_event(events.Stage("finish"))
            rows = [row for unit in units for row in sink.done[unit.name]["rows"]]
            manifest = make_manifest(source, plan, rows, source.sha256(), calibration)
            write_side_files(source, plan, manifest, sink)
            layers = {layer.name: (layer.shape, layer.scheme) for layer in plan.layers}
            sink.write_text(KERNELS, tune.untuned_table(layers), replaceable=True)
            files = sink.finish(manifest)
    summary = summarize(plan, manifest, out, files, time.monotonic() - started)
    on_event(events.Done(summary))
    return summary


def default_out(model: str, recipe: Recipe) -> Path:
    """The folder name that tells what it holds, in the working directory.

    smollm2-int4-g128, and behind it the method and grid where they are not the usual ones: -rtn, -asym.
    """
    path = Path(model)
    # "." and ".." are no names
    stem = (path.resolve() if path.name in ("", "..") else path).name.removesuffix(".gguf") or "model"
    group = "row" if recipe.group == -1 else f"g{recipe.group}"
    method = "" if recipe.method == Recipe().method else f"-{recipe.method}"
    grid = "" if recipe.symmetric == Recipe(method=recipe.method).symmetric else "-asym"
    return Path(f"{stem}-int{recipe.bits}-{group}{method}{grid}")


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
    """What solving a unit needs, and where it goes.

    tiles: one layer of each scheme, on which the kernel itself is tried.  written: bytes of the units that
    the listener was told of, those of an earlier run too.
    """

    source: Source
    plan: Plan
    device: torch.device
    sink: Sink
    on_event: events.OnEvent
    tiles: frozenset[str]
    written: dict[str, int] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe


def make_job(source: Source, plan: Plan, device: torch.device, sink: Sink, on_event: events.OnEvent) -> Job:
    tried = {layer.scheme: layer.name for layer in reversed(plan.layers)}
    return Job(source, plan, device, sink, on_event, frozenset(tried.values()))


def write_unit(job: Job, unit: Unit, solved: Solved | None) -> None:
    """Write a solved unit, None if an earlier run has, and tell the listener."""
    if solved is not None:
        job.sink.write(unit.name, solved.tensors, {"rows": solved.rows})
    job.written[unit.name] = unit.nbytes
    rows = job.sink.done[unit.name]["rows"]
    errors = {row["name"]: row["errors"]["output_error"] for row in rows if row.get("errors")}
    job.on_event(events.LayerDone(unit.name, sum(job.written.values()), errors))


def solve_data_free(job: Job, units: list[Unit]) -> None:
    """Solve and write every unit that is not done yet."""

    def solve(unit: Unit) -> Solved | None:
        return None if unit.name in job.sink.done else solve_unit(job, unit)

    for unit, solved in ahead(solve, units, lambda unit: unit.nbytes):
        write_unit(job, unit, solved)


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
    for planned in unit.layers:
        layer = (
            fall_back(planned, "outside the decoder blocks")
            if SOLVERS[planned.method].needs_data
            else planned
        )
        weight = take_layer(tensor, layer)
        solver = SOLVERS[layer.method]
        with naming(layer.name):
            if weight.is_cuda and solver.solve_packed is not None:
                packed = solver.solve_packed(weight, layer.scheme)
                quantized = decode_packed(packed)
            else:
                quantized = solver.solve(weight, layer.scheme, None, solver_options(job.recipe, layer.method))
                packed = pack(quantized)
        keep_layer(job, solved, layer, quantized, packed, weight)
    return solved


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Say which layer it is that cannot be solved, or whose scales do not fit in their dtype."""
    try:
        yield
    except CalibrationError as e:
        raise CalibrationError(f"{layer}: {e}") from None
    except ScaleError as e:
        raise SourceError(f"{layer}: {e}; keep it dense with --exclude {layer}") from None


def keep_layer(
    job: Job,
    solved: Solved,
    layer: LayerPlan,
    quantized: QuantizedTensor,
    packed: PackedTensor,
    weight: Tensor,
) -> None:
    """Add a layer to its unit, proved and encoded."""
    solved.rows.append(prove_layer(job, layer, quantized, packed, weight))
    solved.tensors.update(encode_layer(layer, packed, job.recipe))


def solver_options(recipe: Recipe, method: str) -> Any:
    """The options of a method: `solver:` of the recipe is for the recipe's own method."""
    return make_options(method, recipe.solver if method == recipe.method else {})


def fall_back(layer: LayerPlan, reason: str) -> LayerPlan:
    """The layer rounded to nearest in its scheme, because calibration has nothing to say of it."""
    reasons = [layer.fallback, f"rtn: {reason}"] if layer.fallback else [f"rtn: {reason}"]
    return replace(layer, method="rtn", fallback="; ".join(reasons))


# ---- calibrated: block by block


def load_calibration(source: Source, plan: Plan, device: torch.device) -> CalibrationRows | None:
    """The rows to calibrate on, None if no layer needs them.

    Raises CalibrationError for the text and PlanError for the model, before a weight is read.
    """
    if not any(SOLVERS[layer.method].needs_data for layer in plan.layers):
        return None
    recipe = plan.recipe
    from lowbit.blocks import check_model

    check_model(source, trust_remote_code=recipe.trust_remote_code)
    widest = max(layer.shape[1] for layer in plan.layers)
    samples, seqlen = calibration_size(recipe.samples, recipe.seqlen, device.type, widest)
    return load_rows(
        recipe.calib,
        source.path,
        samples=samples,
        seqlen=seqlen,
        seed=recipe.seed,
        config=source.config,
        strict=recipe.strict,
        trust_remote_code=recipe.trust_remote_code,
    )


def solve_calibrated(job: Job, units: list[Unit], calibration: CalibrationRows) -> None:
    """Solve and write the units whose layers lie in decoder blocks, block by block.

    One worker packs and proves layers while the next ones are solved; all of a block is written before the
    engine saves where it stands.
    """
    import torch

    from lowbit.blocks import Following, open_engine

    unit_of = {layer.name: unit for unit in units for layer in unit.layers}
    done = frozenset(name for name, unit in unit_of.items() if unit.name in job.sink.done)
    for unit in units:
        if unit.name in job.sink.done:
            write_unit(job, unit, None)
    correction = getattr(solver_options(job.recipe, job.recipe.method), "correction", True)
    with (
        open_engine(
            job.source,
            job.plan.layers,
            calibration.rows,
            job.device,
            following=Following(target=correction),
            trust_remote_code=job.recipe.trust_remote_code,
            check=check_finite,
            state=job.sink.staging / "streams",
            done=done,
        ) as engine,
        ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as worker,
    ):
        if done:
            place = f"block {engine.first_block + 1} of {len(engine.names)}"
            job.on_event(events.Note(f"resuming: calibration goes on at {place}", level="status"))
        waiting: dict[str, Solved] = defaultdict(lambda: Solved({}, []))
        proofs: deque[tuple[Unit, Future[bool]]] = deque()

        def submit(layer: LayerPlan, quantized: QuantizedTensor, weight: Tensor) -> None:
            unit = unit_of[layer.name]
            if unit.name not in job.sink.done:
                proofs.append((unit, worker.submit(prove, unit, layer, quantized, weight)))

        def prove(unit: Unit, layer: LayerPlan, quantized: QuantizedTensor, weight: Tensor) -> bool:
            solved = waiting[unit.name]
            keep_layer(job, solved, layer, quantized, pack(quantized), weight)
            return len(solved.rows) == len(unit.layers)

        def write_proved(*, all: bool) -> None:
            while proofs and (all or proofs[0][1].done()):
                unit, proof = proofs.popleft()
                if proof.result():
                    write_unit(job, unit, waiting.pop(unit.name))

        for block in engine.blocks():
            for stage in block.stages():
                for together in alike(stage.work()):
                    for work, layer, quantized in solve_together(job, together):
                        stage.replace(layer, dequantize(quantized))
                        submit(layer, quantized, work.weight)
                write_proved(all=False)
            write_proved(all=True)


def alike(works: Iterable[LayerWork]) -> Iterator[list[LayerWork]]:
    """Neighbours that are solved as one: their rows share the inputs, the method and the scheme, and are few
    enough that a copy of them does not count."""
    together: list[LayerWork] = []
    for work in works:
        size = sum(other.weight.numel() for other in [*together, work])
        fits = size <= STACKED_WEIGHTS[work.weight.device.type]
        if together and not (fits and work.same_problem(together[0])):
            yield together
            together = []
        together.append(work)
    if together:
        yield together


def solve_together(
    job: Job, works: list[LayerWork]
) -> Iterator[tuple[LayerWork, LayerPlan, QuantizedTensor]]:
    """Each layer with its codes, and its plan as it came to be."""
    import torch

    first = works[0]
    stats, method = first.stats, first.layer.method
    if stats is None and SOLVERS[method].needs_data:
        method = "rtn"
    targets = [work.stats.cross for work in works if work.stats is not None and work.stats.cross is not None]
    if stats is not None and targets:
        stats = replace(stats, cross=torch.cat(targets))
    weight = torch.cat([work.weight for work in works])
    with naming(first.layer.name):
        solved = SOLVERS[method].solve(weight, first.layer.scheme, stats, solver_options(job.recipe, method))
    heights = [len(work.weight) for work in works]
    parts = [t.split(heights) for t in (solved.codes, solved.scale)]
    zeros = [None] * len(works) if solved.zero_point is None else solved.zero_point.split(heights)
    for work, codes, scale, zero in zip(works, *parts, zeros, strict=True):
        layer = work.layer if method == work.layer.method else fall_back(work.layer, work.reason or "")
        yield work, layer, QuantizedTensor(codes, scale, zero, solved.scheme, solved.notes)


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
        "solver_notes": list(quantized.notes),
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
    sink.write_text("config.json", json.dumps(config, indent=2) + "\n")
    extra = chosen.extra_files(quantization)
    for name, text in extra.items():
        sink.write_text(name, text)
    for path in source.side_files:
        # left behind by somebody's earlier quantization, of other weights than these
        if path.parent != source.path or path.name not in extra:
            sink.copy_file(path)
    readme = source.path / "README.md"
    card = readme.read_text(encoding="utf-8-sig", errors="replace") if readme.is_file() else None
    sink.write_text("README.md", model_card(manifest, card))


def run_key(
    source: Source, recipe: Recipe, device: torch.device, calibration: CalibrationRows | None
) -> dict[str, Any]:
    """What must agree for a killed run to continue: recipe, source, text, versions and kind of device."""
    return {
        "lowbit": lowbit.__version__,
        "recipe": recipe.model_dump(mode="json"),
        "source": {
            source.label(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in source.files
        },
        "versions": versions(),
        "device": device.type,
        "calibration": None if calibration is None else checksum(calibration.rows),
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
    source: Source,
    plan: Plan,
    rows: list[dict[str, Any]],
    source_sha256: dict[str, str],
    calibration: CalibrationRows | None,
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
        "notes": [*plan.notes, *fallback_notes(rows), *(calibration.notes if calibration else ())],
    } | ({} if calibration is None else {"calibration": calibration.to_json()})


def fallback_notes(rows: list[dict[str, Any]]) -> list[str]:
    """What calibration could not do, counted by reason."""
    fallen = Counter(row["fallback"] for row in rows if "rtn: " in (row.get("fallback") or ""))
    return [f"{count} layers: {reason}" for reason, count in fallen.items()]


def summarize(
    plan: Plan, manifest: dict[str, Any], out: Path, files: dict[str, str], seconds: float
) -> dict[str, Any]:
    """What the last lines of the command say."""
    measured = [row for row in manifest["layers"] if row["errors"]]
    worst = sorted(measured, key=lambda row: -row["errors"]["output_error"])[:5]
    return {
        "out": str(out),
        "model": plan.model,
        "calibrated": any(SOLVERS[row["method"]].needs_data for row in manifest["layers"]),
        "files": len(files),
        "source_bytes": plan.source_bytes,
        "output_bytes": sum((out / name).stat().st_size for name in files if name.endswith(".safetensors")),
        "layers": len(plan.layers),
        "copied": len(plan.copies),
        "bits_per_weight": round(plan.bits_per_weight, 3),
        "coverage": round(plan.coverage, 4),
        "seconds": round(seconds, 2),
        "worst": [{"name": row["name"], **row["errors"]} for row in worst],
        "notes": manifest["notes"],
    }
