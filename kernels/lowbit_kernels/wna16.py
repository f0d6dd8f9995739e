"""y = x Wᵀ + bias for n-bit weights and 16-bit (or fp32) activations, straight from the stored words.

    y[m, n] = bias[n] + Σ_g s[n, g] · (Σ_k x[m, k] · (q[n, k] - c)  -  (z[n, g] - c) · Σ_k x[m, k])

over k in group g, with c = 2^(bits-1), so the products are of x and small whole numbers, exact in fp16 and
bf16; scales and zero-points, whole or fractional, act on the fp32 sums. A symmetric weight has z = c and no
second term.

Words stay in the order of the checkpoint, [N, W], rows contiguous. A program owns a [BLOCK_M, BLOCK_N] tile
of y and walks along K: every word of its rows is loaded once and unpacked in registers. With few tokens the
walk is split over SPLIT_K programs that write fp32 partial sums, added by a second kernel in a fixed order.

Bytes moved: the words once per row of tiles, x once per column of tiles, SPLIT_K · M · N · 8 for the split.
This is the plain baseline: right everywhere, and the yardstick for the faster variants.
"""

import torch
from torch import Tensor

from .device import jit, launch, tl, unpack_codes, unpack_codes_3


@jit(do_not_specialize=["m", "blocks_per_split"])
def wna16_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    groups,
    blocks_per_split,
    stride_xm,
    stride_xk,
    stride_om,
    stride_on,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of y, or of one slice of its partial sums.

    x: [m, k].  words: [n, ceil(k · BITS / 32)] int32.  scale, zero: [n, groups].  bias: [n].
    out: [m, n] in x's dtype; with SPLIT_K > 1 fp32 [SPLIT_K, m, n], contiguous.
    GROUP_SIZE: a multiple of BLOCK_K, or 0 when the row is one group.
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    # neighbouring programs share the weights, which are the larger operand
    rows_m = (pid % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_n = (pid // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = rows_m < m
    in_n = rows_n < n
    x_rows = x_ptr + rows_m.to(tl.int64)[:, None] * stride_xm
    width = tl.cdiv(k * BITS, 32)
    word_rows = words_ptr + rows_n.to(tl.int64)[:, None] * width
    grid_rows = rows_n.to(tl.int64) * groups

    centre: tl.constexpr = 1 << (BITS - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(k, BLOCK_K))
    for block in range(first, last):
        ks = block * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = in_m[:, None] & (ks < k)[None, :]
        x = tl.load(x_rows + ks.to(tl.int64)[None, :] * stride_xk, mask=x_mask, other=0.0)

        # words past the row read as 0; x is 0 there
        if BITS == 3:
            columns = (block * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)) * 3
            w0 = tl.load(
                word_rows + columns[None, :], mask=in_n[:, None] & (columns < width)[None, :], other=0
            )
            w1 = tl.load(
                word_rows + columns[None, :] + 1, mask=in_n[:, None] & (columns + 1 < width)[None, :], other=0
            )
            w2 = tl.load(
                word_rows + columns[None, :] + 2, mask=in_n[:, None] & (columns + 2 < width)[None, :], other=0
            )
            codes = unpack_codes_3(w0, w1, w2, BLOCK_N, BLOCK_K // 32)
        else:
            columns = block * (BLOCK_K * BITS // 32) + tl.arange(0, BLOCK_K * BITS // 32)
            words = tl.load(
                word_rows + columns[None, :], mask=in_n[:, None] & (columns < width)[None, :], other=0
            )
            codes = unpack_codes(words, BLOCK_N, BLOCK_K * BITS // 32, BITS)
        weight = (codes - centre).to(x.dtype)
        part = tl.dot(x, tl.trans(weight), input_precision="ieee")

        group = 0 if GROUP_SIZE == 0 else block * BLOCK_K // GROUP_SIZE
        if HAS_ZERO:
            zero = tl.load(zero_ptr + grid_rows + group, mask=in_n, other=0).to(tl.float32)
            part -= tl.sum(x.to(tl.float32), axis=1)[:, None] * (zero - centre)[None, :]
        scale = tl.load(scale_ptr + grid_rows + group, mask=in_n, other=0.0).to(tl.float32)
        acc += part * scale[None, :]

    out_mask = in_m[:, None] & in_n[None, :]
    if SPLIT_K > 1:
        slice_rows = (split.to(tl.int64) * m + rows_m) * n
        tl.store(out_ptr + slice_rows[:, None] + rows_n[None, :], acc, mask=out_mask)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rows_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        offsets = rows_m.to(tl.int64)[:, None] * stride_om + rows_n.to(tl.int64)[None, :] * stride_on
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@jit(do_not_specialize=["m"])
def reduce_split_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    stride_om,
    stride_on,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[row] = Σ partial[:, row] + bias, slice 0 first.  partial: fp32 [SPLIT_K, m, n], contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < n
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in range(SPLIT_K):
        total += tl.load(partial_ptr + (split * m + row) * n + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    offsets = row * stride_om + columns.to(tl.int64) * stride_on
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


def block_within_group(group_size: int, in_features: int, at_most: int) -> int:
    """Largest power of two, at least 32 and at most `at_most`, whose blocks lie within one group."""
    if group_size == in_features:
        return at_most
    return min(at_most, group_size & -group_size)


def wna16(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    *,
    bits: int,
    group_size: int,
    block_m: int,
    block_n: int,
    block_k: int,
    split_k: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Fill out [M, N] with x [M, K] @ dequantized.T + bias.

    Shapes and dtypes are those of dispatch.matmul, which checks them.
    block_k must not cross a group: see block_within_group().  split_k > 1 allocates fp32 [split_k, M, N].
    """
    m, k = x.shape
    n, groups = scale.shape
    one_group = groups == 1
    if not one_group and group_size % block_k:
        raise ValueError(f"block_k {block_k} does not divide group_size {group_size}")
    blocks = -(-k // block_k)
    split_k = min(split_k, blocks)
    target = out if split_k == 1 else torch.empty((split_k, m, n), dtype=torch.float32, device=x.device)
    launch(
        wna16_kernel,
        (-(-m // block_m) * -(-n // block_n), split_k),
        x,
        words,
        scale,
        scale if zero_point is None else zero_point,
        scale if bias is None else bias,
        target,
        m,
        n,
        k,
        groups,
        -(-blocks // split_k),
        *x.stride(),
        *out.stride(),
        BITS=bits,
        GROUP_SIZE=0 if one_group else group_size,
        HAS_ZERO=zero_point is not None,
        HAS_BIAS=bias is not None and split_k == 1,
        SPLIT_K=split_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if split_k > 1:
        launch(
            reduce_split_kernel,
            (m, -(-n // 256)),
            target,
            scale if bias is None else bias,
            out,
            m,
            n,
            *out.stride(),
            HAS_BIAS=bias is not None,
            SPLIT_K=split_k,
            BLOCK_N=256,
            num_warps=4,
        )
