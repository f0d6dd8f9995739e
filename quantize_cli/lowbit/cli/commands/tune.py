"""`lowbit tune DIR`: measure the kernels for a checkpoint's layers on this GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from lowbit.cli import options
from lowbit.cli.output import counted, facts, next_command, output, quoted

if TYPE_CHECKING:
    from lowbit_kernels.tuning import Measured


def tune(
    folder: options.Folder,
    tokens: Annotated[list[int] | None, options.tokens("1 to 4096")] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a few kernel configs for each kind of layer; the fastest that is right stays in the folder."""

    with output(json, quiet) as shown:
        shown.check_folder(folder)
        with shown.starting():
            from lowbit.tune import tune as run
            from lowbit_kernels.tuning import TOKENS

        def on_row(row: Measured) -> None:
            shown.event({"event": "tuned", **asdict(row)})
            problem = row.problem
            rows = counted(problem.m_bucket, "token")
            shown.show(f"{problem.n}×{problem.k}, {rows}: {row.config.variant} {row.us:.1f} µs")

        summary = run(folder, tokens=tokens or TOKENS, on_row=on_row)
        shown.event({"event": "done", **summary})
        shown.show(
            "",
            facts([("written", summary["out"]), ("device", summary["device"])]),
            next_command(f"lowbit generate {quoted(folder)} 'Once upon a time'"),
        )
