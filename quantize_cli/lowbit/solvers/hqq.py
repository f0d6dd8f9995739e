"""Half-quadratic quantization: grids that fit the weight in a norm with p < 1, without data.

Minimise Σ |w - (q - z) s|^p, p = 0.7, group by group, by half-quadratic splitting [1]: an error e is split
into a sparse part shrink(e) = sign(e) max(|e| - |e|^(p-1) / β, 0), which the grid need not follow, and the
rest, clip(e) = e - shrink(e), to which it is refitted by least squares; β grows by κ each time. In units of
the scale, with d = w / s + z - q and c = q - z:

    fractional zero   z <- z - mean(clip(d))
    whole zero        s <- s (1 + Σ c clip(d) / Σ c²),   z <- round(mean(q) - mean(w - shrink) / s)

A whole zero-point cannot follow a shift that is a fraction of a step, so there the scale moves too. A group
stops at its first iterate that does not lower Σ |w - w^| and keeps its best one, of which the first is
rounding to nearest. ([1]'s package applies that rule to the sum over the whole tensor and keeps the iterate
that failed.)

[1] https://mobiusml.github.io/hqq_blog

Arithmetic is chosen so that a CPU and the fused kernel in lowbit_kernels.solve give the same bits: sums over
a group are taken by halving, the threshold |e|^(p-1) / β from the bits of floats (8% off
at most), nothing else rounds but + - * /.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.errors import RecipeError
from lowbit.scheme import QuantizedTensor, QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.hessian import LayerStats


@dataclass(frozen=True)
class Options:
    """Keys under `solver:` of a recipe.

    fractional_zero: a float32 zero-point per group, which no interoperable format stores.
    iterations: at most so many.
    """

    fractional_zero: bool = False
    iterations: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise RecipeError(f"solver: iterations {self.iterations!r} is not a whole number from 1")


def accepts(scheme: QuantScheme) -> str | None:
    """The symmetric grid has no zero-point to fit, and fitting its scale alone is worse than rtn."""
    if scheme.symmetric:
        return "hqq fits zero-points, which the symmetric grid has not; use --asym or --method rtn"
    return None


def solve(weight: Tensor, scheme: QuantScheme, stats: LayerStats | None, options: Options) -> QuantizedTensor:
    """Quantize weight [N, K] (any float dtype); stats are not used.

    Raises ValueError naming row and group if a scale is not finite in its stored dtype.
    """
    import torch

    from lowbit.solvers import half_quadratic

    with torch.no_grad():
        codes, scale, zero = half_quadratic.fit(weight, scheme, options.fractional_zero, options.iterations)
    return QuantizedTensor(codes, scale, zero, scheme)
