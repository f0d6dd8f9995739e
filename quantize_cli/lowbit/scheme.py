"""How a weight is quantized, and the tensors that result.

A weight W is [N = out_features, K = in_features]; groups of G consecutive inputs share one scale (and one
zero-point), so that W ≈ (codes - zero_point) · scale with codes in 0 .. 2^bits - 1. The symmetric grid has
the fixed zero-point 2^(bits-1), which is not stored.

torch is imported only for annotations: plans and the command line can be built without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lowbit.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128, 256, -1)
ScaleDtype = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class QuantScheme:
    """The grid of one weight.

    bits: 2, 3, 4 or 8.  group_size: inputs that share a scale; -1 is the whole row.
    scale_dtype: dtype in which scales are stored; scales are rounded to it before codes are chosen.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    scale_dtype: ScaleDtype = "float16"

    def __post_init__(self) -> None:
        # 4.0 and True equal whole numbers, and a file may hold anything
        if type(self.bits) is not int or self.bits not in BITS:
            raise PlanError(f"bits {self.bits} is not supported; use one of {', '.join(map(str, BITS))}")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise PlanError(
                f"group {self.group_size} is not supported; use one of {', '.join(map(str, GROUP_SIZES))}"
            )
        if type(self.symmetric) is not bool:
            raise PlanError(f"symmetric is {self.symmetric!r}; it is true or false")

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def symmetric_zero(self) -> int:
        """The zero-point of the symmetric grid, 2^(bits-1)."""
        return 2 ** (self.bits - 1)

    def width(self, in_features: int) -> int:
        """Inputs per group for a row of in_features; PlanError if groups do not fill the row."""
        width = in_features if self.group_size == -1 else self.group_size
        if in_features % width:
            raise PlanError(
                f"in_features {in_features} is not a multiple of group size {width}; "
                "use a smaller --group or --on-indivisible smaller-group"
            )
        return width

    def groups(self, in_features: int) -> int:
        """Groups per row."""
        return in_features // self.width(in_features)

    def __str__(self) -> str:
        group = "row" if self.group_size == -1 else f"g{self.group_size}"
        return f"int{self.bits} {'sym' if self.symmetric else 'asym'} {group}"


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and grid of one weight, before packing.

    codes: [N, K] uint8.  scale: [N, K/G] in the stored dtype.
    zero_point: [N, K/G] for the asymmetric grid, None for the symmetric one; uint8, or float32 where a
    solver keeps it fractional (no interoperable format stores that).
    notes: what the solver met and did about it, for the manifest.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: QuantScheme
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        grid = (n, self.scheme.groups(k))
        assert tuple(self.scale.shape) == grid, f"scale {tuple(self.scale.shape)}, wanted {grid}"
        assert (self.zero_point is None) == self.scheme.symmetric
        assert self.zero_point is None or tuple(self.zero_point.shape) == grid

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k


@dataclass(frozen=True)
class PackedTensor:
    """A quantized weight in the words that files and kernels hold.

    words: [N, ceil(K · bits / 32)] int32, code k of a row at bit k · bits, lowest bits first.
    scale, zero_point: as in QuantizedTensor.  in_features: K, which the words alone do not tell.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: QuantScheme
    in_features: int

    def __post_init__(self) -> None:
        n = self.words.shape[0]
        width = -(-self.in_features * self.scheme.bits // 32)
        assert tuple(self.words.shape) == (n, width), f"words {tuple(self.words.shape)}, wanted {(n, width)}"
        assert tuple(self.scale.shape) == (n, self.scheme.groups(self.in_features))

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and zero-points (these packed at `bits` each)."""
        zeros = 0 if self.zero_point is None else -(-self.zero_point.numel() * self.scheme.bits // 8)
        return self.words.nbytes + self.scale.nbytes + zeros
