"""The options that several commands share.

Every key of a recipe is a flag of `quantize` and `plan`. A flag that is not given is None, so that the value
in a recipe file holds; the defaults are those of `lowbit.recipe.Recipe`, written here as text because help
must not wait for pydantic (a test compares the two).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

GRID, LAYERS, DATA, RUN = "Grid", "Layers", "Calibration", "Run"


def _flag(names: str, kind: Any, default: str, panel: str, text: str, metavar: str | None = None) -> Any:
    """An option that is None when it is not given; its default is shown as part of the help text."""
    option = typer.Option(
        *names.split(),
        help=f"{text} [dim]Default: {default}.[/dim]",
        show_default=False,
        rich_help_panel=panel,
        # typer would write <bool> beside a switch
        metavar="" if kind is bool else metavar,
    )
    return Annotated[kind | None, option]


# recipe key -> option, in the order of the help
RECIPE_FLAGS: dict[str, Any] = {
    "method": _flag(
        "--method", str, "gptq", GRID, "rtn or hqq: no data, any architecture; gptq: calibrated.", "NAME"
    ),
    "bits": _flag("--bits", int, "4", GRID, "2, 3, 4 or 8 bits per weight.", "N"),
    "group": _flag(
        "--group", int, "128", GRID, "Inputs that share a scale: 32, 64, 128, 256, or -1 for the row.", "N"
    ),
    "sym": _flag("--sym/--asym", bool, "sym (hqq: asym)", GRID, "Fixed or stored zero-point."),
    "format": _flag(
        "--format", str, "compressed-tensors", GRID, "compressed-tensors, gptq, gptq-v2 or awq.", "NAME"
    ),
    "include": _flag(
        "--include",
        list[str],
        "every decoder linear",
        LAYERS,
        "Quantize only these: a name, its last parts (mlp.down_proj) or re:REGEX from its start. Repeatable.",
        "PATTERN",
    ),
    "exclude": _flag(
        "--exclude", list[str], "none", LAYERS, "Leave these as they are. Repeatable.", "PATTERN"
    ),
    "on_indivisible": _flag(
        "--on-indivisible",
        str,
        "smaller-group",
        LAYERS,
        "Where the group does not divide in_features: smaller-group, skip or error.",
        "NAME",
    ),
    "allow_mixed_fused": _flag(
        "--allow-mixed-fused",
        bool,
        "off",
        LAYERS,
        "Let q/k/v or gate/up have unlike schemes, though engines fuse them.",
    ),
    "calib": _flag(
        "--calib",
        str,
        "text in the package",
        DATA,
        "A .txt, .jsonl, .json or .parquet file, a dataset's folder, or its id:split:column.",
        "TEXT",
    ),
    "samples": _flag("--samples", int, "128, on a CPU 8 or more", DATA, "Rows of calibration text.", "N"),
    "seqlen": _flag("--seqlen", int, "2048, on a CPU 512", DATA, "Tokens per row.", "N"),
    "seed": _flag("--seed", int, "0", DATA, "Picks the rows.", "N"),
    "strict": _flag("--strict", bool, "off", DATA, "A shortage of rows is an error, not a note."),
    "device": _flag("--device", str, "auto", RUN, "cpu, cuda, cuda:1 or auto.", "NAME"),
    "validate_layers": _flag(
        "--validate/--no-validate", bool, "on", RUN, "Prove each layer when it is packed."
    ),
    "trust_remote_code": _flag("--trust-remote-code", bool, "off", RUN, "Run the code that a model ships."),
}

Model = Annotated[str, typer.Argument(help="A folder, a Hub id, a .gguf file, or the word demo.")]
Folder = Annotated[Path, typer.Argument(help="A folder that lowbit quantize wrote.")]
Source = Annotated[
    str | None,
    typer.Option("--source", help="The original model.", show_default="as recorded in lowbit.json"),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", help="Branch, tag or commit of a Hub id.", rich_help_panel=RUN),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe", help="YAML with the same keys and per-layer rules; flags win.", rich_help_panel=RUN
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 or auto.", metavar="NAME")]
Json = Annotated[
    bool,
    typer.Option("--json", metavar="", help="One JSON event a line on stdout.", rich_help_panel="Output"),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", metavar="", help="Errors and warnings only.", rich_help_panel="Output"),
]


def tokens(default: str) -> Any:
    """The option --tokens of a command that measures; default is shown as such in the help text."""
    return typer.Option(
        "--tokens",
        help="Tokens in a call. Repeatable.",
        show_default=default,
        min=1,
        max=1 << 16,
        metavar="M",
    )


def with_recipe_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Put one option for each recipe key where a command says `flags: dict`.

    The command receives in `flags` those that were given, as `make_recipe(file, **flags)` takes them.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == "flags":
            parameters += [
                inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
                for key, option in RECIPE_FLAGS.items()
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        flags = {key: given.pop(key) for key in RECIPE_FLAGS}
        command(**given, flags={key: value for key, value in flags.items() if value is not None})

    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags
