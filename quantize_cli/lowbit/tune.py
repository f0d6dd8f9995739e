"""Kernel configs beside a checkpoint: the untuned choice of quantize, and what `lowbit tune` measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.errors import RecipeError
from lowbit.folder import KERNELS, Folder, open_quantized
from lowbit.plan import stacks
from lowbit.scheme import QuantScheme
from lowbit.whole import whole_file
from lowbit_kernels import tuning
from lowbit_kernels.dispatch import arch_of, choose, order_of
from lowbit_kernels.problem import Problem
from lowbit_kernels.tables import table_text

# What the untuned choice is written for where there is no GPU to ask.
USUAL_ARCH = "sm_90"

# Layers of a checkpoint: shape and scheme by name.
Layers = Mapping[str, tuple[tuple[int, int], QuantScheme]]


@dataclass(frozen=True)
class Kind:
    """One kind of product that a checkpoint asks for; group_size is the real width, K for a whole row."""

    n: int
    k: int
    bits: int
    group_size: int
    has_zero: bool
    act_dtype: str


def kinds(layers: Layers) -> list[Kind]:
    """The distinct kinds of products that lowbit.load makes of layers, in order.

    Siblings of one scheme are one product. fp32 models run in fp16: the fast kernels take 16 bits.
    """
    found: dict[Kind, None] = {}
    for names in stacks(layers):
        parts = [layers[name] for name in names]
        if len({(k, scheme) for (_, k), scheme in parts}) == 1:
            parts = [((sum(n for (n, _), _ in parts), parts[0][0][1]), parts[0][1])]
        for (n, k), scheme in parts:
            act = "float16" if scheme.scale_dtype == "float32" else scheme.scale_dtype
            found[Kind(n, k, scheme.bits, scheme.width(k), not scheme.symmetric, act)] = None
    return list(found)


def stored_kinds(folder: Folder) -> list[Kind]:
    """kinds() of the layers that a folder holds."""
    return kinds({name: (layer.shape, layer.scheme) for name, layer in folder.layers.items()})


def untuned_table(layers: Layers) -> str:
    """lowbit_kernels.json as quantize writes it: the shipped or plain choice for each kind and tokens."""
    arch = arch_of(torch.device("cuda")) if torch.cuda.is_available() else USUAL_ARCH
    stamp = {"tuned": False, "device": None, "arch": arch, "torch": torch.__version__}
    problems = (problem for kind in kinds(layers) for problem in _problems(kind, arch))
    return table_text(stamp, ((problem, choose(problem), None, None) for problem in problems))


def _problems(kind: Kind, arch: str) -> Iterator[Problem]:
    order = order_of(kind.group_size, kind.k)
    for tokens in tuning.TOKENS:
        yield Problem(
            kind.bits, kind.group_size, kind.has_zero, kind.act_dtype, tokens, kind.n, kind.k, arch, order
        )


def measurable(found: Iterable[Kind]) -> list[tuning.Shape]:
    """The kinds that the fast kernels can read, as lowbit_kernels measures them."""
    return [
        tuning.Shape(
            kind.n,
            kind.k,
            kind.bits,
            kind.group_size,
            torch.uint8 if kind.has_zero else None,
            getattr(torch, kind.act_dtype),
        )
        for kind in found
        if order_of(kind.group_size, kind.k) == "fragment"
    ]


def tune(
    path: str | Path,
    *,
    tokens: Iterable[int] = tuning.TOKENS,
    on_row: Callable[[Any], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure the kernels for a checkpoint's layers on the current GPU and write lowbit_kernels.json into it.

    on_row: called with each lowbit_kernels.tuning.Measured.
    Returns out, device, kinds and rows. Raises RecipeError without a GPU or if no kernel can be tuned.
    """
    if not torch.cuda.is_available():
        raise RecipeError(
            "tune measures on a GPU and torch sees none here; run it where the model will serve"
        )
    folder = open_quantized(path, "tune")
    found = stored_kinds(folder)
    shapes = measurable(found)
    if not shapes:
        raise RecipeError(f"{path}: none of its layers has a kernel that can be tuned")
    with whole_file(folder.path / KERNELS) as file:
        rows = tuning.tune_to(file, shapes, tokens, on_row=on_row)
    return {
        "out": str(folder.path / KERNELS),
        "device": torch.cuda.get_device_name(),
        "kinds": len(found),
        "rows": len(rows),
    }
