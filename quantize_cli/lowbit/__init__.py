"""lowbit: quantize, pack, prove and write low-bit checkpoints of language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from lowbit.events import OnEvent
    from lowbit.hub import push
    from lowbit.runtime import load, patch_model, use_in_transformers

__version__ = "0.1.0"
__all__ = ["load", "patch_model", "push", "quantize", "use_in_transformers"]

# loaded on first use: `lowbit --help` imports neither torch nor transformers
_HOMES = {"load": "runtime", "patch_model": "runtime", "push": "hub", "use_in_transformers": "runtime"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lowbit.{_HOMES[name]}"), name)


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
