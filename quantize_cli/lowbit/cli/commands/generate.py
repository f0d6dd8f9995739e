"""`lowbit generate DIR PROMPT`: a quick look at what a quantized model says."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from lowbit.cli import options
from lowbit.cli.output import output


def generate(
    model: Annotated[str, typer.Argument(help="A quantized folder, or any model.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    compare: Annotated[
        bool, typer.Option("--compare", metavar="", help="Show the original's answer beside it.")
    ] = False,
    source: options.Source = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, metavar="N")] = 48,
    chat: Annotated[bool, typer.Option("--chat", metavar="", help="Use the chat template.")] = False,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue a prompt greedily: decoded weights on a CPU, packed weights and our kernels on a GPU."""

    with output(json, quiet) as out:
        with out.starting():
            from lowbit.generate import generate as run
        origin = (source or recorded_source(model)) if compare else None
        answers = run(model, prompt, origin, max_new_tokens=max_new_tokens, chat=chat, device=device)
        out.event({"event": "done", **answers.to_json()})
        names: dict[str, tuple[str, bool | None]] = {model: (answers.text, answers.cut)}
        if origin is not None and answers.source_text is not None:
            names[f"{origin} (the original)"] = (answers.source_text, answers.source_cut)
        for name, (text, cut) in names.items():
            said = Text.assemble((f"{prompt}\n" if chat else prompt, "dim"), text, "…" if cut else "")
            out.show(Text(name, style="bold"), said, "")


def recorded_source(model: str) -> str:
    """The name of the original in the manifest of a quantized folder; SourceError if there is none."""
    from lowbit.errors import SourceError
    from lowbit.folder import open_folder

    manifest = open_folder(model).manifest
    if manifest is None:
        raise SourceError(f"{model}: no lowbit.json that names the original; pass --source MODEL")
    return manifest["source"]["name"]
