"""lowbit: quantize, pack, prove and write low-bit checkpoints of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from lowbit.events import OnEvent

__version__ = "0.1.0"


def quantize(
    model: str | Path,
    out: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    resume: bool = True,
    overwrite: bool = False,
    revision: str | None = None,
    on_event: OnEvent | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Quantize a model as `lowbit quantize` does, and return what its last lines say.

    model: local folder, Hub id, .gguf file or "demo".  out: None is MODEL-intBITS-gGROUP in this folder.
    recipe: a YAML file.  keys: those of a recipe (bits=4, method="rtn", ...), which win over the file.
    Raises errors.LowbitError for bad input, before anything is written.
    """
    from lowbit import events, pipeline
    from lowbit.recipe import make_recipe

    return pipeline.quantize(
        model,
        out,
        make_recipe(recipe, **keys),
        resume=resume,
        overwrite=overwrite,
        revision=revision,
        on_event=on_event or events.ignore,
    )
