"""`lowbit verify DIR`: proof from the written files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lowbit.cli import options
from lowbit.cli.output import (
    counted,
    decibel,
    duration,
    facts,
    listener,
    next_command,
    note_list,
    output,
    percent,
    quoted,
    rate,
    small_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit.verify import VerifyReport


def verify(
    folder: options.Folder,
    source: options.Source = None,
    hashes: Annotated[
        bool, typer.Option("--hash/--no-hash", metavar="", help="Compare SHA-256 of every file.")
    ] = True,
    numeric: Annotated[
        bool, typer.Option("--numeric/--no-numeric", metavar="", help="Decode and measure every layer.")
    ] = True,
    forward: Annotated[
        bool, typer.Option("--forward/--no-forward", metavar="", help="Run the whole model on a few tokens.")
    ] = True,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Prove that a checkpoint holds what it should; exit 1 if anything is wrong."""
    from lowbit.errors import GateError

    with output(json, quiet) as out:
        out.check_folder(folder)
        with out.starting():
            from lowbit.verify import verify as run
        with listener(out) as on_event:
            report = run(
                folder,
                source,
                hash=hashes,
                numeric=numeric,
                forward=forward,
                device=device,
                on_event=on_event,
            )
        out.show(*report_view(report))
        if not report.ok:
            first = report.failures[0]
            raise GateError(f"{report.path}: {counted(len(report.failures), 'fault')}; the first: {first}")
        compare = f" --source {quoted(report.source)}" if report.source else ""
        out.show(next_command(f"lowbit eval {quoted(report.path)}{compare}"))


def report_view(report: VerifyReport) -> list[RenderableType]:
    """Each check with its outcome, the faults, and the layers that lost most."""
    checks = Table.grid(padding=(0, 2))
    for name, outcome in report.checks.items():
        style = {"ok": "green", "failed": "bold red"}.get(outcome, "dim")
        checks.add_row(Text(name), Text(outcome, style=style))
    views: list[RenderableType] = ["", checks, ""]
    if report.failures:
        views += [Text("faults", style="bold red"), note_list(list(map(str, report.failures)), most=20), ""]
    if report.worst():
        views += [worst_table(report), ""]
    verdict = Text("verified", style="bold green") if report.ok else Text("NOT verified", style="bold red")
    views.append(Text.assemble(verdict, f"  {report.path}"))
    recorded = any(layer.recorded for layer in report.layers)
    alone = "the errors recorded when it was quantized" if recorded else "itself: nothing is recorded of it"
    views.append(
        facts(
            [
                ("layers", f"{len(report.layers)} in {report.format or 'no quantized'} format"),
                ("against", report.source or alone),
                ("files hashed", str(report.files)),
                ("time", f"{duration(report.seconds)}, {rate(report.bytes_read, report.seconds, 'bytes')}"),
            ]
        )
    )
    return [*views, ""]


def worst_table(report: VerifyReport, count: int = 5) -> RenderableType:
    table = small_table("worst layers")
    table.add_column("layer", overflow="fold")
    table.add_column("scheme", no_wrap=True)
    for column in ("output error", "SNR"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in report.worst(count):
        table.add_row(layer.name, layer.scheme, percent(layer.output_error), decibel(layer.snr_db))
    return table
