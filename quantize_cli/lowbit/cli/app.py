"""The `lowbit` program: its commands and how it ends."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lowbit import __version__
from lowbit.cli.commands import (
    bench,
    convert,
    evaluate,
    generate,
    inspect,
    plan,
    push,
    quantize,
    report,
    tune,
    verify,
)
from lowbit.cli.errors import exit_code

app = typer.Typer(
    name="lowbit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def lowbit(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Print the version."),
    ] = False,
) -> None:
    """Quantize language models to low bits, prove it layer by layer, write a checkpoint that engines load.

    Start with: lowbit quantize demo
    """


app.command("quantize")(quantize.quantize)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("convert")(convert.convert)
app.command("tune")(tune.tune)
app.command("push")(push.push)


def main() -> None:
    """The console script."""
    # Read when torch loads. Its threads spin while they wait; on two cores they kept the thread that proves
    # layers from running, and gptq took four times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _open_streams()
    sys.exit(exit_code(lambda: app(standalone_mode=False), events="--json" in sys.argv[1:]))


def _open_streams() -> None:
    """Give closed streams somewhere to go; the others show question marks for what their encoding lacks."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # takes the free descriptor too, which a weight file must not get
            setattr(sys, name, Path(os.devnull).open("r+", errors="replace"))  # noqa: SIM115
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
