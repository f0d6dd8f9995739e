"""Quantize and pack a weight in one launch: the grid of reference.py, the words of layout.py, the same bits.

A program takes ROWS groups, finds their extremes, chooses scale and zero-point, and writes the packed codes.
The weight comes from memory once (the second look at it hits the cache); scales, zero-points and words are
written once: 2 + bits / 8 bytes a weight for a 16-bit source.

Bits equal to the torch path need the same correctly rounded steps: division is div_rn (a plain `/` may be
approximate), rounding is explicit, and no product is added to anything (so none becomes an FMA).
"""

import torch
from torch import Tensor

from .device import jit, launch, pack_codes, pack_codes_3, round_half_even, round_to, tl
from .layout import PackLayout
from .reference import TINY_SCALE, require_finite


@jit()
def quantize_pack_kernel(
    weight_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    total,
    groups,
    group_size,
    width,
    stride_n,
    stride_k,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    TINY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS consecutive groups of a weight [N, K] whose rows have `groups` of them.

    total: N · groups.  words: [N, width] int32.  scale, zero: [N, groups]; zero is unused when SYMMETRIC.
    group_size: a multiple of 32 unless groups is 1, so that every group starts a word.  BLOCK: a multiple of
    32.  TINY: scales below it become 1.
    """
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = index < total
    row = index // groups
    group = index % groups
    weights = weight_ptr + (row * stride_n + group * group_size * stride_k)[:, None]

    lo = tl.full((ROWS,), float("inf"), dtype=tl.float32)
    hi = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    # stays 0 unless a weight is not finite; minima and maxima may drop NaN
    invalid = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, group_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns < group_size)[None, :]
        w = tl.load(weights + columns.to(tl.int64)[None, :] * stride_k, mask=mask, other=0.0).to(tl.float32)
        lo = tl.minimum(lo, tl.min(tl.where(mask, w, float("inf")), axis=1))
        hi = tl.maximum(hi, tl.max(tl.where(mask, w, float("-inf")), axis=1))
        invalid += tl.sum(w - w, axis=1)

    top: tl.constexpr = (1 << BITS) - 1
    centre: tl.constexpr = 1 << (BITS - 1)
    below = -tl.minimum(lo, 0.0)
    if SYMMETRIC:
        s = tl.maximum(tl.div_rn(hi, tl.full((ROWS,), centre - 1, tl.float32)), -lo * (1.0 / centre))
    else:
        s = tl.div_rn(tl.maximum(hi, 0.0) + below, tl.full((ROWS,), top, tl.float32))
    s = tl.where(lo == hi, tl.abs(hi), s) + invalid
    s = round_to(s, scale_ptr.dtype.element_ty)
    s = tl.where(s < TINY, 1.0, s)
    tl.store(scale_ptr + index, s.to(scale_ptr.dtype.element_ty), mask=inside)
    if SYMMETRIC:
        z = tl.full((ROWS,), centre, dtype=tl.float32)
    else:
        z = tl.minimum(round_half_even(tl.div_rn(below, s)), top)
        tl.store(zero_ptr + index, z.to(tl.uint8), mask=inside)

    words = words_ptr + (row * width + group * (group_size * BITS // 32))[:, None]
    # a row of one ragged group ends within a word; its missing codes are 0
    last = tl.cdiv(group_size * BITS, 32)
    for start in range(0, group_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns < group_size)[None, :]
        w = tl.load(weights + columns.to(tl.int64)[None, :] * stride_k, mask=mask, other=0.0).to(tl.float32)
        codes = round_half_even(tl.div_rn(w, tl.broadcast_to(s[:, None], (ROWS, BLOCK)))) + z[:, None]
        codes = tl.where(mask, tl.minimum(tl.maximum(codes, 0.0), top), 0.0).to(tl.int32)
        if BITS == 3:
            columns = (start // 32 + tl.arange(0, BLOCK // 32)) * 3
            for word in tl.static_range(3):
                tl.store(
                    words + columns[None, :] + word,
                    pack_codes_3(codes, word, ROWS, BLOCK // 32),
                    mask=inside[:, None] & (columns + word < last)[None, :],
                )
        else:
            columns = start * BITS // 32 + tl.arange(0, BLOCK * BITS // 32)
            tl.store(
                words + columns[None, :],
                pack_codes(codes, ROWS, BLOCK * BITS // 32, BITS),
                mask=inside[:, None] & (columns < last)[None, :],
            )


def quantize_pack(
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """quantize_groups and pack_words in one launch.

    weight: [N, K] of any float dtype and strides.  group_size: a divisor of K, either K itself or a multiple
    of 32.  out: (words, scale, zero_point) to fill, of the shapes and dtypes returned.
    Returns words [N, ceil(K · bits / 32)] int32, scale [N, K / group_size] in scale_dtype and zero_point
    [N, K / group_size] uint8, None when symmetric.
    Raises ValueError where quantize_groups does, for other group sizes, and for an `out` that does not fit.
    """
    n, k = weight.shape
    if group_size < 1 or k % group_size or (group_size != k and group_size % 32):
        raise ValueError(f"group_size {group_size} must divide in_features {k} and be it or a multiple of 32")
    groups, width = k // group_size, PackLayout(bits).width(k)
    if out is None:
        words = torch.empty((n, width), dtype=torch.int32, device=weight.device)
        scale = torch.empty((n, groups), dtype=scale_dtype, device=weight.device)
        zero = None if symmetric else torch.empty((n, groups), dtype=torch.uint8, device=weight.device)
    else:
        words, scale, zero = out
        fits = tuple(words.shape) == (n, width) and tuple(scale.shape) == (n, groups)
        if (
            not fits
            or words.dtype != torch.int32
            or scale.dtype != scale_dtype
            or (zero is None) != symmetric
        ):
            raise ValueError(f"out does not fit [{n}, {width}] words with {groups} groups of {scale_dtype}")
        if not all(t is None or (t.is_contiguous() and t.device == weight.device) for t in out):
            raise ValueError("out must be contiguous and on the weight's device")
    block = min(2048, 1 << (max(group_size, 32) - 1).bit_length())
    rows = max(1, 2048 // block)
    launch(
        quantize_pack_kernel,
        (-(-n * groups // rows),),
        weight,
        words,
        scale,
        scale if zero is None else zero,
        n * groups,
        groups,
        group_size,
        width,
        *weight.stride(),
        BITS=bits,
        SYMMETRIC=symmetric,
        TINY=TINY_SCALE,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    require_finite(scale)
    return words, scale, zero
