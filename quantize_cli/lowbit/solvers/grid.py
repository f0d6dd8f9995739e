"""Grids of groups whose range is searched instead of taken from the extremes.

Shrinking a group's range trades clipped extremes for a finer step. Each candidate shrinks both ends by one
factor; the best is the smallest Σ h_k |w_k - Q(w_k)|^p over the group, the unshrunk range first, so that the
result is never worse than rounding to nearest in that sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.scheme import QuantScheme
from lowbit_kernels.reference import group_grid, require_finite

# shrink factors, tried in this order, then two between the best one and its neighbours
_COARSE = tuple(1 - 0.06 * i for i in range(13))
_FINE = (-0.04, -0.02, 0.02, 0.04)

# weights handled at a time: smaller chunks cost more in calls than they save in cache
_CHUNK = {"cpu": 1 << 18}


def abs_power(x: Tensor, exponent: float, out: Tensor) -> Tensor:
    """|x|^exponent for float32 x, off by at most 3% (1 + exponent), written to out; exponent is in (0, 1).

    The bits of a positive float, read as an integer, are its logarithm to base 2, piecewise linear, scaled by
    2^23 and offset by 127: a power is one multiplication of that integer, where a library's pow takes ten
    times as long.
    """
    torch.abs(x, out=out)
    bits = out.view(torch.int32)
    # 0.043 halves the largest error, that of log2(1 + m) ≈ m
    offset = (1 - exponent) * (127 - 0.043) * 2**23
    return out.copy_(torch.mul(bits, exponent).add_(offset).to(torch.int32).view(torch.float32))


def _by_group(weight: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of groups of weight [N, K] and their weights as [width, groups] float32, groups being
    numbered along rows."""
    grouped = weight.reshape(-1, width)
    step = max(1, _CHUNK.get(weight.device.type, 1 << 26) // width)
    for start in range(0, grouped.shape[0], step):
        part = slice(start, min(start + step, grouped.shape[0]))
        yield part, grouped[part].T.float().contiguous()


def range_grid(weight: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """The grid of rounding to nearest: scale [N, G] in the stored dtype, zero_point [N, G] float32.

    Raises ValueError if a scale is not finite in the stored dtype.
    """
    # columns first: what a calibrated solver holds is contiguous that way, and so are the lanes of a minimum
    grouped = weight.float().T.unflatten(0, (-1, scheme.width(weight.shape[1])))
    dtype = getattr(torch, scheme.scale_dtype)
    scale, zero = group_grid(grouped.amin(1), grouped.amax(1), scheme.bits, scheme.symmetric, dtype)
    scale = scale.T
    require_finite(scale)
    return scale, zero.T


def search_grid(
    weight: Tensor, scheme: QuantScheme, *, norm: float, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return scale [N, G] in the stored dtype and zero_point [N, G] float32, whole numbers.

    weight: [N, K].  norm: p above.  importance: [K], h above, None for equal weights.
    Raises ValueError if a scale is not finite in the stored dtype.
    """
    n, k = weight.shape
    width, dtype = scheme.width(k), getattr(torch, scheme.scale_dtype)
    scale = torch.empty(n * k // width, dtype=dtype, device=weight.device)
    zero = torch.empty(scale.shape, device=weight.device)
    for part, w in _by_group(weight, width):
        h = None
        if importance is not None:
            index = torch.arange(part.start, part.stop, device=w.device) % (k // width)
            h = importance.float().view(-1, width).T[:, index].contiguous()
        scale[part], zero[part] = _search(w, h, norm, scheme, dtype)
    scale = scale.view(n, -1)
    require_finite(scale)
    return scale, zero.view(n, -1)


def _search(
    w: Tensor, importance: Tensor | None, norm: float, scheme: QuantScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The best grid of groups w [width, groups]: scale in dtype, zero-point float32, both [groups]."""
    lo, hi = w.amin(0), w.amax(0)
    q, e = torch.empty_like(w), torch.empty_like(w)
    best_scale, best_zero = group_grid(lo, hi, scheme.bits, scheme.symmetric, dtype)
    best_loss = torch.full_like(lo, torch.inf)
    best_shrink = torch.ones_like(lo)

    def consider(shrink: Tensor) -> None:
        s, z = group_grid(lo * shrink, hi * shrink, scheme.bits, scheme.symmetric, dtype)
        step = s.float()
        torch.div(w, step, out=q).round_().clamp_(-z, scheme.max_code - z)
        torch.addcmul(w, q, step, value=-1, out=e)
        loss = _loss(e, q, norm, importance)
        better = loss < best_loss
        for best, new in ((best_loss, loss), (best_scale, s), (best_zero, z), (best_shrink, shrink)):
            best.copy_(torch.where(better, new, best))

    for factor in _COARSE:
        consider(torch.full_like(lo, factor))
    coarse = best_shrink.clone()
    for nudge in _FINE:
        # a range wider than the extremes has no use
        consider((coarse + nudge).clamp(max=1.0))
    return best_scale, best_zero


def _loss(error: Tensor, scratch: Tensor, norm: float, importance: Tensor | None) -> Tensor:
    """Σ h |error|^norm over the group axis; error is consumed."""
    if norm == 2.0:
        torch.mul(error, error, out=scratch)
    else:
        # the power beyond the square is small, and so is its error
        abs_power(error, norm - 2.0, out=scratch).mul_(error).mul_(error)
    if importance is not None:
        scratch.mul_(importance)
    return scratch.sum(0)
