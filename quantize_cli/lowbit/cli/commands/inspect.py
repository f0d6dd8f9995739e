"""`lowbit inspect DIR`: what is in a quantized checkpoint and what can load it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lowbit.cli import options
from lowbit.cli.output import counted, facts, note_list, output, percent, size, small_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit.inspection import Inspection


def inspect(
    folder: options.Folder,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", metavar="", help="Show which kernel runs each shape and why others refuse."
        ),
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="sm_90, gfx942, ...", show_default="this machine's", metavar="NAME"),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show schemes, sizes, which engines load the folder with which kernels, and how far it can be split."""

    with output(json, quiet) as out:
        out.check_folder(folder)
        with out.starting():
            from lowbit.inspection import inspect as run
        found = run(folder, kernels=kernels, arch=arch)
        out.event({"event": "done", **found.to_json()})
        out.show(*inspection_view(found))


def inspection_view(found: Inspection) -> list[RenderableType]:
    """What inspect prints for people."""
    schemes = small_table(found.path)
    schemes.add_column("scheme", no_wrap=True)
    for column in ("layers", "weights", "size", "bits per weight"):
        schemes.add_column(column, justify="right", no_wrap=True)
    for row in found.schemes:
        bits = f"{row.bits_per_weight:.2f}"
        schemes.add_row(row.scheme, str(row.layers), f"{row.weights:,}", size(row.packed_bytes), bits)

    engines = small_table("engines")
    for column in ("engine", "loads", "kernels", "note"):
        engines.add_column(column, overflow="fold")
    for engine in found.engines:
        loads = Text("yes", style="green") if engine.loads else Text("no", style="red")
        engines.add_row(engine.name, loads, ", ".join(engine.kernels), engine.note)

    share = percent(found.total_bytes / max(1, found.original_bytes))
    summary = [
        ("architecture", found.architecture),
        ("format", f"{found.format}, {counted(found.files, 'file')}"),
        ("size", f"{size(found.total_bytes)}, {share} of 16 bits; {size(found.dense_bytes)} not quantized"),
        ("tensor parallel", f"up to {found.tensor_parallel} ({found.tensor_parallel_limit})"),
        ("written by", f"lowbit {found.lowbit_version}" if found.lowbit_version else "another program"),
    ]
    views: list[RenderableType] = [schemes, "", engines, "", facts(summary)]
    if found.kernels:
        views += ["", *_kernel_views(found)]
    if found.faults:
        views += ["", Text("faults", style="bold red"), note_list(list(found.faults))]
    return views


def _kernel_views(found: Inspection) -> list[RenderableType]:
    """The variant that runs each shape, and below it the distinct reasons of those that do not."""
    table = small_table("kernels")
    for column in ("layers", "out×in", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("scheme", no_wrap=True)
    table.add_column("runs", overflow="fold")
    refusals: Counter[str] = Counter()
    for row in found.kernels:
        table.add_row(
            str(row.layers), f"{row.n}×{row.k}", str(row.tokens), row.scheme, row.chosen or "none: all refuse"
        )
        refusals.update(f"{variant}: {reason}" for variant, reason in row.refusals.items())
    if not refusals:
        return [table]
    return [table, "", Text("refused", style="bold"), note_list(list(refusals), most=20)]
