"""Lists of module names as a few regular expressions, for the configs that engines match names with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def patterns(names: Iterable[str]) -> list[str]:
    """Regular expressions that match exactly these names: names that differ in one index share one.

    "layers.0.mlp.up_proj" and "layers.1.mlp.up_proj" become layers\\.(?:0|1)\\.mlp\\.up_proj.
    Neither end is anchored.
    """
    # odd places of a split name hold an index, as text; after merging, the tuple of all indices
    keys: list[tuple[Any, ...]] = [tuple(re.split(r"(?<=\.)(\d+)(?=\.)", name)) for name in names]
    for place in sorted({i for key in keys for i in range(1, len(key), 2)}, reverse=True):
        merged: dict[tuple[tuple[Any, ...], tuple[Any, ...]], list[str]] = {}
        for key in keys:
            index = key[place] if place < len(key) else ""
            merged.setdefault((key[:place], key[place + 1 :]), []).append(str(index))
        keys = [
            (*before, tuple(indices), *after) if indices != [""] else before
            for (before, after), indices in merged.items()
        ]
    return ["".join(map(_expression, key)) for key in keys]


def _expression(part: str | tuple[str, ...]) -> str:
    if isinstance(part, str):
        return re.escape(part)
    return part[0] if len(part) == 1 else f"(?:{'|'.join(part)})"
