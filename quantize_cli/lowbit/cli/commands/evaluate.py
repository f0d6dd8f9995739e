"""`lowbit eval DIR`: how much of the model is left, on text."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli import options
from lowbit.cli.output import facts, listener, next_command, output, percent, small_table

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
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure perplexity and, beside the original, KL divergence and top-1 agreement."""

    with output(json, quiet) as out:
        with out.starting():
            from lowbit.evaluate import evaluate as run
        with listener(out) as on_event:
            report = run(
                model,
                source,
                text or None,
                max_tokens=max_tokens,
                window=window,
                stride=stride,
                device=device,
                on_event=on_event,
            )
        ours = (Path(model) / "lowbit.json").is_file()
        if ours:
            # where `lowbit report` finds it
            report.save(model)
        out.show(*scores_view(report))
        if ours:
            out.show(next_command(f"lowbit report {shlex.quote(model)}"))


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
        "",
        facts([("protocol", report.protocol), ("original", report.source or "not given")]),
        "",
    ]


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
