"""Second moments of a layer's inputs, and the factor that GPTQ needs of them.

For a linear y = W x the calibrated solvers see the data only through

    H = (2/n) Σ x xᵀ              [K, K]   x: inputs in the already quantized model
    D = (2/n) Σ (y~ - W x) xᵀ     [N, K]   y~: the output wanted, from the full-precision stream

With x~ the full-precision input and r an extra gap of the output (of the residual stream, say),
y~ = W x~ + r, so that D = W S + R with S = (2/n) Σ (x~ - x) xᵀ shared by all layers that read x, and
R = (2/n) Σ r xᵀ.

    moments = start_moments(k, device, shift=True, gap_features=n)
    for rows in batches: moments = add_tokens(moments, x, full=x_full, gap=r)
    stats = finish(moments, weight)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.errors import CalibrationError

# columns of H that one product fills: only panels on and above the diagonal are computed
_PANEL = {"cpu": 128, "cuda": 2048}


@dataclass(frozen=True)
class LayerStats:
    """What a calibrated solver knows of the data of one layer.

    hessian: [K, K] float32, (2/n) Σ x xᵀ over real tokens.  tokens: n.
    cross: [N, K] float32, (2/n) Σ (y~ - W x) xᵀ, or None where no full-precision stream is followed.
    """

    hessian: Tensor
    tokens: int
    cross: Tensor | None = None

    def __post_init__(self) -> None:
        k = self.hessian.shape[0]
        assert self.hessian.shape == (k, k), f"hessian {tuple(self.hessian.shape)} is not square"
        assert self.cross is None or self.cross.shape[1] == k


@dataclass(frozen=True)
class Moments:
    """Running sums over tokens; the tensors are added to in place, only panels on and above the diagonal of
    `hessian` hold data. Layers that read the same input share one.

    hessian: [K, K] Σ x xᵀ.  shift: [K, K] Σ (x~ - x) xᵀ or None.  gap: [N, K] Σ r xᵀ or None.  tokens: n.
    """

    hessian: Tensor
    shift: Tensor | None
    gap: Tensor | None
    tokens: int


def start_moments(
    k: int, device: torch.device | str = "cpu", *, shift: bool = False, gap_features: int = 0
) -> Moments:
    """Empty sums for inputs of width k. shift: also follow the full-precision input. gap_features: width of
    the output gap to follow, 0 for none."""

    def zeros(rows: int) -> Tensor:
        return torch.zeros(rows, k, dtype=torch.float32, device=device)

    return Moments(zeros(k), zeros(k) if shift else None, zeros(gap_features) if gap_features else None, 0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b, float32 sums of exact products."""
    if a.dtype == torch.float32:
        total.addmm_(a.T, b)
    else:
        # a product of two bf16 (or fp16) numbers is exact in float32, so tensor cores lose nothing here
        total += torch.mm(a.T, b, out_dtype=torch.float32)


