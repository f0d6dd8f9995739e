"""`lowbit bench [DIR]`: quantized products against dense ones on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli import options
from lowbit.cli.output import output, percent, small_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit_kernels.bench import BenchRow


def bench(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A folder that lowbit quantize wrote.", show_default="the layers of an 8B model"),
    ] = None,
    tokens: Annotated[list[int] | None, options.tokens("1 to 1024")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw a roofline into this file (.png, .svg).", metavar="FILE"),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time every kind of layer beside the dense product it replaces; what is wrong gets no time."""
    with output(json, quiet) as out:
        with out.starting():
            from dataclasses import asdict

            from lowbit import bench as benchmark
            from lowbit_kernels.bench import TOKENS

        if plot is not None:
            benchmark.check_plot(plot)

        def on_row(row: BenchRow) -> None:
            derived = {"speedup": row.speedup, "gb_per_second": row.gb_per_second}
            out.event({"event": "bench", **asdict(row), **derived})
            out.status.print(f"{row.n}×{row.k}, {row.m} tokens: {_us(row.us)}")

        rows = benchmark.bench(folder, tokens=tokens or TOKENS, on_row=on_row)
        out.show(bench_table(rows))
        if plot is not None:
            benchmark.plot(rows, plot)
            out.status.print(f"drawn in {plot}")


def bench_table(rows: list[BenchRow]) -> RenderableType:
    """One row for each shape and number of tokens; of floor is the time to read the weight over the time."""
    table = small_table("microseconds of one product")
    for column in ("out×in", "tokens", "dense", "quantized", "speedup", "GB/s", "of floor", "kernel"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.n}×{row.k}",
            str(row.m),
            _us(row.dense_us),
            _us(row.us),
            "–" if row.speedup is None else f"{row.speedup:.2f}x",
            "–" if row.gb_per_second is None else f"{row.gb_per_second:.0f}",
            percent(row.share_of_floor),
            row.config.variant,
        )
    return table


def _us(value: float | None) -> str:
    return "wrong" if value is None else f"{value:.1f}"
