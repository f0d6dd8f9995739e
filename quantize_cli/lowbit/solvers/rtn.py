"""Round to nearest: the grid spans each group's range and every weight takes the nearest code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.scheme import QuantizedTensor, QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.hessian import LayerStats


@dataclass(frozen=True)
class Options:
    """Rounding to nearest has nothing to set."""


def accepts(scheme: QuantScheme) -> str | None:
    """Every grid can be rounded to."""
    return None


def solve(weight: Tensor, scheme: QuantScheme, stats: LayerStats | None, options: Options) -> QuantizedTensor:
    """Quantize weight [N, K] (any float dtype) on the grid of lowbit_kernels.reference.quantize_groups."""
    import torch
    from lowbit_kernels.reference import quantize_groups

    codes, scale, zero_point = quantize_groups(
        weight,
        bits=scheme.bits,
        group_size=scheme.width(weight.shape[1]),
        symmetric=scheme.symmetric,
        scale_dtype=getattr(torch, scheme.scale_dtype),
    )
    return QuantizedTensor(codes, scale, zero_point, scheme)
