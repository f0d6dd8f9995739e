"""`lowbit quantize MODEL`: read, solve, pack, prove and write a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lowbit.cli import options
from lowbit.cli.commands.plan import plan_view, show_plan
from lowbit.cli.errors import Interrupted
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
    size,
    small_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


@options.with_recipe_flags
def quantize(
    model: options.Model,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write.", show_default="MODEL-intBITS-gGROUP here"),
    ] = None,
    *,
    flags: dict[str, Any],
    recipe: options.RecipeFile = None,
    revision: options.Revision = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            metavar="",
            help="Continue a run that was killed.",
            rich_help_panel=options.RUN,
        ),
    ] = True,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", metavar="", help="Replace what --out holds.", rich_help_panel=options.RUN
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Only show the plan.", rich_help_panel=options.RUN)
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize a model and prove every layer; the folder it writes loads in transformers and vLLM."""
    with output(json, quiet) as shown:
        if dry_run:
            show_plan(shown, model, recipe, revision, flags)
            return

        from lowbit.checkpoint.source import check_source
        from lowbit.events import Event, PlanReady
        from lowbit.recipe import make_recipe

        # a mistyped flag or path need not wait for torch, whose import takes seconds
        wanted = make_recipe(recipe, **flags)
        check_source(model, trust_remote_code=wanted.trust_remote_code)
        with shown.starting():
            from lowbit.pipeline import quantize as run

        try:
            with listener(shown) as on_event:

                def show_plan_too(event: Event) -> None:
                    if isinstance(event, PlanReady):
                        shown.show(*plan_view(event.plan))
                    on_event(event)

                summary = run(
                    model,
                    out,
                    recipe=wanted,
                    resume=resume,
                    overwrite=overwrite,
                    revision=revision,
                    on_event=show_plan_too,
                )
        except Interrupted as e:
            # a reader that has gone is interrupted without a word
            why = str(e) or "nobody reads the output"
            raise Interrupted(f"{why}; what is done is kept: run the same command again to resume") from None
        shown.show(*summary_view(summary))


def summary_view(summary: dict[str, Any]) -> list[RenderableType]:
    """What a finished run ends with: worst layers, notes, where, size, bits per weight, what to run now."""
    views: list[RenderableType] = [""]
    if summary["worst"]:
        table = small_table("worst layers, on random tokens")
        table.add_column("layer", overflow="fold")
        for column in ("output error", "weight error", "SNR"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in summary["worst"]:
            errors = percent(row["output_error"]), percent(row["weight_error"]), decibel(row["snr_db"])
            table.add_row(row["name"], *errors)
        views += [table, ""]
    if summary["notes"]:
        views += [Text("notes", style="bold"), note_list(summary["notes"]), ""]
    before, after = summary["source_bytes"], summary["output_bytes"]
    views.append(
        facts(
            [
                ("written", summary["out"]),
                ("size", f"{size(before)} → {size(after)} ({percent(after / before)})"),
                (
                    "bits per weight",
                    f"{summary['bits_per_weight']:.2f} in {counted(summary['layers'], 'layer')}",
                ),
                ("time", f"{duration(summary['seconds'])}, {rate(before, summary['seconds'], 'bytes')}"),
            ]
        )
    )
    if summary["calibrated"]:
        # what calibration gains shows on text only
        views += [
            "",
            f"On text: lowbit eval {quoted(summary['out'])} --source {quoted(summary['model'])}",
        ]
    return [*views, "", next_command(f"lowbit verify {quoted(summary['out'])}")]
