"""`lowbit eval DIR`: how much of the model is left, on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli import options
from lowbit.cli.output import facts, listener, next_command, output, percent, quoted, small_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit.evaluate import EvalReport, Scores


def evaluate(
    model: Annotated[str, typer.Argument(help="A quantized folder, or any model.")],
    source: Annotated[
        str | None, typer.Option("--source", help="The original model, for KL and top-1 agreement.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="A text file, a domain of its own; repeatable.", show_default="packaged"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Tokens in all.")
    ] = 8192,
    window: Annotated[int, typer.Option("--window", min=2, metavar="N", help="Tokens in a window.")] = 512,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, metavar="N", help="Between windows.", show_default="window"),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="NAME",
            help="Tasks of lm_eval: name or YAML file; repeatable.",
            show_default="none",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="Examples of each task.", show_default="all"),
    ] = None,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure perplexity and, beside the original, KL divergence and top-1 agreement."""

    with output(json, quiet) as out:
        if tasks:
            from lowbit.tasks import check_installed

            check_installed()
        with out.starting():
            from lowbit.errors import OutputError
            from lowbit.evaluate import evaluate as run
            from lowbit.events import Note
        with listener(out) as on_event:
            report = run(
                model,
                source,
                text or None,
                max_tokens=max_tokens,
                window=window,
                stride=stride,
                tasks=[name for names in tasks or () for name in names.split(",")],
                limit=limit,
                device=device,
                on_event=on_event,
            )
        ours = (Path(model) / "lowbit.json").is_file()
        out.show(*scores_view(report))
        if ours:
            try:
                # where `lowbit report` finds it
                report.save(model)
            except OutputError as e:
                ours = False
                out.note(Note(f"{e}: lowbit report will not have these scores", "warning"))
        if ours:
            out.show(next_command(f"lowbit report {quoted(model)}"))


def scores_view(report: EvalReport) -> list[RenderableType]:
    """Scores by domain and over all, and exactly what was measured."""
    table = small_table(report.path)
    table.add_column("text", overflow="fold")
    for column in ("tokens", "perplexity", "original's", "KL (nats)", "KL p99", "same top-1"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = report.domains if len(report.domains) > 1 else {}
    for name, scores in {**rows, "all": report.total}.items():
        table.add_row(name, *_cells(scores))
    return [
        "",
        table,
        *(["", tasks_table(report)] if report.tasks else []),
        "",
        facts([("protocol", report.protocol), ("original", report.source or "not given")]),
        "",
    ]


def tasks_table(report: EvalReport) -> RenderableType:
    """lm_eval's metrics with their standard errors, beside the original's."""
    table = small_table("tasks")
    for column in ("task", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("value", "original's"):
        table.add_column(column, justify="right", no_wrap=True)
    for task, metrics in report.tasks.items():
        for metric in (name for name in metrics if not name.endswith("_stderr")):
            both = (each.get(task, {}) for each in (report.tasks, report.source_tasks))
            table.add_row(task, metric, *(_with_error(found, metric) for found in both))
    return table


def _with_error(found: dict[str, float], metric: str) -> str:
    if metric not in found:
        return "–"
    error = found.get(f"{metric}_stderr")
    return f"{found[metric]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _cells(scores: Scores) -> list[str]:
    kl = "–" if scores.kl_mean is None else f"{scores.kl_mean:.4f} ± {scores.kl_error or 0.0:.4f}"
    return [
        str(scores.tokens),
        f"{scores.perplexity:.3f}",
        "–" if scores.source_perplexity is None else f"{scores.source_perplexity:.3f}",
        kl,
        "–" if scores.kl_p99 is None else f"{scores.kl_p99:.3f}",
        percent(scores.top1),
    ]
