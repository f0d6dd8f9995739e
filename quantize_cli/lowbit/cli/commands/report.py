"""`lowbit report DIR`: one HTML page about a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli import options
from lowbit.cli.output import facts, listener, next_command, output, quoted


def report(
    folder: options.Folder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write.", show_default="DIR/report.html")
    ] = None,
    source: options.Source = None,
    check: Annotated[
        bool, typer.Option("--verify", metavar="", help="Verify first and show what was found.")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write one self-contained HTML page: sizes, error of every layer, worst layers, evaluation."""

    with output(json, quiet) as shown:
        shown.check_folder(folder)
        with shown.starting():
            from lowbit.report import report as run
            from lowbit.verify import verify
        verified = None
        if check:
            with listener(shown) as on_event:
                verified = verify(folder, source, on_event=on_event)
        page = run(folder, out, source, verified)
        shown.event({"event": "done", "out": str(page)})
        shown.show(
            facts([("written", str(page))]),
            next_command(f"lowbit push {quoted(folder)} OWNER/NAME"),
        )