def _operand(x: Tensor) -> Tensor:
    """x as [tokens, width] in a dtype whose products are summed in float32 on its device."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) else x.float()


@torch.no_grad()
def add_tokens(
    moments: Moments,
    x: Tensor,
    *,
    full: Tensor | None = None,
    gap: Tensor | None = None,
) -> Moments:
    """Return moments with the tokens of x added (the sums are updated in place).

    x: [..., K] inputs.  full: [..., K] the same inputs in the full-precision model, wanted if moments follow
    the shift.  gap: [..., N], wanted if moments follow the gap.  A weight per token is a factor on all three
    (its square root, where only H is followed).
    """
    rows = _operand(x)
    k = rows.shape[1]
    panel = _PANEL.get(rows.device.type, 2048)
    for first in range(0, k, panel):
        columns = slice(first, min(first + panel, k))
        _add_product(moments.hessian[columns, first:], rows[:, columns], rows[:, first:])
    if moments.shift is not None:
        assert full is not None, "these moments follow the full-precision input"
        # the difference is small beside x and is taken in float32, then needs no more than the inputs' dtype
        shift = (full.reshape(-1, k).float() - x.reshape(-1, k).float()).to(rows.dtype)
        _add_product(moments.shift, shift, rows)
    if moments.gap is not None:
        assert gap is not None, "these moments follow the gap of the output"
        _add_product(moments.gap, gap.reshape(rows.shape[0], -1).to(rows.dtype), rows)
    return replace(moments, tokens=moments.tokens + rows.shape[0])


def _mirror(total: Tensor) -> None:
    """Copy what lies above the diagonal of total [K, K] below it, in place: K may be 14336 and more, so that
    a copy is a gigabyte."""
    width = _PANEL["cpu"]
    for first in range(0, len(total), width):
        panel = slice(first, first + width)
        square = total[panel, panel]
        square.copy_(torch.triu(square) + torch.triu(square, 1).T)
        total[first + width :, panel] = total[panel, first + width :].T


@torch.no_grad()
def finish(moments: Moments, weight: Tensor | None = None, *, use_gap: bool = True) -> LayerStats:
    """Return the statistics of one layer; moments stay usable for the other layers that read the same input.

    weight: [N, K] of the layer, needed where the shift is followed.  use_gap: False for a layer whose output
    the gap does not concern.
    Raises CalibrationError if no token was seen or a sum is not finite.
    """
    if moments.tokens == 0:
        raise CalibrationError("no calibration token reached this layer")
    scale = 2.0 / moments.tokens
    _mirror(moments.hessian)
    hessian = moments.hessian * scale
    cross = None
    if moments.shift is not None:
        assert weight is not None, "the target of a layer needs its weight"
        cross = (weight.float() @ moments.shift).mul_(scale)
    if moments.gap is not None and use_gap:
        gap = moments.gap * scale
        cross = gap if cross is None else cross.add_(gap)
    # a NaN or an overflow anywhere in x shows on the diagonal, in x~ or r it shows in the row sums
    finite = torch.isfinite(hessian.diagonal()).all() and (
        cross is None or torch.isfinite(cross.sum(1)).all()
    )
    if not finite:
        raise CalibrationError(
            "the calibration inputs of this layer hold NaN, infinite or overflowing values"
        )
    return LayerStats(hessian, moments.tokens, cross)


# what is added to the diagonal, as multiples of damping x mean diagonal, until Cholesky succeeds
DAMPING_LADDER = (1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Factor:
    """R upper triangular with R Rᵀ = H + damping · mean(diag H) · I.

    root: [K, K] float32.  damping: as used, relative to the mean diagonal.  dtype: in which it was computed.
    """

    root: Tensor
    damping: float
    dtype: torch.dtype


def dead_columns(hessian: Tensor) -> Tensor:
    """[K] bool: inputs that were zero in every token."""
    return hessian.diagonal() <= 0


def _upper_root(hessian: Tensor, ridge: float, dtype: torch.dtype) -> Tensor | None:
    """R upper triangular with R Rᵀ = hessian + ridge I, None if it is not positive definite in dtype."""
    # Cholesky of the matrix read backwards: J H J = L Lᵀ gives R = J L J, without inverting H
    backwards = hessian.flip(0, 1).to(dtype)
    backwards.diagonal().add_(ridge)
    transposed, info = torch.linalg.cholesky_ex(backwards, upper=True)
    del backwards
    # factors come out column by column: Lᵀ that way is L row by row
    root = transposed.mT.flip(0, 1)
    good = int(info) == 0 and bool(torch.isfinite(root.diagonal()).all())
    return root if good else None


def factor(hessian: Tensor, damping: float) -> Factor:
    """Factor hessian ([K, K], no dead columns left), damped by damping · mean diagonal; each rung of
    DAMPING_LADDER is tried in float32, then in float64.

    Raises CalibrationError if no rung gives a factor.
    """
    mean = hessian.diagonal().double().mean().item()
    for rung in DAMPING_LADDER:
        for dtype in (torch.float32, torch.float64):
            root = _upper_root(hessian, rung * damping * mean, dtype)
            if root is not None:
                return Factor(root.float(), rung * damping, dtype)
    raise CalibrationError(
        f"the Hessian is not positive definite even with damping {DAMPING_LADDER[-1] * damping:g}"
    )
