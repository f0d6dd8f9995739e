"""The iteration of hqq on a CPU, and its dispatch to the fused kernel on a GPU.

Everything runs on chunks of groups that stay in cache, transposed to [group_size, groups] so that a sum over
a group is a handful of long vector additions. See hqq.py for the mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lowbit.scheme import QuantScheme
from lowbit_kernels.reference import TINY_SCALE, group_grid, require_finite
from lowbit_kernels.solve import BIAS, POWER, hqq_groups, threshold_bits

# weights handled at a time: their temporaries stay in a CPU's caches
_CHUNK = 1 << 18
# after these iterations the groups that have stopped are left out: on Gaussian weights about 45, 25, 15, 5
# and 1% go on
_STAGES = (3, 5, 7, 10, 14)


@dataclass(frozen=True)
class _State:
    """Where each group is, and its best iterate; all [groups] float32. loss is -inf for one that stopped."""

    scale: Tensor
    zero: Tensor
    loss: Tensor
    best_scale: Tensor
    best_zero: Tensor

    def __getitem__(self, part: Tensor) -> _State:
        return _State(*(getattr(self, f.name)[part] for f in fields(self)))

    def __setitem__(self, part: Tensor, new: _State) -> None:
        for f in fields(self):
            getattr(self, f.name)[part] = getattr(new, f.name)


def fit(
    weight: Tensor, scheme: QuantScheme, fractional: bool, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] uint8, scale [N, G] in the stored dtype and zero_point [N, G], float32 if fractional, else
    uint8, of weight [N, K], on the asymmetric grid.

    Raises ValueError if a scale is not finite in its stored dtype.
    """
    n, k = weight.shape
    width, dtype = scheme.width(k), getattr(torch, scheme.scale_dtype)
    if weight.is_cuda:
        return hqq_groups(weight, scheme.bits, width, dtype, fractional, iterations)
    grouped = weight.reshape(-1, width)
    chunk = max(1, _CHUNK // width)
    scale, zero = _start_grid(grouped, scheme, fractional, dtype)
    require_finite(scale.view(n, -1))
    state = _State(scale, zero, torch.full_like(zero, torch.inf), scale.clone(), zero.clone())
    alive = torch.arange(len(grouped))
    ends = [*(end for end in _STAGES if end < iterations), iterations]
    for first, last in zip([0, *ends], ends, strict=False):
        for part in alive.split(chunk):
            run = _run_fractional if fractional else _run_whole
            state[part] = run(_columns(grouped[part]), state[part], range(first, last), scheme, dtype)
        alive = alive[state.loss[alive] > -torch.inf]
    codes = torch.empty(grouped.shape, dtype=torch.uint8)
    for first in range(0, len(grouped), chunk):
        part = slice(first, first + chunk)
        w = _flush(grouped[part]) / state.best_scale[part, None]
        if fractional:
            w.add_(state.best_zero[part, None]).round_()
        else:
            w.round_().add_(state.best_zero[part, None])
        # int8 is a faster conversion than uint8 by far
        codes[part] = w.clamp_(0, scheme.max_code).sub_(128).to(torch.int8).view(torch.uint8) ^ 128
    shape = (n, k // width)
    zero = state.best_zero if fractional else state.best_zero.to(torch.uint8)
    return codes.view(n, k), state.best_scale.to(dtype).view(shape), zero.view(shape)


def _columns(groups: Tensor) -> Tensor:
    """[groups, width] of any float dtype as contiguous [width, groups] float32."""
    return _flush(groups).T.contiguous()


def _flush(weight: Tensor) -> Tensor:
    """float32 with 0 for what is subnormal, which not all hardware keeps."""
    return torch.nn.functional.hardshrink(weight.float(), torch.finfo(torch.float32).tiny)


def _start_grid(
    grouped: Tensor, scheme: QuantScheme, fractional: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The grid of rounding to nearest, [groups] float32 with the scale rounded to dtype; with a fractional
    zero-point it spans the weights only, not also 0."""
    lo, hi = _flush(grouped.amin(1)), _flush(grouped.amax(1))
    if not fractional:
        s, z = group_grid(lo, hi, scheme.bits, False, dtype)
        return s.float(), z
    # a constant group takes the scale that stores it exactly; for the rest group_grid of 0 .. hi - lo is
    # the plain quotient
    constant, _ = group_grid(lo, hi, scheme.bits, False, dtype)
    spread, _ = group_grid(torch.zeros_like(lo), hi - lo, scheme.bits, False, dtype)
    s = torch.where(lo == hi, constant, spread).float()
    return s, -lo / s


def group_sum(x: Tensor) -> Tensor:
    """Sum of x [width, groups] over the group by halving: first half plus second half, until one is left.
    x is consumed."""
    left = x.shape[0]
    while left > 1:
        half = 1 << (left - 1).bit_length() - 1
        x[: left - half].add_(x[half:left])
        left = half
    return x[0].clone()


def _clip(d: Tensor, scale: Tensor, iteration: int, bits: Tensor, scratch: Tensor) -> Tensor:
    """clip(d) = d - shrink(d), in scratch, for errors d [width, groups] in units of scale [groups].
    bits (int32) and scratch have d's shape."""
    torch.bitwise_and(d.view(torch.int32), 0x7FFFFFFF, out=bits)
    scratch.copy_(bits).mul_(POWER - 1)
    bits.copy_(scratch).add_(threshold_bits(scale.view(torch.int32) - BIAS, iteration))
    threshold = bits.view(torch.float32)
    torch.minimum(d, threshold, out=scratch)
    return torch.maximum(scratch, threshold.neg_(), out=scratch)


def _run_fractional(
    w: Tensor, state: _State, iterations: range, scheme: QuantScheme, dtype: torch.dtype
) -> _State:
    """Move the zero-points of groups w [width, groups]; the scale stays."""
    s, z, best, best_zero = state.scale, state.zero, state.loss, state.best_zero
    u, d, q = w.div_(s), torch.empty_like(w), torch.empty_like(w)
    bits = torch.empty(w.shape, dtype=torch.int32)
    for iteration in iterations:
        torch.add(u, z, out=d)
        torch.round(d, out=q).clamp_(0, scheme.max_code)
        d.sub_(q)
        loss = group_sum(torch.abs(d, out=q)) * s
        better = loss < best
        best_zero = torch.where(better, z, best_zero)
        # a group that did not improve never does again
        best = torch.where(better, loss, -torch.inf)
        z = z - group_sum(_clip(d, s, iteration, bits, q)) / len(w)
    return _State(s, z, best, s, best_zero)


def _run_whole(
    w: Tensor, state: _State, iterations: range, scheme: QuantScheme, dtype: torch.dtype
) -> _State:
    """Move the scales, rounded to dtype, and the whole zero-points of groups w [width, groups]."""
    s, z, best, best_scale, best_zero = (getattr(state, f.name) for f in fields(state))
    d, c, scratch = torch.empty_like(w), torch.empty_like(w), torch.empty_like(w)
    bits = torch.empty(w.shape, dtype=torch.int32)
    for iteration in iterations:
        torch.div(w, s, out=d)
        torch.round(d, out=c).clamp_(-z, scheme.max_code - z)
        d.sub_(c)
        loss = group_sum(torch.abs(d, out=scratch)) * s
        better = loss < best
        best_scale, best_zero = torch.where(better, s, best_scale), torch.where(better, z, best_zero)
        best = torch.where(better, loss, -torch.inf)
        clipped = _clip(d, s, iteration, bits, scratch)
        along = group_sum(torch.mul(clipped, c, out=d))
        square = group_sum(torch.mul(c, c, out=d))
        new = torch.where(square > 0, s * (1 + along / square.clamp(min=1)), s).to(dtype).float()
        new = torch.where((new >= TINY_SCALE) & (new < torch.inf), new, s)
        total = group_sum(c)
        shift = total - s / new * (total + group_sum(clipped))
        z = (z + shift / len(w)).round_().clamp_(0, scheme.max_code)
        s = new
    return _State(s, z, best, best_scale, best_zero)
