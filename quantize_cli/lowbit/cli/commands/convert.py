"""`lowbit convert DIR --format NAME`: the same weights, bit for bit, in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli import options
from lowbit.cli.output import counted, facts, listener, next_command, output, quoted, size


def convert(
    folder: options.Folder,
    format: Annotated[
        str, typer.Option("--format", help="compressed-tensors, gptq, gptq-v2 or awq.", metavar="NAME")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write.", show_default="DIR-FORMAT")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace what --out holds.")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a quantized folder in another format: bit for bit the same weights, not quantized again."""

    with output(json, quiet) as shown:
        shown.check_folder(folder)
        with shown.starting():
            from lowbit.convert import convert as run
        with listener(shown) as on_event:
            summary = run(folder, format, out, overwrite=overwrite, on_event=on_event)
        rows = [
            ("written", summary["out"]),
            ("format", f"{summary['format']}, {counted(summary['layers'], 'layer')}"),
            ("size", size(summary["bytes"])),
        ]
        shown.show("", facts(rows), "", next_command(f"lowbit verify {quoted(summary['out'])}"))
