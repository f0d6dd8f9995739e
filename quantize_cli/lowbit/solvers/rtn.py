"""Round to nearest: the grid spans each group's range and every weight takes the nearest code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.scheme import PackedTensor, QuantizedTensor, QuantScheme

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
    from lowbit_kernels.reference import quantize_groups

    codes, scale, zero_point = quantize_groups(weight, **_grid(weight, scheme))
    return QuantizedTensor(codes, scale, zero_point, scheme)


def solve_packed(weight: Tensor, scheme: QuantScheme) -> PackedTensor:
    """The same codes, quantized and packed in one pass over a weight [N, K] that lies on a GPU."""
    from lowbit_kernels.packing import quantize_pack

    words, scale, zero_point = quantize_pack(weight, **_grid(weight, scheme))
    return PackedTensor(words, scale, zero_point, scheme, weight.shape[1])


def _grid(weight: Tensor, scheme: QuantScheme) -> dict[str, Any]:
    """The scheme as the kernel package names it."""
    import torch

    return {
        "bits": scheme.bits,
        "group_size": scheme.width(weight.shape[1]),
        "symmetric": scheme.symmetric,
        "scale_dtype": getattr(torch, scheme.scale_dtype),
    }
