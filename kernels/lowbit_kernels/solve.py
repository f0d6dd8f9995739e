"""Inner loops of the solvers that would be thousands of launches: half-quadratic grids, columns of a block.

hqq_groups: a program holds ROWS groups in registers for all iterations, so that the weight is read once and
codes, scales and zero-points are written once: 2 + 1 bytes a weight for a 16-bit source, and about 30
instructions a weight and iteration. lowbit.solvers.half_quadratic is the same arithmetic in torch, bit for
bit: sums over a group by halving (a sum of two is the same in any order), division by div_rn, powers from the
bits of a float, and no fused multiply-add.

round_block: the columns of a block of GPTQ or coordinate descent in one launch,

    code_j = to the grid(t_j),   δ_j = code_j step_j - base_j,   t_k += feed_jk δ_j  for k > j

with the block's targets [B, ROWS] in registers; 16 bytes a weight in, 8 out.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .device import jit, launch, round_half_even, round_to, tl
from .reference import TINY_SCALE, require_finite

# Half-quadratic splitting: the norm, and the weight β κ^iteration of its penalty.
POWER = 0.7
BETA = 10.0
KAPPA = 1.01

# The bits of a positive float, read as an integer, are 2^23 (log2 x + 127) with at most 0.086 of the former
# missing; half of that is put back.
BIAS = int((127 - 0.043) * 2**23)
# scales further from 1 than 2^40 shrink as 2^±40 does: keeps the sums of logarithms in int32
SCALE_RANGE = 40 << 23
# log2 of |d|^(p-1) s^(p-2) / β without the terms in d, s and the iteration; and its change per iteration
_START = int((127 - 0.043) * (2 - POWER) * 2**23) - int(math.log2(BETA) * 2**23)
_STEP = int(math.log2(KAPPA) * 2**23)


def threshold_bits(scale_log: Tensor, iteration: int) -> Tensor:
    """What is added to (POWER - 1) · bits(|d|) to get the bits of the threshold s^(p-2) |d|^(p-1) / β.

    scale_log: int32, bits of the scale less BIAS.  Returns int32.
    """
    power = scale_log.clamp(-SCALE_RANGE, SCALE_RANGE).float() * (POWER - 2)
    return power.to(torch.int32) + (_START - iteration * _STEP)


@jit()
def _halving_sum(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """Sums of x [ROWS, 2^LOG] along its rows: first half plus second half, until one is left."""
    for level in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, (ROWS, 2, 1 << (LOG - 1 - level))), axis=1)
    return tl.reshape(x, (ROWS,))


@jit()
def hqq_kernel(
    weight_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    total,
    group_size,
    iterations,
    BITS: tl.constexpr,
    FRACTIONAL: tl.constexpr,
    TINY: tl.constexpr,
    SUBNORMAL: tl.constexpr,
    POWER: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_RANGE: tl.constexpr,
    START: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """ROWS consecutive groups of weights [total, group_size], group_size <= 2^LOG."""
    WIDTH: tl.constexpr = 1 << LOG
    top: tl.constexpr = (1 << BITS) - 1
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = index < total
    columns = tl.arange(0, WIDTH)
    mask = inside[:, None] & (columns < group_size)[None, :]
    at = index[:, None] * group_size + columns[None, :]
    w = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(tl.abs(w) <= SUBNORMAL, 0.0, w)
    count = tl.zeros((ROWS,), tl.float32) + group_size

    lo = tl.min(tl.where(mask, w, float("inf")), axis=1)
    hi = tl.max(tl.where(mask, w, float("-inf")), axis=1)
    # 0 unless a weight is not finite; minima and maxima may drop NaN
    invalid = tl.sum(w - w, axis=1)
    if FRACTIONAL:
        s = tl.div_rn(hi - lo, tl.full((ROWS,), top, tl.float32))
    else:
        s = tl.div_rn(tl.maximum(hi, 0.0) - tl.minimum(lo, 0.0), tl.full((ROWS,), top, tl.float32))
    s = tl.where(lo == hi, tl.abs(hi), s) + invalid
    s = round_to(s, scale_ptr.dtype.element_ty)
    s = tl.where(s < TINY, 1.0, s)
    if FRACTIONAL:
        z = tl.div_rn(-lo, s)
    else:
        z = tl.minimum(round_half_even(tl.div_rn(-tl.minimum(lo, 0.0), s)), top)

    best_scale = s
    best_zero = z
    best = tl.full((ROWS,), float("inf"), tl.float32)
    u = tl.div_rn(w, tl.broadcast_to(s[:, None], (ROWS, WIDTH)))
    for iteration in range(iterations):
        if FRACTIONAL:
            moved = u + z[:, None]
            q = tl.minimum(tl.maximum(round_half_even(moved), 0.0), top)
            d = tl.where(mask, moved - q, 0.0)
        else:
            c = tl.minimum(tl.maximum(round_half_even(u), -z[:, None]), top - z[:, None])
            c = tl.where(mask, c, 0.0)
            d = u - c
        loss = _halving_sum(tl.abs(d), ROWS, LOG) * s
        better = loss < best
        best_scale = tl.where(better, s, best_scale)
        best_zero = tl.where(better, z, best_zero)
        # a group that did not improve never does again
        best = tl.where(better, loss, float("-inf"))

        scale_log = s.to(tl.int32, bitcast=True) - BIAS
        scale_log = tl.minimum(tl.maximum(scale_log, -SCALE_RANGE), SCALE_RANGE)
        offset = (scale_log.to(tl.float32) * (POWER - 2)).to(tl.int32) + (START - iteration * STEP)
        bits = tl.abs(d).to(tl.int32, bitcast=True)
        bits = (bits.to(tl.float32) * (POWER - 1)).to(tl.int32) + offset[:, None]
        threshold = bits.to(tl.float32, bitcast=True)
        clipped = tl.maximum(tl.minimum(d, threshold), -threshold)
        if FRACTIONAL:
            z = z - tl.div_rn(_halving_sum(clipped, ROWS, LOG), count)
        else:
            along = _halving_sum(clipped * c, ROWS, LOG)
            square = _halving_sum(c * c, ROWS, LOG)
            new = s * (1.0 + tl.div_rn(along, tl.maximum(square, 1.0)))
            new = round_to(tl.where(square > 0, new, s), scale_ptr.dtype.element_ty)
            new = tl.where((new >= TINY) & (new < float("inf")), new, s)
            sum_c = _halving_sum(c, ROWS, LOG)
            shift = sum_c - tl.div_rn(s, new) * (sum_c + _halving_sum(clipped, ROWS, LOG))
            z = tl.minimum(tl.maximum(round_half_even(z + tl.div_rn(shift, count)), 0.0), top)
            s = new
            u = tl.div_rn(w, tl.broadcast_to(s[:, None], (ROWS, WIDTH)))

    u = tl.div_rn(w, tl.broadcast_to(best_scale[:, None], (ROWS, WIDTH)))
    shifted = u + best_zero[:, None]
    q = round_half_even(shifted) if FRACTIONAL else round_half_even(u) + best_zero[:, None]
    q = tl.minimum(tl.maximum(q, 0.0), top)
    tl.store(codes_ptr + at, q.to(tl.uint8), mask=mask)
    tl.store(scale_ptr + index, best_scale.to(scale_ptr.dtype.element_ty), mask=inside)
    tl.store(zero_ptr + index, best_zero.to(zero_ptr.dtype.element_ty), mask=inside)


def hqq_constants(bits: int, fractional: bool, log: int, rows: int) -> dict[str, Any]:
    """The constexprs of hqq_kernel for `rows` groups of at most 2^log weights a program."""
    return {
        "BITS": bits,
        "FRACTIONAL": fractional,
        "TINY": TINY_SCALE,
        "SUBNORMAL": torch.finfo(torch.float32).tiny,
        "POWER": POWER,
        "BIAS": BIAS,
        "SCALE_RANGE": SCALE_RANGE,
        "START": _START,
        "STEP": _STEP,
        "ROWS": rows,
        "LOG": log,
    }


def hqq_groups(
    weight: Tensor,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype,
    fractional: bool,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit and quantize the groups of weight [N, K] (any float dtype) in one launch.

    Returns codes [N, K] uint8, scale [N, K / group_size] in scale_dtype and zero_point of that shape, float32
    if fractional, else uint8.
    Raises ValueError if groups do not fill the row or a scale is not finite in scale_dtype.
    """
    n, k = weight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(f"in_features {k} is not a multiple of group_size {group_size}")
    weight = weight.contiguous()
    shape = (n, k // group_size)
    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(shape, dtype=scale_dtype, device=weight.device)
    zero = torch.empty(shape, dtype=torch.float32 if fractional else torch.uint8, device=weight.device)
    log = (group_size - 1).bit_length()
    rows = max(1, 2048 >> log)
    launch(
        hqq_kernel,
        (-(-scale.numel() // rows),),
        weight,
        codes,
        scale,
        zero,
        scale.numel(),
        group_size,
        iterations,
        **hqq_constants(bits, fractional, log, rows),
        num_warps=4 if log <= 11 else 8,
        enable_fp_fusion=False,
    )
    require_finite(scale)
    return codes, scale, zero


@jit()
def round_block_kernel(
    target_ptr,
    base_ptr,
    feed_ptr,
    step_ptr,
    low_ptr,
    high_ptr,
    codes_ptr,
    delta_ptr,
    width,
    lanes,
    feed_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS lanes of the width <= WIDTH columns of a block; all [width, lanes] contiguous, feed [width, width]
    with rows feed_stride apart."""
    # offsets stay below 128 · lanes and 128 · K: int32 holds them
    lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = lane < lanes
    column = tl.arange(0, WIDTH)
    at = column[:, None] * lanes + lane[None, :]
    t = tl.load(target_ptr + at, mask=(column < width)[:, None] & inside[None, :], other=0.0)
    for j in range(width):
        here = j * lanes + lane
        x = tl.sum(tl.where((column == j)[:, None], t, 0.0), axis=0)
        s = tl.load(step_ptr + here, mask=inside, other=1.0)
        low = tl.load(low_ptr + here, mask=inside, other=0.0)
        high = tl.load(high_ptr + here, mask=inside, other=0.0)
        q = tl.minimum(tl.maximum(round_half_even(tl.div_rn(x, s)), low), high)
        delta = q * s - tl.load(base_ptr + here, mask=inside, other=0.0)
        tl.store(codes_ptr + here, q, mask=inside)
        tl.store(delta_ptr + here, delta, mask=inside)
        feed = tl.load(feed_ptr + j * feed_stride + column, mask=(column > j) & (column < width), other=0.0)
        t += feed[:, None] * delta[None, :]


def round_block(
    target: Tensor, base: Tensor, feed: Tensor, step: Tensor, low: Tensor, high: Tensor, codes: Tensor
) -> Tensor:
    """Run the loop above; return δ [B, N].

    target, base, step, low, high: [B, N] float32.  feed: [B, B] float32, used above the diagonal.
    codes: [B, N] float32, written.  Raises ValueError for other shapes or layouts.
    """
    width, lanes = target.shape
    for name, tensor in (
        ("target", target),
        ("base", base),
        ("step", step),
        ("low", low),
        ("high", high),
        ("codes", codes),
    ):
        if tensor.shape != (width, lanes) or not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be contiguous float32 [{width}, {lanes}]")
    if feed.shape != (width, width) or feed.stride(1) != 1 or feed.dtype != torch.float32:
        raise ValueError(f"feed must be float32 [{width}, {width}] with contiguous rows")
    delta = torch.empty_like(target)
    rows = 16
    launch(
        round_block_kernel,
        (-(-lanes // rows),),
        target,
        base,
        feed,
        step,
        low,
        high,
        codes,
        delta,
        width,
        lanes,
        feed.stride(0),
        WIDTH=max(16, 1 << (width - 1).bit_length()),
        ROWS=rows,
        num_warps=4,
    )
    return delta
