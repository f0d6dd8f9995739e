"""What quantize will do, decided from headers and config alone, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.recipe import Recipe
from lowbit.scheme import QuantScheme


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer of the output that will be quantized.

    name: module name in the output, without `.weight`.  shape: (out_features, in_features).
    source: tensor in the source that holds it.  expert, rows: for a fused expert tensor, its first index and
    the rows (after any transpose) that belong to this layer.  transposed: the source stores [in, out].
    fallback: why the scheme is not the one asked for, None if it is.
    """

    name: str
    shape: tuple[int, int]
    scheme: QuantScheme
    method: str
    source: str
    source_bytes: int
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    fallback: str | None = None


@dataclass(frozen=True)
class CopyPlan:
    """One source tensor that is copied as it is, and why. linear: engines see a dense linear layer in it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reason: str
    linear: bool = False


@dataclass(frozen=True)
class Plan:
    """Every source tensor is in exactly one of layers, copies, dropped (name -> reason)."""

    model: str
    recipe: Recipe
    layers: tuple[LayerPlan, ...]
    copies: tuple[CopyPlan, ...]
    dropped: dict[str, str]
    notes: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        return sum(layer.source_bytes for layer in self.layers) + sum(copy.nbytes for copy in self.copies)

    def to_json(self) -> dict[str, Any]:
        """The plan as `lowbit plan --json` prints it."""
        raise NotImplementedError
